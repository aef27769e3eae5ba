"""Files of results: CSV row, log, JSON lines and trace of a run, and their names."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import OTHER_NAMES, flag_name
from flexgen_h2o.config.version import VERSION
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.engine.expert_counts import write_expert_counts
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import append_row, check_header, escape_line_breaks, format_flag_value
from flexgen_h2o.files.writing import catch_write_errors, check_writable, is_stream, open_atomic
from flexgen_h2o.metrics import run_stats
from flexgen_h2o.metrics.provenance import package_version, source_commit
from flexgen_h2o.metrics.run_stats import RATES, RunStats, ratio
from flexgen_h2o.metrics.trace import GB, LINKS, Trace
from flexgen_h2o.outputs import Output

_TIERED = tuple(f"{kind}_{tier}" for kind in ("weights", "cache", "activations")
                for tier in ("gpu", "cpu", "disk"))
EVICTION = ("eviction", "hh_ratio", "recent_ratio", "num_heavy_hitter_tokens",
            "num_window_length", "hh_all", "evict_while_prefilling", "score", "score_decay",
            "sink_tokens", "enable_position_rolling")
"""Columns of the eviction policy."""
_SWITCHES = ("overlap", "pin_weight", "cpu_cache_compute", "fetch_chosen", "fast_set",
             "prefill_chunk", "sep_layer", "refill_share", "compress_weight", "compress_cache",
             "weight_bits", "activation_bits", "cache_bits", "key_bits", "value_bits", *EVICTION,
             "attn_sparsity", "expert_percent", "expert_slots", "cpu_expert_compute",
             "expert_counts", "speculate", "draft_model",
             "num_speculative_tokens", "batch_invariant")
SETTINGS = ("model", "dtype", *_TIERED, *_SWITCHES)
"""Columns of the configuration, without lengths and batch sizes."""
CSV_COLUMNS = (
    "date", "version", "commit", "host", "device", "torch", "model", "parameters", "dtype",
    *_TIERED, *_SWITCHES,
    "prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches", "num_prompts",
    "prompt_tokens", "generated_tokens", "load_seconds", "prefill_seconds", "decode_seconds",
    *RATES, "idle_share", "predicted_prefill_seconds", "predicted_decode_seconds",
    "peak_device_bytes", "peak_process_bytes", "weight_bytes",
    "kv_cache_bytes", "full_kv_cache_bytes", "kv_bytes_per_token",
    *(f"{link.replace('->', '_to_')}_{unit}" for link in LINKS for unit in ("gb", "gb_per_s")),
    "expert_touches", "expert_hit_rate", "expert_loads", "expert_prefetches",
    "expert_prefetch_hit_rate", "expert_gb",
    "recall_hit_rate", "recall_loads", "recall_prefetches", "recall_wait_seconds",
    "acceptance_rate", "tokens_per_step",
    "projected",
)


def csv_row(stats: RunStats, config: RunConfig) -> dict[str, object]:
    """Return a row of results by column name: machine, date, policy and figures."""
    policy = config.policy()
    row: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": VERSION,
        "commit": source_commit(),
        "host": platform.node(),
        "torch": package_version("torch"),
        "parameters": stats.num_parameters,
        # With real prompts config.prompt_len is not used; the mean holds for both.
        "prompt_len": stats.prompt_tokens / max(stats.num_prompts, 1),
        "gen_len": config.gen_len,
    }
    for column in _TIERED:
        kind, tier = column.split("_")
        row[column] = getattr(getattr(policy, kind), tier)
    row |= {name: getattr(config, OTHER_NAMES.get(name, name)) for name in _SWITCHES}
    row |= _resolved(config)
    row["weight_bits"] = stats.weight_bits  # resolves auto
    for link in LINKS:
        nbytes, seconds = stats.links.get(link, (0, 0.0))
        name = link.replace("->", "_to_")
        row[f"{name}_gb"] = nbytes / GB
        row[f"{name}_gb_per_s"] = ratio(nbytes / GB, seconds)
    row["expert_gb"] = stats.expert_bytes / GB
    return {name: row[name] if name in row else getattr(stats, name) for name in CSV_COLUMNS}


def about_run(stats: RunStats, config: RunConfig) -> dict[str, object]:
    """Return the metadata of a trace: `csv_row`, CPU, threads, and the measured decode steps."""
    import torch  # loaded by the run

    from flexgen_h2o.metrics.provenance import cpu_model

    return csv_row(stats, config) | {"cpu": cpu_model(), "threads": torch.get_num_threads(),
                                     "decode_steps": len(stats.step_seconds)}


def _resolved(config: RunConfig) -> dict[str, object]:
    """Return the values of flags of weights and cache that are resolved from others."""
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
    """Append a row of `CSV_COLUMNS` to a file that other processes may append to."""
    row = {name: format_flag_value(value) for name, value in csv_row(stats, config).items()}
    append_row(path, CSV_COLUMNS, row)


def result_files(config: RunConfig) -> dict[str, str]:
    """Return the files that the run writes, by flag, with the name of an automatic log."""
    files = {name: getattr(config, name) for name in ("output", "csv", "trace", "count_experts")}
    if not config.no_log:
        files["log_file"] = config.log_file
        if config.log_file == "auto":
            policy = config.policy()
            percent = AUTO if config.percent == AUTO else "-".join(
                f"{share:g}" for share in config.percent)
            model = Path(config.model).name or "model"
            files["log_file"] = (
                f"flexgen_h2o-{model}-gbs{policy.gpu_batch_size}-ngbs{policy.num_gpu_batches}"
                f"-prompt{config.prompt_len}-gen{config.gen_len}-percent-{percent}"
                f"{_weight_suffix(config)}{_cache_suffix(config)}.log"
            )
    return {name: path for name, path in files.items() if path is not None}


def _weight_suffix(config: RunConfig) -> str:
    """Return the quantization as part of a file name: ``-w4``, ``-w4a8`` or empty."""
    bits = config.resolved_weight_bits
    if bits == 16 or bits == AUTO and config.activation_bits == 16:
        return ""
    return f"-w{bits}" if config.activation_bits == 16 else f"-w{bits}a{config.activation_bits}"


def _cache_suffix(config: RunConfig) -> str:
    """Return the cache's settings as part of a file name, such as ``-h2o-hh0.1-kv4``; or empty."""
    parts: list[str] = []
    h2o = config.h2o()
    if h2o is not None and not h2o.is_full:
        sizes = {"hh": config.hh_ratio if config.hh_ratio != 1 else None,
                 "recent": config.recent_ratio,
                 "heavy": config.num_heavy_hitter_tokens,
                 "window": config.num_window_length,
                 "sinks": h2o.sink_tokens or None}
        # A ratio per layer would make the file name too long.
        parts += [config.eviction, *(
            f"{name}-by-layer" if isinstance(size, tuple) else f"{name}{size:g}"
            for name, size in sizes.items() if size is not None)]
        scores = {"sum": [], "mean": ["mean"], "decay": [f"decay{h2o.decay:g}"]}
        parts += scores.get(h2o.score, [h2o.score])
        parts += ["rolling"] if h2o.positions == "rolling" else []
        parts += [] if h2o.evict_generated else ["prompt-only"]
        parts += [] if h2o.prompt_chunk is None else [f"chunk{h2o.prompt_chunk}"]
    if h2o is not None and h2o.recall:
        share = config.hh_ratio if config.num_window_length is None else config.num_window_length
        parts += ["recall-by-layer" if isinstance(share, tuple) else f"recall{share:g}",
                  f"index{h2o.index_bits}"]
    parts += ["fetch-chosen"] if config.selective_fetch else []
    parts += [] if config.hot_set is None else [f"fast{config.hot_set:g}"]
    parts += [] if config.attn_sparsity == 1 else [f"sparse{config.attn_sparsity:g}"]
    cache = config.cache()
    if cache.key_bits != cache.value_bits:
        parts.append(f"k{cache.key_bits}v{cache.value_bits}")
    elif cache.bits != 16:
        parts.append(f"kv{cache.bits}")
    return "".join(f"-{part}" for part in parts)


