"""Sparse attention against its definition in NumPy, and end to end on every placement."""

from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch
from helpers import generation
from helpers.fakes import LazyDevice
from helpers.generation import make_prompts, token_ids
from helpers.internals import open_devices, own_attention, sparse_attention
from helpers.kernel_cases import FORMS, copied, decode_case, poisoned_memory, same
from helpers.selection import full
from torch.profiler import ProfilerActivity, profile

from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.cache.tiers import gather_slots
from flexgen_h2o.config.cache_layout import CacheOptions, GroupLayout
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.models.registry import published
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.storage.transfer import D2H, H2D

run = partial(generation.run, new=20)
NEW = 20  # more than the write-back log of a cache on disk


def floats(x, layout=None) -> np.ndarray:
    return reference.unpack_slots(x, layout).float().numpy()


def chosen_by_hand(weights: np.ndarray, sparsity: float) -> list[int]:
    """Tokens that a KV head reads; weights are float32 [query heads, cached]."""
    scores = [float(x) for x in weights.sum(0)]
    order = sorted(range(len(scores)), key=lambda i: (scores[i], i), reverse=True)
    return order[: max(1, int(sparsity * len(scores)))]


def by_hand(case, sparsity: float) -> tuple[np.ndarray, dict]:
    """Output [sequences, heads, head_dim], and by sequence and KV head the selected tokens."""
    q, k, v = (floats(case[name]) for name in "qkv")
    keys, values = floats(case["slots"], case["layout"])
    group = q.shape[1] // k.shape[1]
    out, selected = np.zeros_like(q), {}
    for s, cached in enumerate(case["metadata"][0].tolist()):
        for head in range(k.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            every = np.concatenate([keys[s, head, :cached], k[s, head][None]])
            logits = q[s, heads] @ every.T / np.sqrt(np.float32(q.shape[-1]))
            weights = np.exp(logits - logits.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            index = selected[s, head] = chosen_by_hand(weights[:, :-1], sparsity)
            out[s, heads] = weights[:, index] @ values[s, head, index]
            out[s, heads] += weights[:, -1:] * v[s, head]
    return out, selected


def attend(case, sparsity: float):
    """Both steps, on a copy of the case: what came out, and the copy."""
    copies = {name: copied(x) for name, x in case.items()}
    slots, metadata, layout = copies["slots"], copies["metadata"], copies["layout"]
    index, weights = ops.select_values(copies["q"], copies["k"], keys=slots[0], metadata=metadata,
                                       sparsity=sparsity, layout=layout)
    values = gather_slots(slots[1].contiguous(), index)
    out, taken = ops.attend_selected(copies["k"], copies["v"], slots=slots, values=values,
                                     weights=weights, metadata=metadata, layout=layout)
    return index, weights, out, taken, copies


def hold_to_definition(case, sparsity: float) -> None:
    expected, selected = by_hand(case, sparsity)
    index, weights, out, taken, after = attend(case, sparsity)
    sequences, kv_heads, n = case["slots"].shape[1:4]
    assert index.shape == (sequences, kv_heads, max(1, int(sparsity * n)))
    assert index.dtype == torch.int32 and weights.dtype == torch.float32
    for (s, head), tokens in selected.items():
        count, group = len(tokens), case["q"].shape[1] // kv_heads
        assert sorted(index[s, head, :count].tolist()) == sorted(tokens)
        assert (index[s, head, count:] == 0).all()
        assert (weights[s, head * group : (head + 1) * group, count:-1] == 0).all()
    assert out.dtype == case["q"].dtype and out.shape == case["q"].shape
    rounding = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.float(), torch.from_numpy(expected), rtol=rounding, atol=2e-5)
    _, taken_by_full = reference.decode_attention(
        case["q"], case["k"], case["v"], slots=(wanted := copied(case["slots"])),
        metadata=case["metadata"], layout=case["layout"])
    assert same(after["slots"], wanted) and same(taken, taken_by_full)
    for name in ("q", "k", "v", "metadata"):
        assert same(after[name], case[name])


@pytest.fixture(autouse=True)
def _poison():
    with poisoned_memory():
        yield


@pytest.mark.parametrize("stored", FORMS)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("cached", [[1], [40], [5, 1, 33], [17, 16, 64, 2]], ids=str)
@pytest.mark.parametrize("sparsity", [0.01, 0.3, 1.0])
def test_sparse_attention(stored, group, cached, sparsity):
    hold_to_definition(decode_case(cached, stored=stored, group=group, dim=32), sparsity)


@pytest.mark.parametrize("group", [1, 4])
def test_ties_select_the_newer_tokens(group):
    """Few different keys, of integers: the logits of many are equal to the bit."""
    case = decode_case([30, 13], group=group)
    for name in ("q", "k"):
        case[name] = case[name].round()
    for s, cached in enumerate([30, 13]):
        some = case["slots"][0, s, :, :3].round()
        case["slots"][0, s, :, :cached] = some.repeat(1, 10, 1)[:, :cached]
    for sparsity in (0.1, 0.4, 0.5, 0.95):
        hold_to_definition(case, sparsity)


def peak_bytes(function) -> int:
    """The most bytes of tensors that a call holds beside its arguments."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes))


@pytest.mark.parametrize("stored", FORMS)
@pytest.mark.parametrize("sparsity", [0.1, 0.9])
def test_memory_plan_covers_the_scratch(stored, sparsity):
    case = decode_case([300, 300], stored=stored, group=4, kv_heads=8, dim=128, n=301)

    def step():
        slots, metadata, layout = case["slots"], case["metadata"], case["layout"]
        index, weights = ops.select_values(case["q"], case["k"], keys=slots[0, :, :, :300],
                                           metadata=metadata, sparsity=sparsity, layout=layout)
        ops.attend_selected(case["k"], case["v"], slots=slots, values=gather_slots(slots[1], index),
                          weights=weights, metadata=metadata, layout=layout)

    case["slots"] = case["slots"].contiguous()
    held = peak_bytes(step)
    bits, itemsize = (16, stored.itemsize) if isinstance(stored, torch.dtype) else (stored, 2)
    load = Workload(prompt_len=270, gen_len=32, gpu_batch_size=2, num_gpu_batches=1)
    run = PlannedRun(published("meta-llama/Meta-Llama-3-8B"), Policy(), load, itemsize, True,
                     False, CacheOptions(bits=bits, attn_sparsity=sparsity))
    assert held <= sparse_attention(run) <= own_attention(run)
    # Float32 needs no other copy of the keys.
    assert stored == torch.float32 or sparse_attention(run) < 1.5 * held


# End to end


LENGTHS = [19, 4, 12]


def test_sparsity_1_is_the_full_cache(tiny_model, monkeypatch):
    """A sparsity of 1 never comes near the operations of sparse attention."""
    tiny = tiny_model("llama")
    prompts = make_prompts(tiny.model.config.vocab_size, LENGTHS)
    full, _ = run(tiny, prompts)
    for name in ("select_values", "attend_selected"):
        monkeypatch.setattr(ops, name, None)
    assert run(tiny.folder, prompts, attn_sparsity=1)[0] == full


@pytest.mark.parametrize("bits", [8, *full(16)])
def test_only_selected_values_are_transferred(tiny_model, monkeypatch, bits):
    open_devices(monkeypatch, LazyDevice)
    tiny = tiny_model("llama")
    lengths, layers, heads, dim = [40, 40], 3, 2, 8
    prompts = make_prompts(tiny.model.config.vocab_size, lengths)
    moved = {}
    for share in (1.0, 0.25):
        _, stats = run(tiny.folder, prompts, attn_sparsity=share, cache_bits=bits,
                       gpu_batch_size=2, cache=Placement(0, 100, 0))
        moved[share] = [stats.links[link][0] for link in (H2D, D2H)]
    record = 4 * dim if bits == 16 else GroupLayout(dim, bits).nbytes
    vectors = len(lengths) * layers * heads
    selected = vectors * sum(int(0.25 * (40 + token)) for token in range(NEW - 1))
    slots = vectors * (NEW - 1) * (40 + NEW - 1)
    assert moved[1.0][0] - moved[0.25][0] == record * (slots - selected)
    assert moved[0.25][1] - moved[1.0][1] == 4 * selected, "an index for each value"


def test_continuations_are_scored_as_generated(tiny_model):
    tiny = tiny_model("llama")
    prompts = make_prompts(tiny.model.config.vocab_size, LENGTHS)
    with LLM(str(tiny.folder), dtype="float32", attn_sparsity=0.1,
             policy=Policy(gpu_batch_size=2)) as llm:
        greedy = token_ids(llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1))
        scores = llm.loglikelihood(list(zip(prompts, greedy, strict=True)))
        others = llm.loglikelihood([(p, [*t[:-1], (t[-1] + 1) % 100])
                                    for p, t in zip(prompts, greedy, strict=True)])
    with LLM(str(tiny.folder), dtype="float32") as llm:
        full = llm.loglikelihood(list(zip(prompts, greedy, strict=True)))
    for scored, other, dense in zip(scores, others, full, strict=True):
        assert scored[:-1] == pytest.approx(other[:-1], abs=1e-5) and scored[-1] > other[-1]
        assert scored[0] == pytest.approx(dense[0], abs=1e-4), "the prompt is exact"
        assert scored[2:] != pytest.approx(dense[2:], abs=1e-3)


@pytest.mark.parametrize("options", [{"attn_sparsity": 0}, {"attn_sparsity": 1.01},
                                     {"attn_sparsity": True},
                                     {"attn_sparsity": 0.5, "h2o": H2OConfig(heavy_ratio=0.2)},
                                     {"attn_sparsity": 0.5, "h2o": H2OConfig(simulate=True)}])
def test_unsupported_options_are_errors(tiny_model, options):
    with pytest.raises(UserError, match="attn_sparsity"):
        LLM(str(tiny_model("opt").folder), dtype="float32", **options)
