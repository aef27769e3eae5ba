"""OPT, 125M to 175B (arXiv 2205.01068): learned positions; OPT-350m with norms after each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flexgen_h2o.models.layers import (
    Operations,
    layer_norm,
    linear,
    row_blocks,
)
from flexgen_h2o.models.spec import ModelConfig, ModelWeights, TensorSpec, renamed

# Checkpoints saved from the bare model lack the leading "model."
PREFIXES = (("model.decoder.", "decoder."), ("model.decoder.", ""))

# transformers looks position p up at row p + 2: fairseq kept two rows for padding.
POSITION_OFFSET = 2


def aliases(name: str) -> tuple[str, ...]:
    """The names that a checkpoint may use for a tensor, the canonical one first."""
    return renamed(name, PREFIXES)


def weights(cfg: ModelConfig) -> ModelWeights:
    """The tensors of an OPT model."""
    hidden, narrow = cfg.hidden_size, cfg.embed_dim
    top = "model.decoder."
    tokens = TensorSpec(f"{top}embed_tokens.weight", (cfg.vocab_size, narrow))
    places = TensorSpec(f"{top}embed_positions.weight",
                        (cfg.max_positions + POSITION_OFFSET, hidden))
    embed, head = {"tokens": tokens, "positions": places}, {}
    if narrow != hidden:
        embed["project_in"] = TensorSpec(f"{top}project_in.weight", (hidden, narrow))
        head["project_out"] = TensorSpec(f"{top}project_out.weight", (narrow, hidden))
    if cfg.final_norm:
        head |= _norm_specs(cfg, "norm", f"{top}final_layer_norm")
    head["lm_head"] = tokens if cfg.tie_word_embeddings else TensorSpec(
        "lm_head.weight", (cfg.vocab_size, narrow))
    layers = tuple(_layer_specs(cfg, f"{top}layers.{i}.") for i in range(cfg.num_layers))
    return ModelWeights(embed, layers, head, tables=("tokens", "positions"),
                        mlp=("ln2", "fc1", "fc2"))


def _layer_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    hidden, ffn = cfg.hidden_size, cfg.ffn_size
    matrices = {
        "q": ("self_attn.q_proj", hidden, hidden),
        "k": ("self_attn.k_proj", hidden, hidden),
        "v": ("self_attn.v_proj", hidden, hidden),
        "out": ("self_attn.out_proj", hidden, hidden),
        "fc1": ("fc1", ffn, hidden),
        "fc2": ("fc2", hidden, ffn),
    }
    specs = _norm_specs(cfg, "ln1", f"{prefix}self_attn_layer_norm")
    specs |= _norm_specs(cfg, "ln2", f"{prefix}final_layer_norm")
    for short, (name, rows, columns) in matrices.items():
        specs[short] = TensorSpec(f"{prefix}{name}.weight", (rows, columns))
        if cfg.attention_bias:
            specs[f"{short}_bias"] = TensorSpec(f"{prefix}{name}.bias", (rows,))
    return specs


def _norm_specs(cfg: ModelConfig, short: str, name: str) -> dict[str, TensorSpec]:
    if not cfg.norm_affine:
        return {}
    return {short: TensorSpec(f"{name}.weight", (cfg.hidden_size,)),
            f"{short}_bias": TensorSpec(f"{name}.bias", (cfg.hidden_size,))}


def embed(cfg: ModelConfig, w: Mapping[str, Tensor], lookup: Callable[[str, Tensor], Tensor],
          ids: Tensor, positions: Tensor) -> Tensor:
    """Token plus position embeddings.

    Parameters
    ----------
    w : mapping
        The embedding tensors that are not tables.
    lookup : callable (table name, index [rows]) -> new Tensor [rows, width]
    ids, positions : Tensor [rows], int64
        A position past the table has no embedding, and none is added: the caller that lets a run
        get there wants its speed and not its text.

    Returns
    -------
    Tensor [rows, hidden]
    """
    x = lookup("tokens", ids)
    if "project_in" in w:
        x = linear(x, w["project_in"])
    known = positions < cfg.max_positions
    if known.all():
        return x.add_(lookup("positions", positions + POSITION_OFFSET))
    x[known.to(x.device)] += lookup("positions", positions[known] + POSITION_OFFSET)
    return x


def rope(cfg: ModelConfig, positions: Tensor, dtype: torch.dtype) -> None:
    """None: OPT learns its positions."""
    return None


def attention_inputs(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations
                     ) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of x [rows, hidden], each [rows, heads, head_dim], in buffers of
    `do`."""
    rows, heads = x.shape[0], (x.shape[0], cfg.num_heads, cfg.head_dim)
    q, k, v = (do.get(name, (rows, cfg.q_size), x.dtype) for name in "qkv")
    for block in row_blocks(rows):
        part = x[block]
        source = _normed(cfg, w, "ln1", part, do) if cfg.pre_norm else part
        for name, out in (("q", q), ("k", k), ("v", v)):
            do.linear(source, w[name], w.get(f"{name}_bias"), out=out[block])
    return q.view(heads), k.view(heads), v.view(heads)


def attention_output(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, attended: Tensor,
                     do: Operations) -> Tensor:
    """Add attention's output to x (a norm after it included) and return it; attended [rows, heads,
    head_dim]."""
    attended = attended.reshape(len(x), cfg.q_size)
    for block in row_blocks(len(x)):
        part = x[block]
        do.add_linear_(part, attended[block], w["out"], w.get("out_bias"))
        if not cfg.pre_norm:
            _norm(cfg, w, "ln1", part, out=part, norm=do.layer_norm)
    return x


def mlp(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations) -> Tensor:
    """The rest of a layer; x is updated in place and returned."""
    for block in row_blocks(len(x)):
        part = x[block]
        source = _normed(cfg, w, "ln2", part, do) if cfg.pre_norm else part
        wide = do.get("ffn", (len(part), cfg.ffn_size), x.dtype)
        do.linear(source, w["fc1"], w.get("fc1_bias"), out=wide)
        do.add_linear_(part, do.activate_(wide, cfg.activation), w["fc2"], w.get("fc2_bias"))
        if not cfg.pre_norm:
            _norm(cfg, w, "ln2", part, out=part, norm=do.layer_norm)
    return x


def _normed(cfg: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor,
            do: Operations) -> Tensor:
    return _norm(cfg, w, name, x, out=do.get("normed", tuple(x.shape), x.dtype),
                 norm=do.layer_norm)


def _norm(cfg: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor, *,
          out: Tensor | None = None, norm: Callable[..., Tensor] = layer_norm) -> Tensor:
    return norm(x, w.get(name), w.get(f"{name}_bias"), eps=cfg.norm_eps, out=out)


def head(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Logits [rows, vocab], in x's dtype, of x [rows, hidden]."""
    if cfg.final_norm:
        x = _norm(cfg, w, "norm", x)
    if "project_out" in w:
        x = linear(x, w["project_out"])
    return linear(x, w["lm_head"])
