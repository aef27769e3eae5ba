"""Model types, their families, published models, and the defaults of generation_config.json.

`from_transformers` turns a config.json into a `ModelConfig`. Neither torch nor transformers is
imported: the memory plan needs the sizes before those load.
docs/contributing.md shows how to add a family.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from flexgen_h2o.config.sampling import SAMPLING_ONLY, SamplingParams
from flexgen_h2o.errors import UserError, short_repr
from flexgen_h2o.files.readers import path_exists, read_checkpoint_json
from flexgen_h2o.models.fields import MAX_TOKENS, Fields
from flexgen_h2o.models.mixture import MixtureDecoder
from flexgen_h2o.models.model_config import ModelConfig, family_named
from flexgen_h2o.models.quantization import Quantization, quantization
from flexgen_h2o.models.shapes import PUBLISHED, SAME_AS

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")

_LOCK = threading.RLock()
_TRIES = 8

FAMILIES: Mapping[str, str] = MappingProxyType({
    "opt": "opt.Opt", "llama": "llama.Llama", "mistral": "llama.Llama",
    "gpt_neox": "gpt_neox.GptNeoX", "mixtral": "mixtral.Mixtral", "gpt_oss": "gpt_oss.GptOss",
    "olmoe": "olmo.Olmoe", "qwen2_moe": "qwen.Qwen2Moe", "qwen3_moe": "qwen.Qwen3Moe",
    "glm4_moe": "glm.Glm4Moe", "solar_open": "glm.Glm4Moe", "dots1": "qwen.Dots1",
    "minimax_m2": "mixtral.MiniMaxM2", "ernie4_5_moe": "ernie.Ernie45Moe", "phimoe": "phi.PhiMoe",
    "llama4_text": "llama.Llama4", "exaone_moe": "olmo.ExaoneMoe", "afmoe": "afmoe.AfMoe",
    "flex_olmo": "olmo.FlexOlmo", "granitemoe": "llama.GraniteMoe",
    "granitemoeshared": "llama.GraniteMoe", "qwen3_next": "qwen3_next.Qwen3Next",
    "qwen3_5_text": "qwen3_next.Qwen3Next", "qwen3_5_moe_text": "qwen3_next.Qwen3Next",
    "qwen2": "qwen.Qwen", "qwen3": "qwen.Qwen", "seed_oss": "qwen.Qwen", "phi3": "phi.Phi3",
    "gemma2": "gemma.Gemma", "gemma3_text": "gemma.Gemma", "gemma4_text": "gemma.Gemma4",
    "gemma4_unified_text": "gemma.Gemma4", "granite": "llama.Granite", "olmo2": "olmo.Olmo2",
    "olmo3": "olmo.Olmo2", "exaone4": "olmo.Exaone4", "smollm3": "llama.SmolLM3", "glm": "glm.Glm",
    "glm4": "glm.Glm", "cohere": "cohere.Cohere", "cohere2": "cohere.Cohere",
    "apertus": "llama.Apertus", "ernie4_5": "ernie.Ernie", "stablelm": "gpt_neox.StableLm",
    "deepseek_v2": "deepseek.DeepSeek", "deepseek_v3": "deepseek.DeepSeek",
    "kimi_k2": "deepseek.DeepSeek", "glm4_moe_lite": "deepseek.DeepSeek",
})
"""Module and class in `families` by the model_type of config.json."""

_QWEN_VL = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}

MULTIMODAL: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType({
    "gemma3": ("gemma3_text", {}),
    "gemma4": ("gemma4_text", {}),
    "gemma4_unified": ("gemma4_unified_text", {}),
    "mistral3": ("mistral", {}),
    "llava": ("llama", {}),
    "aya_vision": ("cohere2", {}),
    "internvl": ("qwen2", {}),
    "llama4": ("llama4_text", {}),
    "qwen2_vl": ("qwen2", _QWEN_VL),
    "qwen2_5_vl": ("qwen2", _QWEN_VL),
    "qwen3_vl": ("qwen3", {"rope_theta": 5e5}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "glm4v": ("glm4", {"rms_norm_eps": 1e-5, "head_dim": None}),
})
"""Models with vision whose text model is one of `FAMILIES`, by the model_type of config.json.

