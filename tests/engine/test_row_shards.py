"""Weights on disk that are streamed in row shards: the same tokens, in order, in small buffers."""

from __future__ import annotations

import pytest
import torch
from helpers.generation import make_prompts
from helpers.internals import shards_out_of_order, staging_bytes, weights_of
from helpers.tiny_models import TINY

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.config import limits
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.models import family
from flexgen_h2o.models.layers import Operations
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.planning.memory_plan import memory_plan
from flexgen_h2o.storage import placement

pytestmark = pytest.mark.usefixtures("on_cpu")

LENGTHS = [30, 11, 7, 23, 1]
NEW = 5


def tokens(tiny, *, bits=16, look=lambda llm: None, h2o=None, **policy):
    prompts = make_prompts(tiny.model.config.vocab_size, LENGTHS)
    with LLM(str(tiny.folder), policy=Policy(**policy), weight_bits=bits, weight_cache=None,
             dtype="float32", h2o=h2o, progress=False) as llm:
        outputs = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        look(llm)
        return [out.token_ids for out in outputs]


class Noting(Operations):
    """Notes the weights of products."""

    def __init__(self):
        super().__init__()
        self.used = []

    def linear(self, x, weight, bias, *, out):
        self.used.append(weight)
        super().linear(x, weight, bias, out=out)

    def add_linear_(self, residual, x, weight, bias):
        self.used.append(weight)
        super().add_linear_(residual, x, weight, bias)


@pytest.mark.parametrize("key", TINY)
def test_matrices_are_stored_in_order_of_use(key):
    config = from_transformers(TINY[key](), key)
    kind, do = family(config), Noting()
    specs = kind.weights(config).layers[config.attention_layers[0]]
    w = {name: torch.rand(spec.shape) for name, spec in specs.items()}
    x = torch.rand(2, config.hidden_size)
    q, _, _ = kind.attention_inputs(config, w, x, do)
    kind.attention_output(config, w, x, q, do)
    if not config.parallel_residual:
        kind.mlp(config, w, x, do)
    matrices = [name for name, each in w.items() if each.dim() == 2]
    assert [name for each in do.used for name, own in w.items() if own is each] == matrices


@pytest.mark.parametrize("disk", [30, 100])
def test_buffers_are_as_planned_and_reads_in_order(tiny_model, disk, monkeypatch):
    """As large as the plan says."""
    monkeypatch.setattr(placement, "MIN_SHARD_BYTES", 1)
    tiny = tiny_model("opt")
    config = from_transformers(tiny.config, "tiny")
    policy = Policy(weights=Placement(100 - disk, 0, disk), gpu_batch_size=5)
    planned = memory_plan(config, policy, Workload(30, NEW, 5, 1), itemsize=4)

    def look(llm):
        assert shards_out_of_order(llm) == 0
        sizes, units = staging_bytes(llm), weights_of(llm).units
        assert len(sizes) == limits.SHARD_BUFFERS
        assert sum(sizes) == next(row.cpu for row in planned.rows if row.name == "weight buffers")
        assert all(unit.fetched_bytes == 0 for unit in units)

    tokens(tiny, weights=policy.weights, gpu_batch_size=5, look=look)
