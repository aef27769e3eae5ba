"""GGUF files of the LLaMA architecture -> Hugging Face folders, tensor by tensor."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from flexgen_h2o.errors import UserError, shown
from flexgen_h2o.models.convert import (
    ByteProgress,
    build_once,
    converted,
    natural_key,
    torch_dtype,
    write_weights,
)
from flexgen_h2o.models.gguf_header import check_header

if TYPE_CHECKING:
    import numpy as np

_OUTER = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_INNER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_ROPE_FACTORS = "rope_freqs.weight"
_TYPES = "gguf_types.json"
_CHUNK_ELEMENTS = 4 << 20  # dequantized at a time: 16 MB of float32
# Every LLaMA 3.x was published with these three; only the factor differs (8 or 32).
_LLAMA3_ROPE = MappingProxyType(
    {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the GGUF: rows of packed blocks, and the order its rows are wanted in."""

    data: np.ndarray
    kind: Any
    shape: tuple[int, ...]
    order: np.ndarray | None

    def packed(self, rows: slice) -> np.ndarray:
        """Some rows as they lie in the file, in the order of the Hugging Face tensor."""
        return self.data[rows if self.order is None else self.order[rows]]


def convert_gguf(source: Path, dtype: str | None = None,
                 progress: ByteProgress | None = None) -> Path:
    """The Hugging Face folder of a GGUF file, converted into the user's cache once.

    Weights are dequantized in chunks, so memory stays small whatever the model's size. The
    permutation that llama.cpp applies to the rows of the query and key projections is undone.
    Configuration and tokenizer (with its chat template) come from transformers' GGUF support.

    Parameters
    ----------
    source : Path
        A `.gguf` file of architecture `llama` (LLaMA, Mistral, SmolLM2 and their like).
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
        reader, tensors = read_gguf(source)
        layout = {name: (target, tensors[name].shape) for name in sorted(tensors, key=natural_key)}
        chunks = _dequantizer(source, tensors, target)
        # The small files first: what they refuse is then refused before the long part.
        _write_config(source, folder, dtype, _config_of(source, reader, tensors))
        kinds = sorted({tensor.kind.name for tensor in tensors.values()})
        (folder / _TYPES).write_text(json.dumps(kinds))
        write_weights(folder, layout, chunks, keep=converted(), progress=progress)

    return build_once([source], dtype, source.stem, build, keep=converted())


def gguf_types(folder: Path) -> frozenset[str]:
    """The GGUF types, such as "Q4_1", of what `convert_gguf` made a folder from.

    The file itself takes seconds to open.
    """
    return frozenset(json.loads((folder / _TYPES).read_text(encoding="utf-8")))


def read_gguf(source: Path) -> tuple[Any, dict[str, GgufTensor]]:
    """The reader of a GGUF file, and its tensors by Hugging Face name, mapped and not yet read.

    Raises `UserError` if the file is damaged or of another architecture.
    """
    reader = _open(source)
    return reader, _tensors(source, reader)


def _open(source: Path) -> Any:
    from gguf import GGUFReader

    check_header(source)
    try:
        reader = GGUFReader(source)
    except Exception as error:  # a parser of files from anywhere raises anything
        reason = " ".join(str(error).split())
        raise UserError(f"{source} is not a usable GGUF file or is truncated: {reason}") from error
    architecture = _field(reader, "general.architecture", "unknown")
    if architecture != "llama":
        raise UserError(
            f"{source} is a GGUF of architecture {architecture!r}; only 'llama' can be converted: "
            "give the Hugging Face folder of this model instead"
        )
    if _field(reader, "llama.expert_count", 0):
        raise UserError(f"{source} is a mixture of experts, which this engine does not support")
    layers = _field(reader, "llama.block_count", 0)
    if not isinstance(layers, int) or layers > len(reader.tensors):
        raise UserError(f"{source} has {len(reader.tensors)} tensors, but calls for "
                        f"{shown(layers)} layers; it is damaged")
    return reader


def _field(reader: Any, key: str, default: Any) -> Any:
    field = reader.get_field(key)
    try:
        return default if field is None else field.contents()
    except Exception as error:  # as text that is not UTF-8
        raise UserError(f"the GGUF file's value {key} cannot be read: {error}") from error


def _tensors(source: Path, reader: Any) -> dict[str, GgufTensor]:
    heads = _field(reader, "llama.attention.head_count", None)
    kv_heads = _field(reader, "llama.attention.head_count_kv", heads)
    if not (isinstance(heads, int) and isinstance(kv_heads, int) and heads > 0 and kv_heads > 0):
        raise UserError(f"{source}: one number of attention heads for all layers is needed")
    tensors = {}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:  # part of the configuration, as transformers sees it
            continue
        name, block = _name(source, tensor.name)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if not all(shape):  # its other sizes are bounded by no bytes of the file
            raise UserError(f"{source}: tensor {tensor.name} is empty, of shape {shape}")
        groups = {"attn_q": heads, "attn_k": kv_heads}.get(block)
        if groups and shape[0] % (2 * groups):
            raise UserError(f"{source}: {tensor.name} has {shape[0]} rows for {groups} heads")
        order = _row_order(shape[0], groups) if groups else None
        tensors[name] = GgufTensor(tensor.data, tensor.tensor_type, shape, order)
    return tensors


def _name(source: Path, name: str) -> tuple[str, str]:
    """The Hugging Face name of a GGUF tensor, and its block's name ("attn_q")."""
    if name in _OUTER:
        return _OUTER[name], ""
    match = re.fullmatch(r"blk\.([0-9]+)\.([a-z_]+)\.(weight|bias)", name)
    if match is None or match[2] not in _INNER:
        raise UserError(f"{source}: tensor {name} is no part of the LLaMA architecture")
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}", match[2]


