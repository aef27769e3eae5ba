"""Quantization settings of checkpoints, and the weight options of runs. No torch.

`METHODS` has a reader of `quantization_config` for each format; `formats` finds its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta

from flexgen_h2o.config.limits import GROUP_SIZE
from flexgen_h2o.config.validation import validate
from flexgen_h2o.config.weight_layout import AUTO, INTEGER_BITS, MatrixLayout, WeightOptions
from flexgen_h2o.errors import UserError, short_repr
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.tensors import TensorSpec

_Size = Annotated[int, Meta(ge=1, le=1 << 20)]
_GroupSize = Annotated[int, Meta(ge=-1, le=1 << 20)]
_INSTEAD = "use the original weights, and --weight-bits 8 or 4"
_PACKED, _PLAIN = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Quantization:
    """The settings of a checkpoint's quantization, from its config.json.

    Attributes
    ----------
    method : str
        Key of `METHODS`.
    bits : tuple of int
        Bits of a code, if values are codes with scales and zero points; else empty.
    group_size : int or None
        Inputs that share a scale; None: the whole row, or not the same for all tensors.
    block : tuple of int or None
        Rows and columns that share a scale.
    zeros_below : bool
        Whether zero points are stored as one less, as GPTQ's first format does.
    """

    method: str
    bits: tuple[int, ...] = ()
    group_size: int | None = None
    block: tuple[int, int] | None = None
    zeros_below: bool = False

    def group(self, bits: int) -> int:
        """Return the group size of weights of `bits`.

        It allows the checkpoint's codes to be kept, if they have no more bits.
        """
        if bits not in INTEGER_BITS or not self._codes_fit(bits) or self.group_size is None:
            return GROUP_SIZE
        fitting = (size for size in range(GROUP_SIZE, 0, -8) if self.group_size % size == 0)
        return next(fitting, GROUP_SIZE)

    def keeps(self, bits: int) -> bool:
        """Return True if weights of `bits` keep any of the checkpoint's quantized values."""
        return self.method == "mxfp4" or self._codes_fit(bits)

    def _codes_fit(self, bits: int) -> bool:
        return bool(self.bits) and min(self.bits) <= bits

    def weights(self, bits: int, model: ModelConfig) -> WeightOptions:
        """Return the options of weights of `bits`, which keep the checkpoint's codes if they fit.
        """
        keeps_values = self.method == "mxfp4" and bits == 4
        return WeightOptions(bits, self.group(bits),
                             model.shapes_of_experts if keeps_values else frozenset())


def quantization(config: Mapping[str, Any], name: str) -> Quantization | None:
    """Read `quantization_config`; return None if a config.json has none.

    Parameters
    ----------
    config : mapping
        The content of config.json.
    name : str
        The user's name of the model; error messages begin with it.

    Raises
    ------
    UserError
        If a method, or a variant of it, is not supported, or a value is out of range.
    """
    values = config.get("quantization_config")
    if values is None:
        return None
    method = values.get("quant_method") if isinstance(values, Mapping) else None
    if isinstance(values, Mapping) and method is None:
        loaded = any(values.get(key) for key in ("load_in_4bit", "load_in_8bit"))
        method = "bitsandbytes" if loaded else None
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(f"{name}: a checkpoint quantized by {short_repr(method)} "
                        "(quantization_config) is not supported (supported: "
                        f"{', '.join(METHODS)}); {_INSTEAD}")
    return METHODS[method](_Values(name, values))


