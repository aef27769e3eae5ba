"""LLM: load a model over the tiers, generate, chat, score and stream."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.limits import MAX_MODEL_LEN
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.sampling import SamplingParams, expand_params
from flexgen_h2o.config.validation import check_arguments, check_int
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.distributed.control_messages import Close, ControlChannel, Generate
from flexgen_h2o.distributed.pipeline import Pipeline
from flexgen_h2o.engine.args import EngineArgs
from flexgen_h2o.engine.blocks import Request
from flexgen_h2o.engine.detokenization import ReasoningParser
from flexgen_h2o.engine.exclusive import (
    CallLock,
    ExclusiveResource,
    check_not_forked,
    exclusive,
)
from flexgen_h2o.engine.generation import Engine, GenerationRun
from flexgen_h2o.engine.loading import load_runner
from flexgen_h2o.engine.output_processor import OnText
from flexgen_h2o.engine.prepare import PreparedModel, prepare_model
from flexgen_h2o.engine.tokenizer import check_list
from flexgen_h2o.errors import InsufficientMemory, UserError, short_repr
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.kernels.implementations import AutotuneTable
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.metrics.trace import Trace
from flexgen_h2o.outputs import Output, Scored
from flexgen_h2o.planning.memory_plan import MemoryCheck, MemoryPlan
from flexgen_h2o.planning.planned_run import DraftModel
from flexgen_h2o.sessions import RequestSession, StreamingSession
from flexgen_h2o.storage.free_memory import MemoryLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLOSE_TIMEOUT = 10.0
"""Seconds to wait until an LLM without references is closed."""


class LLM(ExclusiveResource):
    """A language model whose weights, KV cache and activations are placed on several tiers.

    Calls from several threads take turns, and so do calls of its streams and `close`. A call from
    within another call, for example in a streamer, raises `UserError`.

    Parameters
    ----------
    model : str or path
        Hugging Face repo id, local folder, `.gguf` file, or ``smollm2-135m``.
    policy : Policy, optional
        Placements, batch sizes and overlap. It affects speed and never results.
    h2o : H2OConfig, optional
        Which tokens stay cached. Default: all of them.
    weight_bits : int or "auto"
        Bits of weight matrices: 16 is `dtype`, 12 is bfloat16 with a shorter exponent, 8 and 4 are
        groups of integers with a scale and a zero point. "auto" keeps the quantized values of a
        GGUF file, and is 16 for other models.
    cache_bits : int
        Bits of cached keys and values: 16 is `dtype`, 8 and 4 are quantized groups.
    device : str
        auto, cpu, cuda or cuda:N.
    dtype : str
        auto, float16, bfloat16 or float32.
    offload_dir : path or sequence of path, optional
        Folder for files of the disk tier. Each LLM has a private folder in it, which `close`
        removes. With several folders, all weights of the disk tier are copied, and files are
        spread over the folders by the measured read rates of their disks.
    path : str or path, optional
        Folder or `.gguf` file of the weights, if `model` is only a name; ``_DUMMY_`` for random
        weights.
    activation_bits : int
        8: quantize activations to 8 bits in matmuls with weights of 8 or 4 bits, on a CPU only.
        16: don't.
    key_bits, value_bits : int, optional
        Bits of cached keys and of cached values: 16, 8 or 4. Default: `cache_bits`. 16 cannot be
        combined with 8 or 4. Keys in 8 and values in 4 bits lose almost no accuracy.
    attn_sparsity : float
        Fraction of the cached values that a new token reads, in (0, 1]: the values with the highest
        attention weights (FlexGen, arXiv 2303.06865, section 5). All keys are read. Below 1,
        results change. With a GPU and the cache in host memory, other values are not transferred.
        A cache on disk is read completely.
    weight_cache : str or path, optional
        Folder that keeps quantized weights for later runs. "auto": a folder in the user's cache.
        None: quantize in each run.
    calibration : str or path, optional
        Calibration text for weights of 8 or 4 bits (`engine.prepare`): a text file, or a
        `.jsonl` file with texts under `text`, `article` or `prompt`.
    verify : bool
        Check the checksum of each weight that is read from disk. A change raises `UserError` with
        file and offset. Hashing takes 0.03 s of a core for each GB (AMD EPYC).
    generation_config : bool
        Use generation_config.json for sampling parameters that are None. False: transformers'
        defaults.
    seed : int
        Seed of random weights.
    memory_limit, device_memory_limit : int, optional
        Upper bounds in bytes on the free host memory and the free GPU memory that the plan uses.
        PyTorch's GPU allocator is held to the second.
    workload : Workload, optional
        Expected lengths and batch sizes. If they do not fit in memory, loading is refused.
    texts : sequence of str
        Expected prompts. If the longest exceeds the model's positions, loading is refused.
    implementations : mapping, optional
        The autotune table: the fastest implementation by operation, bits and rows. Default: a table
        for the CPU's instruction set.
    batch_invariant : bool
        Generate the same tokens and log-probabilities for a prompt alone, in any batch, and with
        any number of threads, on CPUs of the same type. It costs some speed, works on a CPU only,
        and refuses models and options for which it is not possible.
    pipeline : Pipeline, optional
        The ranks of pipeline parallelism (`distributed.pipeline`).
    bounds : sequence of int, optional
        Boundaries of the pipeline stages: the first decoder layer of each rank, then the number of
        layers. Default: equal weight bytes. The first rank's value is used.
    progress : bool, optional
        Show progress bars. Default: on a terminal.
    trace : Trace, optional
        Records transfers, compute and memory.
    verbose : bool
        Print the memory plan.

    Raises
    ------
    UserError
        The model is missing or not supported, an argument is unknown, of a wrong type or out of
        range, or memory is too small.

    Examples
    --------
    >>> with LLM("smollm2-135m") as llm:                                    # doctest: +SKIP
    ...     llm.generate(["The capital of France is"], max_new_tokens=8)[0].text
    """

    @check_arguments
    def __init__(self, model: str | os.PathLike, *, policy: Policy | None = None,
                 h2o: H2OConfig | None = None, weight_bits: int | str = AUTO, cache_bits: int = 16,
                 device: str = "auto", dtype: str = "auto",
                 offload_dir: str | os.PathLike | Sequence | None = None,
                 path: str | os.PathLike | None = None, activation_bits: int = 16,
                 key_bits: int | None = None, value_bits: int | None = None,
                 attn_sparsity: float = 1.0, weight_cache: str | os.PathLike | None = AUTO,
                 calibration: str | os.PathLike | None = None, verify: bool = False,
                 generation_config: bool = True, seed: int = 0, memory_limit: int | None = None,
                 device_memory_limit: int | None = None, workload: Workload | None = None,
                 texts: Sequence[str] = (), implementations: AutotuneTable | None = None,
                 batch_invariant: bool = False, pipeline: Pipeline | None = None,
                 bounds: Sequence[int] | None = None, progress: bool | None = None,
                 trace: Trace | None = None, verbose: bool = False):
        check_not_forked()
        args = EngineArgs.from_options(locals())
        self.policy, self.h2o = args.policy, h2o
        self.call_lock = CallLock()
        self._control = ControlChannel(pipeline)
        self._renderer: tuple[str | None, ChatRenderer] | None = None
        self._sessions: weakref.WeakSet[StreamingSession | RequestSession] = weakref.WeakSet()
        began = time.perf_counter()
        with contextlib.ExitStack() as resources:
            prepared = _spread_files(prepare_model(args, self._control))
            self.model_config = prepared.source.config
            self.weight_options = prepared.source.weight_format.options
            self._cache = prepared.cache
            self._memory = _memory_check(prepared)
            if prepared.workload is not None:
                self._control.check_all_fit(partial(
                    self._memory.check_fits, self.policy, self._cache, prepared.workload,
                    loaded_bytes=None, show=verbose))
            draft = prepared.draft
            with self._control.working():
                runner = load_runner(prepared.source, prepared.device, prepared.args, resources,
                                     rank=prepared.rank)
                if draft is not None:
                    mtp = self.policy.speculate == "mtp"
                    runner.draft = load_runner(
                        draft.source, draft.device, draft.args, resources,
                        shared=runner.weights.resident_by_name if mtp else None)
            self._engine = Engine(runner, prepared.inputs, self._control, self._memory.check_fits,
                                  self._cache)
            self._resources = resources.pop_all()  # for close, or the finalizer
        # Not at exit: threads have ended by then, and folders have their own finalizers.
        self._finalizer = weakref.finalize(self, _close_unreferenced, self._engine,
                                           self._resources, os.getpid())
        self._finalizer.atexit = False
        runner.load_seconds = time.perf_counter() - began

    @exclusive
    def close(self) -> None:
        """Stop the workers, and remove files of the disk tier; a second call is a no-op.

        An LLM without references is closed, too, but other ranks of a pipeline are not notified.
        """
        self._finalizer.detach()
        try:
            for session in self._sessions:
                session.end()
            self._engine.close()
        finally:
            self._resources.close()

    @property
    def stats(self) -> RunStats | None:
        """Statistics of the latest call that has ended."""
        return self._engine.stats

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.model_config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations and cache that are not quantized."""
        return self._engine.runner.source.dtype

    @property
    def device(self) -> torch.device:
        """The device that computes: the CPU, or one GPU."""
        return self._engine.runner.device

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The transformers tokenizer; None if the model has none."""
        return self._engine.inputs.tokenizer

    @property
    def chat_end_tokens(self) -> tuple[int, ...]:
        """The ids that end an answer of `chat`: end tokens of the model and of the tokenizer."""
        return self._engine.inputs.chat_end_tokens

    def encode(self, prompt: str | Sequence[int], *, name: int | str = 0, new_tokens: int = 1,
               add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt, tokenized and checked as in `generate`.

        Parameters
        ----------
        prompt : str or sequence of int
        name : int or str
            Error messages call the prompt "prompt NAME".
        new_tokens : int
            Number of tokens to generate after the prompt, which must fit too.
        add_special_tokens : bool
            Add the tokenizer's special tokens, such as BOS, before a text. False for output of a
            chat template, which contains them.

        Raises
        ------
        UserError
            The prompt is empty or too long, or has tokens that the model does not have.
        """
        return self._engine.inputs.encode(prompt, name, new_tokens=new_tokens,
                                          add_special_tokens=add_special_tokens)

    def clamp_new_tokens(self, tokens: int, max_new_tokens: int) -> int:
        """Return `max_new_tokens`, or the number that fits after a prompt of `tokens` if less.

        The result is at least 1, because `encode` refuses a prompt that is too long by itself.
        """
        return self._engine.inputs.clamp_new_tokens(tokens, max_new_tokens)

    def max_model_len(self, limit: int) -> int:
        """Return `limit` tokens of a prompt and its continuation, or the positions if fewer."""
        return 1 + self.clamp_new_tokens(1, limit - 1)

    @exclusive
    def generate(self, prompts: Sequence[str | Sequence[int]],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 cut_gen_len: int | None = None, add_special_tokens: bool = True,
                 on_text: OnText | None = None, **sampling: Any) -> list[Output]:
        """Generate a continuation of each prompt.

        Parameters
        ----------
        prompts : sequence of str or of token id sequences
            Any number. They are sorted by length and computed in blocks of batches.
        sampling_params : SamplingParams or a sequence of them, optional
            One for all prompts: the seed of prompt i is derived from its `seed` and i. Or one for
            each prompt, with its own `seed`.
        cut_gen_len : int, optional
            Generate at most this many tokens, and project the times in `stats` to max_new_tokens.
        add_special_tokens : bool
            Add the tokenizer's special tokens before texts. A text that begins with BOS gets no
            second BOS.
        on_text : callable (index, text, last), optional
            Called after each token of each prompt, with the index of the prompt, the characters
            that the token completes, and whether it is the last token. The texts of a prompt make
            the text of its output. Sequences of a block come in turns.
        **sampling
            Fields of `SamplingParams` in place of `sampling_params`. Names and meaning as in
            transformers: max_new_tokens, do_sample, temperature, top_p, eos_token_id (-1: never
            stop early), stop_strings, seed.

        Returns
        -------
        list of Output
            In the order of the prompts.

        Raises
        ------
        UserError
            A prompt is empty or too long, an option is unknown, or the run does not fit in memory.
        """
        self._control.check_first_rank("generate")
        prompts = check_list("prompt", prompts)
        run = self._engine.begin_generation(
            prompts, expand_params(sampling_params, sampling, len(prompts)),
            cut_gen_len=cut_gen_len, add_special_tokens=add_special_tokens, on_text=on_text)
        self._engine.run_all(run)
        if cut_gen_len is not None and cut_gen_len < run.gen_len:
            self._engine.stats = run.stats.project(cut=cut_gen_len, gen_len=run.gen_len)
        return [self._engine.outputs.output(request, prompt)
                for request, prompt in zip(run.requests, prompts, strict=True)]

    @exclusive
    def generate_in_blocks(self, prompts: Sequence[str | Sequence[int]],
                           sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                           *, add_special_tokens: bool = True,
                           **sampling: Any) -> Iterator[dict[int, Output]]:
        """Generate a continuation of each prompt, and return outputs after each block.

        This call checks all prompts. Each step of the iterator computes a block. Other calls are
        allowed between two steps, but need their own memory. Closing or deleting the iterator
        cancels the remaining prompts. `stats` covers the blocks so far.

        Parameters
        ----------
        prompts, sampling_params, add_special_tokens, **sampling
            See `generate`, which returns the same outputs.

        Returns
        -------
        iterator of dict of int to Output
            Outputs by their index among the prompts.

        Raises
        ------
        UserError
            The same as for `generate`. The iterator also raises it if the LLM has been closed.
        """
        self._control.check_first_rank("generate_in_blocks")
        prompts = check_list("prompt", prompts)
        run = self._engine.begin_generation(
            prompts, expand_params(sampling_params, sampling, len(prompts)),
            add_special_tokens=add_special_tokens)

        def blocks() -> Iterator[dict[int, Output]]:
            try:
                while not run.finished:
                    yield {request.key: self._engine.outputs.output(request, prompts[request.key])
                           for request in self._run_block(run)}
            finally:
                # A generator may be deleted in any thread: this must not wait for a lock.
                self._engine.end(run)

        return blocks()

    @exclusive
    def _run_block(self, run: GenerationRun) -> list[Request]:
        """Compute the next block of a run. Return the requests that it finished."""
        return self._engine.run_block(run)

    def chat(self, conversations: Sequence, sampling_params: SamplingParams
             | Sequence[SamplingParams] | None = None, *, chat_template: str | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None,
             cut_gen_len: int | None = None, on_text: OnText | None = None, **sampling: Any
             ) -> list[Output]:
        """Answer conversations, which the tokenizer's chat template turns into prompts.

        An answer ends at any of `chat_end_tokens`, unless `eos_token_id` is given. Templates are
        rendered in a separate process with limited time and memory.

        Parameters
        ----------
        conversations : sequence of sequences of mappings
            The messages of each conversation, such as ``{"role": "user", "content": "Hello"}``. A
            sequence of messages is one conversation.
        sampling_params, cut_gen_len, on_text, **sampling
            See `generate`.
        chat_template : str, optional
            A jinja template in place of the tokenizer's.
        chat_template_kwargs : mapping, optional
            Arguments of the template, such as ``{"enable_thinking": False}``.

        Returns
        -------
        list of Output
            In the order of the conversations. `prompt` is the rendered template; `content` and
            `reasoning_content` are set.

        Raises
        ------
        UserError
            There is no tokenizer or no template, or the template raises an error; or as `generate`.
        """
        self._control.check_first_rank("chat")
        conversations = check_list("conversation", conversations)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        texts = self._chat_renderer(chat_template).render_all(conversations, chat_template_kwargs)
        # The template writes special tokens: the tokenizer adds none.
        prompts = [self._engine.inputs.encode(text, key, add_special_tokens=False)
                   for key, text in enumerate(texts)]
        params = [answer if answer.eos_token_id is not None
                  else replace(answer, eos_token_id=self.chat_end_tokens or None)
                  for answer in expand_params(sampling_params, sampling, len(prompts))]
        outputs = self.generate(prompts, params, cut_gen_len=cut_gen_len, on_text=on_text)
        parser, answers = ReasoningParser(self.tokenizer), []
        for output, text in zip(outputs, texts, strict=True):
            content, reasoning = parser.split(output)
            answers.append(replace(output, prompt=text, content=content,
                                   reasoning_content=reasoning))
        return answers

    def _chat_renderer(self, template: str | None) -> ChatRenderer:
        """Return the renderer of a template, whose process runs until another template or `close`.
        """
        self._check_open()
        if self._renderer is None or self._renderer[0] != template:
            if self._renderer is not None:
                self._renderer[1].close()
            renderer = ChatRenderer(self.tokenizer, template)
            self._resources.callback(renderer.close)
            self._renderer = template, renderer
        return self._renderer[1]

    def follow(self) -> None:
        """Run the worker loop of a pipeline: compute the blocks that the first rank starts.

        Call it on all ranks but the first. It returns when the first rank closes its LLM.

        Raises
        ------
        UserError
            Another rank has failed or is lost.
        """
        self.call_lock.check_process()
        self._check_open()
        run: GenerationRun | None = None
        while not isinstance(message := self._control.receive(), Close):
            if isinstance(message, Generate):
                if run is not None:
                    self._engine.end(run)
                run = self._engine.begin_generation(message.prompts, message.params,
                                                    cut_gen_len=message.cut_gen_len)
            elif run is not None:
                # The first rank gets this error too, and handles it.
                with contextlib.suppress(InsufficientMemory):
                    self._run_block(run)

    def loglikelihood(self, pairs: Sequence[tuple]) -> list[list[float]]:
        """Return the log-probability of each token of given continuations.

        With the full cache, context and continuation are computed as one prompt. With eviction,
        quantization or sparse attention, predictions depend on the state of the cache: then the
        context is the prompt, and the continuation is fed token by token (teacher forcing). Equal
        contexts of a batch are computed once.

        Parameters
        ----------
        pairs : sequence of (context, continuation)
            Text or token ids. An empty context is the start of a text. White space at the end of a
            text context is scored as part of the continuation. So is the end of a context that
            shares a token with the continuation.

        Returns
        -------
        list of list of float
            For each pair, the natural log-probability of each token of the continuation.
        """
        return [scored.log_probs for scored in self.score(pairs)]

    @exclusive
    def score(self, pairs: Sequence[tuple], *, on_logits: Callable[
            [list[tuple[int, int]], torch.Tensor], None] | None = None) -> list[Scored]:
        """Score continuations: log-probabilities, and whether greedy decoding generates them.

        Parameters
        ----------
        pairs : sequence of (context, continuation)
            See `loglikelihood`.
        on_logits : callable (targets, logits), optional
            Called with logits [rows, vocab] as they are computed. `targets` has the token that each
            row predicts: (pair, index into its continuation). The logits are valid during the call.

        Returns
        -------
        list of Scored
            In the order of the pairs.
        """
        self._control.check_single_rank("score")
        return self._engine.score(pairs, on_logits)

    @exclusive
    def fit_batch(self, *, prompt_len: int, gen_len: int, max_batch_size: int) -> int:
        """Set the policy's `gpu_batch_size` to the largest that fits in memory, and return it.

        Parameters
        ----------
        prompt_len, gen_len : int
            Maximum number of tokens of a prompt, and to generate.
        max_batch_size : int
            Upper bound of the result.

        Returns
        -------
        int
            `max_batch_size`, or a power of two below it. 1 if nothing fits: the run itself then
            raises.
        """
        check_int("max_batch_size", max_batch_size, ge=1)
        self._control.check_single_rank("fit_batch")
        self._check_open()
        self._engine.free_workspaces()  # their memory counts as free
        workload = Workload(prompt_len, gen_len, gpu_batch_size=max_batch_size,
                            num_gpu_batches=self.policy.num_gpu_batches)
        runner = self._engine.runner
        size = self._memory.largest_batch(self.policy, self._cache, workload,
                                          loaded_bytes=runner.loaded_bytes)
        self._engine.runner = runner.with_policy(
            replace(runner.args.policy, gpu_batch_size=size))
        self.policy = self._engine.runner.args.policy
        return size

    @exclusive
    def stream(self, *, max_tokens: int | None = None, past_context: bool = False
               ) -> StreamingSession:
        """Open a text of unlimited length, whose KV cache is kept between calls.

        Parameters
        ----------
        max_tokens : int, optional
            Maximum length of the text. Required with a full cache, to allocate memory.
        past_context : bool
            Continue past the model's trained positions, where output degrades. Needs RoPE. Rolling
            positions do not need it.

        Returns
        -------
        StreamingSession
            A context manager with `generate` and `loglikelihood`. Turns are read in chunks of the
            policy's `prefill_chunk`, or of 256 tokens, with eviction after each chunk.

        Raises
        ------
        UserError
            The budget is a ratio of a prompt, or generated tokens are not evicted; `max_tokens` is
            missing with a full cache; the policy has `speculate`; or the cache does not fit in
            memory.
        """
        self._control.check_single_rank("stream")
        self._check_open()
        session = StreamingSession(self._engine, self.call_lock, max_tokens=max_tokens,
                                   past_context=past_context)
        session.owner = self  # an open session keeps its LLM open
        self._sessions.add(session)
        return session

    @exclusive
    def open_session(self, *, max_model_len: int | None = None, block_seconds: float = 30.0
                     ) -> RequestSession:
        """Open a session for requests that come at any time, also from other threads.

        Its memory is allocated at once, for blocks of the policy's size.

        Parameters
        ----------
        max_model_len : int, optional
            Maximum number of tokens of a prompt and its continuation. Default: 4,096, or the
            model's positions if fewer.
        block_seconds : float
            How long requests that are added during a block may have to wait for the next one.

        Returns
        -------
        RequestSession
            A context manager with `add`, `step` and `abort`.

        Raises
        ------
        UserError
            Sequences of this length do not fit in memory.
        """
        self._control.check_single_rank("open_session")
        self._check_open()
        if max_model_len is None:
            max_model_len = self.max_model_len(MAX_MODEL_LEN)
        session = RequestSession(self._engine, self.call_lock, max_model_len=max_model_len,
                                 block_seconds=block_seconds)
        session.owner = self
        self._sessions.add(session)
        return session

    def memory_plan(self, max_model_len: int) -> tuple[MemoryPlan, MemoryLimits]:
        """Return the memory plan of `open_session`, and the memory that is free before it."""
        runner, workload = self._engine.session_runner(max_model_len)
        return self._memory.plan(runner.args.policy, self._cache, workload,
                                 loaded_bytes=runner.loaded_bytes)

    @exclusive
    def probe(self, pairs: Sequence[tuple], attend: Callable[..., torch.Tensor]
              ) -> list[list[float]]:
        """Score continuations with `attend` in place of the attention over a full cache.

        Use it to record attention weights, or to test other attention patterns. Nothing is cached;
        one pair at a time is computed in one prefill.

        Parameters
        ----------
        pairs : sequence of (context, continuation)
            Text or token ids.
        attend : callable (layer, pair, q, k, v) -> Tensor [rows, heads, head_dim]
            `layer` counts the layers with attention from 0, and `pair` the pairs. The rows are the
            tokens of context and continuation except the last. q is [rows, heads, head_dim], k and
            v are [rows, kv_heads, head_dim]; q and k are rotated. They are valid during the call.
            Ordinary causal attention is ``kernels.ops.prefill_attention(q, k, v, [rows])``.

        Returns
        -------
        list of list of float
            For each pair, the natural log-probability of each token of the continuation.
        """
        self._control.check_single_rank("probe")
        if self.model_config.attention:
            raise UserError("probe supports only default attention, and layers of this model have "
                            "windows, soft caps, attention sinks or another scale: use another "
                            "model")
        if not callable(attend):
            raise UserError(f"attend must be a function, got {short_repr(attend)}")
        return [scored.log_probs for scored in self._engine.probe(pairs, attend)]

    def _check_open(self) -> None:
        self._engine.check_open()