def _row_order(rows: int, heads: int) -> np.ndarray:
    """Row of a GGUF projection that is row i of the Hugging Face one.

    llama.cpp rotates neighbours (2i, 2i + 1), transformers rotates halves (i, i + d/2), so
    llama.cpp's converter interleaves the halves of each head; this takes them apart again.
    Source: `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    import numpy as np

    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _dequantizer(
    source: Path, tensors: Mapping[str, GgufTensor], dtype: torch.dtype
) -> Callable[[str], Iterator[torch.Tensor]]:
    import numpy as np
    from gguf.quants import dequantize

    def chunks(name: str) -> Iterator[torch.Tensor]:
        tensor = tensors[name]
        rows = tensor.shape[0]
        step = max(1, _CHUNK_ELEMENTS // max(1, math.prod(tensor.shape[1:])))
        for start in range(0, rows, step):
            packed = tensor.packed(slice(start, start + step))
            try:
                values = dequantize(packed, tensor.kind)
            except (NotImplementedError, ValueError) as error:
                raise UserError(
                    f"{source}: cannot read {tensor.kind.name}, the GGUF type of {name}; "
                    "use another quantization of this model"
                ) from error
            # A copy, as the mapped file is read-only, and in case of F32 `values` is the file.
            yield torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)

    return chunks


def _config_of(source: Path, reader: Any, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Values of a GGUF that transformers does not read by itself."""
    changes: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": any(".self_attn." in n and n.endswith(".bias") for n in tensors),
        "mlp_bias": any(".mlp." in n and n.endswith(".bias") for n in tensors),
    }
    factors = next((t for t in reader.tensors if t.name == _ROPE_FACTORS), None)
    if factors is not None:
        theta = _field(reader, "llama.rope.freq_base", 10000.0)
        usable = isinstance(theta, float) and factors.data.ndim == 1 and factors.data.size
        scaling = usable and _llama3_scaling(torch.tensor(factors.data, dtype=torch.float64), theta)
        if not scaling:
            raise UserError(f"{source}: its rope factors are not those of LLaMA 3; not supported")
        changes["rope_parameters"] = scaling
    return changes


def _llama3_scaling(factors: torch.Tensor, theta: float) -> dict[str, Any] | None:
    """The parameters of LLaMA 3's rope scaling from its effect; None if it is another scaling.

    A GGUF keeps only the divisor of each rotary frequency, shape [head_dim / 2]; the slowest
    frequency is divided by the whole factor. The formula is that of
    `_compute_llama3_parameters` in transformers' modeling_rope_utils.py.
    """
    factor = float(factors.max())
    low, high, trained = _LLAMA3_ROPE.values()
    inverse = theta ** (torch.arange(len(factors), dtype=torch.float64) / len(factors))
    smooth = ((trained / (2 * math.pi * inverse) - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(factors, expected, rtol=1e-4, atol=0):
        return None
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3_ROPE}


def _write_config(source: Path, folder: Path, dtype: str, changes: Mapping[str, Any]) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    place: dict[str, Any] = {"gguf_file": source.name, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(str(source.parent), **place)
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **place)
    except Exception as error:  # a parser of files from anywhere raises anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"{source}: transformers cannot read its configuration or tokenizer: {reason}"
        ) from error
    for key, value in {**changes, "dtype": dtype}.items():
        setattr(config, key, value)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
