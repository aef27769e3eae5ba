"""Statistics of a run: tokens, seconds and bytes. GB is 1e9 bytes. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from flexgen_h2o.config.layers import ExpertChoices, sum_choices
from flexgen_h2o.errors import UserError

RATES = ("prefill_tokens_per_second", "decode_tokens_per_second", "total_tokens_per_second",
         "latency_p50_seconds", "latency_p95_seconds")
DRAFTS = ("draft_tokens", "accepted_tokens")
RECALLS = ("recall_hits", "recall_loads", "recall_prefetches", "recall_wait_seconds")
EXPERTS = ("expert_touches", "expert_hits", "expert_loads", "expert_prefetches",
           "expert_prefetch_hits", "expert_bytes")


@dataclass(kw_only=True)
class RunStats:
    """Statistics of a call, one of its blocks or a turn of a stream, warm-up excluded.

    Attributes
    ----------
    prompt_tokens, generated_tokens : int
        Tokens of all prompts, without padding and tokens after EOS.
    step_seconds : list of float
        Seconds of each decode step of each block: a sequence's latency per token.
    decode_slots, idle_slots : int
        Rows that the decode steps computed, and how many of them belonged to finished sequences.
    draft_tokens, accepted_tokens : int
        Tokens that speculative decoding drafted and verified, and how many of them were accepted.
    kv_cache_bytes : int
        Bytes at rest of the largest block's cache.
    full_kv_cache_bytes : int
        Bytes of the same cache with nothing evicted or quantized.
    kv_bytes_per_token : int
        Bytes at rest of a cached token, all layers together.
    weight_bytes : int
        Bytes at rest of all weights.
    weight_bits : int or str
        Bits of matrices. 16: not quantized, in `dtype`. "auto": as a GGUF file quantizes them.
    links : dict of str to (int, float)
        Bytes and busy seconds of each link (`LinkStats.totals`).
    sent_bytes : int
        Bytes that this pipeline rank sent: hidden states, or tokens from the last rank.
    projected : bool
        Decode was extrapolated.
    predicted_prefill_seconds, predicted_decode_seconds : float or None
        The plan's prediction, if there was a plan.
    expert_touches : int
        Experts used: one for each expert of a layer in a forward pass of a block.
    expert_hits, expert_loads : int
        Touched experts outside compute memory that a slot held, and that had to be loaded.
    expert_prefetches : int
        Experts loaded by speculative prefetch, needed or not.
    expert_prefetch_hits : int
        Prefetched experts that the next layer used.
    expert_bytes : int
        Bytes of these loads and prefetches.
    expert_choices : ExpertChoices or None
        Choices in the layers of this rank.
    recall_hits, recall_loads : int
        Selected tokens per KV head of a cache on a slower tier that the hot set held, and that had
        to be read, including those that filled it first.
    recall_prefetches : int
        Tokens read by speculative prefetch, needed or not.
    recall_wait_seconds : float
        Seconds that compute waited for these reads.
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
    draft_tokens: int = 0
    accepted_tokens: int = 0
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
    expert_prefetches: int = 0
    expert_prefetch_hits: int = 0
    expert_bytes: int = 0
    expert_choices: ExpertChoices | None = None
    recall_hits: int = 0
    recall_loads: int = 0
    recall_prefetches: int = 0
    recall_wait_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens / prefill seconds. None without any, as for the other rates."""
        return ratio(self.prompt_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Generated tokens, without each prompt's first of the prefill, / decode seconds."""
        return ratio(self.generated_tokens - self.num_prompts, self.decode_seconds)

    @property
    def total_tokens_per_second(self) -> float | None:
        """Generated tokens / (prefill + decode) seconds."""
        return ratio(self.generated_tokens, self.prefill_seconds + self.decode_seconds)

    @property
    def idle_share(self) -> float | None:
        """Idle slots / slots of the decode steps: wasted compute. None without decode steps."""
        return ratio(self.idle_slots, self.decode_slots)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens. None without speculation."""
        return ratio(self.accepted_tokens, self.draft_tokens)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a sequence gets in a decode step. None without decode steps."""
        steps = self.decode_slots - self.idle_slots
        return ratio(steps + self.accepted_tokens, steps)

    @property
    def expert_hit_rate(self) -> float | None:
        """Hits / touched experts outside compute memory. None without any."""
        return ratio(self.expert_hits, self.expert_hits + self.expert_loads)

    @property
    def expert_prefetch_hit_rate(self) -> float | None:
        """Prefetched experts that the next layer used / prefetched ones. None without any."""
        return ratio(self.expert_prefetch_hits, self.expert_prefetches)

    @property
    def recall_hit_rate(self) -> float | None:
        """Hits / selected tokens of selective fetch. None without any."""
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
        import numpy as np  # slow to import: not before flags are checked

        return float(np.percentile(self.step_seconds, percent))

    def merge(self, other: RunStats) -> RunStats:
        """Return the combined statistics of this run and a later one of the same model."""
        added = ("num_prompts", "prompt_tokens", "generated_tokens", "prefill_seconds",
                 "decode_seconds", "step_seconds", "decode_slots", "idle_slots", "sent_bytes",
                 *DRAFTS, *EXPERTS, *RECALLS)
        largest = ("peak_device_bytes", "peak_process_bytes", "kv_cache_bytes",
                   "full_kv_cache_bytes")
        links = dict(self.links)
        for link, (nbytes, seconds) in other.links.items():
            before, busy = links.get(link, (0, 0.0))
            links[link] = (before + nbytes, busy + seconds)
        figures: dict[str, Any] = {
            name: getattr(self, name) + getattr(other, name) for name in added}
        figures |= {name: max(getattr(self, name), getattr(other, name)) for name in largest}
        figures["expert_choices"] = sum_choices((self.expert_choices, other.expert_choices))
        return replace(self, links=links, **figures)

    def project(self, *, cut: int, gen_len: int) -> RunStats:
        """Return statistics projected to `gen_len` tokens, from a run cut at `cut` tokens each.

        Decode takes the mean measured step times ``gen_len - 1`` for every block, and the generated
        tokens grow in proportion. Steps, links and peaks stay as measured.

        Raises `UserError` if there is decode time to project and no step was measured.
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
    """Return a rate or share; None if the denominator is 0."""
    return amount / seconds if seconds > 0 else None
