"""Rotary position embedding: reading it from config.json, and tables of cosines and sines.

All scalings of transformers are supported. In LongRoPE and dynamic rope, rotations also depend on
the length of the text if it exceeds the original context. torch is imported with the first table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from msgspec import Meta

from flexgen_h2o.errors import UserError, short_repr
from flexgen_h2o.models.fields import LAYER_TYPES, MAX_POSITIONS, Fields, Positive, first

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RopeTables: TypeAlias = "tuple[Tensor, Tensor]"
"""Cosines and sines, [rows, rotary_dim / 2] each."""

_Share = Annotated[float, Meta(gt=0, le=1)]
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3",
              "proportional")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and its scaling.

    Attributes
    ----------
    theta : float
        Base of the wavelengths.
    rotary_dim : int
        Leading dimensions of each head that rotate; even.
    rope_type : str
        One of `ROPE_TYPES`. `dynamic` is `default` within the original context.
    factor : float
        Divisor of positions.
    low_freq_factor, high_freq_factor : float
        `llama3`: the band, in turns per original context, between scaled and unscaled.
    original_max_positions : int
        `llama3`, `yarn`, `longrope` and `dynamic`: the context length before scaling.
    beta_fast, beta_slow : float
        `yarn` (arXiv 2309.00071): the band between unscaled and scaled, as for `llama3`.
    truncate : bool
        `yarn`: whether the band is rounded to whole dimensions.
    attention_factor : float
        `yarn` and `longrope`: factor of cosines and sines.
    short_factors, long_factors : tuple of float
        `longrope` (arXiv 2402.13753): divisors of the frequency of each pair of dimensions, for
        texts within the original context and for longer ones.
    rotated_pairs : int
        `proportional`: leading pairs of dimensions that rotate; the frequency of the others is 0.
    """

    theta: float
    rotary_dim: int
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotated_pairs: int = 0

    def max_positions(self, trained: int) -> int:
        """Return the positions of a model whose config.json has `trained` of them.

        With YaRN and dynamic rope it is the factor times the original context, which is often not
        in config.json.
        """
        if self.rope_type not in ("yarn", "dynamic"):
            return trained
        stretched = int(self.factor * self.original_max_positions)
        return min(max(trained, stretched), MAX_POSITIONS)

    @property
    def plain_context(self) -> int | None:
        """The length of a text up to which rotations do not depend on it; None: no limit."""
        return self.original_max_positions if self.rope_type in ("dynamic", "longrope") else None

    def text_length(self, prompt: int, new: int) -> int | None:
        """Return the minimum length by which a text of `prompt` and up to `new` tokens rotates.

        None if lengths do not matter; 0 within `plain_context`. LongRoPE: `plain_context` + 1 if
        the whole text is longer, so that all its tokens rotate by the same factors. (transformers
        recomputes the text with other factors when it crosses the limit.) Dynamic rope: the length
        of the prompt, as in transformers; a new token rotates by the length so far, and cached keys
        are not changed.
        """
        context = self.plain_context
        if context is None:
            return None
        if self.rope_type == "longrope":
            return context + 1 if prompt + new > context else 0
        return prompt if prompt > context else 0


NO_ROPE = RopeConfig(theta=1.0, rotary_dim=0)
"""No rotation: some models have layers without positions (NoPE, arXiv 2305.19466)."""


