"""The summary that the analyze task prints: a line or a small table for each part. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from attention_study.columns import FIT

_HALF = 50  # percent of the text, one of `columns.SEEN`


def summary(found: dict[str, Sequence[dict]]) -> str:
    """Text of the parts that there are; `found` has the rows of each by its name."""
    lines = []
    for name, tell in _TELL.items():
        if name in found:
            lines += tell(found[name])
    return "\n".join(lines)


def mean_by(rows: Iterable[dict], key: str, value: str) -> dict:
    """The mean of one column for each value of another, in the order in which they come.

    Rows in which it is None are left out.
    """
    groups: dict = {}
    for row in rows:
        if row[value] is not None:
            groups.setdefault(row[key], []).append(row[value])
    return {name: fmean(values) for name, values in groups.items()}


def _sparsity(rows: Sequence[dict]) -> list[str]:
    return [_by_layer("entries below 1 % of their row's maximum", rows, "sparsity", "{:.1%}")]


def _scores(rows: Sequence[dict]) -> list[str]:
    return [_by_layer(f"power law of scores, ranks {FIT[0]:.0%} to {FIT[1]:.0%}: {name}", rows,
                      column, "{:.2f}") for name, column in (("slope", "slope"), ("R2", "r2"))]


def _local(rows: Sequence[dict]) -> list[str]:
    half = [row for row in rows if row["seen_percent"] == _HALF]
    chance = mean_by(half, "budget_percent", "chance")
    return [f"heavy hitters known from {_HALF} % of the text: " + ", ".join(
        f"{overlap:.1%} of the top {percent:g} % (chance {chance[percent]:.1%})"
        for percent, overlap in mean_by(half, "budget_percent", "overlap").items())]


def _frequency(rows: Sequence[dict]) -> list[str]:
    return [_by_layer(f"score and token frequency: {name}", rows, name.lower(), "{:+.2f}")
            for name in ("Pearson", "Spearman")]


def _misses(rows: Sequence[dict]) -> list[str]:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    by_policy = [mean_by((row for row in rows if row["policy"] == policy), "budget_percent",
                         "miss_rate") for policy in policies]
    return table(("attention lost at", *policies),
                 ((f"{percent:g} %", *(f"{rates[percent]:.1%}" for rates in by_policy))
                  for percent in by_policy[0]))


def _evicted(rows: Sequence[dict]) -> list[str]:
    return table(
        ("keys not seen", "tokens", "perplexity", "x full", "nats over full (95 %)"),
        ((row["evicted"] + f" {row['evicted_percent']:g} %" * (row["evicted"] != "none"),
          f"{row['evicted_tokens_mean']:.1f}", f"{row['perplexity']:.3f}",
          f"{row['perplexity_over_full']:.3f}", f"{row['delta_nats']:+.4f} "
          f"[{row['delta_nats_low']:+.4f}, {row['delta_nats_high']:+.4f}]") for row in rows))


_TELL: dict[str, Callable[[Sequence[dict]], list[str]]] = {
    "sparsity": _sparsity, "scores": _scores, "local": _local, "frequency": _frequency,
    "misses": _misses, "evicted": _evicted}


def _by_layer(what: str, rows: Sequence[dict], column: str, style: str) -> str:
    """The mean over layers, and the layers that have least and most."""
    layers = mean_by(rows, "layer", column)
    if not layers:
        return f"{what}: not known"
    low, high = (pick(layers, key=layers.get) for pick in (min, max))
    mean, least, most = (style.format(value)
                         for value in (fmean(layers.values()), layers[low], layers[high]))
    return f"{what}: {mean} (layer {low}: {least}, layer {high}: {most})"


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Lines with aligned columns, the first to the left and the others to the right."""
    lines = [head, *body]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines]
