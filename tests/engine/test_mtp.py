"""Layers for multi-token prediction draft: what they predict, and the same tokens with them."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import prompts_of, run, token_ids
from helpers.gguf_cases import CASES, write
from helpers.internals import before_blocks
from helpers.mtp_models import make_mtp
from helpers.selection import full
from safetensors.torch import load_file, save_file

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.engine import draft_model
from flexgen_h2o.engine.blocks import Request
from flexgen_h2o.engine.draft_model import MtpDrafter, new_drafter
from flexgen_h2o.engine.speculation import DraftAutotune

pytestmark = pytest.mark.usefixtures("on_cpu")

KEYS = ["glm4_moe", "deepseek_v3", *full("glm4_moe_normed", "glm4_moe_lite")]
LENGTHS = [19, 7, 1, 13]
NEW = 14
DISK = Placement(0, 0, 100)
RUNS = {
    "memory, blocks of two": {"num_gpu_batches": 1, "gpu_batch_size": 2},
    "one batch, weights on disk": {"weights": DISK, "num_gpu_batches": 1, "gpu_batch_size": 1},
    "all on disk, no overlap, chunks": {
        "weights": DISK, "cache": DISK, "activations": DISK, "overlap": False, "prefill_chunk": 5},
    "h2o": {"h2o": H2OConfig(heavy_ratio=0.15)},
    "h2o, chunks, experts on disk": {
        "h2o": H2OConfig(heavy_tokens=3, recent_tokens=4, prompt_chunk=6), "experts": DISK},
    "recall, 4 bits": {"h2o": H2OConfig(heavy_ratio=0.15, recall=True), "cache_bits": 4}}
MTP = {"speculate": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def mtp_model(tmp_path_factory):
    """Return a function from a key of a tiny model to an `MtpModel`, built once."""
    models = {}

    def get(key):
        if key not in models:
            models[key] = make_mtp(key, tmp_path_factory.mktemp("mtp") / key)
        return models[key]

    return get


@pytest.fixture
def always(monkeypatch):
    """Let runs draft in each decode step."""
    monkeypatch.setattr(DraftAutotune, "length", lambda self, sequences: 99)


@pytest.fixture
def drafted_logits(monkeypatch):
    """Logits of the layer, row by row."""
    rows = []
    reduce = draft_model.GenerationSampler.reduce

    class Sampler(draft_model.GenerationSampler):
        def reduce(self, batch, forward_pass, row, logits):
            rows.append(logits.clone())
            return reduce(self, batch, forward_pass, row, logits)

    monkeypatch.setattr(draft_model, "GenerationSampler", Sampler)
    return rows


@torch.inference_mode()
def read_and_draft(llm, mtp, texts, count):
    """Let a drafter read texts, each the beginning of the next one, and draft after the last."""
    drafter = new_drafter(llm._engine.runner, max_tokens=len(texts[-1]) + 9)
    for text in texts:
        request, read = Request(0, text[:3], text[3:]), len(text) - 1
        hidden = mtp.model.model(torch.tensor([[*text, 5, 6]])).last_hidden_state[0]
        known = getattr(drafter._texts.get(0), "cached", 0)
        drafter.read_hidden(request, iter(hidden[known:].split(7)))  # two rows are of no token
        drafts = drafter.draft(request, count)
        assert drafter._texts[0].cached == read
    return drafts


@pytest.mark.parametrize("key", KEYS)
def test_drafts_have_the_logits_of_the_paper(mtp_model, drafted_logits, monkeypatch, key):
    """After a text that is read in parts, with the hidden states of rejected tokens."""
    monkeypatch.setattr(draft_model, "DRAFT_CHUNK", 8)
    mtp = mtp_model(key)
    text, = prompts_of(mtp, [31])
    with LLM(str(mtp.folder), dtype="float32", policy=Policy(**MTP)) as llm:
        drafts = read_and_draft(llm, mtp, [text[:11], text[:12], text], 4)
    wanted = mtp.drafts(text, 4)
    torch.testing.assert_close(torch.cat(drafted_logits[-4:]), wanted, rtol=1e-4, atol=2e-5)
    assert drafts == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("key", KEYS)
def test_tokens_do_not_depend_on_mtp(mtp_model, tmp_path, monkeypatch, always, key, name):
    """Accepted and rejected drafts change no token, and later drafts equal the reference."""
    mtp, options = mtp_model(key), {"offload_dir": str(tmp_path)} | RUNS[name]
    prompts = prompts_of(mtp, LENGTHS)
    plain, _ = run(mtp, prompts, new=NEW, **options)
    draft, seen = MtpDrafter.draft, []

    def mixed(self, request, max_drafts):
        drafts = draft(self, request, max_drafts)
        seen.append((request.history, drafts))
        coming = plain[request.key][len(request.generated):][:len(drafts)]
        right = len(seen) % (len(drafts) + 1)
        return coming[:right] + drafts[right:]

    monkeypatch.setattr(MtpDrafter, "draft", mixed)
    tokens, stats = run(mtp, prompts, new=NEW, **options | MTP)
    assert tokens == plain
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    if "h2o" not in options:
        for text, drafts in seen[:: max(1, len(seen) // 8)]:
            assert drafts == mtp.drafts(text, len(drafts)).argmax(-1).tolist()


@pytest.fixture(scope="module")
def predictable(mtp_model, tmp_path_factory):
    """A model whose tokens follow from the token before: all layers add nothing."""
    mtp = mtp_model("glm4_moe")
    folder = shutil.copytree(mtp.folder, tmp_path_factory.mktemp("predictable") / "model")
    weights = load_file(folder / "model.safetensors")
    last = f"model.layers.{mtp.model.config.num_hidden_layers}."
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", f"{last}eh_proj.weight")):
            tensor.zero_()
    hidden = mtp.model.config.hidden_size
    weights[f"{last}eh_proj.weight"][:, :hidden].fill_diagonal_(1.0)
    weights[f"{last}enorm.weight"].fill_(1.0)
    weights[f"{last}shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("options", [{}, {"weight_bits": 8, "weights": DISK},
                                     {"dtype": "bfloat16"}])
def test_right_predictions_are_accepted(predictable, mtp_model, tmp_path, always, options):
    """Also in a second run, whose weights come from the cache, and of quantized weights."""
    prompts = prompts_of(mtp_model("glm4_moe"), LENGTHS)
    options = {"weight_cache": str(tmp_path), "offload_dir": str(tmp_path / "offload")} | options
    plain, _ = run(predictable, prompts, new=NEW, **options)
    for _ in range(2):
        tokens, stats = run(predictable, prompts, new=NEW, **options | MTP)
        assert tokens == plain
        assert stats.acceptance_rate == 1 and stats.tokens_per_step > 3


def test_sessions_and_restarted_blocks_draft_by_mtp(predictable, mtp_model, monkeypatch, always):
    prompts, outputs, failed = prompts_of(mtp_model("glm4_moe"), LENGTHS), {}, []
    plain, _ = run(predictable, prompts, new=NEW)

    def fail_once():
        if len(failed) < 1:
            failed.append(None)
            raise MemoryError

    before_blocks(monkeypatch, fail_once)
    with LLM(str(predictable), dtype="float32", policy=Policy(gpu_batch_size=2, **MTP)) as llm:
        assert token_ids(llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)) == plain
        assert llm.stats.acceptance_rate == 1
        with llm.open_session(max_model_len=64) as session:
            for prompt in prompts:
                session.add(prompt, SamplingParams(max_new_tokens=NEW, eos_token_id=-1))
            while session.unfinished:
                outputs |= session.step()
    assert [outputs[number].token_ids for number in range(len(prompts))] == plain


def test_drafts_end_with_the_context(mtp_model, tmp_path, always):
    folder = shutil.copytree(mtp_model("glm4_moe").folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    prompts = prompts_of(mtp_model("glm4_moe"), [9])
    assert run(folder, prompts, new=11, **MTP)[0] == run(folder, prompts, new=11)[0]


@pytest.mark.parametrize("options", [{}, {"weights": DISK, "num_gpu_batches": 1}])
def test_embedding_and_head_are_shared_in_memory(mtp_model, options):
    with LLM(str(mtp_model("glm4_moe").folder), dtype="float32", weight_cache=None,
             policy=Policy(**MTP | options)) as llm:
        runner = llm._engine.runner
        model, layer = (part.weights.resident_by_name for part in (runner, runner.draft))
        names = {"model.embed_tokens.weight", "lm_head.weight"}
        assert layer.keys() >= names
        for name in names & model.keys():
            assert layer[name] is model[name]
        assert bool(options) or names <= model.keys()


def test_gguf_files_have_the_layer_too(tmp_path, always):
    mtp = make_mtp("glm4_moe", tmp_path / "model", vocab_size=260)
    weights = {name: tensor.numpy() for name, tensor in
               load_file(mtp.folder / "model.safetensors").items()}
    case = replace(CASES["glm4moe"], more=lambda writer, _: writer.add_nextn_predict_layers(1))
    path = write(case, mtp.model.config, weights, tmp_path / "m.gguf")
    prompts = prompts_of(mtp, LENGTHS[:2])
    wanted, stats = run(mtp, prompts, **MTP)
    for bits in (16, "auto"):
        tokens, found = run(path, prompts, weight_bits=bits, **MTP)
        assert (tokens, found.draft_tokens, found.accepted_tokens) == (
            wanted, stats.draft_tokens, stats.accepted_tokens)


def test_models_that_do_not_predict_are_refused(tiny_model):
    for key, words in (("llama", "no layers for multi-token prediction"),
                       ("glm4_moe", "lacks the layer"), ("qwen3_next", "recurrent")):
        refused(lambda key=key: LLM(str(tiny_model(key).folder), policy=Policy(speculate="mtp")),
                match=words)


@pytest.mark.parametrize(("make", "options", "word"), [
    (Policy, {"speculate": "mtp", "draft_model": "opt"}, "draft_model"),
    (RunConfig, {"speculate": "mtp", "pipeline_parallel": 2}, "--pipeline-parallel")])
def test_options_against_mtp_are_refused(make, options, word):
    refused(lambda: make(**options), match=word)
