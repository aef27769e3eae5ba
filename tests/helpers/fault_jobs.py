"""The jobs of `helpers.faults`: commands on a tiny model, a conversion, and a server.

Each works in `folder`, which is new for each run. `begin` puts files there, `work` runs the job
and returns None or the line of its refusal, `check` looks at what it has written, `again` runs it
without faults, and `left` names what should have been removed. Anything but a result or a refusal
raises.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.errors import UserError
from flexgen_h2o.storage.run_folder import RUN_PREFIX, RunFolder
from helpers.tiny_models import make_tiny
from helpers.tiny_tokenizers import with_words

if TYPE_CHECKING:
    from helpers.faults import Shim


def make_model(folder: Path) -> str:
    """Return the folder of a new tiny model with a tokenizer of words."""
    return with_words(make_tiny("llama", folder / "plain").folder, folder / "words")


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> str | None:
    """Run a command. Return None, or the line of its refusal."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(argv)
    text = err.getvalue()
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in text and (status, len(errors)) in ((0, 0), (2, 1)), (status, text)
    return errors[0] if errors else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a .jsonl file, which all end; none if it is missing."""
    text = path.read_text() if path.exists() else ""
    assert text == "" or text.endswith("\n"), text
    return [json.loads(line) for line in text.splitlines()]


class Job:
    """Base class of the jobs.

    Parameters
    ----------
    model : str
        Folder of a model, which is copied into `root`.
    root : Path
        Folder of everything that the job reads and writes.
    shim : Shim
    """

    def __init__(self, model: str, root: Path, shim: Shim):
        self.model, self.folder, self.shim = str(root / "model"), root / "work", shim
        self._source = model
        self.expected: Any = None

    def prepare(self) -> None:
        """Run the job once without faults, to import modules before forks, and keep its results."""
        shutil.copytree(self._source, self.model)
        self.folder.mkdir()
        os.environ["FLEXGEN_H2O_CACHE"] = str(self.folder / "cache")
        self.begin()
        assert (refusal := self.work()) is None, refusal
        self.expected = self.results()

    def begin(self) -> None:
        """Put files into the folder."""

    def work(self) -> str | None:
        """Run the job. Return None, or the line of its refusal."""
        raise NotImplementedError

    def results(self) -> Any:
        """Return the results of a finished job."""
        raise NotImplementedError

    def check(self, refusal: str | None) -> None:
        """Check the files after `work`, given its result."""
        if refusal is None:
            assert (results := self.results()) == self.expected, (results, self.expected)

    def again(self) -> None:
        """Run the job once more, and check its results."""
        assert (refusal := self.work()) is None, refusal
        self.check(None)

    def left(self, *, removed: bool = True) -> list[str]:
        """Return what should have been removed.

        `removed`: files could be removed. If not, the next run removes folders of a run, and
        temporary files stay.
        """
        if not removed and (offload := self.folder / "offload").exists():
            folder = RunFolder(offload)
            folder.create()
            folder.close()
        paths = [path for path in self.folder.rglob("*") if path.name.startswith(RUN_PREFIX)
                 or removed and path.suffix in (".tmp", ".part")]
        return [str(path.relative_to(self.folder)) for path in paths]


class Generate(Job):
    """Text with all weights, caches and hidden states on disk, in 4 bits."""

    flags = ["--dtype", "float32", "--weight-bits", "4", "--cache-bits", "4",
             "--percent", "0", "0", "0", "0", "0", "0"]

    def work(self) -> str | None:
        from flexgen_h2o.commands import generate

        return run_command(generate.main, [
            "--model", self.model, "--device", "cpu", "--gpu-batch-size", "2", "--num-gpu-batches",
            "2", "--num-prompts", "4", "--prompt-len", "24", "--gen-len", "5", "--hh-ratio", "0.2",
            "--offload-dir", str(self.folder / "offload"), "--output",
            str(self.folder / "out.jsonl"), "--no-log", *self.flags])

    def results(self) -> list[list[int]]:
        return [line["token_ids"] for line in read_lines(self.folder / "out.jsonl")]


class Convert(Generate):
    """Text in float16, for which the weights on disk are converted, with hidden states on disk."""

    flags = ["--dtype", "float16", "--percent", "0", "0", "100", "0", "0", "0"]


class Recall(Generate):
    """Text with a cache on disk from which selected tokens are read."""

    flags = ["--dtype", "float32", "--percent", "100", "0", "0", "0", "100", "0", "--recall",
             "--fetch-chosen"]


class Gguf(Job):
    """A GGUF file, converted."""

    def begin(self) -> None:
        if not (source := Path(self.model, "tiny.gguf")).exists():
            from helpers import gguf_cases

            _, path = gguf_cases.make("llama", source.parent / "gguf")
            shutil.copyfile(path, source)
            shutil.rmtree(source.parent / "gguf")

    def work(self) -> str | None:
        from flexgen_h2o.models.sources import checkpoint_folder

        def convert() -> None:
            self._copy = checkpoint_folder(f"{self.model}/tiny.gguf", dtype="float16")

        return run_command(lambda argv: exit_status(convert), [])

    def results(self) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                for path in self._copy.iterdir() if not path.name.startswith(".")}


def request(number: int, **body: Any) -> dict[str, Any]:
    """Return a line of a batch. Prompts have other lengths, and with new tokens the same."""
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": {
        "prompt": f"w{3 + number} w{50 - number}{' w4' * (3 - number % 3)}",
        "max_tokens": 2 + number % 3, "ignore_eos": True, **body}}


def texts(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the status and the text of each line; no id is there twice."""
    by_id = {line["custom_id"]: [line["response"]["status_code"],
                                 line["response"]["body"].get("choices", [{}])[0].get("text")]
             for line in lines}
    assert len(by_id) == len(lines), sorted(line["custom_id"] for line in lines)
    return by_id


