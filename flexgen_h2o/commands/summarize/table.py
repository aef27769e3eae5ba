"""Summaries of articles, their ROUGE (Lin, 2004) by cache, the table and the plot. No torch.

Scores are F-measures of Google's `rouge-score` with Porter's stemmer, as is usual for XSum.

A row is of one cache, or of the baseline ``lead-1``, whose summary is the article's first sentence.
All rows are of the same articles: those that every cache has summarized.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.engine.detokenization import until
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.files.readers import Article
from flexgen_h2o.files.rows import read_csv
from flexgen_h2o.h2o.budget import num_cached
from flexgen_h2o.metrics.figures import LINES, bootstrap_interval, new_figure, save
from flexgen_h2o.metrics.provenance import ORIGIN, origin
from flexgen_h2o.metrics.report import WIDTH, align_columns
from flexgen_h2o.metrics.run_stats import ratio
from flexgen_h2o.models.positions import check_length

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.outputs import Output


ROUGES = ("rouge1", "rouge2", "rougeL")
TOO_LONG = "too_long"
"""The `finish_reason` of a prompt that exceeds the model's positions."""
_BLOCKS_PER_GROUP = 4  # sorting by length reduces padding; a finished group is written

Row = dict[str, Any]
Score = Callable[[str, str], dict[str, float]]


def check_rouge() -> None:
    """Raise `UserError` unless rouge-score is installed."""
    if importlib.util.find_spec("rouge_score") is None:
        raise UserError("ROUGE needs rouge-score: pip install 'flexgen_h2o[summarize]'")


class Rouge:
    """Scorer of a summary against a reference: returns each of `ROUGES`, 0 to 1."""

    def __init__(self) -> None:
        from rouge_score.rouge_scorer import RougeScorer  # an extra

        self._scorer = RougeScorer(ROUGES, use_stemmer=True)

    def __call__(self, summary: str, reference: str) -> dict[str, float]:
        scores = self._scorer.score(reference, summary)
        return {name: float(scores[name].fmeasure) for name in ROUGES}


def summarize(llm: LLM, articles: Sequence[Article], *, begin: int, chat: bool, score: Score
              ) -> Iterator[list[Row]]:
    """Yield rows of the articles from number `begin` on, in their order, a group at a time.

    A prompt that exceeds the model's positions is not truncated, because that would be another
    task. Its row has no summary, and its `finish_reason` is ``too_long``.

    Parameters
    ----------
    llm : LLM
        An LLM with the cache and the batch sizes of the run.
    begin : int
        Number of the first article to summarize.
    chat : bool
        Send each prompt as a user message in the model's chat template.
    score : callable
        Returns ROUGE of a summary and its reference.
    """
    if llm.tokenizer is None:
        raise UserError("the model has no tokenizer here, and articles are text")
    if chat and not llm.tokenizer.chat_template:
        raise UserError("--chat-template: the model's tokenizer has none; leave it out")
    size = _BLOCKS_PER_GROUP * llm.policy.gpu_batch_size * llm.policy.num_gpu_batches
    with ChatRenderer(llm.tokenizer) if chat else nullcontext() as renderer:
        for start in range(begin, len(articles), size):
            group = dict(enumerate(articles[start : start + size], start))
            yield _summarize_group(llm, group, renderer, score)


def _summarize_group(llm: LLM, articles: dict[int, Article], renderer: ChatRenderer | None,
                     score: Score) -> list[Row]:
    """Return the rows of articles by number; articles with the same limits run together."""
    prompts = {number: _encode(llm.tokenizer, article.prompt, renderer)
               for number, article in articles.items()}
    rows: dict[int, Row] = {}
    batches: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for number, article in articles.items():
        if _fits(llm, len(prompts[number]), article.max_tokens):
            batches.setdefault((article.max_tokens, article.stop), []).append(number)
        else:
            rows[number] = _empty_row(number, article.reference, len(prompts[number]))
    end_tokens = None if renderer is None else llm.chat_end_tokens or None
    for (max_tokens, stop), numbers in batches.items():
        outputs = llm.generate([prompts[number] for number in numbers], max_new_tokens=max_tokens,
                               stop_strings=stop or None, eos_token_id=end_tokens)
        for number, output in zip(numbers, outputs, strict=True):
            rows[number] = _row(llm, number, articles[number], output, len(numbers), score)
    return [rows[number] for number in articles]


