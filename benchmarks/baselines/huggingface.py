"""Baselines that run models of transformers: in memory, offloaded by Accelerate or by DeepSpeed.

torch is imported only to run a model.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from baselines import Baseline, BaselineSettings, Timings, installed, missing
from flexgen_h2o.config.validation import NonNegative
from flexgen_h2o.models.registry import from_transformers

if TYPE_CHECKING:
    import torch


class StepClock:
    """Stopping criterion that never stops and records the time after each token.

    The first token ends the prefill.
    """

    def __init__(self):
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
        if input_ids.is_cuda:  # the token is only queued; `generate` waits for it next
            import torch

            torch.cuda.current_stream().synchronize()
        self.times.append(time.perf_counter())
        return input_ids.new_zeros(len(input_ids)).bool()

    def timings(self, tokens: torch.Tensor) -> Timings:
        """Return the times with the generated tokens, [batch, new]."""
        prefill, *steps = (b - a for a, b in zip(self.times, self.times[1:], strict=False))
        return Timings(prefill, tuple(steps), tuple(map(tuple, tokens.tolist())))


def timed_generate(model, prompts: Sequence[Sequence[int]], gen_len: int) -> Timings:
    """Generate greedily for prompts of any lengths, which are left-padded; never stop early.

    `model`: its end-of-text token becomes an ordinary one. `prompts` and `gen_len`: as in
    `Baseline.generate`.
    """
    import torch

    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt):] = torch.tensor(prompt)
        mask[row, longest - len(prompt):] = 1
    near = "cuda" if torch.cuda.is_available() else "cpu"  # where all of them begin to compute
    ids, mask = ids.to(near), mask.to(near)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    clock = StepClock()
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=mask, max_new_tokens=gen_len, do_sample=False,
                                stopping_criteria=[clock])
    return clock.timings(output[:, longest:])


@contextmanager
def holding_cache(model, tokens: int) -> Iterator[None]:
    """Hold as much memory as the keys and values of `tokens` tokens."""
    import torch

    shape = from_transformers(model.config, "model")
    near = "cuda" if torch.cuda.is_available() else "cpu"
    cache = torch.ones(tokens * shape.kv_bytes_per_token(model.dtype.itemsize), dtype=torch.uint8,
                       device=near)
    yield
    del cache


def empty_model(folder: Path):
    """Return a model on the meta device, to inspect its modules."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


class HuggingFaceBaseline(Baseline):
    """A baseline that runs a model of transformers: `prepare` sets `model`."""

    model: Any = None

    def generate(self, prompts: Sequence[Sequence[int]], gen_len: int) -> Timings:
        # The cache grows: a shortened run must leave memory for the omitted tokens.
        with holding_cache(self.model, len(prompts) * (self.settings.gen_len - gen_len)):
            return timed_generate(self.model, prompts, gen_len)

    def close(self) -> None:
        self.model = None


class TransformersMemory(HuggingFaceBaseline):
    """transformers with all weights in memory, SDPA attention and its dynamic cache."""

    documented = "https://huggingface.co/docs/transformers/llm_optims"

    def refusal(self) -> str | None:
        return None

    def version(self) -> str:
        return installed("transformers", "torch")

    def prepare(self, model: Path) -> str:
        import torch
        from transformers import AutoModelForCausalLM

        near = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, self.settings.dtype)).to(near).eval()
        return f"weights in memory of {near}, sdpa"


def device_map(model, layers: int, *, near: str, far: str, near_layers: int = 0
               ) -> dict[str, str]:
    """Return a device map: decoder layers on `far`, except the first `near_layers`."""
    from torch.nn import ModuleList

    def placed(module, prefix: str) -> Iterator[tuple[str, str]]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, ModuleList) and len(child) == layers:
                yield from ((f"{path}.{layer}", near if layer < near_layers else far)
                            for layer in range(layers))
            elif any(isinstance(inner, ModuleList) for inner in child.modules()):
                yield from placed(child, f"{path}.")
            else:
                yield path, near

    return dict(placed(model, ""))