class _Values:
    """Checked access to the values of a quantization_config."""

    def __init__(self, name: str, values: Mapping[str, Any], where: str = "quantization_config"):
        self.name, self.values, self.where = name, values, where

    def get(self, kind: Any, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        return validate(kind, value, f"{self.name}: {self.where} value {key}")

    def refuse(self, feature: str) -> UserError:
        return UserError(f"{self.name}: {feature} is not supported; {_INSTEAD}")

    def one_of(self, key: str, supported: tuple, default: Any) -> Any:
        """Return a value; raise `UserError` unless it is supported."""
        value = self.values.get(key)
        value = default if value is None else value
        value = value.lower() if isinstance(value, str) else value
        if type(value) not in map(type, supported) or value not in supported:
            words = ", ".join(map(str, supported))
            raise self.refuse(f"{self.where} value {key} = {short_repr(value)} "
                              f"(supported: {words})")
        return value

    def group_size(self, default: int | None) -> int | None:
        size = self.get(_GroupSize | None, "group_size", default)
        return None if size is None or size < 1 else size

    def block(self, key: str) -> tuple[int, int]:
        sizes = self.get(list[_Size], key, [128, 128])
        if len(sizes) != 2:
            raise UserError(f"{self.name}: {self.where} value {key} must be two sizes, got "
                            f"{short_repr(sizes)}")
        return sizes[0], sizes[1]


def _fp8(values: _Values) -> Quantization:
    values.one_of("fmt", ("e4m3", "e5m2"), "e4m3")
    values.one_of("expert_dtype", ("fp8",), "fp8")
    block = None
    if values.values.get("weight_block_size", ()) is not None:  # null: one scale for a tensor
        block = values.block("weight_block_size")
    return Quantization("fp8", block=block)


def _mxfp4(values: _Values) -> Quantization:
    return Quantization("mxfp4", bits=(8,), group_size=32)  # as evenly spaced codes


def _awq(values: _Values) -> Quantization:
    values.one_of("version" if values.values.get("version") else "format", ("gemm",), "gemm")
    values.one_of("zero_point", (True,), True)
    return Quantization("awq", bits=(values.one_of("bits", (4,), 4),),
                        group_size=values.group_size(128))


def _gptq(values: _Values) -> Quantization:
    key = "checkpoint_format" if values.values.get("checkpoint_format") else "format"
    form = values.one_of(key, ("gptq", "gptq_v2"), "gptq")
    values.one_of("pack_dtype", ("int32",), "int32")
    values.one_of("is_marlin_format", (False,), False)
    return Quantization("gptq", bits=(values.one_of("bits", (2, 4, 8), None),),
                        group_size=values.group_size(128), zeros_below=form == "gptq")


def _compressed_tensors(values: _Values) -> Quantization:
    sparsity = values.values.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise values.refuse(f"compressed-tensors sparsity {short_repr(sparsity.get('format'))}")
    if values.values.get("transform_config"):
        raise values.refuse("compressed-tensors with transform_config (rotated weights)")
    groups = values.get(dict[str, Any], "config_groups", {})
    if not groups:
        raise UserError(f"{values.name}: quantization_config has no config_groups; "
                        "is config.json complete?")
    schemes = [_scheme(values, group) for group in groups.values()]
    sizes, blocks = {scheme[1] for scheme in schemes}, {scheme[2] for scheme in schemes}
    if len(blocks - {None}) > 1:
        raise values.refuse("compressed-tensors with blocks of several sizes")
    bits = tuple(sorted({scheme[0] for scheme in schemes if scheme[0]}))
    return Quantization("compressed-tensors", bits=bits, block=next(iter(blocks - {None}), None),
                        group_size=next(iter(sizes)) if len(sizes) == 1 else None)


def _scheme(values: _Values, group: Any) -> tuple[int, int | None, tuple[int, int] | None]:
    """Return bits of a code (0: no codes), group size and block of one of the `config_groups`."""
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise values.refuse("compressed-tensors without quantized weights")
    _Values(values.name, {"format": group.get("format") or values.values.get("format")}).one_of(
        "format", (_PACKED, *_PLAIN), None)
    weights = _Values(values.name, group["weights"], "quantization_config weights")
    kind = weights.one_of("type", ("int", "float"), "int")
    bits = weights.one_of("num_bits", (8,) if kind == "float" else (2, 4, 8), 8)
    grouped = weights.group_size(None)
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"),
                              "group" if grouped else "tensor")
    block = None
    if strategy == "block":
        block = weights.block("block_structure")
    return bits if kind == "int" else 0, grouped if strategy == "group" else None, block


METHODS: Mapping[str, Callable[[_Values], Quantization]] = MappingProxyType({
    "fp8": _fp8, "mxfp4": _mxfp4, "awq": _awq, "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
})
"""Readers of `quantization_config` by quant_method."""

_GROUP = 32  # of 4-bit weights: 4.5 bits per weight, as with groups of 64 and float16 scales
_SENSITIVE_BITS = 6
_SENSITIVE = ("v", "out")  # matrices of all layers, by their short names
_DOWN = ("fc2", "down", "shared_down")  # sensitive in the first and the last layers


def weight_options(file_options: WeightOptions, bits: int | str, model: ModelConfig,
                   stored: Quantization | None, *, on_gpu: bool) -> WeightOptions:
    """Return the storage options of a model's weights.

    Parameters
    ----------
    file_options : WeightOptions
        The options that keep the values of a GGUF file.
    bits : int or "auto"
        "auto": `file_options`. 8 or 4: with groups of 32 if the file has values of these bits in
        groups of 32, which are then kept.
    stored : Quantization or None
        The settings of a quantized checkpoint, or of experts in MXFP4.
    on_gpu : bool
        Whether a GPU computes. Its kernels are tuned for 4 bits in all matrices.
    """
    if bits == AUTO:
        return file_options
    same = any((layout.bits, layout.group, layout.mxfp4) == (bits, _GROUP, False)
               for layout in file_options.layouts.values())
    if bits == 4 and not on_gpu and (stored is None or not stored.keeps(4)):
        return mixed_options(model, compact=not same)
    options = WeightOptions(int(bits)) if stored is None else stored.weights(int(bits), model)
    return replace(options, group=_GROUP) if same else options


def mixed_options(model: ModelConfig, *, compact: bool = True) -> WeightOptions:
    """Return the options of 4-bit weights, with 6 bits for the most sensitive matrices.

    These are the head, the value and output projections of attention, and the down projections of
    the first and the last sixth of the layers. The result is about 5 bits per weight, as in
    llama.cpp's Q4_K_M, whose selection has a higher perplexity (measured on Qwen2.5-Coder-1.5B).

    Parameters
    ----------
    compact : bool
        Whether scales and zero points of 4-bit matrices have 8 bits instead of 16.
    """
    def layout(spec: TensorSpec, sensitive: bool) -> MatrixLayout:
        outputs, inputs = spec.shape
        return (MatrixLayout(outputs, inputs, _SENSITIVE_BITS) if sensitive
                else MatrixLayout(outputs, inputs, 4, _GROUP, compact=compact))

    def matrices() -> Iterator[tuple[TensorSpec, bool]]:
        weights, count = model.weights, model.num_layers
        yield from ((spec, False) for spec in weights.embed.values())
        for number, layer in enumerate(weights.layers):
            outer = not count // 6 <= number < count - count // 6
            experts = weights.experts[number] if weights.experts else ()
            for specs in (layer, *experts):
                yield from ((spec, name in _SENSITIVE or outer and name in _DOWN)
                            for name, spec in specs.items())
        yield from ((spec, True) for spec in weights.head.values())  # a tied head is the table

    never = set(model.never_quantized)
    layouts = {spec.name: layout(spec, sensitive) for spec, sensitive in matrices()
               if len(spec.shape) == 2 and tuple(spec.shape) not in never}
    return WeightOptions(4, _GROUP, layouts=layouts)
