"""H2O as transformers' interfaces: a `Cache`, an attention function, and a mask function.

Models give new keys and values to the cache. It hands an `H2OLayer` on with the keys to the
attention function, which calls `H2OLayer.attend`. `enable_h2o` lets `generate` of a model use it:

    with enable_h2o(model, H2OConfig(heavy_ratio=0.1)):
        model.generate(**inputs, max_new_tokens=100)

Only public interfaces are used: `AttentionInterface`, `AttentionMaskInterface`, `Cache` and
`set_attn_implementation`.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.generation import GenerationMode
from transformers.masking_utils import sdpa_mask

from flexgen_h2o.cache.chunked_prefill import LayerAttention
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.layers import AttentionVariant
from flexgen_h2o.errors import UserError
from flexgen_h2o.integrations.transformers.forward_pass import PassTracker, Rotations
from flexgen_h2o.integrations.transformers.layers import H2OLayer, SimulatedLayer, SlotLayer

NAME = "flexgen_h2o"
"""Name of the attention implementation in transformers."""

FAMILIES = ("opt", "llama", "mistral", "qwen2", "qwen3", "seed_oss", "phi3", "granite", "olmo2",
            "stablelm", "gpt_neox", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "olmoe",
            "qwen2_moe", "qwen3_moe")
"""`model_type` of the supported models."""


class H2OCache(Cache):
    """The KV cache of one batch, evicted to its budget by H2O (arXiv 2306.14048).

    It needs a model that `enable_h2o` has prepared, whose `generate` creates one by itself. To
    continue a text later, pass your own as ``past_key_values`` with the longer ``input_ids``.
    Ratios are shares of each sequence's first prompt, without pads; later turns keep the budgets.

    Parameters
    ----------
    config : PreTrainedConfig
        Configuration of the model.
    h2o : H2OConfig
    cache_bits : int
        16: keys and values have the model's dtype; 8 or 4: they are quantized in groups.
    key_bits, value_bits : int, optional
        Bits of keys and of values, instead of `cache_bits`.
    rotary : Module, optional
        The model's rotary embedding, for rolling positions; `EnabledH2O.new_cache` passes it.

    Raises
    ------
    UserError
        The model or an option is not supported.
    """

    def __init__(self, config: Any, h2o: H2OConfig, *, cache_bits: int = 16,
                 key_bits: int | None = None, value_bits: int | None = None,
                 rotary: torch.nn.Module | None = None):
        check(config, h2o)
        options = CacheOptions(h2o, cache_bits, key_bits=key_bits, value_bits=value_bits)
        rotations = Rotations(rotary) if h2o.positions == "rolling" else None
        self.h2o = h2o
        self._config = config
        self._tracker = PassTracker()
        layout = options.layout(head_dim(config))
        super().__init__(layers=[
            SimulatedLayer(index, h2o, self._tracker, rotations) if h2o.simulate
            else SlotLayer(index, h2o, self._tracker, rotations, layout=layout)
            for index in range(config.num_hidden_layers)])

    def nbytes(self) -> int:
        """Return the bytes of keys and values in all layers.

        The eviction state adds 8 bytes for each slot and KV head, and 4 more if positions roll.
        """
        return sum(layer.nbytes() for layer in self.layers)

    def get_mask_sizes(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Return (0, 0): attention needs only a mask of pads, see `padding_mask`."""
        if self._config._attn_implementation != NAME:
            raise UserError("an H2OCache only works under enable_h2o(model, ...): the attention "
                            f"{self._config._attn_implementation} cannot use it")
        return 0, 0

    def reset(self) -> None:
        """Forget all sequences."""
        super().reset()
        self._tracker.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue some of the sequences, int64 [sequences], in this order."""
        super().reorder_cache(beam_idx)
        self._tracker.select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Continue some of the sequences."""
        self.reorder_cache(indices)


