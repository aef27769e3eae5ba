"""Columns, summary and plots of the analyze study. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from flexgen_h2o.metrics.figures import LINES, log_scale, new_figure, save
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


_HALF = 50  # percent of the text, one of `columns.SEEN`


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


# Line styles of the policies, then more colors of Okabe and Ito for kinds without a policy.
_POLICIES = {**LINES, "best": LINES["full"]}
_KINDS = {"heavy": LINES["h2o"], "random": LINES["window"], "lowest": LINES["sink-window"],
          "heavy but sinks": {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1)), "marker": "v"}}
_LOOKS = (*(LINES[name] for name in ("h2o", "window", "sink-window")),
          {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
          {"color": "#E69F00", "linestyle": (0, (3, 1)), "marker": "P"})
_USUAL = 20  # percent; the budget nearest to it is drawn by layer


def draw(name: str, rows: Sequence[dict], path: str) -> None:
    """Draw the rows of one part to a file, which is written atomically.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    rows : sequence of dict
        Rows by column name; at least one.
    path : str
        Output file; its suffix is the format.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    figure = new_figure(11, 4.8)
    title = {"sparsity": _draw_sparsity, "scores": _draw_scores, "local": _draw_local,
             "frequency": _draw_frequency, "misses": _draw_misses, "evicted": _draw_evicted
             }[name](figure, rows)
    for axes in figure.axes:
        axes.grid(color="0.9", which="both")
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=9)
    first = rows[0]
    figure.suptitle(f"{title}\n{first['model']}, {first['dtype']}, texts: {first['articles']}, of "
                    f"{first['tokens_mean']:.0f} tokens", fontsize=10)
    save(figure, path)


def _draw_line(axes, points: dict, label: str, look: dict, *, scale: float = 1.0) -> None:
    axes.plot(list(points), [scale * value for value in points.values()], label=label,
              markersize=4, linewidth=1.6, **look)


def _draw_layers(axes, rows: Sequence[dict]) -> None:
    """Draw a horizontal axis of layers."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="layer", xlim=(-0.5, max(row["layer"] for row in rows) + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_sparsity(figure, rows: Sequence[dict]) -> str:
    axes = figure.subplots()
    layers = mean_by(rows, "layer", "sparsity")
    heads = [[row["sparsity"] * 100 for row in rows if row["layer"] == layer] for layer in layers]
    axes.fill_between(list(layers), [min(head) for head in heads], [max(head) for head in heads],
                      color=LINES["h2o"]["color"], alpha=0.2, label="lowest to highest head")
    _draw_line(axes, layers, "mean over heads", LINES["h2o"], scale=100)
    _draw_layers(axes, rows)
    axes.set(ylabel="entries below 1 % of their row's maximum, %", ylim=(0, 101))
    return "Attention sparsity, of the entries that a causal row can see"


def _draw_scores(figure, rows: Sequence[dict]) -> str:
    from matplotlib.ticker import FuncFormatter

    curves, slopes, fits = figure.subplots(1, 3)
    layers = sorted({row["layer"] for row in rows})
    shown = sorted({layers[round(part * (len(layers) - 1) / 4)] for part in range(5)})
    for layer, look in zip(shown, _LOOKS, strict=False):
        selected = (row for row in rows if row["layer"] == layer and row["score"] > 0)
        _draw_line(curves, {row["relative_rank"] * 100: row["score"] for row in selected},
              f"layer {layer}", look)
    curves.set(xscale="log", yscale="log", xlabel="rank, % of the tokens (log scale)",
               ylabel="accumulated score, in means over tokens (log scale)")
    for axis in (curves.xaxis, curves.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axes, column, label in ((slopes, "slope", "slope in log-log"), (fits, "r2", "R2 of it")):
        _draw_line(axes, mean_by(rows, "layer", column), "", LINES["h2o"])
        _draw_layers(axes, rows)
        axes.set(ylabel=label)
    fits.set(ylim=(None, 1.01))
    return ("Accumulated attention by rank, and its power law over ranks of "
            f"{FIT[0]:.0%} to {FIT[1]:.0%}")


def _draw_local(figure, rows: Sequence[dict]) -> str:
    left, right = figure.subplots(1, 2)
    percents = sorted({row["budget_percent"] for row in rows})
    for place, percent in enumerate(percents):
        look = _LOOKS[place % len(_LOOKS)]
        selected = [row for row in rows if row["budget_percent"] == percent]
        _draw_line(left, mean_by(selected, "seen_percent", "overlap"), f"top {percent:g} %", look,
                   scale=100)
        left.axhline(percent, color=look["color"], linewidth=0.8, linestyle=":")
        half = [row for row in selected if row["seen_percent"] == 50]
        _draw_line(right, mean_by(half, "layer", "overlap"), f"top {percent:g} %", look, scale=100)
    left.set(xlabel="seen of the text, %", title="Mean over layers; dotted: by chance")
    right.set(title="After half of the text")
    _draw_layers(right, rows)
    for axes in (left, right):
        axes.set(ylabel="heavy hitters that are so in the end, %", ylim=(0, 101))
    return "Heavy hitters by local statistics against those of the whole text"


def _draw_frequency(figure, rows: Sequence[dict]) -> str:
    axes = figure.subplots()
    for name, look in zip(("pearson", "spearman"), _LOOKS, strict=False):
        _draw_line(axes, mean_by(rows, "layer", name), name.capitalize(), look)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(ylabel="correlation, mean over texts", ylim=(-1.02, 1.02))
    _draw_layers(axes, rows)
    return "Mean accumulated score of a token against its count in the text"


def _draw_misses(figure, rows: Sequence[dict]) -> str:
    left, right = figure.subplots(1, 2)
    usual = min({row["budget_percent"] for row in rows}, key=lambda at: (abs(at - _USUAL), at))
    for policy in dict.fromkeys(row["policy"] for row in rows):
        selected = [row for row in rows if row["policy"] == policy]
        at_usual = [row for row in selected if row["budget_percent"] == usual]
        for axes, part, key in ((left, selected, "budget_percent"), (right, at_usual, "layer")):
            label = "best possible" if policy == "best" else policy
            _draw_line(axes, mean_by(part, key, "miss_rate"), label, _POLICIES[policy], scale=100)
    left.set(xlabel="KV cache budget, % of the first half", xlim=(0, None),
             title="Mean over layers")
    right.set(title=f"At {usual:g} %")
    _draw_layers(right, rows)
    for axes in (left, right):
        axes.set(ylabel="attention on tokens that are not cached, %", ylim=(0, None))
    return "Attention lost in the second half: lower is better"


def _draw_evicted(figure, rows: Sequence[dict]) -> str:
    axes = figure.subplots()
    (full,) = (row["perplexity"] for row in rows if row["evicted"] == "none")
    for kind, look in _KINDS.items():
        selected = [row for row in rows if row["evicted"] == kind]
        line = {row["evicted_percent"]: row["perplexity"] for row in selected}
        _draw_line(axes, line, kind, look)
    axes.axhline(full, color="black", linewidth=1, linestyle=":", label="none")
    axes.set(xlabel="keys of the first half that are not seen, % (in each layer and KV head)",
             ylabel="perplexity of the second half (log scale)", xlim=(0, None))
    log_scale(axes, [row["perplexity"] for row in rows])
    return "Perplexity without the heavy hitters, and without as many other keys"
