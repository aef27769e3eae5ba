"""generation_config.json: its defaults give transformers' greedy tokens, or are refused by name."""

import json
import logging
import shutil
from functools import partial

import pytest
import torch
from helpers import generation
from helpers.error_cases import refused
from helpers.generation import token_ids
from helpers.selection import full_cases
from helpers.tiny_tokenizers import with_words

from flexgen_h2o import LLM
from flexgen_h2o.commands import generate

NEW = 12
tokens = partial(generation.tokens, new=NEW, device="cpu")
PROMPTS = [[5, 6, 7, 5, 6, 9], [11, 12, 11]]
# Each of these changes the greedy text.
PARAMETERS = ["repetition_penalty", "no_repeat_ngram_size", "suppress_tokens",
              "begin_suppress_tokens", "bad_words_ids", "min_new_tokens", "min_length"]


@pytest.fixture(scope="module")
def tiny(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(str(tiny.folder), dtype="float32", device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(tiny):
    """The greedy tokens without any defaults."""
    return reference(tiny)


def reference(tiny, **options) -> list[list[int]]:
    """transformers' greedy tokens."""
    results = []
    for prompt in PROMPTS:
        tokens = tiny.model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False,
                                     pad_token_id=0, **{"eos_token_id": None, **options})
        results.append(tokens[0, len(prompt):].tolist())
    return results


def value_of(name: str, plain: list[list[int]]) -> dict:
    """Return a value of a parameter that changes the greedy text, and the parameters it needs."""
    first, later = plain[0][0], plain[0][4]
    return {"repetition_penalty": {name: 1.7}, "no_repeat_ngram_size": {name: 2},
            "suppress_tokens": {name: [first, later, 10**6]},
            "begin_suppress_tokens": {name: [first, plain[1][0]]},
            "bad_words_ids": {name: [[first], plain[1][1:3], [5, 6, 7]]},
            "min_new_tokens": {name: 6, "eos_token_id": [later, first]},
            "min_length": {name: 10, "eos_token_id": [later, first]}}[name]


def folder_with(tiny, target, values, name="generation_config.json") -> str:
    shutil.copytree(tiny.folder, target)
    (target / "generation_config.json").unlink(missing_ok=True)
    path = target / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))
    return str(target)


@pytest.mark.parametrize("name", PARAMETERS)
def test_defaults_give_the_greedy_tokens_of_transformers(tiny, plain, tmp_path, name):
    values = value_of(name, plain)
    expected = reference(tiny, **values)
    assert expected != plain
    folder = folder_with(tiny, tmp_path / "model", values)
    with LLM(folder, dtype="float32", device="cpu") as llm:
        ends = {} if "eos_token_id" in values else {"eos_token_id": -1}
        assert token_ids(llm.generate(PROMPTS, max_new_tokens=NEW, **ends)) == expected
        # The same as a parameter of the call; and one of the call wins.
        given = {key: value for key, value in values.items() if key != "eos_token_id"}
        assert token_ids(llm.generate(PROMPTS, max_new_tokens=NEW, **ends, **given)) == expected
        neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0,
                   "min_length": 0}.get(name, ())
        actual = token_ids(llm.generate(PROMPTS, max_new_tokens=NEW, **ends, **{name: neutral}))
        assert actual == reference(tiny, eos_token_id=values.get("eos_token_id"))
    assert tokens(folder, PROMPTS, generation_config=False) == plain


def test_defaults_of_config_json_without_another_file(tiny, tmp_path):
    folder = folder_with(tiny, tmp_path / "model", {"repetition_penalty": 1.7}, "config.json")
    assert tokens(folder, PROMPTS) == reference(tiny, repetition_penalty=1.7)


def test_sampling_defaults_have_no_effect_on_greedy_tokens(tiny, plain, tmp_path):
    values = {"temperature": 0.0, "top_k": -1, "typical_p": 0.9, "do_sample": True}
    folder = folder_with(tiny, tmp_path / "greedy", values)
    with LLM(folder, dtype="float32", device="cpu") as llm:
        assert token_ids(llm.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=-1)) == plain
        assert "typical_p" in refused(lambda: llm.generate([[5]], do_sample=True))
    folder = folder_with(tiny, tmp_path / "one", {"top_k": 1, "temperature": 0.7})
    with LLM(folder, dtype="float32", device="cpu") as llm:
        outputs = llm.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=-1, do_sample=True)
        assert token_ids(outputs) == plain
        free = llm.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=-1, do_sample=True, top_k=0)
        assert token_ids(free) != plain


