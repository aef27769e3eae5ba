"""Load the weights of a model to their tiers, and measure its key smoothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from flexgen_h2o.cache.alternatives import KeySampler
from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.config.parallel import Stage
from flexgen_h2o.distributed.pipeline import RankContext
from flexgen_h2o.engine.args import EngineArgs
from flexgen_h2o.engine.blocks import Request
from flexgen_h2o.engine.expert_counts import load_counts, save_counts
from flexgen_h2o.engine.expert_slots import ExpertSlots
from flexgen_h2o.engine.runner import Runner
from flexgen_h2o.engine.scoring import DecodeScorer
from flexgen_h2o.engine.source import ModelSource
from flexgen_h2o.engine.weight_files import Weight, WeightFiles
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.engine.workspace import rotation_of
from flexgen_h2o.files.terminal import ByteProgress, byte_bar
from flexgen_h2o.h2o.key_smoothing import KeySmoothing, LayerSmoothing
from flexgen_h2o.kernels.torch_ops import limit_shape_caches
from flexgen_h2o.metrics.provenance import sampled_memory
from flexgen_h2o.metrics.trace import LinkStats, Trace
from flexgen_h2o.models.positions import context
from flexgen_h2o.storage.device import Device
from flexgen_h2o.storage.free_memory import resident_bytes
from flexgen_h2o.storage.run_folder import RunFolder
from flexgen_h2o.storage.transfer import Transfers

SAMPLED_TOKENS = 512
"""Number of random tokens whose keys are measured for key smoothing."""

SAMPLED_POSITIONS = 4096
"""Range of the positions of these tokens, unless the model has fewer positions."""


def load_runner(source: ModelSource, device: Device, args: EngineArgs, resources: ExitStack, *,
                rank: RankContext | None = None, shared: Mapping[str, Weight] | None = None
                ) -> Runner:
    """Load the weights of a model to their tiers, and return a runner of its blocks.

    Parameters
    ----------
    args : EngineArgs
        `args.cache` has the options of this rank's layers.
    resources : ExitStack
        Gets the objects that must be closed.
    rank : RankContext, optional
        See `Runner`.
    shared : mapping of str to Weight, optional
        See `WeightStore`.
    """
    limit_shape_caches()
    if source.config.experts is not None:  # all batches are routed before any expert is needed
        args = replace(args, policy=replace(args.policy, sep_layer=True))
    stage = Stage.all_layers(source.config.num_layers) if rank is None else rank.stage
    transfers = Transfers(device, links=LinkStats(), trace=args.trace or Trace(enabled=False),
                          disks=len(args.offload_dir.paths))
    resources.callback(transfers.close)
    with sampled_memory(transfers.trace, device.used_bytes):
        choices = args.policy.expert_choices
        choices = choices and choices.slice_layers(stage.first, stage.last)
        weights = _load_weights(source, args, stage, transfers, choices, resources, rank,
                                shared)
        experts = _load_experts(source, args, weights, transfers, choices, resources,
                                keeps_counts=rank is None)
        runner = Runner(source, args, transfers, weights, experts, rank=rank)
        runner.smoothing = key_smoothing(runner)
    runner.loaded_bytes = resident_bytes()
    return runner


def _load_weights(source: ModelSource, args: EngineArgs, stage: Stage, transfers: Transfers,
                  choices: ExpertChoices | None, resources: ExitStack, rank: RankContext | None,
                  shared: Mapping[str, Weight] | None) -> WeightStore:
    """Load the weights of a stage, without experts that need slots."""
    policy, placement, experts = args.policy, args.policy.weights, args.policy.experts

    def with_heartbeat(update: ByteProgress) -> ByteProgress:
        if rank is None:
            return update

        def progress(done: int, total: int) -> None:
            rank.pipeline.monitor.advance()
            update(done, total)

        return progress

    with byte_bar("converting" if source.bits == 16 else "quantizing", progress=args.progress
                  ) as update:
        checkpoint, names = source.open(
            on_disk=placement.disk > 0 or experts is not None and experts.disk > 0,
            progress=with_heartbeat(update))
    resources.callback(checkpoint.close)
    tensors = source.weights.slice_layers(stage.first, stage.last)
    sharded = placement.disk > 0 and policy.shards_weights(
        has_gpu=transfers.device.is_gpu, mixture=source.config.experts is not None)
    weights = WeightStore(
        tensors.split_halves() if policy.sep_layer else tensors,
        WeightFiles(checkpoint, names, source.weight_format, transfers, verify=args.verify,
                    copy=args.offload_dir.striped),
        transfers, placement=placement, experts=experts, choices=choices, pin=policy.pin_weight,
        shard_prefetch=policy.overlap if sharded else None, shared=shared)

    run_folder = RunFolder(args.offload_dir)
    resources.callback(run_folder.close)
    with byte_bar("loading", progress=args.progress) as update:
        weights.load(run_folder, with_heartbeat(update),
                     offload_file=None if args.offload_dir.striped else source.offload_file)
    return weights


def _load_experts(source: ModelSource, args: EngineArgs, weights: WeightStore,
                  transfers: Transfers, choices: ExpertChoices | None, resources: ExitStack, *,
                  keeps_counts: bool) -> ExpertSlots | None:
    """Fill the slots of a mixture's experts; None for a dense model.

    Without `choices`, they are filled with the experts that earlier runs chose most often. With
    `keeps_counts`, the choices of this run are saved for later ones.
    """
    policy, config, experts = args.policy, source.config, source.config.experts
    if experts is None:
        return None
    slots = ExpertSlots(
        weights, transfers, experts, requested=policy.expert_slots,
        tokens=policy.gpu_batch_size * policy.num_gpu_batches, overlap=policy.overlap,
        host_computes=policy.cpu_expert_compute)
    if not slots.num_slots:
        return slots
    file = source.expert_counts_file if keeps_counts else None
    if file is not None:
        layers = [experts.count * config.has_experts(layer) for layer in range(config.num_layers)]
        choices = choices or load_counts(file, layers, experts.per_token)
        resources.callback(_save_counts, file, slots)
    slots.fill(choices)
    return slots


def _save_counts(file: Path, slots: ExpertSlots) -> None:
    if slots.history is not None:
        save_counts(file, slots.history)


def key_smoothing(runner: Runner) -> tuple[LayerSmoothing, ...]:
    """Return the key smoothing of each layer: measured, or from the weight cache.

    Empty if keys are not quantized, or if values are part of the keys, which smoothing changes.
    """
    source, config = runner.source, runner.cached_config
    if not runner.args.cache.quantizes_keys or config.latent is not None:
        return ()
    if source.dummy:  # keys of random weights have no outliers
        rotations = [KeySmoothing.rotation(heads.count, heads.dim, runner.device)
                     for heads in map(config.kv_heads, range(config.num_layers))]
        return tuple(LayerSmoothing(rotation, rotation) for rotation in rotations)
    if runner.rank is not None:  # measuring takes all ranks, even those with a stored result
        return _measure_keys(runner)
    measure = cache(partial(_measure_keys, runner))  # once for all groups
    layers: dict[int, LayerSmoothing] = {}
    for number, group in enumerate(config.cache_groups):
        stored = source.cached_constants(partial(_stacked, measure, group),
                                         f"keys1-{number}" if number else "keys1")
        constants = torch.from_numpy(stored).to(runner.device)
        layers |= zip(group, map(LayerSmoothing.unstacked, constants), strict=True)
    return tuple(layers[layer] for layer in range(config.num_layers))


def _stacked(measure: Callable[[], Sequence[LayerSmoothing]], group: Sequence[int]) -> np.ndarray:
    """Return the measured constants of some layers, whose heads are equal."""
    layers = measure()
    return torch.stack([layers[layer].stacked() for layer in group]).cpu().numpy()


def _measure_keys(runner: Runner) -> tuple[LayerSmoothing, ...]:
    """Return the key smoothing of each layer, measured on a prompt of random tokens."""
    config = runner.cached_config
    longest = min(context(runner.config, None), SAMPLED_POSITIONS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(runner.config.vocab_size, (min(SAMPLED_TOKENS, longest),),
                           generator=generator).tolist()
    sampler = KeySampler(config.attention_variant, rotation_of(config), longest)
    runner.run_prompts([Request(0, tokens)], sampler, DecodeScorer({0: tokens[:1]}))
    return tuple(sampler.layers[layer] for layer in range(config.num_layers))
