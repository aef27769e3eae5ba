"""GGUF files -> Hugging Face folders, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.models.convert import (
    ByteProgress,
    build_once,
    converted,
    natural_key,
    torch_dtype,
    write_weights,
)
from flexgen_h2o.models.gguf.checkpoint import read_gguf
from flexgen_h2o.models.gguf.config import MXFP4, config_of, has_mxfp4_experts
from flexgen_h2o.models.gguf.header import GgufHeader, read_header
from flexgen_h2o.models.gguf.tokenizer import save_tokenizer

_GENERATION = ("bos_token_id", "pad_token_id")


def convert_gguf(source: Path, dtype: str | None = None,
                 progress: ByteProgress | None = None) -> Path:
    """The Hugging Face folder of a GGUF file, converted into the user's cache once.

    Weights are dequantized in chunks, so memory stays small whatever the model's size; experts in
    MXFP4 stay as they are. What llama.cpp's converter does to tensors is undone. The tokenizer
    (with its chat template) comes from transformers' GGUF support.

    Parameters
    ----------
    source : Path
        A `.gguf` file of one of `gguf_architectures.ARCHITECTURES`, or the first of several.
    dtype : str, optional
        "float32" (the default, exactly the values of the GGUF), "float16" or "bfloat16".
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

        # The small files first: what they refuse is then refused before the long part.
        packed = any(dtype == torch.uint8 for dtype, _ in layout.values())
        _write_small_files(folder, header, dtype, {"quantization_config": MXFP4} if packed else {})
        write_weights(folder, layout, chunks, keep=converted(), progress=progress)

    return build_once(read_header(source).files, dtype, source.stem, build, keep=converted())


def describe_gguf(header: GgufHeader) -> Path:
    """Return a folder with the configuration and the tokenizer of a GGUF file, and no weights.

    It is made in the user's cache once: transformers takes seconds for the tokenizer.

    Raises
    ------
    UserError
        If the file is of another architecture, or the cache cannot be written.
    """
    def build(folder: Path) -> None:
        _write_small_files(folder, header, None, {"quantization_config": MXFP4}
                           if has_mxfp4_experts(header) else {})

    return build_once(header.files, "description", header.source.stem, build, keep=converted())


def _write_small_files(folder: Path, header: GgufHeader, dtype: str | None,
                       more: Mapping[str, Any]) -> None:
    """Write configuration and tokenizer."""
    config = {**config_of(header, dtype), **more}
    ends = save_tokenizer(header, folder)
    suppressed = header.values.get("tokenizer.ggml.suppress_tokens")
    generation = {name: config[name] for name in _GENERATION} | {
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "suppress_tokens": list(suppressed) if isinstance(suppressed, tuple) else None}
    generation = {name: value for name, value in generation.items() if value is not None}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2))
