"""The model families: which file of `families` reads the config.json of which model type.

A family is one file of `families`, which reads top to bottom, and a line here for each of its model
types: see docs/families.md. Imports neither torch nor any family before it is wanted.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Protocol

FAMILIES: Mapping[str, str] = MappingProxyType({
    "opt": "opt",
    "llama": "llama",
    "mistral": "llama",
    "gpt_neox": "gpt_neox",
    "mixtral": "mixtral",
    "gpt_oss": "gpt_oss",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "seed_oss": "qwen",
    "phi3": "phi3",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "gemma3_text": "gemma",
    "granite": "granite",
    "olmo2": "olmo2",
    "stablelm": "stablelm",
})
"""From model_type in config.json to the module in `families`."""


class _OfFamily(Protocol):
    @property
    def family(self) -> str: ...


def family(config: _OfFamily) -> ModuleType:
    """The module of a model's family.

    Raises
    ------
    ValueError
        If there is no such family; `spec.from_transformers` never makes such a config.
    """
    if config.family not in FAMILIES.values():
        known = ", ".join(dict.fromkeys(FAMILIES.values()))
        raise ValueError(f"{config.family!r} is none of {known}")
    return _module(config.family)


def reader(model_type: str) -> ModuleType:
    """The module of the family that reads a model type, one of `FAMILIES`."""
    return _module(FAMILIES[model_type])


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"flexgen_h2o.models.families.{name}")