A tuple has the type of the text model if text_config names none, or one that only this model has,
and the values that transformers assumes for keys missing in its text_config, where they differ
from the defaults of the type. With text alone their three-dimensional rope (M-RoPE) is plain rope.
"""


def published(name: str) -> ModelConfig | None:
    """Return the configuration of a published model, without a network.

    Parameters
    ----------
    name : str
        Such as "facebook/opt-30b" or "opt-30b", in any case.

    Returns
    -------
    ModelConfig or None
        None if the name is not in `shapes.PUBLISHED`.
    """
    values = _published(name)
    return None if values is None else from_transformers(values, name)


def published_quantization(name: str) -> Quantization | None:
    """Return the quantization of a published model's checkpoint; None if it has none."""
    return quantization(_published(name) or {}, name)


def _published(name: str) -> dict[str, Any] | None:
    for full in (*PUBLISHED, *SAME_AS):
        if name.lower() in (full.lower(), full.lower().split("/")[1]):
            return PUBLISHED[SAME_AS.get(full, full)]
    return None


def read_config(folder: Path) -> dict:
    """Return the config.json of a Hugging Face folder.

    Raises
    ------
    UserError
        If it is missing, not a file or not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path_exists(path):
        raise UserError(f"there is no {path}: give a folder with a Hugging Face model")
    config = read_checkpoint_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object")
    return config


def from_transformers(config: Any, name: str) -> ModelConfig:
    """Read a transformers config, in the spelling of transformers 4 or 5.

    Parameters
    ----------
    config : dict or transformers.PretrainedConfig
        The content of config.json, or the object made from it.
    name : str
        The user's name of the model; error messages begin with it.

    Raises
    ------
    UserError
        If the architecture or an option is not supported, or a value is out of range.
    """
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        raise UserError(f"{name}: config.json must hold an object, not {type(values).__name__}")
    values = text_config(values, name)
    _refuse_unsupported(values, name)
    model_type = values["model_type"]
    family = family_named(FAMILIES[model_type])
    return family.read(Fields(name, values, family.DEFAULTS[model_type], FAMILIES[model_type]))


def text_config(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the config.json of the text model of a model with vision; of others `values` itself.

    Keys that its text_config lacks come from the outer object, and so do the end tokens and
    tie_word_embeddings. Older checkpoints of Qwen have no text_config.
    """
    outer_type = values.get("model_type")
    if not isinstance(outer_type, str) or outer_type not in MULTIMODAL:
        return values
    text = values.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise UserError(f"{name}: config value text_config must be an object")
    model_type, defaults = MULTIMODAL[outer_type]
    named = text.get("model_type") or model_type
    outer = {key: values[key] for key in ("eos_token_id", "tie_word_embeddings") if key in values}
    merged = {**defaults, **values, **text, **outer}
    for key in ("rope_scaling", "rope_parameters"):
        rope = merged.get(key)
        if isinstance(rope, Mapping) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            merged[key] = {**rope, "rope_type": "default"}
    is_default = named in (model_type, outer_type, f"{outer_type}_text")
    return {**merged, "model_type": model_type if is_default else named}


def _refuse_unsupported(values: Mapping[str, Any], name: str) -> None:
    attention = values.get("attn_config")
    nested = attention if isinstance(attention, Mapping) else {}
    if (values.get("alibi") or nested.get("alibi")
            or values.get("position_embedding_type") == "alibi"):
        raise UserError(f"{name}: ALiBi attention biases are not supported")
    model_type = values.get("model_type")
    known = isinstance(model_type, str) and model_type in FAMILIES
    has_experts = known and isinstance(family_named(FAMILIES[model_type]), MixtureDecoder)
    for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        if values.get(key) and not has_experts:
            raise UserError(f"{name}: mixture of experts ({key}) is not supported")
    quantization(values, name)
    if not known:
        raise UserError(f"{name}: model type {model_type!r} is not supported "
                        "(docs/families.md lists those that are)")


