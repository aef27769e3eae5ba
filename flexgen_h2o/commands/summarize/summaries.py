"""ROUGE of summaries (Lin, 2004), by Google's `rouge-score`, and the articles' first sentences.

F-measures with Porter's stemmer, as is usual for XSum. rouge-score, an extra, is loaded when the
first scorer is made; ROUGE-1, -2 and -L need no data of nltk's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.engine.detokenization import until
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import Article
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.files.rows import read_csv
from flexgen_h2o.h2o.budget import cached
from flexgen_h2o.metrics.figures import LINES, new_figure, save
from flexgen_h2o.metrics.provenance import ORIGIN, origin
from flexgen_h2o.metrics.report import align_columns
from flexgen_h2o.metrics.run_stats import ratio
from flexgen_h2o.metrics.statistics import bootstrap_interval
from flexgen_h2o.models.positions import check_length

ROUGES = ("rouge1", "rouge2", "rougeL")


def check_rouge() -> None:
    """Raise `UserError` unless rouge-score is here."""
    if importlib.util.find_spec("rouge_score") is None:
        raise UserError("ROUGE needs rouge-score: pip install 'flexgen_h2o[summarize]'")


class Rouge:
    """Scores a summary against a reference: the F-measure of each of `ROUGES`, 0 to 1."""

    def __init__(self) -> None:
        from rouge_score.rouge_scorer import RougeScorer

        self._scorer = RougeScorer(ROUGES, use_stemmer=True)

    def __call__(self, summary: str, reference: str) -> dict[str, float]:
        found = self._scorer.score(reference, summary)
        return {name: float(found[name].fmeasure) for name in ROUGES}


# Summaries of articles with one model and one cache: prompts in, scored rows out.
#
# The input is the H2O fork's ``xsum_0shot.jsonl`` or a file like it. No torch: an `LLM`, or
# anything
# with its `generate`, `tokenizer`, `h2o` and `stats`, is handed in.


TOO_LONG = "too_long"
"""The finish_reason of a prompt that does not fit into the model's positions."""
_BLOCKS = 4  # in a group: sorted by length, it has less padding; at its end it is written

Score = Callable[[str, str], dict[str, float]]


def summarize(llm, articles: Sequence[Article], *, begin: int, chat: bool, score: Score
              ) -> Iterator[list[dict[str, object]]]:
    """Rows of the articles from number `begin` on, in their order, a group at a time.

    A prompt that does not fit into the model's positions with its new tokens is not cut, as that
    would be another task: its row has no summary, and `finish_reason` says ``too_long``.

    Parameters
    ----------
    llm : LLM
        With the cache and the batch sizes of the run.
    articles : sequence of Article
    begin : int
        The first to summarise.
    chat : bool
        Send each prompt as a user's message, in the model's chat template.
    score : callable
        ROUGE of a summary and its reference.
    """
    check_tokenizer(llm, chat)
    size = _BLOCKS * llm.policy.gpu_batch_size * llm.policy.num_gpu_batches
    with ChatRenderer(llm.tokenizer) if chat else nullcontext() as renderer:
        for start in range(begin, len(articles), size):
            some = dict(enumerate(articles[start : start + size], start))
            yield _group(llm, some, renderer, score=score)


def check_tokenizer(llm, chat: bool) -> None:
    """Raise `UserError` unless the model has a tokenizer, and a chat template if it is wanted."""
    if llm.tokenizer is None:
        raise UserError("the model has no tokenizer here, and articles are text")
    if chat and not llm.tokenizer.chat_template:
        raise UserError("--chat-template: the model's tokenizer has none; leave it out")


def _group(llm, articles: dict[int, Article], renderer: ChatRenderer | None, *, score: Score
           ) -> list[dict[str, object]]:
    """Rows of articles by number, in their order; those with the same limits run together."""
    prompts = {number: _encode(llm.tokenizer, article.prompt, renderer)
               for number, article in articles.items()}
    rows: dict[int, dict[str, object]] = {}
    alike: dict[tuple, list[int]] = {}
    for number, article in articles.items():
        if _fits(llm, len(prompts[number]), article.max_tokens):
            alike.setdefault((article.max_tokens, article.stop), []).append(number)
        else:
            rows[number] = _row(number, article.reference, len(prompts[number]))
    ends = None if renderer is None else llm.chat_end_tokens or None
    for (max_tokens, stop), numbers in alike.items():
        outputs = llm.generate([prompts[number] for number in numbers], max_new_tokens=max_tokens,
                               stop_strings=stop or None, eos_token_id=ends)
        for number, output in zip(numbers, outputs, strict=True):
            rows[number] = _summary_row(llm, number, articles[number], output, len(numbers), score)
    return [rows[number] for number in articles]


