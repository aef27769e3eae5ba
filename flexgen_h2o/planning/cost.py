"""The cost model: how long a block takes on a machine, and what it waits for. No torch.

As in FlexGen (arXiv 2303.06865, section 4.3), for this engine's schedule: a layer step of it
(embedding, decoder layer, head) takes, for all batches of a block, as long as the busiest resource
does; with overlap off they take turns. All seconds are affine in the shares of the placements,
which is what `placing` makes a linear programme of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from flexgen_h2o.config.limits import (
    ROW_BLOCK,
    SHARD_BUFFERS,
    SHARDS_PER_LAYER,
)
from flexgen_h2o.config.placement import TIERS
from flexgen_h2o.errors import UserError
from flexgen_h2o.planning.cache_cost import (
    COMPUTE,
    HOST,
    RESOURCES,
    TERMS,
    CacheCosts,
    CostAccumulator,
    LayerStepCost,
)
from flexgen_h2o.planning.hardware import Hardware
from flexgen_h2o.planning.planned_run import (
    PlannedRun,
    part_bytes,
)
from flexgen_h2o.storage.placement import split

_IS_WEIGHTS = np.array([term is not None and term[0] == "weights" for term in TERMS])

READ_ROWS = 4
"""Rows of an expert that a CPU multiplies in the time that it takes to read the expert."""


@dataclass(frozen=True)
class Phase:
    """Seconds of the prefill, or of a mean decode step, and those of each resource alone."""

    seconds: float
    resources: Mapping[str, float]

    @property
    def binding(self) -> str:
        """The resource that is busy the longest."""
        return max(self.resources, key=self.resources.get)


@dataclass(frozen=True)
class Estimate:
    """Estimated times of a block: `prefill`, then so many `steps` like `step`, for `generated`
    tokens."""

    prefill: Phase
    step: Phase
    steps: int
    generated: int

    @property
    def seconds(self) -> float:
        """Prefill and decode."""
        return self.prefill.seconds + self.steps * self.step.seconds

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens / (prefill + decode) seconds."""
        return self.generated / self.seconds


def estimate(hardware: Hardware, run: PlannedRun) -> Estimate:
    """Estimated times of the block of `run` on a machine.

    Parameters
    ----------
    hardware : Hardware
        Has a GPU if the run has one, and rates for its bits.
    run : PlannedRun
        As the memory plan takes it. Shares of weights are taken as exact in each layer, and in the
        head too, although placement is by whole tensors.
    """
    shares, load = placement_shares(run), run.workload
    phases = []
    for layer_steps in layer_step_costs(hardware, run):
        alone = sum(layer_step.count * (layer_step.seconds @ shares) for layer_step in layer_steps)
        phases.append(Phase(float(sum(layer_step.elapsed(shares) for layer_step in layer_steps)),
                            {name: float(alone[row]) for row, name in enumerate(RESOURCES)}))
    sequences = load.gpu_batch_size * load.num_gpu_batches
    return Estimate(*phases, steps=load.gen_len - 1, generated=sequences * load.gen_len)


def placement_shares(run: PlannedRun) -> np.ndarray:
    """The shares of a run's placements by `TERMS`; of the cache, what whole sequences make."""
    policy, batch = run.policy, run.workload.gpu_batch_size
    sequences = (count / batch for count in split(batch, policy.cache))
    weights = policy.weights if run.model.experts is None else run.weight_placements[1]
    return np.array([1, *weights.fractions(), *sequences, *policy.activations.fractions()])


def layer_step_costs(hardware: Hardware, run: PlannedRun) -> tuple[tuple[LayerStepCost, ...],
                                                                 tuple[LayerStepCost, ...]]:
    """The layer steps of the prefill, and those of a mean decode step, whatever the placements
    are."""
    costs = _Costs(hardware, run)
    layers, passes = run.model.num_layers, run.passes
    rows = run.workload.gpu_batch_size
    prompt_rows = rows * run.workload.prompt_len / passes
    prefill = [costs.prompt_layer(passes * layers)]
    step = [costs.token_layer(layers)]
    if run.is_first_stage:
        prefill.insert(0, costs.embedding(prompt_rows, passes))
        step.insert(0, costs.embedding(rows, 1))
    if run.is_last_stage:
        prefill.append(costs.head(prompt_rows, passes))
        step.append(costs.head(rows, 1))
    return tuple(prefill), tuple(step)


