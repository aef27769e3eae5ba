"""The specification of recall's operations, in plain PyTorch: slow, obvious, exact.

`h2o.recall` says what is chosen, `config.cache_layout` how the index lies in memory.
"""

from __future__ import annotations

import os

import torch

from flexgen_h2o.config.attention_form import DEFAULT_FORM
from flexgen_h2o.config.limits import INDEX_TILE, MEAN_SHIFT
from flexgen_h2o.h2o.attention_weights import attention_weights
from flexgen_h2o.h2o.recall import index_codes, index_weights, select_tokens
from flexgen_h2o.kernels.reference.attention import cache_token, dequantize_groups, unpack_slots


def index_keys(keys, index, spans, *, layout, records=None):
    """Bring the index up to date with some of the keys that are cached.

    Parameters
    ----------
    keys : Tensor [sequences, kv_heads, n, width]
        Floats, or uint8 records; contiguous in the last dimension, else strided.
    index : uint8 Tensor [sequences, kv_heads, tiles, layout.tile_bytes]
        Written in place.
    spans : int32 Tensor [3, sequences]
        Of each sequence: the first of `keys` to be indexed, the token that it is, and how many are.
    layout : IndexLayout
    records : GroupLayout, optional
        Of keys that are records.
    """
    codes_end = layout.code_rows * INDEX_TILE
    scales_end = codes_end + 2 * INDEX_TILE * layout.groups
    for sequence, (first, token, count) in enumerate(spans.T.tolist()):
        mine = keys[sequence, :, first : first + count]
        mine = mine if records is None else dequantize_groups(mine, records)
        codes, scales, zeros = index_codes(mine, layout)
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
            # Two tensors of indices that are apart: their dimension comes first.
            rows[:, tiles, :, lanes] = x.transpose(0, 1)


def indexed_keys(index, layout):
    """The keys of an index [..., tiles, tile_bytes]: float32 [..., tiles * INDEX_TILE, head_dim]"""
    codes_end = layout.code_rows * INDEX_TILE
    rows = index[..., :codes_end].unflatten(-1, (-1, 1, INDEX_TILE)).int()
    shifts = layout.bits * torch.arange(layout.per_byte, device=index.device)
    codes = (rows >> shifts[:, None]) & layout.levels  # [..., rows, per_byte, INDEX_TILE]
    halves = index[..., codes_end:].clone(memory_format=torch.contiguous_format)
    scales, zeros = halves.view(torch.float16).float().unflatten(
        -1, (2, layout.groups, 1, INDEX_TILE)).unbind(-4)
    keys = zeros + scales * codes.flatten(-3, -2).unflatten(-2, (layout.groups, layout.group))
    return keys.flatten(-3, -2).transpose(-2, -1).flatten(-3, -2)


def choose_keys(q, k, *, index, metadata, layout, most, log_weights=None, form=DEFAULT_FORM,
                sinks=None, offsets=None):
    """Return the cached tokens that new tokens attend to (`h2o.recall.select_tokens`).

    Parameters
    ----------
    q : Tensor [sequences, heads, head_dim]
    k : Tensor [sequences, kv_heads, head_dim]
        The new token's.
    index : uint8 Tensor [sequences, kv_heads, tiles, layout.tile_bytes]
        Contiguous in the last two dimensions.
    metadata : int32 Tensor [2, sequences]
        Of each sequence: how many tokens are indexed, the first ones; how many to choose, at most
        as many.
    layout : IndexLayout
    most : int
        No sequence chooses more.
    log_weights : int32 Tensor [sequences, kv_heads, tokens], optional
        Running means of the logarithms of tokens' weights, brought up to date (`note_weights`).
    form : AttentionForm
        Without a window.
    sinks : Tensor [heads] or None
        The logits that `form.sinks` asks for.
    offsets : float32 Tensor [sequences, heads] or None
        As of `reference.decode_attention`.

    Returns
    -------
    int32 Tensor [sequences, kv_heads, most]
        The numbers of the tokens, ascending, and -1 behind the last.
    """
    cached, counts = metadata.long()
    kv_heads = k.shape[1]
    keys = indexed_keys(index, layout)
    place = torch.arange(keys.shape[2], device=q.device)
    filled = (place < cached[:, None])[:, None]
    keys = keys.where(filled[..., None], 0)  # NaN too, has no effect
    weights = index_weights(
        q.unflatten(1, (kv_heads, -1)), k, keys, layout=layout, hidden=~filled[:, :, None],
        form=form, sinks=None if sinks is None else sinks.view(kv_heads, -1, 1),
        offsets=None if offsets is None else offsets.view(len(q), kv_heads, -1, 1))
    chosen = select_tokens(weights, counts, cached=cached)
    if log_weights is not None:
        note_weights(weights, log_weights, cached)
    order = place.where(chosen, keys.shape[2]).sort(dim=-1).values[..., :most]
    order = torch.nn.functional.pad(order, (0, most - order.shape[-1]), value=keys.shape[2])
    return order.where(order < keys.shape[2], -1).int()


