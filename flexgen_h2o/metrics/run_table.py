"""The figures of a run as text in aligned columns."""

from __future__ import annotations

from flexgen_h2o.metrics.links import GB
from flexgen_h2o.metrics.run_stats import RunStats, over


def table(stats: RunStats) -> str:
    """The figures as text in aligned columns; a projected run says so on every line it touches."""
    mark = " (projected)" if stats.projected else ""
    cut = " (of the steps that were measured)" if stats.projected else ""
    rows = [
        ("model", f"{stats.model}, {stats.num_parameters / 1e6:,.1f} M parameters", ""),
        ("computed in", f"{stats.dtype} on {stats.device}", ""),
        ("weights", _of_the_weights(stats), ""),
        ("batch", f"{stats.gpu_batch_size} sequences x {stats.num_gpu_batches} in a block", ""),
        ("prompts", f"{stats.num_prompts}, of {stats.prompt_tokens} tokens", ""),
        ("generated", f"{stats.generated_tokens} tokens", mark),
        ("load", f"{stats.load_seconds:.2f} s", ""),
        ("prefill", f"{stats.prefill_seconds:.3f} s",
         _figure(stats.prefill_tokens_per_second, "tokens/s")),
        ("decode", f"{stats.decode_seconds:.3f} s",
         _figure(stats.decode_tokens_per_second, "tokens/s") + mark),
        *_idle(stats),
        *_prediction(stats),
        ("total throughput", _figure(stats.total_tokens_per_second, "tokens/s"),
         "generated / (prefill + decode)" + mark),
        ("latency per token", f"p50 {_figure(stats.latency_p50_seconds, 's')}",
         f"p95 {_figure(stats.latency_p95_seconds, 's')}{cut}"),
        ("peak memory", f"process {stats.peak_process_bytes / GB:.2f} GB",
         f"device {stats.peak_device_bytes / GB:.2f} GB" if stats.peak_device_bytes else ""),
        ("KV cache", f"{stats.kv_cache_bytes / GB:.3f} GB", _of_the_cache(stats)),
    ]
    if stats.expert_touches:
        hits = stats.expert_hit_rate
        rows.append(("experts", f"{stats.expert_bytes / GB:.3f} GB", "none had to be brought"
                     if hits is None else f"{100 * hits:.1f} % were there when needed" + cut))
    if stats.recall_hit_rate is not None:
        rows.append(("recall from disk", f"{100 * stats.recall_hit_rate:.1f} % in memory",
                     f"waited {stats.recall_wait_seconds:.3f} s for the others" + cut))
    for link, (nbytes, seconds) in stats.links.items():
        rate = _figure(over(nbytes / GB, seconds), "GB/s")
        rows.append((link, f"{nbytes / GB:.3f} GB", rate + cut))
    if stats.sent_bytes:
        rows.append(("sent to next rank", f"{stats.sent_bytes / GB:.6f} GB", "hidden states" + cut))
    width = max(len(row[1]) for row in rows[6:])  # the rows above have no third column to align
    return "\n".join(f"{a:<18} {b:<{width}}  {c.strip()}".rstrip() for a, b, c in rows)


def _idle(stats: RunStats) -> list[tuple[str, str, str]]:
    """The share of decode that was computed for nothing, where some was."""
    if not stats.idle_share:
        return []
    return [("idle slots", f"{100 * stats.idle_share:.1f} %", "of decode: sequences had ended")]


def _prediction(stats: RunStats) -> list[tuple[str, str, str]]:
    """The planned times beside those above, and its share of what they came to."""
    prefill, decode = stats.predicted_prefill_seconds, stats.predicted_decode_seconds
    if prefill is None or decode is None:
        return []
    measured = stats.prefill_seconds + stats.decode_seconds
    share = over(prefill + decode, measured)
    return [("predicted", f"{prefill:.3f} + {decode:.3f} s",
             "" if share is None else f"{share:.2f} of prefill and decode")]


def _of_the_weights(stats: RunStats) -> str:
    quantized = f", matrices in {stats.weight_bits} bits" if stats.weight_bits != 16 else ""
    if isinstance(stats.weight_bits, str):
        quantized = ", matrices as the GGUF file quantizes them"
    return f"{stats.weight_bytes / GB:.3f} GB{quantized}"


def _of_the_cache(stats: RunStats) -> str:
    """Bytes per token, and the full cache beside the one there was, where they differ."""
    used, full = stats.kv_cache_bytes, stats.full_kv_cache_bytes
    beside = f", {used / full:.3f} of the full {full / GB:.3f} GB" if full not in (0, used) else ""
    return f"{stats.kv_bytes_per_token} bytes per token{beside}"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"
