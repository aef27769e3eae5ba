"""The command line: ``flexgen-h2o --model NAME --prompts FILE ...``, or ``python -m`` this module.

It reads flags and prompts, runs the engine, and writes what came of it. Flags are the fields of
`RunConfig`; all that can be refused is refused before torch is loaded.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o import breakdown, report, results
from flexgen_h2o.cli import Parser, arguments, exit_status, show, writing
from flexgen_h2o.errors import UserError
from flexgen_h2o.flag_values import flag_name, load_yaml
from flexgen_h2o.output import Output
from flexgen_h2o.plan_flags import AUTO
from flexgen_h2o.planning.rows import Workload
from flexgen_h2o.run_config import RunConfig
from flexgen_h2o.run_flags import GROUPS
from flexgen_h2o.text_files import json_texts, read_lines
from flexgen_h2o.trace import Trace

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM

SCRIPT = "flexgen-h2o"
"""The command that setup.py installs."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags, from the fields of `RunConfig`. A flag not given stays unset."""
    parser = Parser(
        # As it was called: by the script that pip installs, or by module.
        prog=SCRIPT if Path(sys.argv[0]).name == SCRIPT else "python -m flexgen_h2o.flex_opt",
        usage="%(prog)s [--model NAME] [--prompts FILE] [--percent P P P P] [flags]",
        description="Generate text with a model larger than memory: weights, KV cache and "
        "activations spread over device, host memory and disk.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=32, width=min(100, shutil.get_terminal_size().columns)
        ),
    )
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for spec in fields(RunConfig):
        groups[spec.metadata["group"]].add_argument(flag_name(spec.name), **arguments(spec))
    return parser


def parse_args(argv: Sequence[str] | None = None) -> RunConfig:
    """Flags, over those of ``--config``, as a checked `RunConfig`. Raises `UserError`."""
    given = vars(build_parser().parse_args(argv))
    values = load_yaml(given["config"]) if "config" in given else {}
    # Prompts of the command line replace the file's, whichever of the two ways each uses.
    if "prompt" in given or "prompts" in given:
        values = {k: v for k, v in values.items() if k not in ("prompt", "prompts")}
    return RunConfig.from_mapping(values | given)


def read_prompts(path: str) -> list[str]:
    """Read prompts: ``.txt`` one a line, ``.jsonl`` the key `prompt` of each line.

    Blank lines are skipped. Raises `UserError` (with the line number, for .jsonl) when the file
    is missing, empty, not UTF-8, or a line is not JSON or has no `prompt`.
    """
    if_empty = "holds no prompts: write one a line"
    if path.endswith(".jsonl"):
        return json_texts("--prompts", path, "prompt", if_empty=if_empty)
    return [line.rstrip("\r") for _, line in read_lines("--prompts", path, if_empty=if_empty)]


def synthetic_prompts(config: RunConfig, vocab_size: int) -> list[list[int]]:
    """Random token ids for each sequence, of one block by default; the same for the same seed."""
    draw = random.Random(config.seed)
    count = config.num_prompts or (
        config.resolved_gpu_batch_size * config.resolved_num_gpu_batches)
    return [draw.choices(range(vocab_size), k=config.prompt_len) for _ in range(count)]


