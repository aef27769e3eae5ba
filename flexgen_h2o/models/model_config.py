"""A model's sizes, options and tensors.

Imports neither torch nor transformers: the memory plan needs the sizes before those load.
`registry.from_transformers` makes a `ModelConfig` out of a config.json.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any

from flexgen_h2o.config.attention_form import DEFAULT_FORM, AttentionForm
from flexgen_h2o.config.experts import ExpertsConfig
from flexgen_h2o.config.limits import ROW_BLOCK
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.rope import RopeConfig

ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish")


@dataclass(frozen=True)
class PartShapes:
    """The tensors of a part of a model, each once.

    Attributes
    ----------
    matrices : tuple of (outputs, inputs)
        Shapes of linear layers, and of tables as [rows, width].
    vectors : int
        Elements of all norms and biases together.
    """

    matrices: tuple[tuple[int, int], ...]
    vectors: int = 0

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec],
           exact: Collection[tuple[int, ...]] = ()) -> PartShapes:
        """The part that has these tensors, by short names. Matrices of shapes in `exact`, which
        are never quantized, count as vectors."""
        shapes = [spec.shape for spec in specs.values()]
        plain = [shape for shape in shapes if len(shape) == 1 or shape in exact]
        return cls(tuple((shape[0], shape[1]) for shape in shapes
                         if len(shape) == 2 and shape not in exact),
                   sum(map(math.prod, plain)))

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(outputs * inputs for outputs, inputs in self.matrices) + self.vectors


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint: its canonical name (as transformers saves it) and shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelWeights:
    """The tensors of a model, by the short names that its functions use.

    Attributes
    ----------
    embed, head : dict of str to TensorSpec
        Before the first and after the last layer. A tied head names the embedding's tensor.
    layers : tuple of dict of str to TensorSpec
        One dict per decoder layer, all of a kind with the same keys: matrices in the order of their
        use.
    tables : tuple of str
        Keys of `embed` that are lookup tables: rows are gathered where the table lives.
    mlp : tuple of str
        Keys of a layer that its MLP half uses, and not attention; a bias goes with its matrix.
    experts : tuple of tuple of dict of str to TensorSpec
        The tensors of each expert of each decoder layer; empty where a layer, or a model, has none.
    """

    embed: dict[str, TensorSpec]
    layers: tuple[dict[str, TensorSpec], ...]
    head: dict[str, TensorSpec]
    tables: tuple[str, ...]
    mlp: tuple[str, ...] = ()
    experts: tuple[tuple[dict[str, TensorSpec], ...], ...] = ()

    def groups(self) -> tuple[dict[str, TensorSpec], ...]:
        """The tensors of all parts, each expert a part of its own."""
        return (self.embed, *self.layers, *chain.from_iterable(self.experts), self.head)

    def part(self, first: int, last: int) -> ModelWeights:
        """The same with the tensors alone that layers first:last need, and those before the first
        and after the last layer if these are among them. Experts are of these layers alone."""
        layers = tuple(layer if first <= place < last else {}
                       for place, layer in enumerate(self.layers))
        return replace(self, layers=layers, experts=self.experts[first:last],
                       embed=self.embed if first == 0 else {},
                       head=self.head if last == len(self.layers) else {},
                       tables=self.tables if first == 0 else ())

    def separated(self) -> ModelWeights:
        """The same with two layers in place of each: attention, then MLP."""
        halves = []
        for layer in self.layers:
            mlp = {name: spec for name, spec in layer.items()
                   if name.removesuffix("_bias") in self.mlp}
            halves += [{name: layer[name] for name in layer if name not in mlp}, mlp]
        return replace(self, layers=tuple(halves))


def renamed(name: str, prefixes: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """A tensor's possible names: `name` first, then with each (canonical, other) prefix swapped."""
    others = (other + name[len(prefix):] for prefix, other in prefixes if name.startswith(prefix))
    return (name, *dict.fromkeys(others))


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of one model; a family ignores the options that it does not have.

    Attributes
    ----------
    name : str
        What the user called it.
    family : str
        A module of `families`.
    ffn_size : int
        Width of the MLP.
    max_positions : int
        Context; OPT has a table of this many positions and cannot go past it. See
        `plain_positions`.
    activation : str
        One of `ACTIVATIONS`.
    attention_bias, out_bias, mlp_bias : bool
        Whether queries, keys and values have a bias, attention's output, and all MLP projections.
    eos_token_ids : tuple of int
        Tokens that end a text; may be empty.
    dtype : str or None
        What the checkpoint says that it is stored in, such as "bfloat16".
    rope, local_rope : RopeConfig or None
        None for learned positions; `local_rope` is that of some of the layers.
    local_layers : tuple of bool
        Whether a layer rotates by `local_rope`; empty where all do by `rope`.
    qk_norm : bool
        Queries and keys are normed: each head, by weights of its own or not, or all together, as
        the table of tensors says.
    clip_qkv : float
        Queries, keys and values are cut off at this size; 0: they are not.
    norm_offset : float
        Added to the weights of root-mean-square norms.
    embed_scale, residual_scale, logit_divisor : float
        Factors of embeddings and of what attention and MLP add; what logits are divided by.
    logit_softcap : float
        Logits become ``softcap * tanh(logit / softcap)``; 0: they do not.
    pre_norm, final_norm, norm_affine : bool
        OPT: norms before (not after) attention and MLP; a norm before the head; norms with weights.
    embed_dim : int
        OPT: width of the token table, projected to `hidden_size` where they differ. 0 means equal.
    parallel_residual : bool
        GPT-NeoX, StableLM 2 12B: attention and MLP read the same input.
    experts : ExpertsConfig or None
        Those in place of each layer's MLP, if any.
    dense_layers : tuple of bool
        Whether a layer of a mixture has an MLP and no experts; empty where none has. See
        `has_experts`.
    attention : tuple of AttentionForm
        One for each decoder layer; empty where all have the default form. See `form`.

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
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None
    local_layers: tuple[bool, ...] = ()
    qk_norm: bool = False
    clip_qkv: float = 0.0
    norm_offset: float = 0.0
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
    attention: tuple[AttentionForm, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "embed_dim", self.embed_dim or self.hidden_size)
        if self.dense_layers and all(self.dense_layers):  # as in a part of a model
            object.__setattr__(self, "experts", None)
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"{self.name}: {self.num_heads} attention heads cannot share "
                            f"{self.num_kv_heads} key/value heads evenly; the config is wrong")
        if self.activation not in ACTIVATIONS:
            raise UserError(f"{self.name}: activation function {self.activation!r} is not "
                            f"supported (supported: {', '.join(ACTIVATIONS)})")
        if self.attention and len(self.attention) != self.num_layers:
            raise UserError(f"{self.name}: {len(self.attention)} forms of attention for "
                            f"{self.num_layers} layers; the config is wrong")
        # A window as long as the context, to which the rope may reach, hides nothing.
        forms = tuple(replace(form, window=None) if (form.window or 0) >= self.max_positions
                      else form for form in self.attention)
        object.__setattr__(self, "attention", () if set(forms) == {DEFAULT_FORM} else forms)
        for rope in self.ropes:
            rotary = rope.rotary_dim
            if rotary % 2 or not 2 <= rotary <= self.head_dim:
                raise UserError(f"{self.name}: {rotary} rotary dimensions in a head of "
                                f"{self.head_dim} are not supported (an even number that fits is)")

    def part(self, first: int, last: int) -> ModelConfig:
        """The model of the layers first:last alone."""
        return replace(self, num_layers=last - first, attention=self.attention[first:last],
                       local_layers=self.local_layers[first:last],
                       dense_layers=self.dense_layers[first:last])

    def longer(self) -> ModelConfig:
        """The model with one more layer, like its last."""
        return replace(self, num_layers=self.num_layers + 1,
                       attention=self.attention + self.attention[-1:],
                       local_layers=self.local_layers + self.local_layers[-1:],
                       dense_layers=self.dense_layers + self.dense_layers[-1:])

    @cached_property
    def weights(self) -> ModelWeights:
        """The tensors, as the family's table has them."""
        return family(self).weights(self)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary position embeddings that there are; see `rope_number`."""
        return tuple(rope for rope in (self.rope, self.local_rope) if rope is not None)

    @property
    def plain_positions(self) -> int:
        """Positions up to which all texts rotate alike, whatever their length."""
        context = None if self.rope is None else self.rope.plain_context
        return self.max_positions if context is None else min(context, self.max_positions)

    def rope_number(self, layer: int) -> int:
        """Which of `ropes` a decoder layer has."""
        return int(self.local_layers[layer]) if self.local_layers else 0

    def form(self, layer: int) -> AttentionForm:
        """The form of attention of a decoder layer."""
        return self.attention[layer] if self.attention else DEFAULT_FORM

    def has_experts(self, layer: int) -> bool:
        """True if a decoder layer has experts in place of an MLP."""
        return self.experts is not None and not (self.dense_layers and self.dense_layers[layer])

    @cached_property
    def layer_kinds(self) -> dict[int, int]:
        """The first decoder layer of each kind, and how many are of it: of a mixture those with
        experts, and those without."""
        kinds = [self.has_experts(layer) for layer in range(self.num_layers)]
        return {kinds.index(kind): kinds.count(kind) for kind in dict.fromkeys(kinds)}

    @property
    def expert_layers(self) -> int:
        """The decoder layers that have experts."""
        return sum(count for layer, count in self.layer_kinds.items() if self.has_experts(layer))

    @property
    def exact_shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the matrices that stay in the run's dtype: routers, and gates of one row."""
        if self.experts is None:
            return ()
        return (self.experts.count, self.hidden_size), (1, self.hidden_size)

    @property
    def shapes_of_experts(self) -> frozenset[tuple[int, ...]]:
        """Shapes of matrices of experts that no other matrix has."""
        if self.experts is None:
            return frozenset()
        others = (*map(self.layer_shapes, self.layer_kinds), self.embed_shapes(),
                  self.head_shapes())
        return frozenset(self.expert_shapes().matrices).difference(
            *(part.matrices for part in others))

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or all value heads) together."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token adds to the full cache, all layers together."""
        return 2 * self.num_layers * self.kv_size * itemsize

    def embed_shapes(self) -> PartShapes:
        """The embeddings, a tied token table included."""
        return PartShapes.of(self.weights.embed)

    def layer_shapes(self, layer: int = 0) -> PartShapes:
        """A decoder layer, without its experts."""
        return self._layer_shapes[self.has_experts(layer)][0]

    def half_shapes(self, layer: int = 0) -> tuple[PartShapes, PartShapes]:
        """Attention and MLP of a decoder layer, each with its norms."""
        return self._layer_shapes[self.has_experts(layer)][1:]

    @cached_property
    def _layer_shapes(self) -> dict[bool, tuple[PartShapes, PartShapes, PartShapes]]:
        """Whole layers and their halves, those with experts apart."""
        found = {}
        for kind in self.layer_kinds:
            halves = self.weights.part(kind, kind + 1).separated().layers[2 * kind : 2 * kind + 2]
            whole, attention, mlp = (PartShapes.of(specs, self.exact_shapes)
                                     for specs in (self.weights.layers[kind], *halves))
            found[self.has_experts(kind)] = whole, attention, mlp
        return found

    def over_layers(self, size: Callable[[PartShapes], int]) -> int:
        """The sum of what `size` gives for each decoder layer, without its experts."""
        return sum(count * size(self.layer_shapes(layer))
                   for layer, count in self.layer_kinds.items())

    def expert_shapes(self) -> PartShapes:
        """One expert of a decoder layer, of a model that has some."""
        return PartShapes.of(next(layer[0] for layer in self.weights.experts if layer))

    def head_shapes(self) -> PartShapes:
        """Tensors after the last layer; the output matrix only if it is not tied."""
        tied = {spec.name for spec in self.weights.embed.values()}
        return PartShapes.of({short: spec for short, spec in self.weights.head.items()
                              if spec.name not in tied})

    def embed_parameters(self) -> int:
        """Parameters of the embeddings, a tied token table included."""
        return self.embed_shapes().parameters

    def layer_parameters(self, layer: int = 0) -> int:
        """Parameters of a decoder layer, with all of its experts."""
        own = self.layer_shapes(layer).parameters
        if self.experts is None or not self.has_experts(layer):
            return own
        return own + self.experts.count * self.expert_shapes().parameters

    def head_parameters(self) -> int:
        """Parameters after the last layer; the output matrix only if it is not tied."""
        return self.head_shapes().parameters

    def num_parameters(self) -> int:
        """All parameters, a tied table counted once."""
        layers = sum(count * self.layer_parameters(layer)
                     for layer, count in self.layer_kinds.items())
        return self.embed_parameters() + layers + self.head_parameters()

    def scratch_elements(self, rows: int) -> int:
        """Elements of compute dtype that a decoder layer takes from its `Scratch` for `rows`."""
        into = (self.half_shapes(layer)[1].matrices[:-1] for layer in self.layer_kinds)
        wide = max(sum(outputs for outputs, _ in matrices) for matrices in into)
        return (rows * (self.q_size + 2 * self.kv_size)
                + min(rows, ROW_BLOCK) * (self.hidden_size + wide))


def family(config: ModelConfig) -> Any:
    """Return the `decoder.Decoder` of a model: its tensors and its forward pass."""
    return family_named(config.family)


@cache
def family_named(name: str) -> Any:
    """Return the `decoder.Decoder` of a module of `families`.

    Raises
    ------
    ValueError
        If there is no such family; `registry.from_transformers` never makes such a config.
    """
    try:
        module = importlib.import_module(f"flexgen_h2o.models.families.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no model family {name!r}") from error
    return module.FAMILY
