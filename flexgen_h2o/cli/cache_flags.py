"""The flags of the cache together: what they contradict, and the `H2OConfig` they make. No torch.

How much stays cached is said by ratios of the prompt or by counts of tokens, and `--eviction`
says of which tokens. A window has as many as heavy hitters and recent ones together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.h2o import SINK_WINDOW_SINKS, H2OConfig
from flexgen_h2o.errors import UserError

_WINDOWS = ("window", "sink-window")
_RATIOS = ("hh_ratio", "recent_ratio")
_COUNTS = ("num_heavy_hitter_tokens", "num_window_length")


@dataclass(frozen=True, kw_only=True)
class CacheFlags:
    """Values of the flags of `RunConfig` that say what stays cached, each of them checked before.

    A ratio is a fraction of the prompt, or one for each decoder layer; counts are tokens.
    `prefill_chunk` are tokens of a prompt that are read together. `attn_sparsity` says what is read
    of a cache that keeps all. Raises `UserError` for flags that
    contradict each other and for one that would do nothing; `called` says what it calls a flag.
    """

    eviction: str
    hh_ratio: float | tuple[float, ...]
    recent_ratio: float | tuple[float, ...] | None
    num_heavy_hitter_tokens: int | None
    num_window_length: int | None
    hh_all: bool
    evict_while_prefilling: bool
    prefill_chunk: int | None
    score: str
    score_decay: float
    sink_tokens: int | None
    enable_position_rolling: bool
    hh_long_seq: bool
    attn_sparsity: float
    called: Callable[[str], str] = flag_name

    def __post_init__(self) -> None:
        if self.score != "decay" and self.score_decay != H2OConfig.decay:
            raise UserError(f"{self.called('score_decay')} has no effect: add "
                            f"{self.called('score')} decay")
        if self._sized_by():
            self._check_sized()
        else:
            self._check_full()

    def _sized_by(self) -> list[str]:
        """Names of the given flags that say how much stays cached; none for the full cache."""
        names = [name for name in ("recent_ratio", *_COUNTS) if getattr(self, name) is not None]
        ratios = self.hh_ratio if isinstance(self.hh_ratio, tuple) else (self.hh_ratio,)
        return names if all(ratio == 1 for ratio in ratios) else ["hh_ratio", *names]

    def _check_sized(self) -> None:
        given, flag = self._sized_by(), self.called
        ratios, counts = ([flag(name) for name in names if name in given]
                          for names in (_RATIOS, _COUNTS))
        if self.eviction == "full":
            raise UserError(f"{flag('eviction')} full keeps all: leave {(ratios + counts)[0]} "
                            "out")
        if self.attn_sparsity != 1:
            raise UserError(f"{flag('attn_sparsity')} chooses among all that came before, and so "
                            f"nothing may be evicted: leave it or {(ratios + counts)[0]} out")
        if ratios and counts:
            raise UserError(f"give {ratios[0]} or {counts[0]}, not both")
        if self.eviction == "h2o" and given == ["recent_ratio"]:
            raise UserError(f"{flag('recent_ratio')} says nothing of heavy hitters: give "
                            f"{flag('hh_ratio')} below 1 too, or {flag('eviction')} window")
        if self.eviction == "window" and self.sink_tokens:
            raise UserError(f"{flag('eviction')} window has no sinks: give {flag('eviction')} "
                            "sink-window")
        if self.eviction in _WINDOWS and len(counts) == 2:
            raise UserError(f"{flag('num_heavy_hitter_tokens')} has no effect with "
                            f"{flag('eviction')} {self.eviction}: leave it out")
        if self.evict_while_prefilling and self.prefill_chunk is None:
            raise UserError(f"{flag('evict_while_prefilling')} evicts after each chunk of a "
                            "prompt: say how many tokens one has, such as "
                            f"{flag('prefill_chunk')} 256")
        scored = self.eviction == "h2o" and self.num_heavy_hitter_tokens != 0
        if self.score != "sum" and not scored:
            raise UserError(f"{flag('score')} has no effect without heavy hitters: leave it out")

    def _check_full(self) -> None:
        """Refuse what would do nothing, as nothing is evicted."""
        flag = self.called
        idle = {
            f"{flag('eviction')} {self.eviction}": self.eviction in _WINDOWS,
            flag("score"): self.score != "sum",
            flag("sink_tokens"): self.sink_tokens,
            flag("enable_position_rolling"): self.enable_position_rolling,
            f"{flag('hh_all')} false": not self.hh_all,
            flag("evict_while_prefilling"): self.evict_while_prefilling,
        }
        hint = ("leave it out" if self.eviction == "full"
                else f"give {flag('hh_ratio')} or {flag('num_window_length')}")
        for what, given in idle.items():
            if given:
                raise UserError(f"{what} has no effect on the full cache: {hint}")

    def h2o(self) -> H2OConfig | None:
        """The H2O configuration; None for the full cache."""
        given = self._sized_by()
        if not given:
            return H2OConfig(drop_positions=True) if self.hh_long_seq else None
        sizes = self._counts() if set(given) & set(_COUNTS) else self._ratios()
        return H2OConfig(
            **sizes,
            sink_tokens=self._sinks,
            score=self.score,
            decay=self.score_decay,
            positions="rolling" if self.enable_position_rolling else "original",
            evict_generated=self.hh_all,
            prompt_chunk=self.prefill_chunk if self.evict_while_prefilling else None,
            drop_positions=self.hh_long_seq,
        )

    @property
    def _sinks(self) -> int:
        if self.sink_tokens is None:
            return SINK_WINDOW_SINKS if self.eviction == "sink-window" else 0
        return self.sink_tokens

    def _ratios(self) -> dict[str, Any]:
        """The sizes of `H2OConfig` by ratios."""
        recent = self.hh_ratio if self.recent_ratio is None else self.recent_ratio
        pairs = self._by_layer(self.hh_ratio, recent)
        if self.eviction == "h2o":
            return {"heavy_ratio": self.hh_ratio, "recent_ratio": self.recent_ratio}
        if "hh_ratio" not in self._sized_by():
            return {"recent_ratio": recent}
        # Rounded, for 0.7 + 0.1 is a little less than 0.8, and a token less of ten.
        sums = tuple(min(1.0, round(a + b, 9)) for a, b in pairs)
        return {"recent_ratio": sums if len(sums) > 1 else sums[0]}

    def _by_layer(self, *ratios: float | tuple[float, ...]) -> list[tuple[float, ...]]:
        """The two ratios of each layer; of the one there is, if neither is given by layer."""
        lengths = {len(ratio) for ratio in ratios if isinstance(ratio, tuple)}
        if len(lengths) > 1:
            raise UserError(f"{self.called('hh_ratio')} and {self.called('recent_ratio')} list "
                            "different counts of numbers: give one for each decoder layer")
        count = lengths.pop() if lengths else 1
        columns = [ratio if isinstance(ratio, tuple) else (ratio,) * count for ratio in ratios]
        return list(zip(*columns, strict=True))

    def _counts(self) -> dict[str, Any]:
        """The sizes of `H2OConfig` by counts, in tokens."""
        total, heavy, sinks = self.num_window_length, self.num_heavy_hitter_tokens, self._sinks
        window = self.eviction in _WINDOWS
        if total is None:
            heavy = heavy or 0  # one of the two is given
            flag, given = "num_heavy_hitter_tokens", heavy
            total = 2 * heavy + (0 if window else sinks)
        else:
            flag, given = "num_window_length", total
            heavy = total // 2 if heavy is None else heavy
        heavy = 0 if window else heavy
        recent = total - heavy - sinks
        if recent < 1:
            raise UserError(f"{self.called(flag)} {given} leaves no recent tokens beside {heavy} "
                            f"heavy hitters and {sinks} sinks: raise it")
        return {"heavy_tokens": heavy, "recent_tokens": recent}
