"""Host memory: what buffers of odd sizes take, alone and side by side."""

import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.errors import lacks_memory
from flexgen_h2o.storage.device import ARENA_BYTES, HUGE_PAGE, PAGE, Arena, Device

ODD = HUGE_PAGE + 7 * PAGE
"""One huge page and a little: two huge pages would be nearly twice as much."""


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("source", ["device", "arena"])
def test_a_buffer_takes_its_own_size(source):
    device = Device()
    take = device.host_empty if source == "device" else Arena(device).take
    before, buffers = resident(), []
    for _ in range(24):
        buffers.append(take(ODD - 100))
        buffers[-1].fill_(1)
    assert {len(buffer) for buffer in buffers} == {ODD}
    assert 0.9 * 24 * ODD < resident() - before < 1.1 * 24 * ODD


@given(st.lists(st.integers(0, 3 * PAGE) | st.sampled_from([ARENA_BYTES, ARENA_BYTES + 1]),
                max_size=6))
def test_buffers_of_an_arena_are_disjoint(sizes):
    arena = Arena(Device())
    taken = [arena.take(size) for size in sizes]
    for size, buffer in zip(sizes, taken, strict=True):
        assert buffer.dtype == torch.uint8 and buffer.data_ptr() % PAGE == 0
        assert size <= len(buffer) < size + PAGE or (size, len(buffer)) == (0, PAGE)
    ends = sorted((buffer.data_ptr(), buffer.data_ptr() + len(buffer)) for buffer in taken)
    assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:], strict=False))


@pytest.mark.parametrize("words", [
    "CUDA error: out of memory", "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"])
def test_out_of_memory_errors_of_gpus(words):
    """What lies beside PyTorch's own share of it has no class of error of its own."""
    assert lacks_memory(RuntimeError(words))
    assert not lacks_memory(ValueError(words))
    assert not lacks_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
