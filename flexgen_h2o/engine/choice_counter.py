"""Counts of the experts that tokens choose, while they do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexgen_h2o.config.expert_choices import ExpertChoices
from flexgen_h2o.config.experts import ExpertsConfig


class ChoiceCounter:
    """The choices of a run, of layers whose numbers begin with a rank's first.

    Parameters
    ----------
    experts : ExpertsConfig
    """

    def __init__(self, experts: ExpertsConfig):
        self._experts = experts
        self.clear()

    def clear(self) -> None:
        """Forget all choices."""
        self._counts: dict[int, list[int]] = {}
        self._texts = self._tokens = self._touched = 0

    def add(self, layer: int, ids: Tensor, counts: Sequence[int],
            beginnings: Sequence[slice] = ()) -> None:
        """Count choices of a layer.

        Parameters
        ----------
        layer : int
        ids : Tensor [tokens, experts of a token], int64
        counts : sequence of int
            How many tokens chose each expert, of those that count.
        beginnings : sequence of slice
            The tokens with which prompts begin.
        """
        known = self._counts.setdefault(layer, [0] * self._experts.count)
        self._counts[layer] = [before + more for before, more in zip(known, counts, strict=True)]
        if beginnings:
            seen = torch.zeros(len(beginnings), len(counts), dtype=torch.bool, device=ids.device)
            for text, tokens in zip(seen, beginnings, strict=True):
                text[ids[tokens].flatten()] = True
            self._texts += len(beginnings)
            self._tokens += sum(tokens.stop - tokens.start for tokens in beginnings)
            self._touched += int(seen.sum())  # a GPU is waited for once

    def made(self, layers: int) -> ExpertChoices:
        """The choices of so many decoder layers, some of which may have no experts."""
        return ExpertChoices(tuple(tuple(self._counts.get(layer, ())) for layer in range(layers)),
                             self._experts.per_token, self._texts, self._tokens, self._touched)
