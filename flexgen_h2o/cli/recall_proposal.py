"""Recall in place of a full cache that is not all in the fastest memory: what a plan proposes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.errors import UserError
from flexgen_h2o.planning.search import Choice

HEAVY_RATIO = 0.1
"""As heavy hitters, and as many recent tokens: 20 % of the prompt."""
PERPLEXITY = 1.04
"""Perplexity over the full cache's then, of smollm2-135m (docs/h2o.md)."""


@dataclass(frozen=True)
class RecallProposal:
    """Recall that is predicted to be faster than the full cache of a plan.

    Attributes
    ----------
    flags : str
        To add to those that were planned for.
    choice : Choice
        The run with them, and what is predicted of it.
    """

    flags: str
    choice: Choice

    def text(self, full: Choice) -> str:
        """One line: the flags, the rates with and without them, and what they change."""
        return (f"{self.flags}: {self.choice.tokens_per_second:.4g} tokens/s predicted, "
                f"{full.tokens_per_second:.4g} without; a new token then attends to "
                f"{200 * HEAVY_RATIO:g} % of the prompt, and perplexity is {PERPLEXITY} times the "
                "full cache's (smollm2-135m, docs/h2o.md)")


def with_recall(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """The flags to add to a run with the full cache, and the run with them: what is refused is left
    out."""
    h2o = config.h2o()
    if h2o is not None and (h2o.recall or not h2o.is_full):
        return
    for added in ({"hh_ratio": HEAVY_RATIO, "recall": True},
                  {"hh_ratio": HEAVY_RATIO, "recall": True, "fetch_chosen": True}):
        with suppress(UserError):
            words = (flag_name(name) + ("" if value is True else f" {value}")
                     for name, value in added.items())
            yield " ".join(words), replace(config, **added)