def note_weights(weights, log_weights, cached):
    """Bring running means of the logarithms of weights up to date.

    The bits of a float that is not negative, as a whole number, are 2^23 times its logarithm to
    base 2 and a constant, to within 0.09 of a unit of it. A mean that is 0 has seen no weight yet.

    Parameters
    ----------
    weights : float32 Tensor [sequences, kv_heads, n]
        Those of the first `cached` tokens count.
    log_weights : int32 Tensor [sequences, kv_heads, tokens]
        Written in place.
    cached : int Tensor [sequences]
        How many tokens there are, the first ones.
    """
    bits = weights[..., : log_weights.shape[-1]].contiguous().view(torch.int32)
    bits = torch.nn.functional.pad(bits, (0, log_weights.shape[-1] - bits.shape[-1]))
    mean = (log_weights + ((bits - log_weights) >> MEAN_SHIFT)).where(log_weights != 0, bits)
    there = torch.arange(log_weights.shape[-1], device=bits.device) < cached[:, None, None]
    log_weights.copy_(mean.where(there, log_weights))


def attend_recalled(q, k, v, *, slots, chosen, metadata, layout=None, form=DEFAULT_FORM,
                    sinks=None, offsets=None):
    """Attention of one new token of each sequence over chosen slots and itself; then it is cached.

    Parameters
    ----------
    q : Tensor [sequences, heads, head_dim]
    k, v : Tensor [sequences, kv_heads, head_dim]
        The new token's.
    slots : Tensor [kinds, sequences, kv_heads, slots, width]
        As of `reference.decode_attention`; one slot per head is written.
    chosen : int32 Tensor [sequences, kv_heads, most]
        Slots, the first of each sequence's number of them.
    metadata : int32 Tensor [2, sequences]
        Of each sequence: the slot that its new token takes; how many slots are chosen.
    layout : CacheLayout, optional
        Of the records that the slots hold. None: they hold plain vectors.
    form : AttentionForm
        Without a window.
    sinks : Tensor [heads] or None
        The logits that `form.sinks` asks for.
    offsets : float32 Tensor [sequences, heads] or None
        As of `reference.decode_attention`.

    Returns
    -------
    out : Tensor [sequences, heads, head_dim]
    taken : int64 Tensor [sequences, kv_heads]
        The slot that each new token got.
    """
    place, counts = metadata.long()
    kv_heads, most = chosen.shape[1:]
    filled = (torch.arange(most, device=q.device) < counts[:, None])[:, None]
    at = chosen.long().where(filled, 0)[None, ..., None].expand(
        len(slots), -1, -1, -1, slots.shape[-1])
    held = unpack_slots(slots.gather(3, at), layout)
    keys, values = (
        torch.cat([x.float().masked_fill(~filled[..., None], 0), own.float()[:, :, None]], dim=2)
        for x, own in zip(held, (k, v), strict=True))
    products = torch.einsum("skgd,sktd->skgt", q.float().unflatten(1, (kv_heads, -1)), keys)
    if offsets is not None:
        products = products + offsets.view(len(q), kv_heads, -1, 1)
    hidden = torch.nn.functional.pad(~filled, (0, 1))[:, :, None]
    weights = attention_weights(products, hidden, dim=q.shape[-1], form=form,
                                sinks=None if sinks is None else sinks.view(kv_heads, -1, 1))
    out = torch.einsum("skgt,sktd->skgd", weights, values).flatten(1, 2).to(q.dtype)
    taken = place[:, None].expand(-1, kv_heads).contiguous()
    cache_token(k, v, slots=slots, taken=taken, layout=layout)
    return out, taken


