"""The cost model: predicted seconds of a block and the resource that bounds them. No torch.

It follows FlexGen (arXiv 2303.06865, section 4.3). With overlap, a unit (embedding, decoder
layer or head, for all batches of a block) takes as long as its busiest resource; without overlap,
the times of all resources add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from flexgen_h2o.config.limits import ROW_BLOCK, SHARD_BUFFERS, SHARDS_PER_LAYER
from flexgen_h2o.config.placement import TIERS, split
from flexgen_h2o.errors import UserError
from flexgen_h2o.planning.cache_cost import (
    COMPUTE,
    HOST,
    RESOURCES,
    TERMS,
    CacheCosts,
    CostAccumulator,
    UnitCost,
)
from flexgen_h2o.planning.hardware import Hardware
from flexgen_h2o.planning.planned_run import PlannedRun, bytes_at_rest

_IS_WEIGHTS = np.array([term is not None and term[0] == "weights" for term in TERMS])

READ_ROWS = 4
"""Rows that a CPU multiplies with an expert in the time it takes to read the expert's weights."""


@dataclass(frozen=True)
class Phase:
    """Predicted seconds of the prefill, or of an average decode step.

    `resources` has the seconds of each resource by itself.
    """

    seconds: float
    resources: Mapping[str, float]

    @property
    def binding(self) -> str:
        """The resource that is busy the longest."""
        return max(self.resources, key=self.resources.get)


@dataclass(frozen=True)
class Estimate:
    """Predicted times of a block."""

    prefill: Phase
    step: Phase  # an average decode step
    steps: int  # number of decode steps
    generated: int  # generated tokens of all sequences

    @property
    def seconds(self) -> float:
        """Seconds of prefill and decode."""
        return self.prefill.seconds + self.steps * self.step.seconds

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens / (prefill + decode) seconds."""
        return self.generated / self.seconds


def estimate(hardware: Hardware, run: PlannedRun) -> Estimate:
    """Predict the times of one block of `run` on a machine.

    Raises `UserError` if the run computes on the host of a GPU, and the machine has no rates for
    that.

    `hardware`: it needs a GPU if the run has one. `run`: its weight shares are taken to hold in
    every layer and in the head, although the engine places whole tensors.
    """
    shares, load = placement_shares(run), run.workload
    phases = []
    for units in unit_costs(hardware, run):
        alone = sum(unit.count * (unit.seconds @ shares) for unit in units)
        phases.append(Phase(float(sum(unit.elapsed(shares) for unit in units)),
                            {name: float(alone[row]) for row, name in enumerate(RESOURCES)}))
    sequences = load.gpu_batch_size * load.num_gpu_batches
    prefill, step = phases
    return Estimate(prefill, step, steps=load.gen_len - 1, generated=sequences * load.gen_len)


def placement_shares(run: PlannedRun) -> np.ndarray:
    """Return the placement shares of a run by `TERMS`; the cache's are of whole sequences."""
    policy, batch = run.policy, run.workload.gpu_batch_size
    sequences = (count / batch for count in split(batch, policy.cache))
    weights = policy.weights if run.model.experts is None else run.weight_placements[1]
    return np.array([1, *weights.fractions(), *sequences, *policy.activations.fractions()])


def unit_costs(hardware: Hardware, run: PlannedRun
               ) -> tuple[tuple[UnitCost, ...], tuple[UnitCost, ...]]:
    """Return the units of the prefill, and the units of an average decode step."""
    costs = _UnitCosts(hardware, run)
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


