"""Specification of recall (KV retrieval), in plain PyTorch: its key index, and its hot set.

`h2o.recall` defines which tokens are selected, `config.cache_layout` the memory layout of the
index.
"""

from __future__ import annotations

import os

import torch

from flexgen_h2o.config.layers import DEFAULT_VARIANT
from flexgen_h2o.config.limits import INDEX_TILE, MEAN_SHIFT
from flexgen_h2o.h2o.recall import index_codes, index_weights, select_tokens
from flexgen_h2o.kernels.reference.attention import (
    cache_token,
    dequantize_groups,
    grouped_weights,
    split_vectors,
    unpack_slots,
)


def index_keys(keys, index, spans, *, layout, key_layout=None):
    """Quantize cached keys into the index.

    Parameters
    ----------
    keys : Tensor [sequences, kv_heads, n, width]
        Floats, or uint8 in the format of `key_layout`. Any strides, but contiguous in the last
        dimension.
    index : uint8 Tensor [sequences, kv_heads, tiles, layout.tile_bytes]
        Written in place.
    spans : int32 Tensor [3, sequences]
        Rows: the first of `keys` to index, its token number, and the number of keys to index.
    layout : IndexLayout
    key_layout : GroupLayout, optional
        Layout of quantized keys. None: keys are floats.
    """
    codes_end = layout.code_rows * INDEX_TILE
    scales_end = codes_end + 2 * INDEX_TILE * layout.groups
    for sequence, (first, token, count) in enumerate(spans.T.tolist()):
        sequence_keys = keys[sequence, :, first : first + count]
        sequence_keys = sequence_keys if key_layout is None else dequantize_groups(sequence_keys,
                                                                                   key_layout)
        codes, scales, zeros = index_codes(sequence_keys, layout)
        shifts = layout.bits * torch.arange(layout.per_byte, device=keys.device)
        packed = (codes.unflatten(-1, (-1, layout.per_byte)).int() << shifts).sum(-1)
        places = torch.arange(token, token + count, device=keys.device)
        tiles, lanes = places // INDEX_TILE, places % INDEX_TILE
        to = index[sequence]
        code_rows, scale_rows, zero_rows = (
            part.view(dtype).unflatten(-1, (-1, INDEX_TILE)) for part, dtype in (
                (to[..., :codes_end], torch.uint8),
                (to[..., codes_end:scales_end], torch.float16),
                (to[..., scales_end:], torch.float16)))
        for rows, x in ((code_rows, packed.to(torch.uint8)), (scale_rows, scales),
                        (zero_rows, zeros)):
            # Indexed dimensions that are not adjacent come first.
            rows[:, tiles, :, lanes] = x.transpose(0, 1)


def indexed_keys(index, layout):
    """Dequantize an index [..., tiles, tile_bytes] to keys [..., tiles * INDEX_TILE, head_dim]."""
    codes_end = layout.code_rows * INDEX_TILE
    rows = index[..., :codes_end].unflatten(-1, (-1, 1, INDEX_TILE)).int()
    shifts = layout.bits * torch.arange(layout.per_byte, device=index.device)
    codes = (rows >> shifts[:, None]) & layout.levels  # [..., rows, per_byte, INDEX_TILE]
    halves = index[..., codes_end:].clone(memory_format=torch.contiguous_format)
    scales, zeros = halves.view(torch.float16).float().unflatten(
        -1, (2, layout.groups, 1, INDEX_TILE)).unbind(-4)
    keys = zeros + scales * codes.flatten(-3, -2).unflatten(-2, (layout.groups, layout.group))
    return keys.flatten(-3, -2).transpose(-2, -1).flatten(-3, -2)


