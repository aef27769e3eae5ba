"""A model's sizes, options and tensors.

Imports neither torch nor transformers: the memory plan needs the sizes before those load.
Other files take these names from `spec`, which makes them out of a config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from flexgen_h2o.config.limits import ROW_BLOCK
from flexgen_h2o.errors import UserError

ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish")
ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and how it is stretched.

    Attributes
    ----------
    theta : float
        Base of the wavelengths.
    rotary_dim : int
        Leading dimensions of each head that rotate; even.
    kind : str
        One of `ROPE_KINDS`. The fields below are unused by `default`.
    factor : float
        By how much positions are compressed.
    low_freq_factor, high_freq_factor : float
        `llama3` only: the band, in turns per original context, between scaled and untouched.
    original_max_positions : int
        `llama3` only: the context length before stretching.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


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

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(outputs * inputs for outputs, inputs in self.matrices) + self.vectors


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts that is the MLP of every decoder layer (arXiv 1701.06538).

    Attributes
    ----------
    count, per_token : int
        Experts of a layer, and how many of them a token goes to.
    ffn_size : int
        Width of an expert.
    normalise : bool
        The weights of a token's experts are made to sum to 1.
    shared_ffn_size : int
        Width of the expert that every token goes to, behind a gate of its own; 0: there is none.
    """

    count: int
    per_token: int
    ffn_size: int
    normalise: bool = True
    shared_ffn_size: int = 0

    def slots(self, tokens: int, away: int, given: int | None = None) -> int:
        """Experts that fast memory has room for beside those that rest in it.

        Without a number that is `given`, as many as a decode step of so many `tokens` chooses in
        two layers. Never more than the experts that rest `away` from fast memory.
        """
        touched = min(self.count, self.per_token * tokens)
        return min(away, 2 * touched if given is None else given)

    def touched(self, tokens: float, frequencies: Sequence[float] | None = None) -> float:
        """The experts of a layer that so many tokens choose together, as expected.

        Each token chooses on its own: an expert that a token chooses with probability p is chosen
        by any of n tokens with probability ``1 - (1 - p) ** n``.

        Parameters
        ----------
        tokens : float
        frequencies : sequence of float, optional
            The share of the tokens that choose each expert; they sum to `per_token`. Without: all
            are chosen alike often.
        """
        shares = frequencies or [self.per_token / self.count] * self.count
        return sum(1 - (1 - min(share, 1.0)) ** tokens for share in shares)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of one model; a family ignores the options that it does not have.

    Attributes
    ----------
    name : str
        What the user called it.
    family : str
        "opt", "llama" or "gpt_neox".
    ffn_size : int
        Width of the MLP.
    max_positions : int
        Trained context; OPT has a table of this many positions and cannot go past it.
    activation : str
        One of `ACTIVATIONS`.
    attention_bias, mlp_bias : bool
        Whether all four attention projections, and all MLP projections, have a bias.
    eos_token_ids : tuple of int
        Tokens that end a text; may be empty.
    dtype : str or None
        What the checkpoint says that it is stored in, such as "bfloat16".
    rope : RopeConfig or None
        None for learned positions.
    sliding_window : int or None
        Attention reaches back no further; a run must not be longer. None when inactive.
    pre_norm, final_norm, norm_affine : bool
        OPT: norms before (not after) attention and MLP; a norm before the head; norms with weights.
    embed_dim : int
        OPT: width of the token table, projected to `hidden_size` where they differ. 0 means equal.
    parallel_residual : bool
        GPT-NeoX: attention and MLP read the same input.
    experts : ExpertsConfig or None
        Those in place of each layer's MLP, if any.

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
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None
    rope: RopeConfig | None = None
    sliding_window: int | None = None
    pre_norm: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    embed_dim: int = 0
    parallel_residual: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self):
        object.__setattr__(self, "embed_dim", self.embed_dim or self.hidden_size)
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"{self.name}: {self.num_heads} attention heads cannot share "
                            f"{self.num_kv_heads} key/value heads evenly; the config is wrong")
        if self.activation not in ACTIVATIONS:
            raise UserError(f"{self.name}: activation function {self.activation!r} is not "
                            f"supported (supported: {', '.join(ACTIVATIONS)})")
        rotary = self.rope.rotary_dim if self.rope else 2
        if rotary % 2 or not 2 <= rotary <= self.head_dim:
            raise UserError(f"{self.name}: {rotary} rotary dimensions in a head of "
                            f"{self.head_dim} are not supported (an even number that fits is)")

    @property
    def exact_shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the matrices that stay in the run's dtype: routers, and gates of one row."""
        if self.experts is None:
            return ()
        return (self.experts.count, self.hidden_size), (1, self.hidden_size)

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
        tokens, hidden = (self.vocab_size, self.embed_dim), self.hidden_size
        if self.family != "opt":
            return PartShapes((tokens,))
        projection = ((hidden, self.embed_dim),) if self._projects else ()
        return PartShapes((tokens, (self.max_positions + 2, hidden), *projection))

    def layer_shapes(self) -> PartShapes:
        """One decoder layer."""
        attention, mlp = self.half_shapes()
        return PartShapes((*attention.matrices, *mlp.matrices), attention.vectors + mlp.vectors)

    def half_shapes(self) -> tuple[PartShapes, PartShapes]:
        """Attention and MLP of a decoder layer, each with its norm."""
        hidden, ffn, kv = self.hidden_size, self.ffn_size, self.kv_size
        fused = self.family == "gpt_neox"
        inner = (self.q_size + 2 * kv,) if fused else (self.q_size, kv, kv)
        attention = (*((outputs, hidden) for outputs in inner), (hidden, self.q_size))
        wide = 2 if self.family == "llama" else 1  # gate and up, or a single matrix
        mlp = (*((ffn, hidden),) * wide, (hidden, ffn))

        def half(matrices: tuple[tuple[int, int], ...], biased: bool) -> PartShapes:
            biases = sum(outputs for outputs, _ in matrices) if biased else 0
            return PartShapes(matrices, biases + self._norm())

        return half(attention, self.attention_bias), half(mlp, self.mlp_bias)

    def head_shapes(self) -> PartShapes:
        """Tensors after the last layer; the output matrix only if it is not tied."""
        projection = ((self.embed_dim, self.hidden_size),) if self._projects else ()
        matrix = () if self.tie_word_embeddings else ((self.vocab_size, self.embed_dim),)
        return PartShapes((*projection, *matrix), self.final_norm * self._norm())

    def embed_parameters(self) -> int:
        """Parameters of the embeddings, a tied token table included."""
        return self.embed_shapes().parameters

    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        return self.layer_shapes().parameters

    def head_parameters(self) -> int:
        """Parameters after the last layer; the output matrix only if it is not tied."""
        return self.head_shapes().parameters

    def num_parameters(self) -> int:
        """All parameters, a tied table counted once."""
        layers = self.num_layers * self.layer_parameters()
        return self.embed_parameters() + layers + self.head_parameters()

    def scratch_elements(self, rows: int) -> int:
        """Elements of compute dtype that a decoder layer takes from its `Scratch` for `rows`."""
        block = min(rows, ROW_BLOCK)
        wide = 2 if self.family == "llama" else 1
        return (rows * (self.q_size + 2 * self.kv_size)
                + block * (self.hidden_size + wide * self.ffn_size))

    def _norm(self) -> int:
        scales = 1 if self.family == "llama" else 2  # RMS norm has no bias
        return scales * self.hidden_size * self.norm_affine

    @property
    def _projects(self) -> bool:
        """True if OPT's token table is narrower or wider than its layers."""
        return self.family == "opt" and self.embed_dim != self.hidden_size


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
        One dict per decoder layer, all with the same keys.
    tables : tuple of str
        Keys of `embed` that are lookup tables: rows are gathered where the table lives.
    mlp : tuple of str
        Keys of a layer that its MLP half uses, and not attention; a bias goes with its matrix.
    experts : tuple of tuple of dict of str to TensorSpec
        The tensors of each expert of each decoder layer; empty where a model has none.
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
        and after the last layer if these are among them."""
        layers = tuple(layer if first <= place < last else {}
                       for place, layer in enumerate(self.layers))
        return replace(self, layers=layers, embed=self.embed if first == 0 else {},
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
