"""The choice of a next token, and its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


def likeliest(logits: Tensor) -> tuple[list[int], list[float]]:
    """The likeliest token of each row, of equals the first, and its logit.

    Parameters
    ----------
    logits : Tensor [rows, vocab]

    Returns
    -------
    list of int
    list of float
        Finite if and only if the token is a choice: NaN is above all numbers, and where no token
        is left minus infinity is the highest.
    """
    tops, tokens = logits.max(-1)  # argmax() takes far longer on a CPU
    return on_host(tokens, tops)


def on_host(tokens: Tensor, values: Tensor) -> tuple[list[int], list[float]]:
    """Token ids [rows] and a number for each, in one copy: the device is waited for once."""
    chosen, found = torch.stack([tokens.double(), values.double()]).tolist()
    return [int(token) for token in chosen], found
