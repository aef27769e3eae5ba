"""After a power loss, what was acknowledged is there, and nothing torn is taken for whole.

A job runs with the shim, which logs its changes of files and what it acknowledges. The losses of
`helpers.power_loss` are written into a folder each, on which the job goes on.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from helpers import selection
from helpers.fault_jobs import read_lines, run_command
from helpers.faults import Shim
from helpers.power_loss import losses, read_log
from helpers.subprocesses import environment

from flexgen_h2o.commands import batch
from flexgen_h2o.files.writing import open_atomic
from flexgen_h2o.models.convert import converted_folder
from flexgen_h2o.outputs import Output
from flexgen_h2o.requests.results import ResultsFile
from flexgen_h2o.serving.store import Batch, Counts, File, Store, new_id


class EchoLLM:
    """An engine that answers each prompt with its first token, in blocks of two."""

    tokenizer, vocab_size, stats = None, 120, None

    def encode(self, prompt, **_) -> list[int]:
        return list(prompt)


    def generate_in_blocks(self, prompts, params):
        for key in range(0, len(prompts), 2):
            yield {place: Output(None, prompts[place], prompts[place][:1] * 300, None, "length")
                   for place in range(key, min(key + 2, len(prompts)))}


@contextmanager
def _opened(*_, **__):
    yield EchoLLM()


class ResultsCase:
    """A batch job with 12 requests, one of which is invalid."""

    def __init__(self, source: Path):
        self._input = source / "in.jsonl"
        lines = [{"id": f"r{number}", "prompt": [3 + number] * 4, "max_tokens": 3}
                 for number in range(11)] + [{"id": "bad", "prompt": [5], "tools": [1]}]
        self._input.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(self, folder: Path, mark) -> None:
        """Run the job, and mark each line that has been added."""
        add = ResultsFile.add

        def marked(file, lines):
            add(file, lines)
            for line in lines:
                mark(f"{Path(file.path).name} {line.decode()}")

        with mock.patch.object(ResultsFile, "add", marked), mock.patch.object(
                batch, "open_on_ranks", _opened):
            assert run_command(batch.main, [
                "-i", str(self._input), "-o", f"{folder}/out.jsonl", "--errors",
                f"{folder}/errors.jsonl", "--model", "tiny", "--window", "4"]) is None

    def check(self, folder: Path, marks: list[str]) -> None:
        """Let the job go on: lines that were added are not computed again."""
        added: list[str] = []
        self.run(folder, added.append)
        lines = {path.name: path.read_text().splitlines() for path in folder.glob("*.jsonl")}
        for mark in marks:
            name, _, line = mark.partition(" ")
            assert line in lines[name] and mark not in added
        assert sorted(line["custom_id"] for path in folder.glob("*.jsonl")
                      for line in read_lines(path)) == sorted(
                          [*(f"r{number}" for number in range(11)), "bad"])


class StoreCase:
    """A server's store: two uploads, the deletion of one, and a whole batch."""

    def __init__(self, source: Path):
        del source

    def run(self, folder: Path, mark) -> None:
        """Upload, delete, and end a batch, as the server does."""
        store = Store(str(folder / "new" / "data"))
        kept, other = (self._upload(store, bytes([value]) * 6000, mark) for value in b"AB")
        mark(f"deleting {other}")
        store.delete_file(other)
        mark(f"deleted {other}")
        created = Batch(id=new_id("batch_"), endpoint="/v1/completions", model="m",
                     input_file_id=kept, completion_window="24h", created_at=1, expires_at=2,
                     output_file_id=new_id("file-"), error_file_id=new_id("file-"),
                     request_counts=Counts())
        store.add_batch(created)
        mark(f"batch {created.id} validating")
        with ResultsFile("--output", store.path(created.output_file_id)) as file:
            store.update_batch(created.id, status="in_progress")
            mark(f"batch {created.id} in_progress")
            for number in range(2):
                line = json.dumps({"id": f"batch_req_{number:016x}", "text": "x" * 5000})
                file.add([line.encode()])
                mark(f"line {created.output_file_id} {line}")
        store.finish_batch(created, "completed")
        mark(f"batch {created.id} completed")
        store.close()

    @staticmethod
    def _upload(store: Store, data: bytes, mark) -> str:
        path = store.new_upload()
        Path(path).write_bytes(data)
        file = store.add_upload(path, "in.jsonl")
        mark(f"file {file.id} {hashlib.sha256(data).hexdigest()}")
        return file.id

    def check(self, folder: Path, marks: list[str]) -> None:
        """Open the store: all files, states and lines that were acknowledged are there."""
        store = Store(str(folder / "new" / "data"))
        order = ("validating", "in_progress", "completed")
        deleted = {mark.split()[1] for mark in marks if mark.startswith("delet")}
        for kind, name, *rest in (mark.split(" ", 2) for mark in marks):
            if kind == "file" and name not in deleted:
                assert store.get(File, name) is not None
                assert hashlib.sha256(
                    Path(store.path(name)).read_bytes()).hexdigest() == rest[0]
            elif kind == "deleted":
                assert store.get(File, name) is None and not os.path.exists(store.path(name))
            elif kind == "batch":
                record = store.get(Batch, name)
                assert order.index(record.status) >= order.index(rest[0])
            elif kind == "line":
                assert rest[0] in Path(store.path(name)).read_text().split("\n")
        for file in store.page(File)[0]:
            assert Path(store.path(file.id)).stat().st_size == file.bytes
        store.close()


