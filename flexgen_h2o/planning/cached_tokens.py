"""The cached tokens that decode steps attend to: how many, and what reading them takes. No torch.

All is a mean over the steps of a run.
"""

from __future__ import annotations

from flexgen_h2o.config.index_layout import IndexLayout
from flexgen_h2o.h2o.budget import cached, fast_slots, recalled
from flexgen_h2o.planning.hardware import Compute, HostAttentionRates, RecallRates
from flexgen_h2o.planning.planned_run import PlannedRun, record_bytes
from flexgen_h2o.planning.recall_cost import (
    RecalledTokens,
    missing_tokens,
    recall_seconds,
    recalled_reads,
    seconds_per_byte,
)


class CachedTokens:
    """The cached tokens of one sequence of a run.

    Parameters
    ----------
    run : PlannedRun
    recall : RecallRates
    """

    def __init__(self, run: PlannedRun, recall: RecallRates):
        self._run = run
        self._recall = recall
        self._record = record_bytes(run.cache, run.model, run.itemsize)

    def attention_seconds(self, rates: Compute | HostAttentionRates, *, recalls: bool) -> float:
        """Seconds of a new token's attention, a mean over layers; `recalls`: with the kernels that
        recall, where that is configured."""
        run, model, total = self._run, self._run.model, 0.0
        for layer in range(model.num_layers):
            tokens = self._recalled(layer) if recalls else None
            if tokens is not None:
                index = IndexLayout(model.head_dim, run.cache.h2o.index_bits)
                total += recall_seconds(rates, self._recall, tokens, index=index,
                                        cache=run.cache)
                continue
            read = self._attended(layer) * self._record
            total += (read * seconds_per_byte(rates, run.cache)
                      + model.num_kv_heads * rates.head_seconds)
        return total / model.num_layers

    def disk_reads(self) -> tuple[float, float]:
        """Bytes that a disk reads in order in the time in which a step reads what it chooses, and
        those of them for which attention waits: a mean over layers."""
        total, awaited, layers = 0.0, 0.0, self._run.model.num_layers
        for layer in range(layers):
            whole, tokens = self._attended(layer) * self._record, self._recalled(layer)
            if tokens is None:
                total += whole
                continue
            read = whole * recalled_reads(self._recall, tokens)
            total, awaited = total + read, awaited + read
        return total / layers, awaited / layers

    def read_in_place(self) -> tuple[float, float]:
        """Bytes of a cache in host memory that come to a GPU in a step that reads what it chooses
        where it lies, and those of them for which attention waits: a mean over layers."""
        total, awaited, layers = 0.0, 0.0, self._run.model.num_layers
        for layer in range(layers):
            tokens = self._recalled(layer)
            if tokens is None:
                total += self._attended(layer) * self._record
                continue
            read = tokens.chosen * self._record
            if self._run.has_fast_set:
                read = min(read, missing_tokens(self._recall, tokens) * self._record)
            total, awaited = total + read, awaited + read
        return total / layers, awaited / layers

    def _recalled(self, layer: int) -> RecalledTokens | None:
        """The tokens of a layer in the middle of the text; None where a new one attends to all."""
        run = self._run
        if run.cache.simulated:
            return None
        load, attended = run.workload, self._attended(layer)
        chosen = recalled(run.cache.h2o, layer, load.prompt_len, load.gen_len // 2)
        held = fast_slots(run.cache.h2o, layer, load.prompt_len + load.gen_len - 1,
                          run.policy.fast_set)
        return None if chosen is None else RecalledTokens(
            min(chosen, attended), attended, run.model.num_kv_heads, self._record, held)

    def _attended(self, layer: int) -> float:
        """Tokens that are cached for a new one, itself too."""
        h2o, load = self._run.cache.h2o, self._run.workload
        steps = max(load.gen_len - 1, 1)
        first, last = (cached(h2o, layer, load.prompt_len, new) for new in (0, steps - 1))
        if h2o is not None and h2o.budget_of == "text":
            return (first + last) / 2 + 1
        growing = last - first  # a token each step, up to the budget
        total = (growing + 1) * (first + last) / 2 + (steps - 1 - growing) * last
        return total / steps + 1
