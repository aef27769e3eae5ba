"""Articles, summary tasks and conversations from .jsonl files."""

import json

import pytest
from articles import read_articles, select_articles, split_halves
from helpers.batch_jobs import write_lines
from helpers.error_cases import refused

from flexgen_h2o.files.readers import (
    Article,
    Turn,
    first_sentence,
    read_conversations,
    read_summary_tasks,
    strip_prompt,
)


def wrapped(text: str) -> str:
    return f"###\nArticle: {text}\n\nSummarize the above article in 1 sentence.\n"


def test_articles_are_read_without_their_prompt(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"article": wrapped("One.\u2028Two.")},
                                            {"article": "Bare"}, "\n\n"])
    assert read_articles(path) == ["One.\u2028Two.", "Bare"]
    assert strip_prompt("Article: stays. Summarize it.") == "Article: stays. Summarize it."


def test_summary_tasks_have_prompt_reference_and_limits(tmp_path):
    task = {"article": wrapped("Text one. It goes on."), "summary_gt": "s", "stop": ["###"],
            "max_tokens": 8}
    path = write_lines(tmp_path / "a.jsonl", [task, {"article": " A b. C ", "summary_gt": "s"},
                                              {**task, "stop": "x", "max_tokens": 3}])
    tasks = read_summary_tasks(path)
    assert tasks[0] == Article(task["article"], "s", ("###",), 8)
    assert tasks[0].lead == "Text one."
    assert tasks[1] == Article(" A b. C ", "s", (), 64) and tasks[1].lead == "A b."
    assert (tasks[2].stop, tasks[2].max_tokens) == (("x",), 3)
    assert [one.max_tokens for one in read_summary_tasks(path, max_tasks=2, max_tokens=5)] == [5, 5]


def test_conversations_have_turns(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"question_id": 81, "turns": ["Hi.", "And?"]},
                                              {"question_id": "b", "turns": ["Bye \u2028 now."]}])
    assert read_conversations(path) == [
        [Turn(81, 1, "Hi."), Turn(81, 2, "And?")], [Turn("b", 1, "Bye \u2028 now.")]]


GOOD = b'{"article": "a", "summary_gt": "b", "turns": ["c"]}\n'


@pytest.mark.parametrize(("read", "content", "words"), [
    (read_articles, b"", "holds no articles"), (read_articles, b"\xff\xfe", "is not UTF-8"),
    (read_articles, GOOD + b'{"article": \n', "line 2 is not JSON"),
    (read_articles, GOOD + b'\n{"text": "b"}\n', "line 3 has no text under the key `article`"),
    (read_articles, json.dumps({"article": wrapped("")}).encode(), "line 1 has no text"),
    (read_summary_tasks, GOOD + b"{", "line 2 is not JSON"),
    (read_summary_tasks, GOOD + b'{"article": "a"}', "line 2 has no text under the key `summary"),
    (read_summary_tasks, b'{"article": "a", "summary_gt": "b", "stop": [1]}', "`stop`"),
    (read_summary_tasks, b'{"article": "a", "summary_gt": "b", "max_tokens": true}', "max_"),
    (read_conversations, b"\n \n", "holds no conversations"),
    (read_conversations, GOOD + b"\n" + GOOD, "line 2 is blank"),
    (read_conversations, b'{"turns": ["a", " "]}\n', "line 1 has no list of texts"),
    (read_conversations, b'{"turns": ["a"], "question_id": [1]}\n', "line 1 has a `question_id`")])
def test_invalid_files_are_errors(tmp_path, read, content, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    refused(lambda: read(str(path)), words)


@pytest.mark.parametrize(("text", "first"), [
    ("Mr. Smith met Dr. Jones. They spoke.", "Mr. Smith met Dr. Jones."),
    ("The U.S. Senate met J. Doe at 5.30 p.m. on Monday. Then it left.",
     "The U.S. Senate met J. Doe at 5.30 p.m. on Monday."),
    ('He said: "Stop!" She did.', 'He said: "Stop!"'), ("Why? 12 said so.", "Why?"),
    ("It cost 3.5 million. £2 were mine.", "It cost 3.5 million.")])
def test_the_first_sentence(text, first):
    assert first_sentence(text) == first


def test_articles_are_selected_and_split():
    texts = ["a", "b b b", "c c c c c c", "d d d d"]
    assert select_articles(texts, str.split, articles=2, min_tokens=3, max_tokens=4) == [
        ["b"] * 3, ["c"] * 4]
    refused(lambda: select_articles(texts, str.split, articles=3, min_tokens=4, max_tokens=9),
            "has 2 articles of at least 4 tokens and 3 are needed")
    assert split_halves([[1, 2, 3, 4], [5, 6, 7], [8, 9]]) == [
        ([1, 2], [3, 4]), ([5], [6, 7]), ([8], [9])]
