"""llama.cpp as a baseline: its GGUF files, what it is asked for, its tokens where it is there."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.programs import benchmark_modules
from safetensors.torch import load_file

from flexgen_h2o import LLM
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.dummy import DummyCheckpoint
from flexgen_h2o.models.gguf.checkpoint import read_gguf
from flexgen_h2o.models.gguf.config import config_of
from flexgen_h2o.models.registry import from_transformers, published, read_config

VOCAB = 50
PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14], [15]]


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules by the last part of their names."""
    with benchmark_modules("baselines", "baselines.llama_cpp", "baselines.huggingface",
                           "make_checkpoint") as found:
        yield found


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))


def baseline_of(bench, options: dict | None = None, **settings):
    return bench.llama_cpp.LlamaCpp(bench.baselines.BaselineSettings(**{
        "dtype": "float32", "batch": len(PROMPTS), "prompt_len": 5, "gen_len": 4,
        "scratch": "scratch", "mean_prompt_len": 3.0,
        "options": bench.llama_cpp.LlamaCpp.check("l", options or {}), **settings}))


@pytest.mark.parametrize("key", ["llama", "qwen3_moe"])
def test_a_gguf_file_has_the_checkpoints_values(bench, tiny_model, key):
    folder = tiny_model(key).folder
    path = bench.llama_cpp.gguf_file(folder, "F32")
    header, tensors = read_gguf(path)
    weights = load_file(folder / "model.safetensors")
    assert set(tensors) == set(weights)
    for name, values in weights.items():
        read = torch.cat([part.reshape(-1) for part in tensors[name].chunks(torch.float32)])
        assert torch.equal(read.view(values.shape), values), name
    again, original = (from_transformers(values, "m") for values in (
        config_of(header, "float32"), read_config(folder)))
    assert again.rope == original.rope and again.num_parameters() == original.num_parameters()
    assert again.norm_eps == pytest.approx(original.norm_eps)
    assert again.experts == original.experts
    kept = path.stat().st_mtime_ns
    assert bench.llama_cpp.gguf_file(folder, "F32").stat().st_mtime_ns == kept, "made once"


def test_llama_3s_rotation_is_slowed_by_divisors(bench):
    factors = bench.llama_cpp.rope_factors(published("meta-llama/Llama-3.2-1B"))
    assert factors.shape == (32,) and factors.dtype == np.float32
    assert factors[0] == 1 and factors[-1] == pytest.approx(32), "fast pairs are kept"
    assert bench.llama_cpp.rope_factors(published("meta-llama/Llama-2-7b-hf")) is None


@pytest.mark.parametrize("key, weights, words", [
    ("opt", "Q4_0", "Qwen3-MoE only"),
    ("llama_untied_bias", "F32", "without biases"),
    ("llama_linear_rope", "F32", "rotated plainly"),
    ("qwen3_moe_windows", "F32", "and windows"),
    ("llama", "Q4_0", "not whole blocks of 32"),
])
def test_what_no_file_can_be_made_of_is_said(bench, tiny_model, tmp_path, key, weights, words):
    with pytest.raises(UserError, match=words):
        baseline_of(bench, {"weights": weights}).ready(tiny_model(key).folder)
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize("option, value", [("weights", "Q3_K"), ("n_ubatch", 0), ("threads", 0),
                                           ("flash_attention", 1), ("repack", "no")])
def test_options_are_checked(bench, option, value):
    with pytest.raises(UserError, match=f"system l: {option}"):
        bench.llama_cpp.LlamaCpp.check("l", {option: value})


