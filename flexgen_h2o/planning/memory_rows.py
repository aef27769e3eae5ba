"""The rows of the memory plan: bytes of each kind of data on each tier. No torch.

Scratch memory counts once, for the unit that needs the most.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from flexgen_h2o.config.cache_layout import IndexLayout, PageLayout
from flexgen_h2o.config.limits import (
    BLOCK_BYTES,
    CACHE_BUFFERS,
    EXPERT_ROUND,
    HIDDEN_BUFFERS,
    LOGIT_ROWS,
    MATMUL_DEPTH,
    MATMUL_ROWS,
    MIN_TASKS,
    PART_SLOTS,
    QUERY_LANES,
    ROW_BLOCK,
    SHARD_BUFFERS,
    SLOT_TILE,
    STARTED_BATCHES,
    TILED_INPUTS,
    TILED_OUTPUTS,
    TILED_ROWS,
    UNPACKED_BYTES,
    WEIGHT_BUFFERS,
    WRITE_BACK_TOKENS,
)
from flexgen_h2o.config.placement import TIERS, compute_tiers, place_first, shard_rows, split
from flexgen_h2o.h2o.budget import num_hot_slots, num_selected
from flexgen_h2o.planning.planned_run import (
    PlannedRun,
    bytes_at_rest,
    head_and_total_bytes,
    kv_entry_bytes,
    layer_slots,
)

RESERVE = 128 << 20
"""Bytes for thread stacks, workspaces of libraries and the allocators' slack."""

TUNING = 256 << 20
"""Bytes of a GPU that Triton's autotuner writes before each timed launch to flush caches."""


def scratch_bytes(run: PlannedRun) -> int:
    """Return the scratch memory of the widest step: a chunk of prefill, or the logits."""
    model, load = run.model, run.workload
    # Chunks end between sequences: a longer sequence is its own chunk.
    chunk = max(run.chunk_rows, run.pass_rows)
    rows = min(load.gpu_batch_size * run.pass_rows, chunk)
    # Attention also allocates its output and copies of its inputs.
    copies = rows * max(2 * part.model.q_size + 2 * part.model.kv_size for part in run.cache_runs)
    layer = (model.scratch_elements(rows) + copies) * run.itemsize
    # Logits in the run's dtype, and up to three float32 copies while sampling.
    logit_rows = min(load.gpu_batch_size + run.policy.draft_tokens, LOGIT_ROWS)
    logits = logit_rows * model.vocab_size * (run.itemsize + 3 * 4)
    logits *= run.is_last_stage
    kernels = max(*map(_attention_scratch, run.cache_runs), _migrated_bytes(run))
    kernels += _matmul_scratch(run)
    return layer + logits + kernels + moe_scratch(run) + RESERVE + TUNING * run.has_gpu


def moe_scratch(run: PlannedRun) -> int:
    """Return the scratch memory of experts: inputs and sums of a block, and one expert's own.

    For batch invariance a block has all outputs in place of sums.
    """
    model, experts = run.model, run.model.experts
    if experts is None:
        return 0
    rows = run.sequences * run.pass_rows
    chunk = min(rows, ROW_BLOCK)
    sums = 8 if run.itemsize == 4 else 4  # float32 runs accumulate in float64
    hidden, wide = model.hidden_size, max(experts.ffn_size, experts.shared_ffn_size)
    # A token's experts: index, weight, and their order.
    routing = rows * (experts.per_token * 4 * 8 + experts.count * 3 * 4)
    parts = 3 if experts.gate_limit else 2
    inner = chunk * ((parts * wide + 3 * hidden) * run.itemsize + hidden * (2 * sums + 4))
    # Inputs and outputs of the experts that one call computes together.
    together = min(rows * experts.per_token, EXPERT_ROUND) * 2 * (wide + hidden) * run.itemsize
    inner = max(inner, together)
    inputs = (2 if experts.scale_inputs else 1) * run.itemsize
    outputs = experts.per_token * run.itemsize if run.batch_invariant else sums
    return rows * hidden * (inputs + outputs) + routing + inner


