"""Token ids that all systems of a scenario get: the same first ones at every batch."""

from __future__ import annotations

import random
from pathlib import Path

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import json_texts


def random_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Seeded token ids below `vocab`, none of the special ones that come first."""
    draw = random.Random(0)
    return [[draw.randrange(5, vocab) for _ in range(length)] for _ in range(count)]


def text_prompts(path: str, key: str, folder: Path, count: int) -> list[list[int]]:
    """Token ids of the first lines' texts, each as long as it is. Loads transformers.

    Raises `UserError` when the file is missing, has less than `count` lines or no such texts.
    """
    texts = json_texts("prompts", path, key, if_empty="holds no prompts")
    if len(texts) < count:
        raise UserError(f"prompts {path} has {len(texts)} lines and {count} are needed: lower "
                        "`most` or `batch`")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text).input_ids for text in texts[:count]]
