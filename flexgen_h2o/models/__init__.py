"""Model families: what a model is made of, and its forward pass over plain tensors.

A family is one module with these functions; w maps its short tensor names to tensors, and rows
are packed real tokens:

    weights(cfg) -> ModelWeights                      the tensors and their checkpoint names
    aliases(name) -> tuple of names                   what a checkpoint may call a tensor
    embed(cfg, w, lookup, ids, positions) -> x        [rows, hidden]
    rope(cfg, positions, dtype) -> (cos, sin) | None  rotary tables of these rows
    decoder_layer(cfg, w, x, scratch) -> Halves       a generator: see layers.Halves
    attention(cfg, w, x, scratch) -> Halves           its part up to the MLP
    mlp(cfg, w, x, scratch) -> x                      and the rest
    head(cfg, w, x) -> logits                         [rows, vocab]

Importing this package imports no torch: that comes with the first `family`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from flexgen_h2o.models.spec import ModelConfig

FAMILIES = ("opt", "llama", "gpt_neox")


def family(cfg: ModelConfig) -> ModuleType:
    """The module of a model's family.

    Raises
    ------
    ValueError
        If there is no such family; `spec.from_transformers` never makes such a config.
    """
    if cfg.family not in FAMILIES:
        raise ValueError(f"{cfg.family!r} is none of {', '.join(FAMILIES)}")
    return importlib.import_module(f"{__name__}.{cfg.family}")


def checkpoint_folder(name: str, *, dtype: str | None = None,
                      progress: Callable[[int, int], None] | None = None) -> Path:
    """The local Hugging Face folder of any model that `LLM` takes; see `sources`."""
    from flexgen_h2o.models import sources  # only now: it needs torch to convert

    return sources.checkpoint_folder(name, dtype=dtype, progress=progress)
