"""Readers of the files that runs write."""

import csv
import json
import os


def read_csv(path: str | os.PathLike) -> list[dict[str, str]]:
    """The rows of a CSV file, by the names in its header."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_jsonl(path: str | os.PathLike) -> list[dict]:
    """The records of a file of a JSON object a line."""
    with open(path, encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]
