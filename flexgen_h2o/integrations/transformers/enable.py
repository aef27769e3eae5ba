"""`enable_h2o`: let `generate` of a transformers model run with an `H2OCache`.

    with enable_h2o(model, H2OConfig(heavy_ratio=0.1)):
        model.generate(**inputs, max_new_tokens=100)

Only public interfaces are used: `AttentionInterface`, `AttentionMaskInterface`, `Cache` and
`set_attn_implementation`.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.integrations.transformers.cache import NAME, H2OCache, register

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
