"""ROUGE of summaries (Lin, 2004), by Google's `rouge-score`, and the articles' first sentences.

F-measures with Porter's stemmer, as is usual for XSum. rouge-score, an extra, is loaded when the
first scorer is made; ROUGE-1, -2 and -L need no data of nltk's.
"""

from __future__ import annotations

import importlib.util

from flexgen_h2o.errors import UserError

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
