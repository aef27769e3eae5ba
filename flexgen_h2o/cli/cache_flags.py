"""Checks of the cache's flags together, and the `H2OConfig` that they describe. No torch.

The budget is given as ratios of the prompt or as counts of tokens; `--eviction` says which tokens
fill it. A window has as many tokens as heavy hitters and recent tokens together.
"""

from __future__ import annotations

from typing import Any

from flexgen_h2o.cli.flags import RunFlags
from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.h2o import SINK_WINDOW_SINKS, H2OConfig
from flexgen_h2o.errors import UserError

_WINDOWS = ("window", "sink-window")
_RATIOS = ("hh_ratio", "recent_ratio")
_COUNTS = ("num_heavy_hitter_tokens", "num_window_length")


def h2o_config(flags: RunFlags) -> H2OConfig | None:
    """Return the H2O configuration of checked flags; None for the full cache.

    Raises `UserError` for flags that contradict each other or have no effect.
    """
    for name, missing, needed in (
            ("score_decay", flags.score != "decay", "--score decay"),
            ("index_bits", not flags.recall, "--recall"),
            ("selective_fetch", not flags.recall, "--recall"),
            ("hot_set", not flags.selective_fetch, "--selective-fetch")):
        if missing and getattr(flags, name) != getattr(RunFlags, name):
            raise UserError(f"{flag_name(name)} has no effect: add {needed}")
    size_flags = _sized_by(flags)
    if not size_flags:
        _check_full(flags)
        return H2OConfig(drop_positions=True) if flags.hh_long_seq else None
    _check_sized(flags, size_flags)
    sizes = _counts(flags) if set(size_flags) & set(_COUNTS) else _ratios(flags, size_flags)
    return H2OConfig(
        **sizes,
        budget_of=flags.budget_of,
        sink_tokens=_sinks(flags),
        score=flags.score,
        decay=flags.score_decay,
        positions="rolling" if flags.enable_position_rolling else "original",
        evict_generated=flags.hh_all,
        prompt_chunk=flags.prefill_chunk if flags.evict_while_prefilling else None,
        drop_positions=flags.hh_long_seq,
        recall=flags.recall,
        index_bits=flags.index_bits,
    )


def _sized_by(flags: RunFlags) -> list[str]:
    """Return the names of the given flags that set the budget; none for the full cache."""
    names = [name for name in ("recent_ratio", *_COUNTS) if getattr(flags, name) is not None]
    ratios = flags.hh_ratio if isinstance(flags.hh_ratio, tuple) else (flags.hh_ratio,)
    return names if all(ratio == 1 for ratio in ratios) else ["hh_ratio", *names]


def _check_sized(flags: RunFlags, size_flags: list[str]) -> None:
    """Refuse flags that contradict the given flags of the budget."""
    ratios, counts = ([flag_name(name) for name in names if name in size_flags]
                      for names in (_RATIOS, _COUNTS))
    if flags.eviction == "full":
        raise UserError(f"--eviction full keeps all: leave {(ratios + counts)[0]} out")
    if flags.attn_sparsity != 1:
        raise UserError("--attn-sparsity selects among all earlier tokens, so nothing may be "
                        f"evicted: leave it or {(ratios + counts)[0]} out")
    if flags.recall and (idle := _eviction_flags(flags)):
        raise UserError("--recall evicts nothing and selects tokens per query: leave "
                        f"{idle[0]} out")
    if ratios and counts:
        raise UserError(f"give {ratios[0]} or {counts[0]}, not both")
    if flags.eviction == "h2o" and size_flags == ["recent_ratio"]:
        raise UserError("--recent-ratio sets only recent tokens: give --hh-ratio below 1 too, or "
                        "--eviction window")
    if flags.eviction == "window" and flags.sink_tokens:
        raise UserError("--eviction window has no sinks: give --eviction sink-window")
    if flags.eviction in _WINDOWS and len(counts) == 2:
        raise UserError("--num-heavy-hitter-tokens has no effect with "
                        f"--eviction {flags.eviction}: leave it out")
    if counts and flags.budget_of != "prompt":
        raise UserError(f"--budget-of {flags.budget_of} has no effect on {counts[0]}, which counts "
                        "tokens: leave one of them out")
    if flags.evict_while_prefilling and flags.prefill_chunk is None:
        raise UserError("--evict-while-prefilling evicts after each chunk of a prompt: say how "
                        "many tokens one has, such as --prefill-chunk 256")
    scored = flags.eviction == "h2o" and flags.num_heavy_hitter_tokens != 0
    if flags.score != "sum" and not scored:
        raise UserError("--score has no effect without heavy hitters: leave it out")


