"""LLM: load a model over the tiers, tokenize, batch, generate, score."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.policy import OFFLOAD_DIR, Policy, Workload
from flexgen_h2o.config.sampling import SamplingParams, params_of_each
from flexgen_h2o.config.validation import check_bool, check_int, typed
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.conversation import CHUNK, Stream
from flexgen_h2o.distributed.control_messages import Close, ControlChannel, Generate
from flexgen_h2o.distributed.heartbeat import PipelineFailure
from flexgen_h2o.engine.batch import Request
from flexgen_h2o.engine.calls import Session, check_not_forked, one_at_a_time
from flexgen_h2o.engine.detokenization import ReasoningParser
from flexgen_h2o.engine.generation import (
    BlockRun,
    BlockRuns,
    CallWork,
    generation_work,
    scoring_work,
)
from flexgen_h2o.engine.load_options import load_options
from flexgen_h2o.engine.loading import OpenedModel, open_model
from flexgen_h2o.engine.runner import Runner, RunnerSettings
from flexgen_h2o.engine.tokenizer import several
from flexgen_h2o.errors import TooLittleMemory, UserError, shown
from flexgen_h2o.files.chat_template import render_chats
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.outputs import Output, Scored
from flexgen_h2o.planning.memory_plan import MemoryCheck

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLOSING = 10.0
"""Seconds to wait for what a dropped LLM has left to be closed."""


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
    weight_bits : int or "auto"
        "auto": a GGUF file's own codes; for other models 16. 16: the run's dtype. 12: matrices in
        bfloat16 with a shorter exponent, almost without loss.
        8 or 4: matrices are kept in groups of codes, each group with a scale and a zero point.
    cache_bits : int
        16: the run's dtype. 8 or 4: groups of codes, each with a scale and a zero point.
    device : str
        auto, cpu, cuda or cuda:N.
    dtype : str
        auto, float16, bfloat16 or float32.
    offload_dir : str or path, optional
        Where the disk tier writes. A private folder in it lives as long as it is needed.
    **options
        Fields of `LoadOptions`: path, activation_bits, key_bits, value_bits, attn_sparsity,
        weight_cache, calibration, verify, generation_config, seed, memory_limit,
        device_memory_limit, workload, texts, implementations, pipeline, bounds, progress, trace,
        verbose.

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
                 h2o: H2OConfig | None = None, weight_bits: int | str = AUTO, cache_bits: int = 16,
                 device: str = "auto", dtype: str = "auto",
                 offload_dir: str | os.PathLike | None = None, **options: Any):
        check_not_forked()
        (*named, _options) = inspect.signature(LLM).parameters
        load = load_options(options, beside=named)
        settings = RunnerSettings(
            os.fspath(model), policy or Policy(),
            CacheOptions(h2o, cache_bits, load.attn_sparsity, load.key_bits, load.value_bits),
            os.fspath(offload_dir or OFFLOAD_DIR), load)
        self.policy, self.h2o = settings.policy, h2o
        self.stats: RunStats | None = None
        self._closed = False
        self._control = ControlChannel(load.pipeline)
        self._runs = BlockRuns(self._control)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        began = time.perf_counter()
        with contextlib.ExitStack() as opened:
            found = open_model(settings, self._control, device=device, dtype=dtype,
                               weight_bits=weight_bits)
            self.model_config = found.source.config
            self.weight_options = found.source.form.options
            self._cache, self._prompts = found.cache, found.prompts
            self._runtime = Runner(found.source, found.device, found.settings, found.rank)
            self.calls = self._runtime.calls
            self._memory = _memory_check(found)
            if found.workload is not None:
                self._control.check_all_fit(partial(
                    self._memory.check_fits, self.policy, self._cache, found.workload,
                    loaded_bytes=None, show=load.verbose))
            with self._runtime.sampled_memory(), self._control.working():
                self._runtime.load(opened)
            # From here on it is close() that closes, or the end of the last reference.
            self._opened = opened.pop_all()
        self._drop = weakref.finalize(self, _close_dropped, self._runs, self._opened, os.getpid())
        self._drop.atexit = False  # threads have ended then; folders have finalizers of their own
        self._runtime.load_seconds = time.perf_counter() - began

    @one_at_a_time
    def close(self) -> None:
        """Stop the workers and remove what was offloaded to disk; a second call does nothing.

        An LLM that nothing refers to any more is closed, too, but for other ranks of a pipeline.
        """
        self._drop.detach()
        if not self._closed:
            self._closed = True
            with contextlib.suppress(PipelineFailure):
                self._control.send(Close())
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
    def device(self) -> torch.device:
        """The device that computes: the CPU, or one GPU."""
        return self._runtime.device

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The transformers tokenizer, or None where the model has none."""
        return self._prompts.tokenizer

    @property
    def chat_end_tokens(self) -> tuple[int, ...]:
        """The ids that end an answer of a chat: the model's end tokens and the tokenizer's."""
        return self._prompts.chat_end_tokens

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
            Put the tokenizer's special tokens in front of a text, as `add_special_tokens` of
            `generate`; False for a text in a chat template, which has them.

        Raises
        ------
        UserError
            It is empty or too long, or has tokens that the model does not know.
        """
        return self._prompts.fitting(prompt, name, new_tokens=new_tokens, special=special)

    def clamped(self, tokens: int, most: int) -> int:
        """Return how many new tokens, up to `most`, fit after a prompt of so many tokens.

        Parameters
        ----------
        tokens, most : int

        Returns
        -------
        int
            At least 1: a prompt that is too long itself is for `encode` to refuse.
        """
        return self._prompts.clamped(tokens, most)

    @one_at_a_time
    def generate(self, prompts: Sequence[str | Sequence[int]],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 cut_gen_len: int | None = None, add_special_tokens: bool = True,
                 **sampling: Any) -> list[Output]:
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
        add_special_tokens : bool
            Put the tokenizer's special tokens in front of texts. A text that begins with BOS gets
            no second one.
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
        self._control.check_first_rank("generate")
        prompts = several("prompt", prompts)
        work, run = self._begin_generation(prompts, sampling_params, sampling, cut_gen_len,
                                           add_special_tokens)
        stats = self._run_all(run)
        if cut_gen_len is not None and cut_gen_len < work.planned:
            self.stats = stats.project(cut=cut_gen_len, gen_len=work.planned)
        return [self._prompts.output(prompt, request.prompt, request)
                for prompt, request in zip(prompts, work.requests, strict=True)]

    @one_at_a_time
    def generate_in_blocks(self, prompts: Sequence[str | Sequence[int]],
                           sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                           *, add_special_tokens: bool = True,
                           **sampling: Any) -> Iterator[dict[int, Output]]:
        """Continue every prompt, and get what has ended after each block.

        All prompts are checked by this call. A block is run by each step of the iterator; between
        two of them other calls may come, which need memory of their own. Closing the iterator, or
        dropping it, drops what it has not reached. `stats` is of its blocks so far.

        Parameters
        ----------
        prompts, sampling_params, add_special_tokens, **sampling
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
        self._control.check_first_rank("generate_in_blocks")
        given = several("prompt", prompts)
        _, run = self._begin_generation(given, sampling_params, sampling, None, add_special_tokens)

        def blocks() -> Iterator[dict[int, Output]]:
            try:
                while not run.done:
                    yield {request.key: self._prompts.output(
                        given[request.key], request.prompt, request)
                        for request in self._run_block(run)}
            finally:
                # It may be dropped at any time, in any thread: no more is done here.
                self._runs.leave(run)

        return blocks()

    def _begin_generation(self, prompts: Sequence[str | Sequence[int]],
                          sampling_params: SamplingParams | Sequence[SamplingParams] | None,
                          sampling: Mapping[str, Any], cut_gen_len: int | None,
                          add_special_tokens: bool = True) -> tuple[CallWork, BlockRun]:
        """The work of a `generate`, once its arguments are checked, and its run on all ranks."""
        check_bool("add_special_tokens", add_special_tokens)
        each = params_of_each(sampling_params, sampling, len(prompts))
        work = generation_work(self._prompts, prompts, each, cut_gen_len,
                               special=add_special_tokens)
        run = self._begin(work)
        self._control.send(Generate([request.prompt for request in work.requests], each,
                                   cut_gen_len), run)
        return work, run

    def chat(self, conversations: Sequence, sampling_params: SamplingParams
             | Sequence[SamplingParams] | None = None, *, chat_template: str | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None,
             cut_gen_len: int | None = None, **sampling: Any) -> list[Output]:
        """Answer conversations, which the tokenizer's chat template makes prompts of.

        An answer ends at any of `chat_end_tokens`, unless `eos_token_id` is given.

        Templates are rendered in a process of their own, whose time and memory are bounded.

        Parameters
        ----------
        conversations : sequence of sequences of mappings
            The messages of each, such as ``{"role": "user", "content": "Hello"}``; messages alone
            are one conversation.
        sampling_params, cut_gen_len, **sampling
            As of `generate`.
        chat_template : str, optional
            A jinja template in place of the tokenizer's.
        chat_template_kwargs : mapping, optional
            Arguments of the template's own, such as ``{"enable_thinking": False}``.

        Returns
        -------
        list of Output
            In the order of the conversations; `prompt` is what the template made. `content` and
            `reasoning_content` are set.

        Raises
        ------
        UserError
            There is no tokenizer or no template, the template refuses messages, or as `generate`.
        """
        self._control.check_first_rank("chat")
        conversations = several("conversation", conversations)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        texts = render_chats(self.tokenizer, conversations, chat_template, chat_template_kwargs)
        # Special tokens are the template's: the tokenizer adds none.
        prompts = [self._prompts.encode(text, key, goes_on=True) for key, text in enumerate(texts)]
        ends = self.chat_end_tokens or None
        each = [params if params.eos_token_id is not None else replace(params, eos_token_id=ends)
                for params in params_of_each(sampling_params, sampling, len(prompts))]
        outputs = self.generate(prompts, each, cut_gen_len=cut_gen_len)
        parser, found = ReasoningParser(self.tokenizer), []
        for output, text in zip(outputs, texts, strict=True):
            content, reasoning = parser.split(output)
            found.append(replace(output, prompt=text, content=content,
                                 reasoning_content=reasoning))
        return found

    def follow(self) -> None:
        """On a rank of a pipeline that is not the first: run what that one runs, until it closes
        its LLM.

        Raises
        ------
        UserError
            Another rank has failed or gone.
        """
        self.calls.check_process()
        self._check_open()
        run: BlockRun | None = None
        while not isinstance(message := self._control.receive(), Close):
            if isinstance(message, Generate):
                if run is not None:
                    self._runs.leave(run)
                _, run = self._begin_generation(message.prompts, message.params, {},
                                                message.cut_gen_len)
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
            Text or token ids. An empty context stands for the start of a text. White space at the
            end of a text context is scored with the continuation, and so is text of the context
            that shares a token with the continuation.

        Returns
        -------
        list of list of float
            For each pair, the natural log-probability of each token of the continuation.
        """
        return [scored.log_probs for scored in self.score(pairs)]

    @one_at_a_time
    def score(self, pairs: Sequence[tuple], *, on_logits: Callable[
            [list[tuple[int, int]], torch.Tensor], None] | None = None) -> list[Scored]:
        """Score continuations, and tell if greedy decoding would write each.

        Parameters
        ----------
        pairs : sequence of (context, continuation)
            As of `loglikelihood`.
        on_logits : callable (places, logits), optional
            Called with logits [rows, vocab] as they are computed. `places` holds (pair, index into
            its continuation) of each row, the token that the row predicts. The logits are valid
            during the call.

        Returns
        -------
        list of Scored, in the order of the pairs
        """
        self._control.check_single_rank("score")
        work = scoring_work(self._prompts, pairs, whole=self._cache.plain
                            and self._cache.attn_sparsity == 1 and not self._cache.recalls,
                            on_logits=on_logits)
        self._run_all(self._begin(work))
        return work.consumer.scored()

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
        self._control.check_single_rank("fit_batch")
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
        self._control.check_single_rank("stream")
        self._check_open()
        stream = Stream(self._runtime.in_chunks(self.policy.prefill_chunk or CHUNK),
                        self._prompts, self._memory, max_tokens=max_tokens,
                        past_context=past_context)
        stream.owner = self  # which is open as long as the stream is
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
        self._control.check_single_rank("probe")
        if self.model_config.attention:
            raise UserError("a probe attends as the default form does, and layers of this model "
                            "have windows, soft caps, sinks or a scale of their own: take another "
                            "model")
        if not callable(attend):
            raise UserError(f"attend must be a function, got {shown(attend)}")
        work = scoring_work(self._prompts, pairs, whole=True)
        self._check_open()
        if work.requests:
            self._runs.free()
            self.stats = self._runtime.probe(work.requests, attend, work.consumer)
        return [scored.log_probs for scored in work.consumer.scored()]

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("this LLM has been closed: make a new one")

    def _begin(self, work: CallWork) -> BlockRun:
        self._check_open()
        return self._runs.begin(self._runtime, work)

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
        self._memory.check_fits(self.policy, self._cache, workload,
                            loaded_bytes=self._runtime.loaded_bytes)


def _close_dropped(runs: BlockRuns, opened: contextlib.ExitStack, process: int) -> None:
    """Close what an LLM that nothing refers to has left.

    The garbage collector may call it in any thread, also in one that holds a lock which closing
    takes: another thread closes, and is waited for no longer than closing should take.
    """
    if os.getpid() != process:
        return

    def close() -> None:
        with opened:
            runs.close()

    closing = threading.Thread(target=close, name="closing a dropped LLM")
    closing.start()
    closing.join(_CLOSING)


def _memory_check(model: OpenedModel) -> MemoryCheck:
    """Make the check of a model's runs against memory, by its options."""
    source, settings, rank = model.source, model.settings, model.rank
    load = settings.load
    return MemoryCheck(
        source.config, source.form.options,
        itemsize=source.dtype.itemsize,
        writes_weights=source.writes_weights(load.weight_cache),
        offload_dir=settings.offload_dir,
        most={"cpu": load.memory_limit, "gpu": load.device_memory_limit},
        device_bytes=model.device.free_bytes,
        stage=None if rank is None else rank.stage,
        groups=1 if rank is None else rank.groups)
