"""Tiny random transformers models that cover every branch of the three families.

They are made and saved when first asked for. Nothing is downloaded, and no tokenizer is needed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from helpers import selection
from helpers.error_cases import command_refused
from helpers.fakes import LazyDevice, PoisonedDevice
from helpers.mixture_cases import MIXTURES, limit_as_configured

from flexgen_h2o.storage.tiers import Device

# The GPU kernels run under Triton's interpreter. Triton looks once, when it is first imported, and
# torch.compile imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Under nohup hang-ups are ignored, and in the background of a script Ctrl-C is. What is ignored
# stays so in every program that is started.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class TinyModel:
    """A saved model: its folder (config.json, safetensors), the float32 model and its config."""

    folder: Path
    model: Any
    config: Any


def _opt(**options):
    from transformers import OPTConfig

    return OPTConfig(**{
        "vocab_size": 112, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "ffn_dim": 96, "max_position_embeddings": 256, "word_embed_proj_dim": 48, **options})


def _sizes(**options) -> dict[str, Any]:
    return {"vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 6, "intermediate_size": 80, "max_position_embeddings": 256,
            **options}


def _llama(**options):
    from transformers import LlamaConfig

    return LlamaConfig(**_sizes(**{"num_key_value_heads": 2, **options}))


def _mistral(**options):
    from transformers import MistralConfig

    return MistralConfig(**_sizes(num_key_value_heads=3, **options))


def _neox(*, rotary: float = 0.25, **options):
    from transformers import GPTNeoXConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rotary}
    return GPTNeoXConfig(**_sizes(**{"hidden_size": 64, "num_attention_heads": 4,
                                     "rope_parameters": rope, **options}))


def _of(name: str, **options):
    import transformers

    return getattr(transformers, f"{name}Config")(**_sizes(**{
        "num_key_value_heads": 2, "pad_token_id": None, **options}))


LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
             "original_max_position_embeddings": 64}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75,
             "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
             "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]}

# Each makes the transformers config of one branch; the folder of a model is named by its key.
TINY: dict[str, Callable[[], Any]] = {
    "opt": _opt,
    "opt_350m_style": lambda: _opt(word_embed_proj_dim=32, do_layer_norm_before=False),
    "opt_no_bias": lambda: _opt(enable_bias=False, layer_norm_elementwise_affine=False,
                                activation_function="gelu"),
    "opt_untied": lambda: _opt(tie_word_embeddings=False, _remove_final_layer_norm=True),
    "llama": lambda: _llama(tie_word_embeddings=True),
    "llama_untied_bias": lambda: _llama(attention_bias=True, mlp_bias=True,
                                        num_key_value_heads=6),
    "llama3_rope": lambda: _llama(rope_parameters=LLAMA3_ROPE),
    "llama_linear_rope": lambda: _llama(rope_parameters=LINEAR_ROPE),
    "llama_head_dim": lambda: _llama(head_dim=12, hidden_act="gelu_pytorch_tanh"),
    "mistral": lambda: _mistral(sliding_window=None),
    "mistral_window": lambda: _mistral(sliding_window=7),
    "llama_yarn": lambda: _llama(rope_parameters=YARN_ROPE),
    "llama_dynamic": lambda: _llama(rope_parameters=LINEAR_ROPE | {"rope_type": "dynamic"}),
    "qwen2": lambda: _of("Qwen2", num_key_value_heads=3),
    "qwen2_windows": lambda: _of("Qwen2", use_sliding_window=True, sliding_window=9,
                                 max_window_layers=1),
    "qwen3": lambda: _of("Qwen3", head_dim=12, tie_word_embeddings=True),
    "seed_oss": lambda: _of("SeedOss", head_dim=12, attention_out_bias=False),
    "phi3": lambda: _of("Phi3", sliding_window=20),
    "phi3_longrope": lambda: _of("Phi3", hidden_size=96, original_max_position_embeddings=128,
                                 tie_word_embeddings=True, rope_parameters=LONG_ROPE),
    "gemma2": lambda: _of("Gemma2", head_dim=12, sliding_window=8, query_pre_attn_scalar=20,
                          attn_logit_softcapping=5.0, final_logit_softcapping=4.0),
    "gemma3": lambda: _of("Gemma3Text", head_dim=12, sliding_window=6, query_pre_attn_scalar=20,
                          layer_types=["sliding_attention", "full_attention",
                                       "sliding_attention"]),
    "granite": lambda: _of("Granite", attention_multiplier=0.2, residual_multiplier=0.4,
                           embedding_multiplier=3.0, logits_scaling=0.5),
    "olmo2": lambda: _of("Olmo2"),
    "stablelm": lambda: _of("StableLm", hidden_size=96, use_qkv_bias=True),
    "stablelm_12b": lambda: _of("StableLm", hidden_size=96, qk_layernorm=True,
                                use_parallel_residual=True),
    "neox": _neox,
    "neox_sequential": lambda: _neox(rotary=1.0, use_parallel_residual=False,
                                     hidden_act="gelu_fast"),
    "neox_partial": lambda: _neox(hidden_act="gelu_new", attention_bias=False,
                                  tie_word_embeddings=True),
    "neox_linear_rope": lambda: _neox(rope_parameters=LINEAR_ROPE | {
        "partial_rotary_factor": 0.5}),
}


def make_tiny(key: str, folder: Path) -> TinyModel:
    """Build the model of a key of `TINY` or `MIXTURES` with seeded random weights, and save it."""
    from transformers import AutoModelForCausalLM

    config = (TINY | MIXTURES)[key]()
    config.eos_token_id = None  # a random model must not happen to stop
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if hasattr(model, "set_experts_implementation"):  # grouped products want even shapes
        model.set_experts_implementation("eager")
    limit_as_configured(model)
    generator = torch.Generator().manual_seed(sum(map(ord, key)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1: a forgotten one would go unnoticed.
            norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, 0.2, generator=generator)
            parameter.requires_grad_(False)
    model.save_pretrained(folder)
    return TinyModel(folder, model, model.config)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true",
                     help="run every case of every test, with every instruction set")


def pytest_configure(config):
    selection.every_case = config.getoption("--all")
    # A slow machine is no failure, and a failure is the same one every time.
    hypothesis.settings.register_profile("project", deadline=None, derandomize=True,
                                         max_examples=100 if selection.every_case else 50)
    hypothesis.settings.load_profile("project")


def pytest_collection_modifyitems(config, items):
    if not selection.every_case:
        kept = selection.selected(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_generate_tests(metafunc):
    """Run a test with the fixture `isa` with the best instruction set of this CPU.

    With ``--all``, run it with each set that can be forced here. For a test that is marked with a
    source of the kernels, only the sets that the source is compiled for count.
    """
    if "isa" in metafunc.fixturenames:
        from helpers.kernel_cases import SETS, sets_of

        marker = metafunc.definition.get_closest_marker("source")
        sets = sets_of(*marker.args) if marker else SETS
        metafunc.parametrize("isa", sets or [None], indirect=True)


@pytest.fixture
def isa(request):
    """An instruction set's kernels and choices; None where no kernels were built."""
    from helpers.kernel_cases import using

    with using(request.param):
        yield request.param


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    """Tiny products gain nothing from a second thread, and wait for it when the core is taken."""
    torch.set_num_threads(1)


