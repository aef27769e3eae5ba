"""The look of all figures: fonts for a slide, Okabe and Ito's colours, the caption below."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flexgen_h2o.metrics.figures import COLOURS

LINES = (
    {"color": COLOURS["blue"], "linestyle": "-", "marker": "o"},
    {"color": COLOURS["vermillion"], "linestyle": "--", "marker": "s"},
    {"color": COLOURS["green"], "linestyle": "-.", "marker": "^"},
    {"color": COLOURS["purple"], "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": COLOURS["orange"], "linestyle": (0, (3, 1)), "marker": "P"},
    {"color": COLOURS["black"], "linestyle": ":", "marker": "D"},
    {"color": COLOURS["sky"], "linestyle": (0, (1, 1)), "marker": "X"},
    {"color": "0.5", "linestyle": (0, (8, 2)), "marker": "*"},
)
"""Colours of one line after the other; they differ in dash and marker too."""
GREY = "0.35"
_STYLE = {"font.size": 13, "axes.titlesize": 14, "axes.labelsize": 13, "legend.fontsize": 12,
          "xtick.labelsize": 12, "ytick.labelsize": 12, "figure.titlesize": 17,
          "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
          "hatch.linewidth": 0.8, "lines.linewidth": 2.0, "lines.markersize": 8,
          "svg.hashsalt": "flexgen_h2o"}  # the same rows make the same SVG
_LETTERS_PER_INCH = 13.0  # of the caption


@contextmanager
def slide_style() -> Iterator[None]:
    """Draw with these fonts and lines during a ``with`` statement."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def entitle(figure, title: str, notes: Sequence[str], *, where: str) -> None:
    """A title above a figure; below it, a line for each note and one of where it was measured."""
    figure.suptitle(title, fontweight="bold", x=0.01, ha="left")
    width = int(figure.get_figwidth() * _LETTERS_PER_INCH)
    lines = [line for text in (*notes, f"Measured on {where}.")
             for line in textwrap.wrap(text, width)]
    figure.supxlabel("\n".join(lines), fontsize=10, color=GREY, x=0.01, ha="left")


def beside(figure, handles: Sequence, labels: Sequence[str]) -> None:
    """A legend right of all panels, with lines long enough to see their dashes."""
    figure.legend(handles, labels, loc="outside right center", frameon=False, handlelength=3)


def log_numbers(axis, values: Sequence[float], *, base: int = 10) -> None:
    """Plain numbers on a logarithmic axis: each power, or 1, 2 and 5 of each where there are few.

    Parameters
    ----------
    axis : matplotlib Axis
        Its scale is logarithmic.
    values : sequence of float
        That are to be seen, above 0.
    base : int
        10 or 2.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    few = base == 10 and max(values) < 50 * min(values)
    axis.set_major_locator(LogLocator(base=base, subs=(1, 2, 5) if few else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
