"""The input index and the results file of a batch job."""

import errno
import json
import os
import tracemalloc

import numpy as np
import pytest
from helpers import selection
from helpers.error_cases import refused
from helpers.read_back import read_jsonl

from flexgen_h2o.outputs import Output
from flexgen_h2o.requests import input as job_input
from flexgen_h2o.requests import results as job_results
from flexgen_h2o.requests.input import DUPLICATE, INVALID, VALID, JobInput
from flexgen_h2o.requests.request import BadRequest, Defaults, read_request
from flexgen_h2o.requests.results import ResultsFile, answer_line, failure_line


def write(path, *lines: object) -> str:
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
                              for line in lines))
    return str(path)


def line_of(index: JobInput, place: int) -> bytes:
    """The line that answers a request, or says that it failed."""
    key, number = int(index.keys[place]), int(index.numbers[place])
    try:
        one = read_request(index.line(place), number, Defaults({"m"}, 4))
    except BadRequest as error:
        return failure_line(error, key=key, number=number, custom_id=None)
    return answer_line(one, [Output(None, [1], [2], "text", "length")] * one.n, key=key, model="m",
                  created=1, parser=None)


# --- the input


def test_index_finds_ids_duplicates_and_invalid_lines(tmp_path):
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf", {"prompt": "x", "id": "a"}, b"\n \n",
                 {"prompt": "y", "id": "b"}, b"{broken\n", {"prompt": "z", "id": "a"},
                 b'{"custom_id": 3}\n', {"prompt": "z", "id": "a"}, {"prompt": "no id"},
                 b"{broken\n", b'{"prompt": "no end", "id": "line-8"}')
    with JobInput(path) as index:
        assert index.numbers.tolist() == [1, 4, 5, 6, 7, 8, 9, 10, 11]
        assert index.kinds.tolist() == [VALID, VALID, INVALID, DUPLICATE, INVALID, DUPLICATE, VALID,
                                        INVALID, VALID]
        assert len({*index.keys.tolist()}) == len(index) == 9
        assert index.line(8) == b'{"prompt": "no end", "id": "line-8"}'
        assert index.find(index.keys[::-1]).tolist() == [*range(9)][::-1]
        assert index.find(np.array([0, 2**64 - 1], np.uint64)).tolist() == [-1, -1]
        keys = index.keys[:2].tolist()
    # A request is known by its id and its bytes, and not by its place.
    path = write(tmp_path / "b.jsonl", {"prompt": "y", "id": "b"}, {"prompt": "x", "id": "a"},
                 {"prompt": "X", "id": "c"})
    with JobInput(path) as index:
        assert index.keys[:2].tolist() == keys[::-1]


def test_invalid_inputs_are_refused(tmp_path):
    refused(lambda: JobInput(str(tmp_path / "no")), "cannot read --input", "No such file")
    refused(lambda: JobInput(write(tmp_path / "e", b"\n\n")), "holds no requests")
    refused(lambda: JobInput("/dev/null"), "is not a regular file")


def test_an_input_that_changes_under_the_job_is_refused(tmp_path):
    path = write(tmp_path / "a", {"prompt": "x"}, {"prompt": "y"})
    with JobInput(path) as index:
        write(tmp_path / "a", {"prompt": "X"}, {"prompt": "y"})
        refused(lambda: index.line(0), "line 1", "has been changed while the job runs")
        assert index.line(1) == b'{"prompt": "y"}'


def test_a_line_without_end_is_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(job_input, "MAX_LINE_BYTES", 64)
    path = write(tmp_path / "a", {"prompt": "x" * 1000}, {"prompt": "y"}, {"prompt": "z" * 1000})
    with JobInput(path) as index:
        assert index.kinds.tolist() == [INVALID, VALID, INVALID]
        assert [len(index.line(place)) for place in range(3)] == [64, 15, 64]


def test_an_index_takes_few_bytes_a_line(tmp_path):
    lines = 200_000 if selection.every_case else 20_000
    with open(tmp_path / "a", "w") as file:
        file.writelines(f'{{"prompt": "text", "id": "request-{number}"}}\n'
                        for number in range(lines))
    tracemalloc.start()
    try:
        with JobInput(str(tmp_path / "a")) as index:
            held, most = tracemalloc.get_traced_memory()
            assert len(index) == lines and not index.kinds.any()
    finally:
        tracemalloc.stop()
    assert held < 26 * lines and most < 80 * lines


