"""From flags to a plan: find the machine and the model, then choose or predict the policy.

For this machine it measures, which imports torch; for the machine of ``--hardware`` it does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flexgen_h2o.cli.flags import GOALS
from flexgen_h2o.cli.plan_text import INDENT, line, plan_text
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.parallel import torchrun_env
from flexgen_h2o.config.policy import DUMMY, Workload
from flexgen_h2o.config.weight_layout import AUTO, WEIGHT_BITS, WeightOptions
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import path_exists
from flexgen_h2o.files.terminal import print_stderr, print_stdout
from flexgen_h2o.kernels.implementations import AutotuneTable
from flexgen_h2o.metrics.report import fit_rows
from flexgen_h2o.models.gguf.config import config_of, header_options, names_gguf
from flexgen_h2o.models.gguf.header import gguf_file, read_header
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.positions import (
    check_cache,
    check_experts,
    check_length,
    check_speculation,
    longest_prompt,
)
from flexgen_h2o.models.quantization import Quantization, quantization, weight_options
from flexgen_h2o.models.registry import (
    from_transformers,
    published,
    published_quantization,
    read_config,
)
from flexgen_h2o.planning.hardware import BITS, Hardware, load_hardware
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import DraftModel, PlannedRun
from flexgen_h2o.planning.search import (
    TIE_RATIO,
    PlanCandidate,
    PlanRequest,
    predict,
    predict_pipeline,
    search,
    search_pipeline,
)
from flexgen_h2o.storage.free_memory import MemoryLimits, free_memory

USABLE_SHARE = 0.97
"""Share of this machine's free memory that a plan may take, as free memory fluctuates."""
RESERVED_BYTES = 160 << 20
"""Bytes of host memory that are left at least, for PyTorch and oneDNN."""
MAX_BREAK_EVEN = 0.03
"""Share of drafts that must be accepted for speculation to pay, up to which a plan chooses it."""
RECALL_RATIO = 0.1
"""`--hh-ratio` of a proposed recall. With as many recent tokens, that is 20 % of the prompt."""
RECALL_PERPLEXITY = 1.04
"""Perplexity with that recall over the full cache's, of smollm2-135m (docs/h2o.md)."""


@dataclass(frozen=True)
class PlanSubject:
    """The prompts, the machine and the model of a plan."""

    workload: Workload  # lengths, and the batch sizes of a given policy
    prompts: int | None  # number of prompts; None: one block of them
    hardware: Hardware
    limits: MemoryLimits  # memory that the run may take
    model: ModelConfig
    itemsize: int  # bytes of an element that is not quantized
    weights: Callable[[int | str], WeightOptions]  # returns the weight format for a bit width
    draft: DraftModel | None = None  # the model of `--draft-model`, or the layer of `mtp`


@dataclass(frozen=True)
class RecallProposal:
    """Recall that is predicted to be faster than the full cache of a plan.

    `flags` are to be added to the planned ones, which gives the run of `candidate`.
    """

    flags: str
    candidate: PlanCandidate


@dataclass(frozen=True)
class Plan:
    """The result of planning."""

    config: RunConfig  # the chosen policy in place of `auto`, without flags of the search
    best: PlanCandidate  # the run of that config, with its predicted times
    implementations: AutotuneTable  # the machine's fastest kernels
    text: str  # a line per row; `show` wraps them
    bounds: tuple[int, ...] | None = None
    """Layer bounds of the ranks in a pipeline (see `Stage.for_rank`)."""
    recall: RecallProposal | None = None  # for a full cache that is not all in the fastest memory

    def show(self) -> None:
        """Print the plan."""
        print_stdout(fit_rows(self.text, INDENT))


