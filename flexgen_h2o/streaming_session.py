"""StreamingSession: a text of unlimited length in one cache, turn after turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from flexgen_h2o.config.policy import Workload
from flexgen_h2o.config.sampling import mix_seed, sampling_params
from flexgen_h2o.config.validation import check_arguments, check_bool, check_int
from flexgen_h2o.engine.blocks import Request, batch_of_one
from flexgen_h2o.engine.exclusive import CallLock, ExclusiveResource, exclusive
from flexgen_h2o.engine.generation import Engine
from flexgen_h2o.engine.sampling import LogitsConsumer
from flexgen_h2o.engine.scoring import DecodeScorer
from flexgen_h2o.engine.workspace import Workspace, WorkspaceSize
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.h2o.budget import num_cached
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.models.positions import check_stream
from flexgen_h2o.outputs import Output

CHUNK = 256
"""Tokens of a turn that are computed together, unless the policy has a `prefill_chunk`."""

_UNLIMITED = 2**31 - 2  # positions are 32-bit


@runtime_checkable
class Streamer(Protocol):
    """Receiver of tokens as they are generated. transformers' `TextStreamer` is one."""

    def put(self, value: torch.Tensor, /) -> None:
        """Receive a turn's token ids, int64 [1, tokens], and then each new token, int64 [1]."""

    def end(self) -> None:
        """Receive the end of an answer, after its last token."""


