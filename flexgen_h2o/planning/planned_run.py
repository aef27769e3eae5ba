"""A planned run: the sizes and counts that memory and time follow from. No torch.

`ExpertUse` predicts which experts of a mixture a run chooses, from recorded choices.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import add_windows, select_layers
from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.config.limits import CHUNK_ROWS, DRAFT_CHUNK
from flexgen_h2o.config.parallel import Stage
from flexgen_h2o.config.placement import Placement, place_experts, pool_experts
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.h2o.budget import budget, num_slots

if TYPE_CHECKING:
    from flexgen_h2o.models.model_config import ModelConfig
    from flexgen_h2o.models.tensors import WeightShapes

_MAX_TOKENS = 1e9
"""Number of independent tokens that choose every expert with a nonzero frequency."""
_MIN_LOCALITY = 0.05
_ROUNDS, _HALVINGS = 8, 40


class ExpertUse:
    """Model of the experts that tokens choose, fitted to counts of choices.

    It has two parameters. First, some experts are chosen more often than others. Second, a text
    reuses its experts: t successive tokens choose as many distinct experts as ``t ** locality``
    independent tokens. With few texts the two effects cannot be separated. Frequencies are
    therefore shrunk towards equal ones, by the share of their variance that texts of equal
    frequencies would also have (James and Stein, 1961).

    `frequencies` [experts of all layers]: share of tokens that choose an expert, in the order of
    `ExpertChoices.ranked`. `locality`: 0 to 1; at 1 the tokens of a text are independent.
    """

    def __init__(self, choices: ExpertChoices):
        layers = [counts for counts in choices.counts if counts]
        self._layers = len(layers)
        tokens = sum(map(sum, layers)) / choices.per_token / self._layers
        counted = [choices.counts[layer][number] / max(sum(choices.counts[layer]), 1)
                   for layer, number in choices.ranked]
        self._counted = choices.per_token * np.array(counted)
        self._alike = choices.per_token / len(layers[0])
        self._length = choices.text_tokens / choices.texts if choices.texts else 1.0
        self._of_text = choices.text_experts / choices.texts if choices.texts else 0.0
        texts = choices.texts / self._layers or tokens or 1.0
        variance = float(np.mean((self._counted - self._alike) ** 2))
        self._set(0.0)
        for _ in range(_ROUNDS):
            independent = texts * max(tokens / texts, 1.0) ** self.locality
            by_chance = self._alike * (1 - self._alike) / independent
            self._set(max(0.0, 1 - by_chance / variance) if variance > 0 else 0.0)

    def _set(self, weight: float) -> None:
        """Set frequencies between equal ones (`weight` 0) and counted ones (1), and the locality.
        """
        self.frequencies = weight * self._counted + (1 - weight) * self._alike
        self.locality = 1.0
        if self._length >= 2:
            equal = _inverse(self.touched, self._of_text)
            self.locality = min(max(math.log(max(equal, 1.0)) / math.log(self._length),
                                    _MIN_LOCALITY), 1.0)

    def independent(self, tokens: float) -> float:
        """Return how many independent tokens choose as many experts as `tokens` of a text."""
        return max(tokens, 0.0) ** self.locality

    def touched(self, tokens: float, first: float = 0.0, last: float = 1.0) -> float:
        """Return the expected number of experts per layer that independent tokens choose.

        An expert that a token chooses with probability p is chosen by any of n tokens with
        probability ``1 - (1 - p) ** n``.

        `tokens`: number of independent tokens. `first` and `last`: only experts from the quantile
        `first` to the quantile `last` by frequency, the most frequent first; 0 and 1 are all.
        """
        chances = 1 - (1 - np.minimum(self.frequencies, 1.0)) ** tokens
        if (first, last) == (0.0, 1.0):
            return float(chances.sum()) / self._layers
        sums = np.concatenate(([0.0], np.cumsum(chances)))
        places = np.clip((first, last), 0, 1) * len(chances)
        low, high = np.interp(places, np.arange(len(sums)), sums)
        return max(0.0, float(high - low)) / self._layers

    def missed(self, sequences: float, tokens: float, first: float, num_kept: float) -> float:
        """Return the expected number of experts per layer that a forward pass has to load.

        Slots hold the most recently used experts: the working set (Denning, 1968) of
        earlier passes or texts.

        `tokens`: tokens of each sequence in the pass: 1 in decode steps, more in a prefill.
        `first`: only experts from this quantile by frequency on are counted. `num_kept`: experts
        per layer that slots hold.
        """
        new = sequences * self.independent(tokens)
        if num_kept <= 0:
            return self.touched(new, first)
        if self.touched(_MAX_TOKENS, first) <= num_kept:
            return 0.0
        experts = len(self.frequencies) / self._layers
        by_frequency = self.touched(new, min(first + num_kept / experts, 1.0))
        tokens_held = _inverse(lambda many: self.touched(many, first), num_kept)
        after = tokens_held + new
        if tokens <= 1:
            passes = (tokens_held / sequences) ** (1 / self.locality)
            after = sequences * (passes + 1) ** self.locality
        return min(by_frequency, max(0.0, self.touched(after, first) - num_kept))


@lru_cache(maxsize=16)
def expert_use(choices: ExpertChoices) -> ExpertUse:
    """Return the model of these choices, fitted once."""
    return ExpertUse(choices)


def _inverse(touched: Callable[[float], float], experts: float) -> float:
    """Return the number of independent tokens that choose `experts` experts, by bisection."""
    low, high = 0.0, 1.0
    while touched(high) < experts and high < _MAX_TOKENS:
        low, high = high, 4 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if touched(middle) < experts else (low, middle)
    return high


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts tokens, resident in memory.

    Attributes
    ----------
    model : ModelConfig
    weights : WeightOptions or None
        Format of its weights. None for an `mtp_model`: it has the format of the run's weights, and
        uses the run's embedding and head if they are in memory.
    """

    model: ModelConfig
    weights: WeightOptions | None


