"""Batch invariance: refuse models and options whose results depend on the batch."""

from __future__ import annotations

import torch

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.eviction import eviction_of
from flexgen_h2o.kernels import ops
from flexgen_h2o.models.model_config import ModelConfig


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
        (config.experts is not None, f"for {config.name}: outputs of its experts are added in the "
         "order in which they are loaded"),
        (config.latent is not None, f"for {config.name}: latent attention uses PyTorch's matmuls"),
        (config.recurrent is not None, f"for {config.name}: it has recurrent layers"),
        (cache.attn_sparsity < 1, "with attn_sparsity: leave one of them out"),
        (cache.simulated, "in a simulation: leave one of them out"),
        (h2o is not None and h2o.positions == "rolling",
         "with rolling positions, which begin with a batch's first eviction: leave one of them "
         "out"),
        (h2o is not None and eviction_of(h2o).policy is not None,
         f"with the score {h2o and h2o.score}: choose sum, mean or decay"),
        (policy.prefill_chunk is not None and any(
            variant.window for variant in config.attention),
         "with prompts in chunks (prefill_chunk, streams, sessions and servers) for "
         f"{config.name}, which has sliding windows"),
    )
    for applies, reason in obstacles:
        if applies:
            raise UserError(f"batch_invariant does not work {reason}")
