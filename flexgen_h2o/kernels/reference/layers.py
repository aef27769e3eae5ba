"""Specification of the layers' operations in plain PyTorch, except attention.

Norms, rotation, activations, mixtures of experts, and the gated DeltaNet (arXiv 2412.06464).
Everything is computed in float32 and rounded once, unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.kernels.reference.matrix import linear_quantized
from flexgen_h2o.kernels.torch_ops import rotated

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def norm(x, weight, bias, out, *, eps, centered):
    """Compute LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467) of each row.

    Parameters
    ----------
    x : Tensor [rows, width]
    weight, bias : Tensor [width] or None
        None: 1 and 0.
    out : Tensor [rows, width]
        Written in place; may be x.
    eps : float
        Added to the variance.
    centered : bool
        Subtract each row's mean: LayerNorm, otherwise RMSNorm.
    """
    result = x.float()
    if centered:
        result = result - result.mean(-1, keepdim=True)
    result = result * (result.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        result = result * weight.float()
    if bias is not None:
        result = result + bias.float()
    out.copy_(result)


def rotate(x, cos, sin, change=None, offsets=None):
    """Rotate the leading dimensions of each head in place, then change the basis of the heads.

    Parameters
    ----------
    x : Tensor [rows, heads, head_dim]
    cos, sin : float32 Tensor [rows, half] or None
        half is at most head_dim / 2; see `kernels.torch_ops` for the layout. None: no rotation.
    change : h2o.key_smoothing.BasisChange or None
    offsets : float32 Tensor [rows, heads] or None
        Overwritten with the products of the rotated heads with `change.mean`.
    """
    result = x.float()
    if cos is not None:
        result = rotated(result, cos[:, None].float(), sin[:, None].float())
    if offsets is not None:
        offsets.copy_(change.offsets(result))
    x.copy_(result if change is None else change(result))


def activate(x, function, factor=None):
    """Compute ``x = function(x) * factor`` in place.

    Parameters
    ----------
    x : Tensor [rows, width]
    function : str
        One of abi.ACTIVATIONS; gelu_tanh is the tanh approximation (arXiv 1606.08415, section 2).
    factor : Tensor [rows, width] or None
        None: 1.
    """
    result = _FUNCTIONS[function](x.float())
    x.copy_(result if factor is None else result * factor.float())


def route(x, router, bias=None, correction=None, *, per_token, config, linear=F.linear,
          sigmoid_=torch.sigmoid_):
    """Return the experts of each row and their weights, in float32.

    The experts with the highest scores are chosen, best first. Ties are broken in favor of the
    expert with the lower number.

    Parameters
    ----------
    x : Tensor [rows, hidden]
        After the norm.
    router : Tensor [experts, hidden]
    bias : Tensor [experts], optional
        Added to the logits.
    correction : Tensor [experts] or [1, experts], optional
        Added to the scores for the selection only (arXiv 2408.15664).
    per_token : int
        Experts per row.
    config : RouterConfig
    linear, sigmoid_ : callable
        Functions to use for PyTorch's.

    Returns
    -------
    ids : int64 Tensor [rows, per_token]
    routing_weights : float32 Tensor [rows, per_token]
    """
    logits = linear(x.float(), router.float()) + (0 if bias is None else bias.float())
    if config.scoring == "sparsemixer":
        return _sparsemixer(logits, per_token, config.jitter)
    scores = sigmoid_(logits.clone()) if config.scoring == "sigmoid" else logits.softmax(-1)
    # Different logits may have equal scores, because these are rounded.
    scores_for_choice = logits if config.groups == 1 and correction is None else scores
    if correction is not None:
        scores_for_choice = scores + correction.float()
    if config.groups > 1:
        scores_for_choice = _best_groups(scores_for_choice, config)
    ids = scores_for_choice.argsort(dim=-1, descending=True, stable=True)[:, :per_token]
    routing_weights = scores.gather(-1, ids)
    if config.normalize:
        routing_weights /= routing_weights.sum(-1, keepdim=True).clamp(min=config.min_sum)
    return ids, routing_weights if config.scale == 1.0 else routing_weights * config.scale


def _best_groups(scores, config):
    """Return scores [rows, experts] with -inf outside of each row's best groups."""
    grouped = scores.unflatten(-1, (config.groups, -1))
    best = grouped.topk(min(config.group_experts, grouped.shape[-1]), dim=-1)[0].sum(-1)
    ranks = best.argsort(dim=-1, descending=True, stable=True)
    outside = torch.ones_like(best, dtype=torch.bool)
    outside.scatter_(-1, ranks[:, : config.groups_per_token], False)
    return grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)


