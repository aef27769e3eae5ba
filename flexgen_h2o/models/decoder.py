"""The decoder that most families share: norms before and after, gated MLP, a table per family.

What a layer does is read off its tensors' short names: "q", "k", "v" or "qkv" with "out", "gate"
and "up" or "gate_up" with "down", each with "_bias" or without; "ln1" and "ln2" norm what attention
and MLP read, "post1" and "post2" what they give; "q_norm" and "k_norm" norm queries and keys, over
each head or over all of them, as wide as they are. A norm with a bias is a layer norm, and one
without it a root-mean-square norm; "q_norm0", "k_norm0" and so on are layer norms without a bias,
one for each head. With a parallel residual "ln1" norms for the MLP too. Loads torch with the first
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flexgen_h2o.config.limits import ROW_BLOCK
from flexgen_h2o.models.model_config import ModelConfig, ModelWeights, TensorSpec, renamed

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.layers import Operations

# Checkpoints saved from the bare model lack the leading "model."
PREFIXES = (("model.", ""),)


def aliases(name: str) -> tuple[str, ...]:
    """The names that a checkpoint may use for a tensor, the canonical one first."""
    return renamed(name, PREFIXES)


def linear_specs(short: str, name: str, shape: tuple[int, int], bias: bool = False
                 ) -> dict[str, TensorSpec]:
    """A matrix [outputs, inputs] and its bias, by short names, as a checkpoint calls them."""
    specs = {short: TensorSpec(f"{name}.weight", shape)}
    return specs | {f"{short}_bias": TensorSpec(f"{name}.bias", shape[:1])} if bias else specs


def norm_specs(short: str, name: str, width: int, bias: bool = False) -> dict[str, TensorSpec]:
    """A norm, by its short name, as a checkpoint calls it."""
    specs = {short: TensorSpec(f"{name}.weight", (width,))}
    return specs | {f"{short}_bias": TensorSpec(f"{name}.bias", (width,))} if bias else specs


def attention_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    """Projections of attention under the names that most checkpoints give them."""
    hidden, bias = cfg.hidden_size, cfg.attention_bias
    return {**linear_specs("q", f"{prefix}self_attn.q_proj", (cfg.q_size, hidden), bias),
            **linear_specs("k", f"{prefix}self_attn.k_proj", (cfg.kv_size, hidden), bias),
            **linear_specs("v", f"{prefix}self_attn.v_proj", (cfg.kv_size, hidden), bias),
            **linear_specs("out", f"{prefix}self_attn.o_proj", (hidden, cfg.q_size),
                           cfg.out_bias)}


def mlp_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    """A gated MLP under the names that most checkpoints give it."""
    hidden, ffn = cfg.hidden_size, cfg.ffn_size
    return {**linear_specs("gate", f"{prefix}mlp.gate_proj", (ffn, hidden), cfg.mlp_bias),
            **linear_specs("up", f"{prefix}mlp.up_proj", (ffn, hidden), cfg.mlp_bias),
            **linear_specs("down", f"{prefix}mlp.down_proj", (hidden, ffn), cfg.mlp_bias)}


def model_specs(cfg: ModelConfig, layer: Callable[[str], dict[str, TensorSpec]], *,
                norm_bias: bool = False) -> ModelWeights:
    """The tensors of a model whose layers have those of `layer` (prefix of their names)."""
    table = (cfg.vocab_size, cfg.hidden_size)
    tokens = TensorSpec("model.embed_tokens.weight", table)
    matrix = tokens if cfg.tie_word_embeddings else TensorSpec("lm_head.weight", table)
    head = norm_specs("norm", "model.norm", cfg.hidden_size, norm_bias) | {"lm_head": matrix}
    layers = tuple(layer(f"model.layers.{i}.") for i in range(cfg.num_layers))
    return ModelWeights({"tokens": tokens}, layers, head, tables=("tokens",),
                        mlp=("ln2", "gate", "up", "gate_up", "down", "post2"))


def embed(cfg: ModelConfig, w: Mapping[str, Tensor], lookup: Callable[[str, Tensor], Tensor],
          ids: Tensor, positions: Tensor) -> Tensor:
    """Token embeddings, scaled where the family does so.

    Parameters
    ----------
    lookup : callable (table name, index [rows]) -> new Tensor [rows, hidden]
    ids, positions : Tensor [rows], int64
        Positions come in later, by rotation.

    Returns
    -------
    Tensor [rows, hidden]
    """
    x = lookup("tokens", ids)
    return x if cfg.embed_scale == 1.0 else x.mul_(x.new_tensor(cfg.embed_scale))


def attention_inputs(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations
                     ) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [rows, heads, head_dim] of x [rows, hidden], and keys and values [rows, kv_heads,
    head_dim], in buffers of `do`."""
    if "qkv" in w:
        return _fused_inputs(cfg, w, x, do)
    rows = len(x)
    q = do.get("q", (rows, cfg.num_heads, cfg.head_dim), x.dtype)
    k, v = (do.get(name, (rows, cfg.num_kv_heads, cfg.head_dim), x.dtype) for name in "kv")
    for block in row_blocks(rows):
        source = normed(cfg, w, "ln1", x[block], do)
        for name, out in (("q", q), ("k", k), ("v", v)):
            do.linear(source, w[name], w.get(f"{name}_bias"), out=out[block].view(len(source), -1))
            if f"{name}_norm" in w:
                parts = out[block].view(-1, len(w[f"{name}_norm"]))
                norm(cfg, w, f"{name}_norm", parts, do, out=parts)
            for number in range(out.shape[1] if f"{name}_norm0" in w else 0):
                part = out[block][:, number]
                do.layer_norm(part, w[f"{name}_norm{number}"], None, eps=cfg.norm_eps, out=part)
            if cfg.clip_qkv:
                do.clamp_(out[block], cfg.clip_qkv)
    return q, k, v


