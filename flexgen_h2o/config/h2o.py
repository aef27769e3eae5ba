"""Configuration of the KV cache's budget and eviction policy (arXiv 2306.14048). No torch.

Policies are known here by name; their functions are in `h2o.policies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from flexgen_h2o.config.layers import AttentionVariant
from flexgen_h2o.config.validation import (
    Count,
    Fraction,
    NonNegative,
    check_choice,
    check_fields,
    check_number,
)
from flexgen_h2o.errors import UserError

FUSED_SCORES = ("sum", "mean", "decay")
"""Scores that the kernels compute."""
SCORES = (*FUSED_SCORES, "caote")
"""Scores of the built-in policies."""

_registered: dict[str, object] = {}


def add_policy(name: str, policy: object) -> None:
    """Register a policy under a name; registering the same one again is a no-op.

    Raises `UserError` if the name is empty or belongs to another policy.
    """
    if not isinstance(name, str) or not name or name != name.strip():
        raise UserError(f"a policy's name must be a word, got {name!r}")
    if name in SCORES or _registered.get(name, policy) != policy:
        raise UserError(f"a policy named {name!r} already exists: choose another name")
    _registered[name] = policy


def find_policy(name: str) -> object:
    """Return the policy that was registered under a name. Raises KeyError."""
    return _registered[name]


def check_score(name: object) -> None:
    """Raise `UserError` unless a policy of this name is registered in this process."""
    if not isinstance(name, str) or name not in (*SCORES, *_registered):
        known = ", ".join((*SCORES, *_registered))
        raise UserError(f"score must be one of {known}, got {name!r}: register other policies "
                        "with register_policy in every process first")


EVICTIONS = ("h2o", "window", "sink-window", "full")
SINK_WINDOW_SINKS = 4
"""Sinks of ``--eviction sink-window``, as in StreamingLLM (arXiv 2309.17453)."""
POSITIONS = ("original", "rolling")
BUDGET_BASES = ("prompt", "text")
INDEX_BITS = (4, 2)


@dataclass(frozen=True)
class H2OConfig:
    """Budget and eviction policy of the KV cache (H2O, arXiv 2306.14048).

    Without a size, the cache is full; with only a recent size, it is a window. A layer is also full
    if its heavy ratio is 1 and its recent ratio is 1 or omitted.

    Parameters
    ----------
    heavy_ratio, recent_ratio : float or sequence of float, optional
        Heavy hitters and recent tokens as fractions of a sequence's tokens (see `budget_of`), above
        0 and at most 1; a sequence has one ratio per decoder layer. `recent_ratio` defaults to
        `heavy_ratio`.
    heavy_tokens, recent_tokens : int, optional
        The same in tokens per sequence, layer and KV head, instead of ratios. `recent_tokens`
        defaults to `heavy_tokens`, which may be 0.
    budget_of : str
        Base of the ratios. ``"prompt"``: the prompt's length, as in the authors' code; ``"text"``:
        all tokens so far, as in the paper's experiments, so that the cache grows.
    sink_tokens : int
        First tokens of a sequence that are always kept, in addition to the budget.
    score : str
        Policy that turns attention into a score. ``"sum"``: summed over queries (the paper);
        ``"mean"``: averaged over the queries that see the key; ``"decay"``: a sum that fades;
        ``"caote"``: change of the attention output; or a name given to `register_policy`.
    decay : float
        Factor per query of the score ``"decay"`` and of other scores that fade.
    positions : str
        ``"original"``: a key keeps its position; ``"rolling"``: its position is its rank among the
        cached keys.
    evict_generated : bool
        Evict among generated tokens too. If false, only the prompt is cut.
    prompt_chunk : int, optional
        Evict inside prompts, after each chunk of this many tokens, counted from the prompt's end.
        The cache then needs only the budget and one chunk, and other tokens are kept. None: a
        prompt attends to all of its tokens and is cut at its end.
    simulate : bool
        Mask a full cache instead of dropping tokens.
    drop_positions : bool
        OPT: drop positions past the learned table. For speed measurements only.
    recall : bool
        Evict nothing. Each new token attends to the tokens that its query weighs most, as many as
        the budget (`h2o.recall`).
    index_bits : int
        Bit width of the quantized key index of `recall`: 4 or 2.

    Raises
    ------
    UserError
        A value is of a wrong type or out of range, a part has both a ratio and a count, or an
        option has no effect.
    """

    heavy_ratio: float | Sequence[float] | None = None
    recent_ratio: float | Sequence[float] | None = None
    heavy_tokens: NonNegative | None = None
    recent_tokens: Count | None = None  # the newest token is always kept
    budget_of: str = "prompt"
    sink_tokens: NonNegative = 0
    score: str = "sum"
    decay: Fraction = 0.98
    positions: str = "original"
    evict_generated: bool = True
    prompt_chunk: Count | None = None
    simulate: bool = False
    drop_positions: bool = False
    recall: bool = False
    index_bits: int = 4

    def __post_init__(self) -> None:
        check_score(self.score)
        for name, choices in (("positions", POSITIONS), ("budget_of", BUDGET_BASES),
                              ("index_bits", INDEX_BITS)):
            check_choice(name, getattr(self, name), choices)
        check_fields(self)
        self._check_sizes()
        self._check_recall()
        self._check_budget_of()
        if self.prompt_chunk is not None and self.is_full:
            raise UserError("prompt_chunk has no effect on the full cache: leave it out")

    def _check_sizes(self) -> None:
        for kind in ("heavy", "recent"):
            ratio = getattr(self, f"{kind}_ratio")
            if ratio is not None:
                object.__setattr__(self, f"{kind}_ratio", _ratios(f"{kind}_ratio", ratio))
                if getattr(self, f"{kind}_tokens") is not None:
                    raise UserError(f"give {kind}_ratio or {kind}_tokens, not both")
        counts = [len(ratios) for ratios in self._per_layer().values()]
        if len(set(counts)) > 1:
            raise UserError(
                f"heavy_ratio has {counts[0]} numbers and recent_ratio {counts[1]}: give each one "
                "per decoder layer"
            )
        if self.heavy_tokens == 0 and self.recent_ratio is None and self.recent_tokens is None:
            raise UserError("heavy_tokens is 0: give recent_tokens or recent_ratio as well")
        if self.sink_tokens > 0 and not self._sized:
            raise UserError(
                "sink_tokens has no effect on the full cache: give heavy_ratio, heavy_tokens, "
                "recent_ratio or recent_tokens"
            )

    def _check_recall(self) -> None:
        if not self.recall:
            if self.index_bits != H2OConfig.index_bits:
                raise UserError("index_bits has no effect without recall: leave it out")
            return
        if not self._sized:
            raise UserError("recall has no effect on the full cache: give heavy_ratio, "
                            "heavy_tokens, recent_ratio or recent_tokens")
        for name in ("sink_tokens", "score", "positions", "evict_generated", "prompt_chunk"):
            if getattr(self, name) != getattr(H2OConfig, name):
                raise UserError(f"recall evicts nothing and selects tokens per query: leave "
                                f"{name} out")

    def _check_budget_of(self) -> None:
        if self.budget_of == "prompt":
            return
        if self.heavy_ratio is None and self.recent_ratio is None:
            raise UserError("budget_of 'text' has no effect without a ratio: give heavy_ratio or "
                            "recent_ratio, or leave it out")
        if not self.evict_generated:
            raise UserError("budget_of 'text' has no effect where only the prompt is cut: leave "
                            "evict_generated (--hh-all) on")
        if self.prompt_chunk is not None:
            raise UserError("eviction inside prompts takes ratios of the whole prompt only: leave "
                            "budget_of 'text' or prompt_chunk (--evict-while-prefilling) out")

    def _per_layer(self) -> dict[str, tuple[float, ...]]:
        """Return the ratios that are given per layer."""
        names = ("heavy_ratio", "recent_ratio")
        return {n: getattr(self, n) for n in names if isinstance(getattr(self, n), tuple)}

    @property
    def _sized(self) -> bool:
        sizes = (self.heavy_ratio, self.recent_ratio, self.heavy_tokens, self.recent_tokens)
        return any(size is not None for size in sizes)

    def check_layers(self, num_layers: int) -> None:
        """Raise `UserError` unless every ratio per layer has one number for each decoder layer."""
        for name, ratios in self._per_layer().items():
            if len(ratios) != num_layers:
                raise UserError(
                    f"{name} has {len(ratios)} numbers but the model has {num_layers} decoder "
                    "layers: give one number per layer, or a single one"
                )

    def ratios(self, layer: int) -> tuple[float | None, float | None]:
        """Return the heavy and the recent ratio of a decoder layer; None where counts apply."""
        heavy, recent = (
            ratio[layer] if isinstance(ratio, Sequence) else ratio
            for ratio in (self.heavy_ratio, self.recent_ratio)
        )
        return heavy, heavy if recent is None and self.recent_tokens is None else recent

    def is_full_at(self, layer: int) -> bool:
        """Return whether a decoder layer never evicts."""
        return self.recall or not self._sized or self.ratios(layer) == (1, 1)

    @property
    def is_full(self) -> bool:
        """Whether no layer evicts: no size is given, all ratios are 1, or `recall` is set."""
        layers = min(map(len, self._per_layer().values()), default=1)
        return all(self.is_full_at(layer) for layer in range(layers))

    def window(self, layer: int) -> int | None:
        """Return the attention window of a decoder layer, or None if it has none."""
        return None

    def evicts_generated_at(self, layer: int) -> bool:
        """Return whether a decoder layer that is not full evicts generated tokens."""
        return self.evict_generated

    def evicts_chunks(self, *, compressed: bool) -> bool:
        """Return whether prompts are evicted from after each chunk, not only at their end."""
        return self.prompt_chunk is not None

    def without_windows(self) -> H2OConfig:
        """Return the configuration without the windows of the model's layers."""
        return self

    @property
    def scored(self) -> bool:
        """Whether some layer selects heavy hitters and needs scores."""
        heavy = self.heavy_ratio is not None or bool(self.heavy_tokens)
        return heavy and not self.without_windows().is_full


