"""Tiny models with a tokenizer of words, for what needs text."""

from __future__ import annotations

import shutil
from pathlib import Path

WORDS = [f"w{number}" for number in range(119)] + ["###"]
"""The word of each token id, as many as the vocabulary of the tiny models of LLaMA's family."""


def with_words(folder: Path, target: Path, *, chat_template: str | None = None) -> str:
    """Copy a tiny model and give it a tokenizer; returns the new folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(folder, target, dirs_exist_ok=True)
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(target)
    return str(target)