def _encode(tokenizer: Any, text: str, renderer: ChatRenderer | None) -> list[int]:
    if renderer is None:
        return list(tokenizer(text, verbose=False)["input_ids"])
    prompt = renderer.render([{"role": "user", "content": text}])
    return list(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])


def _fits(llm: LLM, length: int, new_tokens: int) -> bool:
    try:
        check_length(llm.model_config, llm.h2o, prompt="", length=length, new_tokens=new_tokens)
    except UserError:
        return False
    return True


def _row(llm: LLM, number: int, article: Article, output: Output, batch: int, score: Score) -> Row:
    """Return the row of an article whose summary was generated in a batch of `batch` articles."""
    stats = llm.stats
    assert stats is not None and output.text is not None  # there is a tokenizer
    summary = until(output.text, article.stop).strip()
    length, new_tokens = len(output.prompt_token_ids), len(output.token_ids)
    layers = llm.model_config.num_layers
    slots = sum(num_cached(llm.h2o, layer, length,
                           new_tokens - 1) for layer in range(layers)) / layers
    return {
        **_empty_row(number, article.reference, length), "summary": summary,
        **score(summary, article.reference), "generated_tokens": new_tokens,
        "finish_reason": output.finish_reason,
        "seconds": (stats.prefill_seconds + stats.decode_seconds) / batch,
        "kv_cache_bytes": round(slots * stats.kv_bytes_per_token),
        "device": stats.device, "dtype": stats.dtype,
    }


def _empty_row(number: int, reference: str, prompt_tokens: int) -> Row:
    """Return the row of a prompt that is too long. It has the keys of all rows."""
    return {
        "index": number, "summary": None, "reference": reference, **dict.fromkeys(ROUGES),
        "prompt_tokens": prompt_tokens, "generated_tokens": 0, "finish_reason": TOO_LONG,
        "seconds": 0.0, "kv_cache_bytes": None, "device": None, "dtype": None,
    }


def check_rows(path: str, rows: Sequence[Row], articles: Sequence[Article]) -> None:
    """Raise `UserError` unless the rows of an earlier run are of these articles, in their order.

    There may be more or fewer rows than articles.
    """
    keys = set(_empty_row(0, "", 0))
    for number, row in enumerate(rows):
        article = articles[number] if number < len(articles) else None
        if row.keys() != keys or row["index"] != number or (
                article is not None and row["reference"] != article.reference):
            raise UserError(f"--output-path {path} line {number + 1} is not of the article of that "
                            "line of --input-path: choose another file, or delete this one")


_LEAD = "lead-1"
_TEXT_COLUMNS = (*ORIGIN, "device", "model", "dtype", "policy", "positions", "chat_template")
_SIZE_COLUMNS = ("budget_tokens", "heavy_tokens", "recent_tokens", "sink_tokens", "prompt_chunk")
_COST_COLUMNS = ("prompt_tokens_mean", "generated_tokens_mean", "stopped_share",
                 "kv_cache_bytes_per_sequence", "seconds", "generated_tokens_per_second")
_CACHE_COLUMNS = (*_SIZE_COLUMNS, "cache_bits", *_COST_COLUMNS)
_DELTA_COLUMNS = ("delta_rouge2", "delta_rouge2_low", "delta_rouge2_high")
COLUMNS = (
    *ORIGIN, "device", "model", "dtype", "policy", *_SIZE_COLUMNS, "positions", "cache_bits",
    "chat_template", "articles", "too_long",
    *(f"{name}{end}" for name in ROUGES for end in ("", "_low", "_high")), *_DELTA_COLUMNS,
    *_COST_COLUMNS,
)
"""Columns of ``--csv``. lead-1 has no cache; without a full cache there is no delta."""


