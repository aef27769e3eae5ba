"""Storage options of a model's weights, by the bits that a user asks for. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexgen_h2o.config.weight_layout import AUTO, MatrixLayout, WeightOptions
from flexgen_h2o.models.formats.settings import Quantization
from flexgen_h2o.models.model_config import ModelConfig, TensorSpec

_GROUP = 32  # of 4-bit weights; in 4.5 bits each, as many as groups of 64 with float16 scales take
_SENSITIVE_BITS = 6
_SENSITIVE = ("v", "out")  # matrices of all layers, by their short names
_DOWN = ("fc2", "down", "shared_down")  # of the first and the last layers


def weight_options(kept: WeightOptions, bits: int | str, model: ModelConfig,
                   stored: Quantization | None, *, on_gpu: bool) -> WeightOptions:
    """Return the storage options of a model's weights.

    Parameters
    ----------
    kept : WeightOptions
        Those that keep the values of a GGUF file.
    bits : int or "auto"
        "auto": `kept`. 8 or 4: in groups of 32 where the file has values of so many bits in such
        groups, which are kept then.
    model : ModelConfig
    stored : Quantization or None
        Of a quantized checkpoint, or of experts in MXFP4.
    on_gpu : bool
        Whether a GPU computes, whose kernels have been tuned for 4 bits in all matrices.
    """
    if bits == AUTO:
        return kept
    same = any((layout.bits, layout.group, layout.mxfp4) == (bits, _GROUP, False)
               for layout in kept.kept.values())
    if bits == 4 and not on_gpu and (stored is None or not stored.keeps(4)):
        return mixed_options(model, compact=not same)
    options = WeightOptions(int(bits)) if stored is None else stored.weights(int(bits), model)
    return replace(options, group=_GROUP) if same else options


def mixed_options(model: ModelConfig, *, compact: bool = True) -> WeightOptions:
    """Return the options of 4-bit weights: 6 bits for the matrices whose error costs most.

    These are the head, value and output projections of attention, and the down projections of the
    first and the last sixth of the layers: about 5 bits a weight, as llama.cpp's Q4_K_M, whose
    choice costs more perplexity (measured on Qwen2.5-Coder-1.5B).

    Parameters
    ----------
    model : ModelConfig
    compact : bool
        Whether scales and zero points of 4-bit matrices have 8 bits each, in place of 16.
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
        yield from ((spec, True) for spec in weights.head.values())  # a tied one is the table

    exact = set(model.exact_shapes)
    kept = {spec.name: layout(spec, sensitive) for spec, sensitive in matrices()
            if len(spec.shape) == 2 and tuple(spec.shape) not in exact}
    return WeightOptions(4, _GROUP, kept=kept)