@dataclass(frozen=True)
class PlannedRun:
    """A run whose memory and time are predicted.

    Attributes
    ----------
    policy : Policy
        Placements; the batch sizes are the workload's.
    workload : Workload
        The largest block.
    itemsize : int
        Bytes of an element of weights, cache and activations that is not quantized.
    has_gpu : bool
        Compute memory is separate from host memory. Otherwise nothing is staged between them.
    writes_weights : bool
        Weights on the disk tier are written there (random weights, and quantized weights that no
        weight cache keeps). Otherwise they are read from existing files and take no space.
    weights : WeightOptions
        Placement shares are of the bytes at rest in this format.
    stage : Stage or None
        The pipeline stage, if this is the run of one rank: see `of_stage`.
    groups : int
        Groups of a block's batches in a pipeline.
    draft : DraftModel or None
        The policy's draft model.
    batch_invariant : bool
        Outputs of experts are kept until all are computed.
    """

    model: ModelConfig
    policy: Policy
    workload: Workload
    itemsize: int
    has_gpu: bool = False
    writes_weights: bool = False
    cache: CacheOptions = CacheOptions()
    weights: WeightOptions = WeightOptions()
    stage: Stage | None = None
    groups: int = 1
    draft: DraftModel | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        h2o = add_windows(self.cache.h2o, self.model.attention)
        if h2o != self.cache.h2o:
            object.__setattr__(self, "cache", replace(self.cache, h2o=h2o))

    def of_stage(self, stage: Stage, groups: int) -> PlannedRun:
        """Return the run of one pipeline rank, with the batches in `groups` groups.

        It has the stage's layers, and the embedding or head if the stage has them.
        """
        choices = self.policy.expert_choices
        policy = replace(self.policy, expert_choices=choices and choices.slice_layers(
            stage.first, stage.last))
        return replace(self, stage=stage, policy=policy,
                       weights=self.weights.slice_layers(stage.first, stage.last),
                       groups=min(groups, self.workload.num_gpu_batches),
                       model=self.model.slice_layers(stage.first, stage.last),
                       cache=replace(self.cache, h2o=stage.h2o(self.cache.h2o)))

    @cached_property
    def cache_runs(self) -> tuple[PlannedRun, ...]:
        """The run of each group of attention layers alone, numbered as in its KV cache."""
        groups = self.model.cache_groups
        if groups == (tuple(range(self.model.num_layers)),):
            return (self,)
        return tuple(replace(
            self, model=self.model.select_layers(layers),
            cache=replace(self.cache, h2o=select_layers(self.cache.h2o, layers)))
            for layers in groups)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a sequence in a recurrent layer; 0 without recurrent layers."""
        recurrent = self.model.recurrent
        return 0 if recurrent is None else 4 * recurrent.state_size

    @property
    def draft_run(self) -> PlannedRun | None:
        """The run of the draft model, which has the texts of a block one by one."""
        if self.draft is None:
            return None
        load = replace(self.workload, gpu_batch_size=1, num_gpu_batches=self.sequences)
        return PlannedRun(self.draft.model, Policy(prefill_chunk=DRAFT_CHUNK), load, self.itemsize,
                          self.has_gpu, weights=self.draft.weights or self.weights,
                          batch_invariant=self.batch_invariant)

    @property
    def is_first_stage(self) -> bool:
        """True if forward passes begin here: the run has the embedding."""
        return self.stage is None or self.stage.is_first_stage

    @property
    def is_last_stage(self) -> bool:
        """True if forward passes end here: the run has the head."""
        return self.stage is None or self.stage.is_last_stage

    @property
    def sequences(self) -> int:
        """Sequences of a block."""
        return self.workload.gpu_batch_size * self.workload.num_gpu_batches

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert at rest; 0 without experts."""
        experts = self.model.experts
        if experts is None:
            return 0
        return bytes_at_rest(self.weights, self.model.expert_shapes(), self.itemsize)

    @property
    def num_experts(self) -> int:
        """Experts of all layers."""
        experts = self.model.experts
        return 0 if experts is None else self.model.expert_layers * experts.count

    @property
    def weight_placements(self) -> tuple[Placement, Placement]:
        """Placements of the weights that every token needs, and of the experts."""
        _, others = head_and_total_bytes(self)
        return place_experts(others, self.num_experts * self.expert_bytes, self.policy.weights,
                             self.policy.experts)

    @property
    def stored_experts(self) -> tuple[Placement, float]:
        """Where experts are stored, and the share of them in the pool: see `pool_experts`."""
        return pool_experts(self.weight_placements[1], self.has_gpu)

    def touched(self, sequences: float, tokens: float, first: float = 0.0, last: float = 1.0
                ) -> float:
        """Return the expected number of experts per layer that are chosen.

        Each of `sequences` sequences has `tokens` tokens. Only experts between two quantiles by
        frequency count, the most frequent first.
        """
        choices = self.policy.expert_choices
        if choices is not None:
            use = expert_use(choices)
            return use.touched(sequences * use.independent(tokens), first, last)
        return max(0.0, last - first) * self.model.experts.touched(sequences * tokens)

    def missed(self, sequences: float, tokens: float) -> float:
        """Return the share of the chosen experts outside compute memory that no slot holds."""
        num_experts, choices = max(self.num_experts, 1), self.policy.expert_choices
        resident = self.model.experts.resident_slots(sequences * tokens, self.offloaded_experts,
                                                     self.expert_slots)
        if choices is None:  # all experts are taken to be chosen equally often
            return 1 - resident / max(self.offloaded_experts, resident, 1)
        first = 1 - self.offloaded_experts / num_experts
        touched = self.touched(sequences, tokens, first)
        missed = expert_use(choices).missed(sequences, tokens, first,
                                            resident / max(self.model.expert_layers, 1))
        return missed / touched if touched > 0 else 1.0

    @property
    def offloaded_experts(self) -> float:
        """Experts of all layers that have to be loaded into compute memory."""
        _, cpu, disk = self.stored_experts[0].fractions()
        loads_host = self.has_gpu and not self.policy.cpu_expert_compute
        return self.num_experts * (disk + (cpu if loads_host else 0))

    @property
    def computes_experts_on_host(self) -> bool:
        """True if experts in host memory are computed there, beside a GPU."""
        return self.has_gpu and self.model.experts is not None and self.policy.cpu_expert_compute

    @property
    def expert_slots(self) -> int:
        """Slots in compute memory for experts that are loaded."""
        experts = self.model.experts
        if experts is None:
            return 0
        return experts.slots(self.sequences, math.ceil(self.offloaded_experts),
                             self.policy.expert_slots, self.stored_experts[1])

    @property
    def slot_bytes(self) -> int:
        """Bytes of an expert slot: three matrices, each with a page of slack at both ends."""
        if self.model.experts is None:
            return 0
        largest = bytes_at_rest(self.weights.with_largest_layouts, self.model.expert_shapes(),
                                self.itemsize)
        return largest + 6 * mmap.PAGESIZE

    @property
    def shards_weights(self) -> bool:
        """True if weights on disk are streamed in row shards."""
        mixture = self.model.experts is not None
        return self.policy.shards_weights(has_gpu=self.has_gpu, mixture=mixture)

    @property
    def pass_rows(self) -> int:
        """Tokens of the longest prompt in one forward pass."""
        prompt = self.workload.prompt_len
        return min(prompt, self.policy.prefill_chunk or prompt)

    @property
    def passes(self) -> int:
        """Forward passes of the longest prompt."""
        return math.ceil(self.workload.prompt_len / self.pass_rows)

    @property
    def group_batches(self) -> float:
        """GPU batches that share a load of weights, averaged over groups."""
        return self.workload.num_gpu_batches / self.groups

    @property
    def chunk_rows(self) -> int:
        """Rows of a prefill that go through a layer together, unless one prompt is longer."""
        return CHUNK_ROWS["cuda" if self.has_gpu else "cpu"]

    @property
    def gathers_prompts(self) -> bool:
        """True if a chunked prefill gathers whole prompts before it cuts or quantizes them."""
        chunks = self.pass_rows < self.workload.prompt_len
        return chunks and not (self.cache.is_unquantized_full or self.cache.simulated
                               or self.evicts_chunks)

    @property
    def evicts_chunks(self) -> bool:
        """True if a chunked prefill evicts after each chunk."""
        chunks = self.pass_rows < self.workload.prompt_len
        return chunks and self.cache.evicts_chunks

    @property
    def captures_layers(self) -> bool:
        """True if decode steps of layers in compute memory are captured (`engine.captured_step`).

        16-bit elements are taken to be bfloat16.
        """
        whole = not self.policy.sep_layer or self.model.experts is not None
        return (whole and not self.has_gpu and self.itemsize == 2
                and self.policy.activations.gpu == 100)

    @property
    def recalls_from_disk(self) -> bool:
        """True if decode steps read only selected tokens of a cache on disk."""
        return self.policy.selective_fetch and not self.cache.simulated and not self.has_gpu

    @property
    def recalls_in_place(self) -> bool:
        """True if a GPU reads selected tokens of a cache in host memory in place."""
        recalls = self.cache.recalls and not self.cache.simulated
        return self.has_gpu and recalls and not self.attends_on_host

    @property
    def has_hot_set(self) -> bool:
        """True if a GPU keeps a hot set of a cache in host memory."""
        return self.policy.selective_fetch and self.recalls_in_place

    @property
    def attends_on_host(self) -> bool:
        """True if attention over the cache in host memory runs on the host, beside a GPU."""
        return self.has_gpu and self.policy.cpu_cache_compute

    @property
    def evicting_layers(self) -> list[int]:
        """Decoder layers that evict tokens."""
        return [layer for layer in range(self.model.num_layers)
                if budget(self.cache.h2o, layer, self.workload.prompt_len) is not None]