def _close_unreferenced(engine: Engine, resources: contextlib.ExitStack, process: int) -> None:
    """Close an LLM that has no references.

    The garbage collector may call it in any thread, even in one that holds a lock that closing
    needs. So a new thread closes it, and this one waits for a limited time.
    """
    if os.getpid() != process:
        return

    def close() -> None:
        with resources:
            engine.close_runs()

    thread = threading.Thread(target=close, name="closing a dropped LLM")
    thread.start()
    thread.join(_CLOSE_TIMEOUT)


def _spread_files(prepared: PreparedModel) -> PreparedModel:
    """Return a prepared model whose offload folders have shares by the rates of their disks."""
    args = prepared.args
    if not args.offload_dir.striped:
        return prepared
    from flexgen_h2o.planning.calibrate import by_measured_rates  # loads all that it measures

    dirs = by_measured_rates(prepared.device, args.offload_dir)
    return replace(prepared, args=replace(args, offload_dir=dirs))


def _memory_check(prepared: PreparedModel) -> MemoryCheck:
    """Return the memory check for runs of an LLM with these arguments."""
    source, args, rank, draft = prepared.source, prepared.args, prepared.rank, prepared.draft
    return MemoryCheck(
        model=source.config, weights=source.weight_format.options,
        itemsize=source.dtype.itemsize,
        writes_weights=source.writes_weights or args.offload_dir.striped,
        offload_dir=args.offload_dir,
        max_bytes={"cpu": args.memory_limit, "gpu": args.device_memory_limit},
        device_bytes=prepared.device.free_bytes,
        stage=None if rank is None else rank.stage,
        groups=1 if rank is None else rank.groups,
        draft=None if draft is None else DraftModel(
            draft.source.config,
            None if args.policy.speculate == "mtp" else draft.source.weight_format.options),
        batch_invariant=args.batch_invariant)
