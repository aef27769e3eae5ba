"""Files of rows: their bytes, and files that are whole, that grow and that are shared."""

import csv
import io
import json
import os
import resource
from contextlib import contextmanager

import pytest
from csv_files import write_csv
from helpers.error_cases import refused
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.cli.results import check_results, result_files, write_results
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.files.rows import CsvWriter, JsonlWriter, append_row
from flexgen_h2o.files.writing import check_writable
from flexgen_h2o.outputs import Output

COLUMNS = ("name", "a,b", "value")
cells = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(),
                  st.text(st.characters(codec="utf-8")))
tables = st.lists(st.fixed_dictionaries(dict.fromkeys(COLUMNS, cells)), min_size=1, max_size=4)


def by_hand(rows, digits: int, end: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator=end)
    writer.writeheader()
    writer.writerows({key: f"{value:.{digits}g}" if isinstance(value, float) else value
                      for key, value in row.items()} for row in rows)
    return text.getvalue().encode()


@given(rows=tables, digits=st.integers(1, 17))
def test_every_writer_makes_the_same_bytes(tmp_path_factory, rows, digits):
    folder = tmp_path_factory.mktemp("rows")
    write_csv(folder / "new/whole.csv", COLUMNS, rows, digits=digits)
    for row in rows:
        append_row(folder / "shared.csv", COLUMNS, row, digits=digits)
    for name in ("new/whole.csv", "shared.csv"):
        assert (folder / name).read_bytes() == by_hand(rows, digits, "\n")
    growing = CsvWriter(str(folder / "growing.csv"), COLUMNS, end="\r\n")
    for row in rows:
        growing.write(row)
    growing.finish()
    assert (folder / "growing.csv").read_bytes() == by_hand(rows, 6, "\r\n")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "r.csv"
    write_csv(path, COLUMNS, [{"name": "old"}])
    before = path.read_bytes()

    def rows():
        yield {"name": "new"}
        raise OSError(28, "No space left on device")

    refused(lambda: write_csv(path, COLUMNS, rows(), flag="--csv"), "--csv", "No space left")
    refused(lambda: append_row(path, COLUMNS[1:], {}), "other columns")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@contextmanager
def most_bytes_of_a_file(count):
    """Make writes stop at a file size, as on a disk that gets full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["shared", "growing", "lines"])
@pytest.mark.parametrize("room", [0, 5])
def test_a_row_is_written_whole_or_not_at_all(tmp_path, kind, room):
    row, path = dict.fromkeys(COLUMNS, "text"), tmp_path / "file"
    writer = CsvWriter(str(path), COLUMNS) if kind == "growing" else JsonlWriter(str(path))
    if kind != "shared":
        path = writer.partial

    def add():
        if kind == "shared":
            append_row(path, COLUMNS, row)
        else:
            writer.write(row)

    add()
    before = path.read_bytes()
    with most_bytes_of_a_file(len(before) + room), pytest.raises(OSError):
        add()
    assert path.read_bytes() == before
    add()
    lines = (json.dumps(row) + "\n").encode() * 2
    assert path.read_bytes() == (lines if kind == "lines" else by_hand([row, row], 6, "\n"))


def test_files_beside_a_result_are_checked(tmp_path):
    check_writable("--csv", str(tmp_path / "r.csv"), beside=[str(tmp_path / "r.yaml")])
    (tmp_path / "r.yaml").mkdir()
    refused(lambda: check_writable("--csv", str(tmp_path / "r.csv"), hint=": take another",
                                   beside=[str(tmp_path / "r.yaml")]),
            match="^--csv .*r.yaml is not a regular file: take another$")


def test_results_go_into_a_pipe():
    """As to /dev/stdout, whatever it is redirected to."""
    reading, writing = os.pipe()
    config = RunConfig(output=f"/dev/fd/{writing}", no_log=True)
    files = result_files(config)
    check_results(files)
    write_results(config, files, [Output("a", [1], [2], "x\x85\u2028y", "stop")], stats=None,
                  summary="", trace=None)
    os.close(writing)
    with open(reading, encoding="utf-8") as lines:
        (line,) = lines.read().splitlines()
    assert json.loads(line)["text"] == "x\x85\u2028y"
    refused(lambda: check_results({"csv": "/dev/stdout"}), "--csv /dev/stdout is not a regular")
