"""Memory, streams and events of the compute device and the host.

A `Device` hides whether a GPU computes, whose memory is separate from host memory. Without one,
nothing is copied between the tiers ``gpu`` and ``cpu``, streams work synchronously, and events are
always complete.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable
from functools import partial

import torch

from flexgen_h2o.config.limits import PAGE
from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.report import format_bytes

HUGE_PAGE = 2 << 20
ARENA_BYTES = 64 << 20
MADV_POPULATE_WRITE = 23  # madvise(2), Linux 5.14; not in the mmap module


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def typed(buffer: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
          ) -> torch.Tensor:
    """Return a view of a uint8 tensor from byte `offset` on, as a tensor of a shape and dtype."""
    count = 1
    for size in shape:
        count *= size
    return buffer[offset : offset + count * dtype.itemsize].view(dtype).view(shape)


class Pages(mmap.mmap):
    """Anonymous memory pages; `on_free` is called before they are unmapped."""

    on_free: Callable[[], object] | None = None

    def __del__(self):
        if self.on_free is not None:
            self.on_free()


class Event:
    """A point in the work of a stream. On the host it is complete at once."""

    def synchronize(self) -> None:
        """Wait on the host until the work before the event is done."""


class CopyStream:
    """A stream of copies that overlap compute. On the host, copies are synchronous."""

    def wait_event(self, event: Event) -> None:
        """Order later work of this stream after an event."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue ``target.copy_(source)``; neither may be changed before it is done."""
        target.copy_(source)

    def record_event(self) -> Event:
        """Return the point after all queued work."""
        return Event()

    def record_timestamp(self):
        """Return a timestamp at this point of the stream, for `Device.seconds`."""
        return time.perf_counter()


class Device:
    """The CPU as compute device: its memory is host memory.

    Attributes
    ----------
    is_gpu : bool
        True if a GPU computes: its memory is separate from host memory.
    zero_copy : bool
        True if kernels access page-locked host memory in place.
    """

    is_gpu = False
    zero_copy = False

    def __init__(self, name: str = "cpu"):
        self.torch_device = torch.device(name)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized page-aligned compute memory: uint8 [nbytes, rounded up to pages].

        On the host, pages are populated at once: page faults cost a prefill 1.3 s per GB.
        """
        return self.host_empty(nbytes, touch=True)

    def host_empty(self, nbytes: int, *, pinned: bool = True, touch: bool = False) -> torch.Tensor:
        """Return uninitialized page-aligned host memory: uint8 [nbytes, rounded up to pages].

        The memory is mapped separately from malloc's, so that it is returned to the system with the
        tensor. Large buffers are aligned to huge pages and use them, which makes disk reads faster
        (3.1 instead of 2.7 GB/s). An incomplete huge page at the end uses small pages: otherwise
        thousands of experts of 2.7 MB each would take 50 % more memory.

        Parameters
        ----------
        pinned : bool
            Page-lock the memory for copies to a GPU; a no-op without one.
        touch : bool
            Populate the pages at once.
        """
        size = max(round_up(nbytes, PAGE), PAGE)
        large = size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
        pages = Pages(-1, size + HUGE_PAGE * large, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor, start = torch.frombuffer(pages, dtype=torch.uint8), 0
        if large:
            start = -tensor.data_ptr() % HUGE_PAGE
            pages.madvise(mmap.MADV_NOHUGEPAGE)
            pages.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE * HUGE_PAGE)
        if touch:
            with contextlib.suppress(OSError):  # before Linux 5.14: populated when written
                pages.madvise(MADV_POPULATE_WRITE, start, size)
        tensor = tensor[start : start + size]
        self._pin(tensor, pages, pinned)
        return tensor

    def _pin(self, tensor: torch.Tensor, pages: Pages, pinned: bool) -> None:
        """Page-lock a tensor in `pages` until they are unmapped; a no-op without a GPU."""

    def stream(self) -> CopyStream:
        """Return a new stream for copies."""
        return CopyStream()

    def record_event(self) -> Event:
        """Return the point after all queued compute."""
        return Event()

    def wait_event(self, event: Event) -> None:
        """Order later compute after an event."""

    def record_timestamp(self):
        """Return a timestamp at this point of compute, for `seconds`."""
        return time.perf_counter()

    def is_done(self, timestamp) -> bool:
        """Return True if the work before a timestamp is done."""
        return True

    def seconds(self, timestamp) -> float:
        """Return a timestamp that `is_done`, in seconds of `time.perf_counter`."""
        return timestamp

    def limit(self, nbytes: int | None) -> None:
        """Limit this process to some bytes of the device's memory; None: no limit.

        Raises
        ------
        UserError
            The device has no separate memory.
        """
        if nbytes is not None:
            raise UserError("--device-memory-limit has no effect without a GPU: give "
                            "--memory-limit")

    def begin_run(self) -> None:
        """Reset the base of timestamps, and `peak_bytes`."""

    def peak_bytes(self) -> int:
        """Return the peak of the device's memory use since `begin_run`; 0 on the host."""
        return 0

    def used_bytes(self) -> int | None:
        """Return the bytes of the device's memory in use; None on the host."""
        return None

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device's memory; None on the host."""
        return None

    def total_bytes(self) -> int | None:
        """Return all bytes of the device's memory; None on the host."""
        return None

    def description(self) -> str:
        """Return the name of the device, for reports."""
        return "cpu"


