"""Every family end to end: tokens of transformers everywhere, H2O as its mask."""

import copy
import json
import re
import shutil
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import generation, selection
from helpers.error_cases import refused
from helpers.generation import make_prompts, token_ids, transformers_tokens
from helpers.selection import full
from helpers.tiny_models import LINEAR_ROPE, LLAMA3_ROPE, LONG_ROPE, MULTIMODAL, TINY, YARN_ROPE

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.engine import decoder as engine_decoder
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import torch_ops
from flexgen_h2o.models import decoder, family, registry
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.models.rope import rope_tables

FAMILIES = ["mistral_window", "llama_yarn", "qwen2", "qwen2_windows", "qwen3", "seed_oss", "phi3",
            "phi3_longrope", "gemma2", "gemma3", "granite", "olmo2", "olmo3", "stablelm",
            "stablelm_12b", "exaone4", "smollm3", "glm", "glm4", "cohere", "cohere2", "apertus",
            "ernie4_5", "qwen3_5", "gemma4"]
FEW = [key if key in ("mistral_window", "phi3_longrope", "gemma2", "stablelm_12b", "cohere2",
                      "glm4", "apertus", "gemma4")
       else pytest.param(key, marks=pytest.mark.full) for key in FAMILIES]
"""Windows, positions that scale, soft caps, parallel residuals, layers without rotation, rotation
in pairs and learned activations; the others with --all."""
NEW = 6
tokens = partial(generation.tokens, new=NEW)
H2O = {"heavy_tokens": 3, "recent_tokens": 4}


def prompts_of(lengths=(9, 3, 21), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(110, (length,), generator=generator).tolist() for length in lengths]


def log_probs(model, prompt, new) -> torch.Tensor:
    """Return transformers' log probabilities of new tokens."""
    with torch.no_grad():
        actual = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return actual.gather(-1, torch.tensor(new)[:, None])[:, 0]


@pytest.mark.parametrize("key", TINY)
def test_tokens_and_log_probs_equal_transformers(tiny_model, tmp_path, key):
    """Offloaded in halves of layers; with --all also in memory, and in whole layers."""
    tiny, prompts = tiny_model(key), prompts_of()
    wanted = transformers_tokens(tiny, prompts, NEW)
    halves = not from_transformers(tiny.config.to_dict(), key).parallel_residual
    mixed, disk = Placement(40, 30, 30), Placement(0, 0, 100)
    policies = [Policy(weights=disk, cache=mixed, gpu_batch_size=2, overlap=False,
                       sep_layer=halves),
                Policy(gpu_batch_size=4),
                Policy(weights=mixed, cache=disk, activations=mixed, num_gpu_batches=3)]
    for policy in policies if selection.every_case else policies[:1]:
        with LLM(str(tiny.folder), policy=policy, dtype="float32", offload_dir=tmp_path) as llm:
            outputs = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
            scores = llm.loglikelihood(list(zip(prompts, wanted, strict=True)))
        assert token_ids(outputs) == wanted
        for prompt, new, results in zip(prompts, wanted, scores, strict=True):
            torch.testing.assert_close(torch.tensor(results), log_probs(tiny.model, prompt, new),
                                       rtol=0, atol=1e-4)


@pytest.mark.parametrize("key", ["opt_350m_style", "llama",
                                 *full("opt", "neox", "neox_sequential")])
def test_blocks_and_chunks_of_rows_change_nothing(tiny_model, key, monkeypatch):
    monkeypatch.setattr(decoder, "ROW_BLOCK", 7)
    monkeypatch.setitem(engine_decoder.CHUNK_ROWS, "cpu", 8)
    monkeypatch.setattr(engine_decoder, "LOGIT_ROWS", 2)
    monkeypatch.setattr(torch_ops, "CHUNK_BYTES", 1000)
    tiny, prompts = tiny_model(key), prompts_of()
    assert tokens(tiny, prompts, gpu_batch_size=4) == transformers_tokens(tiny, prompts, NEW)


MIXTURES = ["mixtral", "qwen2_moe_dense", "gpt_oss", "glm4_moe", "minimax_m2", "phimoe",
            "ernie4_5_moe", "llama4", "flex_olmo", "afmoe", "deepseek_v2", "gemma4_moe",
            *full("granitemoe", "granitemoeshared", "dots1", "solar_open")]


@pytest.mark.parametrize("recall", [False, True])
@pytest.mark.parametrize("key", [*FEW, *MIXTURES])
def test_h2o_is_its_masked_simulation(tiny_model, tmp_path, key, recall):
    folder, h2o = tiny_model(key).folder, H2OConfig(**H2O, recall=recall)
    prompts = make_prompts(97, [30, 17, 24])
    wanted = tokens(folder, prompts, h2o=replace(h2o, simulate=True), gpu_batch_size=4)
    assert tokens(folder, prompts, h2o=h2o, gpu_batch_size=2, num_gpu_batches=2,
                     weights=Placement(0, 0, 100), cache=Placement(30, 30, 40),
                     offload_dir=str(tmp_path)) == wanted


