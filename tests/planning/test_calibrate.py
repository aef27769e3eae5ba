"""Calibration: every rate is measured, kept, and no file is left."""

import logging
import math
import os
import shutil
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from helpers import kernel_internals
from helpers.fakes import LazyDevice

from flexgen_h2o.config.weight_layout import WEIGHT_BITS
from flexgen_h2o.kernels import dispatch
from flexgen_h2o.kernels.implementations import IMPLEMENTATIONS
from flexgen_h2o.metrics.trace import LINKS
from flexgen_h2o.planning import calibrate as module
from flexgen_h2o.planning import compute_rates
from flexgen_h2o.planning.calibrate import calibrate
from flexgen_h2o.planning.compute_rates import MIN_CALLS, DecodeStep, Rates, Sizes, Timer
from flexgen_h2o.planning.hardware import BITS, HOST_LINKS, Hardware, load_hardware, save_hardware
from flexgen_h2o.storage import free_memory
from flexgen_h2o.storage.device import Device

TINY = Sizes(matrix=(48, 128), rows=(1, 3), rotated=1 << 16, heads=2, head_dim=32, prompts=(2, 8),
             sequences=2, slots=(4, 16), recalled=(8, 32), hidden=64, layer_rows=8,
             logits=(2, 100), scratch=1 << 20, copied=1 << 16, seconds=0.004)


def ignore(words: str) -> None:
    assert words


def figures(value) -> list[float]:
    """All numbers in a dataclass of mappings and numbers."""
    if hasattr(value, "__dataclass_fields__"):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        return [figure for one in value.values() for figure in figures(one)]
    return [value] if isinstance(value, (int, float)) else []


def check(hardware: Hardware, *, count: int) -> None:
    """Check that there are `count` rates that are finite and above 0."""
    unmeasured = ["interference", "read_interference"]
    unmeasured += ["fetch_seconds", "fetch_head_seconds"] if hardware.has_gpu else []
    rates = figures(replace(hardware, **dict.fromkeys(unmeasured)))
    assert len(rates) == count and all(math.isfinite(rate) and rate > 0 for rate in rates)
    assert 0 <= hardware.interference <= 1 and 0 <= hardware.read_interference <= 1
    compute = hardware.compute
    assert {bits: {*table} for bits, table in compute.linear.items()} == {
        bits: {1, 3} for bits in WEIGHT_BITS}
    assert {*compute.prefill_attention} == {*compute.query_seconds} == {"plain", "scored"}
    assert {*compute.caching} == {*compute.decode_attention} == {*BITS}


# Of memory 2, links 2, products 8 and of rounded activations 4, attention 4 + 3, caching 3, recall
# 5, 7 single ones.
CPU_FIGURES = 38


def test_calibration_of_a_cpu(tmp_path):
    messages = []
    hardware = calibrate(Device(), tmp_path / "new", progress=messages.append, sizes=TINY)
    check(hardware, count=CPU_FIGURES)
    assert not hardware.has_gpu and hardware.host_attention is None
    assert set(hardware.links) == set(HOST_LINKS)
    assert {bits: set(table) for bits, table in hardware.compute.rounded_linear.items()} == {
        8: {1, 3}, 4: {1, 3}}
    assert messages and all(isinstance(words, str) for words in messages)
    assert list((tmp_path / "new").iterdir()) == []
    save_hardware(hardware, tmp_path / "kept.yaml")
    assert load_hardware(tmp_path / "kept.yaml") == hardware
    few, many = Sizes.for_device(Device()), Sizes.for_device(LazyDevice())
    assert many.rotated > few.rotated >= 256 << 20 and many.matrix > few.matrix


def test_calibration_of_a_gpu(tmp_path):
    hardware = calibrate(LazyDevice(), tmp_path, progress=ignore, sizes=TINY)
    # Its memory, two links, host attention; no layer is bound there.
    check(hardware, count=CPU_FIGURES - 2 - 4 - 1 + 1 + 2 + 4)
    assert not hardware.compute.rounded_linear
    assert hardware.gpu_bytes == LazyDevice().total_bytes()
    assert set(hardware.links) == set(LINKS)
    assert set(hardware.host_attention.decode_attention) == set(BITS)


