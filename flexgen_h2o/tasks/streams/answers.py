"""Times of a stream's turns, in rows and in one line at the end. No torch.

A stream, or anything with its `generate`, `tokens`, `cached_tokens` and `stats`, is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from flexgen_h2o.files.conversations import Turn
from flexgen_h2o.metrics.provenance import ORIGIN, origin
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.storage.free_memory import resident_bytes

FIGURES = ("question_id", "turn", "position", "prompt_tokens", "generated_tokens", "cached_tokens",
           "prefill_seconds", "decode_ms_per_token", "process_bytes", "kv_cache_bytes")
COLUMNS = (*ORIGIN, "device", "model", "dtype", *FIGURES)


@dataclass(frozen=True)
class Answer:
    """One turn and its answer. `position` is the tokens that the stream had before the turn;
    `cached_tokens` those of the layer that holds most, after it. `process_bytes` are resident.
    """

    turn: Turn
    text: str
    finish_reason: str
    position: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    process_bytes: int
    stats: RunStats

    def figures(self) -> dict[str, object]:
        """`FIGURES` by name; None for the time of a decode step if there was none."""
        steps = self.stats.step_seconds
        return {
            "question_id": self.turn.question_id, "turn": self.turn.number,
            "position": self.position, "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens, "cached_tokens": self.cached_tokens,
            "prefill_seconds": self.stats.prefill_seconds,
            "decode_ms_per_token": 1000 * fmean(steps) if steps else None,
            "process_bytes": self.process_bytes, "kv_cache_bytes": self.stats.kv_cache_bytes,
        }

    def record(self) -> dict[str, object]:
        """A line of ``--output-path``."""
        return {"text": self.text, "finish_reason": self.finish_reason, **self.figures()}

    def row(self) -> dict[str, object]:
        """A row of ``--csv``, by `COLUMNS`."""
        stats = self.stats
        return {**origin(), "device": stats.device, "model": stats.model, "dtype": stats.dtype,
                **self.figures()}


def answer(stream, turns: Iterable[Turn], encode: Callable[[str], object], *, streamer,
           sampling: dict[str, object]) -> Iterator[Answer]:
    """Have each turn answered, one after the other through the one stream.

    Parameters
    ----------
    stream
        What `LLM.stream` gives.
    turns : iterable of Turn
    encode : callable
        What `stream.generate` takes, of a turn's text.
    streamer
        In transformers' form; None: nothing is told as it comes.
    sampling : dict
        Fields of `SamplingParams`.
    """
    for turn in turns:
        position = stream.tokens
        try:
            out = stream.generate(encode(turn.text), streamer=streamer, **sampling)
        except KeyboardInterrupt:
            if streamer is not None:
                streamer.end()  # words that it holds back, and the end of the line
            raise
        yield Answer(turn, out.text, out.finish_reason, position, len(out.prompt_token_ids),
                     len(out.token_ids), stream.cached_tokens, resident_bytes(), stream.stats)


def totals(answers: Sequence[Answer]) -> str:
    """All turns in one line: tokens, the cache, time and memory in the first and last tenth.

    A tenth is of the decode steps; its memory is that after the turn in which it ends.
    """
    last = answers[-1]
    tokens = sum(each.prompt_tokens + each.generated_tokens for each in answers)
    line = (f"{len(answers)} turns of {tokens} tokens, {last.cached_tokens} cached at the end in "
            f"{last.stats.kv_cache_bytes / 1e6:.1f} MB")
    steps = [second for each in answers for second in each.stats.step_seconds]
    if not steps:
        return f"{line}; process {last.process_bytes / 1e6:.0f} MB"
    count = max(1, len(steps) // 10)
    first, end = (1000 * fmean(some) for some in (steps[:count], steps[-count:]))
    done = 0
    for early in answers:
        done += len(early.stats.step_seconds)
        if done >= count:
            break
    return (f"{line}; first tenth {first:.2f} ms a token, process "
            f"{early.process_bytes / 1e6:.0f} MB; last tenth {end:.2f} ms a token, process "
            f"{last.process_bytes / 1e6:.0f} MB")
