"""Packs of a unit's weights: a buffer for each tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from flexgen_h2o.kernels.matrix import ChunkedMatrix, QuantizedMatrix
from flexgen_h2o.models.spec import TensorSpec
from flexgen_h2o.models.weight_format import WeightFormat
from flexgen_h2o.storage.disk import AlignedRead
from flexgen_h2o.storage.tiers import PAGE, round_up

ALIGN = 64
"""Bytes to a multiple of which a tensor is put, unless it stays as it was read from a file."""

Weight = torch.Tensor | QuantizedMatrix
"""A weight in memory."""


@dataclass
class Pack:
    """Tensors laid out in one buffer: where each lies, and the reads that fill the buffer.

    reads is None when the bytes do not lie plainly in a file and have to be converted.
    """

    nbytes: int = 0
    places: dict[str, int] = field(default_factory=dict)
    reads: list[AlignedRead] | None = None

    @property
    def lead(self) -> int:
        """Bytes in front without which most tensors lie at multiples of `ALIGN`.

        In a file they may lie at any multiple of 8 bytes (safetensors pads its header to no more),
        and reads keep that. What stays in memory, and a GPU's copy, does without the lead: cuBLAS
        multiplies matrices that are not at a multiple of 16 bytes by kernels of half the speed,
        and a Zen 4's decode steps take 8 % longer (benchmarks/results/epyc-zen4).
        """
        places = self.places.values()
        lead = Counter(place % ALIGN for place in places).most_common(1)[0][0] if places else 0
        return lead if lead <= min(places, default=0) else 0

    def after_lead(self, host: torch.Tensor) -> torch.Tensor:
        """The bytes of a filled host buffer behind the lead."""
        return host[self.lead : self.nbytes]

    def views(self, buffer: torch.Tensor, specs: Mapping[str, TensorSpec], form: WeightFormat, *,
              aligned: bool = False) -> dict[str, Weight]:
        """Local name to tensor, as views of `buffer`; `aligned`: which begins with `after_lead`."""
        lead = self.lead if aligned else 0
        return {name: form.view(buffer, place - lead, specs[name])
                for name, place in self.places.items()}


@dataclass
class Unit:
    """One layer step of the schedule: its tensors, and how those of each tier are packed.

    `resident` are the weights that need no load, or that come in chunks by themselves.
    """

    specs: dict[str, TensorSpec]
    packs: dict[str, Pack] = field(default_factory=dict)
    resident: dict[str, Weight | ChunkedMatrix] = field(default_factory=dict)
    host: list[tuple[Pack, torch.Tensor]] = field(default_factory=list)

    @property
    def fetched_bytes(self) -> int:
        """Bytes that every load of this unit brings to compute memory."""
        packs = [pack for pack, _ in self.host] + [self.packs[t] for t in self.packs if t == "disk"]
        return sum(round_up(pack.nbytes, PAGE) for pack in packs)
