"""Stream: one text without end through one cache, turn after turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from flexgen_h2o.cache.layout import CacheSize, slots_of
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.config.sampling import mixed_seed, sampling_params
from flexgen_h2o.config.validation import check_bool, check_int, typed
from flexgen_h2o.engine.batch import Request, next_turn
from flexgen_h2o.engine.calls import Session, one_at_a_time
from flexgen_h2o.engine.runner import Runner
from flexgen_h2o.engine.sampling import DecodeScorer, LogitsConsumer
from flexgen_h2o.engine.tokenizer import Prompts
from flexgen_h2o.engine.workspace import Workspace, WorkspaceSize
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.h2o.budget import cached
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.models.positions import check_stream
from flexgen_h2o.outputs import Output
from flexgen_h2o.planning.memory_plan import MemoryCheck

CHUNK = 256
"""Tokens of a turn that are read together, unless the LLM says another number."""

_ENDLESS = 2**31 - 2  # positions are 32-bit


@runtime_checkable
class Streamer(Protocol):
    """Gets tokens as they come: transformers' interface, which its `TextStreamer` has."""

    def put(self, value: torch.Tensor, /) -> None:
        """Take a turn's token ids, int64 [1, tokens], and then each new token, int64 [1]."""

    def end(self) -> None:
        """Know that the last token has come."""


class Stream(Session):
    """A text that goes on: what comes next is put onto what the cache holds of it.

    An evicting cache keeps its size whatever comes, and so does the time of a token; a turn is read
    in chunks, each of which is evicted from before the next. Make one with `LLM.stream`. While
    it is open the LLM can do other work; streams and calls take turns, from other threads too.

    Parameters
    ----------
    runtime : Runner
        With chunks as this stream has them.
    prompts : Prompts
    memory : MemoryCheck
        Of the runtime's model.
    max_tokens : int or None
        Of the whole text; None: no end.
    past_context : bool
        Go on where the model's trained positions end.

    Attributes
    ----------
    stats : RunStats or None
        Of the last call.
    owner : object
        The LLM that made it: one that nothing refers to is closed.
    """

    owner: object = None

    def __init__(self, runtime: Runner, prompts: Prompts, memory: MemoryCheck, *,
                 max_tokens: int | None, past_context: bool):
        if max_tokens is not None:
            check_int("max_tokens", max_tokens, low=1)
        check_bool("past_context", past_context)
        policy, cache = runtime.settings.policy, runtime.settings.cache
        self._h2o = cache.h2o
        self._chunk = policy.prefill_chunk or CHUNK
        self._limit = check_stream(runtime.config, self._h2o, chunk=self._chunk,
                                   max_tokens=max_tokens, past_context=past_context)
        self._layers = runtime.config.num_layers
        self._runtime, self._prompts, self.calls = runtime, prompts, runtime.calls
        self._past = 0  # tokens that the model has computed
        self._pending: list[int] = []  # the newest one, which it has not
        self._turns = 0
        self.stats: RunStats | None = None
        most = BatchLayout((max_tokens or _ENDLESS,), 0)
        slots = slots_of(most.sizes, self._h2o, self._layers)
        memory.check_fits(policy, cache, Workload(
            prompt_len=self._chunk, gen_len=max(1, max(slots) - self._chunk + 1),
            gpu_batch_size=1, num_gpu_batches=1), loaded_bytes=runtime.loaded_bytes)
        workspace = runtime.workspace(WorkspaceSize(CacheSize(1, 1, slots), self._chunk))
        workspace.cache.begin([most])
        self._workspace: Workspace | None = workspace

    @one_at_a_time
    def close(self) -> None:
        """Let go of the cache; a second call does nothing."""
        self.end()

    def end(self) -> None:
        """Close from within a call; see `close`."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()

    @property
    def tokens(self) -> int:
        """Tokens of the text so far, given and generated."""
        return self._past + len(self._pending)

    @property
    def cached_tokens(self) -> int:
        """Tokens that are cached now, in the layer that holds most."""
        return max(cached(self._h2o, layer, self._past, 0) for layer in range(self._layers))

    @one_at_a_time
    @typed
    def generate(self, turn: str | Sequence[int], *, streamer: Streamer | None = None,
                 **sampling: Any) -> Output:
        """Put a turn onto the text and continue it.

        Parameters
        ----------
        turn : str or sequence of int
            Text or token ids. Special tokens that a tokenizer puts in front of texts come in front
            of the first turn alone.
        streamer : Streamer, optional
            Such as transformers' `TextStreamer`: gets tokens as they come.
        **sampling
            As of `LLM.generate`. Penalties look at this turn and its answer.

        Returns
        -------
        Output

        Raises
        ------
        UserError
            The turn is empty, an option is unknown, the text would get longer than it may be.
        """
        params = sampling_params(sampling)
        params = replace(params, seed=mixed_seed(params.seed, self._turns))
        ids = self._encode(turn)
        self._check_length(len(ids) + params.max_new_tokens)
        request = Request(self._turns, [*self._pending, *ids], seed=params.seed, params=params)
        on_token: Callable[[int], None] | None = None
        if streamer is not None:
            on_token = lambda token: streamer.put(torch.tensor([token]))  # noqa: E731
        consumer = self._prompts.generation({self._turns: params}, on_token=on_token)
        if streamer is not None:
            streamer.put(torch.tensor([ids]))
        self._run(request, params.max_new_tokens - 1, consumer)
        if streamer is not None:
            streamer.end()
        self._turns += 1
        return self._prompts.output(turn, ids, request)

    @one_at_a_time
    def loglikelihood(self, text: str | Sequence[int]) -> list[float]:
        """Put a given text on, token by token as if it had been generated.

        Returns the natural log-probability of each token after all that came before. The first
        token of a stream has none: then there is one fewer.
        """
        ids = self._encode(text)
        self._check_length(len(ids))
        (head, *tail) = [*self._pending, *ids]
        if not tail:
            self._pending = [head]
            return []
        if not self._past:
            request, consumer, new = Request(0, [head]), DecodeScorer({0: tail}), len(tail) - 1
        else:  # the newest token, too, as if it had been generated
            request, new = Request(0, [], [head]), len(tail)
            consumer = DecodeScorer({0: [head, *tail]})
        self._run(request, new, consumer)
        return consumer.log_probs[0]

    def _check_open(self) -> None:
        if self._workspace is None:
            raise UserError("this stream has ended: open a new one")

    def _encode(self, text: str | Sequence[int]) -> list[int]:
        self._check_open()
        most, why = self._limit
        left = None if most is None else most - self.tokens
        return self._prompts.encode(text, self._turns, goes_on=self.tokens > 0,
                                    limit=(left, f"the {left} that are left of {why}"))

    def _check_length(self, new: int) -> None:
        most, why = self._limit
        if most is not None and self.tokens + new > most:
            raise UserError(f"the stream has {self.tokens} tokens, and {new} more would exceed "
                            f"{why}")

    def _run(self, request: Request, new: int, consumer: LogitsConsumer) -> None:
        """Compute the request's tokens and up to `new` that the consumer appends to it."""
        assert self._workspace is not None  # callers have checked
        batch = next_turn(request, new, past=self._past, chunk=self._chunk)
        try:
            self.stats = self._runtime.run(self._workspace, [batch], consumer, keeps=True)
        except BaseException:
            self.end()  # what the cache holds is unknown
            raise
        self._past += len(request.prompt) + len(request.generated) - 1
        self._pending = request.generated[-1:]