def test_the_fastest_implementation_is_kept(monkeypatch, isa):
    """Of every product that can be done in several ways, by operation, bits and rows."""
    def seconds(clock, work, *, give_up=None):
        places = sum(IMPLEMENTATIONS[operation].index(
            dispatch.select_implementation(operation, rows, torch.bfloat16, bits))
            for operation, bits, rows in cases)
        return 9.0 - places if last else 1.0 + places

    cases = [("linear", 16, 1), ("linear", 16, 3), *(
        ("linear_quantized", bits, rows) for bits in (12, 8, 4) for rows in (1, 3)),
        ("prefill_attention", 16, 16)]
    monkeypatch.setattr(Timer, "seconds", seconds)
    for last in (False, True):
        compute_rates = Rates(Device(), torch.bfloat16, TINY)
        for bits in WEIGHT_BITS:
            compute_rates.linear(bits)
        compute_rates.prefill_attention(scored=True)
        compute_rates.prefill_attention(scored=False)
        wanted = {}
        for operation, bits, rows in cases if isa else ():
            possible = dispatch.available(operation, rows, torch.bfloat16)
            if len(possible) > 1:
                wanted.setdefault(operation, {}).setdefault(bits, {})[rows] = possible[-last]
        assert compute_rates.implementations == wanted


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXGEN_H2O_NATIVE", str(tmp_path / "none.so"))
    kernel_internals.forget_kernels()
    yield
    monkeypatch.undo()
    kernel_internals.forget_kernels()


def test_without_the_library_the_reference_is_measured(tmp_path, no_library, monkeypatch):
    kernel_internals.refuse_calls(monkeypatch)
    check(calibrate(Device(), tmp_path / "run", progress=ignore, sizes=TINY),
          count=CPU_FIGURES - 1)  # no layer is bound


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_calibration_that_breaks_off_leaves_no_file(error, tmp_path, monkeypatch):
    seen = []

    def fail(path, **options):
        seen.extend(tmp_path.rglob("*.bin"))
        raise error

    monkeypatch.setattr(module, "disk_read_rate", fail)
    with pytest.raises(error):
        calibrate(Device(), tmp_path, progress=ignore, sizes=TINY)
    assert seen and list(tmp_path.iterdir()) == []


def test_measured_tensors_are_random(monkeypatch):
    """Matmuls and attention of zeros may be faster, and so are weights that stay in a CPU cache."""
    calls = []

    def watched(x, weight, bias=None, *, out):
        calls.append((weight.data_ptr(), x, weight, out))
        return torch.mm(x, weight.t(), out=out)

    monkeypatch.setattr(compute_rates, "linear", watched)
    Rates(Device(), torch.bfloat16, TINY).linear(16)
    weights = {address for address, *_ in calls}
    assert len(weights) * 48 * 128 * 2 >= TINY.rotated
    assert len({address for address, *_ in calls[: len(weights)]}) > 1
    assert all(x.count_nonzero() == x.numel() and weight.std() > 0.1 for _, x, weight, _ in calls)
    assert len({out.data_ptr() for *_, out in calls}) == len(TINY.rows)


def test_a_decode_step_evicts_every_time():
    slots = torch.randn(2, 1, 2, 6, 32, dtype=torch.bfloat16)
    before = slots.clone()
    step = DecodeStep(slots, bits=16, head_dim=32)
    for written in (1, 2, 3):
        q, k, v = torch.randn(3, 1, 2, 32, dtype=torch.bfloat16)
        assert step(q, k, v).isfinite().all()
        changed = (slots != before).any(-1).sum(-1)
        assert (changed == written).all()


class FakeTime:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, *seconds: float):
        """Takes the next of `seconds` a call, and the last one from then on."""
        left = list(seconds)

        def call() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_the_timer_takes_the_median_after_a_warm_up(monkeypatch):
    time = FakeTime()
    monkeypatch.setattr(compute_rates, "time", time)
    timer = Timer(Device(), seconds=1.0)
    warm = [50.0] + [0.125] * MIN_CALLS
    assert timer.seconds(time.work(*warm, 2.0)) == 2.0
    assert timer.seconds(time.work(*warm, 3.0, 90.0, 1.0, 3.0, 90.0, 2.0, 3.0)) == 3.0
    assert timer.difference(time.work(*warm, 3.0), time.work(*warm, 1.0)) == 2.0
    began = time.now
    assert timer.seconds(time.work(2.0**-14)) == 2.0**-14
    assert 0.9 < time.now - began < 1.1
    # A slow call is not repeated often, and one far behind another implementation three times.
    began = time.now
    assert timer.seconds(time.work(1.0, 2.0)) == 2.0 and time.now - began == 1 + 2 * MIN_CALLS
    began = time.now
    assert timer.seconds(time.work(9.0, 5.0, 4.0), give_up=4.0) == 4.0
    assert time.now - began == 18
    assert timer.seconds(time.work(9.0, 5.0, 3.0), give_up=4.0) == 3.0


def test_more_rows_never_take_less(monkeypatch):
    taken = iter([5.0, 7.0, 2.0, 3.0])
    monkeypatch.setattr(Timer, "seconds", lambda clock, work: next(taken))
    sizes = replace(TINY, matrix=(16, 64), rows=(1, 2, 4, 8))
    table = Rates(Device(), torch.float32, sizes).linear(4)
    scale = 1e9 / (16 * 64)
    assert table == {1: 2.0 * scale, 2: 2.0 * scale, 4: 5.0 * scale, 8: 5.0 * scale}
    assert list(table) == [1, 2, 4, 8]


