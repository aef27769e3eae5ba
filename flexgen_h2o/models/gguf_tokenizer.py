"""The tokenizer of a GGUF file, as transformers makes it of the file's words and merges."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from flexgen_h2o.errors import UserError, shown
from flexgen_h2o.models.gguf_header import GgufHeader
from flexgen_h2o.models.gguf_metadata import Metadata

# Ways to split texts before byte pairs, by llama.cpp's names (src/llama-vocab.cpp).
_PLAIN = frozenset({"default", "gpt-2", "gpt2", "olmo", "smollm", "mpt", "trillion"})  # GPT-2's
_DIGITS = frozenset({"refact", "starcoder"})  # GPT-2's, with each digit by itself


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
        _tokenizer(header, split).save_pretrained(folder)
    except BaseException as error:  # a parser of files from anywhere raises anything
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"{header.source}: transformers cannot read its tokenizer: {reason}"
                        ) from error


def _tokenizer(header: GgufHeader, split: str) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Of no family: AutoTokenizer reads the whole configuration first, and of fewer architectures.
    made = PreTrainedTokenizerFast.from_pretrained(str(header.source.parent),
                                                   gguf_file=header.source.name)
    if split in _DIGITS:
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return made


def _splits() -> Collection[str]:
    """The splits that come out right."""
    ours = _PLAIN | _DIGITS
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # an older transformers knows them by architecture
        return ours | {"llama-bpe", "llama3", "llama-v3", "qwen2", "tekken"}
    return ours | GGUF_PRE_TOKENIZER_SPLITS.keys()
