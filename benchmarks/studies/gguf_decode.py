"""Compare the decode speed of a GGUF file with llama.cpp's, in alternating runs.

    python benchmarks/studies/gguf_decode.py models/qwen2.5-coder-1.5b.gguf --csv rows.csv

Each run is a separate process with PyTorch's number of threads: a prompt of 32 tokens, then
`--tokens` tokens, at 1 and 16 sequences. A row holds the median step of all rounds; load_seconds
is the time until the model is ready, with the file in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping

import torch

from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.files.rows import CsvWriter, report_partial_rows
from flexgen_h2o.metrics.provenance import cpu_model, origin

PROMPT = 32
COLUMNS = ("date", "version", "commit", "host", "cpu", "file", "system", "sequences",
           "tokens_per_second", "over_llama_cpp", "load_seconds", "weights_over_file")
SYSTEMS = ("llama.cpp", "flexgen_h2o", "flexgen_h2o, activations in 8 bits")


def llama_cpp(path: str, sequences: int, tokens: int) -> dict[str, object]:
    """Decode with llama.cpp's C functions."""
    import llama_cpp as lib

    began = time.perf_counter()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = (PROMPT + tokens) * sequences, sequences
    params.n_threads = params.n_threads_batch = torch.get_num_threads()
    context = lib.llama_init_from_model(model, params)
    loaded = time.perf_counter() - began
    batch, steps = lib.llama_batch_init(sequences, 0, 1), []
    for position in range(PROMPT + tokens):
        batch.n_tokens = sequences
        for place in range(sequences):
            batch.token[place], batch.pos[place] = 100 + position, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, place
            batch.logits[place] = 1
        began = time.perf_counter()
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        steps.append(time.perf_counter() - began)
    return {"load": loaded, "steps": steps[PROMPT:]}


def ours(path: str, sequences: int, tokens: int, activation_bits: int) -> dict[str, object]:
    """Decode with this engine, the cache full and in 16 bits."""
    from flexgen_h2o import LLM, Policy

    began = time.perf_counter()
    with LLM(path, policy=Policy(gpu_batch_size=sequences), activation_bits=activation_bits,
             progress=False) as llm:
        loaded = time.perf_counter() - began
        prompts = [list(range(100, 100 + PROMPT))] * sequences
        for count in (4, tokens):  # a warm-up first
            llm.generate(prompts, max_new_tokens=count, eos_token_id=-1)
        return {"load": loaded, "steps": llm.stats.step_seconds,
                "weights": llm.stats.weight_bytes / os.path.getsize(path)}


def print_row(row: Mapping[str, object]) -> None:
    """Print the values of a row."""
    print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()),
          sep="  ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="a .gguf file")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", default="benchmarks/results/gguf_decode.csv")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)  # of a child
    args = parser.parse_args()
    if args.system:
        (count,), number = args.sequences, 8 if args.system == SYSTEMS[2] else 16
        print(json.dumps(llama_cpp(args.path, count, args.tokens) if args.system == SYSTEMS[0]
                         else ours(args.path, count, args.tokens, number)))
        return
    rows = CsvWriter(args.csv, COLUMNS)
    with report_partial_rows(rows):
        for count in args.sequences:
            timings: dict[str, list[dict]] = {system: [] for system in SYSTEMS}
            for _ in range(args.rounds):
                for system, runs in timings.items():
                    child = subprocess.run(
                        [sys.executable, __file__, args.path, "--system", system, "--sequences",
                         str(count), "--tokens", str(args.tokens)],
                        check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                    runs.append(json.loads(child.stdout.splitlines()[-1]))
            speed = {system: count / statistics.median(sum((run["steps"] for run in runs), []))
                     for system, runs in timings.items()}
            for system, runs in timings.items():
                row = {**origin(), "cpu": cpu_model(), "file": os.path.basename(args.path),
                       "system": system, "sequences": count, "tokens_per_second": speed[system],
                       "over_llama_cpp": speed[system] / speed[SYSTEMS[0]],
                       "load_seconds": min(run["load"] for run in runs),
                       "weights_over_file": runs[0].get("weights")}
                rows.write(row)
                print_row(row)
        rows.finish()


if __name__ == "__main__":
    sys.exit(exit_status(main))