def _fused_inputs(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations
                  ) -> tuple[Tensor, Tensor, Tensor]:
    """The same of one matrix that gives all queries, then all keys, then all values; strided."""
    qkv = do.get("qkv", (len(x), cfg.q_size + 2 * cfg.kv_size), x.dtype)
    for block in row_blocks(len(x)):
        do.linear(normed(cfg, w, "ln1", x[block], do), w["qkv"], w.get("qkv_bias"), out=qkv[block])
    q, k, v = (part.unflatten(-1, (-1, cfg.head_dim))
               for part in qkv.split([cfg.q_size, cfg.kv_size, cfg.kv_size], dim=-1))
    return q, k, v


def attention_output(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, attended: Tensor,
                     do: Operations) -> Tensor:
    """Add attention's output to x and return it; attended [rows, heads, head_dim].

    With a parallel residual the MLP reads x as it was before attention: it comes first, and here.
    """
    if cfg.parallel_residual:
        mlp(cfg, w, x, do)
    attended = attended.reshape(len(x), cfg.q_size)
    for block in row_blocks(len(x)):
        add_product_(cfg, w, x[block], attended[block], do, names=("out", "post1"))
    return x


def mlp(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations) -> Tensor:
    """Add ``down(act(gate(norm(x))) * up(norm(x)))`` to x and return it."""
    name = "ln1" if cfg.parallel_residual else "ln2"
    for block in row_blocks(len(x)):
        source = normed(cfg, w, name, x[block], do)
        if "gate_up" in w:
            both = do.get("gate_up", (len(source), 2 * cfg.ffn_size), x.dtype)
            do.linear(source, w["gate_up"], w.get("gate_up_bias"), out=both)
            gate, up = both.split(cfg.ffn_size, dim=-1)
        else:
            gate, up = (do.get(name, (len(source), cfg.ffn_size), x.dtype)
                        for name in ("gate", "up"))
            do.linear(source, w["gate"], w.get("gate_bias"), out=gate)
            do.linear(source, w["up"], w.get("up_bias"), out=up)
        wide = do.activate_(gate, cfg.activation, up)
        add_product_(cfg, w, x[block], wide, do, names=("down", "post2"))
    return x


def head(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Logits [rows, vocab], in x's dtype, of x [rows, hidden]."""
    from flexgen_h2o.models import layers  # only now: it loads torch

    if "norm_bias" in w:
        x = layers.layer_norm(x, w["norm"], w["norm_bias"], eps=cfg.norm_eps)
    else:
        x = layers.rms_norm(x, w["norm"], eps=cfg.norm_eps, offset=cfg.norm_offset)
    logits = layers.linear(x, w["lm_head"])
    if cfg.logit_divisor != 1.0:
        logits.div_(cfg.logit_divisor)
    if cfg.logit_softcap:
        logits.div_(cfg.logit_softcap).tanh_().mul_(cfg.logit_softcap)
    return logits


def add_product_(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, source: Tensor,
                 do: Operations, *, names: tuple[str, str]) -> None:
    """Add the product of source [rows, inputs] with the first of two tensors to x [rows, hidden],
    through the norm that the second one is if there is such a tensor."""
    matrix, after = names
    if after not in w and cfg.residual_scale == 1.0:
        do.add_linear_(x, source, w[matrix], w.get(f"{matrix}_bias"))
        return
    out = do.get("normed", tuple(x.shape), x.dtype)
    do.linear(source, w[matrix], w.get(f"{matrix}_bias"), out=out)
    if after in w:
        norm(cfg, w, after, out, do, out=out)
    do.add_(x, out, cfg.residual_scale)


def normed(cfg: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor,
           do: Operations) -> Tensor:
    """The norm of x [rows, hidden] in a buffer of `do`; x itself if there is no such norm."""
    if name not in w:
        return x
    return norm(cfg, w, name, x, do, out=do.get("normed", tuple(x.shape), x.dtype))


def norm(cfg: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor, do: Operations, *,
         out: Tensor) -> Tensor:
    """The norm of that name of x [rows, width] in `out`, which may be x."""
    bias = w.get(f"{name}_bias")
    if bias is not None:
        return do.layer_norm(x, w[name], bias, eps=cfg.norm_eps, out=out)
    return do.rms_norm(x, w[name], eps=cfg.norm_eps, out=out, offset=cfg.norm_offset)


def row_blocks(rows: int) -> list[slice]:
    """Slices of at most `ROW_BLOCK` rows that cover `rows`."""
    return [slice(start, min(start + ROW_BLOCK, rows)) for start in range(0, rows, ROW_BLOCK)]
