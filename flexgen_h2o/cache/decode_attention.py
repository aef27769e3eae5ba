"""Attention under way: over a cache in host memory the CPU attends while the GPU works on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexgen_h2o.storage.tiers import typed
from flexgen_h2o.storage.transfer import ATTENTION, D2H, H2D, Handle, Lane, Transfers


@dataclass
class PendingAttention:
    """Attention over the parts of a batch, some of which may not be done yet.

    Attributes
    ----------
    outputs : dict of int to Tensor [sequences, heads, head_dim]
        Of each part, by the first of its sequences.
    handles : list of Handle
        Of what still fills some of them.
    """

    outputs: dict[int, Tensor] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)

    def result(self, transfers: Transfers) -> Tensor:
        """[sequences, heads, head_dim] of the whole batch, ready for compute.

        Raises whatever attention on the host raised.
        """
        for handle in self.handles:
            transfers.ready(handle)
        outputs = [self.outputs[first] for first in sorted(self.outputs)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class HostAttentionQueue:
    """Attends on the host for compute that is elsewhere, as jobs on a lane of their own.

    The jobs come one after the other, and each waits for the copies of the one before: one buffer
    for what comes down and one for what goes up are enough.

    Parameters
    ----------
    sequences : int
        The most rows that come at once.
    transfers : Transfers
    """

    def __init__(self, sequences: int, transfers: Transfers):
        self._sequences = sequences
        self._transfers = transfers
        self._buffers: list[Tensor] = []
        self._latest: Handle | None = None
        self._sinks: dict[int, Tensor] = {}

    def sinks(self, layer: int, sinks: Tensor) -> Tensor:
        """Learned logits [heads] of a layer, on the device, in host memory.

        They are a model's, and copied once: the host waits for compute there.
        """
        if layer not in self._sinks:
            self._sinks[layer] = sinks.to("cpu", copy=True)
        return self._sinks[layer]

    def start(self, q: Tensor, k: Tensor, v: Tensor,
              attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
              ) -> tuple[Tensor, Handle]:
        """Start ``attend(q, k, v)`` with what compute has been given to make so far.

        Parameters
        ----------
        q : Tensor [rows, heads, head_dim], on the device
        k, v : Tensor [rows, kv_heads, head_dim], on the device
            All three may be overwritten when this returns.
        attend : callable
            Gets them in host memory, and returns a tensor like q there and something else.

        Returns
        -------
        Tensor like q, on the device
        Handle
            When it is done, the tensor is filled.
        """
        shapes = [x.shape[1:] for x in (q, k, v)]
        packed = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        out = q.new_empty(q.shape)

        def job(lane: Lane) -> None:
            down, up = self._landing(packed, out)
            lane.copy(down, packed, D2H)
            lane.flush()
            split = down.split([shape.numel() for shape in shapes], dim=1)
            rows = (x.unflatten(1, shape) for x, shape in zip(split, shapes, strict=True))
            with self._transfers.host_span("attention", "cpu attention"):
                up.copy_(attend(*rows)[0])
            lane.copy(out, up, H2D)

        mark = self._transfers.device.mark()
        self._latest = self._transfers.submit(ATTENTION, job, after=(mark,))
        return out, self._latest

    def _landing(self, *tensors: Tensor) -> list[Tensor]:
        """A view like each tensor of a buffer on the host, which is made when first needed."""
        if not self._buffers:
            self._buffers = [self._transfers.device.host_empty(self._sequences * x[0].nbytes)
                             for x in tensors]
        return [typed(buffer, 0, x.shape, x.dtype)
                for buffer, x in zip(self._buffers, tensors, strict=True)]

    def reset(self) -> None:
        """Wait for what is under way and drop its result."""
        if self._latest is not None:
            with contextlib.suppress(Exception):
                self._latest.synchronize()
        self._latest = None
