"""Copies on disk: keyed by content, locked while used, listed with what made them."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from helpers.selection import examples
from helpers.subprocesses import environment
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexgen_h2o.files import disk_cache
from flexgen_h2o.files.disk_cache import CacheFolder, build_once, entries, find_copy


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> CacheFolder:
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    return CacheFolder(tmp_path / "cache" / "weights", "advice")


def put(folder: Path, *contents: bytes, time: int = 0) -> list[Path]:
    """Write source files with equal times."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}.bin" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
        os.utime(path, (time, time))
    return paths


def copy(paths: list[Path], keep: CacheFolder, title: str = "title") -> Path:
    """The copy of files, which has the bytes of all of them."""
    return build_once(paths, "form", title, lambda folder: (folder / "data").write_bytes(
        b"|".join(path.read_bytes() for path in paths)), cache=keep)


# In most of these, the few sampled bytes are equal.
CONTENT = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=20, max_size=22).map(bytes)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(CONTENT, min_size=1, max_size=2), max_size=6))
@example([[bytes(20)], [bytes(9) + b"\1" + bytes(10)], [bytes(20)]])
def test_copies_are_keyed_by_content(sources):
    with tempfile.TemporaryDirectory() as name, mock.patch.multiple(
            disk_cache, _SAMPLES=2, _SAMPLE_BYTES=2, _PART_BYTES=7, _BLOCK_BYTES=3):
        root = Path(name)
        cache, folders = CacheFolder(root / "kept", ""), set()
        for number, contents in enumerate(sources):
            paths = put(root / str(number), *contents)
            for _ in range(2):
                folder = copy(paths, cache, f"title{number}")
                assert (folder / "data").read_bytes() == b"|".join(contents)
            folders.add(folder)
        assert len(folders) == len({tuple(contents) for contents in sources})


def test_a_place_is_hashed_once(cache, tmp_path, monkeypatch):
    first = copy(put(tmp_path / "a", bytes(9)), cache)
    paths = put(tmp_path / "b", bytes(9))
    assert copy(paths, cache) == first
    monkeypatch.setattr(disk_cache, "_hashed", None)
    assert copy(paths, cache) == find_copy(paths, "form", cache) == first
    assert find_copy(paths, "other", cache) is None


def test_only_the_beginning_matters_with_ends(cache, tmp_path):
    def described(place: str, content: bytes) -> Path:
        (path,) = put(tmp_path / place, content)
        return build_once([path], "form", "title", lambda folder: None, cache=cache, ends={path: 4})

    first = described("a", b"head one")
    assert described("b", b"head two!") == first != described("c", b"Head one")


def test_a_copy_that_a_process_uses_is_kept(cache, tmp_path):
    paths = put(tmp_path / "a", bytes(9))
    code = f"""
from pathlib import Path
from flexgen_h2o.files.disk_cache import CacheFolder, build_once
build_once([Path({str(paths[0])!r})], "form", "title", lambda folder: None,
           cache=CacheFolder(Path({str(cache.root)!r}), ""))
print(flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, env=environment()) as process:
        process.stdout.readline()
        (entry,) = entries()
        assert entry.in_use and not entry.remove() and entry.path.is_dir()
        process.communicate("\n")
    assert not entry.in_use and entry.remove()
    assert entries() == [] and not any(cache.root.glob("*title*"))


def test_a_copy_that_is_removed_meanwhile_is_made_again(cache, tmp_path, monkeypatch):
    paths = put(tmp_path / "a", bytes(9))
    first = copy(paths, cache)
    opened = os.open

    def remove_first(path, *options, **keywords):
        if Path(path).parent == first:
            monkeypatch.undo()
            shutil.rmtree(first)
        return opened(path, *options, **keywords)

    disk_cache._in_use.pop(first)
    monkeypatch.setattr(os, "open", remove_first)
    assert (copy(paths, cache) / "data").read_bytes() == bytes(9)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"model": 1, "form": "", "digest": "", '
                                    '"places": [3]}'])
def test_a_damaged_description_is_repaired(cache, tmp_path, damage):
    paths = put(tmp_path / "a", bytes(9))
    folder = copy(paths, cache)
    (folder / ".source").write_text(damage)
    assert entries()[0].sources == ()
    assert copy(paths, cache) == folder
    assert entries()[0].sources == (str(paths[0]),)


def test_descriptors_are_limited(cache, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(disk_cache._MAX_IN_USE + 5):
        copy(put(tmp_path / "a", bytes([number])), cache)
    assert len(os.listdir("/proc/self/fd")) <= before + disk_cache._MAX_IN_USE