def _eviction_flags(flags: RunFlags) -> list[str]:
    """Return the given flags that only eviction uses, without the budget flags."""
    given = {
        f"--eviction {flags.eviction}": flags.eviction in _WINDOWS,
        "--score": flags.score != "sum",
        "--sink-tokens": flags.sink_tokens,
        "--enable-position-rolling": flags.enable_position_rolling,
        "--hh-all false": not flags.hh_all,
        "--evict-while-prefilling": flags.evict_while_prefilling,
    }
    return [name for name, is_given in given.items() if is_given]


def _check_full(flags: RunFlags) -> None:
    """Refuse flags of eviction with a full cache."""
    hint = ("leave it out" if flags.eviction == "full"
            else "give --hh-ratio or --num-window-length")
    idle = _eviction_flags(flags) + ["--recall"] * flags.recall
    if flags.budget_of != "prompt":
        idle.append(f"--budget-of {flags.budget_of}")
    if idle:
        raise UserError(f"{idle[0]} has no effect on the full cache: {hint}")


def _sinks(flags: RunFlags) -> int:
    if flags.sink_tokens is None:
        return SINK_WINDOW_SINKS if flags.eviction == "sink-window" else 0
    return flags.sink_tokens


def _ratios(flags: RunFlags, size_flags: list[str]) -> dict[str, Any]:
    """Return the budget as ratios: keywords of `H2OConfig`."""
    recent = flags.hh_ratio if flags.recent_ratio is None else flags.recent_ratio
    pairs = _by_layer(flags.hh_ratio, recent)
    if flags.eviction == "h2o":
        return {"heavy_ratio": flags.hh_ratio, "recent_ratio": flags.recent_ratio}
    if "hh_ratio" not in size_flags:
        return {"recent_ratio": recent}
    # Rounded, for 0.7 + 0.1 is a little less than 0.8, and a token less of ten.
    sums = tuple(min(1.0, round(a + b, 9)) for a, b in pairs)
    return {"recent_ratio": sums if len(sums) > 1 else sums[0]}


def _by_layer(*ratios: float | tuple[float, ...]) -> list[tuple[float, ...]]:
    """Return the ratios of each layer; a single tuple if none is given by layer."""
    lengths = {len(ratio) for ratio in ratios if isinstance(ratio, tuple)}
    if len(lengths) > 1:
        raise UserError("--hh-ratio and --recent-ratio list different counts of numbers: give one "
                        "for each decoder layer")
    count = lengths.pop() if lengths else 1
    columns = [ratio if isinstance(ratio, tuple) else (ratio,) * count for ratio in ratios]
    return list(zip(*columns, strict=True))


def _counts(flags: RunFlags) -> dict[str, Any]:
    """Return the budget in tokens: keywords of `H2OConfig`."""
    total, heavy, sinks = flags.num_window_length, flags.num_heavy_hitter_tokens, _sinks(flags)
    window = flags.eviction in _WINDOWS
    if total is None:
        heavy = heavy or 0  # one of the two is given
        given = f"--num-heavy-hitter-tokens {heavy}"
        total = 2 * heavy + (0 if window else sinks)
    else:
        given = f"--num-window-length {total}"
        heavy = total // 2 if heavy is None else heavy
    heavy = 0 if window else heavy
    recent = total - heavy - sinks
    if recent < 1:
        raise UserError(f"{given} leaves no recent tokens beside {heavy} heavy hitters and {sinks} "
                        "sinks: raise it")
    return {"heavy_tokens": heavy, "recent_tokens": recent}