def check_results(files: Mapping[str, str | None]) -> None:
    """Raise `UserError` for a file that cannot be written, before anything is computed."""
    for name, path in files.items():
        if path is None or name == "output" and is_stream(path):  # no configuration beside it
            continue
        check_writable(flag_name(name), path, beside=(f"{path}.config.yaml",),
                       hint=": give --log-file or --no-log" if name == "log_file" else "")
    if (csv := files.get("csv")) is not None:
        check_header(csv, CSV_COLUMNS)


def write_results(config: RunConfig, files: dict[str, str], outputs: Sequence[Output], *,
                  stats: run_stats.RunStats, summary: str, trace: Trace) -> None:
    """Write the files of results, and the resolved configuration beside each.

    If some cannot be written, the others are; then it raises `UserError`.
    """
    failures = []
    for name, path in files.items():
        try:
            with catch_write_errors(flag_name(name), path):
                if name == "output":
                    write_outputs(path, outputs)
                elif name == "csv":
                    append_csv(path, stats, config)
                elif name == "trace":
                    trace.about = about_run(stats, config)
                    trace.write_chrome(path)
                elif name == "count_experts":
                    write_expert_counts(path, stats)
                else:
                    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
                    with open(path, "a", encoding="utf-8") as log:
                        log.write(f"{now}\n{summary}\n\n")
                if name not in ("trace", "count_experts") and not is_stream(path):
                    config.save(f"{path}.config.yaml")
        except UserError as error:
            failures.append(str(error))
    if failures:
        raise UserError("; ".join(failures))


def write_outputs(path: str, outputs: Sequence[Output]) -> None:
    """Write a JSON line per prompt, in order. Raises OSError."""
    with open(path, "a", encoding="utf-8", errors="backslashreplace") if is_stream(path) else (
            open_atomic(path)) as file:
        for out in outputs:
            record = {
                "prompt": out.prompt,
                "prompt_tokens": len(out.prompt_token_ids),
                "token_ids": list(out.token_ids),
                "text": out.text,
                "finish_reason": out.finish_reason,
            }
            if out.content is not None:
                record |= {"content": out.content, "reasoning_content": out.reasoning_content}
            file.write(escape_line_breaks(json.dumps(record, ensure_ascii=False)) + "\n")
