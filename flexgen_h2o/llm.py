"""LLM: load a model over the tiers, tokenize, batch, generate, score."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

from flexgen_h2o.cache.shape import CacheShape
from flexgen_h2o.config import (
    OFFLOAD_DIR,
    H2OConfig,
    Policy,
    SamplingParams,
    check_int,
    check_number,
)
from flexgen_h2o.engine.batching import Request, make_blocks
from flexgen_h2o.engine.executor import Executor, Timing
from flexgen_h2o.engine.loader import end_tokens, find
from flexgen_h2o.engine.progress import byte_bar, run_bars
from flexgen_h2o.engine.prompts import Prompts
from flexgen_h2o.engine.room import Room, Size
from flexgen_h2o.engine.sampling import Sampler
from flexgen_h2o.engine.schedule import num_stops
from flexgen_h2o.engine.scoring import Forcing, Generation, Scoring
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.positions import check_cache
from flexgen_h2o.models.spec import ModelConfig
from flexgen_h2o.planning.free_memory import free_memory
from flexgen_h2o.planning.memory_plan import memory_plan
from flexgen_h2o.planning.rows import CacheOptions, WeightOptions, Workload
from flexgen_h2o.report import PHASES, LinkStats, RunStats, Trace, peak_process_bytes
from flexgen_h2o.storage.disk import RunFolder
from flexgen_h2o.storage.tiers import open_device
from flexgen_h2o.storage.transfer import Transfers


@dataclass(frozen=True)
class Output:
    """What one prompt was continued with.

    finish_reason is ``"stop"`` (an end token came and is the last of token_ids, or a stop string,
    with which token_ids and text end, but for what its last token has after it) or ``"length"``.
    prompt and text are None where there is no text (token id prompts, no tokenizer).
    """

    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str


class LLM:
    """A language model whose weights, cache and activations are spread over the tiers.

    Parameters
    ----------
    model : str
        Hugging Face repo id, local folder, `.gguf` file, or ``smollm2-135m``.
    path : str, optional
        Folder or `.gguf` file of the weights, if not by name; ``_DUMMY_`` for random ones.
    policy : Policy, optional
        Placements, batch sizes, overlap: decides speed and never results.
    h2o : H2OConfig, optional
        Which tokens stay cached; None: all of them.
    weight_bits : int
        16: the run's dtype. 8 or 4: matrices are kept in groups of codes, each group with a scale
        and a zero point.
    cache_bits : int
        16: the run's dtype. 8 or 4: groups of codes, each with a scale and a zero point.
    attn_sparsity : float
        Share of the full cache's values, over 0 and at most 1, that a new token reads: those of the
        most attention (FlexGen, arXiv 2303.06865, section 5). It changes results. Keys are all
        read, and prompts are exact. Of a cache in host memory beside a GPU the other values don't
        travel; one on disk is read whole, as single values are too small for a disk.
    device : str
        auto, cpu, cuda or cuda:N.
    dtype : str
        auto, float16, bfloat16 or float32.
    weight_cache : str, optional
        Folder that keeps quantized weights for later runs; "auto": in the user's cache; None: they
        are quantized anew each time.
    offload_dir : str, optional
        Where the disk tier writes. A private folder in it lives as long as it is needed.
    seed : int
        Of dummy weights.
    memory_limit, device_memory_limit : int, optional
        Bytes of host memory and of the GPU's that are counted as free at most; PyTorch is held to
        the latter.
    workload : Workload, optional
        Lengths and batch sizes to come: what cannot fit is refused before anything is loaded.
    progress : bool, optional
        Show progress bars. Default: on a terminal.
    trace : Trace, optional
        Records transfers and compute.
    verbose : bool
        Print the memory plan.

    Raises
    ------
    UserError
        The model can't be had or is not supported, a value is out of range, memory is too small.

    Examples
    --------
    >>> with LLM("smollm2-135m") as llm:                                    # doctest: +SKIP
    ...     llm.generate(["The capital of France is"], max_new_tokens=8)[0].text
    """

    def __init__(self, model: str, *, path: str | None = None, policy: Policy | None = None,
                 h2o: H2OConfig | None = None, weight_bits: int = 16, cache_bits: int = 16,
                 attn_sparsity: float = 1.0, device: str = "auto", dtype: str = "auto",
                 weight_cache: str | None = "auto", offload_dir: str | None = None, seed: int = 0,
                 memory_limit: int | None = None, device_memory_limit: int | None = None,
                 workload: Workload | None = None, progress: bool | None = None,
                 trace: Trace | None = None, verbose: bool = False):
        self.policy = policy or Policy()
        self.h2o = h2o
        self._cache_bits = cache_bits
        self._attn_sparsity = attn_sparsity
        _check_bits(weight_bits, cache_bits, h2o)
        _check_sparsity(attn_sparsity, h2o)
        self._most = {"cpu": memory_limit, "gpu": device_memory_limit}
        for name, most in (("memory_limit", memory_limit),
                           ("device_memory_limit", device_memory_limit)):
            if most is not None:
                check_int(name, most, low=1)
        self._weight_cache = weight_cache
        self._offload_dir = offload_dir or OFFLOAD_DIR
        self._no_bars = None if progress is None else not progress
        self._trace = trace or Trace(enabled=False)
        self._links = LinkStats()
        self._name = model
        self.stats: RunStats | None = None
        self._room: Room | None = None
        self._closed = False
        began = time.perf_counter()
        with contextlib.ExitStack() as opened:
            self._device = open_device(device)
            self._device.limit(device_memory_limit)
            with byte_bar("converting", off=self._no_bars) as bar:
                self._source = find(model, path=path, dtype=dtype, bits=weight_bits,
                                    device=self._device, progress=bar)
            self.model_config = self._source.config
            check_cache(self.model_config, h2o)
            _check_halves(self.model_config, self.policy)
            self._prompts = Prompts(self._source, model, h2o)
            if workload is not None:
                self._plan(workload, loaded=False, show=verbose)
            self._transfers = Transfers(self._device, links=self._links, trace=self._trace)
            opened.callback(self._transfers.close)
            self._load_weights(opened, seed)
            # From here on it is close() that closes.
            self._opened = opened.pop_all()
        self._load_seconds = time.perf_counter() - began

    def _load_weights(self, opened: contextlib.ExitStack, seed: int) -> None:
        doing = "converting" if self._source.bits == 16 else "quantizing"
        with byte_bar(doing, off=self._no_bars) as bar:
            checkpoint, names = self._source.open(
                self.policy.weights, seed=seed, weight_cache=self._weight_cache, progress=bar)
        opened.callback(checkpoint.close)
        weights = self._source.weights
        if self.policy.sep_layer:
            weights = weights.separated()
        self._weights = WeightStore(
            weights, checkpoint, names, placement=self.policy.weights, form=self._source.form,
            transfers=self._transfers, pin=self.policy.pin_weight)

        def run_folder() -> RunFolder:
            folder = RunFolder(self._offload_dir)
            opened.callback(folder.close)
            return folder

        with byte_bar("loading", off=self._no_bars) as bar:
            self._weights.load(run_folder, bar)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers and remove what was offloaded to disk; a second call does nothing."""
        self._closed = True
        try:
            self._leave()
        finally:
            self._opened.close()

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model_config.vocab_size

    @property
    def tokenizer(self):
        """The transformers tokenizer, or None where the model has none."""
        return self._prompts.tokenizer

    def _plan(self, workload: Workload, *, loaded: bool, show: bool = False) -> None:
        """Refuse what does not fit, before it is allocated."""
        form = self._source.form
        not_kept = form.bits != 16 and self._weight_cache is None
        plan = memory_plan(self.model_config, self.policy, workload,
                           itemsize=form.dtype.itemsize, has_gpu=self._device.separate,
                           writes_weights=self._source.dummy or not_kept,
                           cache=CacheOptions(self.h2o, self._cache_bits, self._attn_sparsity),
                           weights=WeightOptions(form.bits, form.group))
        limits = free_memory(self._offload_dir, self._device.free_bytes())
        if loaded:
            limits = plan.before_loading(limits)
        limits = limits.within(**self._most)
        if show:
            print(plan.table(limits), flush=True)
        plan.check(limits)

    def generate(self, prompts: Sequence[str | Sequence[int]], *, cut_gen_len: int | None = None,
                 **sampling) -> list[Output]:
        """Continue every prompt.

        Parameters
        ----------
        prompts : sequence of str or of token id sequences
            Any number; they are sorted by length and cut into blocks of batches.
        cut_gen_len : int, optional
            Generate only so many tokens and project the times in `stats` to max_new_tokens.
        **sampling
            Fields of `SamplingParams`, with transformers' names and meaning: max_new_tokens,
            min_new_tokens, do_sample, temperature, top_k, top_p, min_p, repetition_penalty,
            no_repeat_ngram_size, eos_token_id (-1: never stop early), stop_strings, seed.

        Returns
        -------
        list of Output, in the order of the prompts

        Raises
        ------
        UserError
            A prompt is empty or too long, an option is unknown, the run does not fit in memory.
        """
        params = _sampling_params(sampling)
        if isinstance(prompts, str):
            raise UserError("generate takes a list of prompts: put the one prompt in a list")
        _ = self.tokenizer  # a damaged one must show now and not after the work
        requests = [Request(key, self._prompts.encode(prompt, key))
                    for key, prompt in enumerate(prompts)]
        steps = params.max_new_tokens
        if cut_gen_len is not None:
            check_int("cut_gen_len", cut_gen_len, low=1)
            steps = min(cut_gen_len, steps)
        eos = self._eos(params)
        stops = self._prompts.stops(params.stop_strings)
        sink = Generation(Sampler(params, eos), eos, steps, stops=stops)
        if requests:
            self._prompts.check_lengths(requests, params.max_new_tokens)
        self._run(requests, steps - 1, sink, planned=params.max_new_tokens)
        if steps < params.max_new_tokens and requests:
            self.stats = self.stats.project(cut=steps, gen_len=params.max_new_tokens)
        return [
            Output(prompt if isinstance(prompt, str) else None, request.prompt, request.generated,
                   self._prompts.decode(request.generated), request.finish_reason)
            for prompt, request in zip(prompts, requests, strict=True)
        ]

    def loglikelihood(self, pairs: Sequence[tuple]) -> list[list[float]]:
        """Log-probability of each continuation token, teacher-forced.

        With the full cache, context and continuation are one prompt. An evicting, compressed or
        sparsely read cache gets the context as the prompt and then the continuation token by token,
        as if they had been generated: what it predicts depends on what it has dropped by then.

        Parameters
        ----------
        pairs : sequence of (context, continuation)
            Text or token ids. An empty context stands for the start of a text.

        Returns
        -------
        list of list of float
            For each pair, the natural log-probability of each token of the continuation.
        """
        requests, continuations = [], {}
        for key, pair in enumerate(pairs):
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise UserError(f"pair {key} is not (context, continuation): {pair!r:.80}")
            context, continuation = pair
            head, tail = self._prompts.encode_pair(context, continuation, key)
            continuations[key] = tail
            requests.append(Request(key, head))
        new = max(map(len, continuations.values()), default=1)
        evicts = self.h2o is not None and not self.h2o.is_full
        if evicts or self._cache_bits != 16 or self._attn_sparsity < 1:
            sink = Forcing(continuations)
        else:
            sink, new = Scoring(continuations), 1
            for request in requests:
                request.prompt += continuations[request.key][:-1]
        if requests:
            self._prompts.check_lengths(requests, new)
        self._run(requests, new - 1, sink, planned=new)
        return [sink.log_probs[key] for key in range(len(requests))]

    def _run(self, requests: list[Request], new: int, sink, *, planned: int) -> None:
        """Run all blocks, each request with up to `new` tokens appended, and set `stats`."""
        if self._closed:
            raise UserError("this LLM has been closed: make a new one")
        self._links.reset()
        self._device.begin_run()
        stats = self._new_stats(requests)
        policy = self.policy
        blocks = make_blocks(requests, new, gpu_batch_size=policy.gpu_batch_size,
                             num_gpu_batches=policy.num_gpu_batches,
                             prefill_chunk=policy.prefill_chunk)
        if blocks:
            room = self._enter(blocks, planned)
            executor = Executor(self.model_config, self._weights, room,
                                transfers=self._transfers, dtype=self._source.dtype,
                                policy=policy)
            try:
                self._run_blocks(executor, blocks, sink, stats)
                self._transfers.drain()
            except BaseException:
                # Work may be under way in the room, and its state is anybody's guess.
                self._leave()
                raise
        self._transfers.settle()
        stats.generated_tokens = sum(len(request.generated) for request in requests)
        stats.links = self._links.totals()
        stats.peak_device_bytes = self._device.peak_bytes()
        stats.peak_process_bytes = peak_process_bytes()
        self.stats = stats

    def _run_blocks(self, executor: Executor, blocks, sink, stats: RunStats) -> None:
        per_token = self.model_config.kv_bytes_per_token(self._source.dtype.itemsize)
        stops = num_stops(self.model_config.num_layers, self.policy.sep_layer)
        with run_bars(blocks, stops, off=self._no_bars) as progress:
            for block in blocks:
                timing = executor.run(block, sink, on_compute=partial(progress, block))
                self._trace_phases(timing)
                stats.kv_cache_bytes = max(stats.kv_cache_bytes, self._room.cache.nbytes())
                full = sum(len(batch) * (max(batch.seats.lengths) + batch.seats.new)
                           for batch in block)
                stats.full_kv_cache_bytes = max(stats.full_kv_cache_bytes, per_token * full)
                stats.prefill_seconds += timing.prefill
                stats.decode_seconds += sum(timing.steps)
                stats.step_seconds += timing.steps

    def _trace_phases(self, timing: Timing) -> None:
        start = timing.began
        for name, seconds in (("prefill", timing.prefill), ("decode", sum(timing.steps))):
            self._trace.add(name, PHASES, start, start + seconds)
            start += seconds

    def _new_stats(self, requests: list[Request]) -> RunStats:
        return RunStats(
            model=self._name, num_parameters=self.model_config.num_parameters(),
            dtype=str(self._source.dtype).removeprefix("torch."),
            device=self._device.description(), num_prompts=len(requests),
            prompt_tokens=sum(len(request.prompt) for request in requests), generated_tokens=0,
            gpu_batch_size=self.policy.gpu_batch_size,
            num_gpu_batches=self.policy.num_gpu_batches, load_seconds=self._load_seconds,
            kv_bytes_per_token=self._cache_shape().token_bytes(),
            weight_bytes=self._weights.nbytes, weight_bits=self._source.bits)

    def _cache_shape(self) -> CacheShape:
        config = self.model_config
        return CacheShape(config.num_layers, config.num_kv_heads, config.head_dim,
                          self._source.dtype, self._cache_bits, self._attn_sparsity)

    def _enter(self, blocks, planned: int) -> Room:
        """The room for these blocks: the last run's if they fit in, else a new one."""
        size = Size.of(blocks, self.h2o, self.model_config.num_layers)
        if self._room is not None and self._room.size.covers(size):
            return self._room
        self._leave()
        self._plan(Workload(prompt_len=max(blocks[0][0].seats.lengths), gen_len=planned,
                            gpu_batch_size=size.cache.sequences,
                            num_gpu_batches=size.cache.batches),
                   loaded=True)
        self._room = Room(self.model_config, self._cache_shape(), size, policy=self.policy,
                          h2o=self.h2o, transfers=self._transfers, offload_dir=self._offload_dir)
        return self._room

    def _leave(self) -> None:
        if self._room is not None:
            self._room.close()
        self._room = None

    def _eos(self, params: SamplingParams) -> tuple[int, ...]:
        given = params.eos_token_id
        if given is None:
            return end_tokens(self._source)
        if given == -1:
            return ()
        return (given,) if isinstance(given, int) else tuple(given)


