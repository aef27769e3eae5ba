"""The doctor command: facts, warnings, and machines where much is missing."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers.kernel_internals import load_library
from helpers.planning_cases import CPU

from flexgen_h2o.commands import doctor
from flexgen_h2o.commands.doctor import inspection
from flexgen_h2o.commands.doctor.inspection import (
    DiskFacts,
    Gpu,
    GpuFacts,
    KernelFacts,
    MemoryFacts,
    ProcessorFacts,
)
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.planning import calibrate

GB = 10**9
TITLES = ["versions", "environment", "processor", "kernels", "GPU", "memory", "disk", "cache"]
QUICK = ProcessorFacts("EPYC", 8, 4, None, 4, 0.1)
AVX512 = KernelFacts(None, ("portable", "avx512"), "avx512", None, "abc 12", {"linear": "pytorch"})


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """Measure with a small file, on a machine without measured rates."""
    monkeypatch.setattr(inspection.disk, "__defaults__", (1 << 20,))
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    for name in inspection.VARIABLES:
        if name != "FLEXGEN_H2O_CACHE":
            monkeypatch.delenv(name, raising=False)


def diagnosis(capsys, folder) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the printed sections with their rows, and the lines on slow settings."""
    assert doctor.main(["--offload-dir", str(folder)]) == 0
    sections: dict[str, dict[str, str]] = {}
    name = ""
    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= 80 or str(folder)[:20] in line
        if not line.startswith(" "):
            rows = sections.setdefault(line, {})
        elif line[2] == " ":  # the row goes on
            rows[name] += f" {line.strip()}"
        else:
            name = line[2:26].strip()
            rows[name] = line[26:].strip() if line[2] != "-" else line[4:]
    *titles, verdict = sections
    assert titles == TITLES and (verdict == "slow here") == bool(sections[verdict])
    return sections, [*sections.pop(verdict).values()]


def test_doctor_leaves_the_machine_unchanged(capsys, tmp_path):
    sections, _ = diagnosis(capsys, tmp_path / "not" / "there")
    assert sections["versions"]["torch"] == torch.__version__
    assert sections["environment"] == {"FLEXGEN_H2O_CACHE": str(tmp_path / "cache")}
    assert sections["processor"]["threads"].startswith("1 that compute")
    if cpu_library.missing() is None:
        assert sections["kernels"]["instruction set"] == cpu_library.instruction_set()
        assert sections["kernels"]["measured"].startswith("not yet: flexgen-h2o plan")
        assert {"linear", "linear_quantized", "prefill_attention"} <= {*sections["kernels"]}
    assert sections["disk"]["folder"].startswith(f"{tmp_path} (")
    assert "GB/s" in sections["disk"]["reads"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_reports_a_machine_where_nothing_works(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    load_library(monkeypatch, lambda: "the C++ kernels were not built")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(inspection, "package_version", lambda name: "")
    monkeypatch.setattr(inspection, "memory", Mock(side_effect=RuntimeError("no\n/proc here")))
    sections, slow = diagnosis(capsys, tmp_path / "file" / "below")
    assert sections["versions"]["torch"] == "not installed"
    assert sections["kernels"]["C++"] == "none: the C++ kernels were not built"
    assert sections["memory"] == {"cannot be inspected": "RuntimeError: no /proc here"}
    assert "is a file" in sections["disk"]["cannot be used"]
    assert len([line for line in slow if "(load" not in line]) == 3
    monkeypatch.setattr("flexgen_h2o.storage.free_memory.nearest_folder",
                        Mock(side_effect=PermissionError(13, "Permission denied", "/secret")))
    assert "Permission denied" in inspection.disk("/secret").problem
    monkeypatch.undo()
    monkeypatch.setattr(inspection.shutil, "disk_usage",
                        lambda path: SimpleNamespace(total=9, free=1))
    assert inspection.disk(str(tmp_path), 1 << 20).problem == "the disk is full"


@pytest.mark.skipif(cpu_library.missing() is not None, reason="no C++ kernels")
def test_doctor_reports_missing_and_forced_instruction_sets(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_ISA", "neon")
    sections, slow = diagnosis(capsys, tmp_path)
    assert "this machine has portable" in sections["kernels"]["instruction set"]
    assert any("FLEXGEN_H2O_ISA=neon forces" in line for line in slow)
    monkeypatch.setenv("FLEXGEN_H2O_ISA", "portable")
    monkeypatch.setattr(calibrate, "load_calibration", lambda device, offload_dir: CPU)
    sections, slow = diagnosis(capsys, tmp_path)
    assert sections["kernels"]["instruction set"] == "portable"
    assert "measured" not in sections["kernels"]
    assert any("plain vectors" in line for line in slow)


def test_measured_choices_are_listed_by_operation(monkeypatch):
    winners = {"linear_quantized": {4: {1: "codes", 16: "codes", 64: "unpacked"}}}
    compute = SimpleNamespace(compute=SimpleNamespace(implementations=winners))
    monkeypatch.setattr(calibrate, "load_calibration", lambda device, offload_dir: compute)
    monkeypatch.setattr("flexgen_h2o.kernels.dispatch.available",
                        lambda operation, rows, dtype: ("codes", "unpacked"))
    assert inspection.measured_choices("here") == {
        "linear_quantized, 4 bits": "codes up to 16, then unpacked"}


def test_the_time_that_a_cgroup_allows(tmp_path):
    path = tmp_path / "cpu.max"
    for text, quota in (("max 100000\n", None), ("250000 100000\n", 2.5), ("odd", None)):
        path.write_text(text)
        assert inspection.cpu_quota(path) == quota
    assert inspection.cpu_quota(tmp_path / "none") is None


@pytest.mark.parametrize("section, words", [
    (doctor.processor(QUICK), ()),
    (doctor.processor(ProcessorFacts("EPYC", 8, 4, 1.5, 4, 0.1)), ("OMP_NUM_THREADS=1",)),
    (doctor.processor(ProcessorFacts("EPYC", 8, 8, None, 1, 5.0)), ("1 of 8 CPUs", "load 5")),
    (doctor.environment({"OMP_WAIT_POLICY": "active", "FLEXGEN_H2O_KERNELS": "reference"}),
     ("FLEXGEN_H2O_KERNELS=reference", "OMP_WAIT_POLICY")),
    (doctor.kernels(replace(AVX512, chosen="avx512bf16", lacking=("amx",))), ("reinstall",)),
    (doctor.gpus(GpuFacts((Gpu("T4", GB, GB),), "12.4", True, False)), ("Triton",)),
    (doctor.gpus(GpuFacts((), None, True, True)), ("built without CUDA",)),
    (doctor.memory(MemoryFacts(64 * GB, 60 * GB, 8 * GB, 3 * GB)), ("3.0 GB",)),
    (doctor.disk(DiskFacts("/d", "ext4", 9 * GB, 5 * GB, 0.1e9, 1e9)), ("0.1 GB/s",)),
    (doctor.disk(DiskFacts("/d", "tmpfs", 9 * GB, 5 * GB, 0.1e9, 1e9)), ("tmpfs",))])
def test_slow_settings_are_explained(section, words):
    assert len(section.slow) == len(words)
    assert all(word in line for line, word in zip(section.slow, words, strict=True))
    assert len(section.text().splitlines()) > len(section.rows)
    lines = [line.replace("\n    ", " ") for line in doctor.verdict([section])]
    assert lines[1:] == [f"  - {line}" for line in section.slow]