@dataclass(frozen=True)
class SummaryCache:
    """Cache of a run: the policy as in ``--eviction``, its sizes, and its bit width."""

    policy: str
    h2o: H2OConfig | None
    bits: int = 16

    @property
    def budget(self) -> int | None:
        """Tokens that stay cached; None for the full cache."""
        if self.h2o is None:
            return None
        heavy, recent = self.h2o.heavy_tokens, self.h2o.recent_tokens
        assert heavy is not None and recent is not None  # the flags give no ratios
        return heavy + recent + self.h2o.sink_tokens

    def columns(self) -> Row:
        """Return the columns that describe the cache; the full cache has no sizes."""
        sizes: Row = dict.fromkeys(_SIZE_COLUMNS)
        if self.h2o is not None:
            sizes = {name: getattr(self.h2o, name, None) for name in _SIZE_COLUMNS}
            sizes["budget_tokens"] = self.budget
        return {"policy": self.policy, **sizes, "cache_bits": self.bits,
                "positions": "original" if self.h2o is None else self.h2o.positions}


def all_rows(runs: Mapping[SummaryCache, Sequence[Row]], articles: Sequence[Article], *,
             model: str, chat: bool, score: Score) -> list[Row]:
    """Return a row for each cache, and one of ``lead-1``.

    Raises `UserError` if no article has a summary in all of the runs.

    Parameters
    ----------
    runs : mapping
        The rows of `summarize` of each cache, one for each article.
    model : str
        Name of the model.
    chat : bool
        Whether prompts were in the chat template.
    score : callable
        Returns ROUGE of the first sentences.
    """
    numbers = [number for number in range(len(articles))
               if all(rows[number]["summary"] is not None for rows in runs.values())]
    if not numbers:
        raise UserError("no prompt and its new tokens fit into the model's positions: there is "
                        "nothing to score")
    common = {**origin(), "model": model, "articles": len(numbers),
              "too_long": len(articles) - len(numbers), "chat_template": str(chat).lower()}
    scored = {cache: [rows[number] for number in numbers] for cache, rows in runs.items()}
    full = next((rows for cache, rows in scored.items() if cache.policy == "full"), None)
    table = [{**common, **cache.columns(), **scores(rows, full), **_costs(rows)}
             for cache, rows in scored.items()]
    lead = [score(articles[number].lead, articles[number].reference) for number in numbers]
    table.append({**common, **dict.fromkeys(_CACHE_COLUMNS), "policy": _LEAD, "positions": "",
                  "device": "", "dtype": "", **scores(lead, full)})
    return table


def scores(rows: Sequence[Mapping[str, Any]], full: Sequence[Row] | None
           ) -> dict[str, float | None]:
    """Return mean ROUGE over articles with its 95 % interval, by column name, 0 to 1.

    The delta is the paired difference in ROUGE-2 to the rows of the full cache; None without them.
    """
    weights = [1] * len(rows)
    columns: dict[str, float | None] = {}
    for name in ROUGES:
        values = [row[name] for row in rows]
        columns[name] = fmean(values)
        columns[f"{name}_low"], columns[f"{name}_high"] = bootstrap_interval(values, weights)
    columns |= dict.fromkeys(_DELTA_COLUMNS)
    if full is not None:
        deltas = [row["rouge2"] - other["rouge2"] for row, other in zip(rows, full, strict=True)]
        columns |= dict(zip(_DELTA_COLUMNS, (fmean(deltas), *bootstrap_interval(deltas, weights)),
                            strict=True))
    return columns


def _costs(rows: Sequence[Row]) -> Row:
    """Return lengths, bytes and time of the summaries."""
    seconds = sum(row["seconds"] for row in rows)
    return {
        # A resumed run may have used several devices.
        **{name: ", ".join(dict.fromkeys(row[name] for row in rows))
           for name in ("device", "dtype")},
        "prompt_tokens_mean": fmean(row["prompt_tokens"] for row in rows),
        "generated_tokens_mean": fmean(row["generated_tokens"] for row in rows),
        "stopped_share": fmean(row["finish_reason"] == "stop" for row in rows),
        "kv_cache_bytes_per_sequence": fmean(row["kv_cache_bytes"] for row in rows),
        "seconds": seconds,
        "generated_tokens_per_second": ratio(sum(row["generated_tokens"] for row in rows), seconds),
    }


