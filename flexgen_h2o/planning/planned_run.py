"""The experts that texts to come choose, by the choices of others: a model of counts. No torch."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.experts import ExpertChoices
from flexgen_h2o.config.h2o import windowed
from flexgen_h2o.config.limits import CHUNK_ROWS
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.stage import Stage
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.h2o.budget import budget, slots
from flexgen_h2o.storage.placement import place_experts

if TYPE_CHECKING:
    from flexgen_h2o.models.model_config import ModelConfig, PartShapes

_MOST_TOKENS = 1e9
"""So many independent tokens choose whatever is ever chosen."""
_LEAST_LOCALITY = 0.05
_ROUNDS, _HALVINGS = 8, 40


class ExpertUse:
    """A model of what is chosen, of two things that counts tell.

    Some experts are chosen more often than others. And a text keeps to some of them: t successive
    tokens of it choose as many as ``t ** locality`` tokens do that choose on their own. With few
    texts the one looks like the other, so that frequencies are shrunk towards equal ones: by the
    share of their variance that texts that all choose alike would have too (James and Stein, 1961).

    Attributes
    ----------
    frequencies : ndarray [experts of all layers]
        The share of tokens that choose an expert, in the order of `ExpertChoices.ranked`.
    locality : float
        1 if a text's tokens have no more in common than those of different ones.
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
        found = float(np.mean((self._counted - self._alike) ** 2))
        self._set(0.0)
        for _ in range(_ROUNDS):
            independent = texts * max(tokens / texts, 1.0) ** self.locality
            by_chance = self._alike * (1 - self._alike) / independent
            self._set(max(0.0, 1 - by_chance / found) if found > 0 else 0.0)

    def _set(self, weight: float) -> None:
        """Take frequencies that are those of the counts by this weight, and the locality that goes
        with them."""
        self.frequencies = weight * self._counted + (1 - weight) * self._alike
        self.locality = 1.0
        if self._length >= 2:
            alike = _inverse(self.touched, self._of_text)
            self.locality = min(max(math.log(max(alike, 1.0)) / math.log(self._length),
                                    _LEAST_LOCALITY), 1.0)

    def independent(self, tokens: float) -> float:
        """The independent tokens that choose as many experts as so many of a text."""
        return max(tokens, 0.0) ** self.locality

    def touched(self, tokens: float, first: float = 0.0, last: float = 1.0) -> float:
        """The experts of a mean layer that so many independent tokens choose, as expected.

        An expert that a token chooses with probability p is chosen by any of n tokens with
        probability ``1 - (1 - p) ** n``.

        Parameters
        ----------
        tokens : float
        first, last : float
            Of all experts by frequency, only those from the share `first` on, up to the share
            `last`: 0 and 1 are all.
        """
        chances = 1 - (1 - np.minimum(self.frequencies, 1.0)) ** tokens
        if (first, last) == (0.0, 1.0):
            return float(chances.sum()) / self._layers
        sums = np.concatenate(([0.0], np.cumsum(chances)))
        places = np.clip((first, last), 0, 1) * len(chances)
        low, high = np.interp(places, np.arange(len(sums)), sums)
        return max(0.0, float(high - low)) / self._layers

    def missed(self, sequences: float, tokens: float, first: float, kept: float) -> float:
        """Experts of a mean layer that a forward pass has to bring.

        It has so many tokens of each of so many sequences: one, with which texts go on, or new
        prompts. `kept` experts a layer are at hand, the ones used last of those from the share
        `first` on, of which alone this speaks: the working set (Denning, 1968) of the passes, or
        texts, that touch as many.
        """
        new = sequences * self.independent(tokens)
        if kept <= 0:
            return self.touched(new, first)
        if self.touched(_MOST_TOKENS, first) <= kept:
            return 0.0
        experts = len(self.frequencies) / self._layers
        by_frequency = self.touched(new, min(first + kept / experts, 1.0))
        held = _inverse(lambda many: self.touched(many, first), kept)
        after = held + new
        if tokens <= 1:
            passes = (held / sequences) ** (1 / self.locality)
            after = sequences * (passes + 1) ** self.locality
        return min(by_frequency, max(0.0, self.touched(after, first) - kept))


@lru_cache(maxsize=16)
def expert_use(choices: ExpertChoices) -> ExpertUse:
    """The model of these choices."""
    return ExpertUse(choices)


def _inverse(touched: Callable[[float], float], experts: float) -> float:
    """The independent tokens that touch so many experts; `touched` grows with them."""
    low, high = 0.0, 1.0
    while touched(high) < experts and high < _MOST_TOKENS:
        low, high = high, 4 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if touched(middle) < experts else (low, middle)
    return high


