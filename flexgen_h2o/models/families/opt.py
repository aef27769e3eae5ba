"""OPT, 125M to 175B (arXiv 2205.01068): learned positions; OPT-350m has post-norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flexgen_h2o.models.decoder import Decoder, linear_specs, norm_specs, row_blocks
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.tensors import ModelWeights, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.layers import Operations

# Position p is row p + 2: fairseq reserved two rows for padding.
POSITION_OFFSET = 2


class Opt(Decoder):
    DEFAULTS = {
        "opt": {
            "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
            "num_attention_heads": 12, "activation_function": "relu",
            "do_layer_norm_before": True, "_remove_final_layer_norm": False, "enable_bias": True,
            "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
            "bos_token_id": 2, "eos_token_id": 2,
        },
    }
    # Checkpoints saved from the bare model lack the leading "model."
    prefixes = (("model.decoder.", "decoder."), ("model.decoder.", ""))

    def read(self, f: Fields) -> ModelConfig:
        pre_norm, bias = f.flag("do_layer_norm_before"), f.flag("enable_bias")
        return ModelConfig(
            **f.sizes(grouped=False),
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

    def weights(self, cfg: ModelConfig) -> ModelWeights:
        hidden, narrow = cfg.hidden_size, cfg.embed_dim
        top = "model.decoder."
        tokens = TensorSpec(f"{top}embed_tokens.weight", (cfg.vocab_size, narrow))
        positions = TensorSpec(f"{top}embed_positions.weight",
                               (cfg.max_positions + POSITION_OFFSET, hidden))
        embed, head = {"tokens": tokens, "positions": positions}, {}
        if narrow != hidden:
            embed["project_in"] = TensorSpec(f"{top}project_in.weight", (hidden, narrow))
            head["project_out"] = TensorSpec(f"{top}project_out.weight", (narrow, hidden))
        if cfg.final_norm:
            head |= _norm_specs(cfg, "norm", f"{top}final_layer_norm")
        head["lm_head"] = tokens if cfg.tie_word_embeddings else TensorSpec(
            "lm_head.weight", (cfg.vocab_size, narrow))
        layers = tuple(self.layer_specs(cfg, f"{top}layers.{i}.") for i in range(cfg.num_layers))
        return ModelWeights(embed, layers, head, tables=("tokens", "positions"),
                            mlp=("ln2", "fc1", "fc2"))

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
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

    def embed(self, cfg: ModelConfig, w: Mapping[str, Tensor],
              lookup: Callable[[str, Tensor], Tensor], ids: Tensor, positions: Tensor) -> Tensor:
        """Return token embeddings plus learned positions.

        A position past the table adds nothing: the run measures speed, not text.
        """
        from flexgen_h2o.models.layers import linear  # here, because it imports torch

        x = lookup("tokens", ids)
        if "project_in" in w:
            x = linear(x, w["project_in"])
        known = positions < cfg.max_positions
        if known.all():
            return x.add_(lookup("positions", positions + POSITION_OFFSET))
        x[known.to(x.device)] += lookup("positions", positions[known] + POSITION_OFFSET)
        return x

    def attention_inputs(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                         ops: Operations) -> tuple[Tensor, Tensor, Tensor]:
        rows, heads = len(x), (len(x), cfg.num_heads, cfg.head_dim)
        q, k, v = (ops.get(name, (rows, cfg.q_size), x.dtype) for name in "qkv")
        for block in row_blocks(rows):
            source = _normed(cfg, w, "ln1", x[block], ops) if cfg.pre_norm else x[block]
            for name, out in (("q", q), ("k", k), ("v", v)):
                ops.linear(source, w[name], w.get(f"{name}_bias"), out=out[block])
        return q.view(heads), k.view(heads), v.view(heads)

    def attention_output(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                         attended: Tensor, ops: Operations) -> Tensor:
        attended = attended.reshape(len(x), cfg.q_size)
        for block in row_blocks(len(x)):
            ops.add_linear_(x[block], attended[block], w["out"], w.get("out_bias"))
            if not cfg.pre_norm:
                _norm(cfg, w, "ln1", x[block], out=x[block], norm=ops.layer_norm)
        return x

    def mlp(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, ops: Operations) -> Tensor:
        for block in row_blocks(len(x)):
            part = x[block]
            source = _normed(cfg, w, "ln2", part, ops) if cfg.pre_norm else part
            wide = ops.get("ffn", (len(part), cfg.ffn_size), x.dtype)
            ops.linear(source, w["fc1"], w.get("fc1_bias"), out=wide)
            ops.add_linear_(part, ops.activate_(wide, cfg.activation), w["fc2"], w.get("fc2_bias"))
            if not cfg.pre_norm:
                _norm(cfg, w, "ln2", part, out=part, norm=ops.layer_norm)
        return x

    def head(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        from flexgen_h2o.models.layers import layer_norm, linear  # here, because it imports torch

        if cfg.final_norm:
            x = _norm(cfg, w, "norm", x, norm=layer_norm)
        if "project_out" in w:
            x = linear(x, w["project_out"])
        return linear(x, w["lm_head"])


def _norm_specs(cfg: ModelConfig, short: str, name: str) -> dict[str, TensorSpec]:
    return norm_specs(short, name, cfg.hidden_size, True) if cfg.norm_affine else {}


def _normed(cfg: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor,
            ops: Operations) -> Tensor:
    return _norm(cfg, w, name, x, out=ops.get("normed", tuple(x.shape), x.dtype),
                 norm=ops.layer_norm)


def _norm(cfg: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor, *,
          norm: Callable[..., Tensor], out: Tensor | None = None) -> Tensor:
    return norm(x, w.get(name), w.get(f"{name}_bias"), eps=cfg.norm_eps, out=out)
