"""Memory on the tiers: the compute device, the host (pinned where there is a GPU), events.

A `Device` hides the one difference that matters to the engine: whether compute memory is
*separate* from host memory. On a machine without a GPU it is not: nothing is copied between the
tiers ``gpu`` and ``cpu``, streams do their work at once, and events have always happened.
"""

from __future__ import annotations

import contextlib
import errno
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
_LACKING = ("can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")
"""Words of errors that have no class of their own: of PyTorch's allocator for a CPU, of CUDA and
Triton, and of cuBLAS and cuDNN, for which a GPU has nothing left beside PyTorch's share."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def typed(buffer: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype):
    """View `shape` of `dtype` that starts `offset` bytes into the uint8 tensor `buffer`."""
    count = 1
    for size in shape:
        count *= size
    return buffer[offset : offset + count * dtype.itemsize].view(dtype).view(shape)


def lacks_memory(error: BaseException) -> bool:
    """True if it says that memory could not be had: of the system, of PyTorch, on any device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _LACKING))


class Pages(mmap.mmap):
    """Anonymous pages; `on_free` runs before they go back to the system."""

    on_free: Callable[[], object] | None = None

    def __del__(self):
        if self.on_free is not None:
            self.on_free()


class Event:
    """A point in a stream's work. On the host, work is done when the call returns."""

    def synchronize(self) -> None:
        """Block the calling thread until the point has been reached."""


class CopyStream:
    """A queue of copies beside compute. The host's does each copy at once."""

    def wait(self, event: Event) -> None:
        """Let everything queued from here on start after `event`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue ``target.copy_(source)``; both must stay untouched until it is done."""
        target.copy_(source)

    def mark(self) -> Event:
        """The point after everything queued so far."""
        return Event()

    def stamp(self):
        """A clock reading at this point of the queue, for `Device.seconds`."""
        return time.perf_counter()


class Device:
    """The compute device when there is no GPU: host memory, used in place."""

    separate = False
    zero_copy = False
    """True if kernels on it read and write page-locked host memory in place."""

    def __init__(self, name: str = "cpu"):
        self.torch = torch.device(name)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised page-aligned bytes in compute memory: uint8 [nbytes rounded to a page].

        On the host its pages are made now and not when compute first writes to them, which
        measured 1.3 s per GB in the middle of a prefill.
        """
        return self.host_empty(nbytes, touch=True)

    def host_empty(self, nbytes: int, *, pinned: bool = True, touch: bool = False) -> torch.Tensor:
        """Uninitialised page-aligned bytes in host memory that the device can copy from.

        Anonymous pages of their own rather than malloc's: they go back to the system when the
        tensor goes. Large ones ask for huge pages, which spares the page faults, and begin with
        one: a disk read into fewer chunks of memory is faster (measured: 3.1 GB/s, not 2.7). What
        fills no huge page at the end has small ones, as it would else take a whole one: thousands
        of experts of 2.7 MB each took half as much again.
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
            with contextlib.suppress(OSError):  # an older kernel: the pages come when written
                pages.madvise(MADV_POPULATE_WRITE, start, size)
        tensor = tensor[start : start + size]
        self._pin(tensor, pages, pinned)
        return tensor

    def _pin(self, tensor: torch.Tensor, pages: Pages, pinned: bool) -> None:
        """Page-lock what lies in `pages`, until they go; the host itself has no need of it."""

    def stream(self) -> CopyStream:
        """A new stream for copies."""
        return CopyStream()

    def mark(self) -> Event:
        """The point after everything that compute has been given so far."""
        return Event()

    def wait(self, event: Event) -> None:
        """Let compute that is given from here on start after `event`."""

    def stamp(self):
        """A clock reading in compute's own queue, for `seconds`."""
        return time.perf_counter()

    def reached(self, stamp) -> bool:
        """True if the stamp's point has been reached."""
        return True

    def seconds(self, stamp) -> float:
        """A stamp on the clock of `time.perf_counter`; its point must have been reached."""
        return stamp

    def limit(self, nbytes: int | None) -> None:
        """Let this process take no more of the device's memory; None: all.

        Raises `UserError` where there is none of its own.
        """
        if nbytes is not None:
            raise UserError("--device-memory-limit has no effect without a GPU: give "
                            "--memory-limit")

    def begin_run(self) -> None:
        """Start measuring anew: the clock's base and `peak_bytes`."""

    def peak_bytes(self) -> int:
        """Most memory of the device in use since `begin_run`; 0 where it is host memory."""
        return 0

    def used_bytes(self) -> int | None:
        """Memory of the device in use now, in bytes; None where it is host memory."""
        return None

    def free_bytes(self) -> int | None:
        """Memory of the device that can be had, in bytes; None where it is host memory."""
        return None

    def total_bytes(self) -> int | None:
        """Memory of the device in all, in bytes; None where it is host memory."""
        return None

    def description(self) -> str:
        """The device in a word, for reports."""
        return "cpu"


