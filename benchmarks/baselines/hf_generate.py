"""transformers' generate with a clock: what all systems that run its models share.

torch is loaded only where a model runs: what a comparison asks of a system before that needs none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baselines.base import Baseline, Timings
from flexgen_h2o.models.registry import from_transformers

if TYPE_CHECKING:
    import torch


class StepClock:
    """Notes the time after each token, and before all: the first token ends the prefill.

    A stopping criterion that never stops; transformers only calls it.
    """

    def __init__(self):
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
        if input_ids.is_cuda:  # the token is only queued there; `generate` waits for it right after
            import torch

            torch.cuda.current_stream().synchronize()
        self.times.append(time.perf_counter())
        return input_ids.new_zeros(len(input_ids)).bool()

    def timings(self, tokens: torch.Tensor) -> Timings:
        """With the tokens that were generated, [batch, new]."""
        prefill, *steps = (b - a for a, b in zip(self.times, self.times[1:], strict=False))
        return Timings(prefill, tuple(steps), tuple(map(tuple, tokens.tolist())))


def timed_generate(model, prompts: Sequence[Sequence[int]], gen_len: int) -> Timings:
    """Greedy tokens of token ids of any lengths, never stopping early; shorter ones are padded.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its end of text is an ordinary token from now on.
    prompts, gen_len
        As of `Baseline.generate`.
    """
    import torch

    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt):] = torch.tensor(prompt)
        mask[row, longest - len(prompt):] = 1
    near = "cuda" if torch.cuda.is_available() else "cpu"  # where all of them begin to compute
    ids, mask = ids.to(near), mask.to(near)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    clock = StepClock()
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=mask, max_new_tokens=gen_len, do_sample=False,
                               stopping_criteria=[clock])
    return clock.timings(found[:, longest:])


@contextmanager
def holding_cache(model, tokens: int) -> Iterator[None]:
    """Use as much memory as the keys and values of so many tokens, where they would be."""
    import torch

    shape = from_transformers(model.config, "model")
    near = "cuda" if torch.cuda.is_available() else "cpu"
    held = torch.ones(tokens * shape.kv_bytes_per_token(model.dtype.itemsize), dtype=torch.uint8,
                      device=near)
    yield
    del held


def empty_model(folder: Path):
    """A model of a folder's config without any weights, to see what it is made of."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


class HuggingFaceBaseline(Baseline):
    """One that runs a model of transformers: `prepare` sets `model`."""

    model: Any = None

    def generate(self, prompts: Sequence[Sequence[int]], gen_len: int) -> Timings:
        # Its cache grows: a run that is cut short must have room for the tokens that are left out.
        with holding_cache(self.model, len(prompts) * (self.settings.gen_len - gen_len)):
            return timed_generate(self.model, prompts, gen_len)

    def close(self) -> None:
        self.model = None