class _UnitCosts:
    """Builder of the units of a run.

    A step is an average layer of an average forward pass, for all batches of a block, or of a group
    of batches in a pipeline.
    """

    def __init__(self, hardware: Hardware, run: PlannedRun):
        if run.attends_on_host and hardware.host_attention is None:
            raise UserError(f"{hardware.name} has no rates for attention on its CPU: leave "
                            "--cpu-cache-compute out")
        if run.computes_experts_on_host and hardware.host_attention is None:
            raise UserError(f"{hardware.name} has no rates for its CPU: leave "
                            "--cpu-expert-compute out")
        self._hardware = hardware
        self._compute = hardware.compute
        self._run = run
        self._model = model = run.model
        # Of each group of layers of the KV cache, and the share of layers that are in it.
        self._caches = [(CacheCosts(hardware, part), part.model.num_layers / model.num_layers)
                        for part in run.cache_runs if part.model.num_layers]
        self._attention_share = len(model.attention_layers) / model.num_layers
        self._batches = run.group_batches
        self._sequences = self._batches * run.workload.gpu_batch_size
        # Per average layer: elements of its matrices, bytes, and the share that has experts. And
        # above, the share that has attention.
        self._elements = model.over_layers(
            lambda layer: sum(map(math.prod, layer.matrices))) / model.num_layers
        self._weight_bytes = model.over_layers(
            partial(bytes_at_rest, run.weights, itemsize=run.itemsize)) / model.num_layers
        self._moe_share = model.expert_layers / model.num_layers

    def _unit(self, count: float, cost: CostAccumulator, attention: np.ndarray | None = None,
              awaited: np.ndarray | None = None) -> UnitCost:
        """Return a unit whose resources overlap, or run one after the other without overlap.

        Parameters
        ----------
        count : float
            Number of these steps in the phase.
        attention : float array [TERMS], optional
            Seconds of attention, during which weight shards on disk are read ahead only as far as
            their buffers reach.
        awaited : float array [TERMS], optional
            Seconds for which compute stalls for reads.
        """
        policy, seconds = self._run.policy, cost.seconds
        path_seconds = seconds if policy.overlap else seconds.sum(axis=0, keepdims=True)
        if policy.overlap and self._batches <= 1:
            # With one batch the GPU has nothing to compute while the host attends.
            path_seconds = np.vstack((seconds[:2].sum(axis=0), seconds[2:]))
        if policy.overlap and self._run.shards_weights and attention is not None:
            stalled = attention + seconds[RESOURCES.index("disk->cpu")] * _IS_WEIGHTS
            ahead = (SHARD_BUFFERS - 1) / SHARDS_PER_LAYER * self._weight_bytes
            stalled[0] -= ahead / self._hardware.links["disk->cpu"]
            path_seconds = np.vstack((path_seconds, stalled))
        if policy.overlap and awaited is not None:
            path_seconds = np.vstack((path_seconds, path_seconds[0] + awaited))
        # Each path is slowed by a share of the time of the others; the slowest still decides.
        share = self._hardware.interference
        path_seconds = (1 - share) * path_seconds + share * seconds.sum(axis=0)
        if policy.overlap:
            slowdown = max(0.0, self._hardware.read_interference - share)
            path_seconds[0] += slowdown * seconds[RESOURCES.index("disk->cpu")]
        return UnitCost(count * self._run.groups, path_seconds, seconds)

    def embedding(self, rows: float, count: int) -> UnitCost:
        """Return the cost of the embedding lookup of `rows` tokens a batch; only rows are
        transferred."""
        cost = CostAccumulator(self._hardware)
        self._load_weights(
            cost, self._batches * rows * self._model.embed_dim * self._run.itemsize)
        cost.store("activations", self._hidden_bytes(rows))
        return self._unit(count, cost)

    def head(self, rows: float, count: int) -> UnitCost:
        """Return the cost of the logits of one row per sequence.

        The logits are computed once a phase, but the matrix is loaded in each of its `count`
        forward passes.
        """
        model, run, batch = self._model, self._run, self._run.workload.gpu_batch_size
        cost = CostAccumulator(self._hardware)
        matrix = (model.vocab_size, model.embed_dim)
        self._load_weights(cost, run.weights.matrix_bytes(matrix, run.itemsize))
        cost.load("activations", self._hidden_bytes(rows))
        logits = batch * model.vocab_size / 1e9
        seconds = (self._matmul_seconds(batch, math.prod(matrix))
                   + logits * self._compute.logit_seconds)
        cost.add(COMPUTE, self._batches * seconds / count)
        return self._unit(count, cost)

    def prompt_layer(self, count: int) -> UnitCost:
        """Return the cost of a decoder layer in a forward pass of the prefill."""
        load, passes = self._run.workload, self._run.passes
        tokens, batch = load.prompt_len / passes, load.gpu_batch_size
        # Chunks end between sequences.
        together = min(batch, max(1, int(self._run.chunk_rows // tokens)))
        trips = 1.0
        if self._run.shards_weights:  # they are read again for each chunk, and for its row blocks
            trips = math.ceil(batch / together) * math.ceil(together * tokens / ROW_BLOCK)
        cost = self._layer_transfers(batch * tokens, trips)
        for sequences, chunks in ((together, batch // together), (batch % together, 1)):
            if sequences:
                cost.add(COMPUTE, self._batches * chunks * self._dense_seconds(sequences * tokens))
        self._load_experts(cost, tokens)
        self._compute_experts(cost, tokens)
        for cache, share in self._caches:
            attention = CostAccumulator(self._hardware)
            attention.add(COMPUTE, self._sequences * cache.prompt_attention_seconds() / passes)
            cache.add_prompt(attention)
            cost.seconds += share * attention.seconds
        self._add_states(cost, tokens, loads=(passes - 1) / passes)
        return self._unit(count, cost)

    def token_layer(self, count: int) -> UnitCost:
        """Return the cost of a decoder layer in a decode step."""
        batch = self._run.workload.gpu_batch_size
        cost = self._layer_transfers(batch)
        cost.add(COMPUTE, self._batches * self._dense_seconds(batch))
        self._credit_captured_layers(cost)
        self._load_experts(cost, 1.0)
        self._compute_experts(cost, 1.0)
        self._add_states(cost, 1.0)
        seconds, awaited = np.zeros_like(cost.seconds), None
        for cache, share in self._caches:
            attention = CostAccumulator(self._hardware)
            cache.add_token(attention)
            seconds += share * attention.seconds
            stall = cache.stall_seconds()
            if stall is not None:
                awaited = share * stall + (0.0 if awaited is None else awaited)
        cost.seconds += seconds
        return self._unit(count, cost, seconds[0], awaited)

    def _add_states(self, cost: CostAccumulator, tokens: float, *, loads: float = 1.0) -> None:
        """Add the recurrent states of an average layer: `tokens` tokens of each sequence.

        A state is read and written as fast as attention reads a cache, and `READ_ROWS` tokens are
        computed in that time. It is loaded in the share `loads` of forward passes.
        """
        states = (1 - self._attention_share) * self._sequences * self._run.state_bytes
        cost.add(COMPUTE, 2 * states * max(1.0, tokens / READ_ROWS)
                 / self._compute.decode_attention[16])
        cost.load("cache", loads * states)
        cost.store("cache", states)

    def _credit_captured_layers(self, cost: CostAccumulator) -> None:
        """Subtract the call overhead that layers with captured decode steps save."""
        captured = self._compute.captured_layer_seconds
        if captured is None or not self._run.captures_layers:
            return
        saved = self._attention_share * self._batches * (self._compute.layer_seconds - captured)
        if self._model.experts is None:
            cost.add(COMPUTE, -saved, ("weights", "gpu"))
        elif self._run.weight_placements[0].gpu == 100:
            cost.add(COMPUTE, -saved)

    def _layer_transfers(self, rows: float, trips: float = 1.0) -> CostAccumulator:
        """Return the transfers of a decoder layer.

        They are its weights, `trips` times, and the hidden states of `rows` tokens a batch, in and
        out.
        """
        cost = CostAccumulator(self._hardware)
        self._load_weights(cost, trips * self._weight_bytes)
        cost.load("activations", self._hidden_bytes(rows))
        cost.store("activations", self._hidden_bytes(rows))
        return cost

    def _load_weights(self, cost: CostAccumulator, nbytes: float) -> None:
        """Add the load of weights that every token needs; a mixture has fixed placements of them.
        """
        if self._model.experts is None:
            cost.load("weights", nbytes)
            return
        for tier, share in zip(TIERS, self._run.weight_placements[0].fractions(), strict=True):
            cost.load_fixed(tier, share * nbytes)

    def _load_experts(self, cost: CostAccumulator, tokens: float) -> None:
        """Add the load of the experts that `tokens` tokens of each sequence choose, except in
        slots.

        The most frequently chosen experts are on the fastest tier. The bytes of a tier are
        proportional to its share, with the slope at the run's own share; for a tier without a
        share, as if it held all experts.
        """
        run, sequences = self._run, self._sequences
        if self._model.experts is None:
            return
        nbytes = self._moe_share * run.missed(sequences, tokens) * run.expert_bytes
        shares = run.weight_placements[1].fractions()
        for tier in ("disk",) if run.computes_experts_on_host else ("cpu", "disk"):
            share = shares[TIERS.index(tier)]
            last = sum(shares[: TIERS.index(tier) + 1]) if share else 1.0
            share = share or 1.0
            first = 0.0 if run.stored_experts[1] else last - share  # a pool misses any of them
            cost.load("weights", nbytes * run.touched(sequences, tokens, first, last) / share,
                      (tier,))

    def _compute_experts(self, cost: CostAccumulator, tokens: float) -> None:
        """Add the matmuls with the experts that `tokens` tokens of each sequence choose.

        The host's matmuls on a machine with a GPU are not measured. The host is assumed to read
        weights as fast as attention reads a cache, and to multiply `READ_ROWS` rows with an expert
        in the time of reading it.
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
        expert_rows = max(1.0, rows * experts.per_token / touched / READ_ROWS)
        rate = self._hardware.host_attention.decode_attention[16]
        rows *= self._moe_share
        read = expert_rows * touched * run.expert_bytes
        cost.add(HOST, self._moe_share * read / rate, ("weights", "cpu"))
        sums = rows * self._model.hidden_size * (8 if run.itemsize == 4 else 4)
        inputs = rows * self._model.hidden_size * run.itemsize
        cost.transfer("gpu->cpu", inputs, ("weights", "cpu"))
        cost.transfer("cpu->gpu", sums, ("weights", "cpu"))

    def _expert_seconds(self, touched: float, rows: float) -> float:
        """Return the seconds of `touched` experts of a layer, matmuls and elementwise, for `rows`
        tokens."""
        choices = rows * self._model.experts.per_token
        elements = sum(map(math.prod, self._model.expert_shapes().matrices))
        products = touched * self._matmul_seconds(max(1.0, choices / touched), elements)
        hidden = choices * self._model.hidden_size / 1e9
        return self._moe_share * (products + hidden * self._compute.elementwise)

    def _hidden_bytes(self, rows: float) -> float:
        """Return the bytes of the hidden states of `rows` tokens in each batch."""
        return self._batches * rows * self._model.hidden_size * self._run.itemsize

    def _dense_seconds(self, rows: float) -> float:
        """Return the seconds of a decoder layer for `rows` tokens, without attention and MoE."""
        compute, elements = self._compute, self._elements
        blocks, remainder = divmod(rows, ROW_BLOCK)
        products = blocks * self._matmul_seconds(ROW_BLOCK, elements)
        if remainder:
            products += self._matmul_seconds(remainder, elements)
        hidden = rows * self._model.hidden_size / 1e9
        return products + hidden * compute.elementwise + compute.layer_seconds

    def _matmul_seconds(self, rows: float, weights: float) -> float:
        """Return the seconds of matmuls of `rows` tokens with `weights` elements."""
        options = self._run.weights
        return weights / 1e9 * sum(
            share * interpolate(self._compute.linear_table(bits, options.activation_bits), rows)
            for bits, share in options.shares.items())


def interpolate(table: Mapping[int, float], rows: float) -> float:
    """Return the seconds at `rows` rows from a table of measured ones.

    Between two points it interpolates log-log, below the first it is constant, and above the last
    it is proportional to the rows.
    """
    points = sorted(table)
    if rows >= points[-1]:
        return table[points[-1]] * rows / points[-1]
    return float(np.exp(np.interp(np.log(rows), np.log(points),
                                  np.log([table[point] for point in points]))))
