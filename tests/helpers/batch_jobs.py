"""Jobs of the batch command: requests, files, and answers."""

import json
from pathlib import Path

from helpers.read_back import read_jsonl


def requests(count: int = 12) -> list[object]:
    """Return requests of several lengths and parameters."""
    return [{"id": f"r{number}", "prompt": " ".join(f"w{3 + (number * 7 + i) % 90}"
                                                    for i in range(2 + number * 5 % 11)),
             "max_tokens": 3 + number % 4, "temperature": (0, 1, 0.7)[number % 3],
             "n": 1 + (number == 4), "presence_penalty": number % 2} for number in range(count)]


def write_lines(path: Path, lines: list[object]) -> str:
    """Write a line of JSON for each value; texts are lines as they are. Returns the path."""
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n"
                            for line in lines), encoding="utf-8")
    return str(path)


def answers(path: Path) -> dict[str, object]:
    """Return the errors or choices by the id of their request; no id is there twice."""
    lines = read_jsonl(path)
    by_id = {line["id"]: (line["response"] or {}).get("body", {}).get("choices") or line["error"]
             or line["response"]["body"]["error"] for line in lines}
    assert len(by_id) == len(lines)
    return by_id


def job_flags(folder: Path, model: str, output: str, *extra: str) -> list[str]:
    """Return the flags of a job on ``in.jsonl`` in a folder."""
    return ["-i", str(folder / "in.jsonl"), "-o", str(folder / output), "--model", model,
            "--dtype", "float32", "--device", "cpu", "--gpu-batch-size", "2", *extra]