class AccelerateOffload(HuggingFaceBaseline):
    """Accelerate's big model inference: decoder layers on disk or in host memory.

    Layers on disk are read from the checkpoint's safetensors file, through its memory map, for
    every token; `load_checkpoint_and_dispatch`, which writes a copy first, was slower. Without a
    GPU, layers in host memory are used in place. The first `near_layers` stay on the compute
    device.
    """

    documented = "https://huggingface.co/docs/accelerate/usage_guides/big_modeling"
    options: Mapping[str, Any] = {"offload": "disk", "near_layers": 0}
    kinds: Mapping[str, Any] = {"offload": Literal["disk", "cpu"], "near_layers": NonNegative}

    def refusal(self) -> str | None:
        return missing("accelerate", "bench-accelerate")

    def version(self) -> str:
        return installed("accelerate", "transformers", "torch")

    def prepare(self, model: Path) -> str:
        import torch
        from transformers import AutoModelForCausalLM

        far, near_count = self.settings.options["offload"], self.settings.options["near_layers"]
        near = "cuda:0" if torch.cuda.is_available() else "cpu"
        empty = empty_model(model)
        places = device_map(empty, empty.config.num_hidden_layers, near=near, far=far,
                            near_layers=near_count)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, self.settings.dtype), device_map=places,
            offload_folder=self.settings.scratch).eval()
        but = f"but {near_count} " if near_count else ""
        return f"decoder layers {but}on {far}, the rest on {near}"


def zero_config(settings: BaselineSettings, *, hidden: int, largest: int, pinned: bool
                ) -> dict[str, Any]:
    """Return DeepSpeed's configuration for inference: parameters are fetched layer by layer.

    `hidden` and `largest`: the model's hidden size, and the number of elements of its largest
    parameter. `pinned`: whether host buffers are page-locked, for fast copies to a GPU.
    """
    place = settings.options["offload"]
    offload: dict[str, Any] = {"device": place, "pin_memory": pinned}
    if place == "nvme":
        offload |= {"nvme_path": settings.scratch, "buffer_count": 6, "buffer_size": largest}
    return {
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "fp16": {"enabled": settings.dtype == "float16"},
        "zero_optimization": {
            "stage": 3, "offload_param": offload,
            "stage3_prefetch_bucket_size": 2 * hidden * hidden,
            "stage3_max_live_parameters": 2 * hidden * hidden,
            "stage3_param_persistence_threshold": hidden,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 1,
                "single_submit": False, "overlap_events": True},
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1 << 30,
    }


class DeepSpeedZero(HuggingFaceBaseline):
    """DeepSpeed ZeRO-Inference: ZeRO stage 3 with parameters in host memory or on NVMe.

    Without a GPU, DeepSpeed's CPU accelerator computes. Its C++ parts are compiled at first use;
    NVMe needs the headers of libaio (Debian: libaio-dev). A build that was killed leaves a `lock`
    file below ~/.cache/torch_extensions, on which later builds wait: remove it.
    """

    documented = "https://www.deepspeed.ai/2022/09/09/zero-inference.html"
    options: Mapping[str, Any] = {"offload": "cpu"}
    kinds: Mapping[str, Any] = {"offload": Literal["cpu", "nvme"]}
    _engine = None
    _config_reference = None

    @classmethod
    def limited_after_load(cls, options: Mapping[str, Any]) -> bool:
        return options["offload"] == "nvme"  # the whole model passes through memory first

    def refusal(self) -> str | None:
        why = missing("deepspeed", "bench-deepspeed")
        if why is None and self.settings.options["offload"] == "nvme":
            _choose_accelerator()
            from deepspeed.ops.op_builder import AsyncIOBuilder

            if not AsyncIOBuilder().is_compatible(verbose=False):
                why = "its async_io cannot be built: install libaio-dev and a C++ compiler"
        return why

    def version(self) -> str:
        return installed("deepspeed", "transformers", "torch")

    def ready(self, model: Path) -> None:
        import torch

        _start()  # builds the communication backend for CPUs
        if self.settings.options["offload"] == "nvme":
            from deepspeed.accelerator import get_accelerator
            from deepspeed.ops.op_builder import AsyncIOBuilder

            AsyncIOBuilder().load()
            get_accelerator().pin_memory(torch.empty(1))

    def prepare(self, model: Path) -> str:
        import torch

        _start()
        import deepspeed
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        empty = empty_model(model)
        config = zero_config(self.settings, hidden=empty.config.hidden_size,
                             largest=max(p.numel() for p in empty.parameters()),
                             pinned=torch.cuda.is_available())
        # from_pretrained looks for a live object, to partition weights while loading.
        self._config_reference = HfDeepSpeedConfig(config)
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, self.settings.dtype))
        self._engine = deepspeed.initialize(model=loaded.eval(), config_params=config)[0]
        self.model = self._engine.module.eval()
        return f"ZeRO stage 3, offload_param {self.settings.options['offload']}"

    def close(self) -> None:
        import torch.distributed

        if self._engine is not None:
            self._engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self.model = self._engine = self._config_reference = None


def _choose_accelerator() -> None:
    """Select DeepSpeed's CPU accelerator without a GPU. Call it before importing deepspeed."""
    import torch

    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"


def _start() -> None:
    """Set up a process group of one, as a launcher would."""
    _choose_accelerator()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    import deepspeed

    deepspeed.init_distributed()
