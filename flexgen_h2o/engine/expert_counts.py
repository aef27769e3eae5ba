"""Counts of chosen experts in the user's cache, from which the next run fills its slots. No torch.

They affect speed only. A file that is missing or damaged is ignored, and so is a folder that cannot
be written.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.files.writing import open_atomic

MIN_TOKENS = 256
"""Counts of fewer tokens in all are not kept: they say little."""

MAX_TOKENS = 1 << 20
"""Counts of more tokens are halved, so that they follow what a model is used for."""

_MAX_BYTES = 16 << 20

_log = logging.getLogger(__name__)


def load_counts(path: Path, layers: list[int], per_token: int) -> ExpertChoices | None:
    """Return the counts in a file, or None; report a damaged file in one line.

    Parameters
    ----------
    layers : list of int
        Experts of each decoder layer; 0 for a layer without experts.
    per_token : int
        Experts per token.
    """
    try:
        text = path.read_text("utf-8") if path.stat().st_size <= _MAX_BYTES else ""
        counts = tuple(map(tuple, json.loads(text)))
        if [len(layer) for layer in counts] != layers:
            raise ValueError
        if any(type(count) is not int or count < 0 for layer in counts for count in layer):
            raise ValueError
    except OSError:
        return None
    except (ValueError, TypeError, RecursionError):
        _log.warning("%s is damaged and ignored; the next counts replace it", path)
        return None
    return ExpertChoices(counts, per_token)


def save_counts(path: Path, choices: ExpertChoices) -> None:
    """Add counts to those in a file."""
    layers = list(map(len, choices.counts))
    if saved := load_counts(path, layers, choices.per_token):
        choices += saved
    tokens = max(map(sum, choices.counts), default=0) // choices.per_token
    if tokens < MIN_TOKENS:
        return
    if tokens > MAX_TOKENS:
        choices = replace(choices, counts=tuple(tuple(count // 2 for count in layer)
                                                for layer in choices.counts))
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path) as file:
            json.dump(choices.counts, file)
