"""A .jsonl file of results that a stopped run leaves behind and the next one goes on with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

import yaml

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import read_yaml
from flexgen_h2o.files.rows import GrowingFile
from flexgen_h2o.files.writing import open_atomic


class SettingsBeside:
    """The settings that a file of results was made with, in `path`.config.yaml.

    Parameters
    ----------
    flag, path : str
        The flag that names the file of results, for messages, and that file.
    settings : mapping
        Plain YAML values.
    deciding : sequence of str
        Those of them that must be the same to go on.
    """

    def __init__(self, flag: str, path: str, settings: Mapping[str, object],
                 deciding: Sequence[str]):
        self._flag, self._results = flag, path
        self.path = f"{path}.config.yaml"
        self._settings = dict(settings)
        self._deciding = tuple(deciding)

    def check(self) -> None:
        """Raise `UserError` unless the results were made with the same settings."""
        advice = "choose another file, or delete this one"
        if not os.path.exists(self.path):
            raise UserError(f"{self._flag} {self._results} is there without {self.path}, so that "
                            f"it can't be gone on with: {advice}")
        saved = read_yaml(self._flag, self.path)
        saved = saved if isinstance(saved, dict) else {}
        for name in self._deciding:
            if name not in saved or saved[name] != self._settings[name]:
                raise UserError(f"{self._flag} {self._results} was made with {name} "
                                f"{saved.get(name)!r}, now it is {self._settings[name]!r}: "
                                f"{advice}")

    def write(self) -> None:
        """Write them to disk, whole or not at all. OSError if it cannot."""
        with open_atomic(self.path) as file:
            yaml.safe_dump(self._settings, file, sort_keys=False, allow_unicode=True)
            file.flush()
            os.fsync(file.fileno())  # a power cut would leave results without them


class LineFile(GrowingFile):
    """Lines in their order, and the options that they were made with in `path`.config.yaml.

    Nothing is written before there is a line. A last line without its end is what a run was
    writing when it died: it is left out, and cut off when the next line comes.

    Parameters
    ----------
    flag, path : str
        The flag that names the file, for messages, and the file.
    options, deciding
        As `SettingsBeside` takes them.
    """

    def __init__(self, flag: str, path: str, options: Mapping[str, object],
                 deciding: Sequence[str]):
        super().__init__(path, ending="")
        self._flag = flag
        self.path = path
        self._beside = SettingsBeside(flag, path, options, deciding)
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
            self._beside.check()
        self._whole = content.rfind(b"\n") + 1
        lines = content[: self._whole].split(b"\n")[:-1]
        rows = [self._row(number, line) for number, line in enumerate(lines, 1)]
        self.count = len(rows)
        return rows

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
            self._beside.write()
        self._whole += self._add("".join(json.dumps(row) + "\n" for row in rows), len(rows))
