"""The YAML file of a comparison: which systems, in which scenarios. Every value is checked."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from baselines import baseline_class
from msgspec import Meta
from msgspec.structs import asdict, replace
from processes import LOADING, REFUSED

from flexgen_h2o.cli.values import load_yaml, parse_size
from flexgen_h2o.config.validation import Count, Entries, check_keys, validated
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import json_texts
from flexgen_h2o.files.rows import RowTable, cell
from flexgen_h2o.metrics.provenance import ORIGIN
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.positions import check_length
from flexgen_h2o.models.registry import from_transformers, published, read_config

_Tokens = Annotated[int, Meta(ge=2)]
_Named = Annotated[dict[str, dict[str, Any]],
                   Meta(min_length=1, description="give each under its name")]


@dataclass(frozen=True)
class System:
    """A system under its name here: its module of `baselines`, and all of its options."""

    name: str
    baseline: str
    options: Mapping[str, Any]

    @property
    def weight_bits(self) -> int:
        """Bits of matrices; 16 stands for the scenario's dtype."""
        return baseline_class(self.baseline).weight_bits(self.options)

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


class ComparisonScenario(Entries):
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
    gen_len: _Tokens
    prompt_len: Count | None = None
    prompts: str | None = None
    prompt_key: str = "article"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    memory: int | None = None
    device_memory: int | None = None
    past_positions: bool = False
    batch: Count | None = None
    best: bool = True
    best_batch: dict[str, Count] = {}
    first_batch: Count = 1
    most: Count = 256
    search_gen_len: _Tokens | None = None
    repeats: Count | None = None
    timeout: Count | None = None
    cut_gen_len: dict[str, _Tokens] = {}
    systems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.prompt_len is None) == (self.prompts is None):
            raise ValueError("give prompt_len or prompts, one of them")
        if self.batch is None and not self.best:
            raise ValueError("nothing to measure: give batch, or best: true")
        bounds = {"first_batch": (self.first_batch, self.most),
                  "search_gen_len": (self.search_gen_len or 0, self.gen_len),
                  **{f"cut_gen_len of {system}": (tokens, self.gen_len)
                     for system, tokens in self.cut_gen_len.items()}}
        for name, (value, most) in bounds.items():
            if value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")

    @property
    def largest(self) -> int:
        """Sequences of its largest batch."""
        return max(self.batch or 1, self.most if self.best else 1, *self.best_batch.values())

    def measured(self, system: str, *, search: bool) -> int:
        """Tokens that a system generates for each prompt, in a step of the search or else."""
        found = self.cut_gen_len.get(system, self.gen_len)
        return min(found, self.search_gen_len or found) if search else found


class _ComparisonFile(Entries):
    systems: _Named
    scenarios: _Named
    threads: Count = os.cpu_count() or 1
    repeats: Count = 3
    timeout: Count = 3600  # seconds of one run


@dataclass(frozen=True)
class Comparison:
    """All of the file: scenarios and systems in its order."""

    systems: Mapping[str, System]
    scenarios: tuple[ComparisonScenario, ...]
    threads: int
    repeats: int
    timeout: int
    models: Path


def load(path: Path, *, models: Path, systems: Iterable[str] = (), scenarios: Iterable[str] = ()
         ) -> Comparison:
    """Read and check a file; with names, only those systems and scenarios of it.

    Raises
    ------
    UserError
        The file cannot be read, a key or a name in it is unknown, a value is wrong.
    """
    values = asdict(validated(_ComparisonFile, load_yaml(str(path)), str(path)))
    found = {name: _system(name, spec) for name, spec in values.pop("systems").items()}
    kept = _chosen(systems, found, "--systems")
    built = tuple(_scenario(name, spec, kept, found) for name, spec
                  in _chosen(scenarios, values.pop("scenarios"), "--scenarios").items())
    return Comparison(kept, tuple(each for each in built if each.systems), models=models, **values)


def _system(name: str, spec: Mapping[str, Any]) -> System:
    if "baseline" not in spec:
        raise UserError(f"system {name}: give its baseline")
    options = {key: value for key, value in spec.items() if key != "baseline"}
    return System(name, spec["baseline"], baseline_class(spec["baseline"]).check(name, options))


def _scenario(name: str, spec: Mapping[str, Any], kept: Mapping[str, System],
              known: Mapping[str, System]) -> ComparisonScenario:
    """A scenario with those of its systems that are kept."""
    where = f"scenario {name}"
    check_keys(spec, ComparisonScenario.__struct_fields__[1:], where)
    sizes = {key: parse_size(f"{where}: {key}", spec[key]) for key in ("memory", "device_memory")
             if spec.get(key) is not None}
    given = {key: value for key, value in spec.items() if value is not None}  # null: left out
    found = validated(ComparisonScenario,
                    {"systems": list(known), **given, **sizes, "name": name}, where)
    for key, names in (("systems", known), ("cut_gen_len", found.systems),
                       ("best_batch", found.systems)):
        for system in getattr(found, key):
            if system not in names:
                raise UserError(f"{where}: {key} names {system!r}, which is none of the systems")
    own = {key: {system: number for system, number in getattr(found, key).items()
                 if system in kept} for key in ("cut_gen_len", "best_batch")}
    return replace(found, **own, prompts=found.prompts and os.path.expanduser(found.prompts),
                   systems=tuple(system for system in found.systems if system in kept))