class FakeLlama:
    """The functions of llama_cpp that the baseline calls: the next token is the last one plus 1.

    Attributes
    ----------
    calls : list of list
        Of each call of `llama_decode`: token, position, sequence, and whether one is to follow.
    threads : list of tuple
        As they were set, for steps and for prompts.
    """

    def __init__(self):
        self.calls, self.threads, self.freed = [], [], []
        self.context = None

    def __getattr__(self, name):  # whatever else is called
        return lambda *_: SimpleNamespace()

    def llama_max_parallel_sequences(self):
        return 256

    def llama_vocab_n_tokens(self, vocab):
        return VOCAB

    def llama_print_system_info(self):
        return b"CPU :  SSE3 = 1 | "

    def llama_init_from_model(self, model, wanted):
        self.context = wanted
        return wanted

    def llama_set_n_threads(self, context, steps, prompts):
        self.threads.append((steps, prompts))

    def llama_batch_init(self, tokens, embeddings, sequences):
        return SimpleNamespace(n_tokens=0, **{name: [None] * tokens for name in (
            "token", "pos", "n_seq_id", "logits")}, seq_id=[[None] for _ in range(tokens)])

    def llama_decode(self, context, batch):
        self.calls.append([(batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.logits[i])
                           for i in range(batch.n_tokens)])
        return int(any(position >= context.n_ctx // context.n_seq_max
                       for _, position, _, _ in self.calls[-1]))

    def llama_get_logits_ith(self, context, index):
        token, _, _, follows = self.calls[-1][index]
        assert follows
        values = np.zeros(VOCAB, np.float32)
        values[(token + 1) % VOCAB] = 1
        self.kept = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return self.kept

    def llama_free(self, context):
        self.freed.append("context")

    def llama_model_free(self, model):
        self.freed.append("model")


@pytest.fixture
def fake(monkeypatch, bench):
    """The package in place of llama_cpp, and a file in place of what no test converts."""
    found = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", found)
    monkeypatch.setattr(bench.llama_cpp, "gguf_file", lambda *_: "model.gguf")
    return found


def test_every_token_is_computed_once_at_its_place(bench, fake, monkeypatch):
    monkeypatch.setattr(bench.llama_cpp, "N_BATCH", 4)
    baseline = baseline_of(bench, {"threads": 1, "n_ubatch": 4})
    assert baseline.prepare("m").startswith("Q4_0, 1 threads for steps and 1 for prompts")
    assert (fake.context.n_seq_max, fake.context.n_ctx) == (3, 3 * 256)
    assert fake.threads == [(1, 1)] and fake.calls == [], "nothing to try"
    found = baseline.generate(PROMPTS, 4)
    assert found.tokens == ((10, 11, 12, 13), (15, 16, 17, 18), (16, 17, 18, 19))
    assert len(found.steps) == 3 and min(found.prefill, *found.steps) > 0
    *prompts, _, _, step = fake.calls
    assert [len(call) for call in prompts] == [4, 4, 1], "as many as a call may have"
    assert [entry for call in prompts for entry in call] == [
        (token, position, row, position == len(prompt) - 1)
        for row, prompt in enumerate(PROMPTS) for position, token in enumerate(prompt)]
    assert step == [(12, 5, 0, True), (17, 7, 1, True), (18, 3, 2, True)]
    baseline.close()
    assert fake.freed == ["context", "model"]


def test_its_own_best_threads_are_found_among_those_there_are(bench, fake, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    seconds = iter(range(1000))  # a tick at each look
    slow = {1: 3, 2: 1, 3: 2}

    def clock():
        return next(seconds) * slow[fake.threads[-1][0]]

    monkeypatch.setattr(bench.llama_cpp, "time", SimpleNamespace(perf_counter=clock))
    baseline = baseline_of(bench)
    baseline.prepare("m")
    assert fake.threads[:6] == [(count, count) for count in (1, 2, 3)] * 2
    assert fake.threads[6] == (2, 2)


def test_what_llama_cpp_refuses_ends_the_run(bench, fake):
    baseline = baseline_of(bench, {"threads": 1}, gen_len=2)
    baseline.prepare("m")
    with pytest.raises(RuntimeError, match="llama_decode answers 1"):
        baseline.generate([[5] * 300] * 3, 2)
    with pytest.raises(UserError, match="at most 256 sequences"):
        baseline_of(bench, batch=257).prepare("m")


@pytest.mark.parametrize("key", ["llama", "llama3_rope", "qwen3_moe"])
def test_its_tokens_are_those_of_the_model(bench, tiny_model, key):
    """Where it is installed: `make .venv/.have-llama-cpp`."""
    pytest.importorskip("llama_cpp")
    baseline = baseline_of(bench, {"weights": "F32", "threads": 1, "flash_attention": False})
    try:
        baseline.prepare(tiny_model(key).folder)
        found = baseline.generate(PROMPTS, 4)
    finally:
        baseline.close()
    assert found.tokens == bench.huggingface.timed_generate(tiny_model(key).model, PROMPTS,
                                                            4).tokens


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "meta-llama/Llama-2-7b-hf",
                                  "facebook/opt-1.3b", "Qwen/Qwen3-30B-A3B"])
