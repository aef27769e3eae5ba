"""The experts of gpt-oss in a GGUF file, as the hub's checkpoints have them.

There gates and ups of all experts are one tensor, row by row in turn. In MXFP4 that is a tensor of
codes and one of scales, which a GGUF holds block by block; its codes are kept.
Sources: conversion/gpt_oss.py of llama.cpp, and integrations/mxfp4.py of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels.reference_blocks import dequantize, in_pairs
from flexgen_h2o.models.gguf_tensors import GgufTensor

_BLOCK = 32
_MOST_ELEMENTS = 1 << 28  # of an expert, which is made at a time; the largest known have 8 million


@dataclass(frozen=True)
class FusedExperts:
    """One tensor for all experts of a layer, made of one tensor of the file, or of two in turn.

    Attributes
    ----------
    parts : tuple of GgufTensor
        Stacked: [experts, outputs, inputs], or [experts, outputs] for biases.
    form : str
        "values", "blocks" (codes of MXFP4) or "scales" (their powers of two).
    """

    parts: tuple[GgufTensor, ...]
    form: str = "values"

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the hub's tensor: matrices are stored as [experts, inputs, outputs] unless they
        are codes."""
        experts, outputs, *inputs = self.parts[0].shape
        outputs *= len(self.parts)
        if not inputs:
            return experts, outputs
        if self.form == "values":
            return experts, inputs[0], outputs
        groups = inputs[0] // _BLOCK
        return (experts, outputs, groups, 16) if self.form == "blocks" else (experts, outputs,
                                                                             groups)

    def dtype(self, target: torch.dtype) -> torch.dtype:
        """The dtype it is written in, where the model is to be of the dtype `target`."""
        return target if self.form == "values" else torch.uint8

    def chunks(self, target: torch.dtype) -> Iterator[torch.Tensor]:
        """Its values or bytes, one expert at a time."""
        for expert in range(self.shape[0]):
            found = torch.stack([self._made(part, expert) for part in self.parts], dim=1)
            whole = found.flatten(0, 1)  # their rows in turn
            if self.form == "values" and whole.dim() == 2:
                whole = whole.T.contiguous()
            yield whole.to(self.dtype(target))[None]

    def _made(self, part: GgufTensor, expert: int) -> torch.Tensor:
        """One expert of a part, by rows."""
        _, outputs, *inputs = part.shape
        if not inputs:
            rows = torch.from_numpy(np.array(part.packed(slice(expert, expert + 1))))
            return dequantize(rows, part.kind)[0]
        rows = torch.from_numpy(np.array(
            part.packed(slice(expert * outputs, (expert + 1) * outputs))))
        if self.form == "values":
            return dequantize(rows, part.kind)
        blocks = rows.view(outputs, inputs[0] // _BLOCK, 17)
        return blocks[..., 0] if self.form == "scales" else in_pairs(blocks[..., 1:])


def fused_experts(source: Path, prefix: str, parts: Mapping[str, GgufTensor]
                  ) -> Iterator[tuple[str, FusedExperts]]:
    """The tensors of a layer's experts by Hugging Face name, which begins with `prefix`.

    Raises `UserError` where one is missing or they do not fit together.
    """
    for suffix, end in (("weight", ""), ("bias", "_bias")):
        for name, needed in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            missing = [f"ffn_{each}_exps.{suffix}" for each in needed
                       if f"ffn_{each}_exps.{suffix}" not in parts]
            if missing:
                raise UserError(f"{source}: a layer has experts, but no tensor {missing[0]}")
            found = tuple(parts[f"ffn_{each}_exps.{suffix}"] for each in needed)
            dims = 3 if suffix == "weight" else 2
            alike = len({(part.kind.name, part.shape) for part in found}) == 1
            fits = alike and len(found[0].shape) == dims
            if not fits or math.prod(found[0].shape[1:]) > _MOST_ELEMENTS:
                raise UserError(f"{source}: the tensors of {prefix}{name}{end} do not fit together")
            if suffix == "weight" and found[0].kind.name == "MXFP4":
                for form in ("blocks", "scales"):
                    yield f"{prefix}{name}_{form}", FusedExperts(found, form)
            else:
                yield f"{prefix}{name}{end}", FusedExperts(found)
