"""Baselines of `compare.py`: other systems and this engine behind one interface. No torch."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexgen_h2o.config.validation import validate
from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics import provenance

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory",
                 "cannot allocate memory", "the run does not fit")
"""Parts of out-of-memory messages of torch, the system and the engine, in lower case."""
NO_CUDA = "it needs CUDA, and there is no such device here"


@dataclass(frozen=True)
class BaselineSettings:
    """Settings shared by all systems of a cell, and the options of one."""

    dtype: str  # float32, bfloat16 or float16: weights and cache, unless the options say otherwise
    batch: int  # sequences computed together
    # Length of the longest prompt, and tokens to generate.
    prompt_len: int
    gen_len: int
    scratch: str  # folder for offloaded data; the caller removes it
    mean_prompt_len: float
    device_memory: int | None = None
    """Bytes of GPU memory that it may allocate; the worker enforces it."""
    options: Mapping[str, Any] = field(default_factory=dict)  # options from the config


@dataclass(frozen=True)
class Timings:
    """Seconds of the prefill and of each decode step, and the tokens of each sequence.

    The prefill ends with the first token. Tokens are None if the system does not report them.
    """

    prefill: float
    steps: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...] | None


class Baseline(ABC):
    """A system that generates text greedily, never stopping early.

    Attributes
    ----------
    documented : str
        Documentation of the settings that are used.
    options : mapping of str to object
        Its options and their defaults.
    kinds : mapping of str to type
        Types of options, for `config.validation.validate`.
    warms : bool
        Whether a first call of `generate` is a warm-up.
    same_load : bool
        Whether `prepare` does the same at every batch size.
    environment : str or None
        Folder of a separate virtual environment, relative to the repository. If it is None or does
        not exist, the interpreter of `compare.py` is used.

    Parameters
    ----------
    settings : BaselineSettings
        With all of the options.
    """

    documented: str
    options: Mapping[str, Any] = {}
    kinds: Mapping[str, Any] = {}
    warms = True
    same_load = True
    environment: str | None = None

    def __init__(self, settings: BaselineSettings):
        self.settings = settings

    @abstractmethod
    def refusal(self) -> str | None:
        """Return why the system cannot run here; None if it can."""

    @abstractmethod
    def version(self) -> str:
        """Return the version of the package or checkout."""

    @classmethod
    def limited_after_load(cls, options: Mapping[str, Any]) -> bool:
        """Return whether loading needs more memory than running.

        If so, the memory limit starts after loading, and the row says so.
        """
        return False

    @classmethod
    def weight_bits(cls, options: Mapping[str, Any]) -> int:
        """Return the bits of weight matrices; 16 means the scenario's dtype."""
        return options.get("weight_bits", 16)

    def ready(self, model: Path) -> None:  # noqa: B027 (optional)
        """Prepare what runs reuse, once and without limits: builds, converted weights, rates."""

    @abstractmethod
    def prepare(self, model: Path) -> str:
        """Load a Hugging Face folder. Return a short description of the settings."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], gen_len: int) -> Timings:
        """Generate `gen_len` tokens, at least 2, for each prompt."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Release everything, also after a failed `prepare`."""

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the system `name`, with defaults.

        Raises `UserError` for an unknown option or an invalid value.
        """
        unknown = sorted(set(options) - set(cls.options))
        if unknown:
            known = ", ".join(cls.options) or "none"
            raise UserError(f"system {name}: unknown option {unknown[0]!r} (it takes: {known})")
        settings = {**cls.options, **options}
        for option, kind in cls.kinds.items():
            validate(kind, settings[option], f"system {name}: {option}")
        return settings


def missing(package: str, extra: str, environment: str | None = None) -> str | None:
    """Return why a package cannot be used; None if it is installed."""
    if importlib.util.find_spec(package) is None:
        how = f"make {environment}/.have" if environment else f"pip install '.[{extra}]'"
        return f"{package} is not installed: {how}"
    return None


def no_cuda() -> str | None:
    """Return why CUDA cannot be used; None if it can. Loads torch."""
    import torch

    return None if torch.cuda.is_available() else NO_CUDA


def installed(*packages: str) -> str:
    """Return names and versions of packages; only the name of one that is not installed."""
    return " ".join(f"{package} {provenance.package_version(package)}".strip()
                    for package in packages)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is an out-of-memory error."""
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
    "ik_llama": ("llama_cpp", "IkLlama"),
    "openvino_genai": ("serving_engines", "OpenVinoGenAI"),
    "vllm_cpu": ("serving_engines", "VllmCpu"),
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
