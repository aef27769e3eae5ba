"""ROUGE by cache, in figures, rows and a table: what `tasks.summarize` makes of its summaries.

A row is of one cache, or of the baseline ``lead-1``: the article's first sentence as its summary.
All are of the same articles: those that every cache has summarised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import Article
from flexgen_h2o.files.rows import read_csv
from flexgen_h2o.metrics.provenance import ORIGIN, origin
from flexgen_h2o.metrics.run_stats import over
from flexgen_h2o.metrics.statistics import bootstrap
from flexgen_h2o.metrics.text import aligned
from flexgen_h2o.tasks.summaries.articles import Score
from flexgen_h2o.tasks.summaries.rouge import ROUGES

LEAD = "lead-1"
_TEXTS = (*ORIGIN, "device", "model", "dtype", "policy", "positions", "chat_template")
_OF_A_CACHE = ("budget_tokens", "heavy_tokens", "recent_tokens", "sink_tokens", "prompt_chunk",
               "cache_bits", "prompt_tokens_mean", "generated_tokens_mean", "stopped_share",
               "kv_cache_bytes_per_sequence", "seconds", "generated_tokens_per_second")
_DELTAS = ("delta_rouge2", "delta_rouge2_low", "delta_rouge2_high")
COLUMNS = (
    *ORIGIN, "device", "model", "dtype", "policy", *_OF_A_CACHE[:5], "positions", "cache_bits",
    "chat_template", "articles", "too_long",
    *(f"{name}{end}" for name in ROUGES for end in ("", "_low", "_high")), *_DELTAS,
    *_OF_A_CACHE[6:],
)
_MAY_LACK = (*_OF_A_CACHE, *_DELTAS)  # lead-1 has no cache; without a full one there's no delta


@dataclass(frozen=True)
class SummaryCache:
    """A cache that summaries were made with: the policy in words of --eviction, and its sizes."""

    policy: str
    h2o: H2OConfig | None
    bits: int = 16

    def sizes(self) -> dict[str, object]:
        """Columns that say what it is; the full cache has no sizes."""
        heavy = recent = sinks = total = chunk = None
        if self.h2o is not None:
            chunk = self.h2o.prompt_chunk
            heavy, recent, sinks = (self.h2o.heavy_tokens, self.h2o.recent_tokens,
                                    self.h2o.sink_tokens)
            total = heavy + recent + sinks
        return {"policy": self.policy, "budget_tokens": total, "heavy_tokens": heavy,
                "recent_tokens": recent, "sink_tokens": sinks, "prompt_chunk": chunk,
                "cache_bits": self.bits,
                "positions": "original" if self.h2o is None else self.h2o.positions}


def all_rows(runs: Mapping[SummaryCache, Sequence[dict]], articles: Sequence[Article], *,
             model: str,
             chat: bool, score: Score) -> list[dict[str, object]]:
    """A row for each cache, and one of ``lead-1``, by column name.

    Parameters
    ----------
    runs : mapping
        The rows of `summaries.summarize` of each cache, one for each article.
    articles : sequence of Article
    model : str
        What to call it.
    chat : bool
        Whether prompts were in the chat template.
    score : callable
        ROUGE, for the first sentences.

    Raises
    ------
    UserError
        No article has a summary in all of the runs.
    """
    kept = [number for number in range(len(articles))
            if all(rows[number]["summary"] is not None for rows in runs.values())]
    if not kept:
        raise UserError("no prompt and its new tokens fit into the model's positions: there is "
                        "nothing to score")
    common = {**origin(), "model": model, "articles": len(kept),
              "too_long": len(articles) - len(kept), "chat_template": str(chat).lower()}
    full = next(([rows[number] for number in kept] for cache, rows in runs.items()
                 if cache.policy == "full"), None)
    found = []
    for cache, rows in runs.items():
        scored = [rows[number] for number in kept]
        found.append({**common, **cache.sizes(), **scores(scored, full), **_costs(scored)})
    lead = [score(articles[number].lead, articles[number].reference) for number in kept]
    found.append({**common, **dict.fromkeys(_OF_A_CACHE), "policy": LEAD, "positions": "",
                  "device": "", "dtype": "", **scores(lead, full)})
    return found


def scores(rows: Sequence[Mapping], full: Sequence[Mapping] | None) -> dict[str, float | None]:
    """Mean ROUGE over articles with its 95 % interval, by column name, 0 to 1.

    The difference to the full cache is of ROUGE-2, over pairs: of one article each. None without.
    """
    ones = [1] * len(rows)
    found: dict[str, float | None] = {}
    for name in ROUGES:
        values = [row[name] for row in rows]
        found[name] = fmean(values)
        found[f"{name}_low"], found[f"{name}_high"] = bootstrap(values, ones)
    found |= dict.fromkeys(_DELTAS)
    if full is not None:
        pairs = [ours["rouge2"] - theirs["rouge2"]
                 for ours, theirs in zip(rows, full, strict=True)]
        found |= dict(zip(_DELTAS, (fmean(pairs), *bootstrap(pairs, ones)), strict=True))
    return found


def _costs(rows: Sequence[Mapping]) -> dict[str, object]:
    """Costs of the summaries: lengths, bytes, time."""
    seconds = sum(row["seconds"] for row in rows)
    return {
        "device": _one_text(rows, "device"), "dtype": _one_text(rows, "dtype"),
        "prompt_tokens_mean": fmean(row["prompt_tokens"] for row in rows),
        "generated_tokens_mean": fmean(row["generated_tokens"] for row in rows),
        "stopped_share": fmean(row["finish_reason"] == "stop" for row in rows),
        "kv_cache_bytes_per_sequence": fmean(row["kv_cache_bytes"] for row in rows),
        "seconds": seconds,
        "generated_tokens_per_second": over(sum(row["generated_tokens"] for row in rows), seconds),
    }


def _one_text(rows: Sequence[Mapping], name: str) -> str:
    """The texts of a column: several where a run went on elsewhere."""
    return ", ".join(dict.fromkeys(row[name] for row in rows))


def read_rows(path: str) -> list[dict[str, object]]:
    """Rows of a CSV file that --csv wrote. Raises `UserError` when it is no such file, or empty."""
    rows = read_csv(path, (COLUMNS,), texts=_TEXTS, may_lack=_MAY_LACK)
    if not rows:
        raise UserError(f"--from-csv {path} has no rows")
    return rows


def name_of(policy: str, budget: float | None) -> str:
    """The name of a cache: ``full``, ``h2o 128``."""
    return policy if budget is None else f"{policy} {budget:.0f}"


def table(rows: Sequence[Mapping]) -> str:
    """The figures that matter as text in aligned columns."""
    head = ("cache", "ROUGE-1 (95 %)", "ROUGE-2 (95 %)", "ROUGE-L (95 %)",
            "ROUGE-2 over full (95 %)", "new tokens", "KiB a sequence", "tokens/s")
    body = [(
        name_of(row["policy"], row["budget_tokens"]),
        *(_interval(row, name, ".4f") for name in ROUGES), _interval(row, "delta_rouge2", "+.4f"),
        _number(row["generated_tokens_mean"], ".1f"),
        _number(row["kv_cache_bytes_per_sequence"], ".0f", scale=1024),
        _number(row["generated_tokens_per_second"], ".1f")) for row in rows]
    left = rows[0]["too_long"]
    note = f"; too long for the model and left out: {left:.0f}" if left else ""
    return f"{aligned((head, *body))}\narticles: {rows[0]['articles']:.0f}{note}"


def _number(value: float | None, form: str, *, scale: float = 1) -> str:
    return "-" if value is None else format(value / scale, form)


def _interval(row: Mapping, name: str, form: str) -> str:
    if row[name] is None:
        return "-"
    value, low, high = (format(row[f"{name}{end}"], form) for end in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]"
