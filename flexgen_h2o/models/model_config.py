"""A model's sizes and options.

Imports neither torch nor transformers: the memory plan needs the sizes before those load.
`registry.from_transformers` makes a `ModelConfig` out of a config.json.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from flexgen_h2o.config.layers import (
    DEFAULT_VARIANT,
    AttentionVariant,
    ExpertsConfig,
    KVHeads,
    LatentConfig,
    RecurrentConfig,
)
from flexgen_h2o.config.limits import ROW_BLOCK
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.rope import NO_ROPE, RopeConfig
from flexgen_h2o.models.tensors import ModelWeights, WeightShapes

_BY_LAYER = ("attention", "other_rope_layers", "other_head_layers", "dense_layers",
             "recurrent_layers")
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a model. A family ignores options that it does not have.

    Attributes
    ----------
    name : str
        The user's name of the model, for error messages.
    family : str
        Module and class in `families`.
    ffn_size : int
        Width of the MLP.
    max_positions : int
        Context length. OPT has a table of this many positions and cannot exceed it. See
        `plain_positions`.
    activation : str
        One of `ACTIVATIONS`; xielu in Apertus, whose parameters are tensors.
    attention_bias, out_bias, mlp_bias, head_bias : bool
        Whether there are biases of queries, keys and values, of attention's output, of the MLP, of
        the logits.
    eos_token_ids : tuple of int
        Tokens that end a text; may be empty.
    dtype : str or None
        The dtype in config.json, such as "bfloat16".
    rope, other_rope : RopeConfig or None
        Rotary positions; None for learned positions. See `other_rope_layers`.
    other_rope_layers : tuple of bool
        Whether a layer rotates by `other_rope`; empty if all rotate by `rope`.
    other_heads : KVHeads or None
        The heads of some layers, which differ from `num_kv_heads` heads of `head_dim`. See
        `kv_heads`.
    other_head_layers : tuple of bool
        Whether a layer has `other_heads`; empty if none has.
    attention_k_eq_v : bool
        Gemma 4: values are keys without their norm's weights and rotation, in layers without a
        window.
    rope_interleaved : bool
        Whether dimensions (2i, 2i + 1) of a head rotate together, as in GLM and Cohere, instead of
        (i, i + rotary_dim / 2). `Decoder.attention_inputs` sorts them, so that the cache rotates
        all models alike.
    qk_norm : bool
        Whether queries and keys are normed. The table of tensors says over which axes.
    attention_gate : bool
        Whether attention's output is multiplied by a sigmoid of the layer's input.
    clip_qkv : float
        Queries, keys and values are clamped to this absolute value; 0: not clamped.
    layer_norm : bool
        Whether norms without a bias are layer norms, instead of RMS norms.
    norm_offset : float
        Added to the weights of RMS norms.
    post_norms : bool
        GLM-4-0414: the outputs of attention and MLP are normed.
    embed_scale, residual_scale : float
        Factors of embeddings, and of the outputs of attention and MLP.
    logit_divisor : float
        Logits are divided by it.
    logit_softcap : float
        Logits become ``softcap * tanh(logit / softcap)``; 0: unchanged.
    pre_norm, final_norm, norm_affine : bool
        OPT: norms before instead of after attention and MLP; a norm before the head; norms with
        weights.
    embed_dim : int
        OPT: width of the token table, projected to `hidden_size` if it differs. 0: `hidden_size`.
    parallel_residual : bool
        GPT-NeoX, StableLM 2 12B, Cohere: attention and MLP read the same input.
    experts : ExpertsConfig or None
        Experts in place of the MLP.
    dense_layers : tuple of bool
        Whether a layer has an MLP in place of experts; empty if none has. See `has_experts`.
    extra_layers : int
        Layers for multi-token prediction, which follow the others in checkpoints: see `mtp_model`.
    first_layer : int
        Number of the first layer in checkpoints. It is 0 except in an `mtp_model`.
    attention : tuple of AttentionVariant
        One per decoder layer; empty if all have the default variant. See `attention_variant`.
    latent : LatentConfig or None
        Multi-head latent attention: `num_kv_heads` is 1, and `head_dim` the width of a cached key.
    recurrent : RecurrentConfig or None
        The gated DeltaNet of recurrent layers.
    recurrent_layers : tuple of bool
        Whether a layer is recurrent; empty if none is. See `is_recurrent`.

    Raises
    ------
    UserError
        If the sizes do not fit together.
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int
    activation: str
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None
    rope: RopeConfig | None = None
    other_rope: RopeConfig | None = None
    other_rope_layers: tuple[bool, ...] = ()
    other_heads: KVHeads | None = None
    other_head_layers: tuple[bool, ...] = ()
    attention_k_eq_v: bool = False
    rope_interleaved: bool = False
    qk_norm: bool = False
    attention_gate: bool = False
    clip_qkv: float = 0.0
    layer_norm: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float = 0.0
    pre_norm: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    embed_dim: int = 0
    parallel_residual: bool = False
    experts: ExpertsConfig | None = None
    dense_layers: tuple[bool, ...] = ()
    extra_layers: int = 0
    first_layer: int = 0
    attention: tuple[AttentionVariant, ...] = ()
    latent: LatentConfig | None = None
    recurrent: RecurrentConfig | None = None
    recurrent_layers: tuple[bool, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "embed_dim", self.embed_dim or self.hidden_size)
        if not any(self.recurrent_layers):
            object.__setattr__(self, "recurrent", None)
            object.__setattr__(self, "recurrent_layers", ())
        if not any(self.other_head_layers) or self.other_heads is None:
            object.__setattr__(self, "other_heads", None)
            object.__setattr__(self, "other_head_layers", ())
        elif all(self.other_head_layers):  # in a part of a model
            object.__setattr__(self, "num_kv_heads", self.other_heads.count)
            object.__setattr__(self, "head_dim", self.other_heads.dim)
            object.__setattr__(self, "other_heads", None)
            object.__setattr__(self, "other_head_layers", ())
        if not any(self.dense_layers):
            object.__setattr__(self, "dense_layers", ())
        elif all(self.dense_layers):  # in a part of a model
            object.__setattr__(self, "experts", None)
        for layers in self.cache_groups:
            count = self.kv_heads(layers[0]).count if layers else self.num_kv_heads
            if self.num_heads % count:
                raise UserError(f"{self.name}: {self.num_heads} attention heads cannot share "
                                f"{count} key/value heads evenly; the config is wrong")
        supported = ("xielu",) if self.family == "llama.Apertus" else ACTIVATIONS
        if self.activation not in supported:
            raise UserError(f"{self.name}: activation function {self.activation!r} is not "
                            f"supported (supported: {', '.join(supported)})")
        if self.attention and len(self.attention) != self.num_layers:
            raise UserError(f"{self.name}: {len(self.attention)} variants of attention for "
                            f"{self.num_layers} layers; the config is wrong")
        # A window as long as the context hides nothing.
        variants = tuple(
            replace(variant, window=None) if (variant.window or 0) >= self.max_positions
            else variant for variant in self.attention)
        if set(variants) == {DEFAULT_VARIANT}:
            variants = ()
        object.__setattr__(self, "attention", variants)
        for layer in range(self.num_layers if self.ropes else 0):
            rope, width = self.ropes[self.rope_number(layer)], self.kv_heads(layer).dim
            rotary = rope.rotary_dim
            if rope != NO_ROPE and (rotary % 2 or not 2 <= rotary <= width):
                raise UserError(f"{self.name}: {rotary} rotary dimensions in a head of "
                                f"{width} are not supported (an even number that fits is)")

    def slice_layers(self, first: int, last: int) -> ModelConfig:
        """Return the model of layers first:last."""
        return self.select_layers(range(first, last))

    def select_layers(self, layers: Sequence[int]) -> ModelConfig:
        """Return the model of some decoder layers."""
        options: dict[str, Any] = {
            name: tuple(values[layer] for layer in layers) for name in _BY_LAYER
            if (values := getattr(self, name))}
        return replace(self, num_layers=len(layers), **options)

    def with_extra_layer(self) -> ModelConfig:
        """Return the model with a copy of its last layer added."""
        return self.select_layers([*range(self.num_layers), self.num_layers - 1])

    @property
    def mtp_model(self) -> ModelConfig | None:
        """The model of the first layer for multi-token prediction alone.

        It continues the hidden states of this model, with its embedding and its output matrix: see
        `Decoder.join_hidden`. None if there is none, or if the family does not read it.
        """
        if not self.extra_layers or not family(self).mtp_norm:
            return None
        # It is a layer like the last one, with experts if any layer has them.
        last = replace(self, dense_layers=()).select_layers([self.num_layers - 1])
        return replace(last, first_layer=self.num_layers, extra_layers=0)

    @cached_property
    def weights(self) -> ModelWeights:
        """The tensors of the model."""
        return family(self).weights(self)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary position embeddings; see `rope_number`."""
        return tuple(rope for rope in (self.rope, self.other_rope) if rope is not None)

    @property
    def plain_positions(self) -> int:
        """Positions below which rotations do not depend on the length of the text."""
        context = None if self.rope is None else self.rope.plain_context
        return self.max_positions if context is None else min(context, self.max_positions)

    def rope_number(self, layer: int) -> int:
        """Return the index in `ropes` of a decoder layer."""
        return int(self.other_rope_layers[layer]) if self.other_rope_layers else 0

    def attention_variant(self, layer: int) -> AttentionVariant:
        """Return the variant of attention of a decoder layer."""
        return self.attention[layer] if self.attention else DEFAULT_VARIANT

    def kv_heads(self, layer: int) -> KVHeads:
        """Return the key heads of a decoder layer."""
        if self.other_heads is not None and self.other_head_layers[layer]:
            return self.other_heads
        return KVHeads(self.num_kv_heads, self.head_dim)

    def has_experts(self, layer: int) -> bool:
        """Return True if a decoder layer has experts in place of an MLP."""
        return self.experts is not None and not (self.dense_layers and self.dense_layers[layer])

    def is_recurrent(self, layer: int) -> bool:
        """Return True if a decoder layer has a recurrent state in place of a KV cache."""
        return bool(self.recurrent_layers) and self.recurrent_layers[layer]

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The decoder layers that have a KV cache."""
        return tuple(layer for layer in range(self.num_layers) if not self.is_recurrent(layer))

    @property
    def attention_only(self) -> ModelConfig:
        """The model of `attention_layers`, numbered as in the KV cache."""
        return self if self.recurrent is None else self.select_layers(self.attention_layers)

    @cached_property
    def cache_groups(self) -> tuple[tuple[int, ...], ...]:
        """The decoder layers of each group of the KV cache: `attention_layers` with equal heads."""
        groups: dict[KVHeads, list[int]] = {}
        for layer in self.attention_layers:
            groups.setdefault(self.kv_heads(layer), []).append(layer)
        return tuple(map(tuple, groups.values())) or ((),)

    @cached_property
    def layer_kinds(self) -> dict[int, int]:
        """The first decoder layer of each kind, and the count of the kind.

        Layers of a kind have tensors of the same shapes.
        """
        kinds = list(map(self._kind, range(self.num_layers)))
        return {kinds.index(kind): kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def _kind(self, layer: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((short, spec.shape) for short, spec in self.weights.layers[layer].items())

    @property
    def expert_layers(self) -> int:
        """The number of decoder layers with experts."""
        return sum(count for layer, count in self.layer_kinds.items() if self.has_experts(layer))

    @property
    def float32_routers(self) -> bool:
        """True if experts' matrices have the shape of routers, which are then kept in float32.

        All else that is not quantized is known by its shape: see `never_quantized`.
        """
        experts = self.experts
        return experts is not None and experts.count in (experts.ffn_size, experts.shared_ffn_size)

    @property
    def never_quantized(self) -> tuple[tuple[int, int], ...]:
        """Shapes of matrices that are never quantized: routers, gates of one row, and the gates of
        recurrent heads."""
        rows: list[int] = []
        if self.experts is not None:
            rows += (1,) if self.float32_routers else (self.experts.count, 1)
        if self.recurrent is not None:
            rows.append(self.recurrent.value_heads)
        return tuple((count, self.hidden_size) for count in rows)

    @property
    def shapes_of_experts(self) -> frozenset[tuple[int, ...]]:
        """Shapes of experts' matrices that no other matrix has."""
        if self.experts is None:
            return frozenset()
        dense_shapes = (*map(self.layer_shapes, self.layer_kinds), self.embed_shapes(),
                        self.head_shapes())
        return frozenset(self.expert_shapes().matrices).difference(
            *(part.matrices for part in dense_shapes))

    @property
    def q_size(self) -> int:
        """Total width of the query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Total width of the key heads, and of the value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of a value, and of a head's output before the output matrices."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def cached_size(self) -> int:
        """Elements that a layer caches of a token: key and value, or the key alone."""
        return self.kv_size if self.latent is not None else 2 * self.kv_size

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of keys and values per token of the full cache, in all layers."""
        return itemsize * sum(len(layers) * self.select_layers(layers).cached_size
                              for layers in self.cache_groups)

    def embed_shapes(self) -> WeightShapes:
        """Return the sizes of the embeddings, including a tied token table."""
        return WeightShapes.from_specs(self.weights.embed)

    def layer_shapes(self, layer: int = 0) -> WeightShapes:
        """Return the sizes of a decoder layer, without its experts."""
        return self._layer_shapes[self._kind(layer)][0]

    def half_shapes(self, layer: int = 0) -> tuple[WeightShapes, WeightShapes]:
        """Return the sizes of attention and MLP of a decoder layer, with their norms."""
        return self._layer_shapes[self._kind(layer)][1:]

    @cached_property
    def _layer_shapes(self) -> dict[tuple, tuple[WeightShapes, WeightShapes, WeightShapes]]:
        """Sizes of a layer and of its halves, by its kind."""
        shapes = {}
        for kind in self.layer_kinds:
            layer = self.weights.slice_layers(kind, kind + 1).split_halves()
            halves = layer.layers[2 * kind : 2 * kind + 2]
            layer_shapes, attention, mlp = (WeightShapes.from_specs(specs, self.never_quantized)
                                            for specs in (self.weights.layers[kind], *halves))
            shapes[self._kind(kind)] = layer_shapes, attention, mlp
        return shapes

    def over_layers(self, size: Callable[[WeightShapes], int]) -> int:
        """Return the sum of `size` over the decoder layers, without their experts."""
        return sum(count * size(self.layer_shapes(layer))
                   for layer, count in self.layer_kinds.items())

    def expert_shapes(self) -> WeightShapes:
        """Return the sizes of one expert."""
        return WeightShapes.from_specs(next(layer[0] for layer in self.weights.experts if layer))

    def head_shapes(self) -> WeightShapes:
        """Return the sizes of the head; without the output matrix if it is tied."""
        tied = {spec.name for spec in self.weights.embed.values()}
        return WeightShapes.from_specs({short: spec for short, spec in self.weights.head.items()
                                      if spec.name not in tied})

    def layer_parameters(self, layer: int = 0) -> int:
        """Return the parameters of a decoder layer, including its experts."""
        shared = self.layer_shapes(layer).parameters
        if self.experts is None or not self.has_experts(layer):
            return shared
        return shared + self.experts.count * self.expert_shapes().parameters

    def num_parameters(self) -> int:
        """Return the number of parameters; a tied table counts once."""
        layers = sum(count * self.layer_parameters(layer)
                     for layer, count in self.layer_kinds.items())
        return self.embed_shapes().parameters + layers + self.head_shapes().parameters

    def scratch_elements(self, rows: int) -> int:
        """Return the elements of `Scratch` that a decoder layer uses for a number of rows."""
        into = (self.half_shapes(layer)[1].matrices[:-1] for layer in self.layer_kinds)
        wide = max(sum(outputs for outputs, _ in matrices) for matrices in into)
        groups = list(map(self.select_layers, self.cache_groups))
        inputs = (max(group.q_size for group in groups)
                  + 2 * max(group.kv_size for group in groups))
        if self.latent is not None:
            wide += self.latent.query_rank + self.latent.key_dim + self.num_heads * (
                self.latent.query_dim + self.latent.value_dim)
        if self.first_layer:  # embeddings beside hidden states
            wide += 2 * self.hidden_size
        if self.attention_gate:
            wide = max(wide, self.q_size)
        if self.recurrent is not None:
            heads = self.recurrent
            wide = max(wide, heads.value_size)
            inputs = max(inputs, heads.conv_size + heads.value_size + 2 * heads.value_heads)
        return rows * inputs + min(rows, ROW_BLOCK) * (self.hidden_size + wide)


def family(config: ModelConfig) -> Any:
    """Return the `decoder.Decoder` of a model: its tensors and its forward pass."""
    return family_named(config.family)


@cache
def family_named(name: str) -> Any:
    """Return the `decoder.Decoder` of a module and class of `families`."""
    module, _, decoder = name.partition(".")
    return getattr(importlib.import_module(f"flexgen_h2o.models.families.{module}"), decoder)()