class Arena:
    """Buffers one after the other in shared memory, which goes when all of them have gone.

    Alone a buffer of few MB has small pages where it fills no huge one (`Device.host_empty`), and
    two mappings of its own; thousands of experts are read faster, and are fewer pages to look up,
    side by side.

    Parameters
    ----------
    device : Device
        Gives the memory: its `host_empty`.
    """

    def __init__(self, device: Device):
        self._device = device
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """Uninitialised page-aligned bytes in host memory: uint8 [nbytes rounded to a page]."""
        size = max(round_up(nbytes, PAGE), PAGE)
        if size > len(self._left):
            self._left = self._device.host_empty(max(size, ARENA_BYTES), pinned=False)
        taken, self._left = self._left[:size], self._left[size:]
        return taken


class _CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream, *, timed: bool = False):
        # Blocking: a thread that waits must not take a core from the disk's workers.
        self.event = torch.cuda.Event(enable_timing=timed, blocking=not timed)
        self.event.record(stream)

    def synchronize(self) -> None:
        self.event.synchronize()


class _CudaStream(CopyStream):
    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def wait(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            self.stream.wait_event(event.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:  # its memory must not be handed out again before the copy is done
                tensor.record_stream(self.stream)

    def mark(self) -> Event:
        return _CudaEvent(self.stream)

    def stamp(self):
        return _CudaEvent(self.stream, timed=True)


class CudaDevice(Device):
    """A GPU: memory of its own, copies on streams of their own, pinned host buffers."""

    separate = True
    zero_copy = True

    def __init__(self, name: str = "cuda"):
        index = torch.device(name).index
        self.torch = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        torch.cuda.set_device(self.torch)
        self.begin_run()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(round_up(nbytes, PAGE), dtype=torch.uint8, device=self.torch)

    def _pin(self, tensor: torch.Tensor, pages: Pages, pinned: bool) -> None:
        # Page-locked by hand: PyTorch's own pinned allocator rounds up to a power of two, which
        # nearly doubles a layer of OPT-30B, and never gives anything back.
        if pinned:
            runtime, address = torch.cuda.cudart(), tensor.data_ptr()
            # In a new thread the first GPU is the current one, and would open a context for this.
            with torch.cuda.device(self.torch):
                status = runtime.cudaHostRegister(address, tensor.nbytes, 0)
            if int(status) != 0:
                size, = format_bytes(tensor.nbytes)
                raise UserError(f"{size} of host memory can't be page-locked "
                                f"(CUDA error {int(status)}): use less, or --pin-weight false")
            pages.on_free = partial(runtime.cudaHostUnregister, address)

    def stream(self) -> CopyStream:
        return _CudaStream(self.torch)

    def mark(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self.torch))

    def wait(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            torch.cuda.current_stream(self.torch).wait_event(event.event)

    def stamp(self):
        return _CudaEvent(torch.cuda.current_stream(self.torch), timed=True)

    def reached(self, stamp) -> bool:
        return stamp.event.query()

    def seconds(self, stamp) -> float:
        return self._base_seconds + self._base.event.elapsed_time(stamp.event) / 1e3

    def limit(self, nbytes: int | None) -> None:
        total = torch.cuda.mem_get_info(self.torch)[1]
        share = 1.0 if nbytes is None else min(1.0, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(share, self.torch)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch)

    def used_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self.torch)

    def begin_run(self) -> None:
        # Event times are float32 milliseconds since the base: a young base keeps them exact.
        torch.cuda.synchronize(self.torch)
        self._base = _CudaEvent(torch.cuda.current_stream(self.torch), timed=True)
        self._base.synchronize()
        self._base_seconds = time.perf_counter()
        torch.cuda.reset_peak_memory_stats(self.torch)

    def free_bytes(self) -> int | None:
        torch.cuda.empty_cache()  # what PyTorch holds back for itself can be had too
        return torch.cuda.mem_get_info(self.torch)[0]

    def total_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.torch)[1]

    def description(self) -> str:
        return torch.cuda.get_device_name(self.torch)


def open_device(name: str = "auto") -> Device:
    """The device called `name`: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``.

    Raises
    ------
    UserError
        The name is unknown, or a GPU is asked for that is not there.
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
