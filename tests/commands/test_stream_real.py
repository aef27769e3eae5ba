"""Both streaming tasks on the engine itself: a tiny model that reads characters, its own tokenizer.
"""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.read_back import read_jsonl
from helpers.selection import full

from flexgen_h2o.commands import stream

LETTERS = "\n" + "".join(map(chr, [*range(32, 127), *range(224, 248)]))
TEMPLATE = ("{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """A function from a key of `TINY` to the folder of that model and a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def get(key: str) -> str:
        tiny = tiny_model(key)
        # A letter for each token, so that every answer is text.
        letters = LETTERS[: tiny.config.vocab_size]
        tokenizer = Tokenizer(models.WordLevel(
            {letter: place for place, letter in enumerate(letters)}, unk_token="~"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        folder = tmp_path_factory.mktemp("model") / key
        shutil.copytree(tiny.folder, folder)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer,
                                chat_template=TEMPLATE).save_pretrained(folder)
        return str(folder)

    return get


@pytest.fixture
def questions(tmp_path) -> str:
    """Six conversations of two turns."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"question_id": number, "turns": ["Say a word.", "Why?"]})
                            + "\n" for number in range(6)))
    return str(path)


def talk(folder, questions, out, *flags) -> int:
    return stream.main(["--model-name", folder, "--input-path", questions, "--device", "cpu",
                        "--dtype", "float32", "--gen-len", "10", "--output-path", str(out),
                        "--offload-dir", str(out.parent / "offload"),
                        *map(str, flags)])


EVICT = ("--enable-h2o-generation", "--enable-position-rolling", "--num-window-length", 24,
         "--prefill-chunk", 8)


@pytest.mark.parametrize("flags", [
    (), *full(("--eviction", "sink-window"), ("--percent", 0, 0, 0, 0, 0, 0),
              ("--eviction", "window"), ("--num-heavy-hitter-tokens", 6), ("--cache-bits", 4),
              ("--score", "mean"), ("--percent", 0, 100, 0, 100))])
def test_a_conversation_of_any_length(model, questions, tmp_path, capsys, flags):
    out = tmp_path / "out.jsonl"
    assert talk(model("llama"), questions, out, *EVICT, *flags) == 0
    found = read_jsonl(out)
    assert len(found) == 12
    # Each turn with its frame, and ten new tokens.
    lengths = [len("USER: Say a word.\n\nASSISTANT: "), len("USER: Why?\n\nASSISTANT: ")] * 6
    assert [each["prompt_tokens"] for each in found] == lengths
    assert [each["position"] for each in found] == [
        sum(lengths[:place]) + 10 * place for place in range(12)]
    assert found[-1]["position"] > 256  # the model's positions
    assert {each["cached_tokens"] for each in found} == {24}
    assert len({each["kv_cache_bytes"] for each in found}) == 1
    assert all(each["decode_ms_per_token"] > 0 and len(each["text"]) == 10 for each in found)
    text = capsys.readouterr().out
    assert all(f"ASSISTANT: {each['text']}" in text for each in found)
    assert text.splitlines()[-1].startswith("12 turns of ")


def test_text_depends_on_the_chunk_size_alone(model, questions, tmp_path):
    """What is kept depends on the chunk, and on nothing else that is not said."""
    folder, out = model("llama"), tmp_path / "out.jsonl"
    texts = []
    for chunk in (8, 8, 3):
        assert talk(folder, questions, out, *EVICT, "--prefill-chunk", chunk, "--sample-num", 2,
                    "--verbose", 0) == 0
        texts.append([each["text"] for each in read_jsonl(out)])
    assert texts[0] == texts[1] != texts[2]


def test_the_full_cache_stops_where_the_positions_end(model, questions, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    folder = model("llama")
    assert talk(folder, questions, out, "--verbose", 1) == 2
    text = capsys.readouterr()
    assert text.err.startswith("error: the stream has ") and text.err.count("\n") == 1
    assert "256" in text.err and f"(turns answered before that: {out}.partial)" in text.err
    found = read_jsonl(tmp_path / "out.jsonl.partial")
    assert 0 < len(found) < 12 and text.out.startswith(f"{len(found)} turns of ")
    last = found[-1]
    assert last["cached_tokens"] == (last["position"] + last["prompt_tokens"]
                                     + last["generated_tokens"] - 1)
    assert not out.exists()
    assert talk(folder, questions, out, "--past-context", "--max-tokens", 1000,
                "--verbose", 0) == 0
    assert len(read_jsonl(out)) == 12


def test_a_chat_template(model, questions, tmp_path):
    out = tmp_path / "out.jsonl"
    assert talk(model("llama"), questions, out, *EVICT, "--chat-template", "--sample-num", 1,
                "--verbose", 0) == 0
    assert read_jsonl(out)[0]["prompt_tokens"] == len("<user>Say a word.<assistant>")


@pytest.mark.full
def test_a_real_model_answers_by_its_template(questions, tmp_path):
    out = tmp_path / "out.jsonl"
    assert talk("smollm2-135m", questions, out, "--enable-h2o-generation",
                "--num-window-length", 32, "--enable-position-rolling", "--chat-template",
                "--sample-num", 1, "--verbose", 0) == 0
    found = read_jsonl(out)
    assert [each["cached_tokens"] for each in found] == [32, 32]
    assert all(any(letter.isalpha() for letter in each["text"]) for each in found)


def test_learned_positions_do_not_roll(model, questions, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert talk(model("opt"), questions, out, *EVICT, "--verbose", 0) == 2
    assert "they can't roll" in capsys.readouterr().err
    assert talk(model("opt"), questions, out, "--enable-h2o-generation", "--num-window-length",
                24, "--sample-num", 2, "--verbose", 0) == 0
    assert len(read_jsonl(out)) == 4