def select_keys(q, k, *, index, metadata, layout, top_k, log_weights=None, variant=DEFAULT_VARIANT,
                sinks=None, offsets=None):
    """Return the cached tokens that new tokens attend to (`h2o.recall.select_tokens`).

    Parameters
    ----------
    q : Tensor [sequences, heads, head_dim]
    k : Tensor [sequences, kv_heads, head_dim]
        Key of the new token.
    index : uint8 Tensor [sequences, kv_heads, tiles, layout.tile_bytes]
        Contiguous in the last two dimensions.
    metadata : int32 Tensor [2, sequences]
        Rows: the number of indexed tokens, which are the first ones; the number of tokens to
        select, at most the number of indexed tokens.
    layout : IndexLayout
    top_k : int
        Maximum number of tokens to select per sequence.
    log_weights : int32 Tensor [sequences, kv_heads, tokens], optional
        Running means of the logarithms of tokens' weights, updated in place (`update_log_weights`).
    variant : AttentionVariant
        Without a window.
    sinks, offsets : Tensor or None
        See `attention.decode_attention`.

    Returns
    -------
    int32 Tensor [sequences, kv_heads, top_k]
        Token numbers in ascending order, padded with -1.
    """
    cached, counts = metadata.long()
    kv_heads = k.shape[1]
    keys = indexed_keys(index, layout)
    place = torch.arange(keys.shape[2], device=q.device)
    filled = (place < cached[:, None])[:, None]
    keys = keys.where(filled[..., None], 0)  # other content, NaN included, has no effect
    weights = index_weights(
        q.unflatten(1, (kv_heads, -1)), k, keys, layout=layout, hidden=~filled[:, :, None],
        variant=variant, sinks=None if sinks is None else sinks.view(kv_heads, -1, 1),
        offsets=None if offsets is None else offsets.view(len(q), kv_heads, -1, 1))
    selected = select_tokens(weights, counts, cached=cached)
    if log_weights is not None:
        update_log_weights(weights, log_weights, cached)
    order = place.where(selected, keys.shape[2]).sort(dim=-1).values[..., :top_k]
    order = torch.nn.functional.pad(order, (0, top_k - order.shape[-1]), value=keys.shape[2])
    return order.where(order < keys.shape[2], -1).int()


def update_log_weights(weights, log_weights, cached):
    """Update running means of the logarithms of attention weights.

    The bits of a non-negative float, as an integer, approximate 2^23 times its logarithm to base 2,
    plus a constant, with an error below 0.09 * 2^23. A mean of 0 has had no weight yet.

    Parameters
    ----------
    weights : float32 Tensor [sequences, kv_heads, n]
        Only the weights of the first `cached` tokens are used.
    log_weights : int32 Tensor [sequences, kv_heads, tokens]
        Written in place.
    cached : int Tensor [sequences]
        Number of tokens of each sequence, which are the first ones.
    """
    bits = weights[..., : log_weights.shape[-1]].contiguous().view(torch.int32)
    bits = torch.nn.functional.pad(bits, (0, log_weights.shape[-1] - bits.shape[-1]))
    mean = (log_weights + ((bits - log_weights) >> MEAN_SHIFT)).where(log_weights != 0, bits)
    is_cached = torch.arange(log_weights.shape[-1], device=bits.device) < cached[:, None, None]
    log_weights.copy_(mean.where(is_cached, log_weights))


def recall_attention(q, k, v, *, slots, selected, metadata, layout=None, variant=DEFAULT_VARIANT,
                     sinks=None, offsets=None):
    """Compute attention of one new token per sequence over selected slots and itself, and cache it.

    Parameters
    ----------
    q : Tensor [sequences, heads, head_dim]
    k, v : Tensor [sequences, kv_heads, head_dim]
        Key and value of the new token.
    slots : Tensor [kinds, sequences, kv_heads, slots, width]
        See `attention.decode_attention`; one slot per head is written.
    selected : int32 Tensor [sequences, kv_heads, top_k]
        Slots to attend to; of each sequence only the first ones are used, see `metadata`.
    metadata : int32 Tensor [2, sequences]
        Rows: the slot that the new token takes; the number of selected slots.
    layout : CacheLayout, optional
        Layout of quantized slots. None: slots hold plain vectors.
    variant : AttentionVariant
        Without a window.
    sinks, offsets : Tensor or None
        See `attention.decode_attention`.

    Returns
    -------
    out : Tensor [sequences, heads, head_dim]
    written_slots : int64 Tensor [sequences, kv_heads]
        The slot of each new token.
    """
    place, counts = metadata.long()
    kv_heads, top_k = selected.shape[1:]
    filled = (torch.arange(top_k, device=q.device) < counts[:, None])[:, None]
    at = selected.long().where(filled, 0)[None, ..., None].expand(
        len(slots), -1, -1, -1, slots.shape[-1])
    cached = split_vectors(unpack_slots(slots.gather(3, at), layout), v)
    keys, values = (
        torch.cat([x.float().masked_fill(~filled[..., None], 0), new.float()[:, :, None]], dim=2)
        for x, new in zip(cached, (k, v), strict=True))
    products = torch.einsum("skgd,sktd->skgt", q.float().unflatten(1, (kv_heads, -1)), keys)
    hidden = torch.nn.functional.pad(~filled, (0, 1))[:, :, None]
    weights = grouped_weights(products, hidden, dim=q.shape[-1], variant=variant, sinks=sinks,
                              offsets=offsets)
    out = torch.einsum("skgt,sktd->skgd", weights, values).flatten(1, 2).to(q.dtype)
    written_slots = place[:, None].expand(-1, kv_heads).contiguous()
    cache_token(k, v, slots=slots, written_slots=written_slots, layout=layout)
    return out, written_slots


