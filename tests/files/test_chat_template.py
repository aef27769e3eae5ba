"""Chat templates: what transformers makes of them, and nothing that a hostile one is after."""

import inspect
import subprocess
import sys
import time

import pytest
from helpers.error_cases import refused
from helpers.internals import render_with
from helpers.tiny_tokenizers import with_words
from transformers.utils.chat_template_utils import render_jinja_template

from flexgen_h2o.files.chat_template import ChatRenderer, check_template_arguments

pytestmark = pytest.mark.usefixtures("chat_process")
MESSAGES = [{"role": "system", "content": "Be brief.\n\u2028"},
            {"role": "user", "content": "é <&> 'w1'", "name": None},
            {"role": "assistant", "content": "w2", "tool_calls": [{"id": 1}]},
            {"role": "user", "content": "w3"}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
GOOD = {
    "plain": PLAIN,
    "prompt": PLAIN + "{% if add_generation_prompt %}<assistant>{% endif %}{{ bos_token }}",
    "controls": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson }}"
                "{{ m.name is defined }}{% endfor %}",
    "whitespace": "{% if true %}\n  {% set ns = namespace(n=1) %}\n  {{ ns.n }}\n{% endif %}\n",
    "blocks": "{% generation %}{{ messages[0].content | trim }}{% endgeneration %}",
    "macro": '{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(strftime_now("%Y-%m") | length) }}',
    "late": "{{ messages | pprint }}{{ 'a b c' | wordwrap(2) }}{{ dict(a=1) }}{{ tools is none }}"}
BAD = {
    "loop": ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
             "was stopped"),
    "memory": ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
    "long": ("{{ 'a' | center(2 * 10 ** 7) }}", "20000000 characters"),
    "range": ("{{ range(10 ** 12) | list }}", "Range too big"),
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "globals": ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    "format": ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
    "change": ("{{ messages.append(1) }}", "unsafe"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "nested": ("{% if " + "(" * 5000, "RecursionError"),
    "syntax": ("{% x", "TemplateSyntaxError"),
    "exception": ("{{ raise_exception('no\nsystem') }}", "TemplateError: no system"),
    "missing": ("{{ messages[0].a.b }}", "UndefinedError")}


@pytest.fixture(scope="module")
def tokenizer(tiny_model, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("chat") / "model"
    loaded = AutoTokenizer.from_pretrained(with_words(tiny_model("llama").folder, folder))
    loaded.add_special_tokens({"bos_token": "w5"})
    return loaded


@pytest.fixture(scope="module")
def renderer(tokenizer):
    with ChatRenderer(tokenizer, PLAIN, seconds=20) as renderer:
        renderer.render(MESSAGES)
        yield renderer


@pytest.mark.parametrize("name", GOOD)
def test_templates_render_as_in_transformers(renderer, tokenizer, name):
    for prompt in ([True, False] if name == "prompt" else [True]):
        assert render_with(renderer, GOOD[name], MESSAGES, {"add_generation_prompt": prompt}
                           ) == tokenizer.apply_chat_template(
            MESSAGES, chat_template=GOOD[name], tokenize=False, add_generation_prompt=prompt)


@pytest.mark.parametrize("name", BAD)
def test_a_hostile_template_is_one_line_within_its_time(renderer, name):
    template, words = BAD[name]
    began = time.monotonic()
    limits = {"seconds": 1} if name == "loop" else {}
    refused(lambda: render_with(renderer, template, MESSAGES, **limits), words)
    assert time.monotonic() - began < 60
    assert "<user>w3" in render_with(renderer, PLAIN, MESSAGES), "the next chat is rendered"


def test_the_tokenizers_own_template(tokenizer, monkeypatch):
    refused(lambda: ChatRenderer(tokenizer), "has no chat template: give one")
    monkeypatch.setattr(tokenizer, "chat_template", {"default": PLAIN, "tool_use": "x"})
    with ChatRenderer(tokenizer) as renderer:
        assert renderer.render_all([MESSAGES[3:]]) == ["<user>w3\n"]


@pytest.mark.parametrize("messages", [[{"content": b""}], [{1, 2}], ["text"], [[]]])
def test_invalid_messages_are_refused(renderer, messages):
    refused(lambda: renderer.render(messages), "messages")


def test_arguments_unseen_by_templates_are_refused(tokenizer):
    """It would have no effect."""
    taken, seen = (inspect.signature(call).parameters for call in (
        tokenizer.apply_chat_template, render_jinja_template))
    for name in taken.keys() - seen.keys() - {"kwargs"} | {"chat_template", "messages"}:
        refused(lambda name=name: check_template_arguments("x", {name: 1}),
                f"x cannot have '{name}'")
    check_template_arguments("x", {"tools": [], "documents": [], "enable_thinking": False})


def test_sandboxed_process_may_not_touch_the_system():
    """A template that is out of the sandbox can be no worse than code."""
    code = """if True:
        import os, socket, subprocess
        from flexgen_h2o.files.chat_template import _sandbox
        _sandbox()
        import wave  # code loads
        for act in (lambda: open("/etc/passwd"), lambda: open("a.py", "w"), lambda: os.remove("a"),
                    lambda: os.open("a.py", os.O_CREAT | os.O_WRONLY), lambda: os.system("true"),
                    lambda: subprocess.run("true"), lambda: socket.create_connection(("::1", 9))):
            try:
                act()
            except PermissionError as error:
                print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("a chat template may not do this: ") == 7, done
