"""LLM: load a model over the tiers, tokenize, batch, generate, score."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flexgen_h2o.config.argument_types import typed
from flexgen_h2o.config.checks import check_int
from flexgen_h2o.config.formats import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.policy import OFFLOAD_DIR, Policy
from flexgen_h2o.config.sampling import SamplingParams, params_of_each
from flexgen_h2o.config.windowed import windowed
from flexgen_h2o.config.workload import Workload
from flexgen_h2o.conversation import CHUNK, Stream
from flexgen_h2o.engine.batch import Request
from flexgen_h2o.engine.block_run import BlockRun
from flexgen_h2o.engine.block_runs import BlockRuns
from flexgen_h2o.engine.calls import Session, one_at_a_time
from flexgen_h2o.engine.load_options import load_options
from flexgen_h2o.engine.loader import find
from flexgen_h2o.engine.orders import Close, Generate, Orders
from flexgen_h2o.engine.progress import byte_bar
from flexgen_h2o.engine.runner import Runner, RunnerSettings
from flexgen_h2o.engine.sinks import Forcing, Scoring, Sink
from flexgen_h2o.engine.tokenization import Prompts, several
from flexgen_h2o.engine.watch import PipelineFailure
from flexgen_h2o.errors import TooLittleMemory, UserError, shown
from flexgen_h2o.files.chat_template import render_chats
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.models.positions import check_cache, check_experts, check_halves, longest_prompt
from flexgen_h2o.outputs import Output, Scored
from flexgen_h2o.planning.memory_check import MemoryCheck
from flexgen_h2o.storage.tiers import open_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM(Session):
    """A language model whose weights, cache and activations are spread over the tiers.

    Calls take turns: one from another thread, of a stream too, waits for the one under way, and so
    does `close`. One from within another, such as a streamer's, raises `UserError`. `stats` is of
    the call that ended last.

    Parameters
    ----------
    model : str or path
        Hugging Face repo id, local folder, `.gguf` file, or ``smollm2-135m``.
    policy : Policy, optional
        Placements, batch sizes, overlap: decides speed and never results.
    h2o : H2OConfig, optional
        Which tokens stay cached; None: all of them.
    weight_bits : int
        16: the run's dtype. 8 or 4: matrices are kept in groups of codes, each group with a scale
        and a zero point.
    cache_bits : int
        16: the run's dtype. 8 or 4: groups of codes, each with a scale and a zero point.
    device : str
        auto, cpu, cuda or cuda:N.
    dtype : str
        auto, float16, bfloat16 or float32.
    offload_dir : str or path, optional
        Where the disk tier writes. A private folder in it lives as long as it is needed.
    **options
        Fields of `LoadOptions`: path, activation_bits, attn_sparsity, weight_cache, verify, seed,
        memory_limit, device_memory_limit, workload, texts, implementations, pipeline, bounds,
        progress, trace, verbose.

    Raises
    ------
    UserError
        The model can't be had or is not supported, a value is of a wrong type or out of range,
        memory is too small.

    Examples
    --------
    >>> with LLM("smollm2-135m") as llm:                                    # doctest: +SKIP
    ...     llm.generate(["The capital of France is"], max_new_tokens=8)[0].text
    """

    @typed
    def __init__(self, model: str | os.PathLike, *, policy: Policy | None = None,
                 h2o: H2OConfig | None = None, weight_bits: int = 16, cache_bits: int = 16,
                 device: str = "auto", dtype: str = "auto",
                 offload_dir: str | os.PathLike | None = None, **options: Any):
        name = os.fspath(model)
        (*named, _options) = inspect.signature(LLM).parameters
        load = load_options(options, beside=named)
        self._cache = CacheOptions(h2o, cache_bits, load.attn_sparsity)
        settings = RunnerSettings(name, policy or Policy(), self._cache,
                                  os.fspath(offload_dir or OFFLOAD_DIR), load)
        self.policy, self.h2o = settings.policy, h2o
        self.stats: RunStats | None = None
        self._closed = False
        self._orders = Orders(load.pipeline)
        self._runs = BlockRuns(self._orders)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        began = time.perf_counter()
        with contextlib.ExitStack() as opened:
            opened_device = open_device(self._orders.device(device))
            opened_device.limit(load.device_memory_limit)
            with byte_bar("converting", off=load.no_bars) as bar:
                source = find(name, path=load.path, dtype=dtype, bits=weight_bits,
                              activation_bits=load.activation_bits, device=opened_device,
                              progress=bar)
            self.model_config = source.config
            self.weight_options = source.form.options
            check_cache(self.model_config, h2o)
            self._cache = replace(self._cache, h2o=windowed(h2o, self.model_config.attention))
            settings = replace(settings, cache=self._cache)
            check_halves(self.model_config, self.policy)
            check_experts(self.model_config, self.policy)
            self._prompts = Prompts(source, name, h2o)
            self._prompts.check_longest(
                load.texts, 1 if load.workload is None else load.workload.gen_len)
            workload = load.workload
            if workload is not None and load.texts:
                # The length of texts is an estimate, and may be of more than was let pass.
                workload = workload.cut(longest_prompt(self.model_config, h2o))
            seat = self._orders.seat(
                source.config, self.policy, opened_device, bounds=load.bounds, workload=workload,
                form=f"{source.config}, {source.dtype}, {weight_bits} bits, "
                f"{load.activation_bits} of activations, {self._cache}, {self.policy}")
            stage = None
            if seat is not None:
                stage, workload = seat.stage, seat.workload
                settings = replace(settings, cache=replace(
                    self._cache, h2o=stage.h2o(self._cache.h2o)))
            self._runtime = Runner(source, opened_device, settings, seat)
            self.calls = self._runtime.calls
            self._memory = MemoryCheck(
                source.config, self.weight_options,
                itemsize=source.dtype.itemsize,
                writes_weights=source.writes_weights(load.weight_cache),
                offload_dir=settings.offload_dir,
                most={"cpu": load.memory_limit, "gpu": load.device_memory_limit},
                device_bytes=opened_device.free_bytes, stage=stage,
                groups=1 if seat is None else seat.groups)
            if workload is not None:
                self._orders.agree_to_fit(partial(
                    self._memory.refuse, self.policy, self._cache, workload, loaded_bytes=None,
                    show=load.verbose))
            with self._runtime.sampled_memory(), self._orders.working():
                self._runtime.load(opened)
            # From here on it is close() that closes.
            self._opened = opened.pop_all()
        self._runtime.load_seconds = time.perf_counter() - began

    @one_at_a_time
    def close(self) -> None:
        """Stop the workers and remove what was offloaded to disk; a second call does nothing."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(PipelineFailure):
                self._orders.give(Close())
        try:
            for stream in self._streams:
                stream.end()
            self._runs.close()
        finally:
            self._opened.close()

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model_config.vocab_size

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The transformers tokenizer, or None where the model has none."""
        return self._prompts.tokenizer

    def encode(self, prompt: str | Sequence[int], *, name: int | str = 0, new_tokens: int = 1,
               special: bool = True) -> list[int]:
        """Token ids of a prompt, as `generate` makes and checks them.

        Parameters
        ----------
        prompt : str or sequence of int
        name : int or str
            How errors call it: "prompt NAME".
        new_tokens : int
            How many are to follow it.
        special : bool
            Put the tokenizer's special tokens in front; False for a text in a chat template, which
            has them.

        Raises
        ------
        UserError
            It is empty or too long, or has tokens that the model does not know.
        """
        return self._prompts.fitting(prompt, name, new_tokens=new_tokens, special=special)

    @one_at_a_time
    def generate(self, prompts: Sequence[str | Sequence[int]],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 cut_gen_len: int | None = None, **sampling: Any) -> list[Output]:
        """Continue every prompt.

        Parameters
        ----------
        prompts : sequence of str or of token id sequences
            Any number; they are sorted by length and cut into blocks of batches.
        sampling_params : SamplingParams or a sequence of them, optional
            For all prompts, whose random numbers then differ; or one for each, whose seed alone
            decides the random numbers of its prompt.
        cut_gen_len : int, optional
            Generate only so many tokens and project the times in `stats` to max_new_tokens.
        **sampling
            In place of `sampling_params`: fields of `SamplingParams`, with transformers' names and
            meaning, such as max_new_tokens, do_sample, temperature, top_p, eos_token_id (-1: never
            stop early), stop_strings, seed.

        Returns
        -------
        list of Output, in the order of the prompts

        Raises
        ------
        UserError
            A prompt is empty or too long, an option is unknown, the run does not fit in memory.
        """
        self._orders.check("generate")
        generation = self._generation(prompts, sampling_params, sampling, cut_gen_len)
        stats = self._run_all(generation.run)
        if cut_gen_len is not None and cut_gen_len < generation.planned:
            self.stats = stats.project(cut=cut_gen_len, gen_len=generation.planned)
        return [self._prompts.output(prompt, request.prompt, request) for prompt, request in zip(
            generation.prompts, generation.requests, strict=True)]

    @one_at_a_time
    def generate_in_blocks(self, prompts: Sequence[str | Sequence[int]],
                           sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                           **sampling: Any) -> Iterator[dict[int, Output]]:
        """Continue every prompt, and get what has ended after each block.

        All prompts are checked by this call. A block is run by each step of the iterator; between
        two of them other calls may come, which need memory of their own. Closing the iterator, or
        dropping it, drops what it has not reached. `stats` is of its blocks so far.

        Parameters
        ----------
        prompts, sampling_params, **sampling
            As of `generate`, which gives the same outputs.

        Returns
        -------
        iterator of dict of int to Output
            Outputs by their places among the prompts.

        Raises
        ------
        UserError
            As `generate`; and from the iterator, if the LLM has been closed.
        """
        self._orders.check("generate_in_blocks")
        generation = self._generation(prompts, sampling_params, sampling, None)

        def blocks() -> Iterator[dict[int, Output]]:
            try:
                while not generation.run.done:
                    yield {request.key: self._prompts.output(
                        generation.prompts[request.key], request.prompt, request)
                        for request in self._run_block(generation.run)}
            finally:
                # It may be dropped at any time, in any thread: no more is done here.
                self._runs.leave(generation.run)

        return blocks()

    def _generation(self, prompts: Sequence[str | Sequence[int]],
                    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
                    sampling: Mapping[str, Any], cut_gen_len: int | None) -> _Generation:
        """The work of a `generate`, once its arguments are checked."""
        prompts = several("prompt", prompts)
        each = params_of_each(sampling_params, sampling, len(prompts))
        _ = self.tokenizer  # a damaged one must show now and not after the work
        requests = [Request(key, self._prompts.encode(prompt, key), seed=params.seed)
                    for key, (prompt, params) in enumerate(zip(prompts, each, strict=True))]
        self._prompts.check_lengths(requests, {key: params.max_new_tokens
                                               for key, params in enumerate(each)})
        if cut_gen_len is not None:
            check_int("cut_gen_len", cut_gen_len, low=1)
        sink = self._prompts.generation(dict(enumerate(each)), steps=cut_gen_len)
        planned = max((params.max_new_tokens for params in each), default=1)
        new = {key: min(params.max_new_tokens, cut_gen_len or params.max_new_tokens) - 1
               for key, params in enumerate(each)}
        run = self._begin(requests, new, sink, planned=planned)
        self._orders.give(Generate([request.prompt for request in requests], each, cut_gen_len),
                          run)
        return _Generation(prompts, requests, planned, run)

    def chat(self, conversations: Sequence, sampling_params: SamplingParams
             | Sequence[SamplingParams] | None = None, *, chat_template: str | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None,
             **sampling: Any) -> list[Output]:
        """Answer conversations, which the tokenizer's chat template makes prompts of.

        Templates are rendered in a process of their own, whose time and memory are bounded.

        Parameters
        ----------
        conversations : sequence of sequences of mappings
            The messages of each, such as ``{"role": "user", "content": "Hello"}``; messages alone
            are one conversation.
        sampling_params, **sampling
            As of `generate`.
        chat_template : str, optional
            A jinja template in place of the tokenizer's.
        chat_template_kwargs : mapping, optional
            Arguments of the template, such as ``{"enable_thinking": False}``.

        Returns
        -------
        list of Output
            In the order of the conversations; `prompt` is what the template made.

        Raises
        ------
        UserError
            There is no tokenizer or no template, the template refuses messages, or as `generate`.
        """
        self._orders.check("chat")
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        texts = render_chats(self.tokenizer, conversations, chat_template, chat_template_kwargs)
        # Special tokens are the template's: the tokenizer adds none.
        prompts = [self._prompts.encode(text, key, goes_on=True) for key, text in enumerate(texts)]
        outputs = self.generate(prompts, sampling_params, **sampling)
        return [replace(output, prompt=text)
                for output, text in zip(outputs, texts, strict=True)]

    def follow(self) -> None:
        """On a rank of a pipeline that is not the first: run what that one runs, until it closes
        its LLM.

        Raises
        ------
        UserError
            Another rank has failed or gone.
        """
        self._check_open()
        run: BlockRun | None = None
        while not isinstance(order := self._orders.take(), Close):
            if isinstance(order, Generate):
                if run is not None:
                    self._runs.leave(run)
                run = self._generation(order.prompts, order.params, {}, order.cut_gen_len).run
            elif run is not None:
                # The first rank hears of it too, and decides what to do.
                with contextlib.suppress(TooLittleMemory):
                    self._run_block(run)

    def loglikelihood(self, pairs: Sequence[tuple]) -> list[list[float]]:
        """Log-probability of each continuation token, teacher-forced.

        With the full cache, context and continuation are one prompt. An evicting, compressed or
        sparsely read cache gets the context as the prompt and then the continuation token by token,
        as if they had been generated: what it predicts depends on what it has dropped by then.
        There, a context of several pairs of a batch is computed once.

        Parameters
        ----------
        pairs : sequence of (context, continuation)
            Text or token ids. An empty context stands for the start of a text.

        Returns
        -------
        list of list of float
            For each pair, the natural log-probability of each token of the continuation.
        """
        return [scored.log_probs for scored in self.score(pairs)]

    @one_at_a_time
    def score(self, pairs: Sequence[tuple]) -> list[Scored]:
        """Score continuations, and tell if greedy decoding would write each.

        Parameters
        ----------
        pairs : sequence of (context, continuation)
            Text or token ids. An empty context stands for the start of a text.

        Returns
        -------
        list of Scored, in the order of the pairs
        """
        self._orders.refuse("score")
        requests, continuations = self._prompts.encode_pairs(pairs)
        new = max(map(len, continuations.values()), default=1)
        sink: Forcing | Scoring = Forcing(continuations)
        if self._cache.plain and self._cache.attn_sparsity == 1 and not self._cache.recalls:
            sink, new = Scoring(continuations), 1
            requests = sink.joined(requests)
        self._prompts.check_lengths(requests, new)
        self._run_all(self._begin(requests, new - 1, sink, planned=new))
        return sink.scored()

    @one_at_a_time
    def fit_batch(self, *, prompt_len: int, gen_len: int, most: int) -> int:
        """Set how many sequences are computed together: as many as the memory plan takes.

        Parameters
        ----------
        prompt_len, gen_len : int
            The longest prompt, and the most tokens that follow one.
        most : int
            Sequences at most.

        Returns
        -------
        int
            The policy's `gpu_batch_size` from now on: `most`, or a power of two below; 1 where
            nothing fits, for the run itself to say so.
        """
        check_int("most", most, low=1)
        self._orders.refuse("fit_batch")
        self._check_open()
        self._runs.free()  # its memory counts as free
        workload = Workload(prompt_len, gen_len, gpu_batch_size=most,
                            num_gpu_batches=self.policy.num_gpu_batches)
        size = self._memory.largest_batch(self.policy, self._cache, workload,
                                          loaded_bytes=self._runtime.loaded_bytes)
        self._runtime = self._runtime.in_batches(size)
        self.policy = self._runtime.settings.policy
        return size

    @one_at_a_time
    def stream(self, *, max_tokens: int | None = None, past_context: bool = False) -> Stream:
        """Open a text without end, whose cache survives from call to call.

        Parameters
        ----------
        max_tokens : int, optional
            Most tokens of the whole text. A full cache needs it: its memory is taken at once.
        past_context : bool
            Go on past the model's trained positions, where it writes nonsense: to see how. It
            takes rotary positions. Rolling positions need it not.

        Returns
        -------
        Stream
            A context manager with `generate` and `loglikelihood`. Turns are read in chunks of the
            policy's `prefill_chunk`, or of 256 tokens, each evicted from before the next.

        Raises
        ------
        UserError
            An evicting cache's sizes are shares of a prompt, which a stream has none of, or it
            only cuts prompts; a full one has no `max_tokens`; it does not fit in memory.
        """
        self._orders.refuse("stream")
        self._check_open()
        stream = Stream(self._runtime.in_chunks(self.policy.prefill_chunk or CHUNK),
                        self._prompts, self._memory, max_tokens=max_tokens,
                        past_context=past_context)
        self._streams.add(stream)
        return stream

    @one_at_a_time
    def probe(self, pairs: Sequence[tuple], attend: Callable[..., torch.Tensor]
              ) -> list[list[float]]:
        """Score continuations with the full cache while `attend` computes the attention.

        To see what a model attends to, or what becomes of its text if it attends
        to something else. Nothing is cached; one pair goes through the network at a time, whole.

        Parameters
        ----------
        pairs : sequence of (context, continuation)
            Text or token ids.
        attend : callable (layer, pair, q, k, v) -> Tensor [rows, heads, head_dim]
            `layer` counts decoder layers from 0, `pair` the pairs. The rows are the tokens of
            context and continuation but the last; q is [rows, heads, head_dim], k and v are
            [rows, kv_heads, head_dim], q and k rotated. They hold only during the call. Causal
            attention, the usual, is ``kernels.ops.prefill_attention(q, k, v, [rows])``.

        Returns
        -------
        list of list of float
            For each pair, the natural log-probability of each token of the continuation.
        """
        self._orders.refuse("probe")
        if self.model_config.attention:
            raise UserError("a probe attends as the default form does, and layers of this model "
                            "have windows, soft caps, sinks or a scale of their own: take another "
                            "model")
        if not callable(attend):
            raise UserError(f"attend must be a function, got {shown(attend)}")
        requests, continuations = self._prompts.encode_pairs(pairs)
        sink = Scoring(continuations)
        requests = sink.joined(requests)
        self._check_open()
        if requests:
            self._prompts.check_lengths(requests, 1)
            self._runs.free()
            self.stats = self._runtime.probe(requests, attend, sink)
        return [scored.log_probs for scored in sink.scored()]

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("this LLM has been closed: make a new one")

    def _begin(self, requests: list[Request], new: int | Mapping[int, int], sink: Sink, *,
               planned: int) -> BlockRun:
        """A run of all requests, each with up to `new` tokens appended, or so many as it has by
        key; `planned` tokens at most."""
        self._check_open()
        return self._runs.begin(self._runtime, requests, new, sink, planned=planned)

    def _run_all(self, run: BlockRun) -> RunStats:
        """Run all blocks; sets `stats` too."""
        self.stats = run.stats
        while not run.done:
            self._step(run)
        self._runs.leave(run)
        return run.stats

    @one_at_a_time
    def _run_block(self, run: BlockRun) -> list[Request]:
        """Run the next block, between other calls; sets `stats` too. Returns what has ended."""
        self._check_open()
        return self._step(run)

    def _step(self, run: BlockRun) -> list[Request]:
        ended = self._runs.step(run, self._runtime, self._refuse)
        self.stats = run.stats
        return ended

    def _refuse(self, workload: Workload) -> None:
        """Stop a run for which there is no memory beside the weights."""
        self._memory.refuse(self.policy, self._cache, workload,
                            loaded_bytes=self._runtime.loaded_bytes)


@dataclass(frozen=True)
class _Generation:
    """The work of a `generate`: its prompts, a request for each, and what runs them.

    `planned` are the most tokens that any may get.
    """

    prompts: list[str | Sequence[int]]
    requests: list[Request]
    planned: int
    run: BlockRun