def assign_slots(selected, first_recent, *, slot_of, token_of, log_weights, newest):
    """Return the slots of selected tokens in the hot set, and assign slots to tokens without one.

    `heads` counts every KV head of every sequence. Tokens without a slot replace the tokens that
    are not selected and have the lowest weights; of equal weights, the one in the first slot.
    Tokens and replaced slots are matched in ascending order.

    Parameters
    ----------
    selected : int32 Tensor [sequences, kv_heads, n]
        Distinct tokens per head; -1 for padding.
    first_recent : int32 Tensor [sequences]
        Tokens from this one on are the newest ones. They are kept behind the hot set, in slot
        num_slots + token % newest.
    slot_of : int32 Tensor [heads, tokens]
        The slot of each token, or -1. Updated in place.
    token_of : int32 Tensor [heads, slots]
        The token of each slot, or -1 for an empty slot, which has weight 0. Updated in place.
    log_weights : int32 Tensor [heads, tokens]
        Weights of tokens (`update_log_weights`): at least 0, and less than the largest int32.
    newest : int
        Number of slots for the newest tokens.

    Returns
    -------
    slots : int32 Tensor like selected
        -1 for padding.
    missing : int64 Tensor [3, m]
        Rows: head, token and slot of tokens that had no slot. Their content has to be loaded.
    hits : int
        Number of tokens that had a slot.

    Raises
    ------
    ValueError
        More tokens than slots are selected, or a token is out of range.
    """
    heads, num_slots = selected.flatten(0, 1), token_of.shape[1]
    old = (heads >= 0) & (heads < first_recent.repeat_interleave(selected.shape[1])[:, None])
    if (heads >= slot_of.shape[1]).any() or (old.sum(1) > num_slots).any():
        raise ValueError("assign_slots: an index is out of range")
    slots = (num_slots + heads % newest).where(heads >= 0, -1)
    missing = []
    for head, (tokens, is_old) in enumerate(zip(heads, old, strict=True)):
        tokens = tokens[is_old]
        token_slots = slot_of[head, tokens]
        missing_tokens = tokens[token_slots < 0]
        slot_tokens = token_of[head]
        keys = log_weights[head, slot_tokens.clamp(min=0)].where(slot_tokens >= 0, 0)
        keys[token_slots[token_slots >= 0]] = torch.iinfo(torch.int32).max
        replaced = keys.argsort(stable=True)[: len(missing_tokens)].sort().values
        evicted = token_of[head, replaced]
        slot_of[head, evicted[evicted >= 0]] = -1
        slot_of[head, missing_tokens], token_of[head, replaced] = replaced.int(), missing_tokens
        slots[head, is_old] = slot_of[head, tokens]
        missing.append(torch.stack((
            torch.full_like(replaced, head), missing_tokens.long(), replaced)))
    all_missing = torch.cat(missing, 1)
    return slots.view(selected.shape), all_missing, int(old.sum()) - all_missing.shape[1]


def claim_slots(selected, *, slot_of, token_of, log_weights):
    """Assign slots of the hot set as `assign_slots` does, without synchronization with the host.

    Parameters
    ----------
    selected : int32 Tensor [sequences, kv_heads, n]
        Distinct tokens per head, at most the number of slots; -1 for padding.
    slot_of, token_of, log_weights : int32 Tensors [heads, tokens], [heads, slots], [heads, tokens]
        See `assign_slots`; contiguous. The first two are updated in place.

    Returns
    -------
    slots : int32 Tensor like selected
        -1 for padding.
    moves : int32 Tensor [2, sequences, kv_heads, n]
        Tokens that had no slot, and their new slots; only the first `counts` of each head are
        defined.
    counts : int32 Tensor [sequences, kv_heads]
    """
    slots, missing, _ = assign_slots(
        selected, torch.full((len(selected),), slot_of.shape[1]), slot_of=slot_of,
        token_of=token_of, log_weights=log_weights, newest=1)
    heads, tokens, places = missing
    counts = torch.bincount(heads, minlength=len(token_of))
    moves = selected.new_zeros(2, len(token_of), selected.shape[2])
    number = torch.arange(len(heads)) - (counts.cumsum(0) - counts)[heads]
    moves[:, heads, number] = torch.stack((tokens, places)).int()
    return (slots, moves.unflatten(1, selected.shape[:2]),
            counts.int().unflatten(0, selected.shape[:2]))


