"""The configuration of a run: all flags, checked together, and the objects they describe.

`generate` builds argparse from the table in `flags`. YAML keys are checked against the same names,
and the resolved values are saved beside results. No torch.

The budget of the cache is given as ratios of the prompt or as counts of tokens; `--eviction` says
which tokens fill it. A window has as many tokens as heavy hitters and recent tokens together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import yaml

from flexgen_h2o.cli.flags import GOALS, RunFlags
from flexgen_h2o.cli.values import OTHER_NAMES, checked, flag_name, ratio_file
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import SINK_WINDOW_SINKS, H2OConfig
from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.config.placement import PLACED, Placement, parse_percent
from flexgen_h2o.config.policy import Policy, speculative_method, speculative_policy
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.config.weight_layout import AUTO, INTEGER_BITS, WEIGHT_BITS
from flexgen_h2o.engine.expert_counts import read_expert_counts
from flexgen_h2o.errors import UserError, did_you_mean
from flexgen_h2o.files.chat_template import check_template_arguments
from flexgen_h2o.files.readers import parse_json_object
from flexgen_h2o.files.writing import open_atomic
from flexgen_h2o.models.gguf.config import names_gguf

_ONLY_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_Built = TypeVar("_Built", Policy, SamplingParams)


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunFlags):
    """One checked value per flag of `generate`. Lengths are in tokens, batch sizes in sequences.

    Raises `UserError` for a value of a wrong type or out of range, and for values that contradict
    each other.
    """

    def __post_init__(self) -> None:
        ratio_files = {spec.name: ratio_file(getattr(self, spec.name)) for spec in fields(self)
                       if spec.metadata["type"] == "ratios"}
        for spec in fields(self):
            value = checked(spec, getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)
        object.__setattr__(self, "speculate", speculative_method(self.speculate, self.draft_model))
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UserError(f"--device must be auto, cpu, cuda or cuda:n, got {self.device!r}")
        self._check_lengths()
        self._check_files(ratio_files)
        self._check_chat()
        self._check_bits()
        self._check_planning()
        # Their constructors check their values.
        policy, cache = self.policy(), self.cache()
        if self.resolved_speculate is not None:
            speculative_policy(policy, cache)
            if self.pipeline_parallel > 1:
                raise UserError("--speculate needs all layers on one rank: leave "
                                "--pipeline-parallel out")
        for name in _ONLY_WHEN_SAMPLING:
            if not self.do_sample and getattr(self, name) != getattr(RunConfig, name):
                raise UserError(f"{flag_name(name)} has no effect: add --do-sample")
        try:
            self.sampling()
        except UserError as error:
            name, _, reason = str(error).partition(" ")
            flag = flag_name(name) if hasattr(self, name) else name
            raise UserError(f"{flag} {reason}") from None

    def _check_lengths(self) -> None:
        cut = self.cut_gen_len
        if cut is None:
            return
        if cut > self.gen_len:
            raise UserError(f"--cut-gen-len must be at most --gen-len {self.gen_len}, got {cut}")
        if cut == 1 and self.gen_len > 1:
            raise UserError("--cut-gen-len 1 measures no decode step to project from: give 2 up")

    def _check_chat(self) -> None:
        if self.chat and self.synthetic:
            raise UserError("--chat is for texts: add --prompt or --prompts")
        if self.chat_template_kwargs is not None and not self.chat:
            raise UserError("--chat-template-kwargs has no effect: add --chat")
        self.chat_arguments()

    def chat_arguments(self) -> dict[str, Any]:
        """Return the arguments of the chat template. Raises `UserError`."""
        arguments = parse_json_object("--chat-template-kwargs", self.chat_template_kwargs or "{}")
        check_template_arguments("--chat-template-kwargs", arguments)
        return arguments

    def _check_bits(self) -> None:
        """Refuse bit widths that contradict each other, and flags of quantization without it."""
        for kind in ("weight", "cache"):
            compress, bits = f"compress_{kind}", f"{kind}_bits"
            if getattr(self, compress) and getattr(self, bits) in (16, AUTO):
                raise UserError(f"{flag_name(compress)} and {flag_name(bits)} "
                                f"{getattr(self, bits)} contradict: leave one out")
        if self.weight_cache != "auto" and self.no_weight_cache:
            raise UserError("give --weight-cache or --no-weight-cache, not both")
        quantized: tuple[int | str, ...] = (AUTO, *WEIGHT_BITS[1:])
        takes = {"weight_cache": quantized, "no_weight_cache": quantized,
                 "activation_bits": (AUTO, *INTEGER_BITS), "calibration": INTEGER_BITS}
        for name, possible in takes.items():
            is_set = getattr(self, name) != getattr(RunConfig, name)
            stored = self.resolved_weight_bits
            if is_set and stored not in possible:
                raise UserError(f"{flag_name(name)} has no effect on weights of {stored} bits: "
                                f"{'add' if stored == 16 else 'use'} --weight-bits 4")

    def _check_planning(self) -> None:
        """Refuse flags that have no effect in this configuration."""
        for flag, is_set, reason in self._ineffective_flags():
            if is_set:
                raise UserError(f"{flag} has no effect {reason}")
        if self.hardware is not None and not self.plan_only:
            raise UserError("--hardware describes another machine: add --plan-only")

    def _ineffective_flags(self) -> Iterator[tuple[str, bool, str]]:
        """Yield flags that may have no effect: (flag, whether it is given without one, reason)."""
        fixed = self.percent != AUTO
        yield "--goal", fixed and self.goal != GOALS[0], "on a fixed policy: add --percent auto"
        yield ("--allow-compression", fixed and self.allow_compression,
               "on a fixed policy: add --percent auto")
        bits_set = [self.weight_bits is not None or self.compress_weight, self.gives_cache_bits]
        yield ("--allow-compression", self.allow_compression and all(bits_set),
               "as the bits of weights and cache are both given: leave one of them out")
        yield ("--expert-percent", self.expert_percent is not None and not fixed,
               "with --percent auto, which chooses it")
        placed = Placement(*self.expert_percent) if self.expert_percent else self.policy().weights
        yield ("--expert-counts", self.expert_counts is not None and fixed and not self.plan_only
               and 1.0 in placed.fractions(),
               "on experts that are all on one tier: add --percent auto or --expert-percent")
        elsewhere = self.hardware is not None
        yield ("--recalibrate", self.recalibrate and fixed and not self.plan_only,
               "on a fixed policy: add --percent auto or --plan-only")
        yield ("--recalibrate", self.recalibrate and elsewhere,
               "with --hardware: that file says how fast the machine is")
        yield ("--device", elsewhere and self.device != "auto",
               "with --hardware: that file says what computes")
        yield ("--device-memory-limit",
               self.device_memory_limit is not None and self.device == "cpu",
               "on --device cpu: give --memory-limit")
        yield ("--rank-timeout",
               self.pipeline_parallel == 1 and self.rank_timeout != RunConfig.rank_timeout,
               "on one rank: add --pipeline-parallel")
        yield ("--verify", self.verify and fixed and self.policy().weights.disk == 0,
               "on weights in memory: let --percent leave some on disk")
        yield ("--selective-fetch",
               self.selective_fetch and self.recall and fixed and self.policy().cache.gpu == 100,
               "on a cache in memory: let --percent leave some on disk")
        yield ("--num-speculative-tokens",
               self.resolved_speculate is None
               and self.num_speculative_tokens != RunConfig.num_speculative_tokens,
               "without --speculate")
        yield ("--count-experts", self.count_experts is not None and self.pipeline_parallel > 1,
               "over ranks, each of which has its own experts: leave --pipeline-parallel out")
        yield "--stream", self.stream and self.synthetic, "on token ids: add --prompt or --prompts"
        yield ("--stream", self.stream and self.verbose < 2,
               f"with --verbose {self.verbose}, which prints no texts: leave one of them out")
        for name in ("output", "csv", "trace", "stream", "debug_mode", "count_experts", "log_file"):
            yield (flag_name(name),
                   self.plan_only and getattr(self, name) != getattr(RunConfig, name),
                   "with --plan-only, which runs nothing")

    def _check_files(self, ratio_files: Mapping[str, str | None]) -> None:
        if self.prompt and self.prompts:
            raise UserError("give --prompt or --prompts, not both")
        if self.num_prompts is not None and not self.synthetic:
            raise UserError("--num-prompts counts synthetic prompts: leave it out, or the texts")
        if self.prompt_len != RunConfig.prompt_len and not self.synthetic:
            raise UserError("--prompt-len is of synthetic prompts: leave it out, or the texts")
        if self.prompts and not self.prompts.endswith((".txt", ".jsonl")):
            raise UserError(f"--prompts must name a .txt or .jsonl file, got {self.prompts!r}")
        if self.no_log and self.log_file != RunConfig.log_file:
            raise UserError("give --log-file or --no-log, not both")
        named = ("prompts", "calibration", "config", "hardware", "expert_counts", "output", "csv",
                 "trace", "count_experts", "log_file")
        files = {**ratio_files, **{name: getattr(self, name) for name in named}}
        seen: dict[str, str] = {}
        for name, path in files.items():
            if path is None or path == "auto":
                continue
            other = seen.setdefault(os.path.realpath(path), name)
            if other != name and not {other, name} <= set(ratio_files):
                raise UserError(f"{flag_name(other)} and {flag_name(name)} name the same file")

    @property
    def synthetic(self) -> bool:
        """Whether prompts are random token ids, because no text is given."""
        return not self.prompt and self.prompts is None

    @property
    def resolved_gpu_batch_size(self) -> int:
        """Sequences computed together."""
        if self.resolved_speculate is not None:
            return 1
        return self.gpu_batch_size or Policy.gpu_batch_size

    @property
    def resolved_num_gpu_batches(self) -> int:
        """GPU batches of a block."""
        batches = self.num_gpu_batches or Policy.num_gpu_batches
        speculates = self.resolved_speculate is not None
        return batches * (self.gpu_batch_size or 1) if speculates else batches

    @property
    def resolved_speculate(self) -> str | None:
        """Method of speculative decoding; None for none."""
        return None if self.speculate == "none" else self.speculate

    @property
    def gives_cache_bits(self) -> bool:
        """Whether a flag sets the bit width of the cache."""
        return self.compress_cache or any(
            bits is not None for bits in (self.cache_bits, self.key_bits, self.value_bits))

    @property
    def resolved_cache_bits(self) -> int:
        """Bit width of the cache without `key_bits` and `value_bits`: 16 (`dtype`), 8 or 4."""
        return self.cache_bits or (4 if self.compress_cache else 16)

    @property
    def resolved_weight_bits(self) -> int | str:
        """Bit width of weight matrices: 16 (`dtype`), 12, 8 or 4, or "auto" for a GGUF file."""
        if self.weight_bits not in (None, AUTO):
            return self.weight_bits
        if self.compress_weight:
            return 4
        return AUTO if names_gguf(self.path or self.model) else 16

    @property
    def resolved_weight_cache(self) -> str | None:
        """Folder that keeps quantized weights; "auto" for the default one, None for none."""
        return None if self.no_weight_cache else self.weight_cache

    def _build(self, cls: type[_Built], **others: object) -> _Built:
        """Make a `cls` from `others` and from the flags that have names of its fields."""
        names = {spec.name for spec in fields(cls)} & {spec.name for spec in fields(self)}
        return cls(**{name: getattr(self, name) for name in names} | others)

    def policy(self) -> Policy:
        """Return the policy of the run, with defaults for fields that are not planned yet."""
        percent = RunConfig.percent if self.percent == AUTO else self.percent
        return self._build(
            Policy, speculate=self.resolved_speculate, gpu_batch_size=self.resolved_gpu_batch_size,
            num_gpu_batches=self.resolved_num_gpu_batches,
            experts=None if self.expert_percent is None else Placement(*self.expert_percent),
            expert_choices=self._expert_choices,
            **dict(zip(PLACED, parse_percent(percent), strict=True)))

    @cached_property
    def _expert_choices(self) -> ExpertChoices | None:
        """Contents of the file of expert counts, which is read once."""
        return None if self.expert_counts is None else read_expert_counts(self.expert_counts)

    def cache(self) -> CacheOptions:
        """Return the storage options of the cache."""
        return CacheOptions(self.h2o(), self.resolved_cache_bits, self.attn_sparsity,
                            self.key_bits, self.value_bits)

    def h2o(self) -> H2OConfig | None:
        """Return the H2O configuration; None for the full cache."""
        return _h2o_config(self)

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters.

        Synthetic prompts never stop at EOS, as in FlexGen's benchmark.
        """
        return self._build(SamplingParams, max_new_tokens=self.gen_len,
                           eos_token_id=-1 if self.ignore_eos or self.synthetic else None)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RunConfig:
        """Make a configuration from names and values. Raises `UserError` for an unknown name."""
        values = {OTHER_NAMES.get(name, name): value for name, value in values.items()}
        known = [spec.name for spec in fields(cls)]
        for name in values:
            if name not in known:
                raise UserError(f"unknown key {name!r}{did_you_mean(str(name), known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, object]:
        """Return the values as plain YAML types, without `config`, whose values they include."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        del values["config"]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def save(self, path: str | os.PathLike) -> None:
        """Write the resolved configuration as YAML for ``--config``. Raises OSError."""
        with open_atomic(path) as file:
            yaml.safe_dump(self.to_dict(), file, sort_keys=False, allow_unicode=True)


_WINDOWS = ("window", "sink-window")
_RATIOS = ("hh_ratio", "recent_ratio")
_COUNTS = ("num_heavy_hitter_tokens", "num_window_length")


def _h2o_config(flags: RunFlags) -> H2OConfig | None:
    """Return the H2O configuration of checked flags; None for the full cache.

    Raises `UserError` for flags that contradict each other or have no effect.
    """
    for name, missing, needed in (
            ("score_decay", flags.score != "decay", "--score decay"),
            ("index_bits", not flags.recall, "--recall"),
            ("selective_fetch", not flags.recall, "--recall"),
            ("hot_set", not flags.selective_fetch, "--selective-fetch")):
        if missing and getattr(flags, name) != getattr(RunFlags, name):
            raise UserError(f"{flag_name(name)} has no effect: add {needed}")
    size_flags = _sized_by(flags)
    if not size_flags:
        _check_full(flags)
        return H2OConfig(drop_positions=True) if flags.hh_long_seq else None
    _check_sized(flags, size_flags)
    sizes = _counts(flags) if set(size_flags) & set(_COUNTS) else _ratios(flags, size_flags)
    return H2OConfig(
        **sizes,
        budget_of=flags.budget_of,
        sink_tokens=_sinks(flags),
        score=flags.score,
        decay=flags.score_decay,
        positions="rolling" if flags.enable_position_rolling else "original",
        evict_generated=flags.hh_all,
        prompt_chunk=flags.prefill_chunk if flags.evict_while_prefilling else None,
        drop_positions=flags.hh_long_seq,
        recall=flags.recall,
        index_bits=flags.index_bits,
    )


def _sized_by(flags: RunFlags) -> list[str]:
    """Return the names of the given flags that set the budget; none for the full cache."""
    names = [name for name in ("recent_ratio", *_COUNTS) if getattr(flags, name) is not None]
    ratios = flags.hh_ratio if isinstance(flags.hh_ratio, tuple) else (flags.hh_ratio,)
    return names if all(ratio == 1 for ratio in ratios) else ["hh_ratio", *names]


def _check_sized(flags: RunFlags, size_flags: list[str]) -> None:
    """Refuse flags that contradict the given flags of the budget."""
    ratios, counts = ([flag_name(name) for name in names if name in size_flags]
                      for names in (_RATIOS, _COUNTS))
    if flags.eviction == "full":
        raise UserError(f"--eviction full keeps all: leave {(ratios + counts)[0]} out")
    if flags.attn_sparsity != 1:
        raise UserError("--attn-sparsity selects among all earlier tokens, so nothing may be "
                        f"evicted: leave it or {(ratios + counts)[0]} out")
    if flags.recall and (idle := _eviction_flags(flags)):
        raise UserError("--recall evicts nothing and selects tokens per query: leave "
                        f"{idle[0]} out")
    if ratios and counts:
        raise UserError(f"give {ratios[0]} or {counts[0]}, not both")
    if flags.eviction == "h2o" and size_flags == ["recent_ratio"]:
        raise UserError("--recent-ratio sets only recent tokens: give --hh-ratio below 1 too, or "
                        "--eviction window")
    if flags.eviction == "window" and flags.sink_tokens:
        raise UserError("--eviction window has no sinks: give --eviction sink-window")
    if flags.eviction in _WINDOWS and len(counts) == 2:
        raise UserError("--num-heavy-hitter-tokens has no effect with "
                        f"--eviction {flags.eviction}: leave it out")
    if counts and flags.budget_of != "prompt":
        raise UserError(f"--budget-of {flags.budget_of} has no effect on {counts[0]}, which counts "
                        "tokens: leave one of them out")
    if flags.evict_while_prefilling and flags.prefill_chunk is None:
        raise UserError("--evict-while-prefilling evicts after each chunk of a prompt: say how "
                        "many tokens one has, such as --prefill-chunk 256")
    scored = flags.eviction == "h2o" and flags.num_heavy_hitter_tokens != 0
    if flags.score != "sum" and not scored:
        raise UserError("--score has no effect without heavy hitters: leave it out")


def _eviction_flags(flags: RunFlags) -> list[str]:
    """Return the given flags that only eviction uses, without the budget flags."""
    given = {
        f"--eviction {flags.eviction}": flags.eviction in _WINDOWS,
        "--score": flags.score != "sum",
        "--sink-tokens": flags.sink_tokens,
        "--enable-position-rolling": flags.enable_position_rolling,
        "--hh-all false": not flags.hh_all,
        "--evict-while-prefilling": flags.evict_while_prefilling,
    }
    return [name for name, is_given in given.items() if is_given]


def _check_full(flags: RunFlags) -> None:
    """Refuse flags of eviction with a full cache."""
    hint = ("leave it out" if flags.eviction == "full"
            else "give --hh-ratio or --num-window-length")
    idle = _eviction_flags(flags) + ["--recall"] * flags.recall
    if flags.budget_of != "prompt":
        idle.append(f"--budget-of {flags.budget_of}")
    if idle:
        raise UserError(f"{idle[0]} has no effect on the full cache: {hint}")


def _sinks(flags: RunFlags) -> int:
    if flags.sink_tokens is None:
        return SINK_WINDOW_SINKS if flags.eviction == "sink-window" else 0
    return flags.sink_tokens


def _ratios(flags: RunFlags, size_flags: list[str]) -> dict[str, Any]:
    """Return the budget as ratios: keywords of `H2OConfig`."""
    recent = flags.hh_ratio if flags.recent_ratio is None else flags.recent_ratio
    pairs = _by_layer(flags.hh_ratio, recent)
    if flags.eviction == "h2o":
        return {"heavy_ratio": flags.hh_ratio, "recent_ratio": flags.recent_ratio}
    if "hh_ratio" not in size_flags:
        return {"recent_ratio": recent}
    # Rounded, for 0.7 + 0.1 is a little less than 0.8, and a token less of ten.
    sums = tuple(min(1.0, round(a + b, 9)) for a, b in pairs)
    return {"recent_ratio": sums if len(sums) > 1 else sums[0]}


def _by_layer(*ratios: float | tuple[float, ...]) -> list[tuple[float, ...]]:
    """Return the ratios of each layer; a single tuple if none is given by layer."""
    lengths = {len(ratio) for ratio in ratios if isinstance(ratio, tuple)}
    if len(lengths) > 1:
        raise UserError("--hh-ratio and --recent-ratio list different counts of numbers: give one "
                        "for each decoder layer")
    count = lengths.pop() if lengths else 1
    columns = [ratio if isinstance(ratio, tuple) else (ratio,) * count for ratio in ratios]
    return list(zip(*columns, strict=True))


def _counts(flags: RunFlags) -> dict[str, Any]:
    """Return the budget in tokens: keywords of `H2OConfig`."""
    total, heavy, sinks = flags.num_window_length, flags.num_heavy_hitter_tokens, _sinks(flags)
    window = flags.eviction in _WINDOWS
    if total is None:
        heavy = heavy or 0  # one of the two is given
        given = f"--num-heavy-hitter-tokens {heavy}"
        total = 2 * heavy + (0 if window else sinks)
    else:
        given = f"--num-window-length {total}"
        heavy = total // 2 if heavy is None else heavy
    heavy = 0 if window else heavy
    recent = total - heavy - sinks
    if recent < 1:
        raise UserError(f"{given} leaves no recent tokens beside {heavy} heavy hitters and {sinks} "
                        "sinks: raise it")
    return {"heavy_tokens": heavy, "recent_tokens": recent}
