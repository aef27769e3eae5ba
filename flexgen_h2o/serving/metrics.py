"""Prometheus metrics of a server, with vLLM's names where they mean the same. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800)


class Metrics:
    """The metrics of one server.

    Attributes
    ----------
    running, waiting : Gauge
        Sequences of the current block, and others that have been accepted.
    prompt_tokens, generation_tokens : Counter
        Tokens of finished sequences.
    requests : Counter
        Finished sequences, by the reason for their end.
    first_token_seconds, request_seconds : Histogram
        Of requests that a client waits for: time to their first token, and to their end.
    block_seconds : Histogram
        Time of a block.
    """

    def __init__(self, model: str):
        self._registry = CollectorRegistry()

        def add(kind: Callable, name: str, text: str, *labels: str,
                **options: object) -> Any:
            metric = kind(name, text, ["model_name", *labels], registry=self._registry, **options)
            return metric if labels else metric.labels(model_name=model)

        seconds = {"buckets": _SECONDS}
        self._model = model
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
        self.block_seconds: Histogram = add(
            Histogram, "flexgen_h2o:block_seconds", "Time of a block", **seconds)
        self.batches: Gauge = add(
            Gauge, "flexgen_h2o:batches_in_progress", "Batches with lines left")

    def count(self, prompt_tokens: int, new_tokens: int, reason: str) -> None:
        """Count a finished sequence."""
        self.prompt_tokens.inc(prompt_tokens)
        self.generation_tokens.inc(new_tokens)
        self._requests.labels(model_name=self._model, finished_reason=reason).inc()

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)
