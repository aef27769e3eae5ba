"""Runner: load the weights of a model, compute blocks of batches, and measure them."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from flexgen_h2o.cache.alternatives import KeySampler, ProbedCache
from flexgen_h2o.cache.disk_recall import recalls_in_place
from flexgen_h2o.cache.layout import CacheShape, evicting_layers
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig, select_layers
from flexgen_h2o.config.layers import ExpertChoices, sum_choices
from flexgen_h2o.config.parallel import Stage
from flexgen_h2o.config.policy import (
    OFFLOAD_DIR,
    Policy,
    Workload,
    check_fetch_chosen,
    speculative_policy,
)
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.distributed.pipeline import Exchange, Pipeline, RankContext
from flexgen_h2o.engine.batch import Batch, BlockQueue, BlockSize, OpenQueue, Request
from flexgen_h2o.engine.executor import Executor, Timing
from flexgen_h2o.engine.expert_counts import load_counts, save_counts
from flexgen_h2o.engine.expert_slots import ExpertSlots
from flexgen_h2o.engine.invariance import check_batch_invariant
from flexgen_h2o.engine.progress import RunBars, byte_bar
from flexgen_h2o.engine.sampling import LogitsConsumer
from flexgen_h2o.engine.schedule import LayerStep
from flexgen_h2o.engine.scoring import DecodeScorer
from flexgen_h2o.engine.source import ByteProgress, ModelSource
from flexgen_h2o.engine.speculation import DraftAutotune, Drafter
from flexgen_h2o.engine.weight_files import WeightFiles
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.engine.workspace import BlockCache, Workspace, WorkspaceSize, rotation_of
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.key_smoothing import KeySmoothing, LayerSmoothing
from flexgen_h2o.kernels import dispatch
from flexgen_h2o.kernels.cpu.wait_policy import OpenMPWaitPolicy
from flexgen_h2o.kernels.implementations import AutotuneTable
from flexgen_h2o.kernels.torch_ops import limit_shape_caches
from flexgen_h2o.metrics.provenance import peak_process_bytes, sampled_memory
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.metrics.trace import PHASES, LinkStats, Trace
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.positions import context
from flexgen_h2o.storage.disk import RunFolder
from flexgen_h2o.storage.free_memory import resident_bytes
from flexgen_h2o.storage.tiers import Device
from flexgen_h2o.storage.transfer import Transfers

Block = Sequence[Batch]

SAMPLED_TOKENS = 512
"""Number of random tokens whose keys are measured for key smoothing."""

SAMPLED_POSITIONS = 4096
"""Range of the positions of these tokens, unless the model has fewer positions."""


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The arguments of an `LLM`, which documents them.

    `cache` combines the arguments of the KV cache. If `H2OConfig.prompt_chunk` is set, it is also
    the policy's `prefill_chunk`.

    Raises
    ------
    UserError
        A value is out of range, or arguments contradict each other.
    """

    model: str
    policy: Policy = Policy()
    cache: CacheOptions = CacheOptions()
    weight_bits: int | str = AUTO
    activation_bits: int = 16
    device: str = "auto"
    dtype: str = "auto"
    path: str | os.PathLike | None = None
    offload_dir: str = OFFLOAD_DIR
    weight_cache: str | os.PathLike | None = AUTO
    calibration: str | os.PathLike | None = None
    verify: bool = False
    generation_config: bool = True
    seed: int = 0
    memory_limit: int | None = None
    device_memory_limit: int | None = None
    workload: Workload | None = None
    texts: Sequence[str] = ()
    implementations: AutotuneTable | None = None
    batch_invariant: bool = False
    pipeline: Pipeline | None = None
    bounds: Sequence[int] | None = None
    progress: bool | None = None
    trace: Trace | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        check_int("seed", self.seed, ge=0, le=2**63 - 1)
        for name in ("memory_limit", "device_memory_limit"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), ge=1)
        check_fetch_chosen(self.policy, self.cache)
        if self.policy.speculate is not None:
            if self.pipeline is not None:
                raise UserError("speculate needs all layers on one rank: leave pipeline out")
            object.__setattr__(self, "policy", speculative_policy(self.policy, self.cache))
        policy_chunk = self.policy.prefill_chunk
        chunk = None if self.cache.h2o is None else self.cache.h2o.prompt_chunk
        if chunk is None or chunk == policy_chunk:
            return
        if policy_chunk is not None:
            raise UserError(f"the policy's prefill_chunk is {policy_chunk} and h2o's prompt_chunk "
                            f"{chunk}: give one of them, or the same")
        object.__setattr__(self, "policy", replace(self.policy, prefill_chunk=chunk))

    @property
    def no_bars(self) -> bool | None:
        """tqdm's `disable`: None shows bars on a terminal only."""
        return None if self.progress is None else not self.progress