def workload(config: RunConfig, texts: Sequence[str]) -> Workload:
    """What the memory plan needs to know before there is a tokenizer.

    A token has about four bytes of text; three leave some room. `LLM` plans again when it knows.
    """
    prompt_len, count = config.prompt_len, len(texts) or config.num_prompts
    batch, batches = config.resolved_gpu_batch_size, config.resolved_num_gpu_batches
    if texts:
        prompt_len = max(len(text.encode("utf-8")) for text in texts) // 3 + 1
    if count:
        batch = min(batch, count)
        batches = min(batches, -(-count // batch))
    return Workload(prompt_len, config.gen_len, gpu_batch_size=batch, num_gpu_batches=batches)


def result_files(config: RunConfig) -> dict[str, str]:
    """The files that the run will write, by flag; an automatic log is named after the run."""
    files = {name: getattr(config, name) for name in ("output", "csv", "trace")}
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
    """How weights are quantized, for a file name: ``-w4``; empty if they are not."""
    bits = config.resolved_weight_bits
    return "" if bits == 16 else f"-w{bits}"


def _cache_suffix(config: RunConfig) -> str:
    """What is special about the cache, for a file name: ``-h2o-hh0.1-kv4``; empty if nothing is."""
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
        parts += scores[h2o.score]
        parts += ["rolling"] if h2o.positions == "rolling" else []
        parts += [] if h2o.evict_generated else ["prompt-only"]
        parts += [] if h2o.prompt_chunk is None else [f"chunk{h2o.prompt_chunk}"]
    parts += [] if config.attn_sparsity == 1 else [f"sparse{config.attn_sparsity:g}"]
    parts += [] if config.resolved_cache_bits == 16 else [f"kv{config.resolved_cache_bits}"]
    return "".join(f"-{part}" for part in parts)


def check_results(files: dict[str, str]) -> None:
    """Raise `UserError` for a result that could not be written, before anything is computed."""
    for name, path in files.items():
        hint = ": give --log-file or --no-log" if name == "log_file" else ""
        for target in (path, f"{path}.config.yaml"):
            if os.path.lexists(target) and not os.path.isfile(target):
                raise UserError(f"{flag_name(name)} {target} is not a regular file{hint}")
            if os.path.exists(target) and not os.access(target, os.W_OK):
                raise UserError(f"{flag_name(name)} {target} is not writable{hint}")
        folder = os.path.dirname(path) or "."
        try:
            # Only trying tells: root passes os.access on a read-only file system.
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UserError(f"cannot write {flag_name(name)} into the folder {folder}: "
                            f"{error.strerror}{hint}") from None
    if "csv" in files:
        results.check_csv(files["csv"])


def run(config: RunConfig) -> None:
    """Carry out a checked config: prompts in, texts, figures and files out."""
    texts = list(config.prompt) if config.prompts is None else read_prompts(config.prompts)
    files = {} if config.plan_only else result_files(config)
    check_results(files)
    best, implementations = None, None  # what a plan predicts, and what it goes by
    if config.percent == AUTO or config.plan_only:
        from flexgen_h2o import planner  # only now: it loads scipy

        plan = planner.plan(config, workload(config, texts), len(texts) or config.num_prompts)
        if config.plan_only or config.verbose >= 1:
            show(plan.text)
        if config.plan_only:
            return
        config, best, implementations = plan.config, plan.best, plan.implementations
        files = result_files(config)
        check_results(files)
    trace = Trace(enabled=config.trace is not None or config.debug_mode is not None)
    from flexgen_h2o.llm import LLM  # only now: it loads torch, and bad flags answer at once

    with LLM(
        config.model,
        path=config.path,
        policy=config.policy(),
        h2o=config.h2o(),
        weight_bits=config.resolved_weight_bits,
        weight_cache=config.resolved_weight_cache,
        cache_bits=config.resolved_cache_bits,
        attn_sparsity=config.attn_sparsity,
        device=config.device,
        dtype=config.dtype,
        offload_dir=config.offload_dir,
        seed=config.seed,
        memory_limit=config.memory_limit,
        device_memory_limit=config.device_memory_limit,
        progress=None if config.verbose else False,
        trace=trace,
        verbose=config.verbose >= 3,
        workload=workload(config, texts),
        implementations=implementations,
        texts=texts,
    ) as llm:
        prompts = texts or synthetic_prompts(config, llm.vocab_size)
        if config.warm_up:
            _warm_up(llm, prompts, config, trace)
        outputs = llm.generate(prompts, cut_gen_len=config.cut_gen_len, **asdict(config.sampling()))
        stats = llm.stats
        assert stats is not None  # generate has set it
        if best is not None:
            stats = replace(stats, predicted_prefill_seconds=best.prefill,
                            predicted_decode_seconds=best.decode)
    summary = report.table(stats)
    if config.debug_mode == "breakdown":
        summary += f"\n\n{breakdown.table(trace.spans())}"
    try:
        if config.verbose >= 2:
            _show_outputs(outputs, everything=not config.synthetic)
        if config.verbose >= 1:
            show(summary)
    finally:  # a full disk behind stdout must not lose the files too
        _write_results(config, files, outputs, stats=stats, summary=summary, trace=trace)


def _warm_up(llm: LLM, prompts: Sequence[str | Sequence[int]], config: RunConfig,
             trace: Trace) -> None:
    """Two tokens of the first GPU batch, of which no trace is kept."""
    traced, trace.enabled = trace.enabled, False
    llm.generate(prompts[: config.policy().gpu_batch_size],
                 max_new_tokens=min(2, config.gen_len), eos_token_id=-1)
    trace.enabled = traced


def _show_outputs(outputs: Sequence[Output], *, everything: bool) -> None:
    """Print each prompt, shortened, and its completion; of random prompts the first and last."""
    for index, out in enumerate(outputs):
        if not everything and 0 < index < len(outputs) - 1:
            continue
        prompt = out.prompt if out.prompt is not None else str(out.prompt_token_ids[:16])
        text = out.text if out.text is not None else str(out.token_ids)
        show(f"[{index}] {textwrap.shorten(prompt, 90, placeholder=' ...')}")
        show(f"{text.strip()}\n{'-' * 70}")


def _write_results(config: RunConfig, files: dict[str, str], outputs: Sequence[Output], *,
                   stats: report.RunStats, summary: str, trace: Trace) -> None:
    """Write every file that was asked for, and the resolved config beside the results."""
    for name, path in files.items():
        with writing(name, path):
            if name == "output":
                write_outputs(path, outputs)
            elif name == "csv":
                results.append_csv(path, stats, config)
            elif name == "trace":
                trace.about = results.about_run(stats, config)
                trace.write_chrome(path)
            else:
                now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
                with open(path, "a", encoding="utf-8") as log:
                    log.write(f"{now}\n{summary}\n\n")
            if name != "trace":
                config.save(f"{path}.config.yaml")


def write_outputs(path: str, outputs: Sequence[Output]) -> None:
    """Write a JSON line for each prompt, in order. OSError if it cannot."""
    with report.open_atomic(path) as file:
        for out in outputs:
            record = {
                "prompt": out.prompt,
                "prompt_tokens": len(out.prompt_token_ids),
                "token_ids": list(out.token_ids),
                "text": out.text,
                "finish_reason": out.finish_reason,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 2 for a user's error, 130 for Ctrl-C."""
    return exit_status(lambda: run(parse_args(argv)), last=argv is None)


if __name__ == "__main__":
    sys.exit(main())
