"""Readers of text, JSON lines, YAML, articles and conversations; checks of checkpoints. No torch.

Input files may be pipes (`--input-path <(zcat text.gz)`). Files of a checkpoint, which is not
trusted, must be regular files of a sane size in its folder. All errors are `UserError` that name
the flag, the file and the line.

Articles have the format of the H2O repository's ``xsum_0shot.jsonl``: a JSON object per line with
the text under `article`, inside of a prompt for a summary. Conversations have MT-Bench's format
(arXiv 2306.05685): the user's turns under `turns`, and `question_id`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flexgen_h2o.errors import UserError, check_text, short_repr

_MAX_TEXT = 256 << 20  # bytes; the largest tokenizers have 40 MB
_MAX_JSON = 64 << 20  # and the largest indexes 20
_MAX_YAML = 1 << 20
_POINTER, _MAX_POINTER = b"version https://git-lfs.github.com/spec/", 1024
_MAX_BITS = 4096  # of an integer in a YAML file
_MAX_VALUES = 1 << 17  # of a YAML file, with aliases expanded
_MERGE = "tag:yaml.org,2002:merge"
_MADV_POPULATE_READ = 22  # madvise(2), Linux 5.14; not in the mmap module


def pread_all(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Return `nbytes` of a file from an offset, fewer only at its end. Raises OSError.

    One call of `os.pread` may return less, for example on a network file system.
    """
    data = os.pread(descriptor, nbytes, offset)
    while len(data) < nbytes and (part := os.pread(descriptor, nbytes - len(data),
                                                   offset + len(data))):
        data += part
    return data


def populate_mapped(path: Path, address: int, nbytes: int) -> None:
    """Read mapped bytes of a file into memory before they are used.

    Raises `UserError` if they cannot be read, where their use would end the process (SIGBUS).
    """
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)  # mmap.madvise takes no mapping of others
    failed = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + nbytes - first),
                          _MADV_POPULATE_READ)
    if failed and ctypes.get_errno() != errno.EINVAL:  # an older Linux
        raise UserError(f"cannot read {path}: it has been cut, or its disk fails: "
                        "get the file again")


def path_exists(path: Path) -> bool:
    """Return whether a path exists. Raises `UserError` if a folder on it cannot be entered."""
    try:
        return path.exists()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def check_regular_file(path: Path) -> Path:
    """Return the path of a checkpoint's file, which may be missing or a link to a file.

    Raises `UserError` for a pipe, which would block forever, and for other kinds of files.
    """
    _size(path)
    return path


def check_checkpoint_file(path: Path) -> Path:
    """Return the path of a checkpoint's file that will be read.

    Raises `UserError` like `check_regular_file`, and for a git-LFS pointer instead of the file.
    """
    if 0 < _size(path) < _MAX_POINTER:
        with suppress(OSError), open(path, "rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise UserError(f"{path} is a git-LFS pointer and not the file itself: run "
                                "git lfs pull in its repository")
    return path


def check_text_file(path: Path, max_bytes: int = _MAX_TEXT) -> Path:
    """Return the path of a checkpoint's text file, which is read completely.

    Raises `UserError` like `check_checkpoint_file`, for a file of more than `max_bytes` bytes, and
    for a link out of the folder: the contents may appear in outputs and copies, and must not be
    another file of the user. Links of the hub's cache into its folder of blobs are allowed.
    """
    if _size(check_checkpoint_file(path)) > max_bytes:
        raise UserError(f"{path} has {_size(path)} bytes, more than any model's: get it again")
    if path.is_symlink():
        real, folder = path.resolve(), path.parent.resolve()
        if folder not in real.parents and real.parent.name != "blobs":
            raise UserError(f"{path} is a link out of the model's folder, to {real}: put the file "
                            "itself there")
    return path