def take_slots(chosen, firsts, *, slot_of, token_of, log_weights, newest):
    """Give chosen tokens the slots of fast memory in which they lie, or will lie.

    A head of `heads` is one KV head of one sequence. Those that have no slot take, in their order
    and in that of slots, the slots whose tokens have had the least weights, of those that are not
    chosen; of equals the first.

    Parameters
    ----------
    chosen : int32 Tensor [sequences, kv_heads, n]
        Different tokens of each head; -1 for none.
    firsts : int32 Tensor [sequences]
        From here on tokens are among the `newest`: they lie behind the slots, each in place token
        % newest.
    slot_of : int32 Tensor [heads, tokens]
        The slot of each token, or -1. Written in place, as the next one.
    token_of : int32 Tensor [heads, slots]
        The token of each slot, or -1, which is as one of weight 0.
    log_weights : int32 Tensor [heads, tokens]
        What tells tokens of little weight from others (`note_weights`). Not negative, and less
        than the largest int32.
    newest : int

    Returns
    -------
    slots : int32 Tensor like chosen
        -1 for none.
    missing : int64 Tensor [3, m]
        Head, token and slot of those that had none: what lies there is another's.
    held : int
        How many had one.

    Raises ValueError for more tokens than slots, and for one that the cache cannot have.
    """
    heads, num_slots = chosen.flatten(0, 1), token_of.shape[1]
    old = (heads >= 0) & (heads < firsts.repeat_interleave(chosen.shape[1])[:, None])
    if (heads >= slot_of.shape[1]).any() or (old.sum(1) > num_slots).any():
        raise ValueError("take_slots: a tensor of indices points outside of what it indexes")
    slots = (num_slots + heads % newest).where(heads >= 0, -1)
    missing = []
    for head, (tokens, mine) in enumerate(zip(heads, old, strict=True)):
        tokens = tokens[mine]
        here = slot_of[head, tokens]
        away = tokens[here < 0]
        held = token_of[head]
        keys = log_weights[head, held.clamp(min=0)].where(held >= 0, 0)
        keys[here[here >= 0]] = torch.iinfo(torch.int32).max
        given = keys.argsort(stable=True)[: len(away)].sort().values
        gone = token_of[head, given]
        slot_of[head, gone[gone >= 0]] = -1
        slot_of[head, away], token_of[head, given] = given.int(), away
        slots[head, mine] = slot_of[head, tokens]
        missing.append(torch.stack((torch.full_like(given, head), away.long(), given)))
    missing = torch.cat(missing, 1)
    return slots.view(chosen.shape), missing, int(old.sum()) - missing.shape[1]


def claim_slots(chosen, *, slot_of, token_of, log_weights):
    """Give chosen tokens slots of fast memory, as `take_slots` does, where no host waits for it.

    Parameters
    ----------
    chosen : int32 Tensor [sequences, kv_heads, n]
        Different tokens of each head; -1 for none. No more than there are slots.
    slot_of, token_of, log_weights : int32 Tensors [heads, tokens], [heads, slots], [heads, tokens]
        As of `take_slots`, contiguous; the first two are written in place.

    Returns
    -------
    slots : int32 Tensor like chosen
        -1 for none.
    moves : int32 Tensor [2, sequences, kv_heads, n]
        Of each head the tokens that had no slot, and the slots that they have now: the first
        `counts`, behind which anything may be.
    counts : int32 Tensor [sequences, kv_heads]
    """
    slots, missing, _ = take_slots(
        chosen, torch.full((len(chosen),), slot_of.shape[1]), slot_of=slot_of, token_of=token_of,
        log_weights=log_weights, newest=1)
    heads, tokens, places = missing
    counts = torch.bincount(heads, minlength=len(token_of))
    moves = chosen.new_zeros(2, len(token_of), chosen.shape[2])
    number = torch.arange(len(heads)) - (counts.cumsum(0) - counts)[heads]
    moves[:, heads, number] = torch.stack((tokens, places)).int()
    return (slots, moves.unflatten(1, chosen.shape[:2]),
            counts.int().unflatten(0, chosen.shape[:2]))


