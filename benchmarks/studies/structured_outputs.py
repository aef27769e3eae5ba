"""Generate JSON in ten schemas with a real model: how many documents are valid, and what it costs.

    python benchmarks/studies/structured_outputs.py models/qwen2.5-coder-1.5b.gguf --csv rows.csv

`check_quality.py` fetches that file.

First `--documents` chats with each schema, greedy. Then 16 of these chats with and without the
schemas in turn, for the same number of tokens. `step_factor` is the median step with schemas over
the median one without: both sample from the same rows of logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import jsonschema

from flexgen_h2o import LLM, Policy, SamplingParams, StructuredOutputs
from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.files.rows import CsvWriter
from flexgen_h2o.metrics.provenance import cpu_model, origin

SCHEMAS = "benchmarks/data/schemas.jsonl"
SEQUENCES, TOKENS = 16, 32
COLUMNS = ("date", "version", "commit", "host", "cpu", "model", "schemas", "documents", "valid",
           "median_tokens", "sequences", "step_ms", "plain_step_ms", "step_factor")

Chat = tuple[str, dict]
"""The user's message, and the schema of the answer."""


def read_chats(count: int) -> list[Chat]:
    """Return `count` chats of each schema, in turns."""
    rows = [json.loads(line) for line in Path(SCHEMAS).read_text(encoding="utf-8").splitlines()]
    return [(row["prompt"].format(subject) + " Answer in JSON.", row["schema"])
            for subjects in zip(*(row["subjects"][:count] for row in rows), strict=True)
            for row, subject in zip(rows, subjects, strict=True)]


def is_valid(text: str, schema: dict) -> bool:
    """Return whether a text is JSON in a schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"not valid: {text!r}: {error}")
        return False
    return True


def decode_steps(llm: LLM, chats: Sequence[Chat], structured: bool) -> list[float]:
    """Return the seconds of each decode step of `TOKENS` tokens."""
    forms = [StructuredOutputs(json=schema) for _, schema in chats]
    params = [SamplingParams(max_new_tokens=TOKENS, min_new_tokens=None if structured else TOKENS,
                             structured_outputs=form if structured else None) for form in forms]
    llm.chat([[{"role": "user", "content": message}] for message, _ in chats], params)
    return llm.stats.step_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--documents", type=int, default=10, help="of each schema")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", default="benchmarks/results/structured_outputs.csv")
    args = parser.parse_args()
    chats = read_chats(args.documents)
    rows = CsvWriter(args.csv, COLUMNS)
    with LLM(args.model, activation_bits=8,
             policy=Policy(gpu_batch_size=SEQUENCES, refill_share=0.5)) as llm:
        outputs = llm.chat(
            [[{"role": "user", "content": message}] for message, _ in chats],
            [SamplingParams(max_new_tokens=args.max_tokens,
                            structured_outputs=StructuredOutputs(json=schema))
             for _, schema in chats])
        valid = sum(is_valid(output.text, schema)
                    for output, (_, schema) in zip(outputs, chats, strict=True))
        print(f"{valid} of {len(chats)} documents are valid")
        steps: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * args.rounds + 2):
            seconds = decode_steps(llm, chats[:SEQUENCES], number % 2 == 0)
            if number >= 2:  # after a warm-up of both
                steps[number % 2 == 0] += seconds[1:]
        step, plain = (1e3 * statistics.median(steps[structured]) for structured in (True, False))
        rows.write({
            **origin(), "cpu": cpu_model(), "model": Path(args.model).name, "schemas": len({
                json.dumps(schema) for _, schema in chats}), "documents": len(chats),
            "valid": valid, "sequences": SEQUENCES, "step_ms": step, "plain_step_ms": plain,
            "median_tokens": statistics.median(len(output.token_ids) for output in outputs),
            "step_factor": step / plain})
        rows.finish()
        print(f"a step takes {step:.1f} ms, and {plain:.1f} without schemas")


if __name__ == "__main__":
    sys.exit(exit_status(main))
