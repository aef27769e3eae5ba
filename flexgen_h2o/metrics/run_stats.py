"""The figures of one run: tokens, seconds, bytes. GB is 1e9 bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from flexgen_h2o.config.experts import ExpertChoices, summed
from flexgen_h2o.errors import UserError

RATES = ("prefill_tokens_per_second", "decode_tokens_per_second", "total_tokens_per_second",
          "latency_p50_seconds", "latency_p95_seconds")


RECALLS = ("recall_hits", "recall_loads", "recall_guesses", "recall_wait_seconds")
EXPERTS = ("expert_touches", "expert_hits", "expert_loads", "expert_guesses", "expert_bytes")


@dataclass(kw_only=True)
class RunStats:
    """The figures of one call of generate, warm-up excluded.

    Sizes are bytes, times seconds. `prompt_tokens` and `generated_tokens` count real tokens (no
    pads, nothing past EOS) of all prompts. `step_seconds` holds each decode step of each block:
    the time that a sequence waits for one token. `decode_slots` are the rows that these steps have
    computed, `idle_slots` those of sequences that had ended before. `kv_cache_bytes` is the cache
    of the largest block at rest, `full_kv_cache_bytes` what it would be with nothing evicted or
    compressed, and
    `kv_bytes_per_token` a cached token at rest, all layers together. `weight_bytes` are all weights
    at rest, their matrices in `weight_bits` (16: as `dtype` says; "auto":
    a GGUF file's own codes). `links` is
    `LinkStats.totals`. `sent_bytes` are those that this rank of a pipeline has sent to the others:
    hidden states to the next one, or from the last one tokens to all. `projected` says that decode
    was extrapolated. `predicted_prefill_seconds` and `predicted_decode_seconds` are what a plan
    said, if one was made.

    Of a mixture of experts: a touch is one expert of one layer in one forward pass of a block, for
    all of its tokens. Of the touched experts that do not rest in compute memory, `expert_hits` were
    there when they were asked for and `expert_loads` had to be brought then; `expert_guesses` were
    brought ahead, needed or not. `expert_bytes` are those of loads and guesses. `expert_choices`
    are those of this rank's layers. A rate is None where its time was not measured.

    Of recall from disk: of the tokens that decode steps chose, one for each KV head, and that rest
    there, `recall_hits` were in memory when they were asked for and `recall_loads` had to be read
    then, with all that filled the hot set; `recall_guesses` were read ahead, needed or not.
    `recall_wait_seconds` is how long compute waited for such reads.
    """

    model: str
    num_parameters: int
    dtype: str
    device: str
    num_prompts: int
    prompt_tokens: int
    generated_tokens: int
    gpu_batch_size: int
    num_gpu_batches: int
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    decode_slots: int = 0
    idle_slots: int = 0
    peak_device_bytes: int = 0
    peak_process_bytes: int = 0
    kv_cache_bytes: int = 0
    full_kv_cache_bytes: int = 0
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0
    weight_bits: int | str = 16
    links: dict[str, tuple[int, float]] = field(default_factory=dict)
    sent_bytes: int = 0
    projected: bool = False
    predicted_prefill_seconds: float | None = None
    predicted_decode_seconds: float | None = None
    expert_touches: int = 0
    expert_hits: int = 0
    expert_loads: int = 0
    expert_guesses: int = 0
    expert_bytes: int = 0
    expert_choices: ExpertChoices | None = None
    recall_hits: int = 0
    recall_loads: int = 0
    recall_guesses: int = 0
    recall_wait_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens / prefill seconds."""
        return ratio(self.prompt_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Generated tokens but each prompt's first (prefill makes it) / decode seconds."""
        return ratio(self.generated_tokens - self.num_prompts, self.decode_seconds)

    @property
    def total_tokens_per_second(self) -> float | None:
        """Generated tokens / (prefill + decode) seconds."""
        return ratio(self.generated_tokens, self.prefill_seconds + self.decode_seconds)

    @property
    def idle_share(self) -> float | None:
        """Idle slots / slots of the decode steps: what was computed for nothing. None without any.
        """
        return ratio(self.idle_slots, self.decode_slots)

    @property
    def expert_hit_rate(self) -> float | None:
        """Hits / touches of experts that do not rest in compute memory. None without any."""
        return ratio(self.expert_hits, self.expert_hits + self.expert_loads)

    @property
    def recall_hit_rate(self) -> float | None:
        """Hits / tokens that were recalled and rest on disk. None without any."""
        return ratio(self.recall_hits, self.recall_hits + self.recall_loads)

    @property
    def latency_p50_seconds(self) -> float | None:
        """Median seconds of a decode step."""
        return self._step_percentile(50)

    @property
    def latency_p95_seconds(self) -> float | None:
        """95th percentile of the seconds of a decode step."""
        return self._step_percentile(95)

    def _step_percentile(self, percent: float) -> float | None:
        if not self.step_seconds:
            return None
        import numpy as np  # takes a tenth of a second: not before a wrong flag is answered

        return float(np.percentile(self.step_seconds, percent))

    def followed_by(self, other: RunStats) -> RunStats:
        """The figures of this run and another of the same model after it, as of one."""
        added = ("num_prompts", "prompt_tokens", "generated_tokens", "prefill_seconds",
                 "decode_seconds", "step_seconds", "decode_slots", "idle_slots", "sent_bytes",
                 *EXPERTS, *RECALLS)
        largest = ("peak_device_bytes", "peak_process_bytes", "kv_cache_bytes",
                   "full_kv_cache_bytes")
        links = dict(self.links)
        for link, (nbytes, seconds) in other.links.items():
            before, busy = links.get(link, (0, 0.0))
            links[link] = (before + nbytes, busy + seconds)
        figures: dict[str, Any] = {
            name: getattr(self, name) + getattr(other, name) for name in added}
        figures |= {name: max(getattr(self, name), getattr(other, name)) for name in largest}
        figures["expert_choices"] = summed((self.expert_choices, other.expert_choices))
        return replace(self, links=links, **figures)

    def project(self, *, cut: int, gen_len: int) -> RunStats:
        """Projected figures for `gen_len` tokens, from a run that was cut at `cut` tokens each.

        Decode seconds become the mean measured step times ``gen_len - 1`` for every block, and
        the tokens after the first grow alike. Steps, links and peaks stay as measured. Raises
        `UserError` when there is decode time to project and no step was measured.
        """
        if gen_len > 1 and (cut < 2 or not self.step_seconds):
            raise UserError("no decode step was measured to project from: cut at 2 tokens or more")
        growth = (gen_len - 1) / (cut - 1) if gen_len > 1 else 1.0
        mean = sum(self.step_seconds) / max(len(self.step_seconds), 1)
        decoded = self.generated_tokens - self.num_prompts
        return replace(
            self,
            decode_seconds=mean * len(self.step_seconds) * growth,
            generated_tokens=self.num_prompts + round(decoded * growth),
            projected=True,
        )


def ratio(amount: float, seconds: float) -> float | None:
    """A rate or share; None where no time was measured, or there is nothing to share."""
    return amount / seconds if seconds > 0 else None
