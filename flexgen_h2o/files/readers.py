"""Readers of users' files: lines with their numbers, text under a key of JSON lines, YAML.

These may come through a pipe (`--prompts <(zcat prompts.gz)`); a checkpoint's files may not. All
errors are `UserError`, in one line that names the flag, the file and the line. No torch.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from flexgen_h2o.errors import UserError, check_text


def regular_file(path: Path) -> Path:
    """The path of a checkpoint's file, if it is one (or a link to one) or is missing.

    Raises `UserError` for a pipe, which would be waited for without end, and for anything else
    that is there.
    """
    try:
        kind = path.stat().st_mode
    except OSError:
        return path  # opening it will say why it cannot be
    if not stat.S_ISREG(kind):
        names = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        raise UserError(f"{path} is {names.get(stat.S_IFMT(kind), 'a device')}: put the file "
                        "itself there")
    return path


def read_text(flag: str, path: str, *, if_empty: str) -> str:
    """The whole text of a file.

    Raises `UserError` when the file is missing, not UTF-8, or blank (it then says `if_empty`).
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path} is not UTF-8 text: save it as UTF-8") from None
    if not text.strip():
        raise UserError(f"{flag} {path} {if_empty}")
    return text


def read_lines(flag: str, path: str, *, if_empty: str) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1. Errors as of `read_text`."""
    text = read_text(flag, path, if_empty=if_empty)
    # Not splitlines(), which also cuts at characters that may stand within a JSON string.
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def json_texts(flag: str, path: str, key: str, *, if_empty: str,
               clean: Callable[[str], str] = str) -> list[str]:
    """The text under `key`, passed through `clean`, of each line of a .jsonl file.

    Raises `UserError` also when a line is not JSON, or no text is left of it.
    """
    texts = []
    for number, record in json_records(flag, path, if_empty=if_empty):
        text = record.get(key) if isinstance(record, dict) else None
        text = clean(text) if isinstance(text, str) else ""
        if not text.strip():
            raise UserError(f"{flag} {path} line {number} has no text under the key `{key}`")
        texts.append(text)
    return texts


def json_records(flag: str, path: str, *, if_empty: str) -> Iterator[tuple[int, object]]:
    """The value of each line of a .jsonl file, with its number from 1. Raises `UserError`."""
    for number, line in read_lines(flag, path, if_empty=if_empty):
        yield number, json_value(f"{flag} {path} line {number}", line)


def json_value(where: str, line: str) -> object:
    """The value of a line of JSON.

    Raises `UserError`, which begins with `where`, also for an escape of half a surrogate pair.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is not JSON: mend it") from None
    if "\\u" in line:  # as no file in UTF-8 has one otherwise
        check_text(where, json.dumps(value, ensure_ascii=False))
    return value


def read_yaml(flag: str, path: str | os.PathLike) -> object:
    """The value of a YAML file. `UserError` if it is missing, unreadable, not UTF-8 or not YAML."""
    try:
        return yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path} is not UTF-8 text: save it as UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the latter of a date or depth
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"{flag} {path} is not valid YAML{where}") from None
