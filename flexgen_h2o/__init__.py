"""flexgen_h2o: generate text with models larger than the memory of the device that computes.

Names are loaded on first use (PEP 562), so that importing the package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexgen_h2o.config.h2o import H2OConfig
    from flexgen_h2o.config.placement import Placement
    from flexgen_h2o.config.policy import Policy
    from flexgen_h2o.config.sampling import SamplingParams, StructuredOutputs
    from flexgen_h2o.config.version import VERSION as __version__
    from flexgen_h2o.h2o.policies import PolicyState, register_policy
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.outputs import Output

__all__ = ["LLM", "H2OConfig", "Output", "Placement", "Policy", "PolicyState", "SamplingParams",
           "StructuredOutputs", "__version__", "register_policy"]

_PUBLIC_NAMES = {
    "LLM": "llm.LLM", "H2OConfig": "config.h2o.H2OConfig", "Output": "outputs.Output",
    "Placement": "config.placement.Placement", "Policy": "config.policy.Policy",
    "PolicyState": "h2o.policies.PolicyState", "SamplingParams": "config.sampling.SamplingParams",
    "StructuredOutputs": "config.sampling.StructuredOutputs",
    "__version__": "config.version.VERSION", "register_policy": "h2o.policies.register_policy",
}
"""Where each public name is defined."""


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PUBLIC_NAMES[name].rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
