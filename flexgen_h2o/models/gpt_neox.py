"""GPT-NeoX (arXiv 2204.06745) and Pythia: partial rotation, attention and MLP side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flexgen_h2o.models.layers import (
    Operations,
    layer_norm,
    linear,
    rope_tables,
    row_blocks,
)
from flexgen_h2o.models.spec import ModelConfig, ModelWeights, TensorSpec, renamed

# Checkpoints saved from the bare model lack "gpt_neox."; transformers 5 calls the output matrix
# lm_head in memory, yet still saves it under the old name.
PREFIXES = (("gpt_neox.", ""), ("embed_out.", "lm_head."))


def aliases(name: str) -> tuple[str, ...]:
    """The names that a checkpoint may use for a tensor, the canonical one first."""
    return renamed(name, PREFIXES)


def weights(cfg: ModelConfig) -> ModelWeights:
    """The tensors of a GPT-NeoX model."""
    table = (cfg.vocab_size, cfg.hidden_size)
    tokens = TensorSpec("gpt_neox.embed_in.weight", table)
    matrix = tokens if cfg.tie_word_embeddings else TensorSpec("embed_out.weight", table)
    head = _norm_specs(cfg, "norm", "gpt_neox.final_layer_norm") | {"lm_head": matrix}
    layers = tuple(_layer_specs(cfg, f"gpt_neox.layers.{i}.") for i in range(cfg.num_layers))
    return ModelWeights({"tokens": tokens}, layers, head, tables=("tokens",),
                        mlp=("ln2", "fc1", "fc2"))


def _layer_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    hidden, ffn = cfg.hidden_size, cfg.ffn_size
    matrices = {
        "qkv": ("attention.query_key_value", 3 * hidden, hidden, cfg.attention_bias),
        "out": ("attention.dense", hidden, hidden, cfg.attention_bias),
        "fc1": ("mlp.dense_h_to_4h", ffn, hidden, cfg.mlp_bias),
        "fc2": ("mlp.dense_4h_to_h", hidden, ffn, cfg.mlp_bias),
    }
    specs = _norm_specs(cfg, "ln1", f"{prefix}input_layernorm")
    specs |= _norm_specs(cfg, "ln2", f"{prefix}post_attention_layernorm")
    for short, (name, rows, columns, bias) in matrices.items():
        specs[short] = TensorSpec(f"{prefix}{name}.weight", (rows, columns))
        if bias:
            specs[f"{short}_bias"] = TensorSpec(f"{prefix}{name}.bias", (rows,))
    return specs


def _norm_specs(cfg: ModelConfig, short: str, name: str) -> dict[str, TensorSpec]:
    return {short: TensorSpec(f"{name}.weight", (cfg.hidden_size,)),
            f"{short}_bias": TensorSpec(f"{name}.bias", (cfg.hidden_size,))}


def embed(cfg: ModelConfig, w: Mapping[str, Tensor], lookup: Callable[[str, Tensor], Tensor],
          ids: Tensor, positions: Tensor) -> Tensor:
    """Token embeddings.

    Parameters
    ----------
    lookup : callable (table name, index [rows]) -> new Tensor [rows, hidden]
    ids, positions : Tensor [rows], int64
        Positions come in later, by rotation.

    Returns
    -------
    Tensor [rows, hidden]
    """
    return lookup("tokens", ids)


def rope(cfg: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [rows, rotary_dim / 2] each, at positions [rows]."""
    return rope_tables(cfg.rope, positions, dtype)


def attention_inputs(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations
                     ) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of x [rows, hidden], [rows, heads, head_dim], strided, in
    a buffer of `do`."""
    rows = x.shape[0]
    # The fused matrix gives each head's query, key and value in turn.
    qkv = do.get("qkv", (rows, cfg.num_heads, 3 * cfg.head_dim), x.dtype)
    for block in row_blocks(rows):
        normed = _normed(cfg, w, "ln1", x[block], do)
        do.linear(normed, w["qkv"], w.get("qkv_bias"), out=qkv[block].view(len(normed), -1))
    return qkv.split(cfg.head_dim, dim=-1)


def attention_output(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, attended: Tensor,
                     do: Operations) -> Tensor:
    """Add attention's output to x and return it; attended [rows, heads, head_dim].

    With a parallel residual the MLP reads x as it was before attention: it comes first, and here.
    """
    if cfg.parallel_residual:
        mlp(cfg, w, x, do)
    attended = attended.reshape(len(x), cfg.q_size)
    for block in row_blocks(len(x)):
        do.add_linear_(x[block], attended[block], w["out"], w.get("out_bias"))
    return x


def mlp(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations) -> Tensor:
    """Add the MLP of x to x and return it."""
    for block in row_blocks(len(x)):
        normed = _normed(cfg, w, "ln2", x[block], do)
        wide = do.get("ffn", (len(normed), cfg.ffn_size), x.dtype)
        do.linear(normed, w["fc1"], w.get("fc1_bias"), out=wide)
        do.add_linear_(x[block], do.activate_(wide, cfg.activation), w["fc2"], w.get("fc2_bias"))
    return x


def _normed(cfg: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor,
            do: Operations) -> Tensor:
    out = do.get("normed", tuple(x.shape), x.dtype)
    return do.layer_norm(x, w[name], w[f"{name}_bias"], eps=cfg.norm_eps, out=out)


def head(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Logits [rows, vocab], in x's dtype, of x [rows, hidden]."""
    return linear(layer_norm(x, w["norm"], w["norm_bias"], eps=cfg.norm_eps), w["lm_head"])
