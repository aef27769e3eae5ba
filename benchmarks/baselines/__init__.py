"""The interface of a compared system, and what its files share. No torch."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics import provenance

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory",
                 "cannot allocate memory", "the run does not fit")
"""Parts of out-of-memory errors of torch, the system and the engine, in lower case."""
NO_CUDA = "it needs CUDA, and there is no such device here"


@dataclass(frozen=True)
class BaselineSettings:
    """Settings that all systems of a cell share, and the options of one.

    Attributes
    ----------
    dtype : str
        float32, bfloat16 or float16: of weights and cache, where the options say nothing else.
    batch : int
        Sequences at once.
    prompt_len, gen_len : int
        Tokens: the longest prompt, and what follows each. Fewer may be generated, to be projected.
    scratch : str
        A folder of the run's own, for what it offloads; its caller removes it.
    mean_prompt_len : float
        Tokens.
    device_memory : int or None
        Bytes of a GPU's memory that it may allocate; who runs it sees to that.
    options : mapping
        As the configuration of the comparison has them.
    """

    dtype: str
    batch: int
    prompt_len: int
    gen_len: int
    scratch: str
    mean_prompt_len: float
    device_memory: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timings:
    """Seconds of the prefill, which makes the first token, and of each decode step of all
    sequences; the tokens of each sequence, in the order of the prompts, where the system tells.
    """

    prefill: float
    steps: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...] | None


class Baseline(ABC):
    """A system that generates text greedily, never stopping early.

    Attributes
    ----------
    documented : str
        Where the settings that it is run with are documented as its best for this job.
    options : mapping of str to object
        The options that it takes, with their defaults.
    warms : bool
        Whether a first call of `generate` warms up the next.
    loads_alike : bool
        Whether `prepare` does the same at every batch.

    Parameters
    ----------
    settings : BaselineSettings
        With all of the options.
    """

    documented: str
    options: Mapping[str, Any] = {}
    warms = True
    loads_alike = True

    def __init__(self, settings: BaselineSettings):
        self.settings = settings

    @abstractmethod
    def refusal(self) -> str | None:
        """Why it cannot run here; None if it can."""

    @abstractmethod
    def version(self) -> str:
        """The version, from the system's package or checkout."""

    @classmethod
    def loads_beyond(cls, options: Mapping[str, Any]) -> bool:
        """True if loading takes more memory than running, which alone is limited then: a system
        that can do the job is not left out for how it begins. Its row says so.
        """
        return False

    @classmethod
    def weight_bits(cls, options: Mapping[str, Any]) -> int:
        """Bits of matrices; 16 stands for the scenario's dtype."""
        return options.get("weight_bits", 16)

    def ready(self, model: Path) -> None:  # noqa: B027 - most need nothing
        """Do once, in a process without limits, what would need more memory than a run may have,
        and is kept: builds, measurements, converted weights.
        """

    @abstractmethod
    def prepare(self, model: Path) -> str:
        """Load a Hugging Face folder; how it is run, in a few words. Raises what it raises."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], gen_len: int) -> Timings:
        """Continue token ids by `gen_len` tokens each, at least 2."""

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of everything; also after a failed `prepare`."""

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the system called `name`, those left out at their defaults.

        Raises `UserError` of one that it does not take.
        """
        unknown = sorted(set(options) - set(cls.options))
        if unknown:
            known = ", ".join(cls.options) or "none"
            raise UserError(f"system {name}: unknown option {unknown[0]!r} (it takes: {known})")
        return {**cls.options, **options}


def missing(package: str, extra: str) -> str | None:
    """Why a package cannot be used, if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed: pip install '.[{extra}]'"
    return None


def no_cuda() -> str | None:
    """Why a system that needs CUDA cannot run here, if it can't. Loads torch."""
    import torch

    return None if torch.cuda.is_available() else NO_CUDA


def installed(*packages: str) -> str:
    """Names and versions of packages, for a row; of one that is not installed only its name."""
    return " ".join(f"{package} {provenance.package_version(package)}".strip()
                    for package in packages)


def ran_out_of_memory(error: BaseException) -> bool:
    """True if an exception says that memory was too small."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in OUT_OF_MEMORY)


CLASSES = {
    "ours": ("ours", "Ours"),
    "transformers_memory": ("huggingface", "TransformersMemory"),
    "accelerate_offload": ("huggingface", "AccelerateOffload"),
    "deepspeed_zero": ("huggingface", "DeepSpeedZero"),
    "flexgen": ("flexgen", "FlexGen"),
    "h2o_fork": ("flexgen", "H2OFork"),
    "llama_cpp": ("llama_cpp", "LlamaCpp"),
}
"""Name in a config to the module of this package and the class in it."""


def baseline_class(name: str) -> type[Baseline]:
    """Return the class of a baseline. Its own packages are loaded when it runs.

    Raises `UserError` for an unknown name.
    """
    if name not in CLASSES:
        raise UserError(f"there is no baseline {name!r}: it is one of {', '.join(CLASSES)}")
    module, cls = CLASSES[name]
    return getattr(importlib.import_module(f"baselines.{module}"), cls)