def plan(config: RunConfig, load: Workload, prompts: int | None,
         texts: Sequence[str] = ()) -> Plan:
    """Plan a run: choose its policy for `--percent auto`, else predict the given one.

    Raises `UserError` if the model or the machine is not available, a text is too long for the
    model, or nothing fits.

    `load` and `prompts`: see `PlanSubject`. `texts`: the prompts, if they are texts. For this
    machine, the longest one is tokenized and checked.
    """
    subject = (_this_machine(config, load, prompts, texts) if config.hardware is None
               else _other_machine(config, config.hardware, load, prompts))
    subject = replace(subject, limits=subject.limits.capped(
        cpu=config.memory_limit, gpu=config.device_memory_limit))
    if not config.synthetic:  # the length is an estimate
        longest = longest_prompt(subject.model, config.h2o())
        subject = replace(subject, workload=load.cut(longest))
    candidates, bounds = _candidates(config, subject)
    best, speculation = _speculation(config, subject, candidates[0])
    lines = [plan_text(subject.hardware, [best, *candidates[1:]], subject.limits, bounds)]
    recall = _faster_recall(config, subject, full=best)
    if recall is not None:
        lines.append(line("recall", (
            f"{recall.flags}: {recall.candidate.tokens_per_second:.4g} tokens/s predicted, "
            f"{best.tokens_per_second:.4g} without; a new token then attends to "
            f"{200 * RECALL_RATIO:g} % of the prompt, and perplexity is {RECALL_PERPLEXITY} times "
            "the full cache's (smollm2-135m, docs/h2o.md)")))
    if config.selective_fetch and not best.run.policy.selective_fetch:
        lines.append(line("note", "--selective-fetch has no effect: this policy leaves nothing of "
                                  "the cache on a slower tier from which tokens are fetched"))
    if speculation is not None:
        lines.append(line("speculation", speculation))
    if config.percent == AUTO:
        config = _with_policy(config, best.run)
    return Plan(config, best, subject.hardware.compute.implementations, "\n".join(lines), bounds,
                recall)


def _speculation(config: RunConfig, subject: PlanSubject, candidate: PlanCandidate
                 ) -> tuple[PlanCandidate, str | None]:
    """Choose whether a run drafts, and return a text that says when drafts pay.

    Without `--speculate`, `--percent auto` drafts for one sequence of a batch, out of the text, if
    next to nothing is lost where no draft is accepted.
    """
    given, hardware, drafting = config.speculate is not None, subject.hardware, candidate
    if not candidate.estimate.steps or config.speculate == "none" or not given and (
            config.percent != AUTO or hardware.has_gpu or config.pipeline_parallel > 1
            or candidate.run.workload.gpu_batch_size > 1 or subject.model.recurrent is not None):
        return candidate, None
    if not given:
        try:
            (drafting, *_), _ = _candidates(replace(config, speculate="ngram"), subject)
        except UserError:
            return candidate, None
    run, plain = drafting.run, drafting.estimate.step.seconds
    drafts = run.policy.draft_tokens
    # A drafted token costs as much as one of another sequence.
    rows = replace(run, workload=replace(run.workload, gpu_batch_size=1 + drafts))
    seconds = predict(hardware, rows).estimate.step.seconds
    if run.draft_run is not None:
        seconds += drafts * predict(hardware, run.draft_run).estimate.step.seconds
    share = max(0.0, (seconds / plain - 1) / drafts)
    speculates = given or (share <= MAX_BREAK_EVEN and drafting.tokens_per_second
                           >= TIE_RATIO * candidate.tokens_per_second)
    pays = (f"pays if more than {100 * share:.2g} % of them are accepted" if share < 1 else
            "does not pay even if all of them are accepted")
    advice = (", so it is left out (--speculate ngram)" if not speculates else
              "" if share < 1 else ": leave --speculate out")
    return drafting if speculates else candidate, (
        f"a decode step with {drafts} drafts takes {seconds:.4g} s in place of {plain:.4g} s: it "
        f"{pays}{advice}")


