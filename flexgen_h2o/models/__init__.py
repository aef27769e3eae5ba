"""Models: configurations, families with their forward pass, checkpoints and their formats.

To add a model family, see `families`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flexgen_h2o.models.model_config import family
from flexgen_h2o.models.registry import FAMILIES

__all__ = ["FAMILIES", "checkpoint_folder", "family"]


def checkpoint_folder(name: str, *, dtype: str | None = None,
                      progress: Callable[[int, int], None] | None = None) -> Path:
    """Return the local Hugging Face folder of a model; see `sources.checkpoint_folder`."""
    from flexgen_h2o.models import sources  # here, because it imports torch

    return sources.checkpoint_folder(name, dtype=dtype, progress=progress)
