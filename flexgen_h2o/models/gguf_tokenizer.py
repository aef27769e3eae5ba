"""The tokenizer of a GGUF file, as transformers makes it of the file's words and merges."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from flexgen_h2o.errors import UserError, shown
from flexgen_h2o.models.gguf_header import GgufHeader
from flexgen_h2o.models.gguf_metadata import Metadata

_PLAIN = frozenset({"default", "gpt-2", "gpt2", "olmo", "smollm", "mpt", "trillion"})
"""Splits of texts before byte pairs that are GPT-2's."""


def save_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write the tokenizer's files, its chat template among them, into a Hugging Face folder.

    Raises
    ------
    UserError
        If transformers cannot make the tokenizer, or does not know by which pattern it splits
        texts: it would take GPT-2's, and other tokens would come out.
    """
    meta = Metadata(header)
    split = meta.text("tokenizer.ggml.pre", "default")
    if meta.text("tokenizer.ggml.model", "none") == "gpt2" and split not in _splits():
        raise UserError(f"{header.source}: transformers does not know how its tokenizer, "
                        f"{shown(split)}, splits texts; give the model's Hugging Face folder "
                        "instead")
    try:
        _tokenizer(header).save_pretrained(folder)
    except BaseException as error:  # a parser of files from anywhere raises anything
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"{header.source}: transformers cannot read its tokenizer: {reason}"
                        ) from error


def _tokenizer(header: GgufHeader) -> Any:
    from transformers import PreTrainedTokenizerFast

    # Of no family: AutoTokenizer reads the whole configuration first, and of fewer architectures.
    return PreTrainedTokenizerFast.from_pretrained(str(header.source.parent),
                                                   gguf_file=header.source.name)


def _splits() -> Collection[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # transformers before 5.20 knows them by architecture
        return _PLAIN | {"llama-bpe", "llama3", "llama-v3", "qwen2", "tekken"}
    return _PLAIN | GGUF_PRE_TOKENIZER_SPLITS.keys()
