"""Quality by cache budget: ``python benchmarks/studies/quality.py --input-path FILE.jsonl ...``.

For each cache and for quantized weights, measure two figures on the same articles: the perplexity
of the second half after the first (teacher-forced, so that all caches score the same tokens), and
the fraction of greedy tokens that equal those of the full cache. Bad flags are refused before torch
is loaded.

A variant of a cache may also have quantized weights; it is compared with the full cache and exact
weights. A budget is a percentage of each sequence's prompt, or of its text so far. It covers all
cached tokens, except the sinks of ``sink-window``: 4 tokens are a different fraction of each
sequence.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from flexgen_h2o.cli.entry_point import entry_point
from flexgen_h2o.cli.launch import open_llm
from flexgen_h2o.cli.parser import (
    Parser,
    build_parser,
    check_files,
    check_flags,
    check_outputs_writable,
    command_flags,
    parse,
)
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import csv_flag, flag
from flexgen_h2o.config.h2o import SINK_WINDOW_SINKS, H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import collect_rows
from flexgen_h2o.files.terminal import ProgressBar, print_stdout
from flexgen_h2o.h2o import budget as cache_budget
from flexgen_h2o.metrics.provenance import origin
from flexgen_h2o.metrics.report import align_columns
from flexgen_h2o.metrics.run_stats import RunStats

sys.path.insert(0, str(Path(__file__).parents[1]))
from articles import (
    Pair,
    articles_flag,
    compare_to_full,
    read_articles,
    select_articles,
    split_halves,
)

POLICIES = ("full", "h2o", "window", "sink-window")  # values of --eviction
RECALL, SPARSE = "recall", "sparse-values"
# Values of --only: the policies, the variants of h2o by what they vary, recall and its variants,
# sparse values, quantized weights.
GROUPS = (*POLICIES, RECALL, SPARSE, "text", "score", "positions", "chunks", "bits", "weights")
VARIED = (5, 20)  # percent: a tight and a usual budget
CHUNKS = (16, 64)  # tokens per chunk, if chunked prefill also evicts inside the prompt
USUAL = 20


@dataclass(frozen=True)
class Configuration:
    """One cache. `budget` is in percent of the tokens of `budget_of` (100 for the full cache).

    Bits are 16 (the run's dtype), 8 or 4. With the policy ``recall`` nothing is evicted, and
    `index_bits` is the bit width of the index. With ``sparse-values`` all keys are read, and the
    budget is a fraction of the values.
    """

    policy: str
    budget: float
    score: str = "sum"
    positions: str = "original"
    cache_bits: int = 16
    weight_bits: int = 16
    activation_bits: int = 16
    prompt_chunk: int | None = None
    budget_of: str = "prompt"
    index_bits: int = 4

    @property
    def variant(self) -> str:
        """Description of the difference from the plain policy; empty for the plain policy.

        Examples are ``4-bit``, ``chunks of 64`` (eviction inside the prompt), ``4-bit weights`` and
        ``4-bit, 4-bit weights``, which has the cache's bits first.
        """
        return ", ".join(filter(None, (self._of_cache(), self._of_weights())))

    @property
    def name(self) -> str:
        """Name such as ``h2o 20 % 4-bit`` or ``h2o 20 % 4-bit, 4-bit weights``."""
        plain = "full" if self.policy == "full" else f"{self.policy} {self.budget:g} %"
        cache = f"{plain} {self._of_cache()}".strip()
        return ", ".join(filter(None, (cache, self._of_weights())))

    def _of_cache(self) -> str:
        if self.cache_bits != 16:
            return f"{self.cache_bits}-bit"
        if self.score != "sum":
            return self.score
        if self.budget_of != "prompt":
            return f"of the {self.budget_of}"
        if self.index_bits != 4:
            return f"{self.index_bits}-bit index"
        if self.prompt_chunk is not None:
            return f"chunks of {self.prompt_chunk}"
        return self.positions if self.positions != "original" else ""

    def _of_weights(self) -> str:
        if self.weight_bits == 16:
            return ""
        rounded = f" and {self.activation_bits}-bit activations"
        return f"{self.weight_bits}-bit weights{rounded if self.activation_bits != 16 else ''}"

    @property
    def group(self) -> str:
        """The member of `GROUPS` that it belongs to."""
        if self.weight_bits != 16:
            return "weights"
        if self.policy == RECALL:
            return RECALL
        if self.cache_bits != 16:
            return "bits"
        if self.score != "sum":
            return "score"
        if self.budget_of != "prompt":
            return "text"
        if self.prompt_chunk is not None:
            return "chunks"
        return "positions" if self.positions != "original" else self.policy

    def h2o(self) -> H2OConfig | None:
        """Return the cache's configuration for `LLM`; None for the full cache."""
        share = self.budget / 100
        if self.policy in ("full", SPARSE):
            return None
        if self.policy == "h2o":
            return H2OConfig(heavy_ratio=share / 2, recent_ratio=share / 2, score=self.score,
                             positions=self.positions, prompt_chunk=self.prompt_chunk,
                             budget_of=self.budget_of)
        if self.policy == RECALL:
            return H2OConfig(heavy_ratio=share / 2, recent_ratio=share / 2, recall=True,
                             budget_of=self.budget_of, index_bits=self.index_bits)
        sinks = SINK_WINDOW_SINKS if self.policy == "sink-window" else 0
        return H2OConfig(heavy_tokens=0, recent_ratio=share, sink_tokens=sinks,
                         positions=self.positions)

    def arguments(self) -> dict[str, object]:
        """Return keywords of `LLM` that set this cache and the weights."""
        values = {"attn_sparsity": self.budget / 100} if self.policy == SPARSE else {}
        values |= {"activation_bits": self.activation_bits} if self.activation_bits != 16 else {}
        return {"h2o": self.h2o(), "cache_bits": self.cache_bits, "weight_bits": self.weight_bits,
                **values}

    def sizes(self, prompt_len: int) -> cache_budget.Budget | None:
        """Return the tokens kept of a prompt, equal in all layers; None if all are kept."""
        return cache_budget.budget(self.h2o(), 0, prompt_len)

    def cached(self, prompt_len: int, new_tokens: int) -> float:
        """Return the mean number of cached tokens over the decode steps of `new_tokens`.

        The prefill generates the first new token, and the last one is never cached, so there is one
        step fewer than new tokens.
        """
        steps = range(1, new_tokens) or [0]
        h2o = self.h2o()
        return fmean(cache_budget.num_cached(h2o, 0, prompt_len, step) for step in steps)


def configurations(budgets: Iterable[float], only: Iterable[str] | None = None
                   ) -> list[Configuration]:
    """Return all caches to measure, the plain full cache first: the others are compared with it.

    `budgets`: percent of the prompt. Recall, sparse values and variants of h2o are only measured at
    the budgets of `VARIED` that are included; lower bit widths, also of the index, only at `USUAL`;
    quantized weights also with the full cache. `only`: members of `GROUPS` to measure in addition
    to the full cache. Default: all.
    """
    budgets = sorted(set(budgets))
    result = [Configuration("full", 100)]
    result += [Configuration(policy, budget) for policy in POLICIES[1:] for budget in budgets]
    for budget in (budget for budget in VARIED if budget in budgets):
        plain = Configuration("h2o", budget)
        result += [replace(plain, budget_of="text"), replace(plain, score="mean"),
                   replace(plain, score="decay"), replace(plain, score="caote"),
                   replace(plain, positions="rolling")]
        result += [replace(plain, prompt_chunk=chunk) for chunk in CHUNKS]
        recall = Configuration(RECALL, budget)
        result += [recall, replace(recall, budget_of="text"), Configuration(SPARSE, budget)]
    if USUAL in budgets:
        result += [Configuration(RECALL, USUAL, index_bits=2)]
        result += [Configuration("h2o", USUAL, cache_bits=bits) for bits in (8, 4)]
    result += [replace(result[0], weight_bits=bits, activation_bits=activations)
               for bits, activations in ((12, 16), (8, 16), (8, 8), (4, 16), (4, 8))]
    if USUAL in budgets:
        result += [Configuration("h2o", USUAL, cache_bits=bits, weight_bits=4) for bits in (16, 4)]
    groups = set(GROUPS if only is None else only) | {"full"}
    return [mode for mode in result if mode.group in groups]


_SHARED = ("path", "device", "dtype", "gpu_batch_size", "gen_len")
_DEFAULTS = {"model": "smollm2-135m", "dtype": "float32", "gpu_batch_size": 30, "gen_len": 64}
_HELPS = {"dtype": "number format; float32 shows what eviction does and no rounding",
          "gen_len": "greedy tokens to compare after each first half"}


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """The checked flags; `run` holds those shared with `generate`. Lengths are in tokens."""

    run: RunConfig
    input_path: str | None = articles_flag()
    articles: int = flag("int", 30, ge=1,
                         help="number of articles: the first ones that are long enough")
    # Each half has at least one token.
    min_tokens: int = flag("int", 500, ge=2, help="shorter articles are skipped")
    max_tokens: int = flag("int", 768, ge=2, help="articles are cut to this")
    budgets: tuple[float, ...] = flag(
        "numbers", (5, 10, 20, 40, 60), gt=0, le=100, metavar="P",
        help="KV cache budgets, percent of the prompt; recall, sparse values and variants are "
        "measured at 5 and 20",
    )
    only: tuple[str, ...] = flag(
        "words", GROUPS, choices=GROUPS, metavar="GROUP",
        help=f"measure these, and full: {', '.join(GROUPS)}",
    )
    csv: str | None = csv_flag("cache")

    def __post_init__(self) -> None:
        check_flags(self)
        if self.input_path is None:
            raise UserError("give --input-path, a .jsonl file of articles")
        groups = {configuration.group for configuration in configurations(self.budgets, self.only)}
        for group in self.only if self.only != GROUPS else ():
            if group not in groups:
                raise UserError(f"--only {group} measures nothing at these --budgets: add {USUAL}")
        check_files(self, ("input_path", "csv"))


def parser() -> Parser:
    """Return the parser of the flags."""
    return build_parser(
        command_flags(QualityOptions, names=_SHARED,
                      **{name: {"shown": value} | ({"help": _HELPS[name]} if name in _HELPS else {})
                         for name, value in _DEFAULTS.items()}),
        prog="python benchmarks/studies/quality.py", show_all=True,
        description="Perplexity and greedy tokens by the budget of the KV cache.")


def parse_args(argv: Sequence[str] | None = None) -> QualityOptions:
    """Parse flags into checked `QualityOptions`. Raises `UserError`."""
    options, shared = parse(argv, parser(), QualityOptions)
    return QualityOptions(run=RunConfig(**_DEFAULTS | shared), **options)


def run(options: QualityOptions) -> None:
    """Measure every cache, write the rows and print the table."""
    check_outputs_writable(options, "csv")
    rows = compare(options, read_articles(options.input_path))
    print_stdout(table(collect_rows(options.csv, COLUMNS, ({**origin(), **row} for row in rows))))


def _pairs(llm, texts: Sequence[str], options: QualityOptions):
    """Return the token ids of the halves of each article."""
    if llm.tokenizer is None:
        raise UserError(f"{options.run.model} has no tokenizer here, and articles are text")
    selected = select_articles(texts, lambda text: llm.tokenizer(text, verbose=False)["input_ids"],
                               articles=options.articles, min_tokens=options.min_tokens,
                               max_tokens=options.max_tokens)
    return split_halves(selected)


COLUMNS = (
    "date", "version", "commit", "host", "device", "model", "dtype",
    "articles", "prompt_tokens_mean", "continuation_tokens", "gen_len",
    "configuration", "policy", "variant", "budget_percent", "heavy_tokens_mean",
    "recent_tokens_mean", "sink_tokens", "score", "positions", "prompt_chunk", "cache_bits",
    "weight_bits", "cached_tokens_mean", "kv_cache_bytes_per_sequence",
    "perplexity", "perplexity_over_full", "delta_nats", "delta_nats_low", "delta_nats_high",
    "greedy_equal_share", "common_prefix_mean", "seconds",
)


@dataclass(frozen=True)
class Measurement:
    """Results of one cache.

    For each article it has the natural log-probability of each token of the second half, and the
    greedy tokens after the first half. `stats` covers the scoring; `seconds` are of scoring and
    generation, without loading.
    """

    log_probs: list[list[float]]
    tokens: list[list[int]]
    stats: RunStats
    seconds: float


def measure(llm, pairs: Sequence[Pair], *, gen_len: int, on_part: Callable[[], object]
            ) -> Measurement:
    """Score the second half of each article after its first, then generate `gen_len` tokens.

    `on_part` is called after each of the two parts.
    """
    began = time.perf_counter()
    log_probs = llm.loglikelihood(pairs)
    stats = llm.stats
    on_part()
    # Without an end token all texts have the same length, so that fractions are comparable.
    outputs = llm.generate([head for head, _ in pairs], max_new_tokens=gen_len, eos_token_id=-1)
    seconds = time.perf_counter() - began
    on_part()
    return Measurement(log_probs, [list(out.token_ids) for out in outputs], stats, seconds)


def common_prefix(first: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    pairs = enumerate(zip(first, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(first))


def figures(measured: Measurement, full: Measurement) -> dict[str, float]:
    """Compare one cache to the full cache on the same articles; return figures by column name."""
    greedy = list(zip(measured.tokens, full.tokens, strict=True))
    return {
        **compare_to_full(measured.log_probs, full.log_probs),
        "greedy_equal_share": fmean(a == b for one, other in greedy
                                    for a, b in zip(one, other, strict=True)),
        "common_prefix_mean": fmean(common_prefix(one, other) for one, other in greedy),
    }


def row_of(configuration: Configuration, measured: Measurement, full: Measurement, *,
           pairs: Sequence[Pair], gen_len: int) -> dict[str, object]:
    """Return a row by column name, without time and machine; None where a column does not apply."""
    heads, stats = [len(head) for head, _ in pairs], measured.stats
    sizes = [configuration.sizes(length) for length in heads]
    heavy, recent, sinks = (
        None if None in sizes else fmean(getattr(size, part) for size in sizes)
        for part in ("heavy", "recent", "sinks"))
    return {
        "device": stats.device, "model": stats.model, "dtype": stats.dtype,
        "articles": len(pairs), "prompt_tokens_mean": fmean(heads),
        "continuation_tokens": sum(len(tail) for _, tail in pairs), "gen_len": gen_len,
        "configuration": configuration.name, "policy": configuration.policy,
        "variant": configuration.variant,
        "budget_percent": float(configuration.budget), "heavy_tokens_mean": heavy,
        "recent_tokens_mean": recent, "sink_tokens": sinks,
        "score": configuration.score if configuration.policy == "h2o" else None,
        "positions": configuration.positions,
        "prompt_chunk": configuration.prompt_chunk, "cache_bits": configuration.cache_bits,
        "weight_bits": configuration.weight_bits,
        "cached_tokens_mean": fmean(configuration.cached(len(head), len(tail))
                                    for head, tail in pairs),
        # The cache of the largest block, which is one GPU batch.
        "kv_cache_bytes_per_sequence": stats.kv_cache_bytes / min(stats.gpu_batch_size, len(pairs)),
        **figures(measured, full), "seconds": measured.seconds,
    }


def compare(options: QualityOptions, texts: Sequence[str]) -> Iterator[dict[str, object]]:
    """Measure one cache after the other, the plain full cache first, and yield a row of each.

    Rolling positions are skipped for models with learned position embeddings (OPT).
    """
    todo = configurations(options.budgets, options.only)
    full, pairs, rotary = None, None, False
    with ProgressBar(total=2 * len(todo), unit="part", disable=None) as bar:
        for configuration in todo:
            if configuration.positions == "rolling" and not rotary:
                bar.update(2)
                continue
            bar.set_description(configuration.name)
            with open_llm(options.run, progress=False, **configuration.arguments()) as llm:
                if pairs is None:
                    pairs, rotary = _pairs(llm, texts, options), llm.model_config.rope is not None
                measured = measure(llm, pairs, gen_len=options.run.gen_len, on_part=bar.update)
            full = measured if full is None else full
            yield row_of(configuration, measured, full, pairs=pairs, gen_len=options.run.gen_len)


def table(rows: Sequence[dict]) -> str:
    """Return the main figures as text in aligned columns."""
    head = ("cache", "cached tokens", "KiB a sequence", "perplexity", "x full",
            "nats over full (95 %)", "equal greedy", "common prefix", "seconds")
    body = [(
        row["configuration"], f"{row['cached_tokens_mean']:.1f}",
        f"{row['kv_cache_bytes_per_sequence'] / 1024:.0f}", f"{row['perplexity']:.3f}",
        f"{row['perplexity_over_full']:.3f}",
        f"{row['delta_nats']:+.4f} [{row['delta_nats_low']:+.4f}, {row['delta_nats_high']:+.4f}]",
        f"{row['greedy_equal_share']:.1%}", f"{row['common_prefix_mean']:.1f}",
        f"{row['seconds']:.1f}") for row in rows]
    return align_columns((head, *body))


main = entry_point(parse_args, run)


if __name__ == "__main__":
    sys.exit(main())
