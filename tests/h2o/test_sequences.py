"""Whole sequences through the operations keep the tokens of the definition in plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.definition import Definition, by_hand
from helpers.kernel_cases import MIXED, of_form

from flexgen_h2o.config.h2o import KERNELS, H2OConfig
from flexgen_h2o.h2o.budget import budget, num_slots
from flexgen_h2o.h2o.eviction import EMPTY, Cut, decode_metadata, eviction_of, new_state
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference import attention as reference

DIM, HEADS = 64, 2
SHARP = 8192.0
"""Scale of keys of ones and zeros with which attention is exactly 1 for one key, else 0."""


@dataclass
class Heads:
    """The cache of a layer, driven through the operations as `KVCache` does."""

    module: Any
    h2o: H2OConfig
    prompts: tuple[int, ...]
    new: int
    form: Any
    group: int

    def __post_init__(self) -> None:
        self.dtype, self.layout = of_form(self.form, DIM)
        eviction = eviction_of(self.h2o)
        n = max(num_slots(self.h2o, 0, length, self.new) for length in self.prompts)
        rope = None
        if self.h2o.positions == "rolling":  # by an angle of 0: ranks alone are looked at
            rope = torch.ones(n + 1, DIM // 2), torch.zeros(n + 1, DIM // 2)
        shape = (len(self.prompts), HEADS, n)
        self.state = new_state(shape, eviction, rope=rope, device=torch.device("cpu"))
        kinds, width, dtype = 2, DIM, self.dtype
        if self.layout:
            kinds, width, dtype = self.layout.kinds, self.layout.width, torch.uint8
        self.slots = torch.full((kinds, *shape, width), 255).to(dtype)

    def prefill(self, q, k, v) -> None:
        scores = torch.zeros(HEADS, len(k))
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        self.module.prefill_attention(q, k, v, list(self.prompts), scores=scores,
                                      decay=self.state.eviction.decay)
        sizes = [budget(self.h2o, 0, length) for length in self.prompts]
        cuts = [Cut(length, size.heavy, size.recent)
                for length, size in zip(self.prompts, sizes, strict=True)]
        self.module.select_heavy_hitters(k, v, scores, cuts=cuts, slots=self.slots,
                                         state=self.state,
                                         layout=self.layout)

    def append(self, number: int, q, k, v) -> None:
        metadata = decode_metadata(self.prompts, [length + number for length in self.prompts],
                                   self.h2o, 0)
        self.module.decode_attention(*(x.to(self.dtype) for x in (q, k, v)), slots=self.slots,
                                     metadata=metadata, layout=self.layout, state=self.state)

    def hold_to(self, definitions: list[list[Definition]], keys: torch.Tensor) -> None:
        """keys [sequences, HEADS, tokens, DIM]: each slot has the key of the position it says."""
        found = reference.unpack_slots(self.slots, self.layout)[0]
        for s, heads in enumerate(definitions):
            for head, one in enumerate(heads):
                positions, count = self.state.positions[s, head], len(one.held)
                assert sorted(positions[:count].tolist()) == one.held
                assert (positions[count:] == EMPTY).all()
                wanted = keys[s, head, positions[:count].long()]
                assert (found[s, head, :count] - wanted).abs().max() < 0.3
                if self.state.ranks is not None:
                    order = positions[:count].argsort().argsort()
                    assert self.state.ranks[s, head, :count].equal(order.int())


def hold_operations_to_definition(module, h2o, prompts, new, *, form=torch.float32, group=1,
                                  sharp=True, seed=0) -> None:
    """With `sharp` each query attends to one cached token, so that many scores are equal."""
    generator = torch.Generator().manual_seed(seed)
    heads = Heads(module, h2o, prompts, new, form, group)
    shape = (len(prompts), HEADS, max(prompts) + new)
    keys = torch.randn(*shape, DIM, generator=generator)
    if sharp:
        keys = torch.eye(DIM)[: shape[-1]].expand(*shape, DIM)
    values = torch.randn(*shape, DIM, generator=generator)
    definitions = [[Definition(n, by_hand(h2o, 0, n), h2o) for _ in range(HEADS)] for n in prompts]

    def step(s: int) -> torch.Tensor:
        """The next token of a sequence: the definition's turn. Returns q [HEADS * group, DIM]."""
        queries = torch.randn(HEADS, group, DIM, generator=generator) * 2
        for head, one in enumerate(definitions[s]):
            held = [*one.held, one.queries]
            if sharp:
                chosen = torch.randint(len(held), (group,), generator=generator)
                queries[head] = SHARP * torch.eye(DIM)[[held[i] for i in chosen]]
            scores = queries[head].double() @ keys[s, head, held].double().T * DIM**-0.5
            row = np.zeros(one.queries + 1, dtype=np.float32)
            row[held] = scores.softmax(-1).sum(0).numpy()
            one.step(row)
        return queries.flatten(0, 1)

    packed = [torch.cat([x[s, :, :n].transpose(0, 1) for s, n in enumerate(prompts)])
              for x in (keys, values)]
    heads.prefill(torch.stack([step(s) for s, n in enumerate(prompts) for _ in range(n)]), *packed)
    heads.hold_to(definitions, keys)
    for number in range(1, new + 1):
        at = torch.tensor(prompts) + number - 1
        k, v = (x[torch.arange(len(prompts)), :, at] for x in (keys, values))
        heads.append(number, torch.stack([step(s) for s in range(len(prompts))]), k, v)
        heads.hold_to(definitions, keys)


POLICIES = [{"heavy_ratio": 0.2}, {"heavy_tokens": 5, "recent_tokens": 3, "sink_tokens": 2},
            {"heavy_tokens": 40, "recent_tokens": 1}, {"recent_tokens": 6, "sink_tokens": 1},
            {"heavy_tokens": 8, "recent_tokens": 2, "positions": "rolling"},
            {"heavy_tokens": 3, "evict_generated": False}]


@pytest.mark.parametrize("module", [ops, reference])
@pytest.mark.parametrize("score", KERNELS)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_operations_keep_the_tokens_of_the_definition(module, score, policy):
    h2o = H2OConfig(**policy, score=score, decay=0.5)
    for group in (1, 3):
        hold_operations_to_definition(module, h2o, (20, 1, 7, 13), 30, group=group)
    hold_operations_to_definition(module, h2o, (20, 3), 30, sharp=False)


@pytest.mark.parametrize("module", [ops, reference])
@pytest.mark.parametrize("form", [torch.bfloat16, torch.float16, 8, 4, *MIXED])
def test_every_cache_layout(module, form):
    """The same tokens stay where keys are exact in every form."""
    for policy in POLICIES[1], POLICIES[4]:
        hold_operations_to_definition(module, H2OConfig(**policy), (24, 9), 40, form=form, group=4)