class ConversionCase:
    """A converted copy of a model."""

    def __init__(self, source: Path):
        self._model = source / "words"

    def run(self, folder: Path, mark) -> None:
        """Convert the model."""
        self._convert(folder)
        mark("converted")

    def _convert(self, folder: Path) -> dict[str, bytes]:
        with mock.patch.dict(os.environ, FLEXGEN_H2O_CACHE=str(folder / "cache")):
            copy = converted_folder(self._model, "float16")
        return {path.name: path.read_bytes() for path in copy.iterdir() if path.name[0] != "."}

    def check(self, folder: Path, marks: list[str]) -> None:
        """Convert the model again: a copy that is there is whole."""
        before = {path.parent for path in folder.glob("cache/converted/[!.]*/*")}
        assert self._convert(folder) == self._expected
        after = {path.parent for path in folder.glob("cache/converted/[!.]*/*")}
        assert not marks or before == after, "a copy that was acknowledged is lost"

    @property
    def _expected(self) -> dict[str, bytes]:
        if not hasattr(self, "_whole"):
            self._whole = self._convert(self._model.parent / "expected")
        return self._whole


class AtomicCase:
    """A file that is replaced, twice."""

    def __init__(self, source: Path):
        del source

    def run(self, folder: Path, mark) -> None:
        """Write the file, and write it again."""
        for text in ("a", "b"):
            with open_atomic(folder / "file") as file:
                file.write(text * 9000)
            mark(text)

    def check(self, folder: Path, marks: list[str]) -> None:
        """Read the file: it is whole, and at least as new as was acknowledged."""
        path = folder / "file"
        texts = [None, "a" * 9000, "b" * 9000]
        assert texts.index(path.read_text() if path.exists() else None) >= len(marks)


CASES = {"results": ResultsCase, "store": StoreCase, "conversion": ConversionCase,
         "atomic file": AtomicCase}


def record(folder: str) -> None:
    """In a process with the shim: run the jobs of all cases and log their changes."""
    shim = Shim()
    for case, job in CASES.items():
        source, root, log = (Path(folder, case, name) for name in ("source", "job", "log"))
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        work = job(source)
        shim.watch(root)
        shim.log(file)
        work.run(root, shim.mark)
        shim.log(-1)
        shim.watch(None)


@pytest.fixture(scope="module")
def recorded(shim, words_model, tmp_path_factory) -> Path:
    """A folder for each case: source and job have its files, and log its changes."""
    folder = tmp_path_factory.mktemp("recorded")
    for case in CASES:
        (folder / case / "job").mkdir(parents=True)
        shutil.copytree(words_model, folder / case / "source" / "words")
    tests, repository = Path(__file__).parents[1], Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", "import sys, test_power_loss; test_power_loss.record(sys.argv[1])",
         str(folder)], check=True,
        env=environment(repository, tests, tests / "faults", LD_PRELOAD=str(shim),
                        OMP_NUM_THREADS="1"))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_power_loss_loses_nothing_acknowledged(recorded, tmp_path, case):
    """After each change of each job, for unsynchronized pages that are dropped or reordered."""
    folder = recorded / case
    work, changes = CASES[case](folder / "source"), read_log(folder / "log")
    assert sum(change.operation == "write" for change in changes) > 1
    target, step = tmp_path / "after", 1 if selection.every_case else 7
    for place, (disk, draw, share) in enumerate(losses(changes, folder / "job")):
        if place % step == 0:
            disk.write_after_loss(target, draw, share)
            work.check(target, disk.marks)
            shutil.rmtree(target)
