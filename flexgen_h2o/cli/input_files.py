"""Prompts of a run: from files, or random tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.config.workload import Workload
from flexgen_h2o.files.readers import json_texts, read_lines


def read_prompts(path: str) -> list[str]:
    """Read prompts: ``.txt`` one a line, ``.jsonl`` the key `prompt` of each line.

    Blank lines are skipped. Raises `UserError` (with the line number, for .jsonl) when the file
    is missing, empty, not UTF-8, or a line is not JSON or has no `prompt`.
    """
    if_empty = "holds no prompts: write one a line"
    if path.endswith(".jsonl"):
        return json_texts("--prompts", path, "prompt", if_empty=if_empty)
    return [line.rstrip("\r") for _, line in read_lines("--prompts", path, if_empty=if_empty)]


def synthetic_prompts(config: RunConfig, vocab_size: int) -> list[list[int]]:
    """Random token ids for each sequence, of one block by default; the same for the same seed."""
    draw = random.Random(config.seed)
    count = config.num_prompts or (
        config.resolved_gpu_batch_size * config.resolved_num_gpu_batches)
    return [draw.choices(range(vocab_size), k=config.prompt_len) for _ in range(count)]


def workload(config: RunConfig, texts: Sequence[str]) -> Workload:
    """The workload, for a memory plan before there is a tokenizer.

    A token has about four bytes of text; three leave some room. `LLM` plans again when it knows.
    """
    prompt_len, count = config.prompt_len, len(texts) or config.num_prompts
    batch, batches = config.resolved_gpu_batch_size, config.resolved_num_gpu_batches
    if texts:
        prompt_len = max(len(text.encode("utf-8")) for text in texts) // 3 + 1
    if count:
        batch = min(batch, count)
        batches = min(batches, -(-count // batch))
    return Workload(prompt_len, config.gen_len, gpu_batch_size=batch, num_gpu_batches=batches)
