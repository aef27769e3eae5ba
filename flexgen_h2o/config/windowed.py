"""H2O in a model some of whose layers attend to a window. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from flexgen_h2o.config.attention_form import AttentionForm
from flexgen_h2o.config.h2o import H2OConfig


@dataclass(frozen=True)
class WindowedH2O(H2OConfig):
    """An `H2OConfig` with the windows of the model's layers, as `windowed` makes it of a user's.

    A layer with a window caches what the next token will see, one token fewer than the window, and
    a new one takes the slot of the oldest. A budget of H2O that is smaller than that counts there
    instead, but for two things: the first tokens are not pinned, as the window leaves them, and
    where generated tokens are not evicted the window alone decides.

    Parameters
    ----------
    windows : tuple of (int or None)
        One for each decoder layer.
    """

    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        """See `H2OConfig.window`."""
        return self.windows[layer]

    def is_full_at(self, layer: int) -> bool:
        """See `H2OConfig.is_full_at`."""
        return self.windows[layer] is None and super().is_full_at(layer)

    @property
    def is_full(self) -> bool:
        """See `H2OConfig.is_full`."""
        return all(map(self.is_full_at, range(len(self.windows))))

    def evicts_generated_at(self, layer: int) -> bool:
        """See `H2OConfig.evicts_generated_at`."""
        return self.evict_generated or self.windows[layer] is not None

    def evicts_chunks(self, *, compressed: bool) -> bool:
        """See `H2OConfig.evicts_chunks`: where only windows drop anything, chunks lose nothing by
        it."""
        return super().evicts_chunks(compressed=compressed) or (
            not compressed and self.of_user().is_full)

    def of_user(self) -> H2OConfig:
        """See `H2OConfig.of_user`."""
        return self._user

    @cached_property
    def _user(self) -> H2OConfig:
        user = H2OConfig(**_options(self) | {"prompt_chunk": None})
        # Chunks are evicted from here though nothing else may be.
        return user if user.is_full else replace(user, prompt_chunk=self.prompt_chunk)


def windowed(h2o: H2OConfig | None, forms: Sequence[AttentionForm]) -> H2OConfig | None:
    """The configuration for layers of these forms, of a user's or of one for other layers; without
    a window it is the user's."""
    h2o = None if h2o is None else h2o.of_user()
    windows = tuple(form.window for form in forms)
    if not any(windows):
        return h2o
    # Whatever else a full cache is given has no effect.
    if h2o is None or h2o.is_full and not h2o.recall:
        h2o = H2OConfig(simulate=h2o is not None and h2o.simulate)
    return WindowedH2O(**_options(h2o), windows=windows)


def _options(h2o: H2OConfig) -> dict[str, Any]:
    return {each.name: getattr(h2o, each.name) for each in fields(H2OConfig)}
