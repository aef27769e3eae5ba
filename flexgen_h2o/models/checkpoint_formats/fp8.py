"""FP8 as DeepSeek and Qwen3 ship it: float8 weights, with a scale for each block or tensor.

``weight`` [rows, columns] float8, ``weight_scale_inv`` [rows / 128, columns / 128], rounded up, or
one number: an element is ``weight * weight_scale_inv`` of its block. Scales of activations are left
out: products take activations as they are. Source: DeepSeek-V3's inference/kernel.py, and
FineGrainedFP8 of transformers.
"""

from __future__ import annotations

from flexgen_h2o.models.checkpoint_base import Checkpoint
from flexgen_h2o.models.checkpoint_formats.packed import Packed
from flexgen_h2o.models.checkpoint_formats.scaled import FLOAT8, scaled_floats
from flexgen_h2o.models.checkpoint_formats.settings import Quantization

_SCALE, _ACTIVATIONS = "_scale_inv", ("activation_scale", "input_scale")


def find(checkpoint: Checkpoint, settings: Quantization) -> dict[str, Packed]:
    """The quantized tensors of a checkpoint by their names; UserError where a part is wrong."""
    return {name: scaled_floats(checkpoint, name, name + _SCALE, settings.block)
            for name in checkpoint.names()
            if checkpoint.info(name).dtype in FLOAT8 and not name.endswith(_ACTIVATIONS)}
