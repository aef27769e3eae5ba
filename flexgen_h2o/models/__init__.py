"""Model families: what a model is made of, and its forward pass over plain tensors.

A family is one module of `families` with these names; w maps its short tensor names to tensors, and
rows are packed real tokens:

    DEFAULTS                                          of config.json, by model type
    read(fields) -> ModelConfig                       the sizes and options of a config.json
    weights(cfg) -> ModelWeights                      the tensors and their checkpoint names
    aliases(name) -> tuple of names                   what a checkpoint may call a tensor
    embed(cfg, w, lookup, ids, positions) -> x        [rows, hidden]
    attention_inputs(cfg, w, x, do) -> q, k, v        [rows, heads (of k and v: kv_heads), head_dim]
    attention_output(cfg, w, x, attended, do)         adds to x, and returns it; attended is like q
    mlp(cfg, w, x, do) -> x                           adds to x, and returns it
    head(cfg, w, x) -> logits                         [rows, vocab]

A mixture of experts has other functions, and `mlp` only for layers without experts: see `mixture`.

A decoder layer is `attention_inputs`, causal attention over the cache and these rows of the layer's
`AttentionForm`, `attention_output`, and `mlp`; with a parallel residual `attention_output`
does the MLP too. q and k come before rotation, since the cache decides at which positions. All
three may be overwritten, and hold only until the next `attention_inputs` with the same `do`.

`do` are the operations of a layer with their buffers (`layers.Operations`). Those three functions
change tensors through nothing else: a decode step is carried out at once, or noted once for a block
and then run by few calls (`layers.CapturingOperations`), by the same lines.

Importing a family imports no torch: the memory plan reads sizes off its table of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flexgen_h2o.models.model_config import family
from flexgen_h2o.models.registry import FAMILIES

__all__ = ["FAMILIES", "checkpoint_folder", "family"]


def checkpoint_folder(name: str, *, dtype: str | None = None,
                      progress: Callable[[int, int], None] | None = None) -> Path:
    """The local Hugging Face folder of any model that `LLM` takes; see `sources`."""
    from flexgen_h2o.models import sources  # only now: it needs torch to convert

    return sources.checkpoint_folder(name, dtype=dtype, progress=progress)