def head_dim(config: Any) -> int:
    """Return the elements of a key of one head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check(config: Any, h2o: H2OConfig) -> None:
    """Raise `UserError` for a model or an option that an `H2OCache` does not support."""
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
    """Attend as transformers' attention interface: with an `H2OCache`, or else as ``sdpa``.

    Parameters
    ----------
    query : Tensor [sequences, heads, tokens, head_dim]
    key, value : Tensor [sequences, kv_heads, tokens, head_dim]
    attention_mask : bool Tensor [sequences, tokens so far] or None
        From `padding_mask`.
    scaling : float, optional
        Factor on the products of queries and keys. None: ``head_dim ** -0.5``.

    Returns
    -------
    out : Tensor [sequences, tokens, heads, head_dim]
    None
        Instead of attention weights, which are never stored.

    Raises
    ------
    UserError
        For training and dropout, and for attention sinks without an `H2OCache`.
    """
    layer: H2OLayer | None = getattr(key, "h2o_layer", None)
    if layer is None and options.get("s_aux") is not None:
        raise UserError("while H2O is enabled, a model with learned sinks needs an H2OCache: "
                        "generate creates one, and so does new_cache()")
    if layer is None:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask,
                                            scaling=scaling, **options)
    if options.get("dropout") or (torch.is_grad_enabled() and query.requires_grad):
        raise UserError("an H2OCache is for inference: call model.eval(), and the model under "
                        "torch.no_grad()")
    default_scaling = query.shape[-1] ** -0.5
    window = options.get("sliding_window") or None
    if window is not None and window >= getattr(module.config, "max_position_embeddings", math.inf):
        window = None
    sinks = options.get("s_aux")
    variant = AttentionVariant(None if scaling in (None, default_scaling) else scaling,
                               options.get("softcap") or 0.0, window, sinks is not None)
    return layer.attend(query, key, value, mask=attention_mask,
                        positions=options.get("position_ids"),
                        attention=LayerAttention(variant, sinks)), None


def padding_mask(*, kv_length: int, attention_mask: torch.Tensor | None = None, **options: Any
                 ) -> torch.Tensor | None:
    """Return the mask of transformers' mask interface: with an `H2OCache`, the 2-D mask of pads.

    A full mask would take memory quadratic in the prompt. An `H2OCache` asks for a mask over 0
    keys; other caches get the mask of ``sdpa``.
    """
    if kv_length == 0:
        return attention_mask
    return sdpa_mask(kv_length=kv_length, attention_mask=attention_mask, **options)


def register() -> None:
    """Register the attention implementation with transformers; idempotent."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)


MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH,
         GenerationMode.BEAM_SAMPLE)

# Parameter names of the cache in versions of transformers, the newest first.
CACHE_NAMES = ("cache", "past_key_values")
CACHE_NAME = next(name for name in CACHE_NAMES if name in inspect.signature(
    GenerationMixin.prepare_inputs_for_generation).parameters)
"""``cache`` from transformers 5.24 on, ``past_key_values`` before."""

# Options of `generate` that are not supported, and why.
REFUSED = {
    "cache_implementation": "enable_h2o brings the cache",
    "prefill_chunk_size": "the budget comes from the whole prompt; H2OConfig(prompt_chunk=...) "
                          "evicts inside of prompts",
    "custom_generate": "its use of a cache is unknown",
    "output_attentions": "attention weights are never stored",
}