class Runner:
    """Holds the weights of a model on their tiers, and computes blocks of batches.

    Parameters
    ----------
    source : ModelSource
        Files and configuration of the model. `load` reads the weights.
    device : Device
    args : EngineArgs
        `args.cache` has the options of this rank's layers.
    rank : RankContext, optional
        This rank of a pipeline. Default: one rank with all layers.
    draft : Runner, optional
        Runner of the policy's draft model, which is loaded too.

    Attributes
    ----------
    config, stage_config : ModelConfig
        Configurations of the whole model, and of this rank's layers only.
    stage : Stage
        Range of this rank's layers.
    loaded_bytes : int
        Resident bytes of the process after loading.
    load_seconds : float
        Seconds that loading took, set by the LLM.
    """

    def __init__(self, source: ModelSource, device: Device, args: EngineArgs,
                 rank: RankContext | None = None, draft: Runner | None = None):
        args.policy.check_device(has_gpu=device.separate)
        if args.policy.fetch_chosen and device.separate and not recalls_in_place(device):
            raise UserError("fetch_chosen needs the kernels of a GPU, which are missing or "
                            "switched off: install triton, or leave it out")
        self.source = source
        self.config = source.config
        if self.config.experts is not None:  # all batches are routed before any expert is needed
            args = replace(args, policy=replace(args.policy, sep_layer=True))
        self.rank = rank
        self.draft = draft
        self._draft_autotune = DraftAutotune(args.policy.num_speculative_tokens)
        self.stage = Stage.all_layers(self.config.num_layers) if rank is None else rank.stage
        self.stage_config = self.config.slice_layers(self.stage.first, self.stage.last)
        self._exchange = None if rank is None else Exchange(
            rank.pipeline, rank.stage, rank.groups, width=self.config.hidden_size,
            dtype=source.dtype, device=device.torch)
        self.args = args
        self._device = device
        self._trace = args.trace or Trace(enabled=False)
        self._links = LinkStats()
        self._wait_policy = OpenMPWaitPolicy()
        self._transfers: Transfers | None = None
        self._experts: ExpertSlots | None = None
        self._smoothing: tuple[LayerSmoothing, ...] = ()
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
        return self._device.torch

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

    def load(self, resources: contextlib.ExitStack) -> None:
        """Read the weights to their tiers. Push objects that must be closed to `resources`."""
        limit_shape_caches()
        args, source = self.args, self.source
        self._transfers = Transfers(self._device, links=self._links, trace=self._trace)
        resources.callback(self._transfers.close)
        placement, experts = args.policy.weights, args.policy.experts
        choices = args.policy.expert_choices
        choices = choices and choices.slice_layers(self.stage.first, self.stage.last)
        on_disk = placement.disk > 0 or experts is not None and experts.disk > 0
        doing = "converting" if source.bits == 16 else "quantizing"
        with byte_bar(doing, off=args.no_bars) as bar:
            checkpoint, names = source.open(on_disk=on_disk, seed=args.seed,
                                            weight_cache=args.weight_cache,
                                            progress=self._progress_callback(bar))
        resources.callback(checkpoint.close)
        weights = source.weights.slice_layers(self.stage.first, self.stage.last)
        if args.policy.sep_layer:
            weights = weights.split_halves()
        self.weights = WeightStore(
            weights, WeightFiles(checkpoint, names, source.weight_format, self._transfers,
                                 verify=args.verify),
            self._transfers, placement=placement, experts=experts,
            choices=choices, pin=args.policy.pin_weight,
            shard_prefetch=self._shard_prefetch(args.policy))

        def run_folder() -> RunFolder:
            folder = RunFolder(args.offload_dir)
            resources.callback(folder.close)
            return folder

        with byte_bar("loading", off=args.no_bars) as bar:
            self.weights.load(run_folder, self._progress_callback(bar),
                              offload_file=source.offload_file(args.seed, args.weight_cache))
        self._load_experts(choices, resources)
        self._smoothing = self._key_smoothing()
        if self.draft is not None:
            self.draft.load(resources)
        self.loaded_bytes = resident_bytes()

    def _shard_prefetch(self, policy: Policy) -> bool | None:
        """Return True to prefetch row shards of weights; None if weights are not sharded."""
        sharded = policy.shards_weights(has_gpu=self._device.separate,
                                        mixture=self.config.experts is not None)
        return policy.overlap if sharded and policy.weights.disk > 0 else None

    def _load_experts(self, choices: ExpertChoices | None, resources: contextlib.ExitStack) -> None:
        """Allocate the slots of experts, if the model has any.

        Fill them by `choices`, or by the counts that earlier runs saved, and save those of this
        run.
        """
        policy, experts = self.args.policy, self.config.experts
        self._experts = None if experts is None else ExpertSlots(
            self.weights, self._transfers, experts, requested=policy.expert_slots,
            tokens=policy.gpu_batch_size * policy.num_gpu_batches, overlap=policy.overlap,
            host_computes=policy.cpu_expert_compute)
        if self._experts is None or not self._experts.num_slots:
            return
        file = self.source.expert_counts_file(self.args.weight_cache) if self.rank is None else None
        if file is not None:
            layers = [experts.count * self.config.has_experts(layer)
                      for layer in range(self.config.num_layers)]
            choices = choices or load_counts(file, layers, experts.per_token)
            resources.callback(self._save_counts, file)
        self._experts.fill(choices)

    def _save_counts(self, file: Path) -> None:
        if self._experts.history is not None:
            save_counts(file, self._experts.history)

    def _key_smoothing(self) -> tuple[LayerSmoothing, ...]:
        """Return the key smoothing of each layer.

        Empty if keys are not quantized, or if values are part of the keys, which smoothing changes.
        """
        cache, source, config = self.args.cache, self.source, self.cached_config
        if not cache.quantizes_keys or config.latent is not None:
            return ()
        device, shape = self._device.torch, (config.num_kv_heads, config.head_dim)
        if source.dummy:  # keys of random weights have no outliers
            constants = KeySmoothing.rotation(*shape, device)
            return (LayerSmoothing(constants, constants),) * config.num_layers
        if self.rank is not None:  # measuring takes all ranks, even those with a stored result
            return self._measure_keys()
        stored = source.cached_constants(
            lambda: torch.stack([layer.stacked() for layer in self._measure_keys()]).cpu().numpy(),
            "keys1", self.args.weight_cache)
        return tuple(LayerSmoothing.unstacked(layer)
                     for layer in torch.from_numpy(stored).to(device))

    def _measure_keys(self) -> tuple[LayerSmoothing, ...]:
        """Return the key smoothing, measured on a prompt of random tokens."""
        config = self.cached_config
        longest = min(context(self.config, None), SAMPLED_POSITIONS)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.config.vocab_size, (min(SAMPLED_TOKENS, longest),),
                               generator=generator).tolist()
        sampler = KeySampler(config.attention_variant, rotation_of(config), longest)
        self._run_prompts([Request(0, tokens)], sampler, DecodeScorer({0: tokens[:1]}), [])
        return tuple(sampler.layers[layer] for layer in range(config.num_layers))

    def _progress_callback(self, bar: ByteProgress) -> ByteProgress:
        """Return a callback that updates a progress bar and, in a pipeline, the heartbeat."""
        if self.rank is None:
            return bar
        monitor = self.rank.pipeline.monitor

        def show(done: int, total: int) -> None:
            monitor.advance()
            bar(done, total)

        return show

    def sampled_memory(self) -> AbstractContextManager[None]:
        """Sample memory into the trace, if there is one, during a ``with`` statement."""
        return sampled_memory(self._trace, self._device.used_bytes)

    def workspace(self, size: WorkspaceSize, cache: BlockCache | None = None) -> Workspace:
        """Return a workspace for blocks of at most `size`. `cache` replaces the KV cache."""
        args = self.args
        return Workspace(self.stage_config, self._cache_shape(), size, policy=args.policy,
                         h2o=self.h2o, transfers=self._transfers,
                         offload_dir=args.offload_dir, cache=cache,
                         smoothing=self._smoothing)

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
                # Scores of a shared prefix are summed apart from those of the rest.
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

    def probe(self, requests: Sequence[Request], attend: Callable[..., torch.Tensor],
              consumer: LogitsConsumer) -> RunStats:
        """Run prompts one by one with `attend` as the attention: see `LLM.probe`."""
        self.set_rope_lengths(requests, 0)
        request_keys: list[int] = []
        return self._run_prompts(requests, ProbedCache(attend, request_keys), consumer,
                                 request_keys)

    def _run_prompts(self, requests: Sequence[Request], cache: BlockCache, consumer: LogitsConsumer,
                     request_keys: list[int]) -> RunStats:
        """Run prompts one by one with another cache. Append their keys to `request_keys`."""
        queue = BlockQueue(requests, 0, BlockSize(1, 1))
        size = WorkspaceSize.from_queue(queue, None, self.cached_config.num_layers)
        # Nothing is generated, so the cache needs no capacity beyond the prompts.
        with contextlib.closing(self.workspace(size, cache)) as workspace:
            stats = self.new_stats()
            while queue.left:
                block = queue.next()
                request_keys.append(block[0].requests[0].key)
                stats = stats.merge(self.run_block(workspace, block, consumer))
            return stats

    def bars(self) -> RunBars:
        """Return progress bars of a run. The caller closes them."""
        return RunBars(self.stage.layer_steps(self.args.policy.sep_layer),
                       off=self.args.no_bars)

    def extend(self, workspace: Workspace, batch: Batch, consumer: LogitsConsumer) -> None:
        """Run a batch of a draft model on its own cache, between steps of the verifying model."""
        Executor(self.config, self.weights, workspace, transfers=self._transfers,
                 policy=self.args.policy, experts=self._experts).run([batch], consumer,
                                                                     keep_cache=True)

    def run_block(self, workspace: Workspace, block: Block, consumer: LogitsConsumer, *,
                  keep_cache: bool = False, bars: RunBars | None = None,
                  drafter: Drafter | None = None,
                  should_end: Callable[[], bool] = lambda: False) -> RunStats:
        """Run a block in a workspace, and return its statistics.

        Parameters
        ----------
        block : sequence of Batch
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
        self._links.reset()
        self._device.begin_run()
        sent_before = 0 if self._exchange is None else self._exchange.sent_bytes
        executor = Executor(self.config, self.weights, workspace, transfers=self._transfers,
                            policy=self.args.policy, exchange=self._exchange,
                            experts=self._experts, drafter=drafter,
                            draft_autotune=self._draft_autotune)
        experts_before = None if self._experts is None else replace(self._experts.counts)
        recalls = workspace.cache.recall_counts
        with (torch.inference_mode(), self.sampled_memory(),
              self._wait_policy.applied(sleep=recalls is not None),
              dispatch.use_autotune_table(self.args.implementations),
              dispatch.batch_invariant(self.args.batch_invariant),
              contextlib.ExitStack() as resources):
            if bars is None:
                bars = self.bars()
                resources.callback(bars.close)
            bars.begin(block)

            def computed(step: LayerStep) -> None:
                bars.show(block, step)
                self._wait_policy.update()
                if self.rank is not None:
                    self.rank.pipeline.monitor.advance()

            try:
                timing = executor.run(block, consumer, keep_cache=keep_cache, on_compute=computed,
                                      should_end=should_end)
            except BaseException:
                if self._experts is not None:
                    self._experts.clear()
                raise
            self._trace_phases(timing)
            self._transfers.drain()
        self._transfers.settle()
        stats = self.new_stats([request for batch in block for request in batch.requests
                                if request.finish_reason])
        stats.prefill_seconds = timing.prefill
        stats.step_seconds = timing.steps
        stats.decode_seconds = sum(timing.steps)
        stats.decode_slots, stats.idle_slots = timing.slots, timing.idle_slots
        stats.draft_tokens = timing.draft_tokens
        stats.accepted_tokens = timing.accepted_tokens
        stats.kv_cache_bytes = workspace.cache.nbytes()
        token_bytes = self.stage_config.kv_bytes_per_token(self.source.dtype.itemsize)
        stats.full_kv_cache_bytes = token_bytes * (
            sum(len(batch) * batch.batch_layout.longest for batch in block))
        stats.links = self._links.totals()
        if experts_before is not None:
            for name, count in asdict(self._experts.counts.since(experts_before)).items():
                setattr(stats, f"expert_{name}", count)
            stats.expert_choices = self._experts.choices.summary(self.stage_config.num_layers)
            self._experts.history = sum_choices((self._experts.history, stats.expert_choices))
        if recalls is not None:
            for name, count in asdict(workspace.cache.recall_counts.since(recalls)).items():
                setattr(stats, f"recall_{name}", count)
        if self._exchange is not None:
            stats.sent_bytes = self._exchange.sent_bytes - sent_before
        stats.peak_device_bytes = self._device.peak_bytes()
        stats.peak_process_bytes = peak_process_bytes()
        return stats

    def _trace_phases(self, timing: Timing) -> None:
        start = timing.began
        for name, seconds in (("prefill", timing.prefill), ("decode", sum(timing.steps))):
            self._trace.add(name, PHASES, start, start + seconds)
            start += seconds

    def new_stats(self, requests: Collection[Request] = ()) -> RunStats:
        """Return statistics of the model and of the tokens of requests, without times."""
        return RunStats(
            model=self.args.model, num_parameters=self.config.num_parameters(),
            dtype=str(self.source.dtype).removeprefix("torch."),
            device=self._device.description(), num_prompts=len(requests),
            prompt_tokens=sum(len(request.prompt) for request in requests),
            generated_tokens=sum(len(request.generated) for request in requests),
            gpu_batch_size=self.args.policy.gpu_batch_size,
            num_gpu_batches=self.args.policy.num_gpu_batches, load_seconds=self.load_seconds,
            kv_bytes_per_token=self._cache_shape().token_bytes(),
            weight_bytes=self.weights.nbytes, weight_bits=self.source.bits)

    def _cache_shape(self) -> CacheShape:
        config, cache = self.cached_config, self.args.cache
        latent = config.latent is not None
        return CacheShape(config.num_layers, config.num_kv_heads, config.head_dim,
                          self.source.dtype, cache.layout(config.head_dim, latent=latent),
                          cache.attn_sparsity, config.attention, latent)
