"""Specification of the gated DeltaNet (arXiv 2412.06464) in plain PyTorch, in float32."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F

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