def _chosen(names: Iterable[str], known: Mapping[str, Any], flag: str) -> dict[str, Any]:
    names = list(names)
    for name in names:
        if name not in known:
            raise UserError(f"{flag} {name} is not in the config: it has {', '.join(known)}")
    return {name: value for name, value in known.items() if not names or name in names}


def random_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Seeded token ids below `vocab`, none of the special ones that come first."""
    draw = random.Random(0)
    return [[draw.randrange(5, vocab) for _ in range(length)] for _ in range(count)]


def text_prompts(path: str, key: str, folder: Path, count: int) -> list[list[int]]:
    """Token ids of the first lines' texts, each as long as it is. Loads transformers.

    Raises `UserError` when the file is missing, has less than `count` lines or no such texts.
    """
    texts = json_texts("prompts", path, key, if_empty="holds no prompts")
    if len(texts) < count:
        raise UserError(f"prompts {path} has {len(texts)} lines and {count} are needed: lower "
                        "`most` or `batch`")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text).input_ids for text in texts[:count]]


@dataclass(frozen=True)
class ComparisonSubject:
    """A Hugging Face folder, its sizes, and token ids for the largest batch."""

    folder: Path
    model: ModelConfig
    prompts: list[list[int]]

    @property
    def largest_file(self) -> Path:
        """A large file of the folder, to measure the disk with."""
        return max(self.folder.iterdir(), key=lambda path: path.stat().st_size)


def subject_of(scenario: ComparisonScenario, models: Path) -> ComparisonSubject:
    """Find or fetch the model, and make the prompts.

    Raises
    ------
    UserError
        It cannot be had, or the texts are too long for its positions.
    """
    folder = models / scenario.model
    if not folder.is_dir():
        folder = _fetched(scenario, folder)
    model = from_transformers(read_config(folder), scenario.model)
    if scenario.prompts is None:
        prompts = random_prompts(scenario.largest, scenario.prompt_len, model.vocab_size)
    else:
        prompts = text_prompts(scenario.prompts, scenario.prompt_key, folder, scenario.largest)
    if not scenario.past_positions:
        check_length(model, None, prompt=f"the longest prompt of scenario {scenario.name}",
                     length=max(map(len, prompts)), new_tokens=scenario.gen_len)
    return ComparisonSubject(folder, model, prompts)


def _fetched(scenario: ComparisonScenario, folder: Path) -> Path:
    """A model that is not below ``--models``; one of random weights the user has to make."""
    shapes = (f"{owner}/{scenario.model}" for owner in ("facebook", "meta-llama"))
    shape = next((name for name in shapes if published(name) is not None), None)
    if shape is not None:
        raise UserError(f"scenario {scenario.name}: there is no folder {folder}: python "
                        f"benchmarks/make_checkpoint.py --model {shape} --out {folder} "
                        f"--dtype {scenario.dtype}")
    from flexgen_h2o.models import checkpoint_folder  # only now: it loads torch

    return checkpoint_folder(scenario.model, dtype=scenario.dtype)


_OF_A_BATCH = ("prompt_len", "cut_gen_len", "at", "batch")
KEY = ("host", "threads", "scenario", "model", "dtype", "prompts", "prompt_len", "gen_len",
       "cut_gen_len", "memory_gb", "device_memory_gb", "system", "options", "at", "batch")
"""Columns that identify a cell: the same values are not measured again. But for `_OF_A_BATCH` they
are those of a system in a scenario.
"""
COLUMNS = (
    *ORIGIN, "cpu", "device", "threads", "scenario", "model", "dtype", "prompts", "prompt_len",
    "gen_len", "cut_gen_len", "memory_gb", "device_memory_gb", "page_cache", "system", "options",
    "settings", "documented", "versions", "at", "batch", "repeats", "status", "reason",
    "steps_from", "prefill_s", "decode_step_s", "total_s", "tokens_per_s", "projected", "load_s",
    "peak_rss_gb", "peak_memory_gb", "peak_device_gb", "gb_read", "equal_tokens",
    "equal_tokens_with", "prefill_roofline_s", "decode_step_roofline_s", "total_over_roofline",
    "disk_gb_per_s", "memory_gb_per_s", "link_gb_per_s", "gemm_tflop_per_s",
)
EQUAL, SEARCH, BEST = "equal", "search", "best"
"""Values of `at`: all at the same batch; a step of the search; each at its own best batch."""


class Table(RowTable):
    """The rows of the file `path`, which a comparison goes on with. Errors as of `RowTable`."""

    def __init__(self, path: str):
        super().__init__(path, COLUMNS, KEY)

    def never(self, row: Mapping[str, object]) -> dict[str, str] | None:
        """The row that says why the system of this one runs at no batch at all; None if none does.
        """
        alike = [name for name in KEY if name not in _OF_A_BATCH]
        return next((each for each in self.rows() if runs_never(each["status"])
                     and all(each[name] == str(cell(row[name])) for name in alike)), None)


def runs_never(status: str) -> bool:
    """True if a system of that `status` would have it at any batch."""
    return status == REFUSED or status.endswith(LOADING)
