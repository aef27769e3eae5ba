"""Runner: compute blocks of GPU batches with loaded weights, and measure them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from typing import Any

import torch

from flexgen_h2o.cache.layout import evicting_layers
from flexgen_h2o.config.h2o import H2OConfig, select_layers
from flexgen_h2o.config.layers import sum_choices
from flexgen_h2o.config.parallel import Stage
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.distributed.pipeline import Exchange, RankContext
from flexgen_h2o.engine.args import EngineArgs, check_batch_invariant
from flexgen_h2o.engine.blocks import (
    BlockQueue,
    BlockSize,
    GPUBatch,
    OpenQueue,
    Request,
    batch_of_one,
)
from flexgen_h2o.engine.executor import Executor
from flexgen_h2o.engine.expert_slots import ExpertSlots
from flexgen_h2o.engine.sampling import LogitsConsumer
from flexgen_h2o.engine.schedule import Action
from flexgen_h2o.engine.source import ModelSource
from flexgen_h2o.engine.speculation import DraftAutotune, Drafter
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.engine.workspace import BlockCache, Workspace, WorkspaceSize, cache_shape
from flexgen_h2o.files.terminal import ProgressBar
from flexgen_h2o.h2o.key_smoothing import LayerSmoothing
from flexgen_h2o.kernels import dispatch
from flexgen_h2o.kernels.cpu.wait_policy import OpenMPWaitPolicy
from flexgen_h2o.metrics.provenance import peak_process_bytes, sampled_memory
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.positions import context
from flexgen_h2o.storage.transfer import Transfers


class RunBars:
    """Bars for prefill (layers) and decode (steps), whose totals grow with each block.

    Parameters
    ----------
    units : range
        Units of a forward pass on this rank.
    progress : bool or None
        Show the bars. None: on a terminal only.
    """

    def __init__(self, units: range, *, progress: bool | None):
        self._units = units
        disable = None if progress is None else not progress
        self._prefill = ProgressBar(total=0, desc="prefill", unit="layer", disable=disable)
        self._decode = ProgressBar(total=0, desc="decode", unit="step", disable=disable)

    def begin(self, block: Sequence[GPUBatch]) -> None:
        """Add a block to the totals."""
        layout = block[0].layout
        passes = sum(layout.prefill_passes for batch in block if batch.fresh)
        self._prefill.total = self._prefill.n + len(self._units) * passes
        self._decode.total = self._decode.n + layout.new

    def show(self, block: Sequence[GPUBatch], action: Action) -> None:
        """Count a finished compute of a block."""
        if block[0].layout.in_prefill(action.forward_pass):
            self._prefill.update()
        elif action.unit == self._units[-1] and action.batch == 0:
            self._decode.update()

    def close(self) -> None:
        """Close the bars; their last state stays visible."""
        self._prefill.close()
        self._decode.close()


class Runner:
    """Computes blocks of GPU batches with the loaded weights of a model.

    Parameters
    ----------
    args : EngineArgs
        `args.cache` has the options of this rank's layers.
    weights : WeightStore
        Loaded weights of this rank's layers.
    experts : ExpertSlots or None
        The experts of a mixture, which needs the policy's `sep_layer`.
    rank : RankContext, optional
        This rank of a pipeline. Default: one rank with all layers.

    Attributes
    ----------
    config, stage_config : ModelConfig
        Configurations of the whole model, and of this rank's layers only.
    stage : Stage
        Range of this rank's layers.
    smoothing : tuple of LayerSmoothing
        Key smoothing of each layer of `cached_config`; empty without it.
    loaded_bytes : int
        Resident bytes of the process after loading.
    load_seconds : float
        Seconds that loading took, set by the LLM.
    draft : Runner or None
        Runner of the policy's draft model, or of the model's layer for multi-token prediction; set
        by the LLM.
    """

    def __init__(self, source: ModelSource, args: EngineArgs, transfers: Transfers,
                 weights: WeightStore, experts: ExpertSlots | None = None, *,
                 rank: RankContext | None = None):
        self.source, self.args, self.weights = source, args, weights
        self.config = source.config
        self.rank = rank
        self.draft: Runner | None = None
        self._draft_autotune = DraftAutotune(args.policy.num_speculative_tokens)
        self.stage = Stage.all_layers(self.config.num_layers) if rank is None else rank.stage
        self.stage_config = self.config.slice_layers(self.stage.first, self.stage.last)
        self._transfers, self._experts = transfers, experts
        self._exchange = None if rank is None else Exchange(
            rank, width=self.config.hidden_size, dtype=source.dtype, device=self.device)
        self._num_parameters, self._weight_bytes = self.config.num_parameters(), weights.nbytes
        self._wait_policy = OpenMPWaitPolicy()
        self.smoothing: tuple[LayerSmoothing, ...] = ()
        self.loaded_bytes = 0
        self.load_seconds = 0.0

    @property
    def cached_config(self) -> ModelConfig:
        """Configuration of this rank's attention layers, which the KV cache has."""
        return self.stage_config.attention_only

    @property
    def h2o(self) -> H2OConfig | None:
        """The H2O configuration of `cached_config`."""
        h2o, config = self.args.cache.h2o, self.stage_config
        return h2o if config.recurrent is None else select_layers(h2o, config.attention_layers)

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._transfers.device.torch_device

    def with_prefill_chunk(self, chunk: int) -> Runner:
        """Return a runner with the same weights that prefills in chunks and evicts after each."""
        args, cache = self.args, self.args.cache
        if cache.evicts and not cache.recalls:  # with recall only sliding windows drop tokens
            cache = replace(cache, h2o=replace(cache.h2o, prompt_chunk=chunk))
        policy = replace(args.policy, prefill_chunk=chunk)
        return self._with(replace(args, cache=cache, policy=policy))

    def with_policy(self, policy: Policy) -> Runner:
        """Return a runner with the same weights and a policy with other blocks."""
        return self._with(replace(self.args, policy=policy))

    def _with(self, args: EngineArgs) -> Runner:
        if args.batch_invariant:
            check_batch_invariant(self.config, args.policy, args.cache, self.device)
        other = copy.copy(self)
        other.args = args
        return other

    def workspace(self, size: WorkspaceSize, cache: BlockCache | None = None) -> Workspace:
        """Return a workspace for blocks of at most `size`. `cache` replaces the KV cache."""
        args = self.args
        return Workspace(self.stage_config, args.cache, size, dtype=self.source.dtype,
                         policy=args.policy, h2o=self.h2o, transfers=self._transfers,
                         offload_dir=args.offload_dir, cache=cache, smoothing=self.smoothing)

    def queue(self, requests: Sequence[Request], new: int | Mapping[int, int], *,
              share_prompts: bool) -> BlockQueue:
        """Return a queue of requests, in blocks of the policy's size: see `BlockQueue`."""
        self.set_rope_lengths(requests, new)
        queue = BlockQueue(requests, new, self._block_size(share_prompts))
        queue.evicts = self._evicts(queue)
        return queue

    def open_queue(self, max_len: int) -> OpenQueue:
        """Return a queue that takes requests of at most `max_len` tokens: see `OpenQueue`."""
        queue = OpenQueue(max_len, self._block_size(share_prompts=True))
        queue.evicts = self._evicts(queue)
        return queue

    def _block_size(self, share_prompts: bool) -> BlockSize:
        policy = self.args.policy
        return BlockSize(
            policy.gpu_batch_size, policy.num_gpu_batches, policy.prefill_chunk, share_prompts,
            share_prefixes=share_prompts and not self.args.cache.simulated and not (
                # Scores of a shared prefix are summed apart from scores of the rest.
                self.args.batch_invariant and self.args.cache.evicts),
            draft_tokens=policy.draft_tokens)

    def _evicts(self, queue: BlockQueue) -> tuple[bool, ...]:
        return evicting_layers(queue.sizes, self.h2o, self.cached_config.num_layers)

    def set_rope_lengths(self, requests: Sequence[Request], new: int | Mapping[int, int]) -> None:
        """Set the RoPE length of each request, if RoPE scaling depends on the text's length."""
        rope, h2o = self.config.rope, self.args.cache.h2o
        if rope is None or context(self.config, h2o) == self.config.plain_positions:
            return
        for request in requests:
            appended = new[request.key] if isinstance(new, Mapping) else new
            request.rope_length = rope.text_length(len(request.prompt), appended)

    def run_prompts(self, requests: Sequence[Request], cache: BlockCache, consumer: LogitsConsumer
                    ) -> RunStats:
        """Run prompts one by one, in their order, with another cache. Nothing is generated."""
        longest = max(len(request.prompt) for request in requests)
        size = WorkspaceSize.of_one({(longest, 0)}, None, self.cached_config.num_layers,
                                    rows=longest)
        stats = self.new_stats()
        with closing(self.workspace(size, cache)) as workspace:
            for request in requests:
                batch = batch_of_one(request, 0, past=0, chunk=longest)
                stats = stats.merge(self.run_block(workspace, [batch], consumer))
        return stats

    def bars(self) -> RunBars:
        """Return progress bars of a run. The caller closes them."""
        return RunBars(self.stage.units(self.args.policy.sep_layer),
                       progress=self.args.progress)

    def extend(self, workspace: Workspace, batch: GPUBatch, consumer: LogitsConsumer) -> None:
        """Run a batch of a draft model on its own cache, between two decode steps of the model."""
        Executor(self.config, self.weights, workspace, transfers=self._transfers,
                 policy=self.args.policy, experts=self._experts).run(
                     [batch], consumer, self.new_stats(), keep_cache=True)

    def run_block(self, workspace: Workspace, block: Sequence[GPUBatch],
                  consumer: LogitsConsumer, *, keep_cache: bool = False,
                  bars: RunBars | None = None, drafter: Drafter | None = None,
                  should_end: Callable[[], bool] = lambda: False) -> RunStats:
        """Run a block in a workspace, and return its statistics.

        Parameters
        ----------
        keep_cache : bool
            Continue with the contents of the workspace's cache, and keep them for the next block.
        bars : RunBars, optional
            Default: new ones.
        drafter : Drafter, optional
            Drafts tokens for speculative decoding.
        should_end : callable () -> bool
            Called after each token. True ends the block early.

        Returns
        -------
        RunStats
            Token counts include finished requests only.
        """
        links, device, trace = self._transfers.links, self._transfers.device, self._transfers.trace
        links.reset()
        device.begin_run()
        sent_before = 0 if self._exchange is None else self._exchange.sent_bytes
        executor = Executor(self.config, self.weights, workspace, transfers=self._transfers,
                            policy=self.args.policy, exchange=self._exchange,
                            experts=self._experts, drafter=drafter,
                            draft_autotune=self._draft_autotune)
        experts_before = None if self._experts is None else replace(self._experts.counts)
        recalls = workspace.cache.recall_counts
        with (torch.inference_mode(), sampled_memory(trace, device.used_bytes),
              self._wait_policy.applied(sleep=recalls is not None),
              dispatch.use_autotune_table(self.args.implementations),
              dispatch.batch_invariant(self.args.batch_invariant),
              ExitStack() as resources):
            if bars is None:
                bars = self.bars()
                resources.callback(bars.close)
            bars.begin(block)

            def computed(action: Action) -> None:
                bars.show(block, action)
                self._wait_policy.update()
                if self.rank is not None:
                    self.rank.pipeline.monitor.advance()

            stats = self.new_stats()
            try:
                executor.run(block, consumer, stats, keep_cache=keep_cache, on_compute=computed,
                             should_end=should_end)
            except BaseException:
                if self._experts is not None:
                    self._experts.clear()
                raise
            self._transfers.drain()
        self._transfers.record_finished()
        finished = [request for batch in block for request in batch.requests
                    if request.finish_reason]
        stats.num_prompts = len(finished)
        stats.prompt_tokens = sum(len(request.prompt) for request in finished)
        stats.generated_tokens = sum(len(request.generated) for request in finished)
        stats.kv_cache_bytes = workspace.cache.nbytes()
        token_bytes = self.stage_config.kv_bytes_per_token(self.source.dtype.itemsize)
        stats.full_kv_cache_bytes = token_bytes * (
            sum(len(batch) * batch.layout.longest for batch in block))
        stats.links = links.totals()
        if experts_before is not None:
            _set_counts(stats, "expert", self._experts.counts, experts_before)
            stats.expert_choices = self._experts.choices.summary(self.stage_config.num_layers)
            self._experts.history = sum_choices((self._experts.history, stats.expert_choices))
        if recalls is not None:
            _set_counts(stats, "recall", workspace.cache.recall_counts, recalls)
        if self._exchange is not None:
            stats.sent_bytes = self._exchange.sent_bytes - sent_before
        stats.peak_device_bytes = device.peak_bytes()
        stats.peak_process_bytes = peak_process_bytes()
        return stats

    def new_stats(self) -> RunStats:
        """Return statistics without tokens and times."""
        policy, config = self.args.policy, self.stage_config
        return RunStats(
            model=self.args.model, num_parameters=self._num_parameters,
            dtype=str(self.source.dtype).removeprefix("torch."),
            device=self._transfers.device.description(), num_prompts=0, prompt_tokens=0,
            generated_tokens=0, gpu_batch_size=policy.gpu_batch_size,
            num_gpu_batches=policy.num_gpu_batches, load_seconds=self.load_seconds,
            kv_bytes_per_token=sum(
                cache_shape(config.select_layers(layers), self.args.cache, self.source.dtype
                            ).token_bytes() for layers in config.cache_groups),
            weight_bytes=self._weight_bytes, weight_bits=self.source.bits)


def _set_counts(stats: RunStats, kind: str, counts: Any, before: Any) -> None:
    """Set the fields of a kind, such as `expert_hits`, to the counts since `before`."""
    for name, count in asdict(counts).items():
        setattr(stats, f"{kind}_{name}", count - getattr(before, name))
