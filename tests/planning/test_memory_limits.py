"""Limits on host and GPU memory, and pinned memory."""

import contextlib
import types

import pytest
import torch
from helpers.error_cases import refused
from helpers.fakes import LazyDevice
from helpers.internals import open_devices

from flexgen_h2o import llm as llm_module
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.errors import UserError
from flexgen_h2o.llm import LLM
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.storage.device import CudaDevice, Device
from flexgen_h2o.storage.free_memory import MemoryLimits

LOAD = Workload(prompt_len=6, gen_len=3, gpu_batch_size=4, num_gpu_batches=1)
PROMPTS = [[1, 2, 3, 4, 5, 6]] * 4


class FakeGpu(LazyDevice):
    """Has 40 GB free, and remembers its limit and the bytes that were page-locked."""

    def __init__(self):
        super().__init__()
        self.pinned = 0

    def free_bytes(self):
        return 40 * 10**9

    def limit(self, nbytes):
        self.most = nbytes

    def host_empty(self, nbytes, *, pinned=True, touch=False):
        self.pinned += nbytes if pinned else 0
        return super().host_empty(nbytes, pinned=pinned, touch=touch)


@pytest.fixture
def gpu(monkeypatch):
    device = FakeGpu()
    open_devices(monkeypatch, lambda: device)
    return device


@pytest.fixture
def options(tiny_model, tmp_path):
    return {"model": str(tiny_model("llama").folder), "dtype": "float32", "progress": False,
            "offload_dir": str(tmp_path)}


def needed(tier: str, options, policy=None) -> int:
    with LLM(**options) as llm:
        plan = MemoryPlan(PlannedRun(llm.model_config, policy or Policy(), LOAD, itemsize=4,
                                     has_gpu=tier == "gpu"))
    return plan.total(tier)


def test_limits_only_lower_free_memory():
    free = MemoryLimits(10, 20, 30)
    assert free.capped(cpu=5, gpu=7) == MemoryLimits(7, 5, 30)
    assert free.capped(cpu=50, gpu=70) == free.capped(cpu=None, gpu=None) == free
    assert MemoryLimits(None, 20, 30).capped(cpu=None, gpu=5) == MemoryLimits(None, 20, 30)


def test_a_run_over_its_limit_is_refused_before_loading(options, monkeypatch):
    def load(*_, **__):
        pytest.fail("it began to load")

    monkeypatch.setattr(llm_module, "load_runner", load)
    with pytest.raises(UserError, match="host memory: needs .* 100.0 MB free"):
        LLM(**options, workload=LOAD, memory_limit=10**8)


def test_each_call_keeps_the_limit_and_counts_weights_once(options):
    total = needed("cpu", options)
    with LLM(**options, memory_limit=total) as llm:
        assert len(llm.generate(PROMPTS, max_new_tokens=3)) == 4
        refused(lambda: llm.generate(PROMPTS * 2, max_new_tokens=100), match="does not fit")
    with LLM(**options, memory_limit=total - 1) as llm, \
            pytest.raises(UserError, match="does not fit"):
        llm.generate(PROMPTS, max_new_tokens=3)


def test_the_limit_of_a_gpu(options, gpu):
    total = needed("gpu", options)
    with LLM(**options, device_memory_limit=total, workload=LOAD) as llm:
        assert len(llm.generate(PROMPTS, max_new_tokens=3)) == 4
    assert gpu.most == total
    with pytest.raises(UserError, match="device memory: needs"):
        LLM(**options, device_memory_limit=total - 1, workload=LOAD)
    LLM(**options).close()
    assert gpu.most is None, "the next one has all of it again"


def test_no_limit_of_a_gpu_that_is_not_there(options):
    with pytest.raises(UserError, match="no effect without a GPU: give --memory-limit"):
        LLM(**options, device="cpu", device_memory_limit=10**12)


@pytest.mark.parametrize("name", ["memory_limit", "device_memory_limit"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "6GB"])
def test_limits_are_bytes(options, name, value):
    refused(lambda: LLM(**options, **{name: value}), match=name)


@pytest.mark.parametrize(("nbytes", "share"), [(6 * 10**9, 0.375), (20 * 10**9, 1.0), (None, 1.0)])
def test_pytorch_is_held_to_the_limit(monkeypatch, nbytes, share):
    calls = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 16 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction",
                        lambda *arguments: calls.append(arguments))
    CudaDevice.limit(types.SimpleNamespace(torch_device="cuda:1"), nbytes)
    assert calls == [(share, "cuda:1")]


def test_memory_is_pinned_by_the_computing_gpu(monkeypatch):
    """In the thread of a queue the first one is current, where another job may have the memory."""
    calls, buffer = [], Device().host_empty(1)
    runtime = types.SimpleNamespace(cudaHostUnregister=calls.append, cudaHostRegister=(
        lambda address, nbytes, flags: calls.append(address) or 0))

    @contextlib.contextmanager
    def current(device):
        calls.append(device)
        yield
        calls.append("the first again")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", current)
    device = types.SimpleNamespace(torch_device="cuda:1")
    CudaDevice._pin(device, buffer, types.SimpleNamespace(), True)
    assert calls == ["cuda:1", buffer.data_ptr(), "the first again"]


@pytest.mark.parametrize("pin", [True, False])
def test_host_weights_are_pinned_unless_disabled(options, gpu, pin):
    policy = Policy(weights=Placement(0, 100, 0), pin_weight=pin)
    with LLM(**options, policy=policy) as llm:
        weights = 4 * llm.model_config.num_parameters()
    assert gpu.pinned >= weights if pin else gpu.pinned == 0
