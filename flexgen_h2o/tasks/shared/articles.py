"""Articles to measure with: their text out of a .jsonl file, their tokens in two halves. No torch.

The file is the H2O fork's ``xsum_0shot.jsonl`` or one like it: a JSON object a line, the text under
the key `article`. There it stands within a prompt for a summary, which is taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flexgen_h2o.errors import UserError
from flexgen_h2o.text_files import json_texts

_HEAD = "###\nArticle: "
_TAIL = "\n\nSummarize the above article in 1 sentence."

Pair = tuple[list[int], list[int]]


def read_articles(path: str) -> list[str]:
    """Read the text of each article, in the order of the file; blank lines are skipped.

    Raises `UserError`, with the line's number where there is one, when the file is missing, empty
    or not UTF-8, or a line is not JSON or has no text under `article`.
    """
    return json_texts("--input-path", path, "article", clean=unwrap,
                      if_empty="holds no articles: write one JSON object a line")


def unwrap(text: str) -> str:
    """The article alone, without the prompt for a summary around it."""
    return text.strip().removeprefix(_HEAD).removesuffix(_TAIL).strip()


def choose(texts: Iterable[str], encode: Callable[[str], Sequence[int]], *, articles: int,
           min_tokens: int, max_tokens: int) -> list[list[int]]:
    """Token ids of the first `articles` texts of at least `min_tokens`, cut to `max_tokens` each.

    `encode` makes token ids of a text. Raises `UserError` when there are too few such texts.
    """
    chosen: list[list[int]] = []
    for text in texts:
        ids = list(encode(text))
        if len(ids) >= min_tokens:
            chosen.append(ids[:max_tokens])
            if len(chosen) == articles:
                return chosen
    raise UserError(f"--input-path has {len(chosen)} articles of at least {min_tokens} tokens and "
                    f"{articles} are asked for: lower --articles or --min-tokens")


def halves(articles: Iterable[Sequence[int]]) -> list[Pair]:
    """Each article's tokens (at least 2) as the first half and the rest, one longer if odd."""
    return [(list(ids[: len(ids) // 2]), list(ids[len(ids) // 2 :])) for ids in articles]
