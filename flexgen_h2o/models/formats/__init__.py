"""Readers of quantized checkpoint formats, by quant_method.

To add a format, add the reader of its `quantization_config` to `quantization.METHODS`, and here a
function that finds its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from flexgen_h2o.models.checkpoint import Checkpoint
from flexgen_h2o.models.formats import packed, scaled
from flexgen_h2o.models.formats.base import QuantizedTensor
from flexgen_h2o.models.quantization import Quantization

FORMATS: Mapping[str, Callable[[Checkpoint, Quantization], dict[str, QuantizedTensor]]] = (
    MappingProxyType({
        "fp8": scaled.find_fp8, "mxfp4": packed.find_mxfp4, "awq": packed.find_awq,
        "gptq": packed.find_gptq, "compressed-tensors": scaled.find_compressed_tensors,
    }))
"""Functions that return the quantized tensors of a checkpoint, by the names of the weights.

They raise `UserError` if a part is missing, or has a wrong dtype or shape.
"""
