"""Prepare a model up to the weights: find it, check the arguments, calibrate, place this rank.

Calibration measures the mean square of each matrix's inputs over a text, in one run with 16 bits.
Quantization then weights the error of each input by its mean square, as llama.cpp does with an
importance matrix.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexgen_h2o.cache.alternatives import UncachedAttention
from flexgen_h2o.cache.disk_recall import recalls_in_place
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import add_windows
from flexgen_h2o.config.limits import DRAFT_CHUNK
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.weight_layout import INTEGER_BITS, WeightOptions
from flexgen_h2o.distributed.control_messages import ControlChannel
from flexgen_h2o.distributed.pipeline import RankContext
from flexgen_h2o.engine.args import EngineArgs, check_batch_invariant
from flexgen_h2o.engine.blocks import GPUBatch, Request
from flexgen_h2o.engine.loading import load_runner
from flexgen_h2o.engine.scoring import PrefillScorer
from flexgen_h2o.engine.source import ModelSource, find_model, mtp_source
from flexgen_h2o.engine.tokenizer import InputProcessor
from flexgen_h2o.engine.workspace import WorkspaceSize
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import read_json_records, read_text, strip_prompt
from flexgen_h2o.kernels.arguments import ShardedMatrix
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.positions import (
    check_cache,
    check_experts,
    check_halves,
    check_speculation,
    longest_prompt,
)
from flexgen_h2o.models.quantized import WeightFormat
from flexgen_h2o.models.tensors import TensorSpec
from flexgen_h2o.storage.device import Device, open_device
from flexgen_h2o.storage.free_memory import free_memory

SEQUENCES, LENGTH = 16, 512
"""Upper limits of the sequences of the text, and of the tokens of each."""

MIN_TOKENS = 128
"""A text of fewer tokens is refused."""

_SEQUENCES_PER_BATCH = 4  # a block has several batches, so that layers come whole from disk
_PASS_BYTES = 2 << 30  # bytes of memory that the pass needs in addition to the weights
_KEYS = ("text", "article", "prompt")
_VERSION = 1  # raise it when the importance changes: it is then measured again


def calibrate(source: ModelSource, inputs: InputProcessor, device: Device, args: EngineArgs
              ) -> None:
    """Set up the quantization of a source's weights with the calibration text of the args.

    The text is read here, and the model runs over it when its weights are quantized.

    Raises
    ------
    UserError
        The text cannot be read or is too short, no weights are quantized, or several ranks would
        have to quantize them.
    """
    bits = source.bits
    if bits not in INTEGER_BITS:
        raise UserError(f"calibration has no effect on weights of {bits} bits: "
                        f"{'add' if bits == 16 else 'use'} weight_bits 4")
    if source.dummy:
        raise UserError("calibration has no effect on random weights: leave it out")
    path = os.path.expanduser(args.calibration)
    sequences = inputs.windows(_read(path), "calibration", count=SEQUENCES, length=LENGTH)
    tokens = sum(map(len, sequences))
    if tokens < MIN_TOKENS:
        raise UserError(f"calibration {path} has {tokens} tokens: give a text of at least "
                        f"{MIN_TOKENS}, better of {SEQUENCES * LENGTH}")
    key = json.dumps([_VERSION, sequences]).encode()
    source.calibration = hashlib.sha256(key).hexdigest()[:16]
    if args.pipeline is not None and not source.is_cached:
        raise UserError("calibration runs on one rank: load the model once without a pipeline, "
                        "with the same calibration, weight_bits, dtype and weight_cache, then "
                        "start the ranks")
    source.measure = partial(_importance, source, sequences, device, args)


def _read(path: str) -> str:
    """Read the text of a file, or all texts of a .jsonl file as one."""
    if not path.endswith(".jsonl"):
        return read_text("calibration", path, if_empty="is empty: give a text")
    texts = []
    for number, record in read_json_records("calibration", path, if_empty="is empty: give texts"):
        candidates = [record.get(key) for key in _KEYS] if isinstance(record, dict) else []
        text = next((text for text in candidates if isinstance(text, str) and text.strip()), None)
        if text is None:
            raise UserError(f"calibration {path} line {number} has no text under any of the keys "
                            f"{', '.join(_KEYS)}")
        texts.append(strip_prompt(text))
    return "\n\n".join(texts)


def _importance(source: ModelSource, sequences: Sequence[list[int]], device: Device,
                args: EngineArgs) -> dict[str, Tensor]:
    """Return the mean square of the inputs of each matrix, float32 [inputs], by canonical name."""
    plain = replace(source, bits=16, activation_bits=16, quantization=None, codes=WeightOptions(),
                    calibration="", measure=None)
    specs = _matrices(source)
    importance = plain.cached_constants(partial(_measure, plain, specs, sequences, device, args),
                                        f"importance-{source.calibration}")
    parts = torch.from_numpy(importance).split([spec.shape[1] for spec in specs])
    return {spec.name: part for spec, part in zip(specs, parts, strict=True)}


def _matrices(source: ModelSource) -> list[TensorSpec]:
    """Return the quantized matrices of matmuls: all but tables, unless one is tied to the head."""
    weights = source.weights
    projections = {short: spec for short, spec in weights.embed.items()
                   if short not in weights.tables}
    groups = chain([projections], weights.layers, chain.from_iterable(weights.experts),
                   [weights.head])
    specs = {spec.name: spec for group in groups for spec in group.values()}
    return [spec for spec in specs.values() if source.weight_format.layout(spec) is not None]


def _measure(source: ModelSource, specs: Sequence[TensorSpec], sequences: Sequence[list[int]],
             device: Device, args: EngineArgs) -> np.ndarray:
    """Run a model in 16 bits. Return the mean squares of all matrices, concatenated in float32."""
    squares = _InputSquares()
    source.weight_format = _MeasuringFormat(
        source.dtype, squares=squares, names=frozenset(spec.name for spec in specs),
        head=source.weights.head["lm_head"].name)
    policy = Policy(_SEQUENCES_PER_BATCH, max(2, -(-len(sequences) // _SEQUENCES_PER_BATCH)),
                    weights=_placement(source, device, args),
                    overlap=args.policy.overlap, pin_weight=args.policy.pin_weight)
    args = replace(args, policy=policy, cache=CacheOptions(), trace=None)
    with ExitStack() as resources:
        runner = load_runner(source, device, args, resources)
        queue = runner.queue([Request(key, ids) for key, ids in enumerate(sequences)], 0,
                             share_prompts=False)
        cached = source.config.attention_only
        size = WorkspaceSize.from_queue(queue, None, cached.num_layers)
        scorer = _EveryRow(dict(enumerate(sequences)))
        cache = UncachedAttention(cached.attention_variant)
        with closing(runner.workspace(size, cache)) as workspace:
            runner.run_block(workspace, queue.next(), scorer)
    squares.fill_experts(source)
    means = np.concatenate([squares.mean(spec.name) for spec in specs])
    if not np.isfinite(means).all():
        raise UserError(f"activations of {args.model} are not finite in the calibration: its "
                        "weights are damaged, or too large for this dtype (try another --dtype)")
    return means


def _placement(source: ModelSource, device: Device, args: EngineArgs) -> Placement:
    """Return the placement of all weights on the fastest tier on which they fit."""
    limits = free_memory(args.offload_dir, device.free_bytes()).capped(
        cpu=args.memory_limit, gpu=args.device_memory_limit)
    nbytes = _PASS_BYTES + sum(map(source.weight_format.nbytes,
                                   source.weights.by_name().values()))
    if device.is_gpu and nbytes < limits.gpu_bytes or (
            not device.is_gpu and nbytes < limits.cpu_bytes):
        return Placement(100, 0, 0)
    return Placement(0, 100, 0) if nbytes < limits.cpu_bytes else Placement(0, 0, 100)


class _InputSquares:
    """Sums over rows of the squares of matrices' inputs."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._rows: Counter[str] = Counter()

    def parts(self, name: str, parts: Sequence[tuple[slice, Tensor]], x: Tensor
              ) -> Iterator[tuple[slice, Tensor]]:
        """Add the inputs x [rows, inputs] of a matrix, and yield its parts; see `ShardedMatrix`."""
        squares = x.float().square().sum(0)
        self._sums[name] = self._sums[name] + squares if name in self._sums else squares
        self._rows[name] += len(x)
        yield from parts

    def mean(self, name: str) -> np.ndarray:
        """Return the mean square of each input of a matrix, float32 [inputs]."""
        return (self._sums[name] / self._rows[name]).cpu().numpy()

    def fill_experts(self, source: ModelSource) -> None:
        """Give experts without rows the sums of all experts of their layer."""
        for layer in source.weights.experts:
            for short in layer[0] if layer else ():
                names = [specs[short].name for specs in layer]
                used = [name for name in names if self._rows[name]]
                for name in names if used else ():
                    if not self._rows[name]:
                        self._sums[name] = torch.stack([self._sums[other] for other in used]).sum(0)
                        self._rows[name] = sum(self._rows[other] for other in used)


@dataclass(frozen=True)
class _MeasuredMatrix(ShardedMatrix):
    """A matrix in memory whose inputs are summed; a tied head is also indexed as a table."""

    weight: Tensor

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.weight[rows]


@dataclass(frozen=True, kw_only=True)
class _MeasuringFormat(WeightFormat):
    """A 16-bit format whose matrices `names` sum the squares of their inputs."""

    squares: _InputSquares
    names: Collection[str]
    head: str  # gets no outputs since nothing needs logits

    def view(self, buffer: Tensor, offset: int, spec: TensorSpec) -> Any:
        weight: Any = super().view(buffer, offset, spec)
        if spec.name not in self.names:
            return weight
        outputs = 0 if spec.name == self.head else len(weight)
        parts: list[Any] = [(slice(0, outputs), weight)] if outputs else []
        return _MeasuredMatrix((outputs, weight.shape[1]),
                               partial(self.squares.parts, spec.name, parts), weight)


class _EveryRow(PrefillScorer):
    """A scorer that needs the logits of every row, so that the head's inputs are all measured."""

    def reduce(self, batch: GPUBatch, forward_pass: int, row: int, logits: Tensor) -> Tensor:
        return torch.zeros(len(logits), self.width)


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
