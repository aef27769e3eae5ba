"""Lengths and batch sizes of the largest block of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexgen_h2o.config.checks import check_int


@dataclass(frozen=True)
class Workload:
    """The largest block of a run: lengths in tokens, batches in sequences."""

    prompt_len: int
    gen_len: int
    gpu_batch_size: int
    num_gpu_batches: int

    def __post_init__(self) -> None:
        for name in ("prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches"):
            check_int(name, getattr(self, name), low=1)

    def cut(self, longest: int | None) -> Workload:
        """With prompts of at most `longest` tokens; None: as it is."""
        return self if longest is None else replace(
            self, prompt_len=min(self.prompt_len, longest))