def test_min_new_tokens_may_exceed_max_new_tokens(tiny, tmp_path):
    folder = folder_with(tiny, tmp_path / "model", {"min_new_tokens": 9, "eos_token_id": 3})
    with LLM(folder, dtype="float32", device="cpu") as llm:
        assert len(llm.generate([[5]], max_new_tokens=4)[0].token_ids) == 4


@pytest.mark.parametrize("name, value", [
    ("num_beams", 4), ("penalty_alpha", 0.6), ("guidance_scale", 1.5), ("forced_eos_token_id", 2),
    ("cache_implementation", "quantized"), ("repetition_penalty", "much"), ("bad_words_ids", [[]]),
    *full_cases(("sequence_bias", [[[5], -3.0]]), ("encoder_repetition_penalty", 1.2),
                ("exponential_decay_length_penalty", [5, 1.1]),
                ("watermarking_config", {"bias": 2.0}), ("suppress_tokens", [-1]))])
def test_unsupported_defaults_are_errors(tiny, tmp_path, name, value):
    folder = folder_with(tiny, tmp_path / "model", {name: value})
    with LLM(folder, dtype="float32", device="cpu") as llm:
        words = refused(lambda: llm.generate([[5]], max_new_tokens=2))
        assert name in words and "generation_config.json" in words
        assert "--no-generation-config" in words
        llm.loglikelihood([([5], [6])])  # no tokens are chosen
    assert tokens(folder, [[5]], generation_config=False)


def test_values_that_change_nothing(tiny, plain, tmp_path):
    folder = folder_with(tiny, tmp_path / "model", {
        "num_beams": 1, "guidance_scale": None, "bad_words_ids": None, "forced_eos_token_id": None,
        "encoder_no_repeat_ngram_size": 0, "length_penalty": 1.0, "max_length": 20,
        "token_healing": False, "dola_layers": None, "cache_implementation": "hybrid",
        "repetition_penalty": 1.0, "new_in_a_later_release": 7})
    assert tokens(folder, PROMPTS) == plain


def test_the_flag_of_the_command_line(tiny, plain, tmp_path):
    folder, out = folder_with(tiny, tmp_path / "model", {"num_beams": 2}), tmp_path / "out.jsonl"
    words = ["--model", folder, "--prompt-len", "4", "--num-prompts", "1", "--gen-len", "2",
             "--dtype", "float32", "--no-log", "--output", str(out), "--verbose", "0"]
    assert generate.main(words) == 2
    assert generate.main([*words, "--no-generation-config"]) == 0


@pytest.mark.parametrize("options, words", [
    ({"bad_words_ids": [5]}, "lists of token ids"), ({"bad_words_ids": [[]]}, "none empty"),
    ({"bad_words_ids": [[10**6]]}, "bad_words_ids: token id 1000000"),
    ({"suppress_tokens": 5}, "suppress_tokens must be a list"),
    ({"begin_suppress_tokens": ["a"]}, "each of begin_suppress_tokens"),
    ({"min_length": -1}, "min_length")])
def test_bad_parameters(llm, options, words):
    refused(lambda: llm.generate([[5]], max_new_tokens=2, **options), words)


# The tokenizer's EOS

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}w7"
CHAT = [{"role": "user", "content": "w5 w6"}]


def test_the_eos_of_the_tokenizer_ends_chats(tiny, tmp_path, caplog):
    """The tokenizer has an EOS that generation_config.json does not name."""
    target = tmp_path / "model"
    folder = with_words(tiny.folder, target, chat_template=TEMPLATE)
    (target / "generation_config.json").write_text('{"eos_token_id": [119]}')
    with LLM(folder, dtype="float32", device="cpu") as llm:
        free = llm.generate([[5, 6, 7]], max_new_tokens=NEW, eos_token_id=-1)[0].token_ids
    end = free[2]
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": f"w{end}"}))
    with LLM(folder, dtype="float32", device="cpu") as llm, caplog.at_level(logging.WARNING):
        assert llm.chat_end_tokens == (119, end)
        answer, = llm.chat(CHAT, max_new_tokens=NEW)
        assert answer.token_ids == free[: free.index(end) + 1] and answer.finish_reason == "stop"
        assert llm.chat(CHAT, max_new_tokens=NEW, eos_token_id=-1)[0].token_ids == free
        assert not caplog.records
        for _ in range(2):
            assert llm.generate(["w5 w6 w7"], max_new_tokens=NEW)[0].token_ids == free
        message, = [record.getMessage() for record in caplog.records]
        assert f"w{end} ({end})" in message and "(119)" in message and "eos_token_id" in message