def _this_machine(config: RunConfig, load: Workload, prompts: int | None, texts: Sequence[str]
                  ) -> PlanSubject:
    """Return this machine with its free memory, and the model as a run would load it."""
    from flexgen_h2o.engine.args import EngineArgs
    from flexgen_h2o.engine.source import find_model
    from flexgen_h2o.engine.tokenizer import InputProcessor
    from flexgen_h2o.planning.calibrate import by_measured_rates, load_or_calibrate
    from flexgen_h2o.storage.device import open_device

    def show_progress(words: str) -> None:
        if config.verbose:
            print_stderr(f"measuring {words}")

    device = open_device(config.device)
    device.limit(config.device_memory_limit)
    progress = None if config.verbose else False
    source = find_model(EngineArgs(
        model=config.model, path=config.path, dtype=config.dtype,
        weight_bits=config.resolved_weight_bits, activation_bits=config.activation_bits,
        progress=progress), device)
    draft = None if config.draft_model is None else find_model(
        EngineArgs(model=config.draft_model, dtype=config.dtype, progress=progress), device)
    _check_model(config, source.config, has_gpu=device.is_gpu)
    inputs = InputProcessor(source, config.model, config.h2o())
    if texts and inputs.tokenizer is not None:  # dummy weights are planned for estimated lengths
        inputs.check_longest(texts, config.gen_len)
    hardware = load_or_calibrate(device, config.offload_dir, recalibrate=config.recalibrate,
                                 progress=show_progress)
    free = free_memory(by_measured_rates(device, config.offload_dir), device.free_bytes())
    if config.pipeline_parallel > 1:  # ranks of one host share its memory and its disk
        ranks = torchrun_env().local_ranks
        free = replace(free, cpu_bytes=free.cpu_bytes // ranks, disk_bytes=free.disk_bytes // ranks)
    cpu_bytes = min(int(USABLE_SHARE * free.cpu_bytes), free.cpu_bytes - RESERVED_BYTES)
    limits = MemoryLimits(None if free.gpu_bytes is None else int(USABLE_SHARE * free.gpu_bytes),
                          max(0, cpu_bytes), int(USABLE_SHARE * free.disk_bytes))
    return PlanSubject(load, prompts, hardware, limits, source.config, source.dtype.itemsize,
                       lambda bits: replace(source, bits=bits).weight_format.options,
                       _mtp_draft(config, source.config) if draft is None else
                       DraftModel(draft.config, draft.weight_format.options))


def _other_machine(config: RunConfig, path: str, load: Workload, prompts: int | None
                   ) -> PlanSubject:
    """Return the machine in the file of `--hardware`, all of its memory, and the model's shape."""
    try:
        hardware = load_hardware(path)
    except UserError as error:
        raise UserError(f"--hardware: {error}") from None
    if config.device_memory_limit is not None and not hardware.has_gpu:
        raise UserError(f"--device-memory-limit has no effect: {hardware.name} has no GPU")
    limits = MemoryLimits(hardware.gpu_bytes, hardware.cpu_bytes, hardware.disk_bytes)
    name = config.model if config.path in (None, DUMMY) else config.path
    model, weights = _shape(config.model, name, on_gpu=hardware.has_gpu)
    _check_model(config, model, has_gpu=hardware.has_gpu)
    draft = _mtp_draft(config, model)
    if config.draft_model is not None:
        shape, formats = _shape(config.draft_model, config.draft_model, on_gpu=hardware.has_gpu)
        draft = DraftModel(shape, formats(AUTO if names_gguf(config.draft_model) else 16))
    return PlanSubject(load, prompts, hardware, limits, model,
                       4 if config.dtype == "float32" else 2, weights, draft)


def _mtp_draft(config: RunConfig, model: ModelConfig) -> DraftModel | None:
    """Return the layer of `--speculate mtp`; None without it."""
    layer = model.mtp_model
    return None if config.speculate != "mtp" or layer is None else DraftModel(layer, None)


def _shape(model: str, name: str, *, on_gpu: bool
           ) -> tuple[ModelConfig, Callable[[int | str], WeightOptions]]:
    """Return a model's shape and weight formats by bits, read from headers and config files."""
    path = Path(os.path.expanduser(name))
    path_exists(path)  # raises UserError if it cannot be looked at
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
    """Return the weight formats by bits of a model whose checkpoint is quantized as `stored`."""
    return lambda bits: weight_options(WeightOptions(), bits, model, stored, on_gpu=on_gpu)


def _check_model(config: RunConfig, model: ModelConfig, *, has_gpu: bool) -> None:
    """Check that model and device support the flags, without the lengths of texts."""
    if config.percent != AUTO:
        config.policy().check_device(has_gpu=has_gpu)
    check_cache(model, config.cache())
    check_experts(model, config.policy())
    check_speculation(model, config.policy())
    if config.synthetic:
        check_length(model, config.h2o(), prompt="--prompt-len", length=config.prompt_len,
                     new_tokens=config.gen_len)


def _written_bits(config: RunConfig) -> frozenset[int | str]:
    """Return the weight bits that no file has: the disk tier has to write these weights."""
    if isinstance(config.offload_dir, tuple):  # all weights are spread over the folders
        return frozenset((AUTO, *WEIGHT_BITS))
    if config.path == DUMMY:
        return frozenset(WEIGHT_BITS)
    return frozenset((AUTO, *WEIGHT_BITS[1:]) if config.no_weight_cache else ())


def _candidates(config: RunConfig, subject: PlanSubject
                ) -> tuple[Sequence[PlanCandidate], tuple[int, ...] | None]:
    """Return the best policies, or the given one if it fits, and a pipeline's layer bounds."""
    hardware, limits, ranks = subject.hardware, subject.limits, config.pipeline_parallel
    bits = config.resolved_weight_bits
    if config.percent == AUTO:
        request = _request(config, subject)
        if ranks == 1:
            return search(hardware, request, limits), None
        pipelines = search_pipeline(hardware, request, ranks, limits)
        return [pipeline.candidate for pipeline in pipelines], pipelines[0].bounds
    run = PlannedRun(subject.model, config.policy(), subject.workload, subject.itemsize,
                     hardware.has_gpu, bits in _written_bits(config), config.cache(),
                     subject.weights(bits), draft=subject.draft,
                     batch_invariant=config.batch_invariant)
    if ranks > 1:
        pipeline = predict_pipeline(hardware, run, ranks, limits, subject.prompts)
        return [pipeline.candidate], pipeline.bounds
    MemoryPlan(run).check(limits)
    return [predict(hardware, run, subject.prompts)], None


def _request(config: RunConfig, subject: PlanSubject) -> PlanRequest:
    """Return the input of the policy search."""
    weight_bits: tuple[Any, ...] = (config.resolved_weight_bits,)
    caches: tuple[CacheOptions, ...] = (config.cache(),)
    if config.allow_compression and not (config.weight_bits or config.compress_weight):
        weight_bits = (config.resolved_weight_bits, *WEIGHT_BITS[1:])
    if config.allow_compression and not config.gives_cache_bits:
        caches = tuple(CacheOptions(config.h2o(), bits, config.attn_sparsity) for bits in BITS)
    return PlanRequest(
        model=subject.model, prompt_len=subject.workload.prompt_len,
        gen_len=subject.workload.gen_len, itemsize=subject.itemsize, prompts=subject.prompts,
        policy=config.policy(),
        gpu_batch_size=config.gpu_batch_size if config.resolved_speculate is None else 1,
        num_gpu_batches=(config.resolved_num_gpu_batches if config.num_gpu_batches
                         or config.resolved_speculate and config.gpu_batch_size else None),
        weights=tuple(map(subject.weights, weight_bits)), caches=caches,
        written_bits=_written_bits(config), goal=config.goal, draft=subject.draft,
        batch_invariant=config.batch_invariant)


def _faster_recall(config: RunConfig, subject: PlanSubject, *, full: PlanCandidate
                   ) -> RecallProposal | None:
    """Return recall in place of a `full` cache that is partly on slower tiers, if it is faster.

    It needs more memory than the full cache, and so does not help where that does not fit.
    """
    h2o = config.h2o()
    if full.run.policy.cache.gpu == 100 or h2o is not None and (h2o.recall or not h2o.is_full):
        return None
    faster = []
    recall: dict[str, Any] = {"hh_ratio": RECALL_RATIO, "recall": True}
    for added in (recall, recall | {"selective_fetch": True}):
        with suppress(UserError):
            other = replace(config, **added)
            _check_model(other, subject.model, has_gpu=subject.hardware.has_gpu)
            candidates, _ = _candidates(other, subject)
            flags = " ".join(flag_name(name) + ("" if value is True else f" {value}")
                             for name, value in added.items())
            faster.append(RecallProposal(flags, candidates[0]))
    best = max(faster, key=lambda proposal: proposal.candidate.tokens_per_second, default=None)
    if best is None or TIE_RATIO * best.candidate.tokens_per_second <= full.tokens_per_second:
        return None
    return best


def _with_policy(config: RunConfig, run: PlannedRun) -> RunConfig:
    """Return the config with a run's policy and bits in place of `auto`."""
    policy = run.policy
    bits: dict[str, Any] = {}
    if run.weights.weight_bits != config.resolved_weight_bits:
        bits["weight_bits"] = run.weights.weight_bits
    if run.cache.bits != config.cache().bits:  # no flag sets them then
        bits["cache_bits"] = run.cache.bits
    percent = [share for placement in (policy.weights, policy.cache, policy.activations)
               for share in (placement.gpu, placement.cpu)]
    experts = None if policy.experts is None else (
        policy.experts.gpu, policy.experts.cpu, policy.experts.disk)
    return replace(config, percent=tuple(percent), expert_percent=experts,
                   expert_slots=policy.expert_slots,
                   gpu_batch_size=policy.gpu_batch_size, num_gpu_batches=policy.num_gpu_batches,
                   cpu_cache_compute=policy.cpu_cache_compute,
                   speculate=policy.speculate or config.speculate,
                   selective_fetch=policy.selective_fetch, hot_set=policy.hot_set, goal=GOALS[0],
                   allow_compression=False, recalibrate=False, **bits)
