"""Generation defaults of a model: generation_config.json, as in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexgen_h2o.config.sampling import SAMPLING_ONLY, SamplingParams
from flexgen_h2o.errors import UserError, short_repr
from flexgen_h2o.files.readers import read_checkpoint_json
from flexgen_h2o.models.fields import MAX_TOKENS

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