def read_checkpoint_json(path: Path) -> Any:
    """Return the value of a checkpoint's JSON file. Raises `UserError`; see `check_text_file`."""
    try:
        return json.loads(check_text_file(path, _MAX_JSON).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def _size(path: Path) -> int:
    """Return the bytes of a regular file; 0 for a missing one, which fails when it is opened."""
    try:
        status = path.stat()
    except OSError:
        return 0
    kind = status.st_mode
    if not stat.S_ISREG(kind):
        names = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        raise UserError(f"{path} is {names.get(stat.S_IFMT(kind), 'a device')}: put the file "
                        "itself there")
    return status.st_size


def read_text(flag: str, path: str, *, if_empty: str) -> str:
    """Return the text of a file.

    Raises `UserError` if the file is missing, not UTF-8, or blank (with `if_empty` as the message).
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
    """Return the lines that are not blank, with their numbers from 1. Errors: see `read_text`."""
    text = read_text(flag, path, if_empty=if_empty)
    # splitlines() would also split at characters that are allowed in a JSON string.
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def read_json_texts(flag: str, path: str, key: str, *, if_empty: str,
                    clean: Callable[[str], str] = str) -> list[str]:
    """Return the text under `key` of each line of a .jsonl file, passed through `clean`.

    Raises `UserError`, also if a line is not JSON or its text is empty.
    """
    texts = []
    for number, record in read_json_records(flag, path, if_empty=if_empty):
        text = record.get(key) if isinstance(record, dict) else None
        text = clean(text) if isinstance(text, str) else ""
        if not text.strip():
            raise UserError(f"{flag} {path} line {number} has no text under the key `{key}`")
        texts.append(text)
    return texts


def read_json_records(flag: str, path: str, *, if_empty: str) -> Iterator[tuple[int, object]]:
    """Yield the number, from 1, and the value of each line of a .jsonl file. Raises `UserError`."""
    for number, line in read_lines(flag, path, if_empty=if_empty):
        yield number, parse_json(f"{flag} {path} line {number}", line)


def parse_json(where: str, line: str) -> Any:
    """Return the value of a line of JSON.

    Raises `UserError`, which begins with `where`, also for an escaped lone surrogate.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is not JSON: fix it") from None
    if "\\u" in line:  # only an escape can be a lone surrogate
        check_text(where, json.dumps(value, ensure_ascii=False))
    return value


def parse_json_object(flag: str, text: str) -> dict[str, Any]:
    """Return the JSON object in the value of a flag. Raises `UserError`."""
    value = parse_json(f"{flag} {short_repr(text)}", text)
    if not isinstance(value, dict):
        raise UserError(f"{flag} must be a JSON object, got {short_repr(text)}")
    return value


def read_yaml(flag: str, path: str | os.PathLike) -> object:
    """Return the value of a YAML file.

    Raises `UserError` if it is missing, unreadable, not UTF-8, not YAML or too large. A few lines
    of aliases can expand to billions of values, or refer to themselves.
    """
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            text = file.read(_MAX_YAML + 1)
        if len(text) > _MAX_YAML:
            raise _TooMuch
        value = yaml.load(text, _Loader)
        if _values(value, {}) > _MAX_VALUES:
            raise _TooMuch
        return value
    except OSError as error:
        raise UserError(f"cannot read {flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path} is not UTF-8 text: save it as UTF-8") from None
    except _TooMuch:
        raise UserError(f"{flag} {path} holds more than any configuration: fix it") from None
    except _Twice as error:
        raise UserError(f"{flag} {path} {error}: leave one out") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the latter of a date or depth
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"{flag} {path} is not valid YAML{where}") from None


class _TooMuch(Exception):
    """A YAML file has more values than `_MAX_VALUES`."""


class _Twice(Exception):
    """A mapping of a YAML file has a key twice: the key and its line."""


