"""The budget: tokens that stay cached per sequence, layer and KV head. No torch: the memory plan
asks."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.limits import HOT_SET

# 0.29 * 100 is 28.999999999999996 in binary, but 29 was meant.
_RATIO_SLACK = 1e-9


@dataclass(frozen=True)
class Budget:
    """The budget of one sequence in one layer, in tokens per KV head.

    The `sinks` are the first tokens of the sequence, of its prompt or generated; `recent` are the
    newest, at least 1; `heavy` of the others stay, those with the highest scores.
    """

    heavy: int
    recent: int
    sinks: int = 0

    @property
    def total(self) -> int:
        """Slots that are enough for the sequence."""
        return self.heavy + self.recent + self.sinks


def budget(h2o: H2OConfig | None, layer: int, prompt_len: int, new: int = 0) -> Budget | None:
    """The budget of a sequence whose prompt has `prompt_len` tokens, and `new` came after it.

    A ratio r gives ``int(r * n)``, at least 1, where n are the tokens of the prompt, or all of them
    (`H2OConfig.budget_of`). `layer` counts decoder layers from 0. Returns None where the
    configuration never evicts.
    """
    if h2o is None or h2o.is_full_at(layer):
        return None
    window = h2o.window(layer)
    if window is not None:
        return _within(window - 1, h2o, layer, prompt_len, new)
    return _budget(h2o, layer, prompt_len, new)


def _within(most: int, h2o: H2OConfig, layer: int, prompt_len: int, new: int) -> Budget:
    """The smaller of H2O's budget and the `most` tokens that a window shows beside the newest.

    Nothing is pinned: the first tokens leave the window, and are heavy hitters until then.
    """
    user = h2o.of_user()
    size = None if user.is_full_at(layer) else _budget(user, layer, prompt_len, new)
    if size is None or size.total >= most or not user.evict_generated:
        return Budget(0, most)
    return Budget(size.heavy + size.sinks, size.recent) if size.heavy else Budget(0, size.total)


def _budget(h2o: H2OConfig, layer: int, prompt_len: int, new: int) -> Budget:
    heavy_ratio, recent_ratio = h2o.ratios(layer)
    tokens = prompt_len + new if h2o.budget_of == "text" else prompt_len
    heavy = h2o.heavy_tokens or 0  # neither a ratio nor a count: a window
    recent = heavy if h2o.recent_tokens is None else h2o.recent_tokens
    if heavy_ratio is not None:
        heavy = _share(heavy_ratio, tokens)
    if recent_ratio is not None:
        recent = _share(recent_ratio, tokens)
    return Budget(heavy, recent, h2o.sink_tokens)


def _share(ratio: float, tokens: int) -> int:
    return max(1, int(ratio * tokens + _RATIO_SLACK))


def recalled(h2o: H2OConfig | None, layer: int, prompt_len: int, new: int = 0) -> int | None:
    """Cached tokens that a new one attends to, beside itself, where `H2OConfig.recall` chooses.

    The arguments are those of `budget`, `new` counting the new token. Returns None where a new
    token attends to all that is cached: without recall, and in layers that attend to a window.
    """
    if h2o is None or not h2o.recall or h2o.window(layer) is not None:
        return None
    return None if h2o.ratios(layer) == (1, 1) else _budget(h2o, layer, prompt_len, new).total


def hot_slots(h2o: H2OConfig | None, layer: int, slots: int, share: float | None) -> int:
    """Tokens of a KV head that memory holds of a cache on disk with so many slots of a sequence, if
    `recalled` ones alone are fetched; 0 in layers that are fetched whole. `share` is
    `Policy.fast_set`."""
    count = recalled(h2o, layer, slots)
    if count is None:
        return 0
    return min(slots, HOT_SET * count if share is None else max(count, _share(share, slots)))


def kept(h2o: H2OConfig | None, layer: int, prompt_len: int) -> int:
    """Tokens that are cached once the prompt has been cut."""
    size = budget(h2o, layer, prompt_len)
    return prompt_len if size is None else min(prompt_len, size.total)


def cached(h2o: H2OConfig | None, layer: int, prompt_len: int, new: int) -> int:
    """Tokens that are cached after `new` were appended to the prompt, evictions done."""
    size = budget(h2o, layer, prompt_len)
    if size is None:
        return prompt_len + new
    if not h2o.evicts_generated_at(layer):
        return min(prompt_len, size.total) + new
    if h2o.budget_of == "text":
        return _cached_of_text(h2o, layer, prompt_len, new)
    return min(prompt_len + new, size.total)


def _cached_of_text(h2o: H2OConfig, layer: int, prompt_len: int, new: int) -> int:
    """The tokens of a cache whose budget grows: a step adds one at most, whatever the budget has
    grown by, so each earlier budget with the tokens since then is a bound."""
    growth = sum(ratio for ratio in h2o.ratios(layer) if ratio is not None)
    found = prompt_len + new
    for back in range(max(new, 0) + 1):  # -1: before a prompt's last token
        # A budget of ratios is less than two tokens off the line through its growth.
        if (1 - growth) * back >= 2:
            break
        size = budget(h2o, layer, prompt_len, new - back)
        assert size is not None  # the layer evicts
        found = min(found, size.total + back)
    return found


def slots(h2o: H2OConfig | None, layer: int, prompt_len: int, new: int) -> int:
    """The most slots ever in use while `new` tokens are appended to the prompt.

    A new token is attended to beside the slots and then takes its victim's, so the budget is
    enough. A simulation masks a full cache, and needs all of it.
    """
    if h2o is not None and h2o.simulate:
        return prompt_len + new
    return cached(h2o, layer, prompt_len, new)
