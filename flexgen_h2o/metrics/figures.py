"""Plots and intervals: line styles by policy, axes, atomic files, bootstrap. No torch.

matplotlib is an extra and is imported when a plot is drawn. Lines differ in dash and marker as well
as in color, so that a gray print is readable.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import atomic_path

_FORMATS = (".png", ".svg", ".pdf")
COLOURS = {"blue": "#0072B2", "vermillion": "#D55E00", "green": "#009E73", "orange": "#E69F00",
           "purple": "#CC79A7", "sky": "#56B4E9", "yellow": "#F0E442", "black": "#000000"}
"""The palette of Okabe and Ito, which color-blind readers can tell apart."""
LINES: dict[str, dict[str, Any]] = {
    "h2o": {"color": COLOURS["blue"], "linestyle": "-", "marker": "o"},
    "h2o-mean": {"color": COLOURS["purple"], "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
    "h2o-decay": {"color": COLOURS["orange"], "linestyle": (0, (3, 1)), "marker": "P"},
    "recall": {"color": COLOURS["sky"], "linestyle": "-", "marker": "X"},
    "sparse-values": {"color": COLOURS["orange"], "linestyle": (0, (1, 1)), "marker": "d"},
    "window": {"color": COLOURS["vermillion"], "linestyle": "--", "marker": "s"},
    "sink-window": {"color": COLOURS["green"], "linestyle": "-.", "marker": "^"},
    "full": {"color": COLOURS["black"], "linestyle": ":", "marker": "D"},
}
"""matplotlib's line options of each policy."""


def check_plot(flag: str, path: str) -> None:
    """Check that a file name ends in a supported format and that matplotlib is installed.

    Raises `UserError` otherwise.
    """
    if Path(path).suffix.lower() not in _FORMATS:
        raise UserError(f"{flag} must name a {', '.join(_FORMATS)} file, got {path!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"{flag} needs matplotlib: pip install 'flexgen_h2o[plot]'")


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib Figure of `width` x `height` inches."""
    from matplotlib.figure import Figure  # not pyplot, which is stateful and needs a display

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: str) -> None:
    """Write a figure to a file, atomically. Raises OSError if it cannot be written."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=Path(path).suffix[1:].lower(), dpi=150)


_RESAMPLES = 10_000


def bootstrap_interval(differences: Sequence[float], tokens: Sequence[int], *, seed: int = 0
                       ) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean difference per token, resampling articles.

    `differences`: sum over the tokens of each article, in nats. `tokens`: tokens of each article.
    """
    sums, counts = np.asarray(differences, float), np.asarray(tokens, float)
    picks = np.random.default_rng(seed).integers(len(sums), size=(_RESAMPLES, len(sums)))
    with np.errstate(invalid="ignore"):  # infinite differences give nan
        low, high = np.percentile(sums[picks].sum(1) / counts[picks].sum(1), (2.5, 97.5))
    return float(low), float(high)
