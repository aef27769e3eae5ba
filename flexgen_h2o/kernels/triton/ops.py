"""The operations on a GPU, in Triton, by the names and arguments of `library`.

A Triton module is imported when its function is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from flexgen_h2o.kernels.arguments import need


def triton_function(module: str, name: str) -> Callable:
    """A function of a Triton module, on the device of its first tensor that is a GPU's."""
    def call(*args, **named):
        on_gpu = next(x for x in args if x.is_cuda)
        with torch.cuda.device_of(on_gpu):  # Triton launches on the current device
            found = import_module(f"flexgen_h2o.kernels.triton.{module}")
            return getattr(found, name)(*args, **named)

    return call


prefill_attention = triton_function("prefill", "prefill_attention")
select_heavy_hitters = triton_function("select", "select_heavy_hitters")
decode_attention = triton_function("decode", "decode_attention")
quantize_groups = triton_function("groups", "quantize_groups")
dequantize_groups = triton_function("groups", "dequantize_groups")
unpack_rows = triton_function("matrix", "unpack_rows")
_linear_quantized = triton_function("matrix", "linear_quantized")


def linear_quantized(x: Tensor, data: Tensor, outputs: int, inputs: int, bits: int, group: int,
                     bias: Tensor | None, out: Tensor, add: bool, activation_bits: int = 16
                     ) -> None:
    """See `reference_matrix.linear_quantized`."""
    need(activation_bits == 16, "linear_quantized", "a GPU rounds no activations")
    _linear_quantized(x, data, outputs, inputs, bits, group, bias, out, add)
