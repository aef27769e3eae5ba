"""benchmarks/links.py: what is read, how rates come about, and that nothing stays behind."""

import csv
import ctypes
import os
from types import SimpleNamespace

import pytest
import torch
from helpers.error_cases import command_refused
from helpers.programs import benchmark_modules

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.trace import LinkStats, Trace
from flexgen_h2o.storage.disk import AlignedRead
from flexgen_h2o.storage.tiers import PAGE, Device
from flexgen_h2o.storage.transfer import Transfers


@pytest.fixture
def links():
    with benchmark_modules("links") as found:
        yield found.links


@pytest.fixture
def no_odirect(tmp_path):
    """Skips where the file system of tests refuses O_DIRECT."""
    path = tmp_path / "probe"
    path.write_bytes(bytes(PAGE))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of temporary files refuses O_DIRECT")


def test_requests_cover_a_range_once(links):
    assert list(links.spans(8, 25, 10)) == [(8, 10), (18, 10), (28, 5)]
    assert list(links.spans(0, 4, 10)) == [(0, 4)]


def test_rates_are_medians_and_the_first_round_does_not_count(links, monkeypatch):
    times, clock, order = [100, 7, 2, 4, 9], iter(range(10)), []
    ticks = iter([tick for took in times for tick in (0, took)])
    monkeypatch.setattr("links.time.perf_counter", lambda: next(ticks))
    found = links.rates({("a",): links.TimedWork(lambda: order.append(next(clock)), 55)}, 4)
    assert found == {("a",): 55 / 5.5}
    assert order == [0, 1, 2, 3, 4]


def test_works_take_turns(links):
    order = []
    links.rates({(name,): links.TimedWork(lambda name=name: order.append(name), 1)
                 for name in "ab"}, 2)
    assert order == list("ababab")


def test_the_ratio_is_that_of_neighbours(links, monkeypatch):
    """A disk that slows down by itself: each pair has its own rate, and the engine half of it."""
    seconds = iter([1, 2, 20, 10, 3, 6])  # raw, engine; engine, raw; raw, engine
    ticks = iter([tick for took in seconds for tick in (0, took)])
    monkeypatch.setattr("links.time.perf_counter", lambda: next(ticks))
    order = []
    raw, engine = (links.TimedWork(lambda name=name: order.append(name), 60) for name in "re")
    assert links.beside(raw, engine, 3) == (20, 10, 0.5)
    assert order == list("reerre")


def test_whole_layers_or_the_first_tensors_of_two(links):
    layers = [{"a": 10, "b": 10, "c": 80} for _ in range(6)]

    def chosen(nbytes, whole):
        return links.chosen_layers(layers, int, nbytes, whole=whole)

    assert len(chosen(50, True)) == links.LAYERS
    assert len(chosen(520, True)) == 5
    assert len(chosen(10**6, True)) == 6
    assert [list(layer) for layer in chosen(2, False)] == [["a"]] * 2
    assert [list(layer) for layer in chosen(30, False)] == [["a", "b"]] * 2
    assert chosen(10**6, False) == layers[:2]


