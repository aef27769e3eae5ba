"""Alignment of weights in memory."""

from __future__ import annotations

import struct

import pytest
import torch
from helpers.fakes import LazyDevice, PoisonedDevice
from helpers.internals import open_devices, weights_of

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.engine.weight_files import ALIGN, WeightBuffer

PLACEMENTS = [(100, 0, 0), (0, 100, 0), (0, 0, 100), (30, 40, 30)]


def moved(source, target, remainder):
    """A checkpoint whose tensors begin at an offset from a multiple of 64 bytes."""
    data = source.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + size].rstrip()
    header += b" " * ((remainder - 8 - len(header)) % ALIGN)
    target.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])


@pytest.mark.parametrize(("device", "placement"), [
    *((LazyDevice, placement) for placement in PLACEMENTS), (PoisonedDevice, (60, 40, 0))])
@pytest.mark.parametrize("remainder", [0, 8, 56])
def test_matrices_are_aligned_for_every_file_offset(
        tiny_model, tmp_path, monkeypatch, device, placement, remainder):
    """safetensors files of others begin at any multiple of 8 bytes."""
    tiny = tiny_model("llama")
    for file in tiny.folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    moved(tiny.folder / "model.safetensors", tmp_path / "model.safetensors", remainder)
    open_devices(monkeypatch, device)
    policy = Policy(weights=Placement(*placement), gpu_batch_size=2)
    with LLM(str(tmp_path), policy=policy, dtype="float32", progress=False) as llm:
        weights, seen = weights_of(llm), []
        get = weights.get

        def checked(index):
            found = get(index)
            seen.extend(held.data_ptr() % ALIGN for held in found.values() if held.ndim > 1)
            return found

        monkeypatch.setattr(weights, "get", checked)
        out = llm.generate([[3, 5, 7], [2, 9]], max_new_tokens=3, eos_token_id=-1)
    assert len(seen) > 20 and not any(seen)
    with LLM(str(tiny.folder), dtype="float32", progress=False, device="cpu") as llm:
        same = llm.generate([[3, 5, 7], [2, 9]], max_new_tokens=3, eos_token_id=-1)
    assert [one.token_ids for one in out] == [one.token_ids for one in same]


@pytest.mark.parametrize(("places", "lead"), [
    ({}, 0), ({"a": 64}, 0), ({"a": 72, "b": 136, "c": 201}, 8), ({"a": 5, "b": 104, "c": 168}, 0),
    ({"a": 40, "b": 104}, 40)])
def test_copies_leave_the_lead_out(places, lead):
    buffer = WeightBuffer(300, places)
    host = torch.arange(400).to(torch.uint8)
    assert buffer.lead == lead
    assert torch.equal(buffer.without_lead(host), host[lead:300])