def _sparsemixer(logits, per_token, jitter):
    """Return the experts of arXiv 2409.12136 at inference.

    An expert's weight is its softmax among the remaining experts whose logits are near its own.
    """
    left, ids, routing_weights = logits.clone(), [], []
    for _ in range(per_token):
        largest, chosen = left.max(-1, keepdim=True)
        far = (largest - logits) / logits.abs().clamp(min=largest) > 2 * jitter
        weights = left.masked_fill(far, -torch.inf).softmax(-1)
        ids.append(chosen)
        routing_weights.append(weights.gather(-1, chosen))
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(ids, -1), torch.cat(routing_weights, -1)


def experts(x, ids, routing_weights, table, sums, *, function, max_rows):
    """Add ``weight * down(function(gate(x)) * up(x))`` of each row's experts to its sum.

    Results of matmuls are rounded to x's dtype. Experts that are missing in the table, or selected
    by more than `max_rows` rows, are skipped.

    Parameters
    ----------
    x : Tensor [rows, hidden]
    ids : int64 Tensor [rows, per_token]
    routing_weights : float32 Tensor [rows, per_token]
    table : sequence of tuple or None
        For each expert (gate, up, down), optionally followed by their biases; None if missing.
        Weights in x's dtype or `QuantizedMatrix`: gate and up [intermediate, hidden],
        down [hidden, intermediate].
    sums : float32 Tensor [rows, hidden]
        Updated in place.
    function : str or (slope, limit)
        One of abi.ACTIVATIONS. Or the clamped SwiGLU of gpt-oss (arXiv 2508.10925), rounded once:
        ``(up(x) + 1) * gate(x) * sigmoid(slope * gate(x))``, with gate(x) clamped to at most limit,
        which is above 0, and up(x) to [-limit, limit].
    max_rows : int
        Maximum rows of an expert.
    """
    for number, matrices in enumerate(table):
        rows, places = (ids == number).nonzero(as_tuple=True)
        if matrices is None or not 0 < len(rows) <= max_rows:
            continue
        parts, biases = matrices[:3], matrices[3:] or (None, None, None)
        gate, up = (_matmul(x[rows], *arguments)
                    for arguments in zip(parts[:2], biases[:2], strict=True))
        if isinstance(function, tuple):
            gate = _gated(gate, up, *function)
        else:
            activate(gate, function, up)
        out = _matmul(gate, parts[2], biases[2])
        sums.index_add_(0, rows, out.float() * routing_weights[rows, places, None])


def _gated(gate, up, slope, limit):
    x = gate.float().clamp(max=limit)
    return ((up.float().clamp(-limit, limit) + 1) * x * (slope * x).sigmoid()).to(gate.dtype)


def _matmul(x, matrix, bias):
    out = x.new_empty(len(x), len(matrix))
    if isinstance(matrix, QuantizedMatrix):
        linear_quantized(x, matrix, bias, out)
    elif bias is None:
        torch.mm(x, matrix.t(), out=out)
    else:
        torch.addmm(bias, x, matrix.t(), out=out)
    return out


CHUNK = 64
"""Tokens that `chunked_delta_rule` computes together."""

_MAX_ROWS = 4 * CHUNK  # that have float32 copies at a time
_EPS = 1e-6  # of the norm of queries and keys


def gated_delta_net(mixed, beta, step, states, *, weights, sequences, lengths, config):
    """Apply the convolution and the delta rule to tokens of sequences, and update their states.

    Channel c of token t becomes ``silu(sum(conv[c, i] * mixed[t - kernel + 1 + i, c]))``. Queries
    and keys of a head are then scaled to length 1, and queries by 1 / sqrt(key_dim).

    Parameters
    ----------
    mixed : Tensor [rows, config.conv_size]
        Queries, keys and values of the tokens, packed: the next ones of each sequence.
    beta, step : Tensor [rows, value_heads]
        Logits of the delta rule's beta, and the forget gate before its bias.
    states : float32 Tensor [sequences, config.state_size]
        Updated in place. A state has the last inputs of the convolution, [kernel - 1, conv_size],
        then a matrix of each head, [value_heads, key_dim, value_dim]. It is 0 before a sequence.
    weights : sequence of three Tensor
        conv [conv_size, kernel], log_decay [value_heads] and step_bias [value_heads]. The state
        decays by ``exp(-exp(log_decay) * softplus(step + step_bias))`` in each token.
    sequences : sequence of int
        The row of `states` of each sequence.
    lengths : sequence of int
        Its number of tokens, at least 1.
    config : RecurrentConfig

    Returns
    -------
    Tensor [rows, value_heads, value_dim], in the dtype of `mixed`
    """
    conv, log_decay, step_bias = (x.float() for x in weights)
    inputs, matrices = split_states(states, config)
    decay = -log_decay.exp() * F.softplus(step.float() + step_bias)
    gate = beta.float().sigmoid()
    out = mixed.new_empty((len(mixed), config.value_heads, config.value_dim))
    if all(length == 1 for length in lengths):
        index = torch.tensor(sequences, device=states.device)
        window = torch.cat((inputs[index], mixed.float()[:, None]), dim=1)
        inputs[index] = window[:, 1:]
        q, k, v = _heads(F.silu((window * conv.T).sum(1)), config)
        matrix = matrices[index]
        out.copy_(recurrent_delta_rule(q[:, :, None], k[:, :, None], v[:, :, None],
                                       decay[..., None], gate[..., None], matrix)[:, :, 0])
        matrices[index] = matrix
        return out
    ends = list(accumulate(lengths))
    for sequence, length, end in zip(sequences, lengths, ends, strict=True):
        for first in range(end - length, end, _MAX_ROWS):
            rows = slice(first, min(first + _MAX_ROWS, end))
            window = torch.cat((inputs[sequence], mixed[rows].float()))
            inputs[sequence] = window[len(window) - (config.kernel - 1) :]
            x = F.conv1d(window.T[None], conv[:, None], groups=len(conv))[0]
            q, k, v = (part.transpose(0, 1) for part in _heads(F.silu(x).T, config))
            out[rows] = chunked_delta_rule(q, k, v, decay[rows].T, gate[rows].T,
                                           matrices[sequence]).transpose(0, 1)
    return out