@pytest.fixture
def refuses_flags(tmp_path, monkeypatch, capsys) -> Callable[..., None]:
    """A function that holds a command to refusing flags in a line, without engine and files."""
    def hold(main, flags: list[str], *words: str) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(sys.modules, "flexgen_h2o.llm", None)  # importing the engine fails
        command_refused(main, capsys, flags, *words)
        assert list(tmp_path.iterdir()) == []

    return hold


@pytest.fixture
def on_cpu(monkeypatch) -> None:
    """Each `LLM` computes on the CPU, beside a GPU too: for what is done there alone."""

    from helpers import internals  # only now: it loads the engine
    internals.open_devices(monkeypatch, Device)


@pytest.fixture(params=["poisoned", "lazy"])
def device(request, monkeypatch) -> str:
    """Each of two devices in place of the machine's, whose fresh memory is full of NaN."""

    kind = {"poisoned": PoisonedDevice, "lazy": LazyDevice}[request.param]
    from helpers import internals  # only now: it loads the engine
    internals.open_devices(monkeypatch, kind)
    return request.param


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[[str], TinyModel]:
    """A function from a key of `TINY` to its model, made once per session and saved to disk."""
    made: dict[str, TinyModel] = {}

    def get(key: str) -> TinyModel:
        if key not in made:
            made[key] = make_tiny(key, tmp_path_factory.mktemp("tiny") / key)
        return made[key]

    return get
