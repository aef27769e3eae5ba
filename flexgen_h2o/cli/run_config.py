"""The configuration of a run: all flags, checked together, and the objects they describe.

`generate` builds argparse from the table in `flags`. YAML keys are checked against the same names,
and the resolved values are saved beside results. No torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import yaml
from msgspec import Meta

from flexgen_h2o.cli.cache_flags import h2o_config
from flexgen_h2o.cli.flags import GOALS, RunFlags
from flexgen_h2o.cli.values import OTHER_NAMES, checked, flag_name, ratio_file
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.config.placement import PLACED, Placement, parse_percent
from flexgen_h2o.config.policy import Policy, speculative_method, speculative_policy
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.config.validation import Count, StrictStruct, Text, validate
from flexgen_h2o.config.weight_layout import AUTO, INTEGER_BITS, WEIGHT_BITS
from flexgen_h2o.errors import UserError, did_you_mean
from flexgen_h2o.files.chat_template import check_template_arguments
from flexgen_h2o.files.readers import parse_json, parse_json_object, read_text
from flexgen_h2o.files.writing import open_atomic
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.models.gguf.config import names_gguf

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM

_Total = Annotated[int, Meta(ge=0, le=1 << 53)]


class _Counts(StrictStruct, frozen=True):
    model: Text
    per_token: Count
    texts: _Total
    text_tokens: _Total
    text_experts: _Total
    counts: list[list[_Total]]

    def __post_init__(self) -> None:
        layers = [layer for layer in self.counts if layer]
        if not any(map(any, layers)):
            raise ValueError("counts: no token has selected an expert: count a run again")
        if len(set(map(len, layers))) > 1 or len(layers[0]) < self.per_token:
            raise ValueError("counts: layers differ in their number of experts, or have fewer than "
                             "a token selects: count a run again")
        tokens, remainder = divmod(sum(layers[0]), self.per_token)
        if remainder or len(set(map(sum, layers))) > 1 or max(map(max, layers)) > tokens:
            raise ValueError("counts: layers differ in the number of experts that tokens selected: "
                             "count a run again")
        means = self.texts, self.text_experts / self.per_token, self.text_tokens
        max_experts = self.texts * len(layers[0])
        if list(means) != sorted(means) or self.text_experts > max_experts:
            raise ValueError("texts, text_tokens and text_experts contradict each other: count a "
                             "run again")


def read_expert_counts(path: str) -> ExpertChoices:
    """Read a file of `write_expert_counts`.

    Raises `UserError` if the file cannot be read, or its contents are not expert counts.
    """
    text = read_text("--expert-counts", path, if_empty="is empty: count a run again")
    name = f"--expert-counts {path}"
    counts = validate(_Counts, parse_json(name, text), name)
    return ExpertChoices(tuple(map(tuple, counts.counts)), counts.per_token, counts.texts,
                         counts.text_tokens, counts.text_experts, path)


def check_counting(path: str | None, llm: LLM) -> None:
    """Raise `UserError` if counts are wanted (`path` is not None) of a model without experts."""
    if path is not None and llm.model_config.experts is None:
        raise UserError(f"{llm.model_config.name} has no experts: leave --count-experts out")


def write_expert_counts(path: str, stats: RunStats) -> None:
    """Write the expert counts of a run, a line per decoder layer. Raises OSError."""
    choices = stats.expert_choices
    assert choices is not None  # see `check_counting`
    head = {"model": stats.model, "per_token": choices.per_token, "texts": choices.texts,
            "text_tokens": choices.text_tokens, "text_experts": choices.text_experts}
    layers = ",\n".join(f" {json.dumps(layer)}" for layer in choices.counts)
    with open_atomic(path) as file:
        file.write(f'{json.dumps(head)[:-1]}, "counts": [\n{layers}\n]}}\n')


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
        """Yield (flag, whether it is given without effect, reason) of all such flags."""
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
        return h2o_config(self)

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
