"""Buffers of weights: their alignment, and row shards that are streamed from disk in order."""

import struct

import pytest
import torch
from helpers.fakes import LazyDevice, PoisonedDevice
from helpers.generation import make_prompts
from helpers.internals import open_devices, shards_out_of_order, staging_bytes, weights_of
from helpers.tiny_models import TINY

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.config import limits, placement
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.engine.weight_files import ALIGN, WeightBuffer
from flexgen_h2o.models import family
from flexgen_h2o.models.layers import Operations
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun

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
            results = get(index)
            seen.extend(held.data_ptr() % ALIGN for held in results.values() if held.ndim > 1)
            return results

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


# Row shards

pytestmark = pytest.mark.usefixtures("on_cpu")


class Noting(Operations):
    """Notes the weights of products."""

    def __init__(self):
        super().__init__()
        self.used = []

    def linear(self, x, weight, bias, *, out):
        self.used.append(weight)
        super().linear(x, weight, bias, out=out)

    def add_linear_(self, residual, x, weight, bias):
        self.used.append(weight)
        super().add_linear_(residual, x, weight, bias)


@pytest.mark.parametrize("key", TINY)
def test_matrices_are_stored_in_order_of_use(key):
    config = from_transformers(TINY[key](), key)
    kind, ops = family(config), Noting()
    specs = kind.weights(config).layers[config.attention_layers[0]]
    w = {name: torch.rand(spec.shape) for name, spec in specs.items()}
    x = torch.rand(2, config.hidden_size)
    q, _, _ = kind.attention_inputs(config, w, x, ops)
    kind.attention_output(config, w, x, q, ops)
    if not config.parallel_residual:
        kind.mlp(config, w, x, ops)
    matrices = [name for name, tensor in w.items() if tensor.dim() == 2]
    assert [name for weight in ops.used for name, own in w.items() if own is weight] == matrices


@pytest.mark.parametrize("disk", [30, 100])
def test_buffers_are_as_planned_and_reads_in_order(tiny_model, disk, monkeypatch):
    monkeypatch.setattr(placement, "MIN_SHARD_BYTES", 1)
    tiny = tiny_model("opt")
    config = from_transformers(tiny.config, "tiny")
    policy = Policy(weights=Placement(100 - disk, 0, disk), gpu_batch_size=5)
    planned = MemoryPlan(PlannedRun(config, policy, Workload(30, 5, 5, 1), itemsize=4))

    prompts = make_prompts(tiny.model.config.vocab_size, [30, 11, 7, 23, 1])
    with LLM(str(tiny.folder), policy=policy, dtype="float32", progress=False) as llm:
        llm.generate(prompts, max_new_tokens=5, eos_token_id=-1)
        assert shards_out_of_order(llm) == 0
        sizes, units = staging_bytes(llm), weights_of(llm).units
        assert len(sizes) == limits.SHARD_BUFFERS
        assert sum(sizes) == next(row.cpu for row in planned.rows if row.name == "weight buffers")
        assert all(unit.fetched_bytes == 0 for unit in units)
