"""The temporaries of a run, of which the memory plan counts those of the widest step. No torch."""

from __future__ import annotations

import math
import os

from flexgen_h2o.config.limits import (
    EXPERT_ROUND,
    FEWEST_TASKS,
    LOGIT_ROWS,
    PRODUCT_DEPTH,
    PRODUCT_ROWS,
    QUERY_LANES,
    ROW_BLOCK,
    SLOT_TILE,
    TILED_INPUTS,
    TILED_OUTPUTS,
    TILED_ROWS,
    UNPACKED_BYTES,
)
from flexgen_h2o.planning.planned_run import PlannedRun, layer_slots, record_bytes

RESERVE = 128 << 20
"""Bytes for thread stacks, the libraries' own workspaces and the allocators' slack."""

TUNING = 256 << 20
"""Bytes of a GPU that Triton's tuner writes before each launch that it times, to empty caches."""


def workspace_bytes(run: PlannedRun) -> int:
    """Temporaries of the widest step: a chunk of prefill in a layer, or the logits."""
    model, load = run.model, run.workload
    # Chunks are cut between sequences: one that is longer is a chunk of its own.
    chunk = max(run.chunk_rows, run.pass_rows)
    rows = min(load.gpu_batch_size * run.pass_rows, chunk)
    # Beside the layer's own scratch, attention makes its output and copies of what it reads.
    attention = rows * (2 * model.q_size + 2 * model.kv_size)
    layer = (model.scratch_elements(rows) + attention) * run.itemsize
    # Logits in the run's dtype, and up to three float32 copies while sampling.
    logits = min(load.gpu_batch_size, LOGIT_ROWS) * model.vocab_size * (run.itemsize + 3 * 4)
    logits *= run.heads
    own = max(_own_attention(run), _carried(run)) + _own_products(run) + mixture_bytes(run)
    return layer + logits + own + RESERVE + TUNING * run.has_gpu


def mixture_bytes(run: PlannedRun) -> int:
    """Inputs and sums of experts for all rows of a block, and the temporaries of one expert."""
    model, experts = run.model, run.model.experts
    if experts is None:
        return 0
    rows = run.sequences * run.pass_rows
    chunk = min(rows, ROW_BLOCK)
    sums = 8 if run.itemsize == 4 else 4  # float64 where float32 is computed in
    hidden, wide = model.hidden_size, max(experts.ffn_size, experts.shared_ffn_size)
    # A token's experts: number, share, and their order.
    chosen = rows * (experts.per_token * 4 * 8 + experts.count * 3 * 4)
    parts = 3 if experts.gate_limit else 2
    inner = chunk * ((parts * wide + 3 * hidden) * run.itemsize + hidden * (2 * sums + 4))
    # Inputs and outputs of the experts that one call computes together.
    together = min(rows * experts.per_token, EXPERT_ROUND) * 2 * (wide + hidden) * run.itemsize
    inner = max(inner, together)
    return rows * hidden * (run.itemsize + sums) + chosen + inner


def _carried(run: PlannedRun) -> int:
    """The copies of a layer's cache that sequences take with them into the next block."""
    load, options = run.workload, run.cache
    sequences = load.gpu_batch_size * load.num_gpu_batches
    carried = sequences - math.ceil(run.policy.refill_share * sequences)
    return carried * max(layer_slots(options, run.model, load)) * record_bytes(
        options, run.model, run.itemsize)


def _own_attention(run: PlannedRun) -> int:
    """Temporaries of attention: weights before they meet the values, and what tasks share."""
    model, load, cache = run.model, run.workload, run.cache
    token = 2 * model.kv_size * 4  # key and value in float32
    if cache.simulated:  # takes all queries at once; twice: before and after the softmax
        logits = run.pass_rows * model.num_heads * load.prompt_len * 4
        return load.prompt_len * token + 2 * logits
    threads = 0 if run.has_gpu else os.cpu_count() or 1
    held = max(layer_slots(cache, model, load))
    tokens = load.prompt_len  # that a query attends to
    if run.evicts_chunks:
        tokens = held + run.pass_rows
    # All weights of some queries, or with AMX all keys and values of a head, in tiles of 16 bits.
    packed = -(-model.head_dim // 32) * 32
    lanes = threads * (max(QUERY_LANES, packed) * tokens + QUERY_LANES * (8 * model.head_dim + 256))
    tasks = FEWEST_TASKS + load.gpu_batch_size * model.num_heads
    # A score of each token by task, or on a GPU a normaliser of each query head.
    prefill = 4 * (lanes + tasks * tokens)
    if not cache.plain or run.pass_rows < load.prompt_len:
        # Prompts in chunks, and rotated copies; with eviction also what stays, before and after.
        prefill += tokens * token * (4 if run.evicts_chunks else 1)
    most = held + SLOT_TILE
    decode = 4 * tasks * (most + 2 * model.head_dim)
    if cache.recalls and run.has_gpu:  # logits of the query heads, their weights, what is chosen
        numbers = 4 * (model.num_heads + 2 * model.num_kv_heads)
        decode += load.gpu_batch_size * held * numbers
    return max(prefill, decode, _sparse_attention(run) if cache.attn_sparsity < 1 else 0)


def _sparse_attention(run: PlannedRun) -> int:
    """Temporaries of a decode step with sparse attention, which plain PyTorch does."""
    model, load, cache = run.model, run.workload, run.cache
    # Keys, and then values, in float32; and twice again for codes and what they are scaled to.
    vector = 4 * model.kv_size
    unpacked = vector * (1 if cache.bits == 16 else 3)
    # Of the chosen values the records too, and a copy that has the new token's beside them.
    record = record_bytes(cache, model, run.itemsize) // 2
    chosen = cache.attn_sparsity * (record + max(unpacked, 2 * vector))
    # Logits, masked, with the new token's and as weights; what orders them has 64 bits, twice.
    weights = 4 * 4 * model.num_heads + 4 * 8 * model.num_kv_heads
    tokens = load.gpu_batch_size * max(layer_slots(cache, model, load))
    return int(tokens * (weights + max(unpacked, chosen)))


def _own_products(run: PlannedRun) -> int:
    """Temporaries of products with matrices that are quantized, or of 16 bits on a CPU: a panel of
    rows in float32, which is more than tiles take, and each thread's sums and weights in tiles,
    which are most; or what is unpacked."""
    model, options = run.model, run.weights
    if run.has_gpu:
        return UNPACKED_BYTES if options.quantizes else 0
    if not options.quantizes and run.itemsize != 2:
        return 0  # PyTorch's
    parts = [model.embed_shapes(), *map(model.layer_shapes, model.layer_kinds), model.head_shapes()]
    if model.experts is not None:
        parts.append(model.expert_shapes())
    widest = max(inputs for part in parts for _, inputs in part.matrices)
    filled = max(-(-widest // size) * size for size in (*options.groups, PRODUCT_DEPTH))
    least = min(options.groups)
    panel = PRODUCT_ROWS * (filled + filled // least)
    thread = TILED_OUTPUTS * (TILED_ROWS + max(math.lcm(least, 32), TILED_INPUTS) // 2)
    return 4 * (panel + (os.cpu_count() or 1) * thread)
