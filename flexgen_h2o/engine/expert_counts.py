"""Files with the number of tokens that chose each expert. No torch.

- In the user's cache, from which the next run fills its slots. It affects speed only. A file that
  is missing or damaged is ignored, and so is a folder that cannot be written.
- The user's file of ``--count-experts``, which ``--expert-counts`` reads.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.config.validation import Count, StrictStruct, Text, validate
from flexgen_h2o.files.readers import parse_json, read_text
from flexgen_h2o.files.writing import open_atomic
from flexgen_h2o.metrics.run_stats import RunStats

MIN_TOKENS = 256
"""Counts of fewer tokens in all are not kept: they say little."""

MAX_TOKENS = 1 << 20
"""Counts of more tokens are halved, so that they follow changes of the texts."""

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


_Total = Annotated[int, Meta(ge=0, le=1 << 53)]


class _Counts(StrictStruct, frozen=True):
    model: Text
    per_token: Count
    texts: _Total
    text_tokens: _Total
    text_experts: _Total
    counts: list[list[_Total]]

    def __post_init__(self) -> None:
        layers = [layer for layer in self.counts if layer]
        if not any(map(any, layers)):
            raise ValueError("counts: no token has selected an expert: count a run again")
        if len(set(map(len, layers))) > 1 or len(layers[0]) < self.per_token:
            raise ValueError("counts: layers differ in their number of experts, or have fewer than "
                             "a token selects: count a run again")
        tokens, remainder = divmod(sum(layers[0]), self.per_token)
        if remainder or len(set(map(sum, layers))) > 1 or max(map(max, layers)) > tokens:
            raise ValueError("counts: layers differ in the number of experts that tokens selected: "
                             "count a run again")
        means = self.texts, self.text_experts / self.per_token, self.text_tokens
        max_experts = self.texts * len(layers[0])
        if list(means) != sorted(means) or self.text_experts > max_experts:
            raise ValueError("texts, text_tokens and text_experts contradict each other: count a "
                             "run again")


def read_expert_counts(path: str) -> ExpertChoices:
    """Read a file of `write_expert_counts`.

    Raises `UserError` if the file cannot be read, or its contents are not expert counts.
    """
    text = read_text("--expert-counts", path, if_empty="is empty: count a run again")
    name = f"--expert-counts {path}"
    counts = validate(_Counts, parse_json(name, text), name)
    return ExpertChoices(tuple(map(tuple, counts.counts)), counts.per_token, counts.texts,
                         counts.text_tokens, counts.text_experts, path)


def write_expert_counts(path: str, stats: RunStats) -> None:
    """Write the expert counts of a run, a line per decoder layer. Raises OSError."""
    choices = stats.expert_choices
    assert choices is not None  # see `check_counting`
    head = {"model": stats.model, "per_token": choices.per_token, "texts": choices.texts,
            "text_tokens": choices.text_tokens, "text_experts": choices.text_experts}
    layers = ",\n".join(f" {json.dumps(layer)}" for layer in choices.counts)
    with open_atomic(path) as file:
        file.write(f'{json.dumps(head)[:-1]}, "counts": [\n{layers}\n]}}\n')
