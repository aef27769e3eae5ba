"""A run as a row of a CSV file that many runs and machines share."""

from __future__ import annotations

import datetime
import os
import platform
from typing import TYPE_CHECKING

from flexgen_h2o.config.version import VERSION
from flexgen_h2o.files.rows import csv_cell
from flexgen_h2o.files.shared_csv import append_row
from flexgen_h2o.metrics.links import GB, LINKS
from flexgen_h2o.metrics.provenance import installed, source_commit
from flexgen_h2o.metrics.run_stats import RATES, RunStats, over

if TYPE_CHECKING:
    from flexgen_h2o.cli.run_config import RunConfig

_TIERED = tuple(f"{kind}_{tier}" for kind in ("weights", "cache", "activations")
                for tier in ("gpu", "cpu", "disk"))
EVICTION = ("eviction", "hh_ratio", "recent_ratio", "num_heavy_hitter_tokens",
            "num_window_length", "hh_all", "evict_while_prefilling", "score", "score_decay",
            "sink_tokens", "enable_position_rolling")
"""Columns of what stays cached."""
_SWITCHES = ("overlap", "pin_weight", "cpu_cache_compute", "fetch_chosen", "fast_set",
             "prefill_chunk", "sep_layer", "refill_share", "compress_weight", "compress_cache",
             "weight_bits", "activation_bits", "cache_bits", "key_bits", "value_bits", *EVICTION,
             "attn_sparsity", "expert_percent", "expert_slots", "cpu_expert_compute",
             "expert_counts")
SETTINGS = ("model", "dtype", *_TIERED, *_SWITCHES)
"""Columns of what is run, but for lengths and batches."""
CSV_COLUMNS = (
    "date", "version", "commit", "host", "device", "torch", "model", "parameters", "dtype",
    *_TIERED, *_SWITCHES,
    "prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches", "num_prompts",
    "prompt_tokens", "generated_tokens", "load_seconds", "prefill_seconds", "decode_seconds",
    *RATES, "idle_share", "predicted_prefill_seconds", "predicted_decode_seconds",
    "peak_device_bytes", "peak_process_bytes", "weight_bytes",
    "kv_cache_bytes", "full_kv_cache_bytes", "kv_bytes_per_token",
    *(f"{link.replace('->', '_to_')}_{unit}" for link in LINKS for unit in ("gb", "gb_per_s")),
    "expert_touches", "expert_hit_rate", "expert_loads", "expert_guesses", "expert_gb",
    "recall_hit_rate", "recall_loads", "recall_guesses", "recall_wait_seconds",
    "projected",
)


def csv_row(stats: RunStats, config: RunConfig) -> dict[str, object]:
    """One row of results by column name: where and when, the whole policy, the figures."""
    policy = config.policy()
    row: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": VERSION,
        "commit": source_commit(),
        "host": platform.node(),
        "torch": installed("torch"),
        "parameters": stats.num_parameters,
        # With real prompts config.prompt_len is not used; the mean holds for both.
        "prompt_len": stats.prompt_tokens / max(stats.num_prompts, 1),
        "gen_len": config.gen_len,
    }
    for column in _TIERED:
        kind, tier = column.split("_")
        row[column] = getattr(getattr(policy, kind), tier)
    row |= {name: getattr(config, name) for name in _SWITCHES} | _resolved(config)
    row["weight_bits"] = stats.weight_bits  # what auto has come to
    for link in LINKS:
        nbytes, seconds = stats.links.get(link, (0, 0.0))
        name = link.replace("->", "_to_")
        row[f"{name}_gb"] = nbytes / GB
        row[f"{name}_gb_per_s"] = over(nbytes / GB, seconds)
    row["expert_gb"] = stats.expert_bytes / GB
    return {name: row[name] if name in row else getattr(stats, name) for name in CSV_COLUMNS}


def about_run(stats: RunStats, config: RunConfig) -> dict[str, object]:
    """Notes of a trace about its run: as `csv_row`, the processor and threads, and how many decode
    steps were measured.
    """
    import torch  # a run has loaded it by now

    from flexgen_h2o.metrics.provenance import cpu_model

    return csv_row(stats, config) | {"cpu": cpu_model(), "threads": torch.get_num_threads(),
                                     "decode_steps": len(stats.step_seconds)}


def _resolved(config: RunConfig) -> dict[str, object]:
    """Resolved values of the flags of weights and cache, where they differ from what was typed."""
    h2o = config.h2o()
    full = h2o is None or h2o.is_full
    cache = config.cache()
    return {
        "expert_percent": (None if config.expert_percent is None
                           else " ".join(f"{share:g}" for share in config.expert_percent)),
        "cache_bits": cache.bits, "key_bits": cache.key_bits, "value_bits": cache.value_bits,
        "eviction": ("recall" if h2o is not None and h2o.recall else "full" if full
                     else config.eviction),
        "sink_tokens": 0 if h2o is None or full else h2o.sink_tokens,
        "score_decay": config.score_decay if config.score == "decay" else None,
    }


def append_csv(path: str | os.PathLike, stats: RunStats, config: RunConfig) -> None:
    """Append a row of `CSV_COLUMNS`, as `shared_csv.append_row` does."""
    row = {name: csv_cell(value) for name, value in csv_row(stats, config).items()}
    append_row(path, CSV_COLUMNS, row, flag="--csv")