def _migrated_bytes(run: PlannedRun) -> int:
    """Return the bytes of continued sequences' cache, which is copied to the next block."""
    load = run.workload
    sequences = load.gpu_batch_size * load.num_gpu_batches
    carried = sequences - math.ceil(run.policy.refill_share * sequences)
    return carried * max(run.state_bytes, *(
        max(layer_slots(part.cache, part.model, load), default=0)
        * kv_entry_bytes(part.cache, part.model, run.itemsize) for part in run.cache_runs))


def _attention_scratch(run: PlannedRun) -> int:
    """Return the scratch memory of attention: weights, and accumulators that tasks share."""
    model, load, cache = run.model, run.workload, run.cache
    token = 2 * model.kv_size * 4  # key and value in float32
    if cache.simulated:  # takes all queries at once; twice: before and after the softmax
        logits = run.pass_rows * model.num_heads * load.prompt_len * 4
        return load.prompt_len * token + 2 * logits
    threads = 0 if run.has_gpu else os.cpu_count() or 1
    num_slots = max(layer_slots(cache, model, load), default=0)
    tokens = load.prompt_len  # that a query attends to
    if run.evicts_chunks:
        tokens = num_slots + run.pass_rows
    # All weights of some queries, or with AMX all keys and values of a head, in tiles of 16 bits.
    packed = -(-model.head_dim // 32) * 32
    lanes = threads * (max(QUERY_LANES, packed) * tokens + QUERY_LANES * (8 * model.head_dim + 256))
    tasks = MIN_TASKS + load.gpu_batch_size * model.num_heads
    # A score of each token per task, or on a GPU a normalizer of each query head.
    prefill = 4 * (lanes + tasks * tokens)
    if not cache.is_unquantized_full or run.pass_rows < load.prompt_len:
        # Chunked prompts and rotated copies; with eviction also the kept tokens, twice.
        prefill += tokens * token * (4 if run.evicts_chunks else 1)
    if model.latent is not None:  # logits of a block, masked, and as weights; keys in float32
        prefill += 4 * BLOCK_BYTES + tokens * token
    # Weights of all slots, and an output of each part of them.
    max_slots = num_slots + SLOT_TILE
    decode = 4 * tasks * (max_slots + (2 + max_slots // PART_SLOTS) * model.head_dim)
    if cache.recalls and run.has_gpu:  # logits of the query heads, their weights, selected keys
        numbers = 4 * (model.num_heads + 2 * model.num_kv_heads)
        decode += load.gpu_batch_size * num_slots * numbers
    return max(prefill, decode, _sparse_attention_scratch(run) if cache.attn_sparsity < 1 else 0)


def _sparse_attention_scratch(run: PlannedRun) -> int:
    """Return the scratch memory of a decode step with sparse attention, in plain PyTorch."""
    model, load, cache = run.model, run.workload, run.cache
    # Keys, and then values, in float32; twice more for quantized values and their dequantization.
    vector = 4 * model.kv_size
    unpacked = vector * (1 if cache.bits == 16 else 3)
    # Selected values also as stored, and copied next to the new token's.
    record = kv_entry_bytes(cache, model, run.itemsize) // 2
    selected = cache.attn_sparsity * (record + max(unpacked, 2 * vector))
    # Logits, masked, with the new token's, and as weights; sorting takes 64 bits twice.
    weights = 4 * 4 * model.num_heads + 4 * 8 * model.num_kv_heads
    tokens = load.gpu_batch_size * max(layer_slots(cache, model, load), default=0)
    return int(tokens * (weights + max(unpacked, selected)))


def _matmul_scratch(run: PlannedRun) -> int:
    """Return the scratch memory of quantized matmuls, or of 16-bit ones on a CPU.

    On a CPU it is a panel of rows in float32, and accumulators and weight tiles of each thread. On
    a GPU it is the unpacked weights.
    """
    model, options = run.model, run.weights
    if run.has_gpu:
        return UNPACKED_BYTES if options.quantizes else 0
    if not options.quantizes and run.itemsize != 2:
        return 0  # PyTorch's
    units = [model.embed_shapes(), *map(model.layer_shapes, model.layer_kinds), model.head_shapes()]
    if model.experts is not None:
        units.append(model.expert_shapes())
    widest = max(inputs for unit in units for _, inputs in unit.matrices)
    filled = max(-(-widest // size) * size for size in (*options.groups, MATMUL_DEPTH))
    least = min(options.groups)
    panel = MATMUL_ROWS * (filled + filled // least)
    thread = TILED_OUTPUTS * (TILED_ROWS + max(math.lcm(least, 32), TILED_INPUTS) // 2)
    return 4 * (panel + (os.cpu_count() or 1) * thread)


WEIGHT_ROWS = ("weights", "embeddings", "weight buffers", "experts", "expert slots",
               "draft model")
"""Rows that are allocated once the model is loaded."""


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind of data on each tier."""

    name: str
    gpu: int = 0
    cpu: int = 0
    disk: int = 0


def plan_rows(run: PlannedRun) -> tuple[MemoryRow, ...]:
    """Return the memory plan of a run. Without a GPU the gpu tier is counted as host memory."""
    draft = run.draft_run
    scratch = max(scratch_bytes(run), 0 if draft is None else scratch_bytes(draft))
    rows = (*_weight_rows(run), *_cache_rows(run), *_state_rows(run),
            *_activation_rows(run),
            *(() if draft is None else _draft_rows(run, draft)), MemoryRow("workspace", scratch))
    if run.has_gpu:
        return rows
    return tuple(MemoryRow(row.name, 0, row.gpu + row.cpu, row.disk) for row in rows)


def _draft_rows(run: PlannedRun, draft: PlannedRun) -> Iterator[MemoryRow]:
    """Yield the weights of a draft model, and the caches and hidden states of its texts."""
    weights, is_mtp = _weight_rows(draft), run.draft is not None and run.draft.weights is None
    if is_mtp and run.weight_placements[0].disk == 0:  # the run's own are in memory
        weights = (row for row in weights if row.name != "embeddings")
    # A layer for multi-token prediction keeps as many hidden states of the run's model.
    caches = chain(_cache_rows(draft), *[_activation_rows(draft) for _ in range(1 + is_mtp)])
    for name, rows in (("draft model", weights), ("draft cache", caches)):
        yield MemoryRow(name, sum(row.gpu + row.cpu for row in rows))


def _weight_rows(run: PlannedRun) -> Iterator[MemoryRow]:
    """Yield the rows of decoder layers, embeddings with head, and buffers for loaded weights."""
    model = run.model
    at_rest = partial(bytes_at_rest, run.weights, itemsize=run.itemsize)
    layers = model.over_layers(at_rest)
    head, total = head_and_total_bytes(run)
    others, _ = run.weight_placements
    head_tier, placement = place_first(head, total, others, compute_tiers(run.has_gpu))
    fractions = placement.fractions()
    vectors = model.over_layers(lambda layer: layer.vector_bytes(run.itemsize))
    for name, nbytes, head_bytes, resident_bytes in (
            ("weights", layers, 0, vectors),
            ("embeddings", total - layers, head if head_tier else 0, 0)):
        gpu, cpu, disk = (int((nbytes - head_bytes) * fraction) + head_bytes * (tier == head_tier)
                          for tier, fraction in zip(TIERS, fractions, strict=True))
        if run.shards_weights and placement.disk > 0:
            # Vectors stay in memory, and matrices are written whole.
            gpu, disk = gpu + int(resident_bytes * fractions[2]), nbytes - head_bytes
        yield MemoryRow(name, gpu, cpu, disk if run.writes_weights else 0)
    streamed = fractions[2] + (fractions[1] if run.has_gpu else 0)
    buffers, options = 0, run.weights.with_largest_layouts
    if run.shards_weights and streamed > 0:
        buffers = SHARD_BUFFERS * _shard_bytes(run, head=not head_tier)
    elif streamed > 0:
        # Whole tensors are placed: a layer may hold one more of them than its share.
        tensor = max(options.matrix_bytes(shape, run.itemsize) for layer in model.layer_kinds
                     for shape in model.layer_shapes(layer).matrices)
        halves = run.policy.sep_layer or model.experts is not None
        units = (model.half_shapes(layer) if halves else (model.layer_shapes(layer),)
                 for layer in model.layer_kinds)
        largest = max(bytes_at_rest(options, unit, run.itemsize)
                      for unit in chain.from_iterable(units))
        buffers = WEIGHT_BUFFERS * max(min(largest, int(largest * streamed) + tensor),
                                       0 if head_tier else head)
    yield MemoryRow("weight buffers", buffers, buffers if run.has_gpu else 0)
    if model.experts is not None:
        yield from _expert_rows(run)


def _shard_bytes(run: PlannedRun, *, head: bool) -> int:
    """Return the bytes of a row shard buffer for a layer, and with `head` for the head's matrix."""
    model, options = run.model, run.weights.with_largest_layouts
    units = list(map(model.layer_shapes, model.layer_kinds))
    layer = max(bytes_at_rest(options, unit, run.itemsize) for unit in units)
    shapes = {shape for unit in units for shape in unit.matrices}
    if head and run.is_last_stage:
        shapes.add((model.vocab_size, model.embed_dim))
    largest = 0
    for outputs, inputs in shapes:
        rows = shard_rows(outputs, options.matrix_bytes((outputs, inputs), run.itemsize), layer)
        largest = max(largest, options.matrix_bytes((rows, inputs), run.itemsize))
    # A shard may begin and end anywhere in a page.
    return -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE


def _expert_rows(run: PlannedRun) -> Iterator[MemoryRow]:
    """Yield the experts as they are stored, and the slots that experts are loaded into."""
    placement, _ = run.stored_experts
    gpu, cpu, disk = (int(run.num_experts * run.expert_bytes * share)
                      for share in placement.fractions())
    yield MemoryRow("experts", gpu, cpu, disk if run.writes_weights else 0)
    slots = run.expert_slots * run.slot_bytes
    host = slots if run.has_gpu and placement.disk > 0 else 0
    if run.computes_experts_on_host:  # activations to the host and back, and one expert's own
        host += moe_scratch(run)
    yield MemoryRow("expert slots", slots, host)


def _cache_rows(run: PlannedRun) -> Iterable[MemoryRow]:
    """Return the rows of the KV cache, summed over its groups of layers."""
    rows: dict[str, MemoryRow] = {}
    for row in chain.from_iterable(map(_group_rows, run.cache_runs)):
        total = rows.get(row.name, MemoryRow(row.name))
        rows[row.name] = MemoryRow(row.name, total.gpu + row.gpu, total.cpu + row.cpu,
                                   total.disk + row.disk)
    return rows.values()


def _group_rows(run: PlannedRun) -> Iterator[MemoryRow]:
    """Yield the KV cache by sequences, its staging buffers, gathered prompts and eviction state."""
    model, load, options = run.model, run.workload, run.cache
    num_slots = layer_slots(options, model, load)
    record = kv_entry_bytes(options, model, run.itemsize)
    placed = split(load.gpu_batch_size, run.policy.cache)
    # A simulation keeps its full cache in compute memory.
    cached = (load.gpu_batch_size, 0, 0) if options.simulated else placed
    token = record * sum(num_slots) * load.num_gpu_batches
    gpu, cpu, disk = (count * token for count in cached)
    if run.recalls_from_disk:
        fast = _paged_cache(run, num_slots, record)
        disk, in_memory = cached[2] * fast.disk, cached[2] * fast.cpu
    yield MemoryRow("cache", gpu, cpu, disk)
    if run.recalls_from_disk:
        yield MemoryRow("hot set", 0, in_memory)
    if run.has_hot_set:
        yield MemoryRow("hot set", placed[1] * _hot_set_bytes(run, num_slots, record))
    device_staging, host_staging = _staging_bytes(run, cached, record=record,
                                                  max_tokens=max(num_slots, default=0),
                                                  staged_host=not run.attends_on_host)
    if run.attends_on_host:
        # Buffers for queries, keys and values sent to the host, and for its results.
        outputs = model.num_heads * model.value_dim
        rows = cached[1] * (model.q_size + outputs + 2 * model.kv_size) * run.itemsize
        device_staging, host_staging = device_staging + STARTED_BATCHES * rows, host_staging + rows
    if run.gathers_prompts:
        plain = model.cached_size * run.itemsize
        staging = _staging_bytes(run, placed, record=plain, max_tokens=load.prompt_len)
        device_staging, host_staging = device_staging + staging[0], host_staging + staging[1]
    yield MemoryRow("cache buffers", device_staging, host_staging)
    yield _prompt_cache_row(run, placed)
    if options.recalls:
        yield _index_row(run, num_slots, on_host=cached[1] if run.attends_on_host else 0)
    yield _bookkeeping_row(run, num_slots, on_host=cached[1] if run.attends_on_host else 0)


def _state_rows(run: PlannedRun) -> Iterator[MemoryRow]:
    """Yield the states of recurrent layers, if there are any, and their staging buffers."""
    if run.model.recurrent is None:
        return
    load, layers = run.workload, sum(run.model.recurrent_layers)
    placed = split(load.gpu_batch_size, run.policy.cache)
    yield MemoryRow("recurrent states", *(
        count * layers * load.num_gpu_batches * run.state_bytes for count in placed))
    fetched = placed[2] + (placed[1] if run.has_gpu else 0)
    staging = CACHE_BUFFERS * fetched * run.state_bytes
    yield MemoryRow("state buffers", staging, staging if run.has_gpu else 0)


def _paged_cache(run: PlannedRun, num_slots: Sequence[int], record: int) -> MemoryRow:
    """Return the bytes of one sequence's cache on disk, in pages, and of its part in host memory.

    Host memory has the hot set, the newest tokens, the slot map and each token's score.
    """
    host, disk, heads = 0, 0, run.model.num_kv_heads
    for layer, slots in enumerate(num_slots):
        fast = num_hot_slots(run.cache.h2o, layer, slots, run.policy.hot_set)
        if not fast:
            disk += record * slots
            continue
        layout = PageLayout(heads, record // heads, slots)
        disk += layout.sequence_bytes
        host += record * (fast + layout.newest) + heads * 4 * (2 * slots + fast)
    batches = run.workload.num_gpu_batches
    return MemoryRow("hot set", 0, batches * host, batches * disk)


def _hot_set_bytes(run: PlannedRun, num_slots: Sequence[int], record: int) -> int:
    """Return the bytes on a GPU of one sequence whose cache in host memory is recalled.

    They are the hot set, the newest token, the slot map, each token's score, and scratch to sort
    them.
    """
    nbytes, heads = 0, run.model.num_kv_heads
    for layer, slots in enumerate(num_slots):
        fast = num_hot_slots(run.cache.h2o, layer, slots, run.policy.hot_set)
        if fast:
            nbytes += record * (fast + 1) + heads * 4 * (2 * slots + 2 * fast)
    return run.workload.num_gpu_batches * nbytes


def _staging_bytes(run: PlannedRun, counts: tuple[int, int, int], *, record: int, max_tokens: int,
                   staged_host: bool = True) -> tuple[int, int]:
    """Return the bytes in compute and host memory to stage a cache on other tiers.

    `counts` are a batch's sequences on (gpu, cpu, disk), `max_tokens` the slots of the largest
    layer, `record` the bytes of a slot. With `staged_host`, the cache in host memory beside a GPU
    is staged too.
    """
    _, cpu, disk = counts
    model = run.model
    fetched = disk + (cpu if run.has_gpu and staged_host else 0)
    staging = CACHE_BUFFERS * fetched * max_tokens * record
    # A write-back log holds the newest records of each layer, and the slot of each KV head.
    log = WRITE_BACK_TOKENS * model.num_layers * (record + 8 * model.num_kv_heads)
    logs = disk * run.workload.num_gpu_batches * log
    return staging, logs + (staging if run.has_gpu else 0)


def _prompt_cache_row(run: PlannedRun, placed: tuple[int, int, int]) -> MemoryRow:
    """Return the row of whole prompts and their scores, until they are cut or quantized."""
    if not run.gathers_prompts:
        return MemoryRow("prompt cache")
    model, load, h2o = run.model, run.workload, run.cache.h2o
    prompts = load.num_gpu_batches * load.prompt_len
    gpu, cpu, disk = (count * prompts * model.kv_bytes_per_token(run.itemsize) for count in placed)
    if run.cache.evicts and h2o.scored:
        scores = model.num_kv_heads * 4 * len(run.evicting_layers)
        gpu += load.gpu_batch_size * prompts * scores
    return MemoryRow("prompt cache", gpu, cpu, disk)


def _bookkeeping_row(run: PlannedRun, num_slots: Sequence[int], *, on_host: int) -> MemoryRow:
    """Return the row of each slot's score and position, and of its rank with rolling positions.

    They are per KV head, where attention runs: in host memory for `on_host` sequences of a batch.
    `num_slots` are the slots of each layer. With speculation there is a copy for each drafted token
    of the batch, with the entry that it overwrites.
    """
    model, load, layers = run.model, run.workload, run.evicting_layers
    rolls = bool(layers) and run.cache.h2o.positions == "rolling"
    slot = model.num_kv_heads * (12 if rolls else 8)
    slots, drafts = sum(num_slots[layer] for layer in layers), run.policy.draft_tokens
    overwritten = drafts * len(layers) * kv_entry_bytes(run.cache, model, run.itemsize)
    sequence = ((1 + drafts) * slot * slots + overwritten) * load.num_gpu_batches
    return MemoryRow("cache bookkeeping", (load.gpu_batch_size - on_host) * sequence,
                     on_host * sequence)


def _index_row(run: PlannedRun, num_slots: Sequence[int], *, on_host: int) -> MemoryRow:
    """Return the row of recall's key index; parameters as in `_bookkeeping_row`."""
    model, load, h2o = run.model, run.workload, run.cache.h2o
    if run.cache.simulated:
        return MemoryRow("index")
    layout = IndexLayout(model.head_dim, h2o.index_bits)
    sequence = load.num_gpu_batches * model.num_kv_heads * sum(
        layout.nbytes(slots) for layer, slots in enumerate(num_slots)
        if num_selected(h2o, layer, load.prompt_len) is not None)
    return MemoryRow("index", (load.gpu_batch_size - on_host) * sequence, on_host * sequence)


def _activation_rows(run: PlannedRun) -> Iterator[MemoryRow]:
    """Yield the hidden states of a block between layers, their staging and message buffers."""
    load, placement = run.workload, run.policy.activations
    rows = load.gpu_batch_size * run.pass_rows
    batch = rows * run.model.hidden_size * run.itemsize
    total = batch * load.num_gpu_batches
    yield MemoryRow("activations", *(int(total * share) for share in placement.fractions()))
    streamed = placement.disk > 0 or (run.has_gpu and placement.cpu > 0)
    staging = HIDDEN_BUFFERS * batch if streamed else 0
    yield MemoryRow("activation buffers", staging, staging if placement.disk > 0 else 0)
    if run.stage is not None or run.groups > 1:
        # A group's batches to the next rank, and two from the previous one. Groups without a
        # stage belong to a search for all ranks, which plans for one in the middle.
        stage = run.stage
        sent = 0 if stage and stage.is_last_stage else math.ceil(load.num_gpu_batches / run.groups)
        received = 0 if stage and stage.is_first_stage else 2
        yield MemoryRow("message buffers", batch * (sent + received))