# A run whose memory is planned: what its bytes follow from, and sizes of its parts. No torch.


@dataclass(frozen=True)
class PlannedRun:
    """All that the bytes of a run follow from: the parameters of `memory_plan.memory_plan`."""

    model: ModelConfig
    policy: Policy
    workload: Workload
    itemsize: int
    has_gpu: bool
    writes_weights: bool
    cache: CacheOptions
    weights: WeightOptions = WeightOptions()
    stage: Stage | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        h2o = windowed(self.cache.h2o, self.model.attention)
        if h2o != self.cache.h2o:
            object.__setattr__(self, "cache", replace(self.cache, h2o=h2o))

    def of_stage(self, stage: Stage, groups: int) -> PlannedRun:
        """The part of one rank of a pipeline, which cuts batches into so many groups: its layers
        alone, and embedding or head if it has them."""
        choices = self.policy.expert_choices
        policy = replace(self.policy, expert_choices=choices and choices.part(
            stage.first, stage.last))
        return replace(self, stage=stage, policy=policy,
                       weights=self.weights.part(stage.first, stage.last),
                       groups=min(groups, self.workload.num_gpu_batches),
                       model=self.model.part(stage.first, stage.last),
                       cache=replace(self.cache, h2o=stage.h2o(self.cache.h2o)))

    @property
    def is_first_stage(self) -> bool:
        """True if it begins forward passes."""
        return self.stage is None or self.stage.is_first_stage

    @property
    def is_last_stage(self) -> bool:
        """True if it ends forward passes."""
        return self.stage is None or self.stage.is_last_stage

    @property
    def sequences(self) -> int:
        """Sequences of a block."""
        return self.workload.gpu_batch_size * self.workload.num_gpu_batches

    @property
    def expert_bytes(self) -> int:
        """Bytes at rest of an expert; 0 where there are none."""
        experts = self.model.experts
        if experts is None:
            return 0
        return part_bytes(self.weights, self.model.expert_shapes(), self.itemsize)

    @property
    def num_experts(self) -> int:
        """Experts of all layers."""
        experts = self.model.experts
        return 0 if experts is None else self.model.expert_layers * experts.count

    @property
    def weight_placements(self) -> tuple[Placement, Placement]:
        """The placements of what every token needs, and of the experts."""
        _, others = head_and_total_bytes(self)
        return place_experts(others, self.num_experts * self.expert_bytes, self.policy.weights,
                             self.policy.experts)

    def touched(self, sequences: float, tokens: float, first: float = 0.0, last: float = 1.0
                ) -> float:
        """The experts of a layer that so many tokens of each of so many sequences choose together,
        as expected: those between two shares of all experts, the ones that are chosen most often
        first."""
        choices = self.policy.expert_choices
        if choices is not None:
            use = expert_use(choices)
            return use.touched(sequences * use.independent(tokens), first, last)
        return max(0.0, last - first) * self.model.experts.touched(sequences * tokens)

    def missed(self, sequences: float, tokens: float) -> float:
        """The share of those experts, of the ones that rest away from compute memory, that slots do
        not have."""
        every, choices = max(self.num_experts, 1), self.policy.expert_choices
        kept = self.model.experts.kept(sequences * tokens, self.offloaded_experts,
                                       self.expert_slots)
        if choices is None:  # slots have some of those that are chosen alike often
            return 1 - kept / max(self.offloaded_experts, kept, 1)
        first = 1 - self.offloaded_experts / every
        touched = self.touched(sequences, tokens, first)
        missed = expert_use(choices).missed(sequences, tokens, first,
                                            kept / max(self.model.expert_layers, 1))
        return missed / touched if touched > 0 else 1.0

    @property
    def offloaded_experts(self) -> float:
        """Experts, of all layers, that have to be brought to compute memory."""
        _, cpu, disk = self.weight_placements[1].fractions()
        brought = self.has_gpu and not self.policy.cpu_expert_compute
        return self.num_experts * (disk + (cpu if brought else 0))

    @property
    def computes_experts_on_host(self) -> bool:
        """True if experts in host memory are used there, beside a GPU."""
        return self.has_gpu and self.model.experts is not None and self.policy.cpu_expert_compute

    @property
    def expert_slots(self) -> int:
        """Experts that fast memory has room for beside those that rest in it."""
        experts = self.model.experts
        if experts is None:
            return 0
        return experts.slots(self.sequences, math.ceil(self.offloaded_experts),
                             self.policy.expert_slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: of three matrices, which may lie anywhere in a page at both ends."""
        if self.model.experts is None:
            return 0
        largest = part_bytes(self.weights.widest, self.model.expert_shapes(), self.itemsize)
        return largest + 6 * mmap.PAGESIZE

    @property
    def shards_weights(self) -> bool:
        """True if weights that are on disk come in chunks."""
        mixture = self.model.experts is not None
        return self.policy.shards_weights(has_gpu=self.has_gpu, mixture=mixture)

    @property
    def pass_rows(self) -> int:
        """Tokens of the longest prompt that go through the network together."""
        prompt = self.workload.prompt_len
        return min(prompt, self.policy.prefill_chunk or prompt)

    @property
    def passes(self) -> int:
        """Forward passes of the longest prompt."""
        return math.ceil(self.workload.prompt_len / self.pass_rows)

    @property
    def group_batches(self) -> float:
        """GPU batches that share a load of weights, a mean over groups."""
        return self.workload.num_gpu_batches / self.groups

    @property
    def chunk_rows(self) -> int:
        """Rows of a prefill that go through a layer together, if no prompt is longer."""
        return CHUNK_ROWS["cuda" if self.has_gpu else "cpu"]

    @property
    def gathers_prompts(self) -> bool:
        """True if prompts come in chunks to a cache that cannot hold them as they are."""
        chunks = self.pass_rows < self.workload.prompt_len
        return chunks and not (self.cache.plain or self.cache.simulated or self.evicts_chunks)

    @property
    def evicts_chunks(self) -> bool:
        """True if prompts come in chunks, each of which is evicted from before the next."""
        chunks = self.pass_rows < self.workload.prompt_len
        return chunks and self.cache.evicts_chunks

    @property
    def captures_layers(self) -> bool:
        """True if decode steps are bound in layers whose weights are in compute memory
        (`engine.captured_step`); of 16 bits, as if they were bfloat16."""
        whole = not self.policy.sep_layer or self.model.experts is not None
        return (whole and not self.has_gpu and self.itemsize == 2
                and self.policy.activations.gpu == 100)

    @property
    def recalls_from_disk(self) -> bool:
        """True if decode steps fetch of a cache on disk what they choose."""
        return self.policy.fetch_chosen and not self.cache.simulated and not self.has_gpu

    @property
    def recalls_in_place(self) -> bool:
        """True if a GPU reads of a cache in host memory what decode steps choose, where it lies."""
        recalls = self.cache.recalls and not self.cache.simulated
        return self.has_gpu and recalls and not self.attends_on_host

    @property
    def has_hot_set(self) -> bool:
        """True if a GPU's memory holds tokens of a cache in host memory that is recalled."""
        return self.policy.fetch_chosen and self.recalls_in_place

    @property
    def attends_on_host(self) -> bool:
        """True if the cache in host memory is used there, beside a GPU."""
        return self.has_gpu and self.policy.cpu_cache_compute

    @property
    def evicting_layers(self) -> list[int]:
        """The decoder layers that ever drop a token."""
        return [layer for layer in range(self.model.num_layers)
                if budget(self.cache.h2o, layer, self.workload.prompt_len) is not None]


def part_bytes(options: WeightOptions, part: PartShapes, itemsize: int) -> int:
    """Bytes at rest of a part of a model; `itemsize`: bytes of an element in the run's dtype."""
    matrices = sum(options.matrix_bytes(shape, itemsize) for shape in part.matrices)
    return matrices + part.vectors * itemsize


def kv_entry_bytes(options: CacheOptions, model: ModelConfig, itemsize: int) -> int:
    """Bytes at rest of one token's key and value in one layer, all KV heads together."""
    # A simulation is exact: it keeps float32.
    record = 2 * model.head_dim * (4 if options.simulated else itemsize)
    layout = options.layout(model.head_dim)
    if layout is not None:
        record = layout.kinds * layout.width
    return model.num_kv_heads * record


def layer_slots(options: CacheOptions, model: ModelConfig, workload: Workload) -> tuple[int, ...]:
    """The most slots that a sequence uses in each decoder layer."""
    # The last token that is generated is never cached.
    return tuple(slots(options.h2o, layer, workload.prompt_len, workload.gen_len - 1)
                 for layer in range(model.num_layers))


def head_and_total_bytes(run: PlannedRun) -> tuple[int, int]:
    """Bytes of the head's matrix, a tied one too, and of all weights: those of the run's rank."""
    model = run.model
    at_rest = partial(part_bytes, run.weights, itemsize=run.itemsize)
    total = model.over_layers(at_rest)
    if run.is_first_stage:
        total += at_rest(model.embed_shapes())
    if not run.is_last_stage:
        return 0, total
    head = run.weights.matrix_bytes((model.vocab_size, model.embed_dim), run.itemsize)
    total += at_rest(model.head_shapes())
    if model.tie_word_embeddings and not run.is_first_stage:
        total += head  # the table of another rank
    return head, total
