"""A Hugging Face folder of LLaMA's architecture as a GGUF file for llama.cpp, quantized in blocks.

The `gguf` package writes the file and quantizes; names of tensors are those that the engine reads
GGUF files by. The file has no tokenizer: benchmarks give token ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flexgen_h2o.errors import UserError
from flexgen_h2o.models.gguf_architectures import ARCHITECTURES
from flexgen_h2o.models.spec import ModelConfig, from_transformers, read_config

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from flexgen_h2o.models.checkpoint_base import Checkpoint

BITS: Mapping[str, int] = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8, "F32": 16}
"""Types of matrices, and the bits of a weight as scenarios count them: 16 is their dtype.

Q4_0 has a float16 scale for 32 weights, 4.5 bits in all; Q4_1 a float16 minimum beside it, 5 bits.
The engine's 4-bit groups have both for 64 weights, 4.5 bits.
"""
_MODEL, _BLOCK = "llama", 32


def gguf_file(folder: Path, weights: str) -> Path:
    """The GGUF file of a folder, written into the user's cache once.

    All matrices are of the type `weights`, the embedding and the head too, as the engine's are in
    4 bits; norms are float32.

    Parameters
    ----------
    folder : Path
        With config.json and safetensors or `.bin` weights.
    weights : str
        One of `BITS`.

    Raises
    ------
    UserError
        The model is not of LLaMA's architecture, has rows that do not fill blocks, cannot be read,
        or the cache cannot be written.
    """
    from flexgen_h2o.models.convert import build_once, converted, weight_files

    folder = Path(folder).resolve()
    config = llama_config(folder)
    built = build_once([*weight_files(folder), folder / "config.json"], f"gguf-{weights}",
                       folder.name, lambda made: _write(folder, config, made, weights),
                       keep=converted())
    return _file(built)


def _file(folder: Path) -> Path:
    return folder / "model.gguf"


def llama_config(folder: Path) -> ModelConfig:
    """The sizes of a folder's model. Raises `UserError` unless it is a LLaMA without biases."""
    values = read_config(folder)
    config = from_transformers(values, folder.name)
    known = (values["model_type"] == _MODEL and config.activation == "silu"
             and config.rope.kind in ("default", "llama3")
             and not (config.attention_bias or config.mlp_bias))
    if not known:
        raise UserError(f"{folder.name}: GGUF files are made of LLaMA's architecture only, without "
                        "biases, its rotation plain or LLaMA 3's")
    return config


def _write(folder: Path, config: ModelConfig, made: Path, weights: str) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape, quantize

    from flexgen_h2o.models import family
    from flexgen_h2o.models.checkpoint import open_checkpoint, resolve

    plain = GGMLQuantizationType.F32
    specs = {spec.name: spec for group in (config.weights.embed, *config.weights.layers,
                                           config.weights.head) for spec in group.values()}
    kinds = {name: GGMLQuantizationType[weights] if len(spec.shape) == 2 else plain
             for name, spec in specs.items()}
    writer = GGUFWriter(_file(made), _MODEL)
    _add_metadata(writer, config)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for name, spec in specs.items():
        if kinds[name] != plain and spec.shape[1] % _BLOCK:
            raise UserError(f"{config.name}: rows of {spec.shape[1]} weights are not whole blocks "
                            f"of {_BLOCK}")
        stored = quant_shape_to_byte_shape(spec.shape, kinds[name])
        writer.add_tensor_info(
            _gguf_name(name), stored if kinds[name] != plain else spec.shape,
            np.dtype(np.uint8 if kinds[name] != plain else np.float32), math.prod(stored),
            raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    with open_checkpoint(folder) as checkpoint:
        found = resolve(checkpoint, specs.values(), family(config).aliases)
        for name, spec in specs.items():
            values = _read(checkpoint, found[name], spec.shape)
            heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(
                name.split(".")[-2], 0)
            writer.write_tensor_data(quantize(in_pairs(values, heads), kinds[name]))
    writer.close()


def _add_metadata(writer: GGUFWriter, config: ModelConfig) -> None:
    """The values that llama.cpp asks of a LLaMA, and of a file that has no tokenizer."""
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


def _gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of the hub."""
    known = ARCHITECTURES[_MODEL]
    outer = {hub: own for own, hub in known.outer.items()}
    inner = {hub: own for own, hub in known.layer.items()}
    if name.startswith(f"{known.layers}."):
        number, rest = name.removeprefix(f"{known.layers}.").split(".", 1)
        return f"blk.{number}.{inner[rest.removesuffix('.weight')]}.weight"
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
