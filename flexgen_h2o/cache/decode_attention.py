"""Decode attention other than the plain kernel: on the host for a GPU, and with sparse values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.cache.layout import CacheShape
from flexgen_h2o.cache.tiers import CacheTier, gather_slots
from flexgen_h2o.kernels import ops
from flexgen_h2o.storage.transfer import ATTENTION, D2H, H2D, Handle, TransferQueue, Transfers


@dataclass
class PendingAttention:
    """Attention over the tiers of a batch, which may still be running.

    Attributes
    ----------
    outputs : dict of int to Tensor [sequences, heads, elements of a value]
        Outputs of each tier, by the tier's first sequence.
    handles : list of Handle
        Jobs that still fill some of the outputs.
    """

    outputs: dict[int, Tensor] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)

    def result(self, transfers: Transfers) -> Tensor:
        """Return [sequences, heads, elements of a value] of the whole batch, ready for compute.

        Raise the errors of attention on the host.
        """
        for handle in self.handles:
            transfers.ready(handle)
        outputs = [self.outputs[first] for first in sorted(self.outputs)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class HostAttention:
    """Attention on the host for compute on a GPU, one job at a time."""

    def __init__(self, transfers: Transfers):
        self._transfers = transfers
        self._latest: Handle | None = None
        self._sinks: dict[int, Tensor] = {}

    def sinks_on_host(self, layer: int, sinks: Tensor) -> Tensor:
        """Return the attention sinks [heads] of a layer in host memory.

        They are copied once: the copy waits for compute.
        """
        if layer not in self._sinks:
            self._sinks[layer] = sinks.to("cpu", copy=True)
        return self._sinks[layer]

    def start(self, q: Tensor, k: Tensor, v: Tensor,
              attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
              ) -> tuple[Tensor, Handle]:
        """Start ``attend(q, k, v)`` on the host once compute has produced its inputs.

        `attend` is called with copies in host memory. q [rows, heads, head_dim], k and v [rows,
        kv_heads, head_dim] may be overwritten when this returns. The first tensor of its result is
        copied to the returned one, [rows, heads, elements of a value], by the end of the handle.
        """
        shapes = [x.shape[1:] for x in (q, k, v)]
        packed = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        out = q.new_empty((*q.shape[:2], v.shape[-1]))

        def job(queue: TransferQueue) -> None:
            inputs, outputs = queue.host_like(packed, out)
            queue.copy(inputs, packed, D2H)
            queue.flush()
            split = inputs.split([shape.numel() for shape in shapes], dim=1)
            rows = (x.unflatten(1, shape) for x, shape in zip(split, shapes, strict=True))
            with self._transfers.trace.span("attention", "cpu attention"):
                outputs.copy_(attend(*rows)[0])
            queue.copy(out, outputs, H2D)

        mark = self._transfers.device.record_event()
        self._latest = self._transfers.submit(ATTENTION, job, after=(mark,))
        return out, self._latest

    def reset(self) -> None:
        """Wait for the running job and discard its result."""
        if self._latest is not None:
            with contextlib.suppress(Exception):
                self._latest.synchronize()
        self._latest = None


class SparseAttention:
    """Decode attention that reads all keys, but only the values with the largest weights.

    FlexGen's sparse attention (arXiv 2303.06865, section 5).

    Parameters
    ----------
    shape : CacheShape
        With `attn_sparsity` below 1.
    transfers : Transfers
    """

    def __init__(self, shape: CacheShape, transfers: Transfers):
        self._shape = shape
        self._transfers = transfers

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, tier: CacheTier, where: tuple[int, int],
               max_cached: int, metadata: Tensor, **attention: Any) -> tuple[Tensor, Tensor]:
        """Attend over a tier from one new token of each sequence, and cache the new tokens.

        Arguments and results are as of `ops.decode_attention`. `max_cached` are the cached tokens
        of the longest sequence.
        """
        cache, layout = tier.get(*where), self._shape.layout
        index, weights = ops.select_values(q, k, keys=cache[0, :, :, :max_cached],
                                           metadata=metadata, layout=layout,
                                           sparsity=self._shape.attn_sparsity, **attention)
        if tier.gathers_values:
            index = self._copy(index, "cpu", D2H)
            values = self._copy(tier.gather_values(*where, index),
                                self._transfers.device.torch_device, H2D)
        else:
            values = gather_slots(cache[1], index)
        return ops.attend_selected(k, v, slots=cache, values=values, weights=weights,
                                   metadata=metadata, layout=layout)

    def _copy(self, x: Tensor, device, link: str) -> Tensor:
        """Return a copy on the other side of a link, and wait for it."""
        began = self._transfers.device.record_timestamp()
        copied = x.to(device)
        self._transfers.moved(link, x.nbytes, began, self._transfers.device.record_timestamp())
        return copied