class Batch(Job):
    """A job that resumes: two of its requests are answered, and one cannot run."""

    requests = [*map(request, range(6)), request(6, tools=[1])]

    def begin(self) -> None:
        (self.folder / "in.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in self.requests))
        if self.expected is not None:
            (self.folder / "out.jsonl").write_text("".join(self._answered))
            (self.folder / "out.jsonl.config.yaml").write_text(self._settings)

    def prepare(self) -> None:
        self._answered: list[str] = []
        super().prepare()
        self._answered = (self.folder / "out.jsonl").read_text().splitlines(True)[:2]
        self._settings = (self.folder / "out.jsonl.config.yaml").read_text()

    def work(self) -> str | None:
        from flexgen_h2o.commands import batch

        return run_command(batch.main, [
            "-i", str(self.folder / "in.jsonl"), "-o", str(self.folder / "out.jsonl"), "--errors",
            str(self.folder / "errors.jsonl"), "--progress-file", str(self.folder / "p.json"),
            "--model", self.model, "--dtype", "float32", "--device", "cpu", "--gpu-batch-size", "2",
            "--window", "3", "--percent", "100", "0", "0", "0", "--offload-dir",
            str(self.folder / "offload")])

    def check(self, refusal: str | None) -> None:
        super().check(refusal)
        text = (self.folder / "out.jsonl").read_text()
        assert text.startswith("".join(self._answered)), "an answer is lost"
        if refusal is not None and " requests are answered" in refusal:
            lines = text.count("\n") + len(read_lines(self.folder / "errors.jsonl"))
            assert lines >= int(refusal.rpartition("(")[2].split()[0]), "a counted answer is lost"

    def results(self) -> dict[str, Any]:
        return texts(read_lines(self.folder / "out.jsonl")
                     + read_lines(self.folder / "errors.jsonl"))


class Serve(Job):
    """A server: an upload, a batch to its end, and a live request."""

    requests = [*map(request, range(4)), request(4, tools=[1])]

    def begin(self) -> None:
        self._noted: dict[str, str] = {}

    def prepare(self) -> None:
        for name in ("_RETRY_SECONDS", "_LONGEST_PAUSE"):
            setattr(importlib.import_module("flexgen_h2o.serving.scheduler"), name, 0.02)
        super().prepare()

    def work(self) -> str | None:
        from openai import APIStatusError

        from helpers.servers import flags, serving

        try:
            with serving(flags(self.model, self.folder / "data", "--offload-dir",
                               str(self.folder / "offload"), "--percent", "100", "0", "0", "0"),
                         ) as served:
                try:
                    self._noted["file"] = served.upload(self.requests)
                    self._noted["batch"] = served.openai.batches.create(
                        input_file_id=self._noted["file"], endpoint="/v1/completions",
                        completion_window="24h").id
                    answer = served.openai.completions.create(
                        model="tiny", prompt="w5 w6", max_tokens=3, temperature=0)
                    assert answer.choices[0].text
                    self._finish(served)
                except APIStatusError as error:
                    assert error.status_code in (503, 507), error
                    return f"status {error.status_code}: {error.message}"
        except UserError as error:
            return str(error)
        return None

    def _finish(self, served: Any) -> None:
        """Wait for the batch. A fault that stays ends after a while."""
        from openai import APIConnectionError

        until = time.monotonic() + 20
        while (batch := self._retrieve(served)) is None or batch.status != "completed":
            assert time.monotonic() < until, batch
            assert batch is None or batch.status in ("validating", "in_progress", "finalizing"), (
                batch)
            if time.monotonic() > until - 19.5:
                self.shim.disarm()
            time.sleep(0.01)
        try:
            self._results = texts(served.lines(batch.output_file_id)
                                  + served.lines(batch.error_file_id))
        except APIConnectionError:  # a read error in the middle of a file
            self.shim.disarm()
            self._finish(served)

    def _retrieve(self, served: Any) -> Any:
        from openai import APIStatusError

        try:
            return served.openai.batches.retrieve(self._noted["batch"])
        except APIStatusError as error:
            assert error.status_code == 507, error
            return None

    def results(self) -> dict[str, Any]:
        return self._results

    def again(self) -> None:
        """Start a server on the same folder, and check its files and batches."""
        from helpers.servers import flags, serving

        with serving(flags(self.model, self.folder / "data")) as served:
            if file := self._noted.get("file"):
                assert served.lines(file) == self.requests
            if "batch" in self._noted:
                self._finish(served)
                self.check(None)
            known = {file.id for file in served.openai.files.list()}
            assert {path.name for path in (self.folder / "data" / "files").iterdir()} == known


JOBS: dict[str, type[Job]] = {"generate": Generate, "convert": Convert, "recall": Recall,
                              "gguf": Gguf, "batch": Batch, "serve": Serve}
