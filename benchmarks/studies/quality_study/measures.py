"""The effect of a cache on a model's output, in figures and rows: the arithmetic of the quality
task.

No torch: an `LLM`, or anything with its `loglikelihood`, `generate` and `stats`, is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import fmean

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import Pair
from flexgen_h2o.files.rows import read_csv
from flexgen_h2o.metrics.report import align_columns
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.metrics.statistics import compare_to_full
from quality_study.configurations import Configuration

_TEXTS = ("date", "version", "commit", "host", "device", "model", "dtype", "configuration",
          "policy", "variant", "score", "positions")
# The full cache has no sizes, and most evict at the prompt's end alone.
_MAY_LACK = ("heavy_tokens_mean", "recent_tokens_mean", "sink_tokens", "prompt_chunk")
COLUMNS = (
    "date", "version", "commit", "host", "device", "model", "dtype",
    "articles", "prompt_tokens_mean", "continuation_tokens", "gen_len",
    "configuration", "policy", "variant", "budget_percent", "heavy_tokens_mean",
    "recent_tokens_mean", "sink_tokens", "score", "positions", "prompt_chunk", "cache_bits",
    "weight_bits", "cached_tokens_mean", "kv_cache_bytes_per_sequence",
    "perplexity", "perplexity_over_full", "delta_nats", "delta_nats_low", "delta_nats_high",
    "greedy_equal_share", "common_prefix_mean", "seconds",
)
# Files of earlier versions lack the first of these columns, or the first two.
_ADDED = {"prompt_chunk": None, "weight_bits": 16.0}
_HEADERS = [tuple(name for name in COLUMNS if name not in list(_ADDED)[:lacking])
            for lacking in range(len(_ADDED) + 1)]


@dataclass(frozen=True)
class Measurement:
    """Results of one cache: for each article the natural log-probability of each token of its
    second half, and the greedy tokens after its first. `stats` is that of the scoring; `seconds`
    are those of scoring and generation, without loading.
    """

    log_probs: list[list[float]]
    tokens: list[list[int]]
    stats: RunStats
    seconds: float


def measure(llm, pairs: Sequence[Pair], *, gen_len: int,
            on_part: Callable[[], None] = lambda: None) -> Measurement:
    """Score each article's second half after its first, and continue the first by `gen_len`.

    `on_part` is called after each of the two.
    """
    began = time.perf_counter()
    log_probs = llm.loglikelihood(pairs)
    stats = llm.stats
    on_part()
    # With no end token all texts are of one length, and shares of them mean the same.
    outputs = llm.generate([head for head, _ in pairs], max_new_tokens=gen_len, eos_token_id=-1)
    seconds = time.perf_counter() - began
    on_part()
    return Measurement(log_probs, [list(out.token_ids) for out in outputs], stats, seconds)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(one))


def figures(found: Measurement, full: Measurement) -> dict[str, float]:
    """One cache beside the full one, on the same articles, by column name."""
    greedy = list(zip(found.tokens, full.tokens, strict=True))
    return {
        **compare_to_full(found.log_probs, full.log_probs),
        "greedy_equal_share": fmean(a == b for one, other in greedy
                                    for a, b in zip(one, other, strict=True)),
        "common_prefix_mean": fmean(common_prefix(one, other) for one, other in greedy),
    }


def row_of(one: Configuration, found: Measurement, full: Measurement, *, pairs: Sequence[Pair],
           gen_len: int) -> dict[str, object]:
    """A row by column name, but for when and where; None where a column has no meaning."""
    heads, stats = [len(head) for head, _ in pairs], found.stats
    sizes = [one.sizes(length) for length in heads]
    heavy, recent, sinks = (
        None if None in sizes else fmean(getattr(size, part) for size in sizes)
        for part in ("heavy", "recent", "sinks"))
    return {
        "device": stats.device, "model": stats.model, "dtype": stats.dtype,
        "articles": len(pairs), "prompt_tokens_mean": fmean(heads),
        "continuation_tokens": sum(len(tail) for _, tail in pairs), "gen_len": gen_len,
        "configuration": one.name, "policy": one.policy, "variant": one.variant,
        "budget_percent": float(one.budget), "heavy_tokens_mean": heavy,
        "recent_tokens_mean": recent, "sink_tokens": sinks,
        "score": one.score if one.policy == "h2o" else None, "positions": one.positions,
        "prompt_chunk": one.prompt_chunk, "cache_bits": one.cache_bits,
        "weight_bits": one.weight_bits,
        "cached_tokens_mean": fmean(one.cached(len(head), len(tail)) for head, tail in pairs),
        # The cache of the largest block, which is one GPU batch.
        "kv_cache_bytes_per_sequence": stats.kv_cache_bytes / min(stats.gpu_batch_size, len(pairs)),
        **figures(found, full), "seconds": found.seconds,
    }


def compare(configurations: Sequence[Configuration],
            open_llm: Callable[[Configuration], AbstractContextManager],
            pairs_of: Callable[[object], Sequence[Pair]], *, gen_len: int,
            on_part: Callable[[], None] = lambda: None) -> Iterator[dict[str, object]]:
    """Measure one cache after the other, the plain full one first, and yield a row of each.

    Rolling positions are left out of a model that adds learned ones to its embeddings (OPT).

    Parameters
    ----------
    configurations : sequence of Configuration
        The full cache, with weights as they are, first.
    open_llm : callable
        The `LLM` of a configuration, as a context manager.
    pairs_of : callable
        The articles' halves as token ids, from the first `LLM` (it has the tokenizer).
    gen_len : int
        Greedy tokens to compare.
    on_part : callable
        Called twice for each configuration, for a progress bar.
    """
    full, pairs, rotary = None, None, False
    for one in configurations:
        if one.positions == "rolling" and not rotary:
            on_part()
            on_part()
            continue
        with open_llm(one) as llm:
            if pairs is None:
                pairs, rotary = pairs_of(llm), llm.model_config.rope is not None
            found = measure(llm, pairs, gen_len=gen_len, on_part=on_part)
        full = found if full is None else full
        yield row_of(one, found, full, pairs=pairs, gen_len=gen_len)


def read_rows(path: str) -> list[dict[str, object]]:
    """Rows of a CSV file (a ``.partial`` one too): texts, numbers, None for an empty number.

    Files of earlier versions lack columns, for what they did not vary. Raises `UserError`
    when it is missing, is not such a file, or has no row of the plain full cache.
    """
    found = read_csv(path, _HEADERS, texts=_TEXTS, may_lack=_MAY_LACK)
    rows = [{**_ADDED, **row} for row in found]
    if not any(row["policy"] == "full" and not row["variant"] for row in rows):
        raise UserError(f"--from-csv {path} has no row of the full cache")
    return rows


def table(rows: Sequence[dict]) -> str:
    """The figures that matter as text in aligned columns."""
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
