"""The file that says which experts of a mixture tokens chose: written, read and checked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from flexgen_h2o.config.expert_choices import ExpertChoices
from flexgen_h2o.config.schema import Count, Entries, Text, checked
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.atomic import open_atomic
from flexgen_h2o.files.readers import json_value, read_text
from flexgen_h2o.metrics.run_stats import RunStats

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM

_Sum = Annotated[int, Meta(ge=0, le=1 << 53)]


class _Counts(Entries):
    model: Text
    per_token: Count
    texts: _Sum
    text_tokens: _Sum
    text_experts: _Sum
    counts: list[list[_Sum]]

    def __post_init__(self) -> None:
        layers = [layer for layer in self.counts if layer]
        if not any(map(any, layers)):
            raise ValueError("counts: no token has chosen an expert: count a run again")
        if len(set(map(len, layers))) > 1 or len(layers[0]) < self.per_token:
            raise ValueError("counts: each layer needs as many experts as the others, and as a "
                             "token chooses: count a run again")
        tokens, rest = divmod(sum(layers[0]), self.per_token)
        if rest or len(set(map(sum, layers))) > 1 or max(map(max, layers)) > tokens:
            raise ValueError("counts: tokens have not chosen alike many experts in each layer: "
                             "count a run again")
        means = self.texts, self.text_experts / self.per_token, self.text_tokens
        most = self.texts * len(layers[0])
        if list(means) != sorted(means) or self.text_experts > most:
            raise ValueError("texts, text_tokens and text_experts contradict each other: count a "
                             "run again")


def read_expert_counts(path: str) -> ExpertChoices:
    """The choices in a file of `write_expert_counts`.

    Raises
    ------
    UserError
        The file cannot be read, or does not hold such counts.
    """
    text = read_text("--expert-counts", path, if_empty="is empty: count a run again")
    found = checked(_Counts, json_value(f"--expert-counts {path}", text), f"--expert-counts {path}")
    return ExpertChoices(tuple(map(tuple, found.counts)), found.per_token, found.texts,
                         found.text_tokens, found.text_experts, path)


def check_counting(path: str | None, llm: LLM) -> None:
    """Raise `UserError` if choices are to be counted (`path` is not None) where none are made."""
    if path is not None and llm.model_config.experts is None:
        raise UserError(f"{llm.model_config.name} has no experts: leave --count-experts out")


def write_expert_counts(path: str, stats: RunStats) -> None:
    """Write the choices of a run, a line for each decoder layer. OSError if it cannot."""
    found = stats.expert_choices
    assert found is not None  # `check_counting` has seen to it
    head = {"model": stats.model, "per_token": found.per_token, "texts": found.texts,
            "text_tokens": found.text_tokens, "text_experts": found.text_experts}
    layers = ",\n".join(f" {json.dumps(layer)}" for layer in found.counts)
    with open_atomic(path) as file:
        file.write(f'{json.dumps(head)[:-1]}, "counts": [\n{layers}\n]}}\n')
