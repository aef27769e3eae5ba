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
    from flexgen_h2o.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "H2OConfig", "Placement", "Policy", "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name == "__version__" or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "llm" if name == "LLM" else "config"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