def split_states(states, config):
    """Return the two parts of states [sequences, state_size]: see `gated_delta_net`."""
    inputs, matrices = states.split(
        [config.conv_size * (config.kernel - 1), config.value_size * config.key_dim], dim=1)
    return (inputs.unflatten(1, (config.kernel - 1, config.conv_size)),
            matrices.unflatten(1, (config.value_heads, config.key_dim, config.value_dim)))


def _heads(x, config):
    """Return queries, keys and values of each value head of x [rows, conv_size]."""
    width = config.key_heads * config.key_dim
    q, k, v = x.split([width, width, config.value_size], dim=1)
    q, k = (part.unflatten(1, (config.key_heads, config.key_dim)).repeat_interleave(
        config.value_heads // config.key_heads, dim=1) for part in (q, k))
    q, k = (part * (part.square().sum(-1, keepdim=True) + _EPS).rsqrt() for part in (q, k))
    return q * config.key_dim ** -0.5, k, v.unflatten(1, (config.value_heads, config.value_dim))


def recurrent_delta_rule(q, k, v, log_decay, beta, state):
    """Apply the gated delta rule to tokens one by one: the definition.

    A token decays the state S, and writes its value in place of the one that S has for its key::

        S = exp(log_decay) * S
        S = S + outer(k, beta * (v - k @ S))
        out = q @ S

    Parameters
    ----------
    q, k : float32 Tensor [..., tokens, key_dim]
    v : float32 Tensor [..., tokens, value_dim]
    log_decay, beta : float32 Tensor [..., tokens]
    state : float32 Tensor [..., key_dim, value_dim]
        Updated in place.

    Returns
    -------
    float32 Tensor [..., tokens, value_dim]
    """
    out = torch.empty_like(v)
    for token in range(v.shape[-2]):
        state *= log_decay[..., token, None, None].exp()
        key = k[..., token, :]
        error = v[..., token, :] - torch.einsum("...k,...kv->...v", key, state)
        state += key[..., None] * (beta[..., token, None] * error)[..., None, :]
        out[..., token, :] = torch.einsum("...k,...kv->...v", q[..., token, :], state)
    return out


def chunked_delta_rule(q, k, v, log_decay, beta, state):
    """Apply the gated delta rule chunk by chunk, with matmuls; arguments as in
    `recurrent_delta_rule`.

    With D[i, j] the decay from token j to token i of a chunk, and S the state before it, the values
    that the tokens write solve a triangular system::

        (I + beta * tril(D * (k @ k.T), -1)) @ written = beta * (v - decay * (k @ S))
        out = decay * (q @ S) + tril(D * (q @ k.T)) @ written
    """
    outputs = []
    for start in range(0, v.shape[-2], CHUNK):
        rows = slice(start, start + CHUNK)
        queries, keys = q[..., rows, :], k[..., rows, :]
        total = log_decay[..., rows].cumsum(-1)[..., None]
        gate, decay = beta[..., rows, None], total.exp()
        pairs = (total - total.transpose(-1, -2)).tril().exp().tril()
        system = gate * pairs * (keys @ keys.transpose(-1, -2))
        written = torch.linalg.solve_triangular(
            system, gate * (v[..., rows, :] - decay * (keys @ state)), upper=False,
            unitriangular=True)
        attended = pairs * (queries @ keys.transpose(-1, -2)) @ written
        outputs.append(decay * (queries @ state) + attended)
        last = total[..., -1:, :]
        state *= last.exp()
        state += (keys * (last - total).exp()).transpose(-1, -2) @ written
    return torch.cat(outputs, dim=-2)