def copy_tokens(source, target, moves, counts):
    """Copy keys and values between slots.

    Parameters
    ----------
    source, target : Tensors [kinds, sequences, kv_heads, slots, width]
        Both have the same dtype and are contiguous in the last two dimensions. `target` is written
        in place.
    moves : int32 Tensor [2, sequences, kv_heads, n]
        Slots of the source, and of the target; only the first `counts` of each head. Contiguous.
    counts : int32 Tensor [sequences, kv_heads]
    """
    for sequence in range(counts.shape[0]):
        for head, count in enumerate(counts[sequence].tolist()):
            origins, places = moves[:, sequence, head, :count].long()
            target[:, sequence, head, places] = source[:, sequence, head, origins]


def fetch_tokens(missing, slots, *, file, direct, offset, layout, read_buffer):
    """Read tokens from a file into their slots.

    For each head, the file has pages of `layout.page_tokens` tokens (`PageLayout`).

    Parameters
    ----------
    missing : int64 Tensor [3, n]
        Rows: head, token and slot. Tokens that are adjacent in the file should be adjacent here,
        so that one read loads them.
    slots : Tensor [..., slots, kinds, width]
        Slots of all heads, each of `layout.token_bytes`. Contiguous; written in place.
    file : int
        Descriptor of an open file.
    direct : bool
        The file was opened with O_DIRECT. The reference ignores it, and reads sequentially.
    offset : int
        Byte offset of the pages [heads, layout.head_pages].
    layout : PageLayout
    read_buffer : uint8 Tensor
        Read buffer of at least one page, aligned to memory pages. Overwritten.

    Returns
    -------
    done : int
        Number of the first tokens that are in their slots. If it is less than n, a read failed, and
        the slots of the others are undefined.
    nbytes : int
        Bytes read.

    Raises
    ------
    ValueError
        A head, token or slot is out of range.
    """
    num_slots = slots.shape[-3]
    lines = slots.view(torch.uint8).view(-1, num_slots, layout.token_bytes)
    head, token, slot = missing
    if (missing < 0).any() or (head >= len(lines)).any() or (slot >= num_slots).any() or (
            token >= layout.head_pages * layout.page_tokens).any():
        raise ValueError("fetch_tokens: an index is out of range")
    page = head * layout.head_pages + token // layout.page_tokens
    nbytes, max_pages = 0, min(layout.max_read_pages, len(read_buffer) // layout.page_bytes)
    for members, together in contiguous_runs(page.tolist(), gap=layout.gap, max_pages=max_pages):
        buffer = read_buffer[: len(together) * layout.page_bytes].view(-1, layout.page_bytes)
        try:
            got = os.preadv(file, [memoryview(buffer.numpy()).cast("B")],
                            offset + together.start * layout.page_bytes)
        except OSError:
            got = 0
        if got != buffer.nbytes:
            return members.start, nbytes
        nbytes += got
        for i in members:
            start = token[i] % layout.page_tokens * layout.token_bytes
            lines[head[i], slot[i]] = buffer[page[i] - together.start,
                                             start : start + layout.token_bytes]
    return missing.shape[1], nbytes


def contiguous_runs(pages, *, gap, max_pages):
    """Group pages into contiguous reads.

    Parameters
    ----------
    pages : sequence of int
        Page numbers, with repetitions. A number below the first of its run starts a new run.
    gap : int
        Maximum number of unneeded pages to read between two needed ones.
    max_pages : int
        Maximum number of pages in a run.

    Yields
    ------
    range
        Indices of `pages`.
    range
        The pages to read for them.
    """
    first, run = 0, range(0)
    for place, page in enumerate(pages):
        if run and run.start <= page < run.start + max_pages and page - run.stop <= gap:
            run = range(run.start, max(run.stop, page + 1))
            continue
        if run:
            yield range(first, place), run
        first, run = place, range(page, page + 1)
    if run:
        yield range(first, len(pages)), run
