"""The warm-up: what a run generates before it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexgen_h2o.cli.run_config import RunConfig

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM

_TOKENS = 2
"""Of each sequence: the prefill gives one, a decode step the other."""


def warm_up(llm: LLM, prompts: Sequence[str | Sequence[int]], config: RunConfig) -> None:
    """Generate from the first GPU batch, and forget it.

    On a GPU as many tokens as will be measured: Triton compiles and tunes its kernels for the
    lengths that they meet, which takes seconds, so that two tokens leave some to be compiled.
    """
    tokens = config.cut_gen_len or config.gen_len
    if llm.device.type == "cpu":
        tokens = min(tokens, _TOKENS)
    # With --cut-gen-len, the run to come makes room for so many tokens only.
    llm.generate(prompts[: config.policy().gpu_batch_size], max_new_tokens=tokens,
                 eos_token_id=-1)