def bytes_at_rest(options: WeightOptions, unit: WeightShapes, itemsize: int) -> int:
    """Return the bytes at rest of the weights of a unit; unquantized elements have `itemsize`."""
    matrices = sum(options.matrix_bytes(shape, itemsize) for shape in unit.matrices)
    return matrices + unit.vector_bytes(itemsize)


def kv_entry_bytes(options: CacheOptions, model: ModelConfig, itemsize: int) -> int:
    """Return the bytes at rest of one token's key and value in one layer, all KV heads together."""
    latent = model.latent is not None
    layout = options.layout(model.head_dim, latent=latent)
    if options.simulated:  # keeps keys and values in float32
        return 4 * model.num_kv_heads * (model.head_dim + model.value_dim)
    if layout is None:
        return model.cached_size * itemsize
    return model.num_kv_heads * layout.kinds * layout.width


def layer_slots(options: CacheOptions, model: ModelConfig, workload: Workload) -> tuple[int, ...]:
    """Return the largest number of slots of a sequence in each decoder layer."""
    # The last token that is generated is never cached.
    return tuple(num_slots(options.h2o, layer, workload.prompt_len, workload.gen_len - 1)
                 for layer in range(model.num_layers))


def head_and_total_bytes(run: PlannedRun) -> tuple[int, int]:
    """Return the bytes of the head's matrix, even if tied, and of all weights of the rank."""
    model = run.model
    at_rest = partial(bytes_at_rest, run.weights, itemsize=run.itemsize)
    total = model.over_layers(at_rest)
    if run.is_first_stage:
        total += at_rest(model.embed_shapes())
    if not run.is_last_stage:
        return 0, total
    head = run.weights.matrix_bytes((model.vocab_size, model.embed_dim), run.itemsize)
    total += at_rest(model.head_shapes())
    if model.tie_word_embeddings and not run.is_first_stage:
        total += head  # the tied table itself is on another rank
    return head, total
