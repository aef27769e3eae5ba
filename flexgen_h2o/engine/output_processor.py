"""Outputs of requests: rules of sampling and stopping, and decoded texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.blocks import Request
from flexgen_h2o.engine.detokenization import Detokenizer, IncrementalDetokenizer, StopStrings
from flexgen_h2o.engine.sampling import GenerationRules, GenerationSampler, Sampler
from flexgen_h2o.engine.structured_outputs import GrammarCompiler
from flexgen_h2o.engine.tokenizer import InputProcessor
from flexgen_h2o.errors import UserError, short_repr
from flexgen_h2o.outputs import Output

OnText = Callable[[int, str, bool], object]
"""Gets the index of a prompt, the text of a new token, and whether it is the last: `LLM.generate`.
"""

_log = logging.getLogger(__name__)


class OutputProcessor:
    """Makes the samplers of requests, and decodes generated tokens.

    Parameters
    ----------
    inputs : InputProcessor
        Its tokenizer is used.
    """

    def __init__(self, inputs: InputProcessor):
        self._inputs = inputs
        self._defaults = inputs.source.generation
        self._warned = False

    @cached_property
    def detokenizer(self) -> Detokenizer | None:
        """The detokenizer; None if the model has no tokenizer."""
        tokenizer = self._inputs.tokenizer
        return None if tokenizer is None else Detokenizer(tokenizer)

    def sampler(self, params: Mapping[int, SamplingParams], *, max_tokens: int | None = None,
                on_token: Callable[[Request], None] | None = None) -> GenerationSampler:
        """Return the sampler of requests.

        Parameters
        ----------
        params : mapping of int to SamplingParams
            Sampling parameters by request key. Requests that differ only in the seed are sampled
            together.
        max_tokens : int, optional
            Maximum number of tokens to generate.
        on_token : callable, optional
            See `GenerationSampler`.
        """
        shared: dict[SamplingParams, GenerationRules] = {}
        return GenerationSampler({key: self.rules(params_of_prompt, shared, max_tokens=max_tokens)
                                  for key, params_of_prompt in params.items()}, on_token=on_token)

    def rules(self, params: SamplingParams,
              shared: MutableMapping[SamplingParams, GenerationRules], *,
              max_tokens: int | None = None) -> GenerationRules:
        """Return the rules of a request: from `shared` if only the seed differs, or add them to it.

        See `sampler` for parameters and errors.
        """
        unseeded = replace(params, seed=0)
        rules = shared.get(unseeded)
        if rules is None:
            rules = shared[unseeded] = self._rules(unseeded, max_tokens or params.max_new_tokens)
        return rules

    def _rules(self, params: SamplingParams, max_tokens: int) -> GenerationRules:
        params = self._defaults.apply(params)
        if params.eos_token_id is None:
            self._warn_of_tokenizer_eos()
        self._inputs.check_tokens("bad_words_ids", chain.from_iterable(params.bad_words_ids or ()))
        self._inputs.check_tokens("logit_bias", dict(params.logit_bias))
        ends = self._ends(params)
        grammar = params.structured_outputs
        masks = None if grammar is None else self._grammars.masks(grammar, ends)
        return GenerationRules(
            Sampler(params, ends, masks), min(max_tokens, params.max_new_tokens), frozenset(ends),
            self._stops(params.stop_strings), params.logprobs)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        self._inputs.check_tokenizer(", and structured_outputs are text: leave them out")
        return GrammarCompiler(self._inputs.tokenizer, self._inputs.vocab_size)

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the tokens that end a text."""
        is_set = params.eos_token_id is not None
        ends = params.end_tokens if is_set else self._defaults.end_tokens
        eos = self._inputs.tokenizer_eos
        if params.structured_outputs and not (is_set or ends) and eos is not None:
            ends = (eos,)  # a text with a grammar must be able to end
        return (*ends, *params.stop_token_ids)

    def _warn_of_tokenizer_eos(self) -> None:
        """Warn once if the tokenizer's EOS ends only chats."""
        eos = self._inputs.tokenizer_eos
        if eos is not None and not self._warned:
            self._warned = True
            named = ", ".join(map(str, self._defaults.end_tokens)) or "none"
            _log.warning("%s: the tokenizer's EOS, %s (%d), is not an end token of the model (%s) "
                         "and only ends chats; give eos_token_id to choose", self._inputs.name,
                         self._inputs.tokenizer.eos_token, eos, named)

    def output(self, request: Request, prompt: str | Sequence[int], ids: list[int] | None = None
               ) -> Output:
        """Return the output of a finished request. The text is without the end token.

        Parameters
        ----------
        prompt : str or sequence of int
            The prompt of the user.
        ids : list of int, optional
            Token ids of the prompt. Default: `request.prompt`.
        """
        tokens = request.generated
        text = None if self.detokenizer is None else self.detokenizer.text(
            tokens[:-1] if self._has_end(request) else tokens, request.prompt,
            self._kept_special_ids(request))
        return Output(prompt if isinstance(prompt, str) else None,
                      request.prompt if ids is None else ids, tokens, text, request.finish_reason,
                      request.log_probs or None)

    def text_callback(self, on_text: OnText) -> Callable[[Request], None]:
        """Return a callback for each new token of a request, which calls `on_text` with its text.

        See `LLM.generate`. All texts of a request make the text of its `output`.
        """
        if not callable(on_text):
            raise UserError(f"on_text must be a function, got {short_repr(on_text)}")
        self._inputs.check_tokenizer(", and on_text gets text: leave it out")
        new_text: dict[int, Callable[[], str]] = {}

        def on_token(request: Request) -> None:
            if request.key not in new_text:
                new_text[request.key] = self.new_text(request)
            on_text(request.key, new_text[request.key](), bool(request.finish_reason))

        return on_token

    def new_text(self, request: Request) -> Callable[[], str]:
        """Return a function that, after each token, returns the characters that it completes."""
        decoder = IncrementalDetokenizer(self.detokenizer, request.prompt,
                                         self._kept_special_ids(request))
        return lambda: "" if self._has_end(request) else decoder.step(request.generated[-1])

    def _has_end(self, request: Request) -> bool:
        """Return True if the last token is an end token, which is not part of the text."""
        return (request.finish_reason == "stop"
                and request.generated[-1] in self._ends(request.params))

    def _kept_special_ids(self, request: Request) -> Collection[int]:
        """Return the special tokens whose names are part of the text."""
        return () if request.params.skip_special_tokens else range(self._inputs.vocab_size)

    def _stops(self, strings: Sequence[str] | None) -> StopStrings | None:
        """Return the detector of stop strings; None without stop strings."""
        if not strings:
            return None
        self._inputs.check_tokenizer(", and stop_strings are text: leave them out")
        return StopStrings(strings, self.detokenizer.token_bytes)
