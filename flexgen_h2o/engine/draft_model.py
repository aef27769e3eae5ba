"""Drafters of a run: of a small model, or of the model's own layer for multi-token prediction."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

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
        drafter = MtpDrafter if runner.args.policy.speculate == "mtp" else ModelDrafter
        return drafter(runner.draft, max_tokens=max_tokens, vocab_size=runner.config.vocab_size)
    return None if runner.args.policy.speculate is None else NgramDrafter()


@dataclass
class _DraftedText:
    """The draft model's cache of a text, and the tokens in it.

    Attributes
    ----------
    workspace : Workspace
    tokens : list of int
    waiting : list of Tensor [rows, hidden]
        Hidden states of the verifying model that an `MtpDrafter` has not computed yet.
    cached : int
        Positions that it has computed.
    token, hidden : int, Tensor [1, hidden]
        Its first draft, and its own hidden states at the last of these positions.
    """

    workspace: Workspace
    tokens: list[int] = field(default_factory=list)
    waiting: list[Tensor] = field(default_factory=list)
    cached: int = 0
    token: int = 0
    hidden: Tensor | None = None


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

    def read_hidden(self, request: Request, hidden: Iterator[Tensor]) -> None:
        """Do nothing: drafts come from the text alone."""

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


class MtpDrafter(ModelDrafter):
    """Drafts by the model's own layer for multi-token prediction (arXiv 2412.19437, section 2.2).

    At a position the layer reads the hidden states of the model and the token that follows, and
    predicts the token after it. Further drafts come from the layer's own hidden states and from
    the tokens that it has drafted, as in vLLM. Positions with drafts are computed again by the
    hidden states of the model, once it has verified them.
    """

    def read_hidden(self, request: Request, hidden: Iterator[Tensor]) -> None:
        """Keep the hidden states of verified positions, and compute them `DRAFT_CHUNK` at a time.

        The last ones wait for the next drafts: a decode step without drafts does not run the layer.
        """
        text = self._texts.get(request.key)
        if text is None:
            text = self._texts[request.key] = _DraftedText(self._workspace())
        # Rows of rejected drafts are dropped, and rows past the model's positions.
        verified = min(len(request.history) - 1, self._max_tokens)
        for rows in hidden:
            waiting = sum(map(len, text.waiting))
            rows = rows[: max(0, verified - text.cached - waiting)]
            if waiting + len(rows) > DRAFT_CHUNK:
                self._compute(text, request)
            if len(rows):
                text.waiting.append(rows.clone())

    def begin(self, request: Request) -> None:
        """Compute the rest of the prompt."""
        self._compute(self._texts[request.key], request)

    def draft(self, request: Request, max_drafts: int) -> list[int]:
        """Return greedy predictions of the next tokens; none past the model's positions."""
        text, position = self._texts[request.key], len(request.history) - 1
        max_drafts = min(max_drafts, self._max_tokens - position)
        if max_drafts < 1:
            return []
        self._compute(text, request)
        drafts, hidden = [text.token], text.hidden
        assert hidden is not None
        for past in range(position, position + max_drafts - 1):
            token, hidden = self._predict(text, request.key, past, drafts[-1:], hidden)
            drafts.append(token)
        return drafts

    def _compute(self, text: _DraftedText, request: Request) -> None:
        """Compute the waiting positions of a text."""
        rows = sum(map(len, text.waiting))
        if rows:
            tokens = request.history[text.cached + 1 : text.cached + 1 + rows]
            text.token, text.hidden = self._predict(text, request.key, text.cached, tokens,
                                                    torch.cat(text.waiting))
            text.cached += rows
        text.waiting.clear()

    def _predict(self, text: _DraftedText, key: int, past: int, tokens: list[int], hidden: Tensor
                 ) -> tuple[int, Tensor]:
        """Compute positions from `past` on; return the last one's prediction and hidden states.

        `tokens` follow these positions, whose hidden states are [len(tokens), hidden].
        """
        drafted = Request(key, tokens)
        batch = batch_of_one(drafted, 0, past=past, chunk=len(tokens))
        batch.hidden = hidden
        self._runner.extend(text.workspace, batch,
                            GenerationSampler({key: GenerationRules(self._sampler, 1)}))
        return drafted.generated[0], text.workspace.hidden.get(0, len(tokens))[-1:].clone()
