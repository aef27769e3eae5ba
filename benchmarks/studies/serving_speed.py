"""Compare the server with `batch` and with `LLM.generate`, on the same model.

    python benchmarks/studies/serving_speed.py --csv rows.csv

`batch_factor` is the server's generated tokens/s over those of `flexgen-h2o batch`, for one file of
`--requests` prompts of 16 to 128 tokens, from the creation of the batch to its end; `batch` counts
from the loaded model to its last answer. `first_token_factor` is the time to the first text of a
streamed request to an idle server over the time until `on_text` gets it. Both sides take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from openai import OpenAI

from flexgen_h2o import LLM, Policy
from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.files.rows import CsvWriter
from flexgen_h2o.metrics.provenance import cpu_model, origin

NEW = 32
FIRST_TOKENS = 15
"""Requests whose first token is timed, in each round."""
PROMPT = "In a hole in the ground there lived a hobbit. Not a nasty, dirty, wet hole, but"
COLUMNS = ("date", "version", "commit", "host", "cpu", "model", "requests", "sequences",
           "new_tokens", "batch_tokens_per_second", "served_tokens_per_second", "batch_factor",
           "generate_first_token_ms", "served_first_token_ms", "first_token_factor")


@contextmanager
def served(args: argparse.Namespace, folder: str) -> Iterator[OpenAI]:
    """Run a server, and return its client."""
    command = [sys.executable, "-m", "flexgen_h2o", "serve", "--model", args.model, "--port", "0",
               "--data-dir", f"{folder}/data", "--gpu-batch-size", str(args.sequences),
               "--max-model-len", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True) as server:
        try:
            assert server.stdout is not None
            url, = re.findall(r"http://\S+", server.stdout.readline())
            yield OpenAI(base_url=url, api_key="none")
        finally:
            server.terminate()


def serve_file(client: OpenAI, path: str) -> float:
    """Return the tokens per second of a batch on the server."""
    file = client.files.create(file=Path(path), purpose="batch")
    began = time.perf_counter()
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions",
                                  completion_window="24h")
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        if batch.status in ("failed", "expired"):
            raise RuntimeError(f"the batch has {batch.status}: {batch.errors}")
        time.sleep(2.0)  # polls take time from the server
    seconds = time.perf_counter() - began
    lines = client.files.content(batch.output_file_id).text.splitlines()
    return sum(json.loads(line)["response"]["body"]["usage"]["completion_tokens"]
               for line in lines) / seconds


def batch_file(args: argparse.Namespace, path: str, folder: str) -> float:
    """Return the tokens per second of `batch`."""
    progress, results = Path(folder, "progress.json"), Path(folder, "results.jsonl")
    results.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "flexgen_h2o", "batch", "-i", path, "-o", str(results),
                    "--model", args.model, "--gpu-batch-size", str(args.sequences),
                    "--progress-file", str(progress)],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return json.loads(progress.read_text(encoding="utf-8"))["tokens_per_second"]


def first_token(client: OpenAI, name: str) -> float:
    """Return the seconds until the first text of a streamed completion."""
    began = time.perf_counter()
    with client.completions.create(model=name, prompt=PROMPT, max_tokens=4, stream=True) as events:
        next(event for event in events if event.choices and event.choices[0].text)
        return time.perf_counter() - began


def first_text(llm: LLM) -> float:
    """Return the seconds until `on_text` gets the first text."""
    began, times = time.perf_counter(), []
    llm.generate([PROMPT], max_new_tokens=4,
                 on_text=lambda index, text, last: times.append(time.perf_counter() - began))
    return times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--sequences", type=int, default=32, help="of a block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", default="benchmarks/results/serving_speed.csv")
    args = parser.parse_args()
    rows, draw = CsvWriter(args.csv, COLUMNS), random.Random(0)
    speeds: dict[str, list[float]] = {"batch": [], "served": []}
    waits: dict[str, list[float]] = {"generate": [], "served": []}
    with (TemporaryDirectory() as folder, served(args, folder) as client,
          LLM(args.model, policy=Policy(gpu_batch_size=args.sequences)) as llm):
        path = f"{folder}/requests.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            for number in range(args.requests):
                body = {"model": args.model, "max_tokens": NEW, "ignore_eos": True,
                        "prompt": draw.choices(range(1000, 2000), k=draw.randint(16, 128))}
                print(json.dumps({"custom_id": str(number), "method": "POST",
                                  "url": "/v1/completions", "body": body}), file=file)
        for _ in range(args.rounds):
            speeds["batch"].append(batch_file(args, path, folder))
            speeds["served"].append(serve_file(client, path))
            for _ in range(FIRST_TOKENS):
                waits["generate"].append(first_text(llm))
                waits["served"].append(first_token(client, args.model))
        batch, server = (statistics.median(speeds[name]) for name in ("batch", "served"))
        alone, wait = (1e3 * statistics.median(waits[name]) for name in ("generate", "served"))
        rows.write({**origin(), "cpu": cpu_model(), "model": args.model, "requests": args.requests,
                    "sequences": args.sequences, "new_tokens": NEW,
                    "batch_tokens_per_second": batch, "served_tokens_per_second": server,
                    "batch_factor": server / batch, "generate_first_token_ms": alone,
                    "served_first_token_ms": wait, "first_token_factor": wait / alone})
        rows.finish()
        print(f"batches: {server:.1f} tokens/s, {batch:.1f} by the command; first token: "
              f"{wait:.1f} ms, {alone:.1f} in process")


if __name__ == "__main__":
    sys.exit(exit_status(main))