class _Costs:
    """Makes the layer steps of a run: a mean layer in a mean forward pass, for all batches of a
    block, or of a group if it has several."""

    def __init__(self, hardware: Hardware, run: PlannedRun):
        if run.attends_on_host and hardware.host_attention is None:
            raise UserError(f"{hardware.name} says nothing of attention on its CPU: leave "
                            "--cpu-cache-compute out")
        if run.computes_experts_on_host and hardware.host_attention is None:
            raise UserError(f"{hardware.name} says nothing of its CPU: leave --cpu-expert-compute "
                            "out")
        self._hardware = hardware
        self._compute = hardware.compute
        self._run = run
        self._model = model = run.model
        self._cache = CacheCosts(hardware, run)
        self._batches = run.group_batches
        self._sequences = self._batches * run.workload.gpu_batch_size
        # Of a mean layer: matrices' elements, bytes, and the share that has experts.
        self._elements = model.over_layers(
            lambda part: sum(map(math.prod, part.matrices))) / model.num_layers
        self._weight_bytes = model.over_layers(
            partial(part_bytes, run.weights, itemsize=run.itemsize)) / model.num_layers
        self._mixed = model.expert_layers / model.num_layers

    def _layer_step(self, count: float, cost: CostAccumulator, attention: np.ndarray | None = None,
                    awaited: np.ndarray | None = None) -> LayerStepCost:
        """Groups of resources that run side by side: all resources, or with overlap off none of
        them.

        While attention takes its seconds [TERMS] no chunk of weights is used, and a few are read.
        For `awaited` seconds [TERMS] of reading, compute waits.
        """
        policy, seconds = self._run.policy, cost.seconds
        lanes = seconds if policy.overlap else seconds.sum(axis=0, keepdims=True)
        if policy.overlap and self._batches <= 1:
            # The GPU has no other batch to compute while the host attends.
            lanes = np.vstack((seconds[:2].sum(axis=0), seconds[2:]))
        if policy.overlap and self._run.shards_weights and attention is not None:
            stalled = attention + seconds[RESOURCES.index("disk->cpu")] * _IS_WEIGHTS
            ahead = (SHARD_BUFFERS - 1) / SHARDS_PER_LAYER * self._weight_bytes
            stalled[0] -= ahead / self._hardware.links["disk->cpu"]
            lanes = np.vstack((lanes, stalled))
        if policy.overlap and awaited is not None:
            lanes = np.vstack((lanes, lanes[0] + awaited))
        # As lanes of which the largest still counts: each, and a share of what the others take.
        share = self._hardware.interference
        lanes = (1 - share) * lanes + share * seconds.sum(axis=0)
        if policy.overlap:
            more = max(0.0, self._hardware.read_interference - share)
            lanes[0] += more * seconds[RESOURCES.index("disk->cpu")]
        return LayerStepCost(count * self._run.groups, lanes, seconds)

    def embedding(self, rows: float, count: int) -> LayerStepCost:
        """Rows of a batch looked up where the table is; only they travel."""
        cost = CostAccumulator(self._hardware)
        self._bring_weights(
            cost, self._batches * rows * self._model.embed_dim * self._run.itemsize)
        cost.send("activations", self._hidden(rows))
        return self._layer_step(count, cost)

    def head(self, rows: float, count: int) -> LayerStepCost:
        """Logits of one row of each sequence, once in a phase; the matrix comes in each forward
        pass."""
        model, run, batch = self._model, self._run, self._run.workload.gpu_batch_size
        cost = CostAccumulator(self._hardware)
        matrix = (model.vocab_size, model.embed_dim)
        self._bring_weights(cost, run.weights.matrix_bytes(matrix, run.itemsize))
        cost.bring("activations", self._hidden(rows))
        logits = batch * model.vocab_size / 1e9
        seconds = (self._products(batch, math.prod(matrix))
                   + logits * self._compute.logit_seconds)
        cost.add(COMPUTE, self._batches * seconds / count)
        return self._layer_step(count, cost)

    def prompt_layer(self, count: int) -> LayerStepCost:
        """A decoder layer with a part of all prompts."""
        load, passes = self._run.workload, self._run.passes
        tokens, batch = load.prompt_len / passes, load.gpu_batch_size
        # Chunks are cut between sequences.
        together = min(batch, max(1, int(self._run.chunk_rows // tokens)))
        trips = 1.0
        if self._run.shards_weights:  # each shard reads them again, blocks of a long one
            trips = math.ceil(batch / together) * math.ceil(together * tokens / ROW_BLOCK)
        cost = self._rows(batch * tokens, trips)
        for sequences, chunks in ((together, batch // together), (batch % together, 1)):
            if sequences:
                cost.add(COMPUTE, self._batches * chunks * self._row_seconds(sequences * tokens))
        self._bring_experts(cost, tokens)
        self._experts(cost, tokens)
        cost.add(COMPUTE, self._sequences * self._cache.prompt_attention_seconds() / passes)
        self._cache.add_prompt(cost)
        return self._layer_step(count, cost)

    def token_layer(self, count: int) -> LayerStepCost:
        """A decoder layer with one new token of each sequence."""
        batch = self._run.workload.gpu_batch_size
        cost = self._rows(batch)
        cost.add(COMPUTE, self._batches * self._row_seconds(batch))
        self._bind_layers(cost)
        self._bring_experts(cost, 1.0)
        self._experts(cost, 1.0)
        products = cost.seconds[0].copy()
        self._cache.add_token(cost)
        return self._layer_step(count, cost, cost.seconds[0] - products, self._cache.awaited())

    def _bind_layers(self, cost: CostAccumulator) -> None:
        """Less for layers that are bound: those whose weights are in memory, but for experts."""
        bound = self._compute.captured_layer_seconds
        if bound is None or not self._run.captures_layers:
            return
        spared = self._batches * (self._compute.layer_seconds - bound)
        if self._model.experts is None:
            cost.add(COMPUTE, -spared, ("weights", "gpu"))
        elif self._run.weight_placements[0].gpu == 100:
            cost.add(COMPUTE, -spared)

    def _rows(self, rows: float, trips: float = 1.0) -> CostAccumulator:
        """A decoder layer's weights, so many times, and the hidden states of `rows` in each batch
        both ways."""
        cost = CostAccumulator(self._hardware)
        self._bring_weights(cost, trips * self._weight_bytes)
        cost.bring("activations", self._hidden(rows))
        cost.send("activations", self._hidden(rows))
        return cost

    def _bring_weights(self, cost: CostAccumulator, nbytes: float) -> None:
        """Weights that every token needs. Beside experts they are where they are."""
        if self._model.experts is None:
            cost.bring("weights", nbytes)
            return
        for tier, share in zip(TIERS, self._run.weight_placements[0].fractions(), strict=True):
            cost.bring_fixed(tier, share * nbytes)

    def _bring_experts(self, cost: CostAccumulator, tokens: float) -> None:
        """The experts that so many tokens of each sequence choose, but for those that slots have.

        What is chosen most often rests on the fastest tier. The bytes of a tier grow with its share
        of the experts, from those at the run's share; where it has none, as if all were there.
        """
        run, sequences = self._run, self._sequences
        if self._model.experts is None:
            return
        nbytes = self._mixed * run.missed(sequences, tokens) * run.expert_bytes
        shares = run.weight_placements[1].fractions()
        for tier in ("disk",) if run.computes_experts_on_host else ("cpu", "disk"):
            share = shares[TIERS.index(tier)]
            last = sum(shares[: TIERS.index(tier) + 1]) if share else 1.0
            touched = run.touched(sequences, tokens, last - (share or 1.0), last) / (share or 1.0)
            cost.bring("weights", nbytes * touched, (tier,))

    def _experts(self, cost: CostAccumulator, tokens: float) -> None:
        """Products with the experts that so many tokens of each sequence choose, wherever they are
        made.

        The CPU beside a GPU reads weights as fast as attention reads a cache, and takes as long for
        `READ_ROWS` rows of an expert as for reading it: its products are not measured.
        """
        run, experts = self._run, self._model.experts
        if experts is None:
            return
        touched, rows = run.touched(self._sequences, tokens), self._sequences * tokens
        if not run.computes_experts_on_host:
            cost.add(COMPUTE, self._expert_seconds(touched, rows))
            return
        for tier in ("gpu", "disk"):
            cost.add(COMPUTE, self._expert_seconds(touched, rows), ("weights", tier))
        each = max(1.0, rows * experts.per_token / touched / READ_ROWS)
        rate = self._hardware.host_attention.decode_attention[16]
        rows *= self._mixed
        cost.add(HOST, self._mixed * each * touched * run.expert_bytes / rate, ("weights", "cpu"))
        sums = rows * self._model.hidden_size * (8 if run.itemsize == 4 else 4)
        cost.link("gpu->cpu", rows * self._model.hidden_size * run.itemsize, ("weights", "cpu"))
        cost.link("cpu->gpu", sums, ("weights", "cpu"))

    def _expert_seconds(self, touched: float, rows: float) -> float:
        """So many experts of a layer for so many rows: products, and for each choice what else a
        layer takes for a row."""
        choices = rows * self._model.experts.per_token
        elements = sum(map(math.prod, self._model.expert_shapes().matrices))
        products = touched * self._products(max(1.0, choices / touched), elements)
        hidden = choices * self._model.hidden_size / 1e9
        return self._mixed * (products + hidden * self._compute.elementwise)

    def _hidden(self, rows: float) -> float:
        """Bytes of hidden states of so many rows in each batch."""
        return self._batches * rows * self._model.hidden_size * self._run.itemsize

    def _row_seconds(self, rows: float) -> float:
        """All of a decoder layer but attention, for rows that go through it together."""
        compute, elements = self._compute, self._elements
        blocks, rest = divmod(rows, ROW_BLOCK)
        products = blocks * self._products(ROW_BLOCK, elements)
        if rest:
            products += self._products(rest, elements)
        hidden = rows * self._model.hidden_size / 1e9
        return products + hidden * compute.elementwise + compute.layer_seconds

    def _products(self, rows: float, weights: float) -> float:
        """Seconds of products of so many rows with so many weights."""
        options = self._run.weights
        return weights / 1e9 * sum(
            share * interpolate(self._compute.products(bits, options.activation_bits), rows)
            for bits, share in options.shares.items())

def interpolate(table: Mapping[int, float], rows: float) -> float:
    """Seconds at so many rows: log-log between two points, constant below the first of them, and
    above the last in proportion to rows.
    """
    points = sorted(table)
    if rows >= points[-1]:
        return table[points[-1]] * rows / points[-1]
    return float(np.exp(np.interp(np.log(rows), np.log(points),
                                  np.log([table[point] for point in points]))))