def read_rows(path: str) -> list[Row]:
    """Read the rows of a ``--csv`` file. Raises `UserError` for another or an empty file."""
    rows: list[Row] = read_csv(path, (COLUMNS,), texts=_TEXT_COLUMNS,
                               may_lack=(*_CACHE_COLUMNS, *_DELTA_COLUMNS))
    if not rows:
        raise UserError(f"--from-csv {path} has no rows")
    return rows


def text(rows: Sequence[Row]) -> str:
    """Format the main columns of the rows as a table."""
    head = ("cache", "ROUGE-1 (95 %)", "ROUGE-2 (95 %)", "ROUGE-L (95 %)",
            "ROUGE-2 over full (95 %)", "new tokens", "KiB a sequence", "tokens/s")
    body = [(
        row["policy"] if row["budget_tokens"] is None
        else f"{row['policy']} {row['budget_tokens']:.0f}",
        *(_interval(row, name, ".4f") for name in ROUGES), _interval(row, "delta_rouge2", "+.4f"),
        _number(row["generated_tokens_mean"], ".1f"),
        _number(row["kv_cache_bytes_per_sequence"], ".0f", scale=1024),
        _number(row["generated_tokens_per_second"], ".1f")) for row in rows]
    too_long = rows[0]["too_long"]
    note = f"; too long for the model and left out: {too_long:.0f}" if too_long else ""
    return f"{align_columns((head, *body), WIDTH)}\narticles: {rows[0]['articles']:.0f}{note}"


def _number(value: float | None, form: str, *, scale: float = 1) -> str:
    return "-" if value is None else format(value / scale, form)


def _interval(row: Row, name: str, form: str) -> str:
    if row[name] is None:
        return "-"
    value, low, high = (format(row[f"{name}{end}"], form) for end in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]"


def draw(rows: Sequence[Row], path: str) -> None:
    """Draw ROUGE-2 and ROUGE-L against the budget into a file, atomically.

    Bars are 95 % intervals over articles. Raises OSError if the file cannot be written.
    """
    figure = new_figure(11, 4.6)
    panels = figure.subplots(1, 2)
    for axes, column, title in zip(panels, ("rouge2", "rougeL"), ("ROUGE-2", "ROUGE-L"),
                                   strict=True):
        _draw_curves(axes, rows, column)
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


def _draw_curves(axes: Any, rows: Sequence[Row], column: str) -> None:
    """Draw a line for each policy over its budgets, and a horizontal line for rows without one."""
    budgets = sorted({row["budget_tokens"] for row in rows if row["budget_tokens"] is not None})
    if budgets:
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [f"{budget:.0f}" for budget in budgets])
        axes.minorticks_off()
        axes.set_xlim(budgets[0] / 1.2, budgets[-1] * 1.2)
    else:
        axes.set_xticks([])
    for policy in ("h2o", "window", "sink-window"):
        points = sorted((row for row in rows if row["policy"] == policy),
                        key=lambda row: row["budget_tokens"])
        if not points:
            continue
        errors = [[max(row[column] - row[f"{column}_low"], 0) for row in points],
                  [max(row[f"{column}_high"] - row[column], 0) for row in points]]
        axes.errorbar([row["budget_tokens"] for row in points], [row[column] for row in points],
                      yerr=errors, capsize=2, markersize=5, linewidth=1.6, elinewidth=0.8,
                      label=policy, **LINES[policy])
    full = LINES["full"]
    for policy, label, color, line in (
            ("full", "full cache", full["color"], full["linestyle"]),
            (_LEAD, "lead-1, the first sentence", "#999999", (0, (5, 1, 1, 1, 1, 1)))):
        for row in (row for row in rows if row["policy"] == policy):
            axes.axhline(row[column], linewidth=1.2, label=label, color=color, linestyle=line)
            axes.axhspan(row[f"{column}_low"], row[f"{column}_high"], linewidth=0, alpha=0.08,
                         color=color)