def _encode(tokenizer, text: str, renderer: ChatRenderer | None) -> list[int]:
    if renderer is None:
        return list(tokenizer(text, verbose=False)["input_ids"])
    whole = renderer.render([{"role": "user", "content": text}])
    return list(tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"])


def _fits(llm, length: int, new_tokens: int) -> bool:
    try:
        check_length(llm.model_config, llm.h2o, prompt="", length=length, new_tokens=new_tokens)
    except UserError:
        return False
    return True


def _summary_row(llm, number: int, article: Article, output, together: int, score: Score
                 ) -> dict[str, object]:
    summary = until(output.text, article.stop).strip()
    stats, length, new = llm.stats, len(output.prompt_token_ids), len(output.token_ids)
    layers = llm.model_config.num_layers
    slots = sum(cached(llm.h2o, layer, length, new - 1) for layer in range(layers)) / layers
    return {
        **_row(number, article.reference, length), "summary": summary,
        **score(summary, article.reference), "generated_tokens": new,
        "finish_reason": output.finish_reason,
        # A share alike of the time of all that ran together.
        "seconds": (stats.prefill_seconds + stats.decode_seconds) / together,
        "kv_cache_bytes": round(slots * stats.kv_bytes_per_token),
        "device": stats.device, "dtype": stats.dtype,
    }


def _row(number: int, reference: str, prompt_tokens: int) -> dict[str, object]:
    """A row of a prompt that was too long; the keys of all rows."""
    return {
        "index": number, "summary": None, "reference": reference, **dict.fromkeys(ROUGES),
        "prompt_tokens": prompt_tokens, "generated_tokens": 0, "finish_reason": TOO_LONG,
        "seconds": 0.0, "kv_cache_bytes": None, "device": None, "dtype": None,
    }


def check_rows(path: str, rows: Sequence[dict], articles: Sequence[Article]) -> None:
    """Raise `UserError` unless the rows of an earlier run are of these articles, in their order.

    There may be more rows than articles, or less.
    """
    keys = set(_row(0, "", 0))
    for number, row in enumerate(rows):
        article = articles[number] if number < len(articles) else None
        if row.keys() != keys or row["index"] != number or (
                article is not None and row["reference"] != article.reference):
            raise UserError(f"--output-path {path} line {number + 1} is not of the article of that "
                            "line of --input-path: choose another file, or delete this one")


# ROUGE by cache, in figures, rows and a table: what `commands.summarize` makes of its summaries.
#
# A row is of one cache, or of the baseline ``lead-1``: the article's first sentence as its summary.
# All are of the same articles: those that every cache has summarised.


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
        found[f"{name}_low"], found[f"{name}_high"] = bootstrap_interval(values, ones)
    found |= dict.fromkeys(_DELTAS)
    if full is not None:
        pairs = [ours["rouge2"] - theirs["rouge2"]
                 for ours, theirs in zip(rows, full, strict=True)]
        found |= dict(zip(_DELTAS, (fmean(pairs), *bootstrap_interval(pairs, ones)), strict=True))
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
        "generated_tokens_per_second": ratio(sum(row["generated_tokens"] for row in rows), seconds),
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
    return f"{align_columns((head, *body))}\narticles: {rows[0]['articles']:.0f}{note}"


def _number(value: float | None, form: str, *, scale: float = 1) -> str:
    return "-" if value is None else format(value / scale, form)


def _interval(row: Mapping, name: str, form: str) -> str:
    if row[name] is None:
        return "-"
    value, low, high = (format(row[f"{name}{end}"], form) for end in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]"


# The plot of `commands.summarize`: ROUGE-2 and ROUGE-L against the tokens that stay cached.


_POLICIES = ("h2o", "window", "sink-window")
_LEAD = {"color": "#999999", "linestyle": (0, (5, 1, 1, 1, 1, 1))}
_PANELS = (("rouge2", "ROUGE-2"), ("rougeL", "ROUGE-L"))


def draw(rows: Sequence[Mapping], path: str) -> None:
    """Draw rows of `summary_rows` into a file, which is there whole or not at all.

    Bars are 95 % intervals over articles; those of different caches are of the same articles.
    OSError if the file cannot be written.
    """
    figure = new_figure(11, 4.6)
    panels = figure.subplots(1, 2)
    for axes, (column, title) in zip(panels, _PANELS, strict=True):
        _curves(axes, rows, column)
        axes.set(xlabel="KV cache budget, tokens a sequence (log scale)", ylabel=f"{title} F1",
                 title=f"{title}: higher is better",
                 ylim=(0, 1.08 * max(0.01, *(row[f"{column}_high"] for row in rows))))
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  frameon=False, fontsize=9)
    measured = next((row for row in rows if row["dtype"]), rows[0])
    figure.suptitle(f"{measured['model']}, {measured['dtype']}, {measured['articles']:.0f} "
                    "articles; bars and bands: 95 % interval over articles", fontsize=10)
    save(figure, path)


def _curves(axes, rows: Sequence[Mapping], column: str) -> None:
    """A line for each policy over its budgets, and across for what has none."""
    budgets = sorted({row["budget_tokens"] for row in rows if row["budget_tokens"] is not None})
    if budgets:
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [f"{budget:.0f}" for budget in budgets])
        axes.minorticks_off()
        axes.set_xlim(budgets[0] / 1.2, budgets[-1] * 1.2)
    else:
        axes.set_xticks([])
    for policy in _POLICIES:
        points = sorted((row for row in rows if row["policy"] == policy),
                        key=lambda row: row["budget_tokens"])
        if not points:
            continue
        values = [row[column] for row in points]
        bars = [[max(value - row[f"{column}_low"], 0) for value, row in
                 zip(values, points, strict=True)],
                [max(row[f"{column}_high"] - value, 0) for value, row in
                 zip(values, points, strict=True)]]
        axes.errorbar([row["budget_tokens"] for row in points], values, yerr=bars, capsize=2,
                      markersize=5, linewidth=1.6, elinewidth=0.8, label=policy, **LINES[policy])
    for policy, label, style in (
            ("full", "full cache", {key: LINES["full"][key] for key in ("color", "linestyle")}),
            ("lead-1", "lead-1, the first sentence", _LEAD)):
        for row in (row for row in rows if row["policy"] == policy):
            axes.axhline(row[column], linewidth=1.2, label=label, **style)
            axes.axhspan(row[f"{column}_low"], row[f"{column}_high"], linewidth=0, alpha=0.08,
                         color=style["color"])
