"""Conversations to stream: the turns of a .jsonl file in MT-Bench's form. No torch.

A line is a JSON object with the user's turns under `turns`, and `question_id` (arXiv 2306.05685).
"""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import json_value, read_lines


@dataclass(frozen=True)
class Turn:
    """One turn of a user. `number` counts the turns of one conversation from 1."""

    question_id: int | str
    number: int
    text: str


def read_conversations(path: str) -> list[list[Turn]]:
    """Read the turns of each conversation, in the order of the file.

    A conversation without a `question_id` is known by its line's number. Raises `UserError`, with
    the line's number where there is one, when the file is missing, empty or not UTF-8, or a line
    is blank (but at the end), is not JSON, or has no list of texts under `turns`.
    """
    lines = read_lines("--input-path", path,
                       if_empty="holds no conversations: write one JSON object a line")
    for place, (number, _) in enumerate(lines, 1):
        if number != place:
            raise UserError(f"--input-path {path} line {place} is blank: take it out")
    return [_turns(f"--input-path {path} line {number}", number, line) for number, line in lines]


def _turns(where: str, number: int, line: str) -> list[Turn]:
    record = json_value(where, line)
    texts = record.get("turns") if isinstance(record, dict) else None
    if (not isinstance(texts, list) or not texts
            or not all(isinstance(text, str) and text.strip() for text in texts)):
        raise UserError(f"{where} has no list of texts under the key `turns`")
    question_id = record.get("question_id", number)
    if isinstance(question_id, bool) or not isinstance(question_id, (int, str)):
        raise UserError(f"{where} has a `question_id` that is neither a number nor a text")
    return [Turn(question_id, place, text) for place, text in enumerate(texts, 1)]