def test_a_checkpoint_of_a_published_shape_says_that_shape(bench, name):
    shape = published(name)
    made = from_transformers(bench.make_checkpoint.hf_config(shape, "bfloat16"), name)
    for field in ("family", "rope", "head_dim", "num_kv_heads", "ffn_size", "tie_word_embeddings",
                  "norm_eps", "activation", "max_positions", "experts", "qk_norm"):
        assert getattr(made, field) == getattr(shape, field), field
    assert made.num_parameters() == shape.num_parameters()


def test_a_checkpoint_of_some_layers_of_a_mixture(bench, tiny_model, tmp_path, monkeypatch):
    """Read by transformers and by the engine, each expert with the values of dummy weights."""
    from transformers import AutoModelForCausalLM

    shape = from_transformers(tiny_model("qwen3_moe").config, "tiny")
    monkeypatch.setattr(bench.make_checkpoint, "published", lambda name: shape)
    bench.make_checkpoint.make("tiny", tmp_path / "m", dtype="float32", layers=2)
    model, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, output_loading_info=True)
    assert not any(found.values()), "all are there, and no others"
    names = {spec.name: spec.shape for spec in shape.weights.experts[1][4].values()}
    dummy = DummyCheckpoint(names, torch.float32, 0)
    gate, up, down = (torch.empty(size) for size in names.values())
    for name, out in zip(names, (gate, up, down), strict=True):
        dummy.read(name, out)
    experts = model.model.layers[1].mlp.experts
    assert torch.equal(experts.gate_up_proj[4], torch.cat((gate, up)))
    assert torch.equal(experts.down_proj[4], down)
    model.set_experts_implementation("eager")
    wanted = bench.huggingface.timed_generate(model, PROMPTS[:1], 4).tokens
    with LLM(str(tmp_path / "m"), dtype="float32") as llm:
        (output,) = llm.generate(PROMPTS[:1], max_new_tokens=4, eos_token_id=-1)
    assert [output.token_ids] == list(map(list, wanted))
    with pytest.raises(UserError, match="between 1 and the 3"):
        bench.make_checkpoint.shape_of("tiny", 4)


@pytest.mark.parametrize("ends", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_of_a_checkpoint_that_ends_early_nothing_stays(bench, tmp_path, monkeypatch, ends):
    def write(path, *_, **__):
        path.write_bytes(bytes(9))
        raise ends

    out, building = tmp_path / "made" / "m", tmp_path / "made" / "m.building"
    made, flags = bench.make_checkpoint, ["--model", "facebook/opt-125m", "--out", str(out)]
    monkeypatch.setattr(made, "write_safetensors", write)
    with pytest.raises((UserError, KeyboardInterrupt)) as caught:
        made.main(flags)
    assert isinstance(ends, KeyboardInterrupt) or str(caught.value) == (
        f"cannot write --out {out}: No space left on device")
    assert not any((tmp_path / "made").iterdir())
    for left in (building, out):  # as of a run that was killed
        left.mkdir()
        with pytest.raises(UserError, match=f"{left.name} exists: remove it"):
            made.main(flags)


def test_no_checkpoint_is_made_of_other_families(bench):
    with pytest.raises(UserError, match="OPT, LLaMA and Qwen3-MoE shapes only"):
        bench.make_checkpoint.hf_config(published("EleutherAI/pythia-6.9b"), "bfloat16")
