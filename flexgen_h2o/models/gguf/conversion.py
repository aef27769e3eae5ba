"""Conversion of GGUF files to Hugging Face folders: configuration, tokenizer and weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.errors import UserError, short_repr
from flexgen_h2o.files.disk_cache import build_once
from flexgen_h2o.models.convert import (
    ByteProgress,
    converted,
    natural_key,
    torch_dtype,
    write_weights,
)
from flexgen_h2o.models.gguf.checkpoint import read_gguf
from flexgen_h2o.models.gguf.config import MXFP4, config_of, has_mxfp4_experts
from flexgen_h2o.models.gguf.header import GgufHeader, Metadata, read_header
from flexgen_h2o.models.registry import retry_imports

_GENERATION = ("bos_token_id", "pad_token_id")

# Pre-tokenizers before BPE, by llama.cpp's names (src/llama-vocab.cpp).
_PLAIN = frozenset({"default", "gpt-2", "gpt2", "olmo", "smollm", "mpt", "trillion"})  # GPT-2's
_DIGITS = frozenset({"refact", "starcoder"})  # GPT-2's, and each digit is a token
# BOS is the default first token with these.
_BOS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral",
                        "midm-2.0", "lfm2", "jina-v5-nano", "tekken", "chameleon"})
# With these a word of the vocabulary is one token even if no merges produce it.
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
"""Texts of the control tokens that end generation in llama.cpp."""
_NO_ENDS = (({"<|return|>", "<|call|>"}, "<|end|>"), ({"<|calls|>", "<|flush|>"}, "<|end|>"),
            ({"<|tool_response>"}, "</s>"))
"""If the vocabulary has the first tokens, the other one separates messages and ends nothing."""


def convert_gguf(source: Path, dtype: str | None = None,
                 progress: ByteProgress | None = None) -> Path:
    """Return the Hugging Face folder of a GGUF file, converted into the user's cache once.

    Weights are dequantized in chunks of bounded memory, except for experts in MXFP4. The changes of
    llama.cpp's converter to tensors are undone. The tokenizer with its chat template comes from
    transformers' GGUF support.

    Parameters
    ----------
    source : Path
        A `.gguf` file of one of `architectures.ARCHITECTURES`; of a split model the first file.
    dtype : str, optional
        "float32" (the default, lossless), "float16" or "bfloat16".
    progress : callable, optional
        Called with (bytes done, bytes in all).

    Returns
    -------
    Path
        A folder in `cache_dir()` with config.json, model.safetensors and tokenizer files.

    Raises
    ------
    UserError
        If the file is damaged or of another architecture, or the cache cannot be written.
    """
    source = Path(source).resolve()
    dtype = dtype or "float32"
    target = torch_dtype(dtype)

    def build(folder: Path) -> None:
        header, tensors = read_gguf(source)
        layout = {name: (tensors[name].dtype(target), tensors[name].shape)
                  for name in sorted(tensors, key=natural_key)}

        def chunks(name: str) -> Iterator[torch.Tensor]:
            return tensors[name].chunks(target)

        # First the small files, so that their errors precede the long part.
        packed = any(dtype == torch.uint8 for dtype, _ in layout.values())
        _write_small_files(folder, header, dtype, {"quantization_config": MXFP4} if packed else {})
        write_weights(folder, layout, chunks, cache=converted(), progress=progress)

    return build_once(read_header(source).files, dtype, source.stem, build, cache=converted())


def describe_gguf(header: GgufHeader) -> Path:
    """Return a folder with the configuration and the tokenizer of a GGUF file, and no weights.

    It is cached, because transformers takes seconds for the tokenizer.

    Raises
    ------
    UserError
        If the file is of another architecture, or the cache cannot be written.
    """
    def build(folder: Path) -> None:
        _write_small_files(folder, header, None, {"quantization_config": MXFP4}
                           if has_mxfp4_experts(header) else {})

    # Models of other weights have the same description: only the headers matter.
    ends: dict[Path, int] = {}
    for tensor in header.tensors.values():
        ends[tensor.source] = min(tensor.offset, ends.get(tensor.source, tensor.offset))
    return build_once(header.files, "description", header.source.stem, build, cache=converted(),
                      ends=ends)


def _write_small_files(folder: Path, header: GgufHeader, dtype: str | None,
                       extra_config: Mapping[str, Any]) -> None:
    """Write configuration and tokenizer."""
    config = {**config_of(header, dtype), **extra_config}
    ends = save_tokenizer(header, folder)
    suppressed = header.values.get("tokenizer.ggml.suppress_tokens")
    generation = {name: config[name] for name in _GENERATION} | {
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "suppress_tokens": list(suppressed) if isinstance(suppressed, tuple) else None}
    generation = {name: value for name, value in generation.items() if value is not None}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2))


def save_tokenizer(header: GgufHeader, folder: Path) -> list[int]:
    """Write the tokenizer's files and chat template into a Hugging Face folder.

    Returns
    -------
    list of int
        The tokens that end a text, as in llama.cpp; the file's EOS is the first.

    Raises
    ------
    UserError
        If transformers cannot build the tokenizer, or does not know its pre-tokenizer. It would
        use GPT-2's, which gives other tokens.
    """
    meta = Metadata(header)
    split = meta.text("tokenizer.ggml.pre", "default")
    if meta.text("tokenizer.ggml.model", "none") == "gpt2" and split not in _splits():
        raise UserError(f"{header.source}: transformers does not know how its tokenizer, "
                        f"{short_repr(split)}, splits texts; give the model's Hugging Face folder "
                        "instead")
    try:
        tokenizer = _tokenizer(meta, split)
        tokenizer.save_pretrained(folder)
        return _end_tokens(meta, tokenizer)
    except BaseException as error:  # parsers raise anything for untrusted files
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
    # An add_bos_token of the file overrides this one.
    options = {"add_bos_token": True} if byte_level and split in _BOS_FIRST else {}
    # AutoTokenizer would read the whole configuration first, and supports fewer architectures.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(source.parent), gguf_file=source.name,
                                                        **options)
    backend = tokenizer.backend_tokenizer
    if byte_level and split in _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if byte_level and split in _IGNORING_MERGES:
        backend.model.ignore_merges = True
    if kind == "gemma4":  # the file may say otherwise; transformers never adds BOS
        tokenizer.add_bos_token = True
    if kind == "llama" and not meta.flag("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer, backend.pre_tokenizer = normalizers.Replace(" ", "\u2581"), None
        backend.decoder = decoders.Sequence([
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _end_tokens(meta: Metadata, tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that end a text."""
    size = meta.tensor("token_embd.weight").shape[0]  # transformers appends tokens
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()
               if token.special and number < size}
    named = [token for key in _END_KEYS if (token := meta.token(key)) is not None]
    known = [number for text, number in special.items() if text in _END_TEXTS]
    ends = dict.fromkeys([*named, *known])
    for tokens, text in _NO_ENDS:
        if tokens <= special.keys() and text in special:
            ends.pop(special[text], None)
    return [*ends]


@retry_imports
def _mapped_splits() -> Set[str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return GGUF_PRE_TOKENIZER_SPLITS.keys()


def _splits() -> Set[str]:
    """Return the pre-tokenizers that this module or transformers implements."""
    supported = _PLAIN | _DIGITS
    try:
        return supported | _mapped_splits()
    except ImportError:  # older releases of transformers
        return supported | {"llama-bpe", "llama3", "llama-v3", "qwen2", "tekken"}
