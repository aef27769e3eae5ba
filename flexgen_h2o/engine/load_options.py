"""The options of an `LLM` beside the run's form: where weights come from, limits, what is shown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flexgen_h2o.config.policy import Workload
from flexgen_h2o.config.validation import check_int, typed
from flexgen_h2o.errors import UserError, did_you_mean
from flexgen_h2o.kernels.implementations import AutotuneTable
from flexgen_h2o.metrics.trace import Trace


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Keywords of `LLM` that group here: where weights come from, limits, and what is shown.

    Parameters
    ----------
    path : str or path, optional
        Folder or `.gguf` file of the weights, if not by name; ``_DUMMY_`` for random ones.
    activation_bits : int
        8: what meets weights of 8 or 4 bits is rounded to 8 bits, group by group, and products are
        of whole numbers (`reference_matrix.rounded_activations`); on a CPU alone. 16: as it is.
    key_bits, value_bits : int, optional
        Bits of cached keys and of cached values, each 16, 8 or 4; None: `cache_bits`. Keys of 8 and
        values of 4 lose almost nothing. 16 goes with 16 alone.
    attn_sparsity : float
        Share of the full cache's values, over 0 and at most 1, that a new token reads: those of the
        most attention (FlexGen, arXiv 2303.06865, section 5). It changes results. Keys are all
        read, and prompts are exact. Of a cache in host memory beside a GPU the other values don't
        travel; one on disk is read whole, as single values are too small for a disk.
    weight_cache : str or path, optional
        Folder that keeps quantized weights for later runs; "auto": in the user's cache; None: they
        are quantized anew each time.
    calibration : str or path, optional
        Text file, or `.jsonl` file of texts under `text`, `article` or `prompt`, by which weights
        of 8 or 4 bits are quantized (`engine.calibration`).
    verify : bool
        Hold each tensor of weights that is read from disk against a checksum, made when it was
        first read or written. What has changed ends the run with a `UserError` that names file and
        offset. Hashing takes 0.03 s of a core for each GB (AMD EPYC).
    generation_config : bool
        Use the defaults of generation_config.json for sampling parameters that are None; False:
        transformers' own.
    seed : int
        Of dummy weights.
    memory_limit, device_memory_limit : int, optional
        Bytes of host memory and of the GPU's that are counted as free at most; PyTorch is held to
        the latter.
    workload : Workload, optional
        Lengths and batch sizes to come: what cannot fit is refused before anything is loaded.
    texts : sequence of str
        Prompts to come: if the longest has more tokens than the model has positions, it is refused
        before anything is loaded.
    implementations : mapping, optional
        Which implementation multiplies, by operation, bits and rows, as calibration has measured it
        (`--percent auto` passes it on); None: a table decides by the CPU's instruction set.
    pipeline : Pipeline, optional
        The ranks among which the layers are spread (`distributed.pipeline`), of which this is one.
    bounds : sequence of int, optional
        The decoder layer with which each rank begins, and their number; None: by their weights.
        Those of the first rank count.
    progress : bool, optional
        Show progress bars. Default: on a terminal.
    trace : Trace, optional
        Records transfers, compute and memory.
    verbose : bool
        Print the memory plan.
    """

    path: str | os.PathLike | None = None
    activation_bits: int = 16
    key_bits: int | None = None
    value_bits: int | None = None
    attn_sparsity: float = 1.0
    weight_cache: str | os.PathLike | None = "auto"
    calibration: str | os.PathLike | None = None
    verify: bool = False
    generation_config: bool = True
    seed: int = 0
    memory_limit: int | None = None
    device_memory_limit: int | None = None
    workload: Workload | None = None
    texts: Sequence[str] = ()
    implementations: AutotuneTable | None = None
    pipeline: Any = None  # its class loads torch
    bounds: Sequence[int] | None = None
    progress: bool | None = None
    trace: Trace | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        check_int("seed", self.seed, low=0, high=2**63 - 1)
        for name in ("memory_limit", "device_memory_limit"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low=1)

    @property
    def no_bars(self) -> bool | None:
        """tqdm's `disable`: None shows bars on a terminal only."""
        return None if self.progress is None else not self.progress


def load_options(options: Mapping[str, Any], *, beside: Iterable[str]) -> LoadOptions:
    """Keywords of a call as checked `LoadOptions`; `beside` are the call's other keywords.

    Raises `UserError` for an unknown one, with the nearest name, and for a value of a wrong type.
    """
    known = [spec.name for spec in fields(LoadOptions)]
    for name in options:
        if name not in known:
            raise UserError(f"LLM has no option {name!r}"
                            + did_you_mean(name, [*beside, *known], "see help(LLM)"))
    return typed(LoadOptions)(**options)
