"""Figure of speed and quality: tokens/s of each system, and the perplexity factor of its mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plotting import GREY, Row, positive
from processes import OK

from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.figures import COLOURS, new_figure

NEEDED = ("system", "model", "prompt_len", "gen_len", "memory_gb", "batch", "status",
          "tokens_per_s")
GGUF_NEEDED = ("file", "system", "sequences", "tokens_per_second")
QUALITY_NEEDED = ("model", "mode", "factor")
"""Columns of the three files."""
SYSTEMS = {
    "deepspeed-nvme": ("DeepSpeed ZeRO-Inference, NVMe", "full"),
    "accelerate-disk": ("Accelerate, layers on disk", "full"),
    "full": ("flexgen_h2o, full cache", "full"),
    "h2o": ("flexgen_h2o, H2O 20 %", "h2o-20"),
}
"""Systems of a comparison from top to bottom: label, and mode of the quality check."""
GGUF_SYSTEMS = {"llama.cpp": ("llama.cpp", "full"), "flexgen_h2o": ("flexgen_h2o", "weights-auto")}
"""The same of the runs of a GGUF file."""

Bar = tuple[str, float, float]
"""Label, tokens per second, perplexity factor."""


def factors(rows: Sequence[Row], model: str) -> dict[str, float]:
    """Return the perplexity factor of each mode of a model. Raises `UserError`."""
    by_mode = {row["mode"]: positive(row, "factor") for row in rows if row["model"] == model}
    if not by_mode:
        raise UserError(f"--quality has no rows of {model}")
    return by_mode


def bars(rows: Iterable[Row], systems: dict[str, tuple[str, str]], quality: dict[str, float], *,
         rate: str, batch: str) -> list[Bar]:
    """Return a bar for each system that has rows: the fastest of them."""
    by_label: dict[str, tuple[float, str]] = {}
    for row in rows:
        if row["system"] in systems and row.get("status", OK) == OK:
            by_label[row["system"]] = max(by_label.get(row["system"], (0.0, "")),
                                          (positive(row, rate), row[batch]))
    missing = [mode for _, mode in systems.values() if mode not in quality]
    if missing:
        raise UserError(f"--quality has no row of {missing[0]}")
    return [(f"{label}, batch {by_label[name][1]}", by_label[name][0], quality[mode])
            for name, (label, mode) in systems.items() if name in by_label]


def draw(compared: Sequence[Row], gguf: Sequence[Row], quality: Sequence[Row], model: str):
    """Return the figure: a row of panels for `compare.py`'s rows, one for a GGUF file's."""
    by_mode, first = factors(quality, model), compared[0]
    sequences = max((row["sequences"] for row in gguf), key=int)
    panels = [
        (f"{first['model'].upper()}'s shape in {first['memory_gb']} GB of memory "
         f"({first['prompt_len']} + {first['gen_len']} tokens)",
         bars(compared, SYSTEMS, by_mode, rate="tokens_per_s", batch="batch")),
        (f"{gguf[0]['file']} (Q4_K_M) in memory",
         bars([row for row in gguf if row["sequences"] == sequences], GGUF_SYSTEMS, by_mode,
              rate="tokens_per_second", batch="sequences"))]
    figure = new_figure(10, 4.6)
    grid = figure.subplots(2, 2, width_ratios=[2, 1], squeeze=False,
                           height_ratios=[len(panel_bars) + 1 for _, panel_bars in panels])
    for (left, right), (title, panel_bars) in zip(grid, panels, strict=True):
        _panel(left, [(label, rate) for label, rate, _ in panel_bars], "{:.3g}")
        _panel(right, [("", factor) for *_, factor in panel_bars], "{:.2f}")
        right.set_xlim(0, 1.8)
        right.set_xticks([0, 1])
        left.set_title(title, loc="left", fontsize=12, fontweight="bold")
    grid[-1][0].set_xlabel("generated tokens/s")
    grid[-1][1].set_xlabel("perplexity factor")
    figure.supxlabel(f"Perplexity factor: over that of the same weights in 16 bits with the full "
                     f"cache, on {model}; lower is better.",
                     fontsize=9, color=GREY, x=0.01, ha="left")
    return figure


def _panel(axes, values: Sequence[tuple[str, float]], form: str) -> None:
    """Draw horizontal bars with their values; labels of this engine are bold."""
    names, ends = zip(*values, strict=True)
    ours = [name.startswith("flexgen_h2o") for name in names] if any(names) else [False] * len(ends)
    colours = [COLOURS["blue"] if is_ours else COLOURS["orange"] for is_ours in ours]
    bars_drawn = axes.barh(range(len(ends)), ends, height=0.66,
                           color=colours if any(names) else "0.6")
    axes.bar_label(bars_drawn, [form.format(end) for end in ends], padding=4, fontsize=11)
    axes.set_yticks(range(len(ends)), names)
    for label, is_ours in zip(axes.get_yticklabels(), ours, strict=True):
        label.set_fontweight("bold" if is_ours else "normal")
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.15)
    axes.invert_yaxis()
