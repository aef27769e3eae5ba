"""A .jsonl file of results that a stopped run leaves behind and the next one goes on with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

import yaml

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.atomic import open_atomic
from flexgen_h2o.files.readers import read_yaml
from flexgen_h2o.files.rows import GrowingFile


class LineFile(GrowingFile):
    """Lines in their order, and the options that they were made with in `path`.config.yaml.

    Nothing is written before there is a line. A last line without its end is what a run was
    writing when it died: it is left out, and cut off when the next line comes.

    Parameters
    ----------
    flag, path : str
        The flag that names the file, for messages, and the file.
    options : mapping
        Plain YAML values; kept beside the lines.
    deciding : sequence of str
        Those of the options that must be the same to go on.
    """

    def __init__(self, flag: str, path: str, options: Mapping[str, object],
                 deciding: Sequence[str]):
        super().__init__(path, ending="")
        self._flag = flag
        self.path = path
        self._beside = f"{path}.config.yaml"
        self._options = dict(options)
        self._deciding = tuple(deciding)
        self._whole = 0  # bytes up to the end of the last whole line

    def read(self) -> list[dict]:
        """The lines of an earlier run; none where there was none.

        Raises `UserError` when they were made with other options or are not lines of results.
        """
        try:
            with open(self.path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot read {self._flag} {self.path}: {error.strerror}") from None
        if content:
            self._check_options()
        self._whole = content.rfind(b"\n") + 1
        lines = content[: self._whole].split(b"\n")[:-1]
        rows = [self._row(number, line) for number, line in enumerate(lines, 1)]
        self.count = len(rows)
        return rows

    def _check_options(self) -> None:
        advice = "choose another file, or delete this one"
        if not os.path.exists(self._beside):
            raise UserError(f"{self._flag} {self.path} is there without {self._beside}, so that it "
                            f"can't be gone on with: {advice}")
        saved = read_yaml(self._flag, self._beside)
        saved = saved if isinstance(saved, dict) else {}
        for name in self._deciding:
            if name not in saved or saved[name] != self._options[name]:
                raise UserError(f"{self._flag} {self.path} was made with {name} "
                                f"{saved.get(name)!r}, now it is {self._options[name]!r}: {advice}")

    def _row(self, number: int, line: bytes) -> dict:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{self._flag} {self.path} line {number} is not a line of results: "
                            "delete the file")
        return row

    def add(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write more lines; they are in the file when this returns. OSError if it cannot."""
        if self._whole:
            os.truncate(self.path, self._whole)
        else:
            with open_atomic(self._beside) as file:
                yaml.safe_dump(self._options, file, sort_keys=False, allow_unicode=True)
        self._whole += self._add("".join(json.dumps(row) + "\n" for row in rows), len(rows))
