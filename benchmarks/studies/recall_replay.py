"""Time attention in LLaMA-8B's shape with the cache on disk, replaying queries of a real text.

    python benchmarks/studies/recall_replay.py --prompt-len 8192 --batch 4

The project has no weights of that shape, and the hit rate of recall depends on real ones. So keys
and queries of smollm2 are recorded while it reads this repository's pages, and replayed. Each of
the 8 KV heads of a layer is one of its 90 KV heads (the fourth query of a group repeats the first).
An isometry maps their 64 dimensions to 128, which keeps the attention weights. Values are random. A
step is attention alone, layer by layer, by `KVCache`: over the whole cache, prefetched one layer
ahead, or over recalled tokens, without speculative prefetch. Reads are O_DIRECT. `roofline_s` is
the time of long reads of a layer's whole cache.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama

from flexgen_h2o import H2OConfig, Placement, Policy
from flexgen_h2o.cache.disk_recall import RecallCounts
from flexgen_h2o.cache.kv_cache import KVCache
from flexgen_h2o.cache.layout import CacheShape, CacheSize
from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.policy import OFFLOAD_DIR
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import CsvWriter, format_cell, report_partial_rows
from flexgen_h2o.files.writing import check_writable
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptSpan
from flexgen_h2o.kernels.cpu.wait_policy import OpenMPWaitPolicy
from flexgen_h2o.metrics.provenance import source_commit
from flexgen_h2o.metrics.trace import LinkStats, Trace
from flexgen_h2o.models.sources import checkpoint_folder
from flexgen_h2o.storage.device import Device
from flexgen_h2o.storage.links import disk_read_rate
from flexgen_h2o.storage.run_folder import RunFolder
from flexgen_h2o.storage.transfer import Transfers

PAGES = Path(__file__).parents[2] / "docs"
LAYERS, KV_HEADS, GROUP, HEAD_DIM = 3, 8, 4, 128
CACHES = {
    "full": (None, None),
    "recall 20 %": (0.2, None),
    "recall 20 %, 60 % in memory": (0.2, 0.6),
    "recall 5 %": (0.05, None),
    "recall 5 %, 20 % in memory": (0.05, 0.2),
}
"""The share that recall attends to, and the share that `Policy.hot_set` keeps in memory."""
COLUMNS = ("date", "commit", "host", "threads", "torch", "model", "dtype", "prompt_len",
           "gen_len", "batch", "cache", "layers", "attended_share", "fast_set", "cache_mb",
           "layer_s", "first_step_layer_s", "disk_read_mb", "recall_hit_rate", "recall_wait_s",
           "read_gb_per_s", "roofline_s", "speedup_over_full")


class AttentionRecording:
    """Recorded queries and keys of some KV heads of a model that reads texts.

    `q` [LAYERS, sequences, steps, KV_HEADS * GROUP, HEAD_DIM]: queries of the last tokens.
    """

    def __init__(self, name: str, *, sequences: int, prompt_len: int, steps: int):
        folder, tokens = checkpoint_folder(name), prompt_len + steps
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = AutoTokenizer.from_pretrained(folder)("\n".join(
            page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))))["input_ids"]
        if len(ids) < tokens:
            raise UserError(f"the pages of docs/ have {len(ids)} tokens: lower --prompt-len "
                            f"{prompt_len}")
        heads = model.config.num_hidden_layers * model.config.num_key_value_heads
        width = model.config.hidden_size // model.config.num_attention_heads
        self._heads = [number * heads // (LAYERS * KV_HEADS)
                       for number in range(LAYERS * KV_HEADS)]
        isometry = torch.linalg.qr(torch.randn(HEAD_DIM, width))[0].T
        scale = (HEAD_DIM / width) ** 0.25  # kernels divide logits by the root of HEAD_DIM
        self.q = torch.empty(LAYERS, sequences, steps, KV_HEADS * GROUP, HEAD_DIM,
                             dtype=torch.bfloat16)
        self.k = torch.empty(LAYERS, sequences, tokens, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        rotate = modeling_llama.apply_rotary_pos_emb
        for sequence in range(sequences):
            layers = iter(range(model.config.num_hidden_layers))

            def record(q, k, *args, sequence=sequence, layers=layers, **options):
                q, k = rotate(q, k, *args, **options)
                first = next(layers) * k.shape[1]
                for place, head in enumerate(self._heads):
                    if 0 <= head - first < k.shape[1]:
                        self._put(sequence, divmod(place, KV_HEADS), q[0].unflatten(
                            0, (k.shape[1], -1))[head - first] @ isometry * scale,
                            k[0, head - first] @ isometry * scale)
                return q, k

            modeling_llama.apply_rotary_pos_emb = record
            try:
                start = sequence * (len(ids) - tokens) // max(1, sequences - 1)
                model(torch.tensor([ids[start : start + tokens]]), logits_to_keep=1)
            finally:
                modeling_llama.apply_rotary_pos_emb = rotate

    def _put(self, sequence: int, place: tuple[int, int], q: torch.Tensor, k: torch.Tensor
             ) -> None:
        """Keep a KV head: q [group, tokens, HEAD_DIM], k [tokens, HEAD_DIM]."""
        layer, head = place
        for query in range(GROUP):
            self.q[layer, sequence, :, head * GROUP + query] = q[
                query % len(q), -self.q.shape[2]:]
        self.k[layer, sequence, :, head] = k


def prefill(cache: KVCache, recording: AttentionRecording, length: int) -> None:
    """Cache the recorded keys of prompts with random values and queries."""
    sequences = recording.k.shape[1]
    for layer in range(LAYERS):
        cache.load(layer, 0, 0)
        for sequence in range(sequences):
            k = recording.k[layer, sequence, :length].clone()
            cache.attend_prompt(
                layer, 0, torch.randn(length, KV_HEADS * GROUP, HEAD_DIM).bfloat16(), k,
                torch.randn(k.shape).bfloat16(), rope=None,
                spans=[PromptSpan(sequence, 0, length)])
        cache.store(layer, 0, 0)


def decode(cache: KVCache, recording: AttentionRecording, step: int, transfers: Transfers) -> float:
    """Run decode step `step` (from 1) in all layers. Returns the seconds of a layer."""
    q, k = recording.q[:, :, step - 1].clone(), recording.k[:, :, step - 1 - recording.q.shape[2]]
    k, v = k.clone(), torch.randn(k.shape).bfloat16()
    began = time.perf_counter()
    cache.load(0, 0, step)
    for layer in range(LAYERS):
        if layer + 1 < LAYERS:
            cache.load(layer + 1, 0, step)
        cache.attend_token(layer, 0, q[layer], k[layer], v[layer], token=step, rope=None
                           ).result(transfers)
        cache.store(layer, 0, step)
    return (time.perf_counter() - began) / LAYERS


def measure(args, recording: AttentionRecording, name: str) -> dict[str, object]:
    """Measure steps with a cache, after the first, which fills the hot set."""
    share, hot_set = CACHES[name]
    h2o = None if share is None else H2OConfig(heavy_ratio=share / 2, recall=True)
    policy = Policy(gpu_batch_size=args.batch, cache=Placement(0, 0, 100),
                    selective_fetch=h2o is not None, hot_set=hot_set)
    shape, links = CacheShape(LAYERS, KV_HEADS, HEAD_DIM, torch.bfloat16), LinkStats()
    with contextlib.closing(RunFolder(args.offload_dir or OFFLOAD_DIR)) as folder, \
            contextlib.closing(Transfers(Device(), links=links, trace=Trace(enabled=False))
                               ) as transfers:
        size = CacheSize(args.batch, 1, (args.prompt_len + args.gen_len,) * LAYERS)
        cache = KVCache(shape, size, policy, h2o=h2o, rope=lambda positions: None,
                        transfers=transfers, run_folder=lambda: folder)
        cache.begin([BatchLayout((args.prompt_len,) * args.batch, args.gen_len)])
        prefill(cache, recording, args.prompt_len)
        transfers.drain()
        with OpenMPWaitPolicy().applied(sleep=h2o is not None):  # as the engine does
            first = decode(cache, recording, 1, transfers)
            transfers.drain()
            links.reset()
            before = replace(cache.recall_counts or RecallCounts())
            seconds = [decode(cache, recording, step, transfers)
                       for step in range(2, args.gen_len + 1)]
        transfers.drain()
        counts, layers = cache.recall_counts, len(seconds) * LAYERS
        recalled = counts and RecallCounts(*(now - then for now, then in zip(
            astuple(counts), astuple(before), strict=True)))
        return {
            "cache": name, "dtype": "bfloat16", "layers": LAYERS, "attended_share": share or 1.0,
            "fast_set": hot_set, "cache_mb": cache.nbytes() / LAYERS / 1e6,
            "layer_s": statistics.median(seconds), "first_step_layer_s": first,
            "disk_read_mb": links.totals()["disk->cpu"][0] / layers / 1e6,
            "recall_hit_rate": recalled and recalled.hits / (recalled.hits + recalled.loads),
            "recall_wait_s": recalled and recalled.wait_seconds / layers}


def offload_read_rate(offload_dir: str | None) -> float:
    """Return the bytes per second of long O_DIRECT reads in a folder (default: the disk tier's)."""
    place = Path(offload_dir or OFFLOAD_DIR).expanduser()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place) as file:
        file.write(os.urandom(1 << 28))
        file.flush()
        os.fsync(file.fileno())
        return disk_read_rate(Path(file.name))


def rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield a row for each cache, the full one first."""
    recording = AttentionRecording(args.model, sequences=args.batch, prompt_len=args.prompt_len,
                                   steps=args.gen_len)
    rate, full = offload_read_rate(args.offload_dir), None
    common = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
              "commit": source_commit(), "host": platform.node(),
              "threads": torch.get_num_threads(), "torch": torch.__version__,
              "model": args.model, "prompt_len": args.prompt_len, "gen_len": args.gen_len,
              "batch": args.batch, "read_gb_per_s": rate / 1e9}
    for name in sorted(args.caches, key=lambda name: name != "full"):
        row = measure(args, recording, name)
        full = row["layer_s"] if name == "full" else full
        yield row | common | {"roofline_s": row["cache_mb"] * 1e6 / rate,
                              "speedup_over_full": full and full / row["layer_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--gen-len", type=int, default=33)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=list(CACHES))
    parser.add_argument("--offload-dir", default=None)
    parser.add_argument("--csv", default="benchmarks/results/recall_replay.csv")
    args = parser.parse_args()
    for name, low in (("prompt_len", 1), ("gen_len", 2), ("batch", 1)):
        check_int(flag_name(name), getattr(args, name), ge=low)
    check_writable("--csv", args.csv)
    torch.manual_seed(0)
    file = CsvWriter(args.csv, COLUMNS)
    with torch.inference_mode(), report_partial_rows(file):
        for row in rows(args):
            file.write({name: format_cell(row[name], digits=4) for name in COLUMNS})
            print(row, flush=True)
        file.finish()


if __name__ == "__main__":
    sys.exit(exit_status(main))