# --- the results


def requests(tmp_path, count: int = 3) -> str:
    return write(tmp_path / "in.jsonl", *({"prompt": f"p{number}", "id": number, "n": number + 1}
                                          for number in range(count)), b"{broken\n")


def test_results_truncated_at_any_byte_are_resumed(tmp_path, monkeypatch):
    """Whatever a killed job leaves: whole lines count, and the rest is written again."""
    monkeypatch.setattr(job_results.os, "fsync", lambda descriptor: None)  # a thousand take seconds
    path = str(tmp_path / "out.jsonl")
    with JobInput(requests(tmp_path)) as index:
        lines = [line_of(index, place) for place in (2, 0, 3, 1)]
        whole = b"".join(line + b"\n" for line in lines)
        ends = np.cumsum([len(line) + 1 for line in lines])
        for end in range(0, len(whole) + 1, 1 if selection.every_case else 5):
            write(tmp_path / "out.jsonl", whole[:end])
            kept = int((ends <= end).sum())
            with ResultsFile("--output", path) as file:
                assert os.path.getsize(path) == (ends[kept - 1] if kept else 0)
                places, failed = file.answered(index)
                assert places.tolist() == sorted((2, 0, 3, 1)[:kept])
                assert failed.tolist() == [3] * (kept > 2)
                file.add(lines[kept:])
            with open(path, "rb") as file:
                assert file.read() == whole


def test_other_files_are_refused_and_unchanged(tmp_path):
    """A file that was named by mistake is not taken for a torn line."""
    for text in (b"notes without an end", b"a line\nand one without an end", b'{"id": 7}', b"[]\n",
                 b'{"id": "batch_req_zz", "response": null}\n',
                 b'{"id": "batch_req_11111111111111111", "response": null}\n'):
        path = write(tmp_path / "out", text)
        with JobInput(requests(tmp_path)) as index, ResultsFile("--output", path) as file:
            refused(lambda file=file: file.answered(index), "line 1 is not a line of results")
        with open(path, "rb") as file:
            assert file.read() == text


def test_other_results_are_refused_but_not_fixed_failures(tmp_path):
    path = str(tmp_path / "out.jsonl")
    with JobInput(requests(tmp_path)) as index, ResultsFile("--output", path) as file:
        file.add([line_of(index, place) for place in range(4)])
        write(tmp_path / "less.jsonl", {"prompt": "p0", "id": 0, "n": 1}, {"prompt": "mended"},
              {"prompt": "P1", "id": 1, "n": 2})
        with JobInput(str(tmp_path / "less.jsonl")) as other:
            refused(lambda: file.answered(other), f"--output {path} line 2 answers a request that",
                    "--overwrite")
        file.clear()
        file.add([line_of(index, place) for place in (0, 3)])
        with JobInput(str(tmp_path / "less.jsonl")) as other:
            places, failed = file.answered(other)
            assert (places.tolist(), failed.tolist()) == ([0], [])


def test_one_job_writes_a_file_at_a_time(tmp_path):
    path = str(tmp_path / "out")
    with ResultsFile("--output", path) as file:
        refused(lambda: ResultsFile("--errors", path), "--errors", "written by another job")
        file.add([b"{}"])
    with ResultsFile("--output", path) as file:
        assert not file.empty
        file.clear()
    assert not os.path.exists(path)  # there is nothing in it


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_lines_are_written_whole_or_not_at_all(tmp_path, monkeypatch, number):
    path = str(tmp_path / "out")
    full, real = [], os.write

    def limited(descriptor: int, data) -> int:
        if full:
            raise OSError(number, os.strerror(number))
        full.append(True)
        return real(descriptor, bytes(data)[:3])

    with ResultsFile("--output", path) as file:
        file.add([b'{"a": 1}'])
        with monkeypatch.context() as patch:
            patch.setattr(job_results.os, "write", limited)
            refused(lambda: file.add([b'{"a": 2}']), f"cannot write --output {path}",
                    os.strerror(number))
        file.add([b'{"a": 3}', b'{"a": 4}'])
    assert [line["a"] for line in read_jsonl(path)] == [1, 3, 4]


def test_removed_results_end_the_job(tmp_path):
    path = str(tmp_path / "out")
    with ResultsFile("--output", path) as file:
        file.add([b"{}"])
        os.unlink(path)
        refused(lambda: file.add([b"{}"]), "removed while the job runs")
