"""The form of a layer's attention: how it differs from softmax(q k / sqrt(head_dim)) v."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexgen_h2o.config.validation import check_bool, check_int
from flexgen_h2o.errors import UserError


@dataclass(frozen=True)
class AttentionForm:
    """The form of attention of a layer.

    A logit is ``q . k * scale``; a soft cap makes it ``softcap * tanh(logit / softcap)``.

    Attributes
    ----------
    scale : float or None
        None: 1 / sqrt(head_dim).
    softcap : float
        No logit gets larger than this, nor smaller than its negative (Gemma 2, arXiv 2408.00118);
        0: no cap.
    window : int or None
        A query at position p sees the keys at positions above p - window, itself included: at
        least 2. None: all before it.
    sinks : bool
        A learned logit of each query head joins the softmax's denominator, and no value goes with
        it (gpt-oss): the weight of that short name, [heads].

    Raises
    ------
    UserError
        A value of a wrong type or range.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        if self.scale is not None and not (math.isfinite(self.scale) and self.scale > 0):
            raise UserError(f"the scale of attention must be a number above 0, got {self.scale!r}")
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise UserError(f"the soft cap of attention must be a number from 0 on (0: none), got "
                            f"{self.softcap!r}")
        if self.window is not None:
            check_int("the window of attention", self.window, low=2)
        check_bool("sinks", self.sinks)

    def scale_of(self, head_dim: int) -> float:
        """The factor on q . k in heads of this width."""
        return head_dim ** -0.5 if self.scale is None else self.scale


DEFAULT_FORM = AttentionForm()
