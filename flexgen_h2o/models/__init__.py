"""Model families: what a model is made of, and its forward pass over plain tensors.

A family is one module with these functions; w maps its short tensor names to tensors, and rows
are packed real tokens:

    weights(cfg) -> ModelWeights                      the tensors and their checkpoint names
    aliases(name) -> tuple of names                   what a checkpoint may call a tensor
    embed(cfg, w, lookup, ids, positions) -> x        [rows, hidden]
    rope(cfg, positions, dtype) -> (cos, sin) | None  rotary tables of these rows
    attention_inputs(cfg, w, x, do) -> q, k, v        [rows, heads (of k and v: kv_heads), head_dim]
    attention_output(cfg, w, x, attended, do)         adds to x, and returns it; attended is like q
    mlp(cfg, w, x, do) -> x                           adds to x, and returns it
    head(cfg, w, x) -> logits                         [rows, vocab]

A decoder layer is `attention_inputs`, causal attention over the cache and these rows with softmax
scale head_dim ** -0.5, `attention_output`, and `mlp`; with a parallel residual `attention_output`
does the MLP too. q and k come before rotation, since the cache decides at which positions. All
three may be overwritten, and hold only until the next `attention_inputs` with the same `do`.

`do` are the operations of a layer with their buffers (`layers.Operations`). Those three functions
change tensors through nothing else: a decode step is carried out at once, or noted once for a block
and then run by few calls (`recording.Recording`), by the same lines.

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
