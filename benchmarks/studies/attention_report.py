"""Columns, summary and plot of the analyze study. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from flexgen_h2o.metrics.figures import LINES, new_figure, save
from flexgen_h2o.metrics.provenance import ORIGIN

RUN = (*ORIGIN, "device", "model", "dtype", "articles", "tokens_mean")
"""First columns of every row."""

PARTS: dict[str, tuple[str, ...]] = {
    "sparsity": ("layer", "head", "sparsity"),
    "scores": ("layer", "relative_rank", "score", "slope", "r2"),
    "local": ("layer", "seen_percent", "budget_percent", "overlap", "chance"),
    "frequency": ("layer", "pearson", "spearman", "articles_with_correlation"),
    "misses": ("layer", "policy", "budget_percent", "cached_tokens_mean", "miss_rate"),
}
"""Figures of each layer: the columns of its file. Layers and heads count from 0."""

EVICTED = ("evicted", "evicted_percent", "evicted_tokens_mean", "scored_tokens", "perplexity",
           "perplexity_over_full", "delta_nats", "delta_nats_low", "delta_nats_high")
"""Columns of the perplexities without some keys; the row ``none`` has all keys."""

NAMES = (*PARTS, "evicted")

RANKS = tuple(2 ** (-8 + step / 4) for step in range(33))
"""Relative ranks, from 1/256 to 1, at which accumulated scores are given."""

FIT = (0.01, 0.5)
"""Range of relative ranks to which the power law is fitted. Beyond it are the newest keys, whose
scores are low because few queries have seen them."""

SEEN = (10, 20, 30, 40, 50, 60, 70, 80, 90)
"""Percent of a text after which local statistics are taken."""

_HALF = 50  # percent of the text, one of `SEEN`


def summary(tables: dict[str, Sequence[dict]]) -> str:
    """Return the summary of the measured parts as text; `tables` has the rows of each part."""
    lines = []
    for name, tell in _TELL.items():
        if name in tables:
            lines += tell(tables[name])
    return "\n".join(lines)


def mean_by(rows: Iterable[dict], key: str, value: str) -> dict:
    """Return the mean of one column for each value of another, in the order of the values.

    Rows with None in the column are left out.
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


def _by_layer(title: str, rows: Sequence[dict], column: str, style: str) -> str:
    """Return the mean over layers, and the layers with the minimum and the maximum, as text."""
    layers = mean_by(rows, "layer", column)
    if not layers:
        return f"{title}: not known"
    low, high = (pick(layers, key=layers.get) for pick in (min, max))
    mean, lowest, highest = (style.format(value)
                             for value in (fmean(layers.values()), layers[low], layers[high]))
    return f"{title}: {mean} (layer {low}: {lowest}, layer {high}: {highest})"


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns: the first to the left, the others to the right."""
    lines = [head, *body]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines]


_POLICIES = {**LINES, "best": LINES["full"]}
_USUAL = 20  # percent; the budget nearest to it is drawn by layer


def draw_misses(rows: Sequence[dict], path: str) -> None:
    """Draw the lost attention by budget and by layer to a file, which is written atomically.

    Raises OSError if the file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(11, 4.8)
    left, right = figure.subplots(1, 2)
    usual = min({row["budget_percent"] for row in rows}, key=lambda at: (abs(at - _USUAL), at))
    for policy in dict.fromkeys(row["policy"] for row in rows):
        selected = [row for row in rows if row["policy"] == policy]
        at_usual = [row for row in selected if row["budget_percent"] == usual]
        for axes, part, key in ((left, selected, "budget_percent"), (right, at_usual, "layer")):
            points = mean_by(part, key, "miss_rate")
            axes.plot(list(points), [100 * rate for rate in points.values()], markersize=4,
                      label="best possible" if policy == "best" else policy, linewidth=1.6,
                      **_POLICIES[policy])
    left.set(xlabel="KV cache budget, % of the first half", xlim=(0, None),
             title="Mean over layers")
    right.set(title=f"At {usual:g} %", xlabel="layer",
              xlim=(-0.5, max(row["layer"] for row in rows) + 0.5))
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, right):
        axes.set(ylabel="attention on tokens that are not cached, %", ylim=(0, None))
        axes.grid(color="0.9", which="both")
        axes.set_axisbelow(True)
        axes.legend(fontsize=9)
    first = rows[0]
    figure.suptitle(f"Attention lost in the second half: lower is better\n{first['model']}, "
                    f"{first['dtype']}, texts: {first['articles']}, of "
                    f"{first['tokens_mean']:.0f} tokens", fontsize=10)
    save(figure, path)
