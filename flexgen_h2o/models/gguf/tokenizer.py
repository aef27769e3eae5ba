"""The tokenizer of a GGUF file, as transformers makes it of the file's words and merges."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from flexgen_h2o.config.imports import retry_imports
from flexgen_h2o.errors import UserError, shown
from flexgen_h2o.models.gguf.header import GgufHeader, Metadata

# Ways to split texts before byte pairs, by llama.cpp's names (src/llama-vocab.cpp).
_PLAIN = frozenset({"default", "gpt-2", "gpt2", "olmo", "smollm", "mpt", "trillion"})  # GPT-2's
_DIGITS = frozenset({"refact", "starcoder"})  # GPT-2's, with each digit by itself
# Where the file does not say whether BOS comes first, it does with these.
_BOS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral",
                        "midm-2.0", "lfm2", "jina-v5-nano", "tekken", "chameleon"})
# With these a word of the vocabulary is one token, also where merges do not lead to it.
_IGNORING_MERGES = (_BOS_FIRST - {"chameleon"}) | {"minicpm5", "youtu", "granite-embed-multi-97m"}

_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    # of a file or repository in code models
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"})
"""Control tokens that end a text in llama.cpp, by their text."""
_NO_ENDS = (({"<|return|>", "<|call|>"}, "<|end|>"), ({"<|calls|>", "<|flush|>"}, "<|end|>"),
            ({"<|tool_response>"}, "</s>"))
"""Beside the first tokens the other one separates messages and does not end a text."""


def save_tokenizer(header: GgufHeader, folder: Path) -> list[int]:
    """Write the tokenizer's files, its chat template among them, into a Hugging Face folder.

    Returns
    -------
    list of int
        The tokens that end a text, as in llama.cpp; the file's EOS comes first.

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
        made = _tokenizer(meta, split)
        made.save_pretrained(folder)
        return _end_tokens(meta, made)
    except BaseException as error:  # a parser of files from anywhere raises anything
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"{header.source}: transformers cannot read its tokenizer: {reason}"
                        ) from error


@retry_imports
def _tokenizer(meta: Metadata, split: str) -> Any:
    from tokenizers import decoders, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, source = meta.text("tokenizer.ggml.model", "none"), meta.source
    byte_level = kind == "gpt2"
    # The file's own add_bos_token takes the place of this one.
    options = {"add_bos_token": True} if byte_level and split in _BOS_FIRST else {}
    # Of no family: AutoTokenizer reads the whole configuration first, and of fewer architectures.
    made = PreTrainedTokenizerFast.from_pretrained(str(source.parent), gguf_file=source.name,
                                                   **options)
    backend = made.backend_tokenizer
    if byte_level and split in _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if byte_level and split in _IGNORING_MERGES:
        backend.model.ignore_merges = True
    if kind == "llama" and not meta.flag("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer, backend.pre_tokenizer = normalizers.Replace(" ", "\u2581"), None
        backend.decoder = decoders.Sequence([
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def _end_tokens(meta: Metadata, tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that end a text."""
    size = meta.tensor("token_embd.weight").shape[0]  # transformers adds tokens of its own behind
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()
               if token.special and number < size}
    named = [token for key in _END_KEYS if (token := meta.token(key)) is not None]
    known = [number for text, number in special.items() if text in _END_TEXTS]
    found = dict.fromkeys([*named, *known])
    for beside, text in _NO_ENDS:
        if beside <= special.keys() and text in special:
            found.pop(special[text], None)
    return [*found]


@retry_imports
def _mapped_splits() -> Collection[str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return GGUF_PRE_TOKENIZER_SPLITS.keys()


def _splits() -> Collection[str]:
    """The splits that come out right."""
    ours = _PLAIN | _DIGITS
    try:
        return ours | _mapped_splits()
    except ImportError:  # an older transformers knows them by architecture
        return ours | {"llama-bpe", "llama3", "llama-v3", "qwen2", "tekken"}
