"""Quantized checkpoints in the formats that models are shipped in: one file a format.

`settings` reads config.json's `quantization_config` and has the registry of methods; it imports no
torch. `dequantizing` presents such a checkpoint as tensors in floating point.
"""
