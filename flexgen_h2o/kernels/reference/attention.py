"""Specification of attention with eviction and of quantized caches, in plain PyTorch.

The package `kernels.reference` is the definition that tests compare every kernel with: slow,
obvious, exact. Everything is computed in float32; outputs have the inputs' dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flexgen_h2o.config.cache_layout import split_slots
from flexgen_h2o.config.layers import DEFAULT_VARIANT
from flexgen_h2o.config.limits import EMPTY
from flexgen_h2o.h2o.eviction import attention_weights
from flexgen_h2o.kernels.torch_ops import rotated

FLOAT16_MAX = torch.finfo(torch.float16).max

QUERIES = 256
"""Queries per block of `prefill_attention`, which keeps memory linear in the tokens."""


def prefill_attention(q, k, v, lengths, *, key_lengths=None, scores=None, decay=1.0,
                      variant=DEFAULT_VARIANT, sinks=None):
    """Compute causal attention of packed sequences, and add to the attention score of each key.

    The attention score of H2O (arXiv 2306.14048, section 4.1) is the sum of the attention weights
    that a key receives. With chunked prefill, the queries are the last tokens of a sequence and the
    keys are all tokens so far: query row r of n has position key_length - n + r, and attends to
    keys up to that position. Query head h belongs to KV head h // group. Scores do not depend on
    how a sequence is split into chunks.

    Parameters
    ----------
    q : Tensor [rows, heads, head_dim]
    k, v : Tensor [key_rows, kv_heads, head_dim]
        Rows of all sequences, concatenated; heads is a multiple of kv_heads. Any strides. Values
        may have fewer elements than keys.
    lengths : list of int
        Query rows of each sequence; their sum is rows.
    key_lengths : list of int, optional
        Keys of each sequence, at least its rows; their sum is key_rows. None: the same as
        `lengths`.
    scores : float32 Tensor [kv_heads, key_rows], optional
        Updated in place: multiplied by decay ** n, plus the sum over rows r and the query heads of
        the group of decay ** (n - 1 - r) times the attention weight.
    decay : float
        1 is the plain sum of H2O.
    variant : AttentionVariant
    sinks : Tensor [heads] or None
        Learned attention sinks, if `variant.sinks`: logits in the softmax's denominator.

    Returns
    -------
    Tensor [rows, heads, elements of a value]
    """
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    key_lengths = lengths if key_lengths is None else key_lengths
    all_scores = [None] * len(lengths) if scores is None else scores.split(key_lengths, dim=1)
    for sequence in zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), all_scores,
                        out.split(lengths), strict=True):
        _attend_sequence(*sequence, decay=decay, variant=variant, sinks=sinks)
    return out


def _attend_sequence(q, k, v, scores, out, *, decay, variant, sinks):
    """Compute `prefill_attention` of one sequence."""
    rows, tokens, kv_heads = len(q), len(k), k.shape[1]
    keys, values = k.float(), v.float()
    position = torch.arange(tokens, device=q.device)
    if sinks is not None:
        sinks = sinks.view(kv_heads, -1, 1, 1)
    if scores is not None:
        scores.mul_(decay**rows)
    for start in range(0, rows, QUERIES):
        query = torch.arange(start, min(start + QUERIES, rows), device=q.device)
        query_block = q[query].float().unflatten(1, (kv_heads, -1))
        products = torch.einsum("rkgd,tkd->kgrt", query_block, keys)
        query_position = (tokens - rows + query)[:, None]
        hidden = position > query_position
        if variant.window is not None:
            hidden |= position <= query_position - variant.window
        probabilities = attention_weights(products, hidden, dim=q.shape[-1], variant=variant,
                                          sinks=sinks)
        if scores is not None:
            weights = decay ** (rows - 1 - query).float()
            scores += torch.einsum("kgrt,r->kt", probabilities, weights)
        attended = torch.einsum("kgrt,tkd->rkgd", probabilities, values)
        out[query] = attended.flatten(1, 2).to(q.dtype)


def select_heavy_hitters(k, v, scores, *, cuts, slots, state, layout=None):
    """Cut prompts to their budgets: write the tokens that stay to slots and to the eviction state.

    `Eviction.select` of `state.eviction` chooses the tokens. They fill the first slots, in the
    order of their positions. Other slots are not written.

    Parameters
    ----------
    k, v : Tensor [rows, kv_heads, head_dim]
        Rows of all prompts, concatenated. Any strides. Values with fewer elements are the last
        elements of the keys, and are not stored.
    scores : float32 Tensor [kv_heads, rows] or None
        Attention score of every key. None: all 0, for cuts that do not depend on scores.
    cuts : sequence of Cut
        One per prompt; the sum of their lengths is rows.
    slots : Tensor [kinds, sequences, kv_heads, slots, width]
        Keys and values in k's dtype, or uint8 in the format of `layout`; written in place. Any
        strides, but contiguous in the last dimension.
    state : EvictionState
        State of the same sequences and slots; overwritten.
    layout : CacheLayout, optional
        Layout of quantized slots. None: slots hold plain vectors.
    """
    lengths = [cut.length for cut in cuts]
    all_scores = torch.zeros(k.shape[1], len(k), device=k.device) if scores is None else scores
    state.scores.zero_()
    state.positions.fill_(EMPTY)
    if state.ranks is not None:
        state.ranks.zero_()
    for sequence, (cut, keys, values, prompt_scores) in enumerate(zip(
            cuts, k.split(lengths), v.split(lengths), all_scores.split(lengths, dim=1),
            strict=True)):
        vectors = None
        if state.eviction.needs:
            vectors = keys.transpose(0, 1), values.transpose(0, 1)
            if state.smoothing is not None:  # policies see unsmoothed keys
                vectors = state.smoothing.restored(vectors[0]), vectors[1]
        index = state.eviction.select(prompt_scores, cut, vectors=vectors)
        num_kept = index.shape[1]
        kept_vectors = (x.transpose(0, 1).gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
                        for x in (keys, values))
        slots[:, sequence, :, :num_kept] = pack_slots(stack_vectors(*kept_vectors), layout)
        state.scores[sequence, :, :num_kept] = prompt_scores.gather(1, index)
        state.positions[sequence, :, :num_kept] = index.to(torch.int32)
        if state.ranks is not None:
            state.ranks[sequence, :, :num_kept] = torch.arange(num_kept, device=index.device)


def decode_attention(q, k, v, *, slots, metadata, layout=None, state=None, variant=DEFAULT_VARIANT,
                     sinks=None, offsets=None):
    """Compute attention of one new token per sequence over its cache and itself, and cache it.

    With an eviction state, the attention weights are added to the scores of the slots, and in a
    full sequence the new token replaces the victim that `Eviction.victims` chooses. Otherwise it
    takes the next free slot.

    Parameters
    ----------
    q : Tensor [sequences, heads, head_dim]
    k, v : Tensor [sequences, kv_heads, head_dim]
        Key and value of the new token. With rolling positions (`state.ranks`), q and k are not
        rotated and k is not smoothed (`state.smoothing`); otherwise they are. Values with fewer
        elements are the last elements of the keys, which rotation and smoothing do not change.
    slots : Tensor [kinds, sequences, kv_heads, slots, width]
        Cached keys and values: head_dim floats of k's dtype, or uint8 in the format of `layout`;
        one slot per head is written. Any strides, but contiguous in the last dimension. One kind
        if values are part of the keys.
    metadata : int32 Tensor [4, sequences]
        Rows: the number of slots that hold a token, which are the first ones (the content of the
        others, NaN included, has no effect); the number of tokens so far, with the new one and the
        evicted ones; the number of newest tokens that are not evicted; 1 if the new token needs a
        victim, else 0.
    layout : CacheLayout, optional
        Layout of quantized slots. None: slots hold plain vectors.
    state : EvictionState, optional
        Updated in place. None: no scores, and no sequence needs a victim. Tokens outside of
        `state.eviction.window` are masked.
    variant : AttentionVariant
        Its window is ignored: the cache holds only tokens inside of it.
    sinks : Tensor [heads] or None
        Learned attention sinks, if `variant.sinks`: logits in the softmax's denominator.
    offsets : float32 Tensor [sequences, heads] or None
        Added to the products of queries with all keys.

    Returns
    -------
    out : Tensor [sequences, heads, elements of a value]
    written_slots : int64 Tensor [sequences, kv_heads]
        The slot of each new token.
    """
    cached, tokens, recent, full = metadata.long()
    kv_heads, n = slots.shape[2:4]
    filled = (torch.arange(n, device=q.device) < cached[:, None])[:, None]  # of every head
    keys, values = split_vectors(unpack_slots(slots, layout).float(), v)
    query, key, value = q.float(), k.float(), v.float()
    smoothing = None if state is None else state.smoothing
    rolls = state is not None and state.ranks is not None
    true_keys = keys if smoothing is None else smoothing.restored(keys)
    if rolls:
        keys = true_keys
    cached_vectors = (true_keys, values)  # before rotation if positions roll
    if rolls:
        old = [table[state.ranks.where(filled, 0)] for table in state.rope]
        new = [table[cached][:, None] for table in state.rope]
        query, key, keys = rotated(query, *new), rotated(key, *new), rotated(keys, *old)
    keys, values = (torch.cat([x.masked_fill(~filled[..., None], 0), row[:, :, None]], dim=2)
                    for x, row in ((keys, key), (values, value)))
    products = torch.einsum("skgd,sktd->skgt", query.unflatten(1, (kv_heads, -1)), keys)
    hidden = ~filled
    if state is not None and state.eviction.window:
        last = tokens[:, None, None] - 1 - state.eviction.window
        hidden = hidden | (state.positions <= last)
    hidden = F.pad(hidden, (0, 1))[:, :, None]  # the new token sees itself
    probabilities = grouped_weights(products, hidden, dim=q.shape[-1], variant=variant,
                                    sinks=sinks, offsets=offsets)
    out = torch.einsum("skgt,sktd->skgd", probabilities, values).flatten(1, 2).to(q.dtype)
    written_slots = cached[:, None].expand(-1, kv_heads)
    if state is not None:
        received = probabilities.sum(2)
        state.scores.mul_(state.eviction.decay).add_(received[..., :n])
        new_key = k
        if smoothing is not None and not rolls:
            new_key = smoothing.restored(k[:, :, None])[:, :, 0]
        victims = _victims(state, metadata.long(), received[..., n:], cached_vectors,
                           (new_key.float(), v.float()))
        written_slots = torch.where(full[:, None] == 1, victims, written_slots)
        _update_state(state, metadata.long(), written_slots[..., None], received[..., n:])
    if rolls and smoothing is not None:
        k = smoothing.keys(k).to(k.dtype)
    cache_token(k, v, slots=slots, written_slots=written_slots, layout=layout)
    return out, written_slots.contiguous()


def grouped_weights(products, hidden, *, dim, variant, sinks, offsets):
    """Return attention weights of one new token per sequence, by `h2o.eviction.attention_weights`.

    Parameters
    ----------
    products : float32 Tensor [sequences, kv_heads, heads of a KV head, keys]
    hidden : bool Tensor that broadcasts to it
    dim : int
        head_dim.
    variant, sinks, offsets
        See `decode_attention`.
    """
    shape = *products.shape[1:3], 1
    if offsets is not None:
        products = products + offsets.view(-1, *shape)
    return attention_weights(products, hidden, dim=dim, variant=variant,
                             sinks=None if sinks is None else sinks.view(shape))


def _victims(state, metadata, new_scores, cached_vectors, new):
    """Return the slots of the victims, int64 [sequences, kv_heads].

    Parameters
    ----------
    state : EvictionState
    metadata : int64 Tensor [4, sequences]
    new_scores : float32 Tensor [sequences, kv_heads, 1]
        Attention score of the new token, which a user's policy considers as a candidate.
    cached_vectors : pair of Tensor [sequences, kv_heads, slots, head_dim]
        Cached keys and values.
    new : pair of Tensor [sequences, kv_heads, head_dim]
        Key and value of the new token.
    """
    cached, tokens, recent, _ = metadata
    if state.eviction.policy.in_kernels:
        return state.eviction.victims(state.scores, state.positions, tokens=tokens, recent=recent)
    position = (tokens - 1).to(state.positions.dtype)[:, None, None]
    scores = torch.cat((state.scores, new_scores), dim=-1)
    positions = torch.cat((state.positions, position.expand_as(new_scores)), dim=-1)
    vectors = None
    if state.eviction.needs:
        filled = (state.positions != EMPTY)[..., None]
        vectors = [torch.cat((old.masked_fill(~filled, 0), fresh[..., None, :]), dim=-2)
                   for old, fresh in zip(cached_vectors, new, strict=True)]
    return state.eviction.victims(scores, positions, tokens=tokens, recent=recent,
                                  vectors=vectors)


def cache_token(k, v, *, slots, written_slots, layout):
    """Write the keys and values of new tokens to slots `written_slots` [sequences, kv_heads]."""
    fresh = pack_slots(stack_vectors(k, v), layout)
    sequence, head = (torch.arange(n, device=k.device) for n in written_slots.shape)
    # Not scatter_, which copies all slots of 16-bit floats.
    slots[:, sequence[:, None], head, written_slots] = fresh.to(slots.dtype)


def _update_state(state, metadata, place, new_scores):
    """Add new tokens to the eviction state: place (slot) and own score [sequences, kv_heads, 1]."""
    cached, tokens, _, full = (x[:, None, None] for x in metadata)
    state.scores.scatter_(-1, place, new_scores)
    if state.ranks is not None:
        # Close the gap that each victim leaves among the ranks. The new token has the last rank.
        evicted_rank = state.ranks.gather(-1, place)
        state.ranks.sub_(((state.ranks > evicted_rank) & (full == 1)).to(torch.int32))
        state.ranks.scatter_(-1, place, (cached - full).to(torch.int32).expand(place.shape))
    state.positions.scatter_(-1, place, (tokens - 1).to(torch.int32).expand(place.shape))


def half_below(x):
    """Return the largest float16 that is at most x.

    Parameters
    ----------
    x : float32 Tensor
        Within float16's range.

    Returns
    -------
    float16 Tensor
        Same shape as x.
    """
    nearest = x.half()
    # The bits of a float16, as an integer, increase with its magnitude: minus one is the neighbour
    # towards zero, plus one the neighbour away from it. A negative x rounds to -0.0, never to 0.0.
    down = (x < 0).to(torch.int16) * 2 - 1
    return (nearest.view(torch.int16) + (nearest.float() > x) * down).view(torch.float16)


def quantize_groups(x, layout):
    """Quantize vectors to integers, scales and zero points, group by group.

    Parameters
    ----------
    x : Tensor [..., length]
        Any floating dtype; values outside of float16's range are clamped to it.
    layout : GroupLayout

    Returns
    -------
    uint8 Tensor [..., layout.nbytes]
        For each vector: its quantized values, a scale per group, a zero point per group.

    Notes
    -----
    The zero point is the group's minimum, rounded down to float16. The scale is the distance from
    the zero point to the maximum, divided by layout.levels and rounded up. So every element is
    within the quantized range, and the error of rounding to nearest is at most scale / 2.
    """
    values = x.float().clamp(-FLOAT16_MAX, FLOAT16_MAX)
    values = values.unflatten(-1, (layout.groups, layout.group))
    zeros = half_below(values.amin(-1) + 0.0)  # of both zeros, the positive one
    # A tensor, since PyTorch on a GPU divides by a number as a product with its reciprocal.
    levels = values.new_full((), layout.levels)
    scales = half_below((zeros.float() - values.amax(-1)) / levels).abs()  # rounded up
    # A scale of 0 is replaced by the smallest float16: all values of that group quantize to 0.
    steps = scales.float().clamp_min(2.0**-24)
    codes = ((values - zeros.float()[..., None]) / steps[..., None]).round().flatten(-2)
    codes = codes.to(torch.uint8)
    if layout.bits == 4:
        low, high = codes.chunk(2, dim=-1)
        codes = low + 16 * high
    packed = torch.zeros(*x.shape[:-1], layout.nbytes, dtype=torch.uint8, device=x.device)
    packed[..., : codes.shape[-1]] = codes
    packed[..., layout.code_bytes :] = torch.cat([scales, zeros], -1).view(torch.uint8)
    return packed


def dequantize_groups(packed, layout):
    """Return the vectors that `quantize_groups` quantized.

    Parameters
    ----------
    packed : uint8 Tensor [..., layout.nbytes]
        Any strides, but contiguous in the last dimension.
    layout : GroupLayout

    Returns
    -------
    float32 Tensor [..., length]
    """
    codes = packed[..., : layout.length * layout.bits // 8]
    if layout.bits == 4:
        codes = torch.cat([codes % 16, codes // 16], -1)
    halves = packed[..., layout.code_bytes :].clone(memory_format=torch.contiguous_format)
    scales, zeros = halves.view(torch.float16).float()[..., None].chunk(2, dim=-2)
    codes = codes.float().unflatten(-1, (layout.groups, layout.group))
    return (zeros + scales * codes).flatten(-2)


def stack_vectors(keys, values):
    """Return keys and values as one tensor [2, ..., length].

    Values with fewer elements are part of the keys: the result is a view of these, [1, ...].
    """
    return keys[None] if values.shape[-1] < keys.shape[-1] else torch.stack((keys, values))


def split_vectors(vectors, values_like):
    """Return the keys and values of `stack_vectors`; values have the width of `values_like`."""
    return vectors[0], vectors[-1][..., vectors.shape[-1] - values_like.shape[-1] :]


def pack_slots(vectors, layout, *, quantize=quantize_groups):
    """Convert keys and values to the format of cache slots.

    Parameters
    ----------
    vectors : Tensor [2, ..., length]
        Or [1, ..., length] for a cache of keys only.
    layout : CacheLayout or None
    quantize : callable
        `quantize_groups` or an equivalent kernel.

    Returns
    -------
    Tensor [kinds, ..., width]
    """
    if layout is None:
        return vectors
    if not layout.mixed:
        return quantize(vectors, layout.keys)
    keys, values = vectors
    return torch.cat((quantize(keys, layout.keys), quantize(values, layout.values)), dim=-1)[None]


def unpack_slots(packed, layout, *, dequantize=dequantize_groups):
    """Convert cache slots to vectors [2 or 1, ..., length], the inverse of `pack_slots`."""
    if layout is None:
        return packed
    if not layout.mixed:
        return dequantize(packed, layout.keys)
    keys, values = split_slots(packed, layout)
    return torch.stack((dequantize(keys, layout.keys), dequantize(values, layout.values)))


def linear_skinny(x, weight, bias, out, *, add=False):
    """Compute ``out = x @ weight.T + bias``, plus out if `add`, rounded to out's dtype once.

    Parameters
    ----------
    x : Tensor [rows, inputs]
    weight : Tensor [outputs, inputs]
    bias : Tensor [outputs] or None
    out : Tensor [rows, outputs]
        Written in place.
    add : bool
        Add the result to out, such as a residual.
    """
    result = x.float() @ weight.float().T
    for summand in (bias, out if add else None):
        if summand is not None:
            result += summand.float()
    out.copy_(result)
