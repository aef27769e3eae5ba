"""EngineArgs: the arguments of an LLM, and checks of them against its model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.policy import (
    OFFLOAD_DIR,
    Policy,
    Workload,
    check_selective_fetch,
    speculative_policy,
)
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.distributed.pipeline import Pipeline
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.eviction import eviction_of
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.implementations import AutotuneTable
from flexgen_h2o.metrics.trace import Trace
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.storage.offload_dirs import OffloadDirs


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The arguments of an `LLM`, which documents them.

    `cache` combines the arguments of the KV cache. If `H2OConfig.prompt_chunk` is set, it is also
    the policy's `prefill_chunk`.

    Raises
    ------
    UserError
        A value is out of range, or arguments contradict each other.
    """

    model: str
    policy: Policy = Policy()
    cache: CacheOptions = CacheOptions()
    weight_bits: int | str = AUTO
    activation_bits: int = 16
    device: str = "auto"
    dtype: str = "auto"
    path: str | os.PathLike | None = None
    offload_dir: OffloadDirs = OffloadDirs.parse(OFFLOAD_DIR)
    weight_cache: str | os.PathLike | None = AUTO
    calibration: str | os.PathLike | None = None
    verify: bool = False
    generation_config: bool = True
    seed: int = 0
    memory_limit: int | None = None
    device_memory_limit: int | None = None
    workload: Workload | None = None
    texts: Sequence[str] = ()
    implementations: AutotuneTable | None = None
    batch_invariant: bool = False
    pipeline: Pipeline | None = None
    bounds: Sequence[int] | None = None
    progress: bool | None = None
    trace: Trace | None = None
    verbose: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineArgs:
        """Return the arguments for all options of an `LLM`, by name."""
        names = {field.name for field in fields(cls)} & options.keys()
        return cls(**{name: options[name] for name in names} | {
            "model": os.fspath(options["model"]), "policy": options["policy"] or Policy(),
            "offload_dir": OffloadDirs.parse(options["offload_dir"] or OFFLOAD_DIR),
            "cache": CacheOptions(options["h2o"], options["cache_bits"], options["attn_sparsity"],
                                  options["key_bits"], options["value_bits"])})

    def __post_init__(self) -> None:
        check_int("seed", self.seed, ge=0, le=2**63 - 1)
        for name in ("memory_limit", "device_memory_limit"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), ge=1)
        check_selective_fetch(self.policy, self.cache)
        if self.policy.speculate is not None:
            if self.pipeline is not None:
                raise UserError("speculate needs all layers on one rank: leave pipeline out")
            object.__setattr__(self, "policy", speculative_policy(self.policy, self.cache))
        policy_chunk = self.policy.prefill_chunk
        chunk = None if self.cache.h2o is None else self.cache.h2o.prompt_chunk
        if chunk is None or chunk == policy_chunk:
            return
        if policy_chunk is not None:
            raise UserError(f"the policy's prefill_chunk is {policy_chunk} and h2o's prompt_chunk "
                            f"{chunk}: give one of them, or the same")
        object.__setattr__(self, "policy", replace(self.policy, prefill_chunk=chunk))


def check_batch_invariant(config: ModelConfig, policy: Policy, cache: CacheOptions,
                          device: torch.device) -> None:
    """Raise `UserError` if results of a model depend on the batch also with batch invariance.

    `dispatch.batch_invariant` fixes the order of sums in matmuls, norms and activations of the C++
    library, whose attention computes each sequence by itself. Everything else is refused here.
    """
    h2o = cache.h2o if cache.evicts else None
    obstacles = (
        (device.type != "cpu", "on a GPU: compute on the CPU"),
        (ops.uses_reference("cpu"), "without the C++ kernels: build them"),
        (cache.attn_sparsity < 1, "with attn_sparsity: leave one of them out"),
        (cache.simulated, "in a simulation: leave one of them out"),
        (h2o is not None and h2o.positions == "rolling",
         "with rolling positions, which begin with a batch's first eviction: leave one of them "
         "out"),
        (h2o is not None and not eviction_of(h2o).policy.in_kernels,
         f"with the score {h2o and h2o.score}: choose sum, mean or decay"),
        (policy.prefill_chunk is not None and any(
            variant.window for variant in config.attention),
         "with prompts in chunks (prefill_chunk, streams, sessions and servers) for "
         f"{config.name}, which has sliding windows"),
    )
    for applies, reason in obstacles:
        if applies:
            raise UserError(f"batch_invariant does not work {reason}")
