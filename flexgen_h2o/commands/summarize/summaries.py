"""Summaries of articles and their ROUGE (Lin, 2004): prompts in, scored rows out. No torch.

Scores are F-measures of Google's `rouge-score` with Porter's stemmer, as is usual for XSum.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from flexgen_h2o.engine.detokenization import until
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.files.readers import Article
from flexgen_h2o.h2o.budget import num_cached
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
