"""Drafters of a run; drafts of a small model with the same token ids, resident in memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import takewhile

from flexgen_h2o.config.limits import DRAFT_CHUNK
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.blocks import Request, batch_of_one
from flexgen_h2o.engine.runner import Runner
from flexgen_h2o.engine.sampling import GenerationRules, GenerationSampler, Sampler
from flexgen_h2o.engine.speculation import Drafter, NgramDrafter
from flexgen_h2o.engine.workspace import Workspace, WorkspaceSize
from flexgen_h2o.h2o.batch_layout import BatchLayout


def new_drafter(runner: Runner, *, max_tokens: int) -> Drafter | None:
    """Return the drafter of a run for texts of up to `max_tokens` tokens.

    It is None without speculation.
    """
    if runner.draft is not None:
        return ModelDrafter(runner.draft, max_tokens=max_tokens,
                            vocab_size=runner.config.vocab_size)
    return None if runner.args.policy.speculate is None else NgramDrafter()


@dataclass
class _DraftedText:
    """The draft model's cache of a text, and the tokens in it."""

    workspace: Workspace
    tokens: list[int] = field(default_factory=list)


class ModelDrafter:
    """Drafts the greedy continuation of a draft model.

    Each request has its own full cache, in which new tokens overwrite rejected drafts.

    Parameters
    ----------
    runner : Runner
        Runner of the draft model. Its cache never evicts.
    max_tokens : int
        Maximum length of a text.
    vocab_size : int
        The number of the verifying model's token ids.
    """

    def __init__(self, runner: Runner, *, max_tokens: int, vocab_size: int):
        self._runner = runner
        self._vocab_size = vocab_size
        self._max_tokens = min(max_tokens, runner.config.plain_positions)
        self._layout = BatchLayout((self._max_tokens,), 0)
        self._sampler = Sampler(SamplingParams(do_sample=False), ())
        self._texts: dict[int, _DraftedText] = {}

    def begin(self, request: Request) -> None:
        """Cache the text."""
        self.draft(request, 1)

    def draft(self, request: Request, max_drafts: int) -> list[int]:
        """Return the greedy continuation of the text; no tokens past the model's positions."""
        text, history = self._texts.get(request.key), request.history
        max_drafts = min(max_drafts, self._max_tokens - len(history) + 1)
        if max_drafts < 1:
            return []
        if text is None:
            text = self._texts[request.key] = _DraftedText(self._workspace())
        cached = len(os.path.commonprefix([text.tokens, history[:-1]]))
        drafted = Request(request.key, history[cached:])
        if max(drafted.prompt) >= self._runner.config.vocab_size:
            return []
        self._runner.extend(
            text.workspace, batch_of_one(drafted, max_drafts - 1, past=cached, chunk=DRAFT_CHUNK),
            GenerationSampler({request.key: GenerationRules(self._sampler, max_drafts)}))
        text.tokens = history + drafted.generated[:-1]
        # Either model may have padded its vocabulary.
        return list(takewhile(lambda token: token < self._vocab_size, drafted.generated))

    def _workspace(self) -> Workspace:
        """Return the memory of one text."""
        workspace = self._runner.workspace(WorkspaceSize.of_one(
            self._layout.sizes, None, self._runner.config.num_layers, rows=DRAFT_CHUNK))
        workspace.cache.begin([self._layout])
        return workspace

    def forget(self, request: Request) -> None:
        """Free the cache of a request."""
        text = self._texts.pop(request.key, None)
        if text is not None:
            text.workspace.close()

    def close(self) -> None:
        """Free the caches of all requests."""
        for text in self._texts.values():
            text.workspace.close()
        self._texts.clear()