def retry_imports(function: Callable[_Options, _Result]) -> Callable[_Options, _Result]:
    """Decorate a function that imports from transformers for use in several threads.

    It runs in one thread at a time and is retried after an ImportError: transformers replaces its
    packages by lazy modules while these are imported, so an import in a thread of the user's, which
    does not hold the lock, may make one fail for each package on the way.
    """
    @functools.wraps(function)
    def call(*args: _Options.args, **options: _Options.kwargs) -> _Result:
        for _ in range(_TRIES - 1):
            try:
                with _LOCK:
                    return function(*args, **options)
            except ImportError:
                pass
        with _LOCK:
            return function(*args, **options)

    return call


_SUPPORTED = (*SAMPLING_ONLY, "min_new_tokens", "min_length", "repetition_penalty",
              "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
              "stop_strings")

_OTHERS: Mapping[str, object] = {
    "num_beams": 1, "penalty_alpha": 0, "dola_layers": None, "guidance_scale": 1,
    "sequence_bias": None, "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "forced_decoder_ids": None,
    "exponential_decay_length_penalty": None, "watermarking_config": None, "constraints": None,
    "force_words_ids": None, "token_healing": False, "max_time": None}
"""Unsupported parameters that change greedy tokens, and their neutral values."""

_OTHERS_OF_SAMPLING: Mapping[str, object] = {
    "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}
"""Unsupported parameters that change sampled tokens only."""


@dataclass(frozen=True)
class GenerationDefaults:
    """The generation defaults of a model.

    Attributes
    ----------
    end_tokens : tuple of int
        Ids of the tokens that end a text.
    params : mapping
        Values that replace None in `SamplingParams`.
    others : mapping
        Values of unsupported parameters.
    path : Path or None
        The file that has these values.
    """

    end_tokens: tuple[int, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, object] = field(default_factory=dict)
    path: Path | None = None

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with these defaults in place of None.

        Raises `UserError` if the model sets an unsupported parameter, or a value out of range.
        """
        advice = ("fix it, or leave these defaults out with generation_config=False "
                  "(--no-generation-config)")
        for name, value in self.others.items():
            if params.do_sample or name not in _OTHERS_OF_SAMPLING:
                raise UserError(f"{self.path} sets {name} to {short_repr(value)}, which is not "
                                f"supported: {advice}")
        try:
            return params.with_defaults(self.params)
        except UserError as error:
            raise UserError(f"{self.path}: {error}: {advice}") from None


def read_generation_config(folder: Path | None, eos_token_ids: tuple[int, ...], *,
                           end_tokens_alone: bool = False) -> GenerationDefaults:
    """Read the generation defaults of a model.

    Without generation_config.json they come from config.json, as in older models.

    Parameters
    ----------
    folder : Path or None
        None: the model has no folder.
    eos_token_ids : tuple of int
        The end tokens of config.json, used if the file has none.
    end_tokens_alone : bool
        Read the end tokens only.

    Raises
    ------
    UserError
        If the file is damaged.
    """
    if folder is None:
        return GenerationDefaults(eos_token_ids)
    path = folder / "generation_config.json"
    has_file = path.exists()
    path = path if has_file else folder / "config.json"
    values = read_checkpoint_json(path)
    try:
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        ends = values.get("eos_token_id") if has_file else None
        tokens = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(type(token) is int and 0 <= token < MAX_TOKENS for token in tokens):
            raise ValueError("eos_token_id is not a token id")
    except ValueError as error:
        raise UserError(f"{path} can't be used ({error}): fix or remove it") from error
    end_tokens = tuple(tokens) or eos_token_ids
    if end_tokens_alone:
        return GenerationDefaults(end_tokens)
    params = {name: values[name] for name in _SUPPORTED if values.get(name) is not None}
    if "min_new_tokens" in params:
        params.pop("min_length", None)
    unsupported = {name: values[name]
                   for name, neutral in {**_OTHERS, **_OTHERS_OF_SAMPLING}.items()
                   if values.get(name, neutral) not in (None, neutral, [], {}, False)}
    if values.get("cache_implementation") == "quantized":
        unsupported["cache_implementation"] = "quantized"
    return GenerationDefaults(end_tokens, params, unsupported, path)
