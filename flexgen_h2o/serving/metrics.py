"""Prometheus metrics of a server, with vLLM's names where they mean the same. No torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.planning.roofline import DecodeRoofline

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800)
_SAMPLE_SECONDS = 0.25


class Rate:
    """The rate of a growing total over the last `seconds`, from samples. Not thread-safe."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._samples: deque[tuple[float, float]] = deque([(time.monotonic(), 0)])

    def sample(self, total: float) -> float:
        """Take a sample, and return the rate per second."""
        now = time.monotonic()
        if now - self._samples[-1][0] > _SAMPLE_SECONDS:
            self._samples.append((now, total))
        while len(self._samples) > 1 and self._samples[1][0] < now - self._seconds:
            self._samples.popleft()
        began, before = self._samples[0]
        return (total - before) / max(now - began, _SAMPLE_SECONDS)


class Metrics:
    """The metrics of one server.

    `roofline`: of the decode steps; None if it is not known.

    Attributes
    ----------
    running, waiting : Gauge
        Sequences of the current block, and others that have been accepted.
    prompt_tokens, generation_tokens : Counter
        Tokens of finished sequences.
    batches : Gauge
        Batches with work left.
    first_token_seconds, request_seconds : Histogram
        Of requests that a client waits for: time to their first token, and to their end.
    """

    def __init__(self, model: str, roofline: DecodeRoofline | None = None):
        self._registry = CollectorRegistry()

        def add(metric_type: Callable, name: str, text: str, *labels: str,
                **options: object) -> Any:
            metric = metric_type(name, text, ["model_name", *labels], registry=self._registry,
                                 **options)
            return metric if labels else metric.labels(model_name=model)

        seconds = {"buckets": _SECONDS}
        self._model, self._decode_roofline = model, roofline
        self.running: Gauge = add(Gauge, "vllm:num_requests_running", "Sequences of the block")
        self.waiting: Gauge = add(Gauge, "vllm:num_requests_waiting", "Sequences that wait")
        self.prompt_tokens: Counter = add(
            Counter, "vllm:prompt_tokens", "Prompt tokens of finished sequences")
        self.generation_tokens: Counter = add(
            Counter, "vllm:generation_tokens", "Generated tokens of finished sequences")
        self._requests: Counter = add(
            Counter, "vllm:request_success", "Finished sequences", "finished_reason")
        self.first_token_seconds: Histogram = add(
            Histogram, "vllm:time_to_first_token_seconds", "Time to the first token", **seconds)
        self.request_seconds: Histogram = add(
            Histogram, "vllm:e2e_request_latency_seconds", "Time to the end of a request",
            **seconds)
        self._block_seconds: Histogram = add(
            Histogram, "flexgen_h2o:block_seconds", "Time of a block", **seconds)
        self.batches: Gauge = add(
            Gauge, "flexgen_h2o:batches_in_progress", "Batches with lines left")
        self._links = {unit: add(Counter, f"flexgen_h2o:link_{unit}", text, "link")
                       for unit, text in (("bytes", "Bytes that were moved between tiers"),
                                          ("seconds", "Time in which they were moved"))}
        self._decode: Counter = add(Counter, "flexgen_h2o:decode_seconds",
                                    "Time of decode steps whose roofline is known")
        self._roofline: Counter = add(Counter, "flexgen_h2o:decode_roofline_seconds",
                                      "The least possible time of these steps")
        self._lookups = add(Counter, "flexgen_h2o:lookups",
                            "Reads of data outside compute memory, by whether it was cached there",
                            "cache", "result")

    def count(self, prompt_tokens: int, new_tokens: int, reason: str) -> None:
        """Count a finished sequence."""
        self.prompt_tokens.inc(prompt_tokens)
        self.generation_tokens.inc(new_tokens)
        self._requests.labels(model_name=self._model, finished_reason=reason).inc()

    def count_block(self, stats: RunStats, seconds: float) -> None:
        """Count the transfers and hits of a block, and its time."""
        self._block_seconds.observe(seconds)
        least = self._decode_roofline and self._decode_roofline.seconds(stats)
        if least is not None:
            self._decode.inc(stats.decode_seconds)
            self._roofline.inc(least)
        for link, totals in stats.links.items():
            for metric, total in zip(self._links.values(), totals, strict=True):
                metric.labels(model_name=self._model, link=link).inc(total)
        for cache, hits, misses in (("experts", stats.expert_hits, stats.expert_loads),
                                    ("recall", stats.recall_hits, stats.recall_loads)):
            for result, number in (("hit", hits), ("miss", misses)):
                if number:
                    self._lookups.labels(model_name=self._model, cache=cache,
                                         result=result).inc(number)

    def values(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the values of a counter by the values of labels."""
        return {tuple(sample.labels[label] for label in labels): sample.value
                for metric in self._registry.restricted_registry([f"{name}_total"]).collect()
                for sample in metric.samples}

    def shares(self) -> dict[str, float]:
        """Return hit rates, and the decode steps' share of their roofline, as far as known."""
        lookups = self.values("flexgen_h2o:lookups", "cache", "result")
        shares = {}
        for cache in sorted({cache for cache, _ in lookups}):
            hits, misses = (lookups.get((cache, result), 0) for result in ("hit", "miss"))
            shares[f"Hit rate, {cache}"] = hits / (hits + misses)
        decode, least = (sum(self.values(f"flexgen_h2o:{name}").values())
                         for name in ("decode_seconds", "decode_roofline_seconds"))
        return shares | ({"Decode, share of roofline": least / decode} if decode else {})

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)
