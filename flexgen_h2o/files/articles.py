"""Articles to summarize and conversations, from .jsonl files. No torch.

Articles have the format of the H2O repository's ``xsum_0shot.jsonl``: a JSON object per line with
the text under `article`, inside of a prompt for a summary. Conversations have MT-Bench's format
(arXiv 2306.05685): the user's turns under `turns`, and `question_id`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import parse_json, read_json_records, read_lines

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
