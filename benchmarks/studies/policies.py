"""Perplexity of eviction policies, and of NVIDIA's kvpress against this engine.

    pip install kvpress==0.5.5    # in a separate environment: needs transformers < 5.3
    python benchmarks/studies/policies.py --input-path xsum_0shot.jsonl

Part `masked` simulates candidate policies as masks over a full cache: 256 tokens of each article
after 256, at 5 and 20 % of the prompt and of the text. Parts `cut` and `decode` run this engine and
kvpress on the same articles with equally many tokens kept: `cut` evicts only from prompts, `decode`
also generated tokens. `seconds` are of all articles, which are one batch. Existing rows of the same
articles are not measured again.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import sys
import time

import torch
from policy_candidates import CANDIDATES, ENGINE, MaskedModel, Setting
from policy_study import (
    INPUT,
    RECALL,
    GrowingTable,
    Rival,
    attention_of,
    chosen,
    digest,
    make_press,
    pressed,
    scored,
    systems,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexgen_h2o import H2OConfig
from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.files.articles import read_articles, select_articles
from flexgen_h2o.metrics.provenance import source_commit
from flexgen_h2o.metrics.statistics import bootstrap_interval
from flexgen_h2o.models.sources import checkpoint_folder

SETTINGS = [Setting(20, "prompt"), Setting(5, "prompt"), Setting(20, "text"), Setting(5, "text")]
PARTS = ("masked", "cut", "decode")
COLUMNS = ("date", "commit", "host", "model", "articles", INPUT, "part", "system", "policy",
           "budget_percent", "budget_of", "kept_tokens", "perplexity", "over_full", "delta_nats",
           "delta_nats_low", "delta_nats_high", "over_sum", "over_sum_low", "over_sum_high",
           "kv_cache_bytes", "seconds")
KEY = ("model", "articles", INPUT, "part", "system", "policy", "budget_percent", "budget_of")
PROMPT = 256
HALVES = 2 * PROMPT


class PolicyRows(GrowingTable):
    """The rows of this study; new ones are dated and printed."""

    def __init__(self, path: str, common: dict):
        super().__init__(path, COLUMNS, KEY, common)

    def add(self, **row) -> None:
        """Write a row and print it."""
        super().add(date=datetime.datetime.now(datetime.timezone.utc).isoformat(
            timespec="seconds"), **row)
        print(*(f"{row[key]:.4f}" if isinstance(row[key], float) else row[key]
                for key in COLUMNS[6:] if row.get(key) is not None), flush=True)


def compared(log_probs: torch.Tensor, full: torch.Tensor, plain: torch.Tensor | None) -> dict:
    """Compare [articles, tokens] with the full cache and with H2O's sum, with 95 % intervals."""
    over = (full - log_probs).double()
    tokens = [over.shape[1]] * len(over)
    low, high = bootstrap_interval(over.sum(1).tolist(), tokens)
    figures = {"perplexity": math.exp(-log_probs.double().mean()),
               "over_full": math.exp(over.mean()), "delta_nats": float(over.mean()),
               "delta_nats_low": low, "delta_nats_high": high}
    if plain is not None:
        differences = (plain - log_probs).double()
        low, high = bootstrap_interval(differences.sum(1).tolist(), tokens)
        figures |= {"over_sum": math.exp(differences.mean()), "over_sum_low": math.exp(low),
                    "over_sum_high": math.exp(high)}
    return figures


def run_masked(masked: MaskedModel, rows: PolicyRows, settings: list[Setting]) -> None:
    """Measure all candidates in the settings."""
    full = None
    for setting in settings:
        plain = None
        for candidate in CANDIDATES:
            key = {"part": "masked", "system": "masked", "policy": candidate.name,
                   "budget_percent": setting.percent, "budget_of": setting.budget_of}
            if rows.find(**key) is not None:
                continue
            if full is None:
                full = masked.log_probs(None, None)
            if plain is None:
                plain = masked.log_probs(CANDIDATES[0], setting)
            log_probs = plain
            if candidate is not CANDIDATES[0]:
                log_probs = masked.log_probs(candidate, setting)
            rows.add(**key, kept_tokens=setting.sizes(masked.prompt, masked.prompt)[0],
                     **compared(log_probs, full, plain))


def config_of(rival: Rival, percent: float, part: str) -> H2OConfig:
    """Return this engine's cache that keeps, or attends to, `percent` of the prompt."""
    if rival is RECALL:
        return H2OConfig(heavy_ratio=percent / 200, recall=True)
    return H2OConfig(heavy_ratio=percent / 200, score=rival.name, evict_generated=part == "decode")


def run_beside(masked: MaskedModel, rows: PolicyRows, part: str, settings: list[Setting],
               folder: str) -> None:
    """Measure this engine's policies and kvpress in part `cut` or `decode`."""
    model, ids, prompt, full = masked.model, masked.tokens, masked.prompt, None
    width = model.config.num_key_value_heads * model.model.layers[0].self_attn.head_dim
    for percent in [rival.percent for rival in settings if rival.budget_of == "prompt"]:
        setting, plain = Setting(percent, "prompt", part == "decode"), None
        keep = setting.sizes(prompt, prompt)[0]
        for rival in systems(part):
            key = {"part": part, "system": rival.system, "policy": rival.name,
                   "budget_percent": percent, "budget_of": "prompt"}
            if rows.find(**key) is not None:
                continue
            if full is None:
                full = masked.log_probs(None, None)
            if plain is None:
                plain = masked.log_probs(ENGINE["sum"], setting)
            if rival.system == "kvpress":
                attention_of(model, rival)
                press = make_press(rival, part, keep, prompt)
                began = time.perf_counter()
                logits, nbytes = pressed(press, model, ids, prompt, steps=part == "decode")
                log_probs = chosen(logits, ids[:, prompt:])
                num_cached, seconds = keep, time.perf_counter() - began
            else:
                h2o = config_of(rival, percent, part)
                log_probs, seconds = scored(folder, ids, prompt, h2o)
                num_cached = prompt if h2o.recall else keep
                nbytes = len(ids) * num_cached * len(masked.layers) * width * 2 * 4
            rows.add(**key, kept_tokens=num_cached, kv_cache_bytes=nbytes, seconds=seconds,
                     **compared(log_probs, full, plain))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="of the LLaMA architecture")
    parser.add_argument("--input-path", required=True, help="articles, as `quality` reads them")
    parser.add_argument("--articles", type=int, default=12)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--settings", nargs="+", choices=[f"{s.percent}-{s.budget_of}"
                                                          for s in SETTINGS])
    parser.add_argument("--csv", default="benchmarks/results/policies.csv")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    folder = str(checkpoint_folder(args.model))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = select_articles(read_articles(args.input_path),
                            lambda text: tokenizer(text)["input_ids"],
                   articles=args.articles, min_tokens=HALVES, max_tokens=HALVES)
    masked = MaskedModel(model, torch.tensor(texts), PROMPT)
    rows = PolicyRows(args.csv, {"commit": source_commit(), "host": platform.node(),
                           "model": args.model, "articles": args.articles,
                           INPUT: digest(texts)})
    settings = [item for item in SETTINGS if args.settings is None
                or f"{item.percent}-{item.budget_of}" in args.settings]
    if "masked" in args.parts:
        run_masked(masked, rows, settings)
    for part in ("cut", "decode"):
        if part in args.parts:
            run_beside(masked, rows, part, settings, folder)


if __name__ == "__main__":
    sys.exit(exit_status(main))
