"""A Hugging Face folder of LLaMA or Qwen3-MoE as a GGUF file for llama.cpp, quantized in blocks.

The `gguf` package writes the file and quantizes; names of tensors are those that the engine reads
GGUF files by. The file has no tokenizer: benchmarks give token ids.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flexgen_h2o.errors import UserError
from flexgen_h2o.models.gguf.architectures import ARCHITECTURES
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.registry import from_transformers, read_config

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

    from flexgen_h2o.models.checkpoint import Checkpoint

BITS: Mapping[str, int] = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8, "F32": 16}
"""Types of matrices, and the bits of a weight as scenarios count them: 16 is their dtype.

Q4_0 has a float16 scale for 32 weights, 4.5 bits in all; Q4_1 a float16 minimum beside it, 5 bits.
The engine's 4-bit groups have both for 64 weights, 4.5 bits.
"""
_BLOCK = 32
_NAMES: Mapping[str, str] = {"llama": "llama", "qwen3_moe": "qwen3moe"}
"""From a family to `general.architecture`."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file: its name, shape and type, and the model's that it is made of.

    Those are one matrix or vector by its name on the hub, or one of each expert of a layer.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    parts: tuple[str, ...]


def gguf_file(folder: Path, weights: str) -> Path:
    """The GGUF file of a folder, written into the user's cache once.

    All matrices are of the type `weights`, the embedding and the head too, as the engine's are in
    4 bits; norms and routers are float32.

    Parameters
    ----------
    folder : Path
        With config.json and safetensors or `.bin` weights.
    weights : str
        One of `BITS`.

    Raises
    ------
    UserError
        The model is of another architecture, has rows that do not fill blocks, cannot be read,
        or the cache cannot be written.
    """
    from flexgen_h2o.models.convert import build_once, converted, weight_files

    folder = Path(folder).resolve()
    config = gguf_config(folder)
    built = build_once([*weight_files(folder), folder / "config.json"], f"gguf-{weights}",
                       folder.name, lambda made: _write(folder, config, made, weights),
                       keep=converted())
    return _file(built)


def _file(folder: Path) -> Path:
    return folder / "model.gguf"


def gguf_config(folder: Path) -> ModelConfig:
    """The sizes of a folder's model. Raises `UserError` unless it is a LLaMA or Qwen3-MoE without
    biases."""
    values = read_config(folder)
    config = from_transformers(values, folder.name)
    known = (values["model_type"] in _NAMES and config.activation == "silu"
             and config.rope.kind in ("default", "llama3")
             and not (config.attention_bias or config.mlp_bias or config.attention))
    if not known:
        raise UserError(f"{folder.name}: GGUF files are made of LLaMA's architecture and of "
                        "Qwen3-MoE only, without biases and windows, rotated plainly or as LLaMA 3")
    if config.dense_layers:
        raise UserError(f"{folder.name}: llama.cpp has no mixtures with dense layers between")
    if config.experts is not None and not config.experts.normalise:
        raise UserError(f"{folder.name}: llama.cpp lets the shares of a token's experts sum up to 1"
                        " in every Qwen3-MoE: norm_topk_prob = False cannot be said")
    return config


def _write(folder: Path, config: ModelConfig, made: Path, weights: str) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape, quantize

    from flexgen_h2o.models import family
    from flexgen_h2o.models.checkpoint import resolve, unstacked
    from flexgen_h2o.models.checkpoint_files import open_checkpoint

    plain = GGMLQuantizationType.F32
    known = ARCHITECTURES[_NAMES[config.family]]
    specs = {spec.name: spec for group in config.weights.groups() for spec in group.values()}
    tensors = _tensors(config, GGMLQuantizationType[weights], plain)
    writer = GGUFWriter(_file(made), _NAMES[config.family])
    _add_metadata(writer, config)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for each in tensors:
        stored = quant_shape_to_byte_shape(each.shape, each.kind)
        writer.add_tensor_info(
            each.name, each.shape if each.kind == plain else stored,
            np.dtype(np.float32 if each.kind == plain else np.uint8), math.prod(stored),
            raw_dtype=each.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    kind = family(config)
    views = {} if config.experts is None else kind.views(config)
    with unstacked(open_checkpoint(folder), views) as checkpoint:
        found = resolve(checkpoint, specs.values(), kind.aliases)
        for each in tensors:
            parts = []
            for name in each.parts:
                values = _read(checkpoint, found[name], specs[name].shape)
                heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(
                    name.split(".")[-2], 0) if known.interleaved else 0
                parts.append(quantize(in_pairs(values, heads), each.kind))
            writer.write_tensor_data(parts[0] if len(parts) == 1 else np.stack(parts))
    writer.close()


def _tensors(config: ModelConfig, weights: GGMLQuantizationType, plain: GGMLQuantizationType
             ) -> list[FileTensor]:
    """The tensors of the file. Raises `UserError` where rows do not fill blocks."""
    specs = {spec.name: spec for group in config.weights.groups() for spec in group.values()}
    parts: dict[str, list[str]] = {}
    for name in specs:
        parts.setdefault(_gguf_name(name, config), []).append(name)
    found = []
    for name, names in parts.items():
        shape = specs[names[0]].shape
        kind = plain if len(shape) == 1 or shape in config.exact_shapes else weights
        if kind != plain and shape[1] % _BLOCK:
            raise UserError(f"{config.name}: rows of {shape[1]} weights are not whole blocks of "
                            f"{_BLOCK}")
        shape = shape if len(names) == 1 else (len(names), *shape)
        found.append(FileTensor(name, shape, kind, tuple(names)))
    return found


def _add_metadata(writer: GGUFWriter, config: ModelConfig) -> None:
    """The values that llama.cpp asks of a model, and of a file that has no tokenizer."""
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    if config.experts is not None:
        writer.add_expert_count(config.experts.count)
        writer.add_expert_used_count(config.experts.per_token)
        writer.add_expert_feed_forward_length(config.experts.ffn_size)
    writer.add_tokenizer_model("no_vocab")


def rope_factors(config: ModelConfig) -> np.ndarray | None:
    """The divisors of the rotation's frequencies, float32 [head_dim / 2]; None where all are 1."""
    import torch

    from flexgen_h2o.models.rope import frequencies

    if config.rope.kind == "default":
        return None
    near = torch.device("cpu")
    plain = replace(config.rope, kind="default")
    return (frequencies(plain, near) / frequencies(config.rope, near)).numpy()


def _read(checkpoint: Checkpoint, name: str, shape: Sequence[int]) -> np.ndarray:
    import torch

    values = torch.empty(tuple(shape), dtype=torch.float32)
    checkpoint.read(name, values)
    return values.numpy()


def _gguf_name(name: str, config: ModelConfig) -> str:
    """llama.cpp's name of a tensor of the hub; all experts of a layer are in one."""
    known = ARCHITECTURES[_NAMES[config.family]]
    outer = {hub: own for own, hub in known.outer.items()}
    inner = {hub: own for own, hub in known.layer.items()}
    if name.startswith(f"{known.layers}."):
        number, rest = name.removeprefix(f"{known.layers}.").split(".", 1)
        rest = re.sub(r"\.experts\.[0-9]+\.", ".experts.{}.", rest.removesuffix(".weight"))
        return f"blk.{number}.{inner[rest]}.weight"
    return f"{outer[name.removesuffix('.weight')]}.weight"


def in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection so that those which rotate together are neighbours.

    On the hub the two halves of a head rotate together, in llama.cpp's LLaMA pairs do. With no
    `heads` the rows stay as they are.
    """
    if not heads:
        return values
    halves = values.reshape(heads, 2, -1, values.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
