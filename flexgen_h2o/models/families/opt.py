"""OPT, 125M to 175B (arXiv 2205.01068): learned positions; OPT-350m with norms after each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flexgen_h2o.models.decoder import linear_specs, norm_specs, row_blocks
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig, ModelWeights, TensorSpec, renamed

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.layers import Operations

DEFAULTS = {
    "opt": {
        "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
        "num_attention_heads": 12, "max_position_embeddings": 2048, "activation_function": "relu",
        "do_layer_norm_before": True, "_remove_final_layer_norm": False,
        "enable_bias": True, "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 2,
    },
}

# Checkpoints saved from the bare model lack the leading "model."
PREFIXES = (("model.decoder.", "decoder."), ("model.decoder.", ""))

# transformers looks position p up at row p + 2: fairseq kept two rows for padding.
POSITION_OFFSET = 2


def read(f: Fields) -> ModelConfig:
    """The model of a config.json."""
    pre_norm, bias = f.flag("do_layer_norm_before"), f.flag("enable_bias")
    return ModelConfig(
        **f.common("opt", grouped=False),
        ffn_size=f.count("ffn_dim"),
        activation=f.value(str, "activation_function"),
        attention_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        pre_norm=pre_norm,
        final_norm=pre_norm and not f.flag("_remove_final_layer_norm"),
        norm_affine=f.flag("layer_norm_elementwise_affine"),
        embed_dim=f.count_or("word_embed_proj_dim", f.count("hidden_size")),
    )


def aliases(name: str) -> tuple[str, ...]:
    """The names that a checkpoint may use for a tensor, the canonical one first."""
    return renamed(name, PREFIXES)


def weights(cfg: ModelConfig) -> ModelWeights:
    """The tensors, by short names, as a checkpoint calls them."""
    hidden, narrow = cfg.hidden_size, cfg.embed_dim
    top = "model.decoder."
    tokens = TensorSpec(f"{top}embed_tokens.weight", (cfg.vocab_size, narrow))
    places = TensorSpec(f"{top}embed_positions.weight",
                        (cfg.max_positions + POSITION_OFFSET, hidden))
    before, after = {"tokens": tokens, "positions": places}, {}
    if narrow != hidden:
        before["project_in"] = TensorSpec(f"{top}project_in.weight", (hidden, narrow))
        after["project_out"] = TensorSpec(f"{top}project_out.weight", (narrow, hidden))
    if cfg.final_norm:
        after |= _norm_specs(cfg, "norm", f"{top}final_layer_norm")
    after["lm_head"] = tokens if cfg.tie_word_embeddings else TensorSpec(
        "lm_head.weight", (cfg.vocab_size, narrow))
    layers = tuple(_layer_specs(cfg, f"{top}layers.{i}.") for i in range(cfg.num_layers))
    return ModelWeights(before, layers, after, tables=("tokens", "positions"),
                        mlp=("ln2", "fc1", "fc2"))


def _layer_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    hidden, heads, ffn = cfg.hidden_size, cfg.q_size, cfg.ffn_size
    specs = _norm_specs(cfg, "ln1", f"{prefix}self_attn_layer_norm")
    specs |= _norm_specs(cfg, "ln2", f"{prefix}final_layer_norm")
    for short, name, shape in (("q", "self_attn.q_proj", (heads, hidden)),
                               ("k", "self_attn.k_proj", (heads, hidden)),
                               ("v", "self_attn.v_proj", (heads, hidden)),
                               ("out", "self_attn.out_proj", (hidden, heads)),
                               ("fc1", "fc1", (ffn, hidden)),
                               ("fc2", "fc2", (hidden, ffn))):
        specs |= linear_specs(short, f"{prefix}{name}", shape, cfg.attention_bias)
    return specs


def _norm_specs(cfg: ModelConfig, short: str, name: str) -> dict[str, TensorSpec]:
    return norm_specs(short, name, cfg.hidden_size, True) if cfg.norm_affine else {}


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
    from flexgen_h2o.models.layers import linear  # only now: it loads torch

    x = lookup("tokens", ids)
    if "project_in" in w:
        x = linear(x, w["project_in"])
    known = positions < cfg.max_positions
    if known.all():
        return x.add_(lookup("positions", positions + POSITION_OFFSET))
    x[known.to(x.device)] += lookup("positions", positions[known] + POSITION_OFFSET)
    return x


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
          norm: Callable[..., Tensor], out: Tensor | None = None) -> Tensor:
    return norm(x, w.get(name), w.get(f"{name}_bias"), eps=cfg.norm_eps, out=out)


def head(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Logits [rows, vocab], in x's dtype, of x [rows, hidden]."""
    from flexgen_h2o.models.layers import layer_norm, linear  # only now: it loads torch

    if cfg.final_norm:
        x = _norm(cfg, w, "norm", x, norm=layer_norm)
    if "project_out" in w:
        x = linear(x, w["project_out"])
    return linear(x, w["lm_head"])