def test_raw_reads_begin_where_the_layers_lie(links, tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(bytes(10 * PAGE + 5))
    reads = [AlignedRead(path, 6 * PAGE, PAGE, 0), AlignedRead(path, 4 * PAGE, PAGE, PAGE),
             AlignedRead(other, 0, PAGE, 2 * PAGE)]
    assert links.read_range(path, reads, 2 * PAGE) == (4 * PAGE, 2 * PAGE)
    assert links.read_range(path, reads, 8 * PAGE) == (2 * PAGE, 8 * PAGE)
    assert links.read_range(path, reads, 99 * PAGE) == (0, 10 * PAGE)
    assert links.read_range(path, [], PAGE) == (0, PAGE)
    other.write_bytes(b"short")
    with pytest.raises(UserError, match="a page or more"):
        links.read_range(other, [], PAGE)
    with pytest.raises(UserError, match="No such file"):
        links.read_range(tmp_path / "none", [], PAGE)


@pytest.mark.parametrize("threads", [1, 3])
def test_raw_requests_move_every_byte(links, tmp_path, no_odirect, threads):
    path, count = tmp_path / "file", 11
    path.write_bytes(bytes(count * PAGE))
    buffer = Device().host_empty(threads * 2 * PAGE)
    buffer.fill_(7)
    file = links.RawFile(path, PAGE, (count - 1) * PAGE, buffer, write=True)
    file.sweep(2 * PAGE, threads)
    file.close()
    assert path.read_bytes() == bytes(PAGE) + b"\7" * (count - 1) * PAGE
    file = links.RawFile(path, 0, count * PAGE, buffer.zero_(), write=False)
    file.sweep(2 * PAGE, threads)
    assert buffer.max() == 7
    os.truncate(path, PAGE)
    with pytest.raises(UserError, match="came back short"):
        file.sweep(2 * PAGE, threads)
    file.close()


def test_a_quick_run_writes_every_link_and_leaves_nothing(links, tmp_path, no_odirect, tiny_model,
                                                          capsys):
    out, offload = tmp_path / "new" / "links.csv", tmp_path / "offload"
    links.main(["--model", str(tiny_model("opt").folder), "--offload-dir", str(offload),
                "--quick", "--out", str(out)])
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(links.COLUMNS)
    expected = ["disk->cpu", "cpu->disk"] * 2
    if torch.cuda.is_available():
        expected += ["cpu->gpu", "gpu->cpu"]
    assert [row["link"] for row in rows] == [*expected, "host memory"]
    assert all(row["host"] and row["date"] and float(row["raw_gb_per_s"]) > 0 for row in rows)
    for row in rows[:-1]:
        assert float(row["engine_gb_per_s"]) > 0 and float(row["engine_over_raw"]) > 0
    assert not list(offload.iterdir())
    assert "page cache bypassed" in capsys.readouterr().out


def test_an_error_leaves_nothing_either(links, tmp_path, no_odirect, tiny_model, monkeypatch):
    def fail(*_):
        raise UserError("the disk is gone")

    monkeypatch.setattr(links, "rates", fail)
    with pytest.raises(UserError, match="gone"):
        links.main(["--model", str(tiny_model("opt").folder), "--offload-dir", str(tmp_path / "o"),
                    "--quick", "--out", str(tmp_path / "links.csv")])
    assert not list((tmp_path / "o").iterdir())
    assert not (tmp_path / "links.csv").exists()


def test_copies_to_and_from_a_gpu_move_every_chunk(links, monkeypatch):
    """Host memory stands in for the GPU's."""
    calls = []

    def memcpy(target, source, nbytes, kind, stream):
        calls.append((kind, nbytes))
        ctypes.memmove(target, source, nbytes)
        return 0

    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(links, "COPY", PAGE)
    monkeypatch.setattr(links, "cuda_memcpy", lambda: memcpy)
    monkeypatch.setattr(links.torch.cuda, "Stream", lambda: stream)
    moved = LinkStats()
    transfers = Transfers(Device(), links=moved, trace=Trace(enabled=False))
    try:
        rows = links.gpu_rows(SimpleNamespace(quick=False), transfers)
        for row in rows:
            for work in (*row.raw.values(), row.engine):
                assert work.nbytes == 4 * PAGE
                work.run()
    finally:
        transfers.close()
    assert [row.link for row in rows] == ["cpu->gpu", "gpu->cpu"]
    assert calls == [(1, PAGE)] * 4 + [(2, PAGE)] * 4
    assert all(moved.totals()[row.link][0] == 4 * PAGE for row in rows)


@pytest.mark.parametrize("flags, message", [
    ([], "--model"),
    (["--model", "{tmp}/none"], "is not a folder"),
    (["--model", "{tmp}"], "no safetensors file"),
    (["--model", "{tmp}", "--file", "{tmp}/x"], "config.json"),
    (["--model", "{tmp}", "--repeats", "0"], "--repeats 0"),
    (["--model", "{tmp}", "--gb", "nan"], "--gb nan"),
    (["--model", "{model}", "--file", "{tmp}/x"], "cannot read --file"),
    (["--model", "{model}", "--file", "{tmp}"], "is not a file"),
    (["--model", "{model}", "--offload-dir", "{model}/config.json"], "config.json is a file"),
    (["--model", "{model}", "--out", "{tmp}"], "is not a regular file"),
    (["--model", "{model}", "--out", "{model}/config.json/x"], "cannot write --out"),
])
def test_bad_input_is_one_line(links, tmp_path, tiny_model, capsys, flags, message):
    places = {"tmp": tmp_path, "model": tiny_model("opt").folder}
    given = [flag.format(**places) for flag in flags]
    command_refused(lambda argv: exit_status(lambda: links.main(argv)), capsys,
                    [*given, "--quick"], message)
