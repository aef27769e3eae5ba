"""Recall in place of a full cache that is not all in the fastest memory: what a plan proposes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flexgen_h2o.cli.flags import GOALS
from flexgen_h2o.cli.plan_text import line, plan_text
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.launch import launched
from flexgen_h2o.config.policy import DUMMY, Workload
from flexgen_h2o.config.weight_layout import AUTO, WEIGHT_BITS, WeightOptions
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import is_there
from flexgen_h2o.files.terminal import tell
from flexgen_h2o.kernels.implementations import AutotuneTable
from flexgen_h2o.models.gguf.config import config_of, header_options
from flexgen_h2o.models.gguf.header import gguf_file, read_header
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.positions import check_cache, check_experts, check_length, longest_prompt
from flexgen_h2o.models.quantization import Quantization, quantization, weight_options
from flexgen_h2o.models.registry import (
    from_transformers,
    published,
    published_quantization,
    read_config,
)
from flexgen_h2o.planning.hardware import BITS, Hardware, load_hardware
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.pipeline import predict_pipeline, search_pipeline
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.planning.search import TIE_RATIO, Choice, PlanRequest, predict, search
from flexgen_h2o.storage.free_memory import MemoryLimits, free_memory

HEAVY_RATIO = 0.1
"""As heavy hitters, and as many recent tokens: 20 % of the prompt."""
PERPLEXITY = 1.04
"""Perplexity over the full cache's then, of smollm2-135m (docs/h2o.md)."""


@dataclass(frozen=True)
class RecallProposal:
    """Recall that is predicted to be faster than the full cache of a plan.

    Attributes
    ----------
    flags : str
        To add to those that were planned for.
    choice : Choice
        The run with them, and what is predicted of it.
    """

    flags: str
    choice: Choice

    def text(self, full: Choice) -> str:
        """One line: the flags, the rates with and without them, and what they change."""
        return (f"{self.flags}: {self.choice.tokens_per_second:.4g} tokens/s predicted, "
                f"{full.tokens_per_second:.4g} without; a new token then attends to "
                f"{200 * HEAVY_RATIO:g} % of the prompt, and perplexity is {PERPLEXITY} times the "
                "full cache's (smollm2-135m, docs/h2o.md)")


