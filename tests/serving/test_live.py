"""Completions and chats that a client waits for, whole and as streams."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import openai
import pytest
from helpers.error_cases import refused
from helpers.servers import DEADLINE, flags, request, serving
from helpers.tiny_tokenizers import tiny_tokenizer

from flexgen_h2o import LLM
from flexgen_h2o.engine.detokenization import ReasoningParser, without_beginning
from flexgen_h2o.outputs import Output
from flexgen_h2o.requests.request import Defaults, parse_request
from flexgen_h2o.requests.tokenizing import RequestTokenizer, TokenizedRequest
from flexgen_h2o.serving.live import LiveRequest, ResponseOptions
from flexgen_h2o.serving.metrics import Metrics

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "w5 w6"}], "temperature": 0,
        "max_tokens": 6}


@pytest.fixture(scope="module")
def texts(words_model) -> dict[str, str]:
    """What `generate` makes of some prompts."""
    prompts = ["w1 w5 w6 w2", "w8 w9", "w7"]
    with LLM(words_model, dtype="float32", device="cpu") as llm:
        return {prompt: output.text for prompt, output in
                zip(prompts, llm.generate(prompts, max_new_tokens=6), strict=True)}


def joined(stream) -> tuple[str, list]:
    """Return the text of a stream of chats or completions, and its parts."""
    parts = list(stream)
    return "".join((choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
                   for part in parts for choice in part.choices), parts


def test_chats_equal_those_of_generate(served, texts):
    answer = served.openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == texts["w1 w5 w6 w2"]
    assert (choice.finish_reason, len(choice.logprobs.content)) == ("length", 6)
    assert answer.usage.total_tokens == 10 and answer.model == "tiny"
    text, parts = joined(served.openai.chat.completions.create(
        **CHAT, stream=True, logprobs=True, stream_options={"include_usage": True}))
    assert text == choice.message.content
    assert parts[0].choices[0].delta.role == "assistant"
    assert len(parts) > 6 and {part.object for part in parts} == {"chat.completion.chunk"}
    assert parts[-1].usage == answer.usage and not parts[-1].choices
    assert parts[-2].choices[0].finish_reason == "length"
    assert len(parts[-2].choices[0].logprobs.content) == 6
    assert len({part.id for part in parts}) == 1


def test_completions_equal_those_of_generate(served, texts):
    options = {"model": "tiny", "prompt": ["w8 w9", "w7"], "temperature": 0, "max_tokens": 6}
    answer = served.openai.completions.create(**options)
    assert [choice.text for choice in answer.choices] == [texts["w8 w9"], texts["w7"]]
    parts = list(served.openai.completions.create(**options, echo=True, stream=True))
    for place, prompt in enumerate(options["prompt"]):
        assert "".join(choice.text for part in parts for choice in part.choices
                       if choice.index == place) == prompt + texts[prompt]
    sampled = served.openai.completions.create(model="tiny", prompt="w8", n=3, max_tokens=4)
    assert len({choice.text for choice in sampled.choices}) == 3


def test_streams_end_before_a_stop_string(served, texts):
    words = texts["w8 w9"].split()
    stop = f"{words[2]} {words[3]}"
    options = {"model": "tiny", "prompt": "w8 w9", "temperature": 0, "max_tokens": 6,
               "stop": [stop, "zz"]}
    answer = served.openai.completions.create(**options)
    assert answer.choices[0].text.split() == words[:2]
    text, parts = joined(served.openai.completions.create(**options, stream=True))
    assert text == answer.choices[0].text
    assert parts[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("url, body, param", [
    ("completions", {"prompt": ""}, "prompt"), ("completions", {}, "prompt"),
    ("completions", {"prompt": "w3", "temperature": 9}, "temperature"),
    ("completions", {"prompt": "w3", "stream": 1}, "stream"),
    ("completions", {"prompt": "w3", "stream_options": {}}, "stream_options"),
    ("completions", {"prompt": "w3", "stream": True, "stream_options": True}, "stream_options"),
    ("completions", {"prompt": "w3", "max_tokens": 200}, "prompt"),
    ("completions", {"prompt": [5, 4000]}, "prompt"),
    ("completions", {"prompt": "w3", "response_format": {"type": "json_schema", "json_schema": {
        "schema": {"type": "nothing"}}}}, "response_format"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": "w3"}], "tools": [1]}, "tools")])
def test_bad_requests_name_their_parameter(served, url, body, param):
    answer = served.http.post(f"/v1/{url}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (
        400, param, "invalid_request_error")


def test_unknown_models_are_not_found(served):
    with pytest.raises(openai.NotFoundError) as error:
        served.openai.completions.create(model="gpt-4", prompt="w3")
    assert error.value.code == "model_not_found"
    assert "tiny" in [model.id for model in served.openai.models.list()]
    assert served.openai.models.retrieve("tiny").owned_by == "flexgen_h2o"
    with pytest.raises(openai.NotFoundError):
        served.openai.models.retrieve("gpt-4")


def test_live_requests_come_before_batches(words_model, tmp_path):
    with serving(flags(words_model, tmp_path, "--gpu-batch-size", "2")) as served:
        batch = served.batch([request(f"r{number}", prompt="w3 w4", max_tokens=100,
                                      ignore_eos=True) for number in range(200)])
        served.wait(batch.id, "in_progress")
        for _ in range(3):
            answer = served.openai.completions.create(model="tiny", prompt="w8", max_tokens=3)
            assert answer.usage.completion_tokens == 3
        assert served.openai.batches.retrieve(batch.id).status == "in_progress"
        served.openai.batches.cancel(batch.id)
        served.wait(batch.id)


def slow(served, **fields) -> dict:
    """Fields of a request that takes many steps."""
    return {"model": "tiny", "prompt": "w8", "max_tokens": 120, "n": 8,
            "extra_body": {"ignore_eos": True, **fields}}


def test_a_full_queue_refuses_requests(served):
    stream = served.openai.completions.create(**slow(served), stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as error:
        served.openai.completions.create(model="tiny", prompt="w8", max_tokens=1)
    assert int(error.value.response.headers["retry-after"]) > 0
    stream.close()  # drops its sequences
    until = time.monotonic() + DEADLINE
    while True:
        try:
            served.openai.completions.create(model="tiny", prompt="w8", max_tokens=1)
            break
        except openai.RateLimitError:
            assert time.monotonic() < until


def test_the_end_of_the_server_ends_requests(words_model, tmp_path):
    with serving(flags(words_model, tmp_path, "--max-block-seconds", "0.01",
                       "--max-queue", "2000")) as served:
        errors, begun = [], threading.Event()

        def read() -> None:
            try:
                for _ in served.openai.completions.create(**slow(served) | {"n": 128}, stream=True):
                    begun.set()
            except openai.APIError as error:
                errors.append(str(error))

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(DEADLINE)
    thread.join()
    assert errors == ["the server is stopping"]


def test_health_and_metrics(served):
    served.openai.completions.create(model="tiny", prompt="w8 w9", max_tokens=2)
    assert served.http.get("/health").json() == {"status": "ok"}
    text = served.http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    name = '{model_name="tiny"}'
    assert float(values[f"vllm:prompt_tokens_total{name}"]) >= 2
    assert float(values[f"vllm:generation_tokens_total{name}"]) >= 2
    assert float(values[f"vllm:time_to_first_token_seconds_count{name}"]) >= 1
    assert values[f"vllm:num_requests_running{name}"] == "0.0"


@pytest.mark.parametrize("text, want", [
    ("<think> why? </think> so it is", ("so it is", "why?")),
    ("<think>not ended ", ("", "not ended")), ("<thin>k", ("<thin>k", "")),
    ("plain <think>", ("plain <think>", "")), ("one STOP two", ("one ", "")),
    ("one STO", ("one STO", ""))])
def test_streams_split_reasoning_and_stop(text, want):
    body = {"messages": [{"role": "user", "content": "x"}], "stop": "STOP"}
    chat = parse_request("/v1/chat/completions", body, "a", Defaults({"m"}, 99))
    tokenizer = tiny_tokenizer("byte-level")
    output = Output(None, [1], tokenizer(text)["input_ids"], text, "stop")

    async def parts() -> list[dict]:
        live = LiveRequest(TokenizedRequest(0, chat, [[1]], [99]), "m",
                           ReasoningParser(tokenizer), Metrics("m"))
        for character in text:
            live.add_text(0, character, False)
        live.add_output(live.request, 0, output)
        return [json.loads(event[6:]) async for event in
                live.events(ResponseOptions({"stream": True})) if event[6:12] != b"[DONE]"]

    deltas = [part["choices"][0]["delta"] for part in asyncio.run(parts())]
    assert tuple("".join(delta.get(name) or "" for delta in deltas)
                 for name in ("content", "reasoning_content")) == want


def test_max_model_len_bounds_prompts_and_new_tokens():
    encoder = SimpleNamespace(tokenizer=None, chat_end_tokens=(), vocab_size=9,
                              encode=lambda prompt, **_: prompt,
                              clamp_new_tokens=lambda tokens, new: min(new, 99 - tokens))
    tokenizer = RequestTokenizer(encoder, Defaults(("m",), 50), max_model_len=8)

    def limits(prompt: list[int], **body: int) -> list[int]:
        body |= {"prompt": prompt}
        request = parse_request("/v1/completions", body, "a", Defaults(("m",), 50))
        return tokenizer.tokenize(request, name="a").limits

    assert limits([1, 2, 3]) == limits([1, 2, 3], max_tokens=5) == [5]
    for prompt, body in (([1, 2, 3], {"max_tokens": 6}), ([1] * 8, {})):
        refused(lambda prompt=prompt, body=body: limits(prompt, **body), "--max-model-len 8")


def test_ends_that_begin_a_stop_string_are_held_back():
    assert without_beginning("one ST", ["STOP"]) == "one "
    assert without_beginning("one S", ["STOP", "e S T"]) == "on"
    assert without_beginning("STOP", ["STOP"]) == "STOP"
    assert without_beginning("", ["STOP"]) == ""
