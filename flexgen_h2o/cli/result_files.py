"""The files that a run writes: their names, checks and contents."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path

from flexgen_h2o.cli import result_rows
from flexgen_h2o.cli.expert_counts import write_expert_counts
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.formats import AUTO
from flexgen_h2o.errors import UserError
from flexgen_h2o.files import atomic
from flexgen_h2o.files.checks import check_writable, is_stream, writing
from flexgen_h2o.files.rows import one_line
from flexgen_h2o.files.shared_csv import check_header
from flexgen_h2o.metrics import run_stats
from flexgen_h2o.metrics.trace import Trace
from flexgen_h2o.outputs import Output


def result_files(config: RunConfig) -> dict[str, str]:
    """The files that the run will write, by flag; an automatic log is named after the run."""
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
    """The weights' quantization as part of a file name: ``-w4``, or ``-w4a8`` with that of
    activations; empty if they are not quantized."""
    bits = config.resolved_weight_bits
    if bits == 16 or bits == AUTO and config.activation_bits == 16:
        return ""
    return f"-w{bits}" if config.activation_bits == 16 else f"-w{bits}a{config.activation_bits}"


def _cache_suffix(config: RunConfig) -> str:
    """The cache's settings as part of a file name: ``-h2o-hh0.1-kv4``; empty if nothing is."""
    parts: list[str] = []
    h2o = config.h2o()
    if h2o is not None and not h2o.is_full:
        sizes = {"hh": config.hh_ratio if config.hh_ratio != 1 else None,
                 "recent": config.recent_ratio,
                 "heavy": config.num_heavy_hitter_tokens,
                 "window": config.num_window_length,
                 "sinks": h2o.sink_tokens or None}
        # Ratios of every layer would be too long for a file's name.
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
    parts += ["fetch-chosen"] if config.fetch_chosen else []
    parts += [] if config.fast_set is None else [f"fast{config.fast_set:g}"]
    parts += [] if config.attn_sparsity == 1 else [f"sparse{config.attn_sparsity:g}"]
    cache = config.cache()
    if cache.key_bits != cache.value_bits:
        parts.append(f"k{cache.key_bits}v{cache.value_bits}")
    elif cache.bits != 16:
        parts.append(f"kv{cache.bits}")
    return "".join(f"-{part}" for part in parts)


def check_results(files: dict[str, str]) -> None:
    """Raise `UserError` for a result that could not be written, before anything is computed."""
    for name, path in files.items():
        if name == "output" and is_stream(path):  # nothing is put beside it
            continue
        check_writable(flag_name(name), path, beside=(f"{path}.config.yaml",),
                       hint=": give --log-file or --no-log" if name == "log_file" else "")
    if "csv" in files:
        check_header(files["csv"], result_rows.CSV_COLUMNS, flag="--csv")


def write_results(config: RunConfig, files: dict[str, str], outputs: Sequence[Output], *,
                  stats: run_stats.RunStats, summary: str, trace: Trace) -> None:
    """Write every file that was asked for, and the resolved config beside the results.

    One that cannot be written keeps no other from it: `UserError` for those comes at the end.
    """
    failures = []
    for name, path in files.items():
        try:
            with writing(flag_name(name), path):
                if name == "output":
                    write_outputs(path, outputs)
                elif name == "csv":
                    result_rows.append_csv(path, stats, config)
                elif name == "trace":
                    trace.about = result_rows.about_run(stats, config)
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
    """Write a JSON line for each prompt, in order. OSError if it cannot."""
    with open(path, "a", encoding="utf-8", errors="backslashreplace") if is_stream(path) else (
            atomic.open_atomic(path)) as file:
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
            file.write(one_line(json.dumps(record, ensure_ascii=False)) + "\n")
