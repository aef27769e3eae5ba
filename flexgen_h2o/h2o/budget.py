"""The budget: tokens that stay cached per sequence, layer and KV head. No torch: the memory plan
asks."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.config.h2o import H2OConfig

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


def budget(h2o: H2OConfig | None, layer: int, prompt_len: int) -> Budget | None:
    """The budget of a sequence whose prompt has `prompt_len` tokens.

    A ratio r gives ``int(r * prompt_len)``, at least 1. `layer` counts decoder layers from 0.
    Returns None where the configuration never evicts.
    """
    if h2o is None or h2o.is_full_at(layer):
        return None
    window = h2o.window(layer)
    if window is not None:
        return _within(window - 1, h2o, layer, prompt_len)
    return _budget(h2o, layer, prompt_len)


def _within(most: int, h2o: H2OConfig, layer: int, prompt_len: int) -> Budget:
    """The smaller of H2O's budget and the `most` tokens that a window shows beside the newest.

    Nothing is pinned: the first tokens leave the window, and are heavy hitters until then.
    """
    user = h2o.of_user()
    size = None if user.is_full_at(layer) else _budget(user, layer, prompt_len)
    if size is None or size.total >= most or not user.evict_generated:
        return Budget(0, most)
    return Budget(size.heavy + size.sinks, size.recent) if size.heavy else Budget(0, size.total)


def _budget(h2o: H2OConfig, layer: int, prompt_len: int) -> Budget:
    heavy_ratio, recent_ratio = h2o.ratios(layer)
    heavy = h2o.heavy_tokens or 0  # neither a ratio nor a count: a window
    recent = heavy if h2o.recent_tokens is None else h2o.recent_tokens
    if heavy_ratio is not None:
        heavy = _share(heavy_ratio, prompt_len)
    if recent_ratio is not None:
        recent = _share(recent_ratio, prompt_len)
    return Budget(heavy, recent, h2o.sink_tokens)


def _share(ratio: float, prompt_len: int) -> int:
    return max(1, int(ratio * prompt_len + _RATIO_SLACK))


def kept(h2o: H2OConfig | None, layer: int, prompt_len: int) -> int:
    """Tokens that are cached once the prompt has been cut."""
    size = budget(h2o, layer, prompt_len)
    return prompt_len if size is None else min(prompt_len, size.total)


def cached(h2o: H2OConfig | None, layer: int, prompt_len: int, new: int) -> int:
    """Tokens that are cached after `new` were appended to the prompt, evictions done."""
    size = budget(h2o, layer, prompt_len)
    if size is None:
        return prompt_len + new
    if h2o.evicts_generated_at(layer):
        return min(prompt_len + new, size.total)
    return min(prompt_len, size.total) + new


def slots(h2o: H2OConfig | None, layer: int, prompt_len: int, new: int) -> int:
    """The most slots ever in use while `new` tokens are appended to the prompt.

    A new token is attended to beside the slots and then takes its victim's, so the budget is
    enough. A simulation masks a full cache, and needs all of it.
    """
    if h2o is not None and h2o.simulate:
        return prompt_len + new
    return cached(h2o, layer, prompt_len, new)