def copy_tokens(source, target, moves, counts):
    """Copy keys and values of some slots into others.

    Parameters
    ----------
    source, target : Tensors [kinds, sequences, kv_heads, slots, width]
        Of one dtype, their last two dimensions contiguous; `target` is written in place.
    moves : int32 Tensor [2, sequences, kv_heads, n], contiguous
        Of each head, slots of the source and where they go: the first `counts`.
    counts : int32 Tensor [sequences, kv_heads]
    """
    for sequence in range(counts.shape[0]):
        for head, count in enumerate(counts[sequence].tolist()):
            origins, places = moves[:, sequence, head, :count].long()
            target[:, sequence, head, places] = source[:, sequence, head, origins]


def fetch_tokens(missing, slots, *, file, direct, offset, layout, landing):
    """Read tokens that lie in records of a file, and put them into their slots.

    Parameters
    ----------
    missing : int64 Tensor [3, n]
        Head, token and slot of each. Neighbours in the file should be neighbours here: they come
        by one read.
    slots : Tensor [..., slots, kinds, width], contiguous
        Those of all heads, of `layout.token_bytes` each. Written in place.
    file : int
        The descriptor of an open file.
    direct : bool
        Whether it was opened with O_DIRECT. The reference reads one part after the other.
    offset : int
        Where its records [heads, layout.rows] begin.
    layout : PageLayout
    landing : uint8 Tensor
        What is read comes here first: room for a record at least, and aligned to pages. Written.

    Returns
    -------
    done : int
        How many tokens, of the first ones, are in their slots. Those from there on may be, or be
        not: a read failed.
    nbytes : int
        What was read for them.

    Raises ValueError for a head, token or slot that is not there.
    """
    num_slots = slots.shape[-3]
    lines = slots.view(torch.uint8).view(-1, num_slots, layout.token_bytes)
    head, token, slot = missing
    if (missing < 0).any() or (head >= len(lines)).any() or (slot >= num_slots).any() or (
            token >= layout.rows * layout.tokens).any():
        raise ValueError("fetch_tokens: a tensor of indices points outside of what it indexes")
    record = head * layout.rows + token // layout.tokens
    nbytes, most = 0, min(layout.most, len(landing) // layout.record_bytes)
    for mine, together in runs_of(record.tolist(), gap=layout.gap, most=most):
        held = landing[: len(together) * layout.record_bytes].view(-1, layout.record_bytes)
        try:
            got = os.preadv(file, [memoryview(held.numpy()).cast("B")],
                            offset + together.start * layout.record_bytes)
        except OSError:
            got = 0
        if got != held.nbytes:
            return mine.start, nbytes
        nbytes += got
        for i in mine:
            start = token[i] % layout.tokens * layout.token_bytes
            lines[head[i], slot[i]] = held[record[i] - together.start,
                                           start : start + layout.token_bytes]
    return missing.shape[1], nbytes


def runs_of(records, *, gap, most):
    """The runs of neighbours to read for some records.

    Parameters
    ----------
    records : sequence of int
        Their numbers, of which one may come more than once. Where one is less than the first of its
        run, another run begins.
    gap : int
        Records between two that are read with them, at most.
    most : int
        Records of a run, at most.

    Yields
    ------
    range
        Places of the list.
    range
        The records that are read for them.
    """
    first, run = 0, range(0)
    for place, record in enumerate(records):
        if run and run.start <= record < run.start + most and record - run.stop <= gap:
            run = range(run.start, max(run.stop, record + 1))
            continue
        if run:
            yield range(first, place), run
        first, run = place, range(record, record + 1)
    if run:
        yield range(first, len(records)), run