def with_recall(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """The flags to add to a run with the full cache, and the run with them: what is refused is left
    out."""
    h2o = config.h2o()
    if h2o is not None and (h2o.recall or not h2o.is_full):
        return
    proposals: list[dict[str, Any]] = [
        {"hh_ratio": HEAVY_RATIO, "recall": True},
        {"hh_ratio": HEAVY_RATIO, "recall": True, "fetch_chosen": True}]
    for added in proposals:
        with suppress(UserError):
            words = (flag_name(name) + ("" if value is True else f" {value}")
                     for name, value in added.items())
            yield " ".join(words), replace(config, **added)


# From flags to a plan: the machine and the model that it is for, and the flags that it chooses.
#
# For this machine it measures, which loads torch; for the one of `--hardware` it does not.


HEADROOM = 0.97
"""The share of free memory that a plan for this machine takes: a little comes and goes until the
run."""
LIBRARIES = 160 << 20
"""Bytes of host memory that it leaves at least, for what PyTorch and oneDNN take to compute."""


@dataclass(frozen=True)
class PlanSubject:
    """The subject of a plan: a machine, what may be taken of it, and a model as it will be loaded.

    `itemsize` is bytes of an element; `weights` gives how weights of so many bits are held.
    """

    hardware: Hardware
    limits: MemoryLimits
    model: ModelConfig
    itemsize: int
    weights: Callable[[int | str], WeightOptions]


@dataclass(frozen=True)
class Plan:
    """The result of planning.

    Attributes
    ----------
    config : RunConfig
        With the chosen numbers in place of `auto`, and no flags of the search.
    best : Choice
        The run that it describes, and what is predicted of it.
    implementations : mapping
        The fastest on the machine that is planned for, where there is a choice: see `ComputeRates`.
    text : str
        To print.
    bounds : tuple of int or None
        Of the decoder layers of each rank of a pipeline (`Stage.of_rank`).
    recall : RecallProposal or None
        For a full cache of which a share is not in the fastest memory.
    """

    config: RunConfig
    best: Choice
    implementations: AutotuneTable
    text: str
    bounds: tuple[int, ...] | None = None
    recall: RecallProposal | None = None


def plan(config: RunConfig, load: Workload, prompts: int | None,
         texts: Sequence[str] = ()) -> Plan:
    """Plan a run: choose its policy if it is `--percent auto`, else predict the one it has.

    Parameters
    ----------
    config : RunConfig
    load : Workload
        Lengths, and the batch sizes that a fixed policy comes to.
    prompts : int or None
        How many there are; None: synthetic ones, a block.
    texts : sequence of str
        The prompts, if they are texts. Planning for this machine, the longest is counted in tokens.

    Raises
    ------
    UserError
        The model or the machine can't be had, the longest text is too long for the model, or
        nothing fits.
    """
    subject = (_here(config, texts) if config.hardware is None
               else _elsewhere(config, config.hardware))
    if not config.synthetic:  # their length is an estimate
        load = load.cut(longest_prompt(subject.model, config.h2o()))
    choices, bounds = _choices(config, subject, load, prompts)
    best = choices[0]
    lines = [plan_text(subject.hardware, choices, subject.limits, bounds)]
    recall = _faster_recall(config, subject, load, prompts, full=best)
    if recall is not None:
        lines.append(line("recall", recall.text(best)))
    if config.fetch_chosen and not best.run.policy.fetch_chosen:
        lines.append(line("note", "--fetch-chosen has no effect: this policy leaves nothing of the "
                                  "cache on a slower tier from which tokens are fetched"))
    if config.percent == AUTO:
        config = _chosen(config, best.run)
    return Plan(config, best, subject.hardware.compute.implementations, "\n".join(lines), bounds,
                recall)


def _here(config: RunConfig, texts: Sequence[str]) -> PlanSubject:
    """This machine, with what is free on it, and the model as a run would find it."""
    from flexgen_h2o.engine.progress import byte_bar
    from flexgen_h2o.engine.source import find_model
    from flexgen_h2o.engine.tokenizer import Prompts
    from flexgen_h2o.planning.calibrate import load_or_calibrate
    from flexgen_h2o.storage.tiers import open_device

    def tell_of(words: str) -> None:
        if config.verbose:
            tell(f"measuring {words}")

    device = open_device(config.device)
    device.limit(config.device_memory_limit)
    with byte_bar("converting", off=None if config.verbose else True) as bar:
        source = find_model(config.model, path=config.path, dtype=config.dtype,
                      bits=config.resolved_weight_bits,
                      activation_bits=config.activation_bits, device=device, progress=bar)
    _check(config, source.config, has_gpu=device.separate)
    prompts = Prompts(source, config.model, config.h2o())
    if texts and prompts.tokenizer is not None:  # a plan for dummy weights goes by the estimate
        prompts.check_longest(texts, config.gen_len)
    hardware = load_or_calibrate(device, config.offload_dir, recalibrate=config.recalibrate,
                                 progress=tell_of)
    free = free_memory(config.offload_dir, device.free_bytes())
    if config.pipeline_parallel > 1:  # ranks of one host share its memory and its disk
        here = launched().local_ranks
        free = replace(free, cpu_bytes=free.cpu_bytes // here, disk_bytes=free.disk_bytes // here)
    limits = MemoryLimits(None if free.gpu_bytes is None else int(HEADROOM * free.gpu_bytes),
                          max(0, min(int(HEADROOM * free.cpu_bytes), free.cpu_bytes - LIBRARIES)),
                          int(HEADROOM * free.disk_bytes))

    def weights(bits: int | str) -> WeightOptions:
        return replace(source, bits=bits).form.options

    return PlanSubject(hardware, _within(limits, config), source.config, source.dtype.itemsize,
                       weights)


def _elsewhere(config: RunConfig, path: str) -> PlanSubject:
    """The machine in a file, all of its memory, and a model whose shape is known here."""
    hardware = load_hardware(path)
    if config.device_memory_limit is not None and not hardware.has_gpu:
        raise UserError(f"--device-memory-limit has no effect: {hardware.name} has no GPU")
    limits = MemoryLimits(hardware.gpu_bytes, hardware.cpu_bytes, hardware.disk_bytes)
    name = config.model if config.path in (None, DUMMY) else config.path
    model, weights = _shape(config.model, name, on_gpu=hardware.has_gpu)
    _check(config, model, has_gpu=hardware.has_gpu)
    return PlanSubject(hardware, _within(limits, config), model,
                       4 if config.dtype == "float32" else 2, weights)


def _shape(model: str, name: str, *, on_gpu: bool
           ) -> tuple[ModelConfig, Callable[[int | str], WeightOptions]]:
    """The shape of a model by what is small in its files, and the form of its weights by bits."""
    path = Path(os.path.expanduser(name))
    is_there(path)  # or it raises an error
    file = gguf_file(path) if name else None
    if file is not None:
        header = read_header(file)
        shape = from_transformers(config_of(header), model)
        return shape, partial(header_options, header, shape, on_gpu=on_gpu)
    if path.is_dir():
        values = read_config(path)
        shape = from_transformers(values, model)
        return shape, _options(shape, quantization(values, model), on_gpu=on_gpu)
    known = published(name)
    if known is None:
        raise UserError("--hardware plans for folders, .gguf files and published shapes: "
                        f"{name!r} is none of them")
    return known, _options(known, published_quantization(name), on_gpu=on_gpu)


def _options(model: ModelConfig, stored: Quantization | None, *, on_gpu: bool
             ) -> Callable[[int | str], WeightOptions]:
    """Return the form of a model's weights by bits; `stored` is how its checkpoint has them."""
    return lambda bits: weight_options(WeightOptions(), bits, model, stored, on_gpu=on_gpu)


def _check(config: RunConfig, model: ModelConfig, *, has_gpu: bool) -> None:
    """Refuse what the model or the device can't do. How long a text is in tokens is not known
    yet."""
    if config.percent != AUTO:
        config.policy().check_device(has_gpu=has_gpu)
    check_cache(model, config.h2o())
    check_experts(model, config.policy())
    if config.synthetic:
        check_length(model, config.h2o(), prompt="--prompt-len", length=config.prompt_len,
                     new_tokens=config.gen_len)


def _within(limits: MemoryLimits, config: RunConfig) -> MemoryLimits:
    return limits.within(cpu=config.memory_limit, gpu=config.device_memory_limit)


def _written_bits(config: RunConfig) -> frozenset[int | str]:
    """Bits of weights that no file keeps: on the disk tier they take space of their own."""
    if config.path == DUMMY:
        return frozenset(WEIGHT_BITS)
    return frozenset((AUTO, *WEIGHT_BITS[1:]) if config.no_weight_cache else ())


def _request(config: RunConfig, subject: PlanSubject, load: Workload,
             prompts: int | None) -> PlanRequest:
    """The request to the search."""
    weight_bits: tuple[Any, ...] = (config.resolved_weight_bits,)
    caches: tuple[CacheOptions, ...] = (config.cache(),)
    if config.allow_compression and not (config.weight_bits or config.compress_weight):
        weight_bits = (config.resolved_weight_bits, *WEIGHT_BITS[1:])
    if config.allow_compression and not config.gives_cache_bits:
        caches = tuple(CacheOptions(config.h2o(), each, config.attn_sparsity) for each in BITS)
    return PlanRequest(
        model=subject.model, prompt_len=load.prompt_len, gen_len=load.gen_len,
        itemsize=subject.itemsize, prompts=prompts, policy=config.policy(),
        gpu_batch_size=config.gpu_batch_size, num_gpu_batches=config.num_gpu_batches,
        weights=tuple(map(subject.weights, weight_bits)), caches=caches,
        written_bits=_written_bits(config), goal=config.goal)


def _choices(config: RunConfig, subject: PlanSubject, load: Workload, prompts: int | None
             ) -> tuple[Sequence[Choice], tuple[int, ...] | None]:
    """The policies to choose from, or the one that is given, and the bounds of the ranks' layers
    in a pipeline."""
    if config.percent == AUTO:
        return _searched(config, subject, _request(config, subject, load, prompts))
    choice, bounds = _predicted(config, subject, load, prompts)
    return [choice], bounds


def _faster_recall(config: RunConfig, subject: PlanSubject, load: Workload, prompts: int | None, *,
                   full: Choice) -> RecallProposal | None:
    """Recall in place of a `full` cache that is not all in the fastest memory, if it is faster.

    It needs more memory than the full cache, and so does not help where that does not fit at all.
    """
    if full.run.policy.cache.gpu == 100:
        return None
    found = []
    for flags, other in with_recall(config):
        with suppress(UserError):
            _check(other, subject.model, has_gpu=subject.hardware.has_gpu)
            choices, _ = _choices(other, subject, load, prompts)
            found.append(RecallProposal(flags, choices[0]))
    best = max(found, key=lambda each: each.choice.tokens_per_second, default=None)
    if best is None or TIE_RATIO * best.choice.tokens_per_second <= full.tokens_per_second:
        return None
    return best


def _searched(config: RunConfig, subject: PlanSubject, request: PlanRequest
              ) -> tuple[list[Choice], tuple[int, ...] | None]:
    """The best policies, and the bounds of the ranks' layers in a pipeline."""
    hardware, limits = subject.hardware, subject.limits
    if config.pipeline_parallel == 1:
        return search(hardware, request, limits), None
    found = search_pipeline(hardware, request, config.pipeline_parallel, limits)
    return [each.choice for each in found], found[0].bounds


def _predicted(config: RunConfig, subject: PlanSubject, load: Workload, prompts: int | None
               ) -> tuple[Choice, tuple[int, ...] | None]:
    """The policy as it is given, if it fits, and the bounds of the ranks' layers in a pipeline."""
    bits = config.resolved_weight_bits
    run = PlannedRun(subject.model, config.policy(), load, subject.itemsize,
                     subject.hardware.has_gpu, bits in _written_bits(config),
                     config.cache(), subject.weights(bits))
    if config.pipeline_parallel > 1:
        found = predict_pipeline(subject.hardware, run, config.pipeline_parallel, subject.limits,
                            prompts)
        return found.choice, found.bounds
    MemoryPlan(run).check(subject.limits)
    return predict(subject.hardware, run, prompts), None


def _chosen(config: RunConfig, run: PlannedRun) -> RunConfig:
    """The config with a run's policy and bits."""
    policy = run.policy
    bits: dict[str, Any] = {}
    if run.weights.weight_bits != config.resolved_weight_bits:
        bits["weight_bits"] = run.weights.weight_bits
    if run.cache.bits != config.cache().bits:  # then no flag says how many
        bits["cache_bits"] = run.cache.bits
    percent = [share for placement in (policy.weights, policy.cache, policy.activations)
               for share in (placement.gpu, placement.cpu)]
    experts = None if policy.experts is None else (
        policy.experts.gpu, policy.experts.cpu, policy.experts.disk)
    return replace(config, percent=tuple(percent), expert_percent=experts,
                   expert_slots=policy.expert_slots,
                   gpu_batch_size=policy.gpu_batch_size, num_gpu_batches=policy.num_gpu_batches,
                   cpu_cache_compute=policy.cpu_cache_compute,
                   fetch_chosen=policy.fetch_chosen, fast_set=policy.fast_set, goal=GOALS[0],
                   allow_compression=False, recalibrate=False, **bits)
