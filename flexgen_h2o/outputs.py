"""Results: a generated continuation, and the score of a given one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogProb:
    """The natural log-probability of a generated token, by the model's own logits.

    `top` are the likeliest tokens at its place with theirs, the likeliest first, as many as
    `SamplingParams.logprobs` says. Penalties, temperature and cuts of the sampling do not count.
    """

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """The generated continuation of one prompt.

    finish_reason is ``"stop"`` (an end token came, which is the last of token_ids and not in the
    text, or a stop string, with which token_ids and text end, but for what its last token has after
    it) or ``"length"``.
    prompt and text are None where there is no text (token id prompts, no tokenizer).
    log_probs has an entry for each of token_ids where `SamplingParams.logprobs` asks for it.
    text is decoded after the prompt, without special tokens and without an incomplete character at
    its end. Answers of `LLM.chat` have it also as content and reasoning_content, which is None for
    an answer without reasoning.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    log_probs: list[TokenLogProb] | None = None
    content: str | None = None
    reasoning_content: str | None = None


@dataclass(frozen=True)
class Scored:
    """The score of a given continuation.

    `log_probs` are the natural log-probabilities of its tokens; `likeliest` says of each token
    whether it is the likeliest at its place.
    """

    log_probs: list[float]
    likeliest: list[bool]

    @property
    def greedy(self) -> bool:
        """True if greedy decoding would write this continuation."""
        return all(self.likeliest)