@pytest.mark.parametrize("key", ["opt", "neox", *FEW])
def test_captured_steps_in_bfloat16_stay_near(tiny_model, key):
    """An evicting cache takes continuations token by token, as one call a layer."""
    pairs = [(prompt, prompts_of((12,), seed)[0]) for seed, prompt in enumerate(prompts_of(), 1)]

    def scores(dtype):
        with LLM(str(tiny_model(key).folder), dtype=dtype, policy=Policy(gpu_batch_size=4),
                 h2o=H2OConfig(heavy_tokens=40, recent_tokens=40)) as llm:
            return torch.tensor(llm.loglikelihood(pairs))

    wanted = scores("float32")
    assert wanted.std() > 0.5
    assert (scores("bfloat16") - wanted).abs().mean() < 0.1 * wanted.std()


@pytest.mark.parametrize("key, rope", [
    ("llama", LINEAR_ROPE), ("llama", LLAMA3_ROPE),
    ("llama", LINEAR_ROPE | {"rope_type": "dynamic"}),
    ("llama", YARN_ROPE), ("llama", YARN_ROPE | {"beta_fast": 8, "beta_slow": 2}),
    ("llama", YARN_ROPE | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 0.3}),
    ("llama", YARN_ROPE | {"attention_factor": 1.3}), ("phi3", LONG_ROPE),
    ("phi3", LONG_ROPE | {"attention_factor": 1.2})])
def test_rope_tables_equal_transformers(key, rope):
    from transformers import LlamaConfig, Phi3Config
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    kind, rotary = {"llama": (LlamaConfig, LlamaRotaryEmbedding),
                    "phi3": (Phi3Config, Phi3RotaryEmbedding)}[key]
    config = kind(hidden_size=96, num_attention_heads=6, max_position_embeddings=256,
                  **{"original_max_position_embeddings": 128} if key == "phi3" else {},
                  rope_parameters=dict(rope))
    positions = torch.arange(0, 128)
    wanted = rotary(config)(torch.zeros(1), positions[None])
    actual = rope_tables(from_transformers(config, "x").rope, positions, torch.float32)
    for ours, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(ours, theirs[0, :, : ours.shape[1]], atol=2e-6, rtol=0)


@pytest.mark.parametrize("key, lengths", [("phi3_longrope", (140, 9, 124)),
                                          ("llama_dynamic", (270, 9, 252))])
def test_dynamic_rope_past_the_original_context(tiny_model, tmp_path, key, lengths):
    """Beside shorter ones in one batch; the last prompt crosses the limit while it goes on."""
    tiny, prompts = tiny_model(key), prompts_of(lengths)
    crossing = copy.deepcopy(tiny.model)
    if key == "phi3_longrope":  # transformers would change its mind in the middle
        crossing.config.rope_parameters["short_factor"] = LONG_ROPE["long_factor"]
        crossing.model.rotary_emb = type(tiny.model.model.rotary_emb)(crossing.config)
    models = [types.SimpleNamespace(model=model) for model in (tiny.model, tiny.model, crossing)]
    wanted = [transformers_tokens(model, [prompt], NEW)[0]
              for model, prompt in zip(models, prompts, strict=True)]
    for policy in (Policy(gpu_batch_size=3), Policy(num_gpu_batches=2, prefill_chunk=50,
                                                    cache=Placement(0, 0, 100))):
        with LLM(str(tiny.folder), policy=policy, dtype="float32", offload_dir=tmp_path) as llm:
            assert token_ids(llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)) == wanted
            again = llm.generate([prompts[-1], prompts[-1]], [
                SamplingParams(max_new_tokens=new, eos_token_id=-1, do_sample=False)
                for new in (2, NEW)])
            assert again[1].token_ids == wanted[-1], "what is shared rotates alike"
    with pytest.raises(UserError, match="positions: shorten it"):
        LLM(str(tiny.folder), h2o=H2OConfig(**H2O, positions="rolling"), dtype="float32"
            ).generate([prompts[0]])


def test_pairs_are_scored_by_their_own_lengths(tiny_model):
    """Beside one with a longer continuation; the last would go past the context with that."""
    sizes = ((80, 3), (9, 60), (250, 3))
    pairs = [tuple(prompts_of(lengths, seed)) for seed, lengths in enumerate(sizes)]
    with LLM(str(tiny_model("phi3_longrope").folder), h2o=H2OConfig(**H2O), dtype="float32") as llm:
        together = llm.loglikelihood(pairs)
        for pair, results in zip(pairs, together, strict=True):
            assert results == pytest.approx(llm.loglikelihood([pair])[0], abs=1e-4)


