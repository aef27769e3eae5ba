"""``--model_args`` of the harness: their names, checks, and the arguments of `LLM`. No torch.

Most are flags of `flex_opt` with underscores, with the same checks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexgen_h2o.cli.launch import llm_arguments
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.validation import Count, StrictStruct, check_keys, validate
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.errors import UserError

FLAGS = (
    "path", "device", "dtype", "compress_weight", "weight_bits", "activation_bits", "weight_cache",
    "no_weight_cache", "calibration", "gpu_batch_size", "num_gpu_batches", "percent", "overlap",
    "pin_weight", "cpu_cache_compute", "sep_layer", "offload_dir", "verify", "memory_limit",
    "device_memory_limit", "eviction", "expert_percent", "expert_slots", "cpu_expert_compute",
    "expert_counts", "hh_ratio", "recent_ratio", "budget_of", "recall", "index_bits",
    "selective_fetch", "hot_set", "num_heavy_hitter_tokens", "num_window_length", "hh_all",
    "score", "score_decay", "sink_tokens", "enable_position_rolling", "attn_sparsity",
    "compress_cache", "cache_bits", "key_bits", "value_bits", "prefill_chunk", "seed",
    "no_generation_config", "batch_invariant",
)
"""Model arguments that are also flags of `flex_opt`."""

PROMPT_CHUNK = 64
"""Default of `prompt_chunk`: tokens between evictions inside of a prompt."""

MAX_SEQUENCES = 64
"""Default of ``--max_batch_size`` with ``--batch_size auto``."""

_RENAMED = {"model": "pretrained", "evict_while_prefilling": "evict_prompt"}


def _checked_flags(values: Mapping[str, Any]) -> RunConfig:
    """Return flags of `flex_opt`. Errors call them by the names of the model arguments."""
    def argument(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        return _RENAMED.get(name, name)

    try:
        return RunConfig(**values)
    except UserError as error:
        raise UserError(re.sub(r"--([a-z][a-z-]*)", argument, str(error))) from None


class Arguments(StrictStruct, frozen=True):
    """All model arguments, checked. Lengths are tokens.

    Raises `UserError` if a value has a wrong type or range, or values contradict each other.
    """

    pretrained: str  # model name, Hugging Face repo id or local folder
    flags: dict[str, Any]  # the given arguments of `FLAGS`
    evict_prompt: bool = False
    """Evict also inside of contexts, after every `prompt_chunk` tokens. The accuracy runs of the
    H2O paper do so after each token: prompt_chunk 1."""
    prompt_chunk: Count | None = None  # None: 64
    simulate: bool = False  # mask a full cache instead of evicting
    add_bos_token: bool | None = None  # add the tokenizer's special tokens; None: its default
    max_length: Count | None = None
    """Tokens of context and continuation; longer contexts are cut on the left. None: the
    model's."""
    max_gen_toks: Count = 256  # new tokens if a task does not limit them
    batch_size: Any = 1  # sequences computed together, or ``auto``: as many as fit in memory
    max_batch_size: Count | None = None  # limit of auto; None: 64

    def __post_init__(self) -> None:
        self._check_batch_size()
        self._check_eviction()
        config = self.run_config()  # checks the flags
        if self.simulate and config.cache().bits != 16:
            raise UserError("simulate masks an exact cache: leave cache_bits out")

    def _check_batch_size(self) -> None:
        if self.batch_size != "auto":
            validate(Count, self.batch_size, "batch_size")
            if self.max_batch_size is not None:
                raise UserError("max_batch_size has no effect without --batch_size auto")
        # 1 is also the harness's default.
        if "gpu_batch_size" in self.flags and self.batch_size != 1:
            raise UserError("give --batch_size or gpu_batch_size, not both")

    def _check_eviction(self) -> None:
        if self.prompt_chunk is not None and not self.evict_prompt:
            raise UserError("prompt_chunk has no effect: add evict_prompt=true")
        if self.evict_prompt and "prefill_chunk" in self.flags:
            raise UserError("prefill_chunk and evict_prompt both cut prompts into chunks: give "
                            "prompt_chunk alone")
        for name in ("evict_prompt", "simulate"):
            if getattr(self, name) and not self._evicts:
                raise UserError(f"{name} has no effect on the full cache: give hh_ratio or "
                                "num_window_length")

    @property
    def _evicts(self) -> bool:
        h2o = _checked_flags(self.flags).h2o()
        return h2o is not None and (not h2o.is_full or h2o.recall)

    def run_config(self) -> RunConfig:
        """Return the flags of `flex_opt`."""
        values: dict[str, Any] = {"model": self.pretrained, **self.flags}
        if self.evict_prompt:
            values |= {"evict_while_prefilling": True,
                       "prefill_chunk": self.prompt_chunk or PROMPT_CHUNK}
        if isinstance(self.batch_size, int) and "gpu_batch_size" not in values:
            values["gpu_batch_size"] = self.batch_size
        return _checked_flags(values)

    def h2o(self) -> H2OConfig | None:
        """Return the H2O configuration; None for the full cache."""
        h2o = self.run_config().h2o()
        return replace(h2o, simulate=True) if self.simulate else h2o

    def for_llm(self) -> dict[str, Any]:
        """Return the arguments of `LLM`."""
        return llm_arguments(self.run_config(), h2o=self.h2o(), progress=False)

    @property
    def max_sequences(self) -> int | None:
        """Limit of the batch size where memory decides; None if it is given."""
        if self.batch_size != "auto":
            return None
        return self.max_batch_size or MAX_SEQUENCES


def parse(values: Mapping[str, object]) -> Arguments:
    """Return checked `Arguments` of the harness's; None means not given. Raise `UserError`."""
    fields = [name for name in Arguments.__struct_fields__ if name != "flags"]
    values = {name: value for name, value in values.items() if value is not None}
    check_keys(values, (*fields, *FLAGS), "model_args")
    if "pretrained" not in values:
        raise UserError("model_args name no model: give pretrained=NAME")
    flags: dict[str, Any] = {name: value for name, value in values.items() if name in FLAGS}
    if "percent" in flags:
        flags["percent"] = _percent(flags["percent"])
    if isinstance(flags.get("expert_percent"), str):
        flags["expert_percent"] = flags["expert_percent"].replace("/", " ")
    options = {name: value for name, value in values.items() if name in fields}
    if "batch_size" in options:
        options["batch_size"] = _batch_size(options["batch_size"])
    return validate(Arguments, {"flags": flags, **options}, "model_args")


def _percent(value: object) -> object:
    """Return ``0/100/100/0`` with spaces: commas separate the harness's arguments."""
    if value == AUTO:
        raise UserError("percent=auto is for flex_opt: give numbers here, such as 0/100/100/0")
    return value.replace("/", " ") if isinstance(value, str) else value


def _batch_size(value: object) -> object:
    """Return a batch size as an integer: the harness passes text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value
