"""What a run is told, in frozen dataclasses that check every value. No torch.

A bad value raises `UserError` in one line when the object is made, so that whatever holds a
`Policy` or `SamplingParams` need not check it again.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from flexgen_h2o.errors import UserError

TIERS = ("gpu", "cpu", "disk")
PLACED = ("weights", "cache", "activations")
SCORES = ("sum", "mean", "decay")
POSITIONS = ("original", "rolling")
OFFLOAD_DIR = "~/.cache/flexgen_h2o/offload"
DUMMY = "_DUMMY_"  # in place of a path: random weights

# Percentages are typed by people and summed in binary: 33.3 + 66.7 must count as 100.
_PERCENT_SLACK = 1e-6


def check_bool(name: str, value: object) -> None:
    """Raise `UserError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name} must be true or false, got {value!r}")


def check_int(name: str, value: object, *, low: int | None = None, high: int | None = None) -> None:
    """Raise `UserError` unless `value` is a whole number (no bool) in low..high."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UserError(f"{name} must be a whole number, got {value!r}")
    if low is not None and int(value) < low:
        raise UserError(f"{name} must be at least {low}, got {value}")
    if high is not None and int(value) > high:
        raise UserError(f"{name} must be at most {high}, got {value}")


def check_number(
    name: str,
    value: object,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> float:
    """`value`; raises `UserError` unless it is a finite number in low..high and over `above`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, got {value!r}")
    number = float(value)
    if above is not None and number <= above:
        raise UserError(f"{name} must be greater than {above:g}, got {value}")
    if low is not None and number < low:
        raise UserError(f"{name} must be at least {low:g}, got {value}")
    if high is not None and number > high:
        raise UserError(f"{name} must be at most {high:g}, got {value}")
    return number


def check_text(name: str, value: object) -> None:
    """Raise `UserError` unless `value` is text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise UserError(f"{name} must be text, got {shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not text in UTF-8: character {error.start} is "
                        f"{value[error.start]!a}, half of a surrogate pair or a byte that stands "
                        "for none; mend it") from None


def shown(value: object) -> str:
    """A wrong value for a message: in one line, not too long."""
    return f"{' '.join(repr(value).split()):.80}"


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise `UserError` unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


@dataclass(frozen=True)
class Placement:
    """Where one kind of data lives: percentages of the three tiers, which sum to 100.

    Raises `UserError` for a share that is negative or not a number, or another sum.
    """

    gpu: float
    cpu: float
    disk: float

    def __post_init__(self) -> None:
        for tier in TIERS:
            check_number(f"the {tier} percentage", getattr(self, tier), low=0, high=100)
        total = self.gpu + self.cpu + self.disk
        if abs(total - 100) > _PERCENT_SLACK:
            raise UserError(f"percentages of gpu, cpu and disk must sum to 100, got {total:g}")

    def fractions(self) -> tuple[float, float, float]:
        """The shares of (gpu, cpu, disk) as fractions of 1."""
        return self.gpu / 100, self.cpu / 100, self.disk / 100


def parse_percent(values: Sequence[object], name: str = "--percent"
                  ) -> tuple[Placement, Placement, Placement]:
    """Read FlexGen's ``--percent``: the shares of the device and the host; the rest is disk.

    Parameters
    ----------
    values : sequence of 4 or 6 numbers (or their text)
        Weights gpu, cpu; cache gpu, cpu; activations gpu, cpu (default 100 0), in percent.
    name : str
        What errors call it.

    Returns
    -------
    tuple of Placement
        For weights, cache, activations.

    Raises
    ------
    UserError
        Wrong count, not a number, out of 0..100, or two shares that sum to over 100.
    """
    if len(values) not in (4, 6):
        raise UserError(
            f"{name} takes 4 or 6 numbers (weights gpu cpu, cache gpu cpu, "
            f"activations gpu cpu; the rest is disk), got {len(values)}"
        )
    shares = [_percentage(name, value) for value in values]
    shares += [100.0, 0.0][: 6 - len(shares)]
    placements = []
    for index, kind in enumerate(PLACED):
        gpu, cpu = shares[2 * index : 2 * index + 2]
        if gpu + cpu > 100 + _PERCENT_SLACK:
            raise UserError(
                f"{name} gives the {kind} {gpu:g} + {cpu:g} = {gpu + cpu:g} %: "
                "make each pair sum to at most 100"
            )
        placements.append(Placement(gpu, cpu, max(0.0, 100 - gpu - cpu)))
    weights, cache, activations = placements
    return weights, cache, activations


def _percentage(name: str, value: object) -> float:
    """One number of ``--percent``, from a number or its text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise UserError(f"{name} takes numbers from 0 to 100, got {value!r}") from None
    return check_number(f"each number of {name}", value, low=0, high=100)


@dataclass(frozen=True)
class Policy:
    """All that decides speed and never results.

    `gpu_batch_size` sequences are computed together; a block is `num_gpu_batches` of them, which
    share every load of a layer's weights. `overlap` lets transfers run beside compute;
    `cpu_cache_compute` attends on the CPU where the cache lives there; `pin_weight` page-locks
    host weights when there is a GPU. `prefill_chunk` tokens of a prompt go through the whole
    network at once (None: all): fewer need less memory. `sep_layer` schedules attention and MLP as
    two layers, so that only half a layer's weights are fetched at a time. Raises `UserError` for a
    value of a wrong type or range.
    """

    gpu_batch_size: int = 4
    num_gpu_batches: int = 1
    weights: Placement = Placement(100, 0, 0)
    cache: Placement = Placement(100, 0, 0)
    activations: Placement = Placement(100, 0, 0)
    overlap: bool = True
    cpu_cache_compute: bool = False
    pin_weight: bool = True
    prefill_chunk: int | None = None
    sep_layer: bool = False

    def __post_init__(self) -> None:
        check_int("gpu_batch_size", self.gpu_batch_size, low=1)
        check_int("num_gpu_batches", self.num_gpu_batches, low=1)
        if self.prefill_chunk is not None:
            check_int("prefill_chunk", self.prefill_chunk, low=1)
        for kind in PLACED:
            if not isinstance(getattr(self, kind), Placement):
                raise UserError(f"{kind} must be a Placement, got {getattr(self, kind)!r}")
        for name in ("overlap", "cpu_cache_compute", "pin_weight", "sep_layer"):
            check_bool(name, getattr(self, name))


@dataclass(frozen=True)
class H2OConfig:
    """How much of the KV cache the heavy-hitter oracle keeps (arXiv 2306.14048).

    With no size given the cache is full; with only a recent one it is a window. A layer whose
    heavy ratio is 1, and the recent one too or left out, is full as well.

    Parameters
    ----------
    heavy_ratio, recent_ratio : float or sequence of float, optional
        Shares of each sequence's own prompt length, over 0 and at most 1; a sequence gives one per
        decoder layer. `recent_ratio` defaults to `heavy_ratio`.
    heavy_tokens, recent_tokens : int, optional
        Counts in place of ratios: tokens per sequence, layer and KV head. `recent_tokens` defaults
        to `heavy_tokens`, which may be 0.
    sink_tokens : int
        The first tokens of a sequence, kept beside the others.
    score : str
        How attention becomes a score: ``"sum"`` (the paper's), ``"mean"`` over the queries that
        could see the key, ``"decay"``.
    decay : float
        The factor per query of the score ``"decay"``.
    positions : str
        ``"original"``: a key keeps its position; ``"rolling"``: its rank among the cached ones.
    evict_generated : bool
        Whether generated tokens count too; if not, only the prompt is cut.
    prompt_chunk : int, optional
        Evict inside prompts too, after every so many tokens of them (counted from the prompt's
        end), so that one of any length goes through a cache of the budget and a chunk. It changes
        what is kept. None: prompts attend to all of themselves and are cut at their end.
    simulate : bool
        Mask a full cache instead of dropping from it.
    drop_positions : bool
        OPT: drop positions past the learned table. For speed measurements only.

    Raises
    ------
    UserError
        A value of a wrong type or range, a ratio and a count of the same part, or an option
        without effect.
    """

    heavy_ratio: float | Sequence[float] | None = None
    recent_ratio: float | Sequence[float] | None = None
    heavy_tokens: int | None = None
    recent_tokens: int | None = None
    sink_tokens: int = 0
    score: str = "sum"
    decay: float = 0.98
    positions: str = "original"
    evict_generated: bool = True
    prompt_chunk: int | None = None
    simulate: bool = False
    drop_positions: bool = False

    def __post_init__(self) -> None:
        check_int("sink_tokens", self.sink_tokens, low=0)
        self._check_sizes()
        check_choice("score", self.score, SCORES)
        check_number("decay", self.decay, above=0, high=1)
        check_choice("positions", self.positions, POSITIONS)
        for name in ("evict_generated", "simulate", "drop_positions"):
            check_bool(name, getattr(self, name))
        if self.prompt_chunk is not None:
            check_int("prompt_chunk", self.prompt_chunk, low=1)
            if self.is_full:
                raise UserError("prompt_chunk has no effect on the full cache: leave it out")

    def _check_sizes(self) -> None:
        # The newest token is always kept, so a window of 0 cannot be; no heavy hitters can.
        for part, fewest in (("heavy", 0), ("recent", 1)):
            ratio, count = getattr(self, f"{part}_ratio"), getattr(self, f"{part}_tokens")
            if ratio is not None:
                object.__setattr__(self, f"{part}_ratio", _ratios(f"{part}_ratio", ratio))
            if count is not None:
                check_int(f"{part}_tokens", count, low=fewest)
            if ratio is not None and count is not None:
                raise UserError(f"give {part}_ratio or {part}_tokens, not both")
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

    def _per_layer(self) -> dict[str, tuple[float, ...]]:
        """The ratios that are given per layer."""
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
        """The heavy and the recent ratio of one decoder layer; None where none sets the size."""
        heavy, recent = (
            ratio[layer] if isinstance(ratio, Sequence) else ratio
            for ratio in (self.heavy_ratio, self.recent_ratio)
        )
        return heavy, heavy if recent is None and self.recent_tokens is None else recent

    def is_full_at(self, layer: int) -> bool:
        """Whether nothing is ever evicted in one decoder layer."""
        return not self._sized or self.ratios(layer) == (1, 1)

    @property
    def is_full(self) -> bool:
        """Whether nothing is ever evicted in any layer: no size is given, or only ratios of 1."""
        layers = min(map(len, self._per_layer().values()), default=1)
        return all(self.is_full_at(layer) for layer in range(layers))

    @property
    def scored(self) -> bool:
        """Whether some layer has heavy hitters to choose, and so needs scores."""
        return not self.is_full and (self.heavy_ratio is not None or bool(self.heavy_tokens))


def _ratios(name: str, value: object) -> float | tuple[float, ...]:
    """Check one ratio, or one per decoder layer, which becomes a tuple to be hashable."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return check_number(name, value, above=0, high=1)
    if len(value) == 0:
        raise UserError(f"{name} must be a number, or one per decoder layer, got {value!r}")
    for layer, ratio in enumerate(value):
        check_number(f"{name} of layer {layer}", ratio, above=0, high=1)
    return tuple(value)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen: names and meaning of transformers' ``generate``.

    Lengths are tokens. `top_k` 0 is off. `eos_token_id` is None (the model's own), -1 (never stop
    early), or one or more token ids. `stop_strings` is a text or several that end a generation once
    it contains one. The same `seed` gives the same tokens for every batch split.
    Raises `UserError` for a value of a wrong type or range.
    """

    max_new_tokens: int = 32
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, low=1)
        check_int("min_new_tokens", self.min_new_tokens, low=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"min_new_tokens must be at most the {self.max_new_tokens} tokens to generate, "
                f"got {self.min_new_tokens}"
            )
        check_bool("do_sample", self.do_sample)
        check_number("temperature", self.temperature, above=0)
        check_int("top_k", self.top_k, low=0)
        check_number("top_p", self.top_p, low=0, high=1)
        if self.min_p is not None:
            check_number("min_p", self.min_p, low=0, high=1)
        check_number("repetition_penalty", self.repetition_penalty, above=0)
        check_int("no_repeat_ngram_size", self.no_repeat_ngram_size, low=0)
        check_int("seed", self.seed, low=0, high=2**63 - 1)
        self._check_eos()
        self._check_stop_strings()

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The given tokens that end a text; none where the model's own are to."""
        eos = self.eos_token_id
        if eos is None or eos == -1:
            return ()
        return tuple(eos) if isinstance(eos, Sequence) else (eos,)

    def _check_eos(self) -> None:
        eos = self.eos_token_id
        if eos is None:
            return
        if isinstance(eos, Sequence) and not isinstance(eos, str) and len(eos) > 0:
            for token in eos:
                check_int("each eos_token_id", token, low=0)
            object.__setattr__(self, "eos_token_id", tuple(eos))  # frozen, but kept hashable
        else:
            check_int("eos_token_id", eos, low=-1)

    def _check_stop_strings(self) -> None:
        stops = self.stop_strings
        if stops is None:
            return
        texts = (stops,) if isinstance(stops, str) else stops
        if not isinstance(texts, Sequence) or not texts or not all(
                isinstance(text, str) and text for text in texts):
            raise UserError(f"stop_strings must be a text, or several, none empty, got {stops!r}")
        for text in texts:
            check_text("each of stop_strings", text)
        object.__setattr__(self, "stop_strings", tuple(texts))  # frozen, but kept hashable
