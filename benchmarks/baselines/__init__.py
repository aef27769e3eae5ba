"""The systems that `compare.py` measures side by side, each in a file of its own. No torch."""

from __future__ import annotations

import importlib

from baselines.base import Baseline
from flexgen_h2o.errors import UserError

CLASSES = {
    "ours": "Ours", "transformers_memory": "TransformersMemory",
    "accelerate_offload": "AccelerateOffload", "deepspeed_zero": "DeepSpeedZero",
    "flexgen": "FlexGen", "h2o_fork": "H2OFork", "llama_cpp": "LlamaCpp",
}
"""Module of this package to the class in it."""


def baseline_class(module: str) -> type[Baseline]:
    """The class of a system; its own packages are loaded only when it runs. Raises `UserError`."""
    if module not in CLASSES:
        raise UserError(f"there is no baseline {module!r}: it is one of {', '.join(CLASSES)}")
    return getattr(importlib.import_module(f"baselines.{module}"), CLASSES[module])
