"""The subject of a scenario: a folder, what is in it, and the prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from comparison.config import ComparisonScenario
from comparison.prompts import random_prompts, text_prompts
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.positions import check_length
from flexgen_h2o.models.registry import from_transformers, published, read_config


@dataclass(frozen=True)
class ComparisonSubject:
    """A Hugging Face folder, its sizes, and token ids for the largest batch."""

    folder: Path
    model: ModelConfig
    prompts: list[list[int]]

    @property
    def largest_file(self) -> Path:
        """A large file of the folder, to measure the disk with."""
        return max(self.folder.iterdir(), key=lambda path: path.stat().st_size)


def subject_of(scenario: ComparisonScenario, models: Path) -> ComparisonSubject:
    """Find or fetch the model, and make the prompts.

    Raises
    ------
    UserError
        It cannot be had, or the texts are too long for its positions.
    """
    folder = models / scenario.model
    if not folder.is_dir():
        folder = _fetched(scenario, folder)
    model = from_transformers(read_config(folder), scenario.model)
    if scenario.prompts is None:
        prompts = random_prompts(scenario.largest, scenario.prompt_len, model.vocab_size)
    else:
        prompts = text_prompts(scenario.prompts, scenario.prompt_key, folder, scenario.largest)
    if not scenario.past_positions:
        check_length(model, None, prompt=f"the longest prompt of scenario {scenario.name}",
                     length=max(map(len, prompts)), new_tokens=scenario.gen_len)
    return ComparisonSubject(folder, model, prompts)


def _fetched(scenario: ComparisonScenario, folder: Path) -> Path:
    """A model that is not below ``--models``; one of random weights the user has to make."""
    shapes = (f"{owner}/{scenario.model}" for owner in ("facebook", "meta-llama"))
    shape = next((name for name in shapes if published(name) is not None), None)
    if shape is not None:
        raise UserError(f"scenario {scenario.name}: there is no folder {folder}: python "
                        f"benchmarks/make_checkpoint.py --model {shape} --out {folder} "
                        f"--dtype {scenario.dtype}")
    from flexgen_h2o.models import checkpoint_folder  # only now: it loads torch

    return checkpoint_folder(scenario.model, dtype=scenario.dtype)
