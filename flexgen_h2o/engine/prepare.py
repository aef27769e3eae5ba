"""Prepare a model up to the weights: find it, check the arguments, place this rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from flexgen_h2o.cache.disk_recall import recalls_in_place
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import add_windows
from flexgen_h2o.config.limits import DRAFT_CHUNK
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.distributed.control_messages import ControlChannel
from flexgen_h2o.distributed.pipeline import RankContext
from flexgen_h2o.engine.args import EngineArgs, check_batch_invariant
from flexgen_h2o.engine.calibration import calibrate
from flexgen_h2o.engine.source import ModelSource, find_model, mtp_source
from flexgen_h2o.engine.tokenizer import InputProcessor
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.positions import (
    check_cache,
    check_experts,
    check_halves,
    check_speculation,
    longest_prompt,
)
from flexgen_h2o.storage.device import Device, open_device

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """A model that fits its arguments; its weights have not been read.

    Attributes
    ----------
    source : ModelSource
    device : Device
    inputs : InputProcessor
    cache : CacheOptions
        Cache options of all layers of the model.
    args : EngineArgs
        The user's arguments. In a pipeline, with the cache options of this rank's layers.
    rank : RankContext or None
        This rank's part of a pipeline.
    draft : PreparedModel or None
        The policy's draft model, or the model's layer for multi-token prediction.
    workload : Workload or None
        The expected workload, to be checked against free memory.
    """

    source: ModelSource
    device: Device
    inputs: InputProcessor
    cache: CacheOptions
    args: EngineArgs
    rank: RankContext | None
    workload: Workload | None
    draft: PreparedModel | None = None


def prepare_model(args: EngineArgs, control: ControlChannel) -> PreparedModel:
    """Find a model, open its device, and check it against the arguments of an `LLM`.

    Raises
    ------
    UserError
        There is no such model, or it contradicts the arguments or the models of other ranks.
    """
    policy, h2o = args.policy, args.cache.h2o
    device = open_device(control.device_name(args.device))
    device.limit(args.device_memory_limit)
    policy.check_device(has_gpu=device.is_gpu)
    if policy.selective_fetch and device.is_gpu and not recalls_in_place(device):
        raise UserError("selective_fetch needs the kernels of a GPU, which are missing or switched "
                        "off: install triton, or leave it out")
    source = find_model(args, device)
    check_cache(source.config, args.cache)
    check_halves(source.config, policy)
    check_experts(source.config, policy)
    check_speculation(source.config, policy)
    if args.batch_invariant:
        check_batch_invariant(source.config, policy, args.cache, device.torch_device)
    cache = replace(args.cache, h2o=add_windows(h2o, source.config.attention))
    args = replace(args, cache=cache)
    mtp = policy.speculate == "mtp"
    if source.has_mtp_layers and not mtp:
        use = " (speculate mtp drafts with them)" if source.config.mtp_model is not None else ""
        _log.warning("%s: its layers for multi-token prediction are not loaded%s", args.model, use)
    inputs = InputProcessor(source, args.model, h2o)
    if args.calibration is not None:
        calibrate(source, inputs, device, args)
    workload = _expected_workload(inputs, args, longest_prompt(source.config, h2o))
    rank = control.rank_context(
        policy, device, layer_costs=_layer_costs(source.config), bounds=args.bounds,
        workload=workload,
        fingerprint=f"{source.config}, {source.dtype}, {args.weight_bits} bits, "
        f"{args.activation_bits} of activations, batch invariance {args.batch_invariant}, "
        f"calibration {source.calibration or None}, {cache}, {policy}")
    if rank is not None:
        workload = rank.workload
        args = replace(args, cache=replace(cache, h2o=rank.stage.h2o(cache.h2o)))
    draft = None if policy.draft_model is None else _prepare_draft(args, inputs, control)
    if mtp:
        mtp_args = replace(args, policy=Policy(prefill_chunk=DRAFT_CHUNK), cache=CacheOptions())
        draft = PreparedModel(mtp_source(source), device, inputs, mtp_args.cache, mtp_args, None,
                              None)
    return PreparedModel(source, device, inputs, cache, args, rank, workload, draft)


def _prepare_draft(args: EngineArgs, inputs: InputProcessor, control: ControlChannel
                   ) -> PreparedModel:
    """Return the draft model of an `LLM`, to be resident in memory.

    Raise `UserError` if its vocabulary differs, or if rejected drafts could not be undone in it.
    """
    name = str(args.policy.draft_model)
    draft = prepare_model(EngineArgs(
        model=name, policy=Policy(prefill_chunk=DRAFT_CHUNK), device=args.device, dtype=args.dtype,
        weight_cache=args.weight_cache, offload_dir=args.offload_dir, progress=args.progress),
        control)
    if draft.args.cache.evicts:
        raise UserError(f"draft_model {name} has sliding windows, whose caches cannot take back "
                        "drafts: choose another one")
    if draft.source.config.recurrent is not None:
        raise UserError(f"draft_model {name} has recurrent layers, whose states cannot take back "
                        "drafts: choose another one")
    inputs.check_same_tokens(draft.inputs)
    return draft


def _layer_costs(model: ModelConfig) -> list[float]:
    """Return the active parameters of each decoder layer; the last one includes the head."""
    costs = [float(model.layer_parameters(layer)) for layer in range(model.num_layers)]
    costs[-1] += model.vocab_size * model.embed_dim
    return costs


def _expected_workload(inputs: InputProcessor, args: EngineArgs, longest: int | None
                       ) -> Workload | None:
    """Return the workload of the arguments, once their texts are checked."""
    workload = args.workload
    inputs.check_longest(args.texts, 1 if workload is None else workload.gen_len)
    if workload is None or not args.texts:
        return workload
    # The length of texts is an estimate. It may exceed the model's positions.
    return workload.cut(longest)
