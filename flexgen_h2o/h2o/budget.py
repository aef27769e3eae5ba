"""Budgets: tokens that stay cached per sequence, layer and KV head. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.limits import HOT_SET_FACTOR

# 0.29 * 100 is 28.999999999999996 in binary, but means 29.
_RATIO_SLACK = 1e-9


@dataclass(frozen=True)
class Budget:
    """The budget of one sequence in one layer, in tokens per KV head.

    Attributes
    ----------
    heavy : int
        Tokens that stay for their scores, in addition to sinks and recent tokens.
    recent : int
        Newest tokens, at least 1.
    sinks : int
        First tokens of the sequence, of its prompt or generated.
    """

    heavy: int
    recent: int
    sinks: int = 0

    @property
    def total(self) -> int:
        """Slots of the sequence."""
        return self.heavy + self.recent + self.sinks


def budget(h2o: H2OConfig | None, layer: int, prompt_len: int, new: int = 0) -> Budget | None:
    """Return the budget of a sequence of `prompt_len` tokens and `new` generated ones.

    A ratio r gives ``int(r * n)``, at least 1, where n is the length of the prompt, or of the whole
    text (`H2OConfig.budget_of`). Layers count from 0. Return None if the layer never evicts.
    """
    if h2o is None or h2o.is_full_at(layer):
        return None
    window = h2o.window(layer)
    if window is not None:
        return _within(window - 1, h2o, layer, prompt_len, new)
    return _budget(h2o, layer, prompt_len, new)


def _within(window: int, h2o: H2OConfig, layer: int, prompt_len: int, new: int) -> Budget:
    """Return the smaller of H2O's budget and the budget of a sliding window.

    `window` excludes the query's own position. There are no sinks: the first tokens leave the
    window, and count as heavy hitters until then.
    """
    user = h2o.without_windows()
    size = None if user.is_full_at(layer) else _budget(user, layer, prompt_len, new)
    if size is None or size.total >= window or not user.evict_generated:
        return Budget(0, window)
    return Budget(size.heavy + size.sinks, size.recent) if size.heavy else Budget(0, size.total)


def _budget(h2o: H2OConfig, layer: int, prompt_len: int, new: int) -> Budget:
    heavy_ratio, recent_ratio = h2o.ratios(layer)
    tokens = prompt_len + new if h2o.budget_of == "text" else prompt_len
    heavy = h2o.heavy_tokens or 0  # a window has neither a ratio nor a count
    recent = heavy if h2o.recent_tokens is None else h2o.recent_tokens
    if heavy_ratio is not None:
        heavy = _share(heavy_ratio, tokens)
    if recent_ratio is not None:
        recent = _share(recent_ratio, tokens)
    return Budget(heavy, recent, h2o.sink_tokens)


def _share(ratio: float, tokens: int) -> int:
    return max(1, int(ratio * tokens + _RATIO_SLACK))


def num_selected(h2o: H2OConfig | None, layer: int, prompt_len: int, new: int = 0) -> int | None:
    """Return the cached tokens that recall selects for a new token (`H2OConfig.recall`).

    Arguments are as in `budget`; `new` includes the new token. Return None if a new token
    attends to all cached tokens: without recall, and in layers with a window.
    """
    if h2o is None or not h2o.recall or h2o.window(layer) is not None:
        return None
    return None if h2o.ratios(layer) == (1, 1) else _budget(h2o, layer, prompt_len, new).total


def num_hot_slots(h2o: H2OConfig | None, layer: int, slots: int, share: float | None) -> int:
    """Return the hot-set slots of a KV head, for a cache with `slots` slots per sequence.

    Return 0 in layers that are fetched whole. `share` is `Policy.hot_set`.
    """
    count = num_selected(h2o, layer, slots)
    if count is None:
        return 0
    return min(slots, HOT_SET_FACTOR * count if share is None else max(count, _share(share, slots)))


def num_cached(h2o: H2OConfig | None, layer: int, prompt_len: int, new: int) -> int:
    """Return the tokens that are cached after a prompt was cut and `new` tokens were appended."""
    size = budget(h2o, layer, prompt_len)
    if size is None:
        return prompt_len + new
    if not h2o.evicts_generated_at(layer):
        return min(prompt_len, size.total) + new
    if h2o.budget_of == "text":
        return _cached_of_text(h2o, layer, prompt_len, new)
    return min(prompt_len + new, size.total)


def _cached_of_text(h2o: H2OConfig, layer: int, prompt_len: int, new: int) -> int:
    """Return the cached tokens of a cache whose budget grows with the text.

    A step adds at most one token, so each earlier budget plus the steps since then is a bound.
    """
    growth = sum(ratio for ratio in h2o.ratios(layer) if ratio is not None)
    tokens = prompt_len + new
    for back in range(max(new, 0) + 1):  # -1: before a prompt's last token
        # A budget of ratios is less than two tokens off a straight line.
        if (1 - growth) * back >= 2:
            break
        size = budget(h2o, layer, prompt_len, new - back)
        assert size is not None  # the layer evicts
        tokens = min(tokens, size.total + back)
    return tokens


def num_slots(h2o: H2OConfig | None, layer: int, prompt_len: int, new: int) -> int:
    """Return the maximum number of slots in use while `new` tokens are appended to a prompt.

    It is at most the budget, because a new token takes the slot of the evicted one. A simulation
    masks a full cache.
    """
    if h2o is not None and h2o.simulate:
        return prompt_len + new
    return num_cached(h2o, layer, prompt_len, new)
