"""The YAML file of a comparison: which systems, in which scenarios. Every value is checked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from baselines import baseline_class

from flexgen_h2o.cli.values import load_yaml, parse_size
from flexgen_h2o.config.checks import check_bool, check_choice, check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.keys import check_keys

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class System:
    """A system under its name here: its module of `baselines`, and all of its options."""

    name: str
    baseline: str
    options: Mapping[str, Any]

    @property
    def weight_bits(self) -> int:
        """Bits of matrices; 16 stands for the scenario's dtype."""
        return self.options.get("weight_bits", 16)

    @property
    def cache_bits(self) -> int:
        """Bits of cached keys and values; 16 stands for the scenario's dtype."""
        return self.options.get("cache_bits", 16)

    @property
    def cache_share(self) -> float:
        """Share of prompt and generated tokens that stays cached."""
        share = self.options.get("cache_share")
        return 1.0 if share is None else share

    @property
    def exact(self) -> bool:
        """True if its tokens should be those of the model as it is."""
        return self.weight_bits == self.cache_bits == 16 and self.cache_share == 1


@dataclass(frozen=True)
class ComparisonScenario:
    """A model, lengths and a limit of memory.

    Attributes
    ----------
    name : str
    model : str
        Folder below ``--models``, or any name that `LLM` takes.
    gen_len : int
        Tokens that follow each prompt.
    prompt_len : int or None
        Tokens of each random prompt; None: those of `prompts`.
    prompts : str or None
        A .jsonl file whose lines have `prompt_key`, a text.
    dtype : str
    memory : int or None
        Bytes of the memory cgroup, page cache included; None: no limit.
    device_memory : int or None
        Bytes of a GPU's memory that a system may allocate; None: all, if there is a GPU.
    past_positions : bool
        The text may be longer than the model's positions: of systems that can do that.
    batch : int or None
        Sequences of all systems alike; None: only each at its own best.
    best : bool
        Whether each system's best batch is searched, and measured.
    best_batch : mapping of str to int
        Systems whose best batch is known, and not searched.
    first_batch, most : int
        Sequences that the search begins with, and that it never exceeds.
    search_gen_len : int or None
        Tokens that a step of the search generates, to be projected; None: as many as the others.
    repeats, timeout : int or None
        Runs of a cell, and seconds of one; None: those of the whole file.
    cut_gen_len : mapping of str to int
        Systems too slow to finish: tokens that they generate, to be projected.
    systems : tuple of str
        Which take part.
    """

    name: str
    model: str
    gen_len: int
    prompt_len: int | None = None
    prompts: str | None = None
    prompt_key: str = "article"
    dtype: str = "bfloat16"
    memory: int | None = None
    device_memory: int | None = None
    past_positions: bool = False
    batch: int | None = None
    best: bool = True
    best_batch: Mapping[str, int] = field(default_factory=dict)
    first_batch: int = 1
    most: int = 256
    search_gen_len: int | None = None
    repeats: int | None = None
    timeout: int | None = None
    cut_gen_len: Mapping[str, int] = field(default_factory=dict)
    systems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_int("gen_len", self.gen_len, low=2)
        if (self.prompt_len is None) == (self.prompts is None):
            raise UserError("give prompt_len or prompts, one of them")
        for key in ("prompt_len", "batch", "repeats", "timeout"):
            if getattr(self, key) is not None:
                check_int(key, getattr(self, key), low=1)
        check_choice("dtype", self.dtype, DTYPES)
        check_bool("best", self.best)
        check_bool("past_positions", self.past_positions)
        check_int("most", self.most, low=1)
        check_int("first_batch", self.first_batch, low=1, high=self.most)
        if self.search_gen_len is not None:
            check_int("search_gen_len", self.search_gen_len, low=2, high=self.gen_len)
        if self.batch is None and not self.best:
            raise UserError("nothing to measure: give batch, or best: true")
        for key in ("memory", "device_memory"):
            if getattr(self, key) is not None:
                object.__setattr__(self, key, parse_size(key, getattr(self, key)))
        if self.prompts is not None:
            object.__setattr__(self, "prompts", os.path.expanduser(self.prompts))
        for system, tokens in self.cut_gen_len.items():
            check_int(f"cut_gen_len of {system}", tokens, low=2, high=self.gen_len)
        for system, batch in self.best_batch.items():
            check_int(f"best_batch of {system}", batch, low=1)

    @property
    def largest(self) -> int:
        """Sequences of its largest batch."""
        return max(self.batch or 1, self.most if self.best else 1, *self.best_batch.values())

    def measured(self, system: str, *, search: bool) -> int:
        """Tokens that a system generates for each prompt, in a step of the search or else."""
        found = self.cut_gen_len.get(system, self.gen_len)
        return min(found, self.search_gen_len or found) if search else found


