"""The decoder that model families share: norms, attention projections, gated MLP, tensor tables.

`Decoder` derives the computation of a layer from the short names of its tensors:

- "q", "k", "v" or the fused "qkv", and "out": projections of attention,
- "out_gate": attention's output is multiplied by the sigmoid of this projection,
- "gate" and "up" or the fused "gate_up", and "down": the gated MLP; without a gate "up" and "down",
- "ln1", "ln2": norms before attention and MLP; "post1", "post2": norms of their outputs,
- "q_norm", "k_norm": norms of queries and keys, per head or over all heads, by their width,
- "q_norm0", "k_norm0" and so on: layer norms without bias, one for each head,
- "enorm", "hnorm" and "eh_proj": inputs of a layer for multi-token prediction.

A matrix "x" has the bias "x_bias" if there is one. A norm with a bias is a layer norm,
one without is an RMS norm (with `ModelConfig.layer_norm` a layer norm). torch is imported with the
first logits: the memory plan reads sizes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from flexgen_h2o.config.limits import ROW_BLOCK
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import RopeConfig, read_rope
from flexgen_h2o.models.tensors import ModelWeights, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.checkpoint import View
    from flexgen_h2o.models.layers import Operations


class Decoder:
    """A model family.

    In all methods `w` maps short names to the tensors of the embedding, of a layer or of the head,
    and rows are packed real tokens. A decoder layer is `attention_inputs`, causal attention over
    the cache and these rows, `attention_output`, and `mlp`. With a parallel residual
    `attention_output` includes the MLP. Queries and keys are not rotated here, because the cache
    knows the positions.

    The layer methods change tensors through `ops` alone, so that the same code either runs at once
    or is captured (`layers.CapturingOperations`). The tensors that they return live in buffers of
    `ops`: they are valid until the next `attention_inputs` with the same `ops`.

    Attributes
    ----------
    DEFAULTS : mapping of str to mapping
        By model type, the values that transformers assumes for keys missing in config.json, where
        they differ from `fields.LLAMA`.
    prefixes : tuple of (str, str)
        Pairs (canonical, other) of prefixes of tensor names in checkpoints.
    embedding, final_norm, output, layers : str
        Names in checkpoints of the token table, of the norm before the output matrix, of that
        matrix, and of the list of layers.
    norms : mapping of str to str
        Names in a layer of its norms, by short name.
    norm_bias : bool
        Whether norms have biases.
    qk_norm_of_all_heads : bool
        Whether queries and keys are normed over all heads, instead of each head.
    mtp_norm : str
        Name in a layer for multi-token prediction of the norm before the output matrix. Empty if
        the family does not read these layers.
    """

    DEFAULTS: ClassVar[Mapping[str, Mapping[str, Any]]]
    # Checkpoints saved from the bare model lack the leading "model."; vision-language checkpoints
    # use one of the other prefixes.
    prefixes: tuple[tuple[str, str], ...] = (
        ("model.", ""), ("model.", "language_model.model."), ("model.", "model.language_model."),
        ("lm_head.", "language_model.lm_head."))
    embedding, final_norm, output, layers = (
        "model.embed_tokens", "model.norm", "lm_head", "model.layers")
    norms: Mapping[str, str] = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
    norm_bias = False
    qk_norm_of_all_heads = False
    mtp_norm = ""

    def read(self, f: Fields) -> ModelConfig:
        """Return the sizes and options that a config.json describes."""
        raise NotImplementedError

    def common(self, f: Fields, rope: RopeConfig | None = None, *, activation: str = "hidden_act",
               eps: str = "rms_norm_eps", bias: str = "attention_bias") -> dict[str, Any]:
        """Return the `ModelConfig` fields that decoders with rotary positions share.

        Parameters
        ----------
        rope : RopeConfig, optional
            None: `read_rope`, of whole heads.
        activation, eps : str
            Keys of the activation function and of the norms' epsilon.
        bias : str
            Key of the flag for biases of queries, keys, values and attention's output; empty if
            there are no biases.
        """
        sizes, rope = f.sizes(), rope or read_rope(f)
        has_bias = bool(bias) and f.flag(bias)
        return sizes | {
            "max_positions": rope.max_positions(sizes["max_positions"]),
            "rope": rope,
            "ffn_size": f.count("intermediate_size"),
            "activation": f.value(str, activation),
            "norm_eps": f.number(eps),
            "attention_bias": has_bias,
            "out_bias": has_bias,
        }

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return the names that a checkpoint may use for a tensor, the canonical one first."""
        others = (other + name[len(prefix):] for prefix, other in self.prefixes
                  if name.startswith(prefix))
        return (name, *dict.fromkeys(others))

    def weights(self, cfg: ModelConfig) -> ModelWeights:
        """Return the tensors of a model, by short names."""
        table = (cfg.vocab_size, cfg.hidden_size)
        tokens = TensorSpec(f"{self.embedding}.weight", table)
        final_norm = self.final_norm
        if cfg.first_layer:
            final_norm = f"{self.layers}.{cfg.first_layer}.{self.mtp_norm}"
        head = {**norm_specs("norm", final_norm, cfg.hidden_size, self.norm_bias),
                **linear_specs("lm_head", self.output, table, cfg.head_bias)}
        if cfg.tie_word_embeddings:
            head["lm_head"] = tokens
        layers = tuple(self.layer_specs(cfg, f"{self.layers}.{cfg.first_layer + layer}.")
                       for layer in range(cfg.num_layers))
        return ModelWeights({"tokens": tokens}, layers, head, tables=("tokens",),
                            mlp=("ln2", "gate", "up", "gate_up", "down", "post2"))

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        """Return the tensors of one decoder layer, whose names begin with `prefix`.

        Matrices are in the order of their use.
        """
        specs = {**self.layer_norm_specs(cfg, prefix), **self.attention_specs(cfg, prefix),
                 **self.mlp_specs(cfg, prefix)}
        if cfg.first_layer:
            specs = mtp_specs(cfg, prefix) | specs
        # With a parallel residual `attention_output` computes the MLP first.
        return move_last(specs, "out") if cfg.parallel_residual else specs

    def layer_norm_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        """Return the norms of one layer, without query and key norms."""
        return {short: spec for norm, name in self.norms.items() for short, spec in norm_specs(
            norm, f"{prefix}{name}", cfg.hidden_size, self.norm_bias).items()}

    def attention_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        """Return the tensors of attention in one layer, or of its replacement."""
        return {**attention_specs(cfg, prefix), **self.qk_norm_specs(cfg, prefix)}

    def qk_norm_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        """Return the norms of queries and keys of one layer; none unless the model has them."""
        if not cfg.qk_norm:
            return {}
        widths = ((cfg.q_size, cfg.kv_size) if self.qk_norm_of_all_heads
                  else (cfg.head_dim, cfg.head_dim))
        return {**norm_specs("q_norm", f"{prefix}self_attn.q_norm", widths[0]),
                **norm_specs("k_norm", f"{prefix}self_attn.k_norm", widths[1])}

    def mlp_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        """Return the MLP of one layer."""
        return mlp_specs(cfg, prefix)

    def views(self, cfg: ModelConfig) -> dict[str, Sequence[View]]:
        """Return where the model's tensors lie inside larger tensors of checkpoints, by name."""
        return {}

    def views_of(self, tensor: str, **options: Any) -> tuple[View, ...]:
        """Return views of a tensor of a checkpoint, under each of its names."""
        from flexgen_h2o.models.checkpoint import View  # here, because it imports torch

        return tuple(View(name, **options) for name in self.aliases(tensor))

    def embed(self, cfg: ModelConfig, w: Mapping[str, Tensor],
              lookup: Callable[[str, Tensor], Tensor], ids: Tensor, positions: Tensor) -> Tensor:
        """Return token embeddings, scaled where the family does so.

        Parameters
        ----------
        lookup : callable (table name, index [rows]) -> new Tensor [rows, hidden]
        ids, positions : Tensor [rows], int64

        Returns
        -------
        Tensor [rows, hidden]
        """
        x = lookup("tokens", ids)
        return x if cfg.embed_scale == 1.0 else x.mul_(x.new_tensor(cfg.embed_scale))

    def join_hidden(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, hidden: Tensor,
                    ops: Operations) -> None:
        """Join embeddings and hidden states in a layer for multi-token prediction.

        As in DeepSeek V3 (arXiv 2412.19437, section 2.2): x becomes
        ``eh_proj(concat(enorm(x), hnorm(hidden)))``.

        Parameters
        ----------
        x : Tensor [rows, hidden]
            Embeddings of the tokens that follow the rows' positions.
        hidden : Tensor [rows, hidden]
            Hidden states at these positions: of the model, after its final norm, or of this layer
            for tokens that it has drafted.
        """
        for block in row_blocks(len(x)):
            source = x[block]
            both = ops.get("joined", (len(source), 2 * cfg.hidden_size), x.dtype)
            norm(cfg, w, "enorm", source, ops, out=both[:, : cfg.hidden_size])
            norm(cfg, w, "hnorm", hidden[block], ops, out=both[:, cfg.hidden_size :])
            ops.linear(both, w["eh_proj"], None, out=source)

    def attention_inputs(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                         ops: Operations) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of x [rows, hidden], before rotation.

        Returns
        -------
        q : Tensor [rows, heads, head_dim]
        k, v : Tensor [rows, kv_heads, head_dim]
        """
        if "qkv" in w:
            return self._fused_inputs(cfg, w, x, ops)
        rows = len(x)
        q = ops.get("q", (rows, cfg.num_heads, cfg.head_dim), x.dtype)
        k, v = (ops.get(name, (rows, cfg.num_kv_heads, cfg.head_dim), x.dtype) for name in "kv")
        for block in row_blocks(rows):
            source = normed(cfg, w, "ln1", x[block], ops)
            for name, out in (("q", q), ("k", k), ("v", v)):
                ops.linear(source, w[name], w.get(f"{name}_bias"),
                           out=out[block].view(len(source), -1))
                if f"{name}_norm" in w:
                    parts = out[block].view(-1, len(w[f"{name}_norm"]))
                    norm(cfg, w, f"{name}_norm", parts, ops, out=parts)
                for head in range(out.shape[1] if f"{name}_norm0" in w else 0):
                    part = out[block][:, head]
                    ops.layer_norm(part, w[f"{name}_norm{head}"], None, eps=cfg.norm_eps, out=part)
                if cfg.clip_qkv:
                    ops.clamp_(out[block], cfg.clip_qkv)
                if cfg.rope_interleaved and cfg.rope is not None and name != "v":
                    ops.sort_pairs_(out[block], cfg.rope.rotary_dim)
        return q, k, v

    def _fused_inputs(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                      ops: Operations) -> tuple[Tensor, Tensor, Tensor]:
        """Return strided views of one product: all queries, then all keys, then all values."""
        qkv = ops.get("qkv", (len(x), cfg.q_size + 2 * cfg.kv_size), x.dtype)
        for block in row_blocks(len(x)):
            ops.linear(normed(cfg, w, "ln1", x[block], ops), w["qkv"], w.get("qkv_bias"),
                       out=qkv[block])
        q, k, v = (part.unflatten(-1, (-1, cfg.head_dim))
                   for part in qkv.split([cfg.q_size, cfg.kv_size, cfg.kv_size], dim=-1))
        return q, k, v

    def attention_output(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                         attended: Tensor, ops: Operations) -> Tensor:
        """Add attention's output to x [rows, hidden] and return x.

        With a parallel residual the MLP reads x from before attention, and so is computed first.

        Parameters
        ----------
        attended : Tensor [rows, heads, head_dim]
            Overwritten if there is a gate.
        """
        if cfg.parallel_residual:
            self.mlp(cfg, w, x, ops)
        attended = attended.flatten(1)
        for block in row_blocks(len(x)):
            source = attended[block]
            if "out_gate" in w:
                normed_x = normed(cfg, w, "ln1", x[block], ops)
                source = ops.gate_(source, product(w, "out_gate", normed_x, ops))
            add_linear_(cfg, w, x[block], source, ops, matrix="out", post_norm="post1")
        return x

    def recurrent(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                  advance: Callable[..., Tensor], ops: Operations) -> Tensor:
        """Add the output of a recurrent layer to x [rows, hidden] and return x.

        Parameters
        ----------
        advance : callable (rule, *rows) -> Tensor
            Call ``rule(*rows, states, sequences=..., lengths=...)`` with the states of these rows'
            sequences: see `kernels.reference.layers.gated_delta_net`.
        """
        raise NotImplementedError

    def mlp(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, ops: Operations) -> Tensor:
        """Add ``down(act(gate(norm(x))) * up(norm(x)))`` to x [rows, hidden] and return x.

        Without a gate, add ``down(act(up(norm(x))))``.
        """
        name = "ln2" if "ln2" in w else "ln1"  # with a parallel residual they may be one
        for block in row_blocks(len(x)):
            source = normed(cfg, w, name, x[block], ops)
            if "gate_up" in w:
                wide, *factor = product(w, "gate_up", source, ops).split(cfg.ffn_size, dim=-1)
            else:
                wide, *factor = (product(w, matrix, source, ops) for matrix in ("gate", "up")
                                 if matrix in w)
            ops.activate_(wide, cfg.activation, *factor)
            add_linear_(cfg, w, x[block], wide, ops, matrix="down", post_norm="post2")
        return x

    def final_hidden(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the norm of x [rows, hidden] before the output matrix."""
        from flexgen_h2o.models import layers  # here, because it imports torch

        if cfg.layer_norm or "norm_bias" in w:
            return layers.layer_norm(x, w["norm"], w.get("norm_bias"), eps=cfg.norm_eps)
        return layers.rms_norm(x, w["norm"], eps=cfg.norm_eps, offset=cfg.norm_offset)

    def head(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits [rows, vocab] of x [rows, hidden], in x's dtype."""
        from flexgen_h2o.models import layers

        logits = layers.linear(self.final_hidden(cfg, w, x), w["lm_head"], w.get("lm_head_bias"))
        if cfg.logit_divisor != 1.0:
            logits.div_(cfg.logit_divisor)
        if cfg.logit_softcap:
            logits.div_(cfg.logit_softcap).tanh_().mul_(cfg.logit_softcap)
        return logits


def linear_specs(short: str, name: str, shape: tuple[int, ...], bias: bool = False
                 ) -> dict[str, TensorSpec]:
    """Return the table entries of a matrix [outputs, inputs] and of its bias."""
    specs = {short: TensorSpec(f"{name}.weight", shape)}
    return specs | {f"{short}_bias": TensorSpec(f"{name}.bias", shape[:1])} if bias else specs


def norm_specs(short: str, name: str, width: int, bias: bool = False) -> dict[str, TensorSpec]:
    """Return the table entries of a norm."""
    return linear_specs(short, name, (width,), bias)


def attention_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    """Return the projections of attention under the names that most checkpoints use."""
    hidden, bias = cfg.hidden_size, cfg.attention_bias
    return {**linear_specs("q", f"{prefix}self_attn.q_proj", (cfg.q_size, hidden), bias),
            **linear_specs("k", f"{prefix}self_attn.k_proj", (cfg.kv_size, hidden), bias),
            **linear_specs("v", f"{prefix}self_attn.v_proj", (cfg.kv_size, hidden), bias),
            **linear_specs("out", f"{prefix}self_attn.o_proj", (hidden, cfg.q_size),
                           cfg.out_bias)}


def mtp_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    """Return the inputs of a layer for multi-token prediction."""
    hidden = cfg.hidden_size
    return {**norm_specs("enorm", f"{prefix}enorm", hidden),
            **norm_specs("hnorm", f"{prefix}hnorm", hidden),
            **linear_specs("eh_proj", f"{prefix}eh_proj", (hidden, 2 * hidden))}


def mlp_specs(cfg: ModelConfig, prefix: str, block: str = "mlp") -> dict[str, TensorSpec]:
    """Return a gated MLP under the names that most checkpoints use."""
    hidden, ffn, name = cfg.hidden_size, cfg.ffn_size, f"{prefix}{block}"
    return {**linear_specs("gate", f"{name}.gate_proj", (ffn, hidden), cfg.mlp_bias),
            **linear_specs("up", f"{name}.up_proj", (ffn, hidden), cfg.mlp_bias),
            **linear_specs("down", f"{name}.down_proj", (hidden, ffn), cfg.mlp_bias)}


def fused_mlp_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    """Return a gated MLP without biases whose gate and up are one matrix."""
    hidden, ffn = cfg.hidden_size, cfg.ffn_size
    return {**linear_specs("gate_up", f"{prefix}mlp.gate_up_proj", (2 * ffn, hidden)),
            **linear_specs("down", f"{prefix}mlp.down_proj", (hidden, ffn))}


def move_last(specs: Mapping[str, TensorSpec], matrix: str) -> dict[str, TensorSpec]:
    """Return a table with a matrix, and its bias, at the end."""
    moved = {short: spec for short, spec in specs.items() if short in (matrix, f"{matrix}_bias")}
    return {short: spec for short, spec in specs.items() if short not in moved} | moved


def layer_number(prefix: str) -> int:
    """Return the number of the layer whose tensor names begin with `prefix`."""
    return int(prefix.split(".")[-2])


def product(w: Mapping[str, Tensor], matrix: str, x: Tensor, ops: Operations) -> Tensor:
    """Return ``x @ w[matrix].T``, plus the bias if there is one, in a buffer [rows, outputs]."""
    out = ops.get(matrix, (len(x), len(w[matrix])), x.dtype)
    ops.linear(x, w[matrix], w.get(f"{matrix}_bias"), out=out)
    return out


def add_linear_(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, source: Tensor,
                ops: Operations, *, matrix: str, post_norm: str) -> None:
    """Add ``source @ w[matrix].T`` [rows, hidden] to x, through a norm if there is one."""
    if post_norm not in w and cfg.residual_scale == 1.0:
        ops.add_linear_(x, source, w[matrix], w.get(f"{matrix}_bias"))
        return
    out = ops.get("normed", tuple(x.shape), x.dtype)
    ops.linear(source, w[matrix], w.get(f"{matrix}_bias"), out=out)
    if post_norm in w:
        norm(cfg, w, post_norm, out, ops, out=out)
    ops.add_(x, out, cfg.residual_scale)


def normed(cfg: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor,
           ops: Operations) -> Tensor:
    """Return the norm of x [rows, hidden] in a buffer; x itself without a norm."""
    if name not in w:
        return x
    return norm(cfg, w, name, x, ops, out=ops.get("normed", tuple(x.shape), x.dtype))


def norm(cfg: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor, ops: Operations, *,
         out: Tensor) -> Tensor:
    """Write the norm `name` of x [rows, width] to `out`, which may be x, and return it."""
    bias = w.get(f"{name}_bias")
    if cfg.layer_norm or bias is not None:
        return ops.layer_norm(x, w[name], bias, eps=cfg.norm_eps, out=out)
    return ops.rms_norm(x, w[name], eps=cfg.norm_eps, out=out, offset=cfg.norm_offset)


def row_blocks(rows: int) -> list[slice]:
    """Return slices of at most `ROW_BLOCK` rows that cover `rows`."""
    return [slice(start, min(start + ROW_BLOCK, rows)) for start in range(0, rows, ROW_BLOCK)]
