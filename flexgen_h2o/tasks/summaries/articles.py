"""Summaries of articles with one model and one cache: prompts in, scored rows out.

The input is the H2O fork's ``xsum_0shot.jsonl`` or a file like it. No torch: an `LLM`, or anything
with its `generate`, `tokenizer`, `h2o` and `stats`, is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

from flexgen_h2o.engine.stop_strings import until
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import Article
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.h2o.budget import cached
from flexgen_h2o.models.positions import check_length
from flexgen_h2o.tasks.summaries.rouge import ROUGES

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
