"""Results: generated continuations, and scores of given continuations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogProb:
    """The natural log-probability of a generated token, by the model's logits before sampling.

    Attributes
    ----------
    token_id : int
    log_prob : float
    top : tuple of (int, float)
        The most likely tokens with their log-probabilities, in descending order. There are
        `SamplingParams.logprobs` of them.
    """

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """The generated continuation of one prompt.

    Attributes
    ----------
    prompt : str or None
        None if the prompt was token ids.
    prompt_token_ids : list of int
    token_ids : list of int
        Generated tokens. The last may be an end token.
    text : str or None
        Decoded after the prompt, without special tokens and without an incomplete character at the
        end. None without a tokenizer.
    finish_reason : str
        ``"stop"`` after an end token or a stop string, else ``"length"``. A stop string is part of
        the text; characters of its last token may follow.
    log_probs : list of TokenLogProb or None
        One per generated token, if `SamplingParams.logprobs` is set.
    content, reasoning_content : str or None
        The parts of an answer of `LLM.chat`.
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

    Attributes
    ----------
    log_probs : list of float
        Natural log-probability of each token.
    likeliest : list of bool
        Whether each token has the highest probability.
    """

    log_probs: list[float]
    likeliest: list[bool]

    @property
    def greedy(self) -> bool:
        """True if greedy decoding would generate this continuation."""
        return all(self.likeliest)