@pytest.fixture
def calls(tmp_path, monkeypatch, tiny_hardware) -> list:
    """A cache of its own, and a fake calibration that records its folders."""
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    folders = []

    def calibrate(device, offload_dir, *, progress):
        folders.append(offload_dir)
        return replace(tiny_hardware, name=f"call {len(folders)}")

    monkeypatch.setattr(module, "calibrate", calibrate)
    return folders


@pytest.fixture(scope="module")
def tiny_hardware(tmp_path_factory):
    return calibrate(Device(), tmp_path_factory.mktemp("offload"), progress=ignore, sizes=TINY)


def this_machine(folder, **options) -> Hardware:
    return module.load_or_calibrate(Device(), folder, progress=ignore, **options)


def test_a_machine_is_measured_once(tmp_path, calls, monkeypatch, caplog):
    assert module.load_calibration(Device(), tmp_path) is None
    first = this_machine(tmp_path / "not" / "there")
    assert module.load_calibration(Device(), tmp_path) == first
    assert this_machine(tmp_path) == first  # the same disk
    assert calls == [tmp_path / "not" / "there"]
    assert this_machine(tmp_path, recalibrate=True).name == "call 2"
    assert this_machine(tmp_path).name == "call 2"
    path, = (tmp_path / "cache" / "hardware").iterdir()
    path.write_text(path.read_text().replace("cpu_gb", "cpu_pounds"))
    with caplog.at_level(logging.WARNING):
        assert this_machine(tmp_path).name == "call 3"
    assert "cpu_pounds" in caplog.text
    monkeypatch.setattr("flexgen_h2o.storage.free_memory.cgroup_limit", lambda: 54321)
    hardware = this_machine(tmp_path)
    assert (hardware.name, hardware.cpu_bytes) == ("call 3", 54321), "sizes are not cached"


class FakeFolder(os.PathLike):
    """A folder whose first name is its disk."""

    def __init__(self, path):
        self._disk = path.split("/")[0]

    def __fspath__(self):
        return "/"

    def stat(self):
        return SimpleNamespace(st_dev=self._disk)


def test_several_disks_count_as_one(calls, monkeypatch, tiny_hardware):
    """Compute is measured once."""
    rates = {"fast/a": 4e9, "slow": 1e9}  # of the first folder on each disk

    def links(rates_of_device, device, folder, progress):
        return {"disk->cpu": rates[folder], "cpu->disk": 1e9}, {}

    def counted(device, folder, *, progress):
        calls.append(folder)
        return replace(tiny_hardware, links=links(None, device, folder, progress)[0])

    monkeypatch.setattr(module, "_links", links)
    monkeypatch.setattr(module, "calibrate", counted)
    for place in (module, free_memory):
        monkeypatch.setattr(place, "nearest_folder", FakeFolder)
    folders = ["fast/a", "slow", "fast/b"]
    assert module.load_calibration(Device(), folders) is None
    assert module.by_measured_rates(Device(), folders).stripes == (1, 1, 1)
    hardware = this_machine(folders)
    assert hardware.links == pytest.approx({"disk->cpu": 5e9, "cpu->disk": 1.25e9})
    assert calls == ["fast/a"]
    assert module.load_calibration(Device(), folders).links == hardware.links
    dirs = module.by_measured_rates(Device(), folders)
    assert dirs.stripes == (2, 1, 2), "the folders on one disk divide its rate"
    assert free_memory.whole_memory(dirs, None).disk_bytes == int(
        shutil.disk_usage("/").total / 0.8), "until the fast one is full"


def test_changed_environment_is_calibrated_again(tmp_path, calls, monkeypatch):
    this_machine(tmp_path)
    for count, (target, name, value) in enumerate((
            (module.platform, "node", lambda: "other/host"), (module.torch, "__version__", "9.9"),
            (module, "VERSION", "9.9"), (module.cpu_library, "build", lambda: "other sources"),
            (module.torch, "get_num_threads", lambda: 99),
            (module.cpu_library, "missing", lambda: "not built")), 2):
        with monkeypatch.context() as changed:
            changed.setattr(target, name, value)
            assert this_machine(tmp_path).name == this_machine(tmp_path).name == f"call {count}"
    assert this_machine(tmp_path).name == "call 1"


@pytest.mark.parametrize("name", ["file", 300 * "a"])
def test_an_unwritable_cache_is_no_failure(tmp_path, calls, monkeypatch, caplog, name):
    """Nor one whose path is too long to exist."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / name))
    with caplog.at_level(logging.WARNING):
        assert this_machine(tmp_path).name == "call 1"
    assert "cannot write" in caplog.text
