"""Chats: conversations through the tokenizer's template, from Python and the command line."""

import json
import shutil

import psutil
import pytest
from helpers.error_cases import refused
from helpers.generation import token_ids
from helpers.tiny_tokenizers import with_words

from flexgen_h2o import LLM
from flexgen_h2o.commands import generate

TEMPLATE = ("{% for m in messages %}{{ m.role[0] | replace('u', 'w1') }} {{ m.content }} "
            "{% endfor %}{% if enable_thinking is defined and not enable_thinking %}w9 {% endif %}"
            "{% if add_generation_prompt %}w7{% endif %}")
HELLO = [{"role": "user", "content": "w3 w4"}]


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    target = tmp_path_factory.mktemp("chat") / "model"
    path = with_words(tiny_model("qwen3").folder, target, chat_template=TEMPLATE)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    return path


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, dtype="float32") as llm:
        yield llm


def test_answers_are_those_of_the_rendered_prompts(llm):
    prompts = ["w1 w3 w4 w7", "w1 w5 w7"]
    wanted = llm.generate(prompts, max_new_tokens=6)
    chats = [HELLO, [{"role": "user", "content": "w5"}]]
    assert token_ids(llm.chat(chats, max_new_tokens=6)) == [
        out.token_ids for out in wanted]
    one = llm.chat(HELLO, max_new_tokens=6)
    assert [(out.prompt, out.token_ids) for out in one] == [(prompts[0], wanted[0].token_ids)]
    assert (one[0].content, one[0].reasoning_content) == (wanted[0].text, None)
    assert wanted[0].content is None
    quiet, = llm.chat(HELLO, max_new_tokens=1, chat_template_kwargs={"enable_thinking": False})
    assert quiet.prompt == "w1 w3 w4 w9 w7" and quiet.prompt_token_ids == [1, 3, 4, 9, 7]
    given, = llm.chat(HELLO, max_new_tokens=1, chat_template="w{{ messages | length }}")
    assert given.prompt_token_ids == [1]


def test_chats_share_the_templates_process_until_close(chat_process, folder):
    others, started = {*psutil.Process().children()}, []
    with LLM(folder, dtype="float32") as llm:
        for template in (None, None, "w{{ messages | length }}"):
            llm.chat(HELLO, max_new_tokens=1, chat_template=template)
            started.append({*psutil.Process().children()} - others)
    first, second, third = started
    assert len(first) == len(third) == 1 and first == second != third
    assert not {*psutil.Process().children()} & (first | third)
    refused(lambda: llm.chat(HELLO), "closed")


def test_reasoning_is_apart_from_the_answer(llm, folder, tmp_path):
    (free,) = llm.chat(HELLO, max_new_tokens=8)
    words = free.text.split()
    marks = {words[0]: "<think>", words[3]: "</think>"}
    _, *answer = [marks.get(word, word) for word in words]
    end = answer.index("</think>")  # words may come again
    thought, rest = answer[:end], answer[end + 1 :]
    marked = tmp_path / "marked"
    shutil.copytree(folder, marked)
    path = marked / "tokenizer.json"
    for word, mark in marks.items():
        path.write_text(path.read_text().replace(f'"{word}":', f'"{mark}":'))
    with LLM(str(marked), dtype="float32") as other:
        (out,) = other.chat(HELLO, max_new_tokens=8)
    assert out.token_ids == free.token_ids and out.text.startswith(" <think> ")
    assert out.text.split() == ["<think>", *thought, "</think>", *rest]
    assert (out.reasoning_content.split(), out.content.split()) == (thought, rest)


@pytest.mark.parametrize("conversations, options, words", [
    (None, {}, "conversations must be a list, got None"),
    (HELLO[0], {}, "conversations must be a list, got {"),
    ([[]], {}, "conversation 0 must be a list of messages"),
    (["hello"], {}, "conversation 0 must be a list of messages"),
    ([HELLO], {"chat_template": "{{ messages[0].a.b }}"},
     "conversation 0: the chat template does not take"),
    ([HELLO], {"chat_template_kwargs": [1]}, "must be a mapping of names to values"),
    ([HELLO], {"chat_template_kwargs": {"x": {1}}}, "what JSON can hold"),
    ([HELLO], {"chat_template_kwargs": {"messages": []}}, "template cannot have 'messages'"),
    ([HELLO], {"chat_template_kwargs": {"tokenize": False}}, "template cannot have 'tokenize'")])
def test_bad_chats(llm, conversations, options, words):
    assert words in refused(lambda: llm.chat(conversations, max_new_tokens=1, **options))


def test_a_model_without_a_template(tiny_model, tmp_path):
    plain = with_words(tiny_model("llama").folder, tmp_path / "plain")
    with LLM(plain, dtype="float32") as llm:
        assert "has no chat template" in refused(lambda: llm.chat(HELLO, max_new_tokens=1))


def test_chats_on_the_command_line(folder, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    words = ["--model", folder, "--prompt", "w3 w4", "--gen-len", "2", "--dtype", "float32",
             "--no-log", "--output", str(out), "--verbose", "0"]
    arguments = ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert generate.main([*words, "--chat", *arguments]) == 0
    record = json.loads(out.read_text())
    assert record["prompt"] == "w1 w3 w4 w9 w7"
    assert (record["content"], record["reasoning_content"]) == (record["text"], None)
    for wrong, message in [
            (["--chat", "--chat-template-kwargs", "[1]"], "must be a JSON object"),
            (["--chat", "--chat-template-kwargs", "{"], "is not JSON"), (arguments, "add --chat"),
            (["--chat", "--chat-template-kwargs", '{"chat_template": ""}'],
             "--chat-template-kwargs cannot have 'chat_template'")]:
        assert generate.main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert generate.main(["--model", folder, "--chat", "--no-log"]) == 2
    assert "--chat is for texts" in capsys.readouterr().err
