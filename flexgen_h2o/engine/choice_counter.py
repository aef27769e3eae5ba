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

    def add(self, layer: int, ids: Tensor, counts: Sequence[int], prompts: Sequence[int] = ()
            ) -> None:
        """Count choices of a layer.

        Parameters
        ----------
        layer : int
        ids : Tensor [tokens, experts of a token], int64
        counts : sequence of int
            How many of the tokens chose each expert.
        prompts : sequence of int
            The successive tokens of each prompt among them; none if they go on with texts.
        """
        known = self._counts.setdefault(layer, [0] * self._experts.count)
        self._counts[layer] = [before + more for before, more in zip(known, counts, strict=True)]
        if prompts:
            lengths = torch.tensor(prompts, device=ids.device)
            text = torch.repeat_interleave(lengths, output_size=len(ids))
            seen = ids.new_zeros(len(prompts), self._experts.count)
            seen[text[:, None], ids] = 1
            self._texts += len(prompts)
            self._tokens += len(ids)
            self._touched += int(seen.sum())

    def made(self, layers: int) -> ExpertChoices:
        """The choices of so many decoder layers, some of which may have no experts."""
        return ExpertChoices(tuple(tuple(self._counts.get(layer, ())) for layer in range(layers)),
                             self._experts.per_token, self._texts, self._tokens, self._touched)