@dataclass(frozen=True)
class Comparison:
    """All of the file: scenarios and systems in its order."""

    systems: Mapping[str, System]
    scenarios: tuple[ComparisonScenario, ...]
    threads: int = os.cpu_count() or 1
    repeats: int = 3
    timeout: int = 3600  # seconds of one run
    models: Path = Path(".")

    def __post_init__(self) -> None:
        for name in ("threads", "repeats", "timeout"):
            check_int(name, getattr(self, name), low=1)


def load(path: Path, *, models: Path, systems: Iterable[str] = (), scenarios: Iterable[str] = ()
         ) -> Comparison:
    """Read and check a file; with names, only those systems and scenarios of it.

    Raises
    ------
    UserError
        The file cannot be read, a key or a name in it is unknown, a value is wrong.
    """
    values = load_yaml(str(path))
    known = ("systems", "scenarios", "threads", "repeats", "timeout")
    check_keys(values, known, str(path))
    found = {name: _system(name, spec) for name, spec in _mapping(values, "systems").items()}
    kept = _chosen(systems, found, "--systems")
    parts = _mapping(values, "scenarios")
    built = tuple(_scenario(name, spec, kept, found)
                  for name, spec in _chosen(scenarios, parts, "--scenarios").items())
    others = {name: values[name] for name in known[2:] if name in values}
    return Comparison(kept, tuple(each for each in built if each.systems), models=models, **others)


def _system(name: str, spec: object) -> System:
    if not isinstance(spec, dict) or "baseline" not in spec:
        raise UserError(f"system {name}: give its baseline")
    options = {key: value for key, value in spec.items() if key != "baseline"}
    return System(name, spec["baseline"], baseline_class(spec["baseline"]).check(name, options))


def _scenario(name: str, spec: object, kept: Mapping[str, System], known: Mapping[str, System]
              ) -> ComparisonScenario:
    """A scenario with those of its systems that are kept."""
    if not isinstance(spec, dict):
        raise UserError(f"scenario {name}: give its model, lengths and memory")
    check_keys(spec, [each.name for each in fields(ComparisonScenario)][1:], f"scenario {name}")
    named = spec.get("systems", list(known))
    for system in named:
        if system not in known:
            raise UserError(f"scenario {name}: {system!r} is none of the systems")
    own: dict[str, dict[str, int]] = {}
    for key in ("cut_gen_len", "best_batch"):
        own[key] = {}
        for system, number in (spec.get(key) or {}).items():
            if system not in named:
                raise UserError(f"scenario {name}: {key} names {system!r}, which is none of its "
                                "systems")
            if system in kept:
                own[key][system] = number
    for key in ("model", "gen_len"):
        if key not in spec:
            raise UserError(f"scenario {name}: give its {key}")
    try:
        return ComparisonScenario(**{**spec, **own, "name": name,
                                     "systems": tuple(system
                                                      for system in named if system in kept)})
    except UserError as error:
        raise UserError(f"scenario {name}: {error}") from None


def _mapping(values: Mapping, key: str) -> dict:
    if not isinstance(values.get(key), dict) or not values[key]:
        raise UserError(f"--config has no {key}: give each under its name")
    return values[key]


def _chosen(names: Iterable[str], known: Mapping[str, Any], flag: str) -> dict[str, Any]:
    names = list(names)
    for name in names:
        if name not in known:
            raise UserError(f"{flag} {name} is not in the config: it has {', '.join(known)}")
    return {name: value for name, value in known.items() if not names or name in names}
