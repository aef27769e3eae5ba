"""LLaMA 1, 2, 3 (arXiv 2302.13971) and what shares their architecture: Mistral, SmolLM2."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flexgen_h2o.models.layers import (
    Operations,
    linear,
    rms_norm,
    rope_tables,
    row_blocks,
)
from flexgen_h2o.models.spec import ModelConfig, ModelWeights, TensorSpec, renamed

# Checkpoints saved from the bare model lack the leading "model."
PREFIXES = (("model.", ""),)


def aliases(name: str) -> tuple[str, ...]:
    """The names that a checkpoint may use for a tensor, the canonical one first."""
    return renamed(name, PREFIXES)


def weights(cfg: ModelConfig) -> ModelWeights:
    """The tensors of a model of the LLaMA architecture."""
    table = (cfg.vocab_size, cfg.hidden_size)
    tokens = TensorSpec("model.embed_tokens.weight", table)
    matrix = tokens if cfg.tie_word_embeddings else TensorSpec("lm_head.weight", table)
    head = {"norm": TensorSpec("model.norm.weight", (cfg.hidden_size,)), "lm_head": matrix}
    layers = tuple(_layer_specs(cfg, f"model.layers.{i}.") for i in range(cfg.num_layers))
    return ModelWeights({"tokens": tokens}, layers, head, tables=("tokens",),
                        mlp=("ln2", "gate", "up", "down"))


def _layer_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    hidden, ffn = cfg.hidden_size, cfg.ffn_size
    matrices = {
        "q": ("self_attn.q_proj", cfg.q_size, hidden, cfg.attention_bias),
        "k": ("self_attn.k_proj", cfg.kv_size, hidden, cfg.attention_bias),
        "v": ("self_attn.v_proj", cfg.kv_size, hidden, cfg.attention_bias),
        "out": ("self_attn.o_proj", hidden, cfg.q_size, cfg.attention_bias),
        "gate": ("mlp.gate_proj", ffn, hidden, cfg.mlp_bias),
        "up": ("mlp.up_proj", ffn, hidden, cfg.mlp_bias),
        "down": ("mlp.down_proj", hidden, ffn, cfg.mlp_bias),
    }
    specs = {"ln1": TensorSpec(f"{prefix}input_layernorm.weight", (hidden,)),
             "ln2": TensorSpec(f"{prefix}post_attention_layernorm.weight", (hidden,))}
    for short, (name, rows, columns, bias) in matrices.items():
        specs[short] = TensorSpec(f"{prefix}{name}.weight", (rows, columns))
        if bias:
            specs[f"{short}_bias"] = TensorSpec(f"{prefix}{name}.bias", (rows,))
    return specs


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
    """Queries [rows, heads, head_dim] of x [rows, hidden], and keys and values [rows, kv_heads,
    head_dim], in buffers of `do`."""
    rows = x.shape[0]
    q = do.get("q", (rows, cfg.num_heads, cfg.head_dim), x.dtype)
    k, v = (do.get(name, (rows, cfg.num_kv_heads, cfg.head_dim), x.dtype) for name in "kv")
    for block in row_blocks(rows):
        normed = _normed(cfg, w["ln1"], x[block], do)
        for name, out in (("q", q), ("k", k), ("v", v)):
            do.linear(normed, w[name], w.get(f"{name}_bias"), out=out[block].view(len(normed), -1))
    return q, k, v


def attention_output(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, attended: Tensor,
                     do: Operations) -> Tensor:
    """Add attention's output to x and return it; attended [rows, heads, head_dim]."""
    attended = attended.reshape(len(x), cfg.q_size)
    for block in row_blocks(len(x)):
        do.add_linear_(x[block], attended[block], w["out"], w.get("out_bias"))
    return x


def mlp(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations) -> Tensor:
    """Add ``down(act(gate(norm(x))) * up(norm(x)))`` to x and return it."""
    for block in row_blocks(len(x)):
        normed = _normed(cfg, w["ln2"], x[block], do)
        gate, up = (do.get(name, (len(normed), cfg.ffn_size), x.dtype)
                    for name in ("gate", "up"))
        do.linear(normed, w["gate"], w.get("gate_bias"), out=gate)
        do.linear(normed, w["up"], w.get("up_bias"), out=up)
        wide = do.activate_(gate, cfg.activation, up)
        do.add_linear_(x[block], wide, w["down"], w.get("down_bias"))
    return x


def _normed(cfg: ModelConfig, weight: Tensor, x: Tensor, do: Operations) -> Tensor:
    out = do.get("normed", tuple(x.shape), x.dtype)
    return do.rms_norm(x, weight, eps=cfg.norm_eps, out=out)


def head(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Logits [rows, vocab], in x's dtype, of x [rows, hidden]."""
    return linear(rms_norm(x, w["norm"], eps=cfg.norm_eps), w["lm_head"])