class Arena:
    """Host memory for many small permanent buffers, allocated from large ones.

    A separate buffer of a few MB has small pages at its end and two mappings of its own (see
    `Device.host_empty`). In an arena, thousands of experts have huge pages: they are read faster
    and need fewer TLB entries. Memory is freed when all buffers in it are freed.

    Parameters
    ----------
    device : Device
        Its `host_empty` allocates.
    """

    def __init__(self, device: Device):
        self._device = device
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized page-aligned host memory: uint8 [nbytes, rounded up to pages]."""
        size = max(round_up(nbytes, PAGE), PAGE)
        if size > len(self._left):
            self._left = self._device.host_empty(max(size, ARENA_BYTES), pinned=False)
        taken, self._left = self._left[:size], self._left[size:]
        return taken


class _CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream, *, timed: bool = False):
        # Blocking: a waiting thread must not spin on a core that the disk's workers need.
        self.event = torch.cuda.Event(enable_timing=timed, blocking=not timed)
        self.event.record(stream)

    def synchronize(self) -> None:
        self.event.synchronize()


class _CudaStream(CopyStream):
    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def wait_event(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            self.stream.wait_event(event.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:  # the allocator must not reuse its memory before the copy is done
                tensor.record_stream(self.stream)

    def record_event(self) -> Event:
        return _CudaEvent(self.stream)

    def record_timestamp(self):
        return _CudaEvent(self.stream, timed=True)


class CudaDevice(Device):
    """A GPU: separate memory, copies on separate streams, pinned host buffers."""

    is_gpu = True
    zero_copy = True

    def __init__(self, name: str = "cuda"):
        index = torch.device(name).index
        self.torch_device = torch.device(
            "cuda", torch.cuda.current_device() if index is None else index)
        torch.cuda.set_device(self.torch_device)
        self.begin_run()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(round_up(nbytes, PAGE), dtype=torch.uint8, device=self.torch_device)

    def _pin(self, tensor: torch.Tensor, pages: Pages, pinned: bool) -> None:
        # PyTorch's pinned allocator rounds up to a power of two, which nearly doubles a layer of
        # OPT-30B, and never returns memory.
        if pinned:
            runtime, address = torch.cuda.cudart(), tensor.data_ptr()
            # A new thread would create a context on the first GPU.
            with torch.cuda.device(self.torch_device):
                status = runtime.cudaHostRegister(address, tensor.nbytes, 0)
            if int(status) != 0:
                size, = format_bytes(tensor.nbytes)
                raise UserError(f"{size} of host memory can't be page-locked "
                                f"(CUDA error {int(status)}): use less, or --pin-weight false")
            pages.on_free = partial(runtime.cudaHostUnregister, address)

    def stream(self) -> CopyStream:
        return _CudaStream(self.torch_device)

    def record_event(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self.torch_device))

    def wait_event(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            torch.cuda.current_stream(self.torch_device).wait_event(event.event)

    def record_timestamp(self):
        return _CudaEvent(torch.cuda.current_stream(self.torch_device), timed=True)

    def is_done(self, timestamp) -> bool:
        return timestamp.event.query()

    def seconds(self, timestamp) -> float:
        return self._base_seconds + self._base.event.elapsed_time(timestamp.event) / 1e3

    def limit(self, nbytes: int | None) -> None:
        total = torch.cuda.mem_get_info(self.torch_device)[1]
        share = 1.0 if nbytes is None else min(1.0, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def used_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self.torch_device)

    def begin_run(self) -> None:
        # Event times are float32 milliseconds since the base: a recent base keeps them exact.
        torch.cuda.synchronize(self.torch_device)
        self._base = _CudaEvent(torch.cuda.current_stream(self.torch_device), timed=True)
        self._base.synchronize()
        self._base_seconds = time.perf_counter()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def free_bytes(self) -> int | None:
        torch.cuda.empty_cache()  # includes the memory that PyTorch caches
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def total_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def description(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)


def open_device(name: str = "auto") -> Device:
    """Return a device by name: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``.

    Raises
    ------
    UserError
        The name is unknown, or there is no GPU with this number.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return Device()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type != "cuda":
        raise UserError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise UserError(f"device {name!r}: PyTorch sees no GPU here; use --device cpu")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise UserError(f"device {name!r}: there are {torch.cuda.device_count()} GPUs, from cuda:0")
    return CudaDevice(name)