def _ratios(name: str, value: object) -> float | tuple[float, ...]:
    """Check a ratio, or one per decoder layer. Return a sequence as a (hashable) tuple."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return check_number(name, value, gt=0, le=1)
    if len(value) == 0:
        raise UserError(f"{name} must be a number, or one per decoder layer, got {value!r}")
    for layer, ratio in enumerate(value):
        check_number(f"{name} of layer {layer}", ratio, gt=0, le=1)
    return tuple(value)


@dataclass(frozen=True)
class WindowedH2O(H2OConfig):
    """An `H2OConfig` with the attention windows of a model's layers; see `add_windows`.

    A layer with a window caches one token less than the window, and a new token takes the slot of
    the oldest. A smaller H2O budget applies there too, with two exceptions: sink tokens are not
    pinned, because the window leaves them, and if generated tokens are not evicted, only the window
    applies.

    Parameters
    ----------
    windows : tuple of (int or None)
        One for each decoder layer.
    """

    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        """See `H2OConfig.window`."""
        return self.windows[layer]

    def is_full_at(self, layer: int) -> bool:
        """See `H2OConfig.is_full_at`."""
        return self.windows[layer] is None and super().is_full_at(layer)

    @property
    def is_full(self) -> bool:
        """See `H2OConfig.is_full`."""
        return all(map(self.is_full_at, range(len(self.windows))))

    def evicts_generated_at(self, layer: int) -> bool:
        """See `H2OConfig.evicts_generated_at`."""
        return self.evict_generated or self.windows[layer] is not None

    def evicts_chunks(self, *, compressed: bool) -> bool:
        """See `H2OConfig.evicts_chunks`. Eviction by windows alone loses nothing."""
        return super().evicts_chunks(compressed=compressed) or (
            not compressed and self.without_windows().is_full)

    def without_windows(self) -> H2OConfig:
        """See `H2OConfig.without_windows`."""
        return self._user

    @cached_property
    def _user(self) -> H2OConfig:
        user = H2OConfig(**_options(self) | {"prompt_chunk": None})
        # A full cache has no prompt_chunk, but windows evict from chunks.
        return user if user.is_full else replace(user, prompt_chunk=self.prompt_chunk)


def add_windows(h2o: H2OConfig | None, variants: Sequence[AttentionVariant]) -> H2OConfig | None:
    """Return a configuration with the windows of layers, replacing earlier windows.

    Without any window, return the user's configuration.
    """
    h2o = None if h2o is None else h2o.without_windows()
    windows = tuple(variant.window for variant in variants)
    if not any(windows):
        return h2o
    # Other options have no effect on a full cache.
    if h2o is None or h2o.is_full and not h2o.recall:
        h2o = H2OConfig(simulate=h2o is not None and h2o.simulate)
    return WindowedH2O(**_options(h2o), windows=windows)


def select_layers(h2o: H2OConfig | None, layers: Sequence[int]) -> H2OConfig | None:
    """Return a configuration for some decoder layers, which are numbered from 0 in the result."""
    if h2o is None or not layers:
        return None
    options: dict[str, Any] = {
        name: tuple(value[layer] for layer in layers) for name in ("heavy_ratio", "recent_ratio")
        if isinstance(value := getattr(h2o, name), tuple)}
    if isinstance(h2o, WindowedH2O):
        options["windows"] = tuple(h2o.windows[layer] for layer in layers)
    if h2o.prompt_chunk is not None and replace(h2o, prompt_chunk=None, **options).is_full:
        options["prompt_chunk"] = None  # it has no effect on a full cache
    return replace(h2o, **options)


def _options(h2o: H2OConfig) -> dict[str, Any]:
    return {field.name: getattr(h2o, field.name) for field in fields(H2OConfig)}