class StreamingSession(ExclusiveResource):
    """A text that turns are appended to. The cache keeps its contents between turns.

    With eviction, the cache and the time of a token stay constant. A turn is computed in chunks,
    with eviction after each. `LLM.stream` opens one. While it is open, the LLM takes other calls;
    calls from several threads take turns.

    Parameters
    ----------
    engine : Engine
    call_lock : CallLock
        Lock of the LLM, which the session shares.
    max_tokens : int or None
        Maximum number of tokens of the whole text. None: no limit.
    past_context : bool
        Continue past the model's trained positions.

    Attributes
    ----------
    stats : RunStats or None
        Statistics of the latest call.
    owner : object
        The LLM that opened it. An LLM without references is closed.
    """

    owner: object = None

    def __init__(self, engine: Engine, call_lock: CallLock, *, max_tokens: int | None,
                 past_context: bool):
        if max_tokens is not None:
            check_int("max_tokens", max_tokens, ge=1)
        check_bool("past_context", past_context)
        policy = engine.runner.args.policy
        if policy.speculate is not None:
            raise UserError("a stream does not draft tokens: leave the policy's speculate out")
        self._chunk = policy.prefill_chunk or CHUNK
        runner = engine.runner.with_prefill_chunk(self._chunk)
        self._h2o = runner.h2o
        self._limit = check_stream(runner.config, self._h2o, chunk=self._chunk,
                                   max_tokens=max_tokens, past_context=past_context)
        self._layers = runner.cached_config.num_layers
        self._runner, self._inputs, self._outputs = runner, engine.inputs, engine.outputs
        self.call_lock = call_lock
        self._past = 0  # tokens that have been computed
        self._pending: list[int] = []  # the newest token, which has not
        self._turns = 0
        self.stats: RunStats | None = None
        layout = BatchLayout((max_tokens or _UNLIMITED,), 0)
        size = WorkspaceSize.of_one(layout.sizes, self._h2o, self._layers, rows=self._chunk)
        engine.check_fits(runner.args.policy, runner.args.cache, Workload(
            prompt_len=self._chunk, gen_len=max(1, max(size.cache.slots) - self._chunk + 1),
            gpu_batch_size=1, num_gpu_batches=1), loaded_bytes=runner.loaded_bytes)
        workspace = runner.workspace(size)
        workspace.begin([layout])
        self._workspace: Workspace | None = workspace

    @exclusive
    def close(self) -> None:
        """Free the cache; a second call is a no-op."""
        self.end()

    def end(self) -> None:
        """Free the cache from within a call: see `close`."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()

    @property
    def tokens(self) -> int:
        """Number of tokens of the text so far, given or generated."""
        return self._past + len(self._pending)

    @property
    def cached_tokens(self) -> int:
        """Maximum number of cached tokens of a layer."""
        return max(num_cached(self._h2o, layer, self._past, 0) for layer in range(self._layers))

    @exclusive
    @check_arguments
    def generate(self, turn: str | Sequence[int], *, streamer: Streamer | None = None,
                 **sampling: Any) -> Output:
        """Append a turn to the text, and generate its continuation.

        Parameters
        ----------
        turn : str or sequence of int
            Text or token ids. The tokenizer's special tokens are added before the first turn only.
        streamer : Streamer, optional
            Receives tokens as they are generated, such as transformers' `TextStreamer`.
        **sampling
            See `LLM.generate`. Penalties count this turn and its answer.

        Returns
        -------
        Output

        Raises
        ------
        UserError
            The turn is empty, an option is unknown, or the text would become too long.
        """
        params = sampling_params(sampling)
        params = replace(params, seed=mix_seed(params.seed, self._turns))
        ids = self._encode(turn)
        self._check_length(len(ids) + params.max_new_tokens)
        request = Request(self._turns, [*self._pending, *ids], seed=params.seed, params=params)
        on_token: Callable[[Request], None] | None = None
        if streamer is not None:
            on_token = lambda request: streamer.put(  # noqa: E731
                torch.tensor(request.generated[-1:]))
        sampler = self._outputs.sampler({self._turns: params}, on_token=on_token)
        if streamer is not None:
            streamer.put(torch.tensor([ids]))
        self._run(request, params.max_new_tokens - 1, sampler)
        if streamer is not None:
            streamer.end()
        self._turns += 1
        return self._outputs.output(request, turn, ids)

    @exclusive
    def loglikelihood(self, text: str | Sequence[int]) -> list[float]:
        """Append a text token by token (teacher forcing), and return log-probabilities.

        Returns
        -------
        list of float
            The natural log-probability of each token after all tokens before it. The first token
            of a stream has none.
        """
        ids = self._encode(text)
        self._check_length(len(ids))
        (first, *following) = [*self._pending, *ids]
        if not following:
            self._pending = [first]
            return []
        if self._past:  # the pending token comes as a generated one
            request, continuation = Request(0, [], [first]), [first, *following]
        else:
            request, continuation = Request(0, [first]), following
        scorer = DecodeScorer({0: continuation})
        self._run(request, len(continuation) - 1, scorer)
        return scorer.scores[0].log_probs

    def _check_open(self) -> None:
        if self._workspace is None:
            raise UserError("this stream has ended: open a new one")

    def _encode(self, text: str | Sequence[int]) -> list[int]:
        self._check_open()
        limit, reason = self._limit
        remaining = None if limit is None else limit - self.tokens
        return self._inputs.encode(text, self._turns, add_special_tokens=self.tokens == 0,
                                   limit=(remaining, f"the {remaining} that are left of {reason}"))

    def _check_length(self, new: int) -> None:
        """Raise `UserError` if `new` more tokens exceed the limit."""
        limit, reason = self._limit
        if limit is not None and self.tokens + new > limit:
            raise UserError(f"the stream has {self.tokens} tokens, and {new} more would exceed "
                            f"{reason}")

    def _run(self, request: Request, new: int, consumer: LogitsConsumer) -> None:
        """Compute the request's prompt, and up to `new` tokens that the consumer appends."""
        assert self._workspace is not None  # callers have checked
        batch = batch_of_one(request, new, past=self._past, chunk=self._chunk)
        try:
            self.stats = self._runner.run_block(self._workspace, [batch], consumer, keep_cache=True)
        except BaseException:
            self.end()  # the state of the cache is unknown
            raise
        self._past += len(request.prompt) + len(request.generated) - 1
        self._pending = request.generated[-1:]
