"""DeepSpeed ZeRO-Inference: ZeRO stage 3 with parameters in host memory or on NVMe.

Where there is no GPU, DeepSpeed's CPU accelerator computes. What it has in C++ is compiled at first
use, for NVMe with libaio's headers (Debian's libaio-dev). A build that was killed leaves a file
`lock` below ~/.cache/torch_extensions, for which the next waits forever: remove it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baselines.base import BaselineSettings, installed, missing
from baselines.hf_generate import HuggingFaceBaseline, empty_model
from flexgen_h2o.config.validation import check_choice

PLACES = ("cpu", "nvme")


def zero_config(settings: BaselineSettings, *, hidden: int, largest: int, pinned: bool
                ) -> dict[str, Any]:
    """DeepSpeed's configuration for inference: no optimizer, parameters fetched layer by layer.

    Parameters
    ----------
    settings : BaselineSettings
    hidden, largest : int
        The model's hidden size, and the elements of its largest parameter.
    pinned : bool
        Whether buffers in host memory are page-locked, which copies to a GPU need to be fast.
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
    """See `baselines.base.Baseline`. The option `offload` is one of `PLACES`."""

    documented = "https://www.deepspeed.ai/2022/09/09/zero-inference.html"
    options: Mapping[str, Any] = {"offload": "cpu"}
    _engine = None
    _kept = None

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        found = super().check(name, options)
        check_choice(f"system {name}: offload", found["offload"], PLACES)
        return found

    @classmethod
    def loads_beyond(cls, options: Mapping[str, Any]) -> bool:
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

        _start()  # builds what processes talk by, on a CPU
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
        # from_pretrained looks for a live one, to partition weights as they are loaded.
        self._kept = HfDeepSpeedConfig(config)
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
        self.model = self._engine = self._kept = None


def _choose_accelerator() -> None:
    """Tell DeepSpeed, before it is imported, that there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"


def _start() -> None:
    """Begin as a launcher of one process would."""
    _choose_accelerator()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    import deepspeed

    deepspeed.init_distributed()