class _Loader(yaml.SafeLoader):
    """Loader that bounds merged mappings (``<<: [*a, *b]``) and refuses duplicate keys.

    PyYAML's own would keep the last of two equal keys.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        known = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if (key.tag, key.value) in known:
                    raise _Twice(f"line {key.start_mark.line + 1} gives "
                                 f"{short_repr(key.value)} again")
                known.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        size = len(node.value)
        for key, value in node.value:
            if key.tag == _MERGE:
                for item in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(item, yaml.MappingNode):
                        self.flatten_mapping(item)
                        size += len(item.value)
        if size > _MAX_VALUES:
            raise _TooMuch
        super().flatten_mapping(node)


def _values(value: object, known: dict[int, float]) -> float:
    """Count the values in a YAML value, with aliases expanded; infinite if it contains itself."""
    if not isinstance(value, (dict, list)):
        # 59:59:59 is an integer of base 60 and any length; a long one cannot be printed.
        return math.inf if isinstance(value, int) and value.bit_length() > _MAX_BITS else 1
    if id(value) not in known:
        known[id(value)] = math.inf
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_values(item, known) for item in inner)
    return known[id(value)]


_HEAD = "###\nArticle: "
_TAIL = "\n\nSummarize the above article in 1 sentence."


def strip_prompt(text: str) -> str:
    """Return the article without the prompt for a summary around it."""
    return text.strip().removeprefix(_HEAD).removesuffix(_TAIL).strip()


MAX_TOKENS = 64
"""Default number of new tokens; summaries of XSum have about 25."""


@dataclass(frozen=True)
class Article:
    """A line of the input: the whole prompt, with the article inside of it.

    A summary ends before the first text of `stop`, or after `max_tokens` tokens.
    """

    prompt: str
    reference: str
    stop: tuple[str, ...] = ()
    max_tokens: int = MAX_TOKENS

    @property
    def lead(self) -> str:
        """The first sentence of the article."""
        return first_sentence(strip_prompt(self.prompt))


def read_summary_tasks(path: str, *, max_tasks: int | None = None, max_tokens: int | None = None
                       ) -> list[Article]:
    """Read at most `max_tasks` tasks from a .jsonl file. `max_tokens` overrides each task's value.

    A line has `article` and `summary_gt`, and may have `stop` (a text or several) and `max_tokens`.
    Temperature and top_p are ignored, because decoding is greedy. Raises `UserError`, with the line
    number, if the file is missing or a line has another form.
    """
    records = read_json_records("--input-path", path,
                                if_empty="holds no articles: write one JSON object a line")
    tasks = []
    for number, record in records:
        where = f"--input-path {path} line {number}"
        record = record if isinstance(record, dict) else {}
        for key in ("article", "summary_gt"):
            if not isinstance(record.get(key), str) or not record[key].strip():
                raise UserError(f"{where} has no text under the key `{key}`")
        task_tokens = record.get("max_tokens", MAX_TOKENS)
        if isinstance(task_tokens, bool) or not isinstance(task_tokens, int) or task_tokens < 1:
            raise UserError(f"{where}: `max_tokens` must be an integer above 0, got "
                            f"{task_tokens!r}")
        tasks.append(Article(record["article"], record["summary_gt"], _stops(where, record),
                             max_tokens or task_tokens))
        if len(tasks) == max_tasks:
            break
    return tasks


def _stops(where: str, record: dict) -> tuple[str, ...]:
    stops = record.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else stops
    if not isinstance(stops, (list, tuple)) or not all(
            isinstance(text, str) and text for text in stops):
        raise UserError(f"{where}: `stop` must be a text or a list of them, none empty, "
                        f"got {stops!r:.80}")
    return tuple(stops)


# A full stop, closing quotes or brackets, and the beginning of a sentence.
_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s+[\"'“‘(\[]?[A-Z0-9£$€])")
# A full stop after one of these, or after a single capital (U.S.), does not end a sentence.
_SHORT = re.compile(r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Sir|Rev|Gen|Col|Lt|Capt|Sgt|Gov|Sen|Rep|Hon|"
                    r"Jr|Sr|No|vs|etc|Inc|Ltd|Co|Corp)\.$")


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, or all of it: the baseline *lead-1*."""
    text = text.strip()
    for match in _END.finditer(text):
        if not _SHORT.search(text[: match.start() + 1]):
            return text[: match.end()]
    return text


@dataclass(frozen=True)
class Turn:
    """One turn of a user; `number` counts the turns of a conversation from 1."""

    question_id: int | str
    number: int
    text: str


def read_conversations(path: str) -> list[list[Turn]]:
    """Read the turns of each conversation, in the order of the file.

    The default `question_id` is the line number. Raises `UserError`, with the line number, if the
    file is missing, empty or not UTF-8, or if a line is blank (except at the end), is not JSON, or
    has no list of texts under `turns`.
    """
    lines = read_lines("--input-path", path,
                       if_empty="holds no conversations: write one JSON object a line")
    for expected, (number, _) in enumerate(lines, 1):
        if number != expected:
            raise UserError(f"--input-path {path} line {expected} is blank: take it out")
    return [_turns(f"--input-path {path} line {number}", number, line) for number, line in lines]


def _turns(where: str, number: int, line: str) -> list[Turn]:
    record = parse_json(where, line)
    texts = record.get("turns") if isinstance(record, dict) else None
    if (not isinstance(texts, list) or not texts
            or not all(isinstance(text, str) and text.strip() for text in texts)):
        raise UserError(f"{where} has no list of texts under the key `turns`")
    question_id = record.get("question_id", number)
    if isinstance(question_id, bool) or not isinstance(question_id, (int, str)):
        raise UserError(f"{where} has a `question_id` that is neither a number nor a text")
    return [Turn(question_id, turn, text) for turn, text in enumerate(texts, 1)]
