"""A plan as text: the policy as flags to paste, its prediction, and the next best policies."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields

from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.placement import PLACED, TIERS, Placement
from flexgen_h2o.config.policy import Policy, format_percent
from flexgen_h2o.metrics.report import format_bytes
from flexgen_h2o.models.gguf.config import names_gguf
from flexgen_h2o.planning.cost import Phase
from flexgen_h2o.planning.hardware import Hardware
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun, head_and_total_bytes, layer_slots
from flexgen_h2o.planning.search import TIE_RATIO, PlanCandidate, rank_runs, tie_break_reason
from flexgen_h2o.storage.free_memory import MemoryLimits

ALTERNATIVES = 3
INDENT = 13
"""Column at which the text of a line begins."""


def policy_flags(run: PlannedRun) -> str:
    """Return the policy and formats of a run as flags."""
    policy = run.policy
    batches = ("gpu_batch_size", "num_gpu_batches")
    values = {spec.name: getattr(policy, spec.name) for spec in fields(Policy)
              if spec.name not in (*PLACED, "experts", "expert_choices")
              and (spec.name in batches or getattr(policy, spec.name) != spec.default)}
    weights, cache = run.weights, run.cache
    values |= {"weight_bits": weights.bits} if weights.bits != 16 else {}
    if names_gguf(run.model.name) and not weights.quantizes:
        values["weight_bits"] = 16  # `auto` would keep the file's quantization
    if cache.key_bits != cache.value_bits:
        values |= {"key_bits": cache.key_bits, "value_bits": cache.value_bits}
    elif cache.bits != 16:
        values["cache_bits"] = cache.bits
    words = [f"{flag_name(name)} {str(value).lower()}" for name, value in values.items()]
    if policy.experts is not None:
        shares = " ".join(f"{getattr(policy.experts, tier):g}" for tier in TIERS)
        words.insert(0, f"--expert-percent {shares}")
    if policy.expert_choices is not None and policy.expert_choices.source:
        words.append(f"--expert-counts {shlex.quote(policy.expert_choices.source)}")
    return f"--percent {format_percent(policy)} {' '.join(words)}".replace(" true", "")


def plan_text(hardware: Hardware, candidates: Sequence[PlanCandidate], limits: MemoryLimits,
              bounds: Sequence[int] | None = None) -> str:
    """Format the first of `candidates` in full, and a line for each of the next ones.

    `bounds` are the layer bounds of the ranks in a pipeline.
    """
    best, *alternatives = candidates
    run, estimate = best.run, best.estimate
    load = run.workload
    rows = [
        ("plan", f"{run.model.name} on {hardware.name}, {load.prompt_len} + {load.gen_len} tokens"),
        ("policy", policy_flags(run)),
        ("predicted", f"{best.tokens_per_second:.4g} tokens/s, {best.seconds:.4g} s for "
                      f"{best.sequences} sequences"),
        ("prefill", _phase(estimate.prefill)),
        *([("decode step", _phase(estimate.step))] if estimate.steps else []),
        *([("memory", MemoryPlan(run).summary(limits))] if bounds is None
          else _ranks(run, bounds, limits)),
        *(("or", f"{other.tokens_per_second:.4g} tokens/s{_not_taken(best, other)}: "
                 f"{policy_flags(other.run)}") for other in alternatives[:ALTERNATIVES]),
    ]
    return "\n".join(line(*row) for row in rows)


def line(name: str, text: str) -> str:
    """Format a line of a plan."""
    return f"{name:<{INDENT - 1}} {text}"


def plan_sentences(plan: MemoryPlan, limits: MemoryLimits) -> list[str]:
    """Describe a memory plan and its policy in words."""
    run = plan.run
    policy, load, bits = run.policy, run.workload, run.weights.bits
    _, weights = head_and_total_bytes(run)
    weights += run.num_experts * run.expert_bytes
    length = load.prompt_len + load.gen_len
    slots = max(max(layer_slots(part.cache, part.model, load)) for part in run.cache_runs)
    kept = ("each token attends to those that its query weighs most" if run.cache.recalls
            else f"at most {slots:,} tokens of a sequence are kept" if slots < length - 1
            else "no token is evicted")
    form = (f"in {bits} bits" if bits != 16 else "as the file quantizes them"
            if run.weights.quantizes else f"in {8 * run.itemsize} bits")
    return [
        f"Weights: {format_bytes(weights)[0]}, matrices {form}, "
        f"{_placed(policy.weights, run.has_gpu)}.",
        *([] if policy.experts is None else
          [f"Experts: {_placed(policy.experts, run.has_gpu)}."]),
        f"KV cache: {_placed(policy.cache, run.has_gpu)}; {kept}.",
        f"Blocks: up to {run.sequences} sequences of at most {length:,} tokens, computed "
        f"{load.gpu_batch_size} at a time.",
        f"Memory: {plan.summary(limits)}.",
        f"Flags: {policy_flags(run)}",
    ]


def _placed(placement: Placement, has_gpu: bool) -> str:
    """Describe where a kind of data is."""
    gpu, cpu, disk = placement.gpu, placement.cpu, placement.disk
    shares = ([(gpu, "in GPU memory"), (cpu, "in host memory")] if has_gpu
              else [(gpu + cpu, "in memory")])
    return ", ".join(place if share == 100 else f"{share:g} % {place}"
                     for share, place in [*shares, (disk, "on disk")] if share)


def _ranks(run: PlannedRun, bounds: Sequence[int], limits: MemoryLimits) -> list[tuple[str, str]]:
    """Return a row for each pipeline rank: its layers and its memory."""
    return [(f"rank {rank}", f"layers {first} to {last - 1}, "
             f"{MemoryPlan(rank_run).summary(limits)}")
            for rank, (first, last, rank_run) in enumerate(zip(
                bounds, bounds[1:], rank_runs(run, bounds), strict=False))]


def _not_taken(best: PlanCandidate, other: PlanCandidate) -> str:
    """Return why a policy that is predicted faster is not the choice; empty if it is not faster."""
    reason = tie_break_reason(best, other)
    return "" if reason is None else (
        f" (within {1 - TIE_RATIO:.0%}, and the policy above {reason})")


def _phase(phase: Phase) -> str:
    """Format the seconds of a phase of a block and of each resource, the busiest first."""
    parts = sorted(phase.resources.items(), key=lambda part: -part[1])
    busy = ", ".join(f"{name} {seconds:.4g} s" for name, seconds in parts if seconds)
    return f"{phase.seconds:.4g} s a block, bound by {phase.binding} ({busy})"