def _sampling_params(options: dict) -> SamplingParams:
    known = [spec.name for spec in fields(SamplingParams)]
    for name in options:
        if name not in known:
            raise UserError(f"generate has no option {name!r}; it has {', '.join(known)}")
    return SamplingParams(**options)


def _check_bits(weight_bits: int, cache_bits: int, h2o: H2OConfig | None) -> None:
    for name, bits in (("weight_bits", weight_bits), ("cache_bits", cache_bits)):
        if bits not in (4, 8, 16):
            raise UserError(f"{name} must be 16, 8 or 4, got {bits!r}")
    if h2o is not None and h2o.simulate and cache_bits != 16:
        raise UserError("simulate masks an exact cache: leave cache_bits at 16")


def _check_sparsity(attn_sparsity: float, h2o: H2OConfig | None) -> None:
    check_number("attn_sparsity", attn_sparsity, above=0, high=1)
    if attn_sparsity < 1 and h2o is not None and (h2o.simulate or not h2o.is_full):
        raise UserError("attn_sparsity chooses among all that came before, and so nothing may be "
                        "evicted: leave it or h2o out")


def _check_halves(config: ModelConfig, policy: Policy) -> None:
    if policy.sep_layer and config.family == "gpt_neox" and config.parallel_residual:
        raise UserError(f"{config.name} feeds attention and MLP the same input: they can't be two "
                        "layers; leave --sep-layer off")
