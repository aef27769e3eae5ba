"""Structured outputs: masks over the vocabulary that keep texts in a given form.

llguidance follows each text with a parser and says which tokens may come next. The masks of the
next step are computed in a thread, beside the step's matrix products.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from flexgen_h2o.config.sampling import StructuredOutputs
from flexgen_h2o.engine.blocks import Request
from flexgen_h2o.errors import StructureError, UserError


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    vocab_size : int
        The number of the model's token ids.

    Raises
    ------
    UserError
        llguidance is missing, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        try:
            from llguidance import hf

            self._tokenizer = hf.from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)))
        except (ImportError, ValueError) as error:
            raise UserError("structured_outputs need llguidance (pip install llguidance) and a "
                            f"tokenizer that it knows: {error}") from None
        self._vocab_size = vocab_size
        self._matcher = lru_cache(maxsize=64)(self._compile)

    def _compile(self, outputs: StructuredOutputs) -> Any:
        from llguidance import LLMatcher

        # If its limits are exceeded, the first mask of each text raises.
        return LLMatcher(self._tokenizer, outputs.compile(), log_level=0)

    def masks(self, outputs: StructuredOutputs, ends: Collection[int]) -> TokenMasks:
        """Return the masks of requests with this form.

        Parameters
        ----------
        ends : collection of int
            Tokens that end a text.
        """
        if not ends:
            raise UserError("structured_outputs need an end token, and the text has none: give "
                            "eos_token_id")
        return TokenMasks(self._matcher(outputs), self._vocab_size, ends,
                          self._tokenizer.eos_tokens)


@dataclass
class _State:
    """The parser of a request, after `count` of its tokens, and the allowed next tokens."""

    matcher: Any
    count: int = 0
    allowed: np.ndarray | None = None  # bool [vocab]


class TokenMasks:
    """The tokens that may come next in each of several texts of one form.

    Parameters
    ----------
    matcher : LLMatcher
        At the beginning of a text; it is copied.
    ends : collection of int
        End tokens, which are allowed where the text may end, and only there.
    eos_tokens : collection of int
        The tokenizer's end tokens, which are allowed only if they are among `ends`.
    """

    def __init__(self, matcher: Any, vocab_size: int, ends: Collection[int],
                 eos_tokens: Collection[int]):
        self._matcher, self._vocab_size = matcher, vocab_size
        self._ends, self._eos_tokens = ([token for token in tokens if token < vocab_size]
                                        for tokens in (ends, eos_tokens))
        self._states: dict[int, _State] = {}
        self._ahead: list[Future] = []
        self._pool: ThreadPoolExecutor | None = None

    def apply(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """Return logits [requests, vocab] with -infinity at tokens that may not come next.

        Raises
        ------
        StructureError
            A text left its form, or following it takes too much time or memory.
        """
        wait(self._ahead)  # errors of texts that have ended do not count
        self._ahead = []
        allowed = np.ones(tuple(logits.shape), bool)
        for row, request in enumerate(requests):
            if not request.finish_reason:
                allowed[row, : self._vocab_size] = self._advance(request.key, request.generated)
                allowed[row, self._vocab_size :] = False
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), float("-inf"))

    def prepare(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """Start to compute the masks after these tokens, which are not appended yet."""
        self._pool = self._pool or ThreadPoolExecutor(1, "structured outputs")
        self._ahead = [
            self._pool.submit(self._advance, request.key, [*request.generated, token])
            for request, token in zip(requests, tokens, strict=True)
            if not (request.finish_reason or token in self._ends)]

    def forget(self, request: Request) -> None:
        """Drop the parser of a request that ends or begins again."""
        wait(self._ahead)
        self._states.pop(request.key, None)

    def _advance(self, key: int, tokens: Sequence[int]) -> np.ndarray:
        """Return which tokens may follow `tokens`, all that request `key` has generated."""
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _State(self._matcher.deep_copy())
        if state.count > len(tokens):  # a prediction was not accepted
            state.matcher.rollback(state.count - len(tokens))
        elif state.count < len(tokens):
            state.matcher.consume_tokens(list(tokens[state.count :]))
        elif state.allowed is not None:
            return state.allowed
        state.count, state.allowed = len(tokens), None
        bits = np.frombuffer(state.matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)
        allowed[self._eos_tokens] = False
        allowed[self._ends] = state.matcher.is_accepting()
        if state.matcher.is_error() or not allowed.any():
            reason = state.matcher.get_error() or "the vocabulary has no token for it"
            raise StructureError(f"prompt {key} cannot be continued in the form of its "
                                 f"structured_outputs: {reason}", key)
        state.allowed = allowed
        return allowed
