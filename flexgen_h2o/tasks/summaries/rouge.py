"""ROUGE of summaries (Lin, 2004), by Google's `rouge-score`, and the articles' first sentences.

F-measures with Porter's stemmer, as is usual for XSum. rouge-score, an extra, is loaded when the
first scorer is made; ROUGE-1, -2 and -L need no data of nltk's.
"""

from __future__ import annotations

import importlib.util
import re

from flexgen_h2o.errors import UserError

ROUGES = ("rouge1", "rouge2", "rougeL")

# A stop, quotes or brackets that close, and then what may begin a sentence.
_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s+[\"'“‘(\[]?[A-Z0-9£$€])")
# A stop after one of these, or after a capital alone (an initial, U.S.), ends no sentence.
_SHORT = re.compile(r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Sir|Rev|Gen|Col|Lt|Capt|Sgt|Gov|Sen|Rep|Hon|"
                    r"Jr|Sr|No|vs|etc|Inc|Ltd|Co|Corp)\.$")


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


def first_sentence(text: str) -> str:
    """The first sentence of a text, or all of it where none ends: the baseline *lead-1*."""
    text = text.strip()
    for found in _END.finditer(text):
        if not _SHORT.search(text[: found.start() + 1]):
            return text[: found.end()]
    return text
