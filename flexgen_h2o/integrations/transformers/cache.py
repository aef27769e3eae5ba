"""H2O as transformers' own parts: a `Cache`, an attention function, and a mask function.

The three meet in an `H2OLayer`: models give new keys and values to the cache, which caches nothing
and hands the layer on with the keys to the attention function, which does the work.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import sdpa_mask

from flexgen_h2o.cache.prefill import LayerAttention
from flexgen_h2o.config.attention_form import AttentionForm
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.integrations.transformers.layer import H2OLayer
from flexgen_h2o.integrations.transformers.layers import SimulatedLayer, SlotLayer
from flexgen_h2o.integrations.transformers.passes import PassTracker
from flexgen_h2o.integrations.transformers.rotations import Rotations

NAME = "flexgen_h2o"
"""The name of the attention implementation in transformers."""

FAMILIES = ("opt", "llama", "mistral", "qwen2", "qwen3", "seed_oss", "phi3", "granite", "olmo2",
            "stablelm", "gpt_neox", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "olmoe",
            "qwen2_moe", "qwen3_moe")
"""`model_type` of the models that are tested."""


class H2OCache(Cache):
    """The KV cache of one batch, kept at its budget by the heavy-hitter oracle (arXiv 2306.14048).

    For a model that `enable_h2o` has prepared. `generate` makes one by itself; pass your own as
    ``past_key_values`` to go on with a text later, with the longer ``input_ids``. Ratios are of
    each sequence's first prompt, pads left out; further turns keep those budgets.

    Parameters
    ----------
    config : PreTrainedConfig
        The model's.
    h2o : H2OConfig
    cache_bits : int
        16: keys and values in the model's dtype; 8 or 4: in groups of codes with scales.
    key_bits, value_bits : int, optional
        Of keys and of values, in place of `cache_bits`.
    rotary : Module, optional
        The model's rotary embedding, for positions that roll; `EnabledH2O.new_cache` gives it.

    Raises
    ------
    UserError
        A model of another family, or an option that does not work here.
    """

    def __init__(self, config: Any, h2o: H2OConfig, *, cache_bits: int = 16,
                 key_bits: int | None = None, value_bits: int | None = None,
                 rotary: torch.nn.Module | None = None):
        check(config, h2o)
        options = CacheOptions(h2o, cache_bits, key_bits=key_bits, value_bits=value_bits)
        rotations = Rotations(rotary) if h2o.positions == "rolling" else None
        self.h2o = h2o
        self._config = config
        self._progress = PassTracker()
        layout = options.layout(head_dim(config))
        super().__init__(layers=[
            SimulatedLayer(index, h2o, self._progress, rotations) if h2o.simulate
            else SlotLayer(index, h2o, self._progress, rotations, layout=layout)
            for index in range(config.num_hidden_layers)])

    def nbytes(self) -> int:
        """Bytes that the keys and values take now, in all layers.

        Where layers evict, scores and positions take another 8 bytes a slot and KV head, and
        ranks 4 more where positions roll.
        """
        return sum(layer.nbytes() for layer in self.layers)

    def get_mask_sizes(self, *args: Any, **options: Any) -> tuple[int, int]:
        """(0, 0): pads are all that attention has to be told of. See `padding_mask`."""
        if self._config._attn_implementation != NAME:
            raise UserError("an H2OCache works under enable_h2o(model, ...) alone: the attention "
                            f"{self._config._attn_implementation} cannot use it")
        return 0, 0

    def reset(self) -> None:
        """Forget all sequences; the next may be others."""
        super().reset()
        self._progress.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Go on with some of the sequences, int64 [sequences], in this order."""
        super().reorder_cache(beam_idx)
        self._progress.choose(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with some of the sequences."""
        self.reorder_cache(indices)


def head_dim(config: Any) -> int:
    """Elements of a key."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check(config: Any, h2o: H2OConfig) -> None:
    """Raise `UserError` for what an `H2OCache` cannot do, by name."""
    if config.model_type not in FAMILIES:
        raise UserError(f"models of type {config.model_type} are not supported: "
                        f"{', '.join(FAMILIES)} are")
    if not isinstance(h2o, H2OConfig):
        raise UserError(f"h2o must be an H2OConfig, got {h2o!r}")
    h2o.check_layers(config.num_hidden_layers)
    if h2o.drop_positions:
        raise UserError("drop_positions does not work in transformers' models: they look "
                        "positions up themselves; use LLM")
    if h2o.positions == "rolling" and config.model_type == "gemma3_text":
        raise UserError("positions='rolling' does not work in Gemma 3: it rotates some layers in "
                        "another way than others")
    if h2o.budget_of != "prompt":
        raise UserError("budget_of 'text' does not work in transformers' models: their caches keep "
                        "the budgets of the first prompt; use LLM")
    if h2o.recall:
        raise UserError("recall does not work in transformers' models: use LLM")


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None, **options: Any
              ) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: H2O where an `H2OCache` is in use, ``sdpa`` elsewhere.

    Parameters
    ----------
    query : Tensor [sequences, heads, tokens, head_dim]
    key, value : Tensor [sequences, kv_heads, tokens, head_dim]
    attention_mask : bool Tensor [sequences, tokens so far] or None
        What `padding_mask` made.
    scaling : float, optional
        Of the products of query and key. None: ``head_dim ** -0.5``.

    Returns
    -------
    out : Tensor [sequences, tokens, heads, head_dim]
    None
        In place of the attention weights, which are never all there.

    Raises
    ------
    UserError
        For training and dropout, and for learned sinks without an `H2OCache`.
    """
    layer: H2OLayer | None = getattr(key, "h2o_layer", None)
    if layer is None and options.get("s_aux") is not None:
        raise UserError("while H2O is enabled a model with learned sinks runs with an H2OCache "
                        "alone: generate brings one, new_cache() makes one")
    if layer is None:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask,
                                            scaling=scaling, **options)
    if options.get("dropout") or (torch.is_grad_enabled() and query.requires_grad):
        raise UserError("an H2OCache is for inference: call model.eval(), and the model under "
                        "torch.no_grad()")
    own, window = query.shape[-1] ** -0.5, options.get("sliding_window") or None
    if window is not None and window >= getattr(module.config, "max_position_embeddings", math.inf):
        window = None
    sinks = options.get("s_aux")
    form = AttentionForm(None if scaling in (None, own) else scaling, options.get("softcap") or 0.0,
                         window, sinks is not None)
    return layer.attend(query, key, value, mask=attention_mask,
                        positions=options.get("position_ids"),
                        attention=LayerAttention(form, sinks)), None


def padding_mask(*, kv_length: int, attention_mask: torch.Tensor | None = None, **options: Any
                 ) -> torch.Tensor | None:
    """transformers' mask interface: for an `H2OCache` the 2-D mask of pads; else that of ``sdpa``.

    A full mask would take memory quadratic in the prompt. An `H2OCache` is recognized by asking for
    a mask over 0 keys.
    """
    if kv_length == 0:
        return attention_mask
    return sdpa_mask(kv_length=kv_length, attention_mask=attention_mask, **options)


def register() -> None:
    """Make the attention implementation known to transformers; a second time changes nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
