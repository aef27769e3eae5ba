"""From a run's configuration to the `LLM` that it describes, for every command alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli.run_config import RunConfig

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM

_ALIKE = ("model", "path", "activation_bits", "key_bits", "value_bits", "attn_sparsity",
          "calibration", "verify", "device", "dtype", "offload_dir", "seed", "memory_limit",
          "device_memory_limit")


def llm_arguments(config: RunConfig, **others: Any) -> dict[str, Any]:
    """The arguments of `LLM` by name, with `others` in place of those of the config or beside
    them."""
    return {
        **{name: getattr(config, name) for name in _ALIKE},
        "policy": config.policy(),
        "h2o": config.h2o(),
        "weight_bits": config.resolved_weight_bits,
        "weight_cache": config.resolved_weight_cache,
        "cache_bits": config.resolved_cache_bits,
        "generation_config": not config.no_generation_config,
    } | others


def open_llm(config: RunConfig, **others: Any) -> LLM:
    """The `LLM` of `llm_arguments`. Loads torch; raises `UserError`."""
    from flexgen_h2o.llm import LLM  # only now: bad flags answer at once

    return LLM(**llm_arguments(config, **others))