class EnabledH2O:
    """A model whose `generate` evicts until `disable` or the end of a ``with`` block.

    Attributes
    ----------
    model : PreTrainedModel
    h2o : H2OConfig
    cache_bits : int
    key_bits, value_bits : int or None
    """

    def __init__(self, model: Any, h2o: H2OConfig, *, cache_bits: int = 16,
                 key_bits: int | None = None, value_bits: int | None = None):
        if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
            raise UserError("enable_h2o takes a model of transformers that generates, got "
                            f"{type(model).__name__}")
        self.model, self.h2o, self.cache_bits = model, h2o, cache_bits
        self.key_bits, self.value_bits = key_bits, value_bits
        self.new_cache()  # raises for options that are not supported
        self._before = model.config._attn_implementation
        if self._before == NAME:
            raise UserError("H2O is enabled for this model already: disable that first")
        # Other code may have wrapped `generate` of this object, too.
        self._wrapped = vars(model).get("generate")
        register()
        model.set_attn_implementation(NAME)
        # A bound method: deep copies and pickles bind it to the copy.
        model.generate = self.generate

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        register()  # the pickle may be from another process

    def __enter__(self) -> EnabledH2O:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    def disable(self) -> None:
        """Restore the model; idempotent."""
        if self._before is None:
            return
        if self._wrapped is None:
            del self.model.generate
        else:
            self.model.generate = self._wrapped
        self.model.set_attn_implementation(self._before)
        self._before = None

    def new_cache(self) -> H2OCache:
        """Return a cache for a text that is to be continued later.

        Pass it to `generate` as ``past_key_values`` (``cache`` from transformers 5.24 on).
        """
        return H2OCache(self.model.config, self.h2o, cache_bits=self.cache_bits,
                        key_bits=self.key_bits, value_bits=self.value_bits,
                        rotary=getattr(self.model.base_model, "rotary_emb", None))

    def generate(self, *args: Any, **options: Any) -> Any:
        """Call the model's `generate` with an `H2OCache`.

        Raises
        ------
        UserError
            An option is not supported.
        """
        self._check(options, args[1] if len(args) > 1 else None)
        if all(options.get(name) is None for name in CACHE_NAMES):
            options[CACHE_NAME] = self.new_cache()
        if self._wrapped is not None:
            return self._wrapped(*args, **options)
        return type(self.model).generate(self.model, *args, **options)

    def _check(self, options: dict[str, Any], config: Any) -> None:
        config = config or options.get("generation_config") or self.model.generation_config
        config = copy.deepcopy(config)
        config.update(**{name: value for name, value in options.items()
                         if name != "generation_config"})
        for name, reason in REFUSED.items():
            if options.get(name) or getattr(config, name, None):
                raise UserError(f"generate cannot take {name} while H2O is enabled: {reason}")
        if config.use_cache is False:
            raise UserError("generate cannot take use_cache=False while H2O is enabled: H2O is "
                            "about the cache")
        mode = config.get_generation_mode(options.get("assistant_model"))
        if mode not in MODES:
            raise UserError(f"{mode.value.replace('_', ' ')} does not work while H2O is enabled: "
                            "it removes tokens, and evicted ones cannot be restored"
                            if mode == GenerationMode.ASSISTED_GENERATION else
                            f"{mode.value.replace('_', ' ')} does not work while H2O is enabled")
        for name in CACHE_NAMES:
            cache = options.get(name)
            if cache is not None and not isinstance(cache, H2OCache):
                raise UserError(f"while H2O is enabled {name} must be an H2OCache, got "
                                f"{type(cache).__name__}")


def enable_h2o(model: Any, h2o: H2OConfig, *, cache_bits: int = 16, key_bits: int | None = None,
               value_bits: int | None = None) -> EnabledH2O:
    """Let a model's `generate` run with a KV cache that evicts (arXiv 2306.14048).

    Greedy search, sampling, beam search, padded batches, streamers and models that accelerate
    offloads work. Forward passes without an `H2OCache` attend as ``sdpa`` does.

    Parameters
    ----------
    model : PreTrainedModel
        OPT, LLaMA, Mistral, Qwen2, Qwen3, Seed-OSS, Phi-3, Gemma 2 and 3 (text), Granite, OLMo 2,
        StableLM, GPT-NeoX, gpt-oss, Mixtral, OLMoE or Qwen MoE. Only its attention implementation
        and, on this object, `generate` are changed.
    h2o : H2OConfig
        ``drop_positions`` and ``budget_of="text"`` need `LLM`.
    cache_bits : int
        16: keys and values have the model's dtype; 8 or 4: they are quantized in groups.
    key_bits, value_bits : int, optional
        Bits of keys and of values, instead of `cache_bits`. 8 and 4 lose almost no accuracy.

    Returns
    -------
    EnabledH2O
        A context manager, in effect at once; its end or `disable` restores the model. Deep copies
        and pickles have their own `model`, and apply to it.

    Raises
    ------
    UserError
        The model or an option is not supported, or H2O is enabled already.
    """
    return EnabledH2O(model, h2o, cache_bits=cache_bits, key_bits=key_bits, value_bits=value_bits)