def test_context_length_of_rope_scaling():
    def context(**options):
        return from_transformers({"model_type": "qwen3", **options}, "x").max_positions

    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    assert context(max_position_embeddings=1000, rope_scaling=yarn) == 4000
    assert context(max_position_embeddings=5000, rope_scaling=yarn) == 5000
    assert context(max_position_embeddings=1000, rope_scaling=None) == 1000
    phi = {"model_type": "phi3", "max_position_embeddings": 4096, "rope_scaling": {
        "type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        "original_max_position_embeddings": 512}
    config = from_transformers(phi, "x")
    assert (config.max_positions, config.plain_positions) == (4096, 512)
    dynamic = from_transformers({"model_type": "qwen3", "max_position_embeddings": 1000,
                                 "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "x")
    assert (dynamic.max_positions, dynamic.plain_positions) == (2000, 1000)


def test_text_config_of_a_multimodal_model():
    text = {"hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "head_dim": 16,
            "sliding_window": 9, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    cfg = from_transformers({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106],
                             "vision_config": {}}, "x")
    assert (cfg.hidden_size, cfg.eos_token_ids, cfg.vocab_size) == (64, (1, 106), 262208)
    assert cfg.other_rope_layers == (True,) * 5 + (False, True)
    assert [cfg.attention_variant(layer).window for layer in (0, 5)] == [9, None]
    assert (cfg.rope.rope_type, cfg.rope.factor, cfg.other_rope.theta) == ("linear", 8.0, 10000.0)
    assert "model.language_model.layers.0.mlp.up_proj.weight" in family(cfg).aliases(
        "model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("key", [key if key in ("gemma3_vision", "qwen3_vl", "qwen3_5_vision")
                                 else pytest.param(key, marks=pytest.mark.full)
                                 for key in MULTIMODAL])
def test_text_model_of_a_multimodal_checkpoint(tiny_model, key, caplog):
    tiny = tiny_model(key)
    model = tiny.model
    if key == "llama4_vision":  # of transformers' whole model, a text without an image fails
        model = model.language_model
    wanted = transformers_tokens(types.SimpleNamespace(model=model), prompts_of(), NEW)
    assert tokens(tiny.folder, prompts_of(), gpu_batch_size=4) == wanted
    assert "vision tower" in caplog.text


def test_older_qwen_vl_config_is_flat():
    flat = {"model_type": "qwen2_5_vl", "hidden_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vision_config": {"hidden_size": 32},
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    cfg = from_transformers(flat, "x")
    assert (cfg.hidden_size, cfg.rope.rope_type, cfg.rope.theta) == (64, "default", 1e6)
    assert cfg.attention_bias and cfg.norm_eps == 1e-5


def test_a_mistral_with_windows_in_some_layers(tiny_model, tmp_path):
    """By layer_types; transformers makes a model of another class, Ministral, of it."""
    from transformers import AutoModelForCausalLM

    folder = Path(shutil.copytree(tiny_model("mistral_window").folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    layers = ["full_attention", "sliding_attention", "full_attention"]
    (folder / "config.json").write_text(json.dumps(config | {"layer_types": layers}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = transformers_tokens(types.SimpleNamespace(model=model), prompts_of(), NEW)
    assert tokens(folder, prompts_of(), gpu_batch_size=4) == wanted


@pytest.mark.parametrize("key", ["opt", "neox"])
def test_head_dim_that_differs_from_the_checkpoint(tiny_model, tmp_path, key):
    """Of families without this key in config.json."""
    folder = Path(shutil.copytree(tiny_model(key).folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 24}))
    refused(lambda: LLM(str(folder), dtype="float32"), match="but config.json calls for")


def test_documented_family_example(monkeypatch, tmp_path):
    """The code of docs/contributing.md that adds a family."""
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    text = (Path(__file__).parents[2] / "docs" / "contributing.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    name = "flexgen_h2o.models.families.starcoder2"
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(code, "docs/contributing.md", "exec"), module.__dict__)
    monkeypatch.setattr(registry, "FAMILIES",
                        {**registry.FAMILIES, "starcoder2": "starcoder2.Starcoder2"})
    torch.default_generator.manual_seed(0)
    config = Starcoder2Config(vocab_size=120, hidden_size=48, num_hidden_layers=3,
                              intermediate_size=80, num_attention_heads=6, num_key_value_heads=2,
                              max_position_embeddings=256, sliding_window=11, eos_token_id=None,
                              initializer_range=0.3)
    model = Starcoder2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    wanted = transformers_tokens(types.SimpleNamespace(model=model), prompts_of(), NEW)
    assert tokens(tmp_path, prompts_of(), gpu_batch_size=4) == wanted
    assert from_transformers(config, "x").num_parameters() == model.num_parameters()


def test_rolling_positions_need_one_rope(tiny_model):
    with pytest.raises(UserError, match="rotates some layers in another way"):
        LLM(str(tiny_model("gemma3").folder), h2o=H2OConfig(**H2O, positions="rolling"))
