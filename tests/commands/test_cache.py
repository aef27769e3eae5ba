"""The command cache: its list, and prune."""

import fcntl
import os
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
from helpers.error_cases import command_refused
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.commands import cache
from flexgen_h2o.files.disk_cache import CacheFolder, build_once, entries

DAY = 86400


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def add(root: Path, kind: str, model: str, days: float = 0, name: str = "weights") -> Path:
    """Make a copy of a file, last used some days ago. It is not in use."""
    source = root.parent / f"{name}.bin"
    source.write_text(f"{name} {model}")
    with mock.patch("flexgen_h2o.files.disk_cache._in_use", {}) as opened:
        folder = build_once([source], "4bit", model, lambda target: (target / "w").write_bytes(
            bytes(5000)), cache=CacheFolder(root / kind, ""))
        os.close(opened.popitem()[1])
    moment = time.time() - days * DAY - 60
    os.utime(folder / ".used", (moment, moment))
    return folder


def test_the_list_has_sizes_ages_and_sources(root, capsys):
    add(root, "converted", "org--small", days=3.5)
    (root / "hardware").mkdir()
    (root / "hardware" / "vm-0123456789abcdef.yaml").write_text("rates")
    old = root / "weights" / "gone-8bit-0123456789abcdef"  # of older versions
    old.mkdir(parents=True)
    assert cache.main([]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith(f"{root}: 3 entries, ") and err == ""
    (at,) = [number for number, line in enumerate(lines) if "org--small (4bit)" in line]
    assert "3 d" in lines[at] and "KB" in lines[at]
    assert lines[at + 1].split() == ["from", str(root.parent / "weights.bin")]
    assert any("vm (measured rates)" in line for line in lines)
    (root.parent / "weights.bin").unlink()
    cache.main(["--model", "ORG-*"])
    out = capsys.readouterr().out
    assert "1 entry" in out and "(missing)" in out
    assert cache.main(["prune", "--model", "gone-8bit"]) == 0
    assert not old.exists() and len(entries()) == 2


AGES = st.sampled_from([0, 1, 10, 40])


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), AGES, st.booleans()), max_size=5), AGES,
       st.sampled_from(["a", "b", "*", None]))
def test_prune_removes_selected_entries(copies, age, model):
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(
            os.environ, {"FLEXGEN_H2O_CACHE": f"{name}/cache"}):
        folders = [add(Path(name) / "cache", "weights", copy[0], copy[1], str(number))
                   for number, copy in enumerate(copies)]
        locks = [open(folder / ".used") for folder, copy in zip(folders, copies, strict=True)  # noqa: SIM115
                 if copy[2]]
        for lock in locks:
            fcntl.flock(lock, fcntl.LOCK_SH)
        flags = ["prune", "--older-than", f"{age}d", *(["--model", model] if model else [])]
        assert cache.main([*flags, "--dry-run"]) == 0
        assert all(folder.is_dir() for folder in folders)
        assert cache.main(flags) == 0
        assert [folder.is_dir() for folder in folders] == [
            used or days < age or model not in (None, "*", title) for title, days, used in copies]
        for lock in locks:
            lock.close()
        assert cache.main(["prune", "--all"]) == 0 and entries() == []


@given(st.text(min_size=1, max_size=120), st.integers(0, 10**13), st.floats(0, 1e9))
def test_lines_fit_a_terminal(model, nbytes, age):
    entry = cache.Entry(Path("/none"), "weights", model, "4bit-32-mixed-bfloat16-v3", (), nbytes,
                        time.time() - age)
    assert all(len(line) <= 80 for line in cache.table([entry]))


def test_failures_are_one_line(root, capsys, monkeypatch):
    assert cache.main(["list"]) == cache.main(["prune", "--all"]) == 0
    assert "0 entries" in capsys.readouterr().out and not root.exists()
    add(root, "weights", "a")
    monkeypatch.setattr(Path, "rename", mock.Mock(side_effect=PermissionError(13, "not allowed")))
    for argv, *words in (
            (["prune"], "--older-than", "--all"), (["purge"], "'purge'"),
            (["prune", "--older-than", "3 months"], "--older-than", "'3 months'", "30d"),
            (["prune", "--older-than", "30"], "--older-than", "'30'"),
            (["prune", "--all", "--model", "a"], "--all", "--model"),
            (["--dry-run"], "--dry-run", "prune"), (["--all"], "--all", "prune"),
            (["prune", "--all"], "not allowed")):
        command_refused(cache.main, capsys, argv, *words)
    assert len(entries()) == 1