def nope(layers: Sequence[bool]) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for a model of which some layers do not rotate.

    Parameters
    ----------
    layers : sequence of bool
        Whether a layer has no rotation.
    """
    return {"other_rope": NO_ROPE, "other_rope_layers": tuple(layers)} if any(layers) else {}


def read_rope(f: Fields, *, theta: Any = None, parameters: Any = None,
              partial: bool = False, head_dim: int | None = None) -> RopeConfig:
    """Read rope options from `rope_parameters` (transformers 5) or `rope_scaling` (4).

    Parameters
    ----------
    theta : number, optional
        The base if `parameters` has none. None: rope_theta.
    parameters : mapping, optional
        Used instead of the two keys.
    partial : bool
        Whether only a part of each head may rotate.
    head_dim : int, optional
        Width of a head. None: head_dim of config.json.

    Raises
    ------
    UserError
        If options are not supported or out of range.
    """
    if parameters is None:
        parameters = f.values.get("rope_scaling") or f.values.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping) or any(
            isinstance(value, Mapping) for value in parameters.values()):
        raise UserError(f"{f.name}: rope parameters that are not one flat object are not supported")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise UserError(f"{f.name}: rope type {rope_type!r} is not supported "
                        f"(supported: {', '.join(ROPE_TYPES)})")
    share = f.fit(_Share, first(
        parameters.get("partial_rotary_factor"), f.raw("partial_rotary_factor"),
        f.raw("rotary_pct"), 1.0), "partial_rotary_factor")
    if rope_type == "proportional":
        share = 1.0  # whole heads have frequencies
    if not partial and share != 1.0:
        raise UserError(f"{f.name}: partial_rotary_factor = {share} is not supported "
                        f"in a {f.values['model_type']} model")
    base = first(parameters.get("rope_theta"), theta, f.raw("rope_theta"))
    rotary_dim = int((head_dim or f.head_dim()) * share)
    try:
        rope = RopeConfig(theta=f.fit(Positive, base, "rope_theta"), rotary_dim=rotary_dim,
                          rope_type=rope_type, **_SCALINGS[rope_type](f, parameters, rotary_dim))
        rope.max_positions(0)
        if rope_type == "yarn":
            _yarn_band(rope)
    except (ArithmeticError, ValueError):  # such as the logarithm of 0
        raise UserError(f"{f.name}: rope of type {rope_type} can't be computed with rope_theta "
                        f"{short_repr(base)} and the rope parameters "
                        f"{short_repr(dict(parameters))}; is config.json damaged?") from None
    return rope


def read_layer_ropes(f: Fields, *, local_theta: Any = None, full_head_dim: int | None = None
                     ) -> tuple[RopeConfig, RopeConfig]:
    """Read the ropes of layers with full attention and of layers with sliding windows.

    In a config.json of transformers 4 a scaling is that of the first alone.

    Parameters
    ----------
    local_theta : number, optional
        The base of layers with windows, if their parameters have none. None: rope_theta.
    full_head_dim : int, optional
        Width of a head in layers with full attention. None: head_dim of config.json.
    """
    parameters = f.mapping("rope_parameters")
    if not set(LAYER_TYPES) & set(parameters):
        parameters = {LAYER_TYPES[0]: f.mapping("rope_scaling") or parameters}
    full, local = (parameters.get(layer_type) or {} for layer_type in LAYER_TYPES)
    return (read_rope(f, parameters=full, head_dim=full_head_dim),
            read_rope(f, parameters=local, theta=local_theta))


def _default(f: Fields, scaling: Mapping, rotary_dim: int) -> dict[str, Any]:
    return {}


def _linear(f: Fields, scaling: Mapping, rotary_dim: int) -> dict[str, Any]:
    return {"factor": f.fit(Positive, scaling.get("factor"), "rope factor")}


def _llama3(f: Fields, parameters: Mapping, rotary_dim: int) -> dict[str, Any]:
    scaling = _linear(f, parameters, rotary_dim)
    for key in ("low_freq_factor", "high_freq_factor"):
        scaling[key] = f.fit(Positive, parameters.get(key), f"rope {key}")
    if scaling["high_freq_factor"] < scaling["low_freq_factor"]:
        raise UserError(f"{f.name}: config value rope high_freq_factor must be at least "
                        f"low_freq_factor, got {scaling['high_freq_factor']}")
    return scaling | {"original_max_positions": _original(f, parameters)}


def _yarn(f: Fields, parameters: Mapping, rotary_dim: int) -> dict[str, Any]:
    original = _original(f, parameters)
    factor = _factor(f, parameters, original)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention = parameters.get("attention_factor")
    if attention is None:
        weights = [f.fit(float, parameters.get(key) or 0.0, f"rope {key}")
                   for key in ("mscale", "mscale_all_dim")]
        attention = scale(weights[0]) / scale(weights[1]) if all(weights) else scale(1.0)
    bands = {key: f.fit(Positive, parameters.get(key) or default, f"rope {key}")
             for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    truncate = f.fit(bool, first(parameters.get("truncate"), True), "rope truncate")
    return {"factor": factor, "original_max_positions": original, "truncate": truncate, **bands,
            "attention_factor": f.fit(Positive, attention, "rope attention_factor")}


def _longrope(f: Fields, parameters: Mapping, rotary_dim: int) -> dict[str, Any]:
    original = _original(f, parameters)
    factor = _factor(f, parameters, original)
    short, long = (_factors(f, parameters, key, rotary_dim)
                   for key in ("short_factor", "long_factor"))
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    attention = first(parameters.get("attention_factor"), stretched)
    return {"factor": factor, "original_max_positions": original, "short_factors": short,
            "long_factors": long,
            "attention_factor": f.fit(Positive, attention, "rope attention_factor")}


def _factors(f: Fields, scaling: Mapping, key: str, rotary_dim: int) -> tuple[float, ...]:
    factors = f.fit(list[Positive], scaling.get(key), f"rope {key}")
    if len(factors) != rotary_dim // 2:
        raise UserError(f"{f.name}: config value rope {key} must have {rotary_dim // 2} numbers, "
                        f"got {len(factors)}")
    return tuple(factors)


def _dynamic(f: Fields, parameters: Mapping, rotary_dim: int) -> dict[str, Any]:
    if rotary_dim < 4:
        raise UserError(f"{f.name}: dynamic rope of {rotary_dim} rotary dimensions is not "
                        "supported (4 at least)")
    return _linear(f, parameters, rotary_dim) | {
        "original_max_positions": f.count("max_position_embeddings")}


def _proportional(f: Fields, parameters: Mapping, rotary_dim: int) -> dict[str, Any]:
    share = f.fit(_Share, first(parameters.get("partial_rotary_factor"), 1.0),
                  "partial_rotary_factor")
    factor = f.fit(Positive, first(parameters.get("factor"), 1.0), "rope factor")
    return {"factor": factor, "rotated_pairs": int(share * rotary_dim // 2)}


_SCALINGS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn,
             "longrope": _longrope, "llama3": _llama3, "proportional": _proportional}


def _original(f: Fields, parameters: Mapping) -> int:
    # As in transformers, a key outside of the rope parameters takes precedence.
    original = first(f.raw("original_max_position_embeddings"),
                     parameters.get("original_max_position_embeddings"),
                     f.count("max_position_embeddings"))
    return f.size("original_max_position_embeddings", original)


def _factor(f: Fields, parameters: Mapping, original: int) -> float:
    """Return the scaling of the context; without a factor, the default of transformers."""
    return f.fit(Positive, first(parameters.get("factor"),
                                 f.count("max_position_embeddings") / original), "rope factor")


def all_tables(ropes: Iterable[RopeConfig], positions: Tensor, dtype: torch.dtype,
               lengths: Tensor | None = None) -> tuple[RopeTables, ...]:
    """Return `rope_tables` of several ropes."""
    return tuple(rope_tables(rope, positions, dtype, lengths) for rope in ropes)


def rope_tables(rope: RopeConfig, positions: Tensor, dtype: torch.dtype,
                lengths: Tensor | None = None) -> RopeTables:
    """Return cosines and sines of the rotations at positions.

    Parameters
    ----------
    positions : Tensor [rows], int64
    dtype : torch.dtype
        Dtype of the result; angles are computed in float32.
    lengths : Tensor [rows], int64, optional
        `RopeConfig.text_length` of each row's text. None: within `RopeConfig.plain_context`.

    Returns
    -------
    cos, sin : Tensor [rows, rotary_dim / 2]

    Notes
    -----
    The scalings are as in transformers' modeling_rope_utils.py.
    """
    if lengths is not None:
        lengths = lengths.maximum(positions + 1)
    angles = positions[:, None].float() * frequencies(rope, positions.device, lengths)
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos, sin = cos.mul_(rope.attention_factor), sin.mul_(rope.attention_factor)
    return cos.to(dtype), sin.to(dtype)


def frequencies(rope: RopeConfig, device: torch.device, lengths: Tensor | None = None) -> Tensor:
    """Return radians per position of each pair of dimensions, float32 [rotary_dim / 2].

    With lengths [rows] of texts, the result may be [rows, rotary_dim / 2].
    """
    return _plain_frequencies(rope, device) if lengths is None else _frequencies(
        rope, device, lengths)


@functools.cache  # needed in each step
def _plain_frequencies(rope: RopeConfig, device: torch.device) -> Tensor:
    return _frequencies(rope, device, None)


def _frequencies(rope: RopeConfig, device: torch.device, lengths: Tensor | None) -> Tensor:
    import torch  # here, because sizes are read without it

    steps = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device=device)
    steepness = rope.theta ** (steps / rope.rotary_dim)
    plain = 1.0 / steepness
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "proportional":
        return plain.where(steps < 2 * rope.rotated_pairs, 0.0) / rope.factor
    if rope.rope_type == "longrope":
        factors = torch.tensor(rope.short_factors, device=device)
        if lengths is not None:
            longer = lengths[:, None] > rope.original_max_positions
            factors = torch.where(longer, torch.tensor(rope.long_factors, device=device), factors)
        return 1.0 / (factors * steepness)
    if rope.rope_type == "dynamic" and lengths is not None:
        context, width = rope.original_max_positions, rope.rotary_dim
        stretch = rope.factor * lengths.clamp(min=context) / context - (rope.factor - 1)
        base = rope.theta * stretch ** (width / (width - 2))
        return 1.0 / base[:, None] ** (steps / width)
    if rope.rope_type == "llama3":
        # Low frequencies are divided by the factor, high ones kept, with interpolation between.
        cycles = rope.original_max_positions * plain / (2 * math.pi)  # per original context
        unscaled = (cycles - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        unscaled = unscaled.clamp(0, 1)
    elif rope.rope_type == "yarn":
        unscaled = 1 - _yarn_ramp(rope, steps / 2)
    else:
        return plain
    return unscaled * plain + (1 - unscaled) * plain / rope.factor


def _yarn_ramp(rope: RopeConfig, pairs: Tensor) -> Tensor:
    """Return 0 for high frequencies, 1 for low ones, and a linear ramp between."""
    low, high = _yarn_band(rope)
    return ((pairs - low) / (high - low or 0.001)).clamp(0, 1)


def _yarn_band(rope: RopeConfig) -> tuple[float, float]:
    """Return the pairs of dimensions between which the ramp is."""
    def pair(turns: float) -> float:
        """Return the pair that makes `turns` turns in the original context."""
        wave = rope.original_max_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, rope.rotary_dim - 1)
