"""Lines of a batch job: parsed requests, errors and answers."""

import json
from dataclasses import replace

import pytest
from helpers.error_cases import refused
from helpers.tiny_tokenizers import tiny_tokenizer

from flexgen_h2o.commands.batch.flags import parse_args
from flexgen_h2o.config.sampling import mix_seed
from flexgen_h2o.engine.detokenization import Detokenizer, ReasoningParser
from flexgen_h2o.outputs import Output, TokenLogProb
from flexgen_h2o.requests import request as requests
from flexgen_h2o.requests.request import BadRequest, Defaults, JobRequest
from flexgen_h2o.requests.results import answer_line, failure_line

DEFAULTS = Defaults({"org/tiny", "tiny"}, max_tokens=16, seed=5)
HELLO = [{"role": "user", "content": "hello"}]


def chat_line(**body) -> dict:
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": HELLO, **body}}


def completion(**body) -> dict:
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions",
            "body": {"prompt": "hello", **body}}


def read(line: object, number: int = 7) -> JobRequest:
    return requests.read_request(json.dumps(line).encode(), number, DEFAULTS)


# --- valid lines


def test_missing_fields_have_the_defaults_of_the_api():
    one = read(completion())
    assert (one.custom_id, one.chat, one.prompts, one.n) == ("a", False, ("hello",), 1)
    params = one.params
    assert (params.max_new_tokens, params.do_sample, params.temperature, params.top_p, params.top_k,
            params.logprobs, params.stop_strings) == (16, True, 1.0, 1.0, 0, None, None)
    assert read(completion(temperature=0)).params.do_sample is False
    assert read(completion(temperature=5e-324)).params == read(completion(temperature=0)).params
    assert read(completion(**dict.fromkeys(requests.COMPLETIONS.keys() - {"prompt"}))) == one


@pytest.mark.parametrize(("line", "expected"), [
    ({"prompt": "x"}, ("line-7", False, ("x",))), ({"prompt": "x", "id": 3}, ("3", False, ("x",))),
    ({"prompt": [1, 2], "id": "b"}, ("b", False, ([1, 2],))),
    ({"prompt": ["x", "y"]}, ("line-7", False, ("x", "y"))),
    ({"prompt": [[1], [2, 3]]}, ("line-7", False, ([1], [2, 3]))),
    ({"messages": HELLO}, ("line-7", True, ())), (chat_line(model="tiny"), ("a", True, ())),
    (chat_line(model="org/tiny"), ("a", True, ()))])
def test_forms_of_a_line(line, expected):
    one = read(line)
    assert (one.custom_id, one.chat, one.prompts) == expected


def test_fields_become_sampling_parameters():
    params = read(chat_line(max_completion_tokens=3, max_tokens=3, temperature=0.5, top_p=0.9,
                            stop="x", seed=-1, presence_penalty=1, frequency_penalty=-0.5,
                            logprobs=True, top_logprobs=2)).params
    assert (params.max_new_tokens, params.temperature, params.top_p, params.stop_strings,
            params.seed, params.presence_penalty, params.frequency_penalty, params.logprobs
            ) == (3, 0.5, 0.9, ("x",), 2**63 - 1, 1, -0.5, 2)
    assert read(chat_line(logprobs=True)).params.logprobs == 0
    assert read(chat_line(logprobs=False)).params.logprobs is None
    assert read(completion(logprobs=4, stop=["a", "\n"])).params.logprobs == 4


def test_fields_of_vllm_become_sampling_parameters():
    one = read(completion(top_k=7, min_p=0.1, repetition_penalty=1.2, min_tokens=2, ignore_eos=True,
                          stop_token_ids=[5, 6], logit_bias={"8": -100, "3": 1.5}, echo=True,
                          add_special_tokens=False, skip_special_tokens=False))
    params = one.params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_new_tokens,
            params.eos_token_id, params.stop_token_ids, params.logit_bias,
            params.skip_special_tokens) == (7, 0.1, 1.2, 2, -1, (5, 6), ((3, 1.5), (8, -100.0)),
                                            False)
    assert (one.echo, one.add_special_tokens, one.clamp_new_tokens) == (True, False, True)
    assert read(completion(top_k=-1)).params.top_k == 0
    # Without max_tokens there is room for min_tokens.
    assert read(completion(min_tokens=99)).params.max_new_tokens == 99
    chat = read(chat_line(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low",
                          documents=[{"text": "x"}], add_generation_prompt=False,
                          continue_final_message=True, add_special_tokens=True, max_tokens=3))
    assert chat.template_arguments == {
        "enable_thinking": False, "reasoning_effort": "low", "documents": [{"text": "x"}],
        "add_generation_prompt": False, "continue_final_message": True}
    assert chat.add_special_tokens and not chat.clamp_new_tokens
    assert not read(chat_line()).add_special_tokens


def test_job_defaults_fill_fields_missing_in_a_request():
    given = requests.check_defaults({
        "top_k": 5, "stop_token_ids": [9], "echo": True, "reasoning_effort": "low",
        "chat_template_kwargs": {"a": 1, "b": 2}, "stop": "x"})
    defaults = Defaults({"tiny"}, 16, fields=given)

    def params(line: dict) -> JobRequest:
        return requests.read_request(json.dumps(line).encode(), 1, defaults)

    one = params(completion(top_k=3, stop=None))
    assert (one.params.top_k, one.params.stop_token_ids, one.params.stop_strings, one.echo) == (
        3, (9,), ("x",), True)
    chat = params(chat_line(chat_template_kwargs={"b": 3}))
    assert chat.template_arguments == {"a": 1, "b": 3, "reasoning_effort": "low"}
    assert chat.params.top_k == 5 and not chat.echo


def test_the_model_may_have_more_names():
    options = parse_args(["-i", "in.jsonl", "-o", "out.jsonl", "--served-model-name", "gpt-4", "b"])
    line = json.dumps(completion(model="gpt-4")).encode()
    assert requests.read_request(line, 1, options.defaults())


@pytest.mark.parametrize(("given", "words"), [
    ({"max_tokens": 3}, "unknown key 'max_tokens'"), ({"topk": 3}, "did you mean top_k?"),
    ({"logit_bias": {"x": 1}}, "logit_bias must have"),
    ({"chat_template_kwargs": {"messages": []}}, "'messages'")])
def test_wrong_fields_of_the_whole_job_are_refused(given, words):
    message = refused(lambda: requests.check_defaults(given), words)
    assert message.startswith("--request-defaults: ")


def test_seeds_depend_on_the_job_the_id_and_the_choice():
    """Not on the line's place, nor on its neighbours."""
    one = read(completion(n=3))
    assert one.params.seed == read(completion(top_p=0.5), number=99).params.seed
    assert one.params.seed != read({**completion(), "custom_id": "b"}).params.seed
    other = requests.read_request(json.dumps(completion()).encode(), 7, Defaults({"m"}, 1, seed=6))
    assert one.params.seed != other.params.seed
    seeds = [one.choice_params(choice).seed for choice in range(3)]
    assert seeds == [mix_seed(one.params.seed, choice) for choice in range(3)]
    assert len({*seeds}) == 3
    assert requests.derive_seed(1, "2") != requests.derive_seed(12, "")


def test_messages_are_texts_whose_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one = read(chat_line(messages=[{"role": "developer", "content": "d"},
                                   {"role": "user", "content": parts, "name": "Ann"},
                                   {"role": "assistant", "content": "c", "refusal": None,
                                    "tool_calls": []}]))
    assert one.messages == ({"role": "system", "content": "d"},
                            {"role": "user", "content": "ab", "name": "Ann"},
                            {"role": "assistant", "content": "c"})


def test_neutral_fields_are_ignored():
    idle = {name: {"any": [1]} for name in requests.IGNORED} | {
        "stream": False, "tools": [], "tool_choice": "none", "logit_bias": {}, "echo": False,
        "use_beam_search": False, "length_penalty": 1, "include_stop_str_in_output": False,
        "response_format": {"type": "text"}, "modalities": ["text"]}
    assert read(chat_line(**idle)) == read(chat_line())
    assert read(completion(echo=False, best_of=1, suffix="")) == read(completion())


# --- errors


@pytest.mark.parametrize(("line", "code", "param", "words"), [
    ([1], "invalid_json_line", None, "not a JSON object"),
    ({}, "invalid_request_error", "prompt", "prompt must be"),
    ({"prompt": "x", "id": []}, "missing_required_parameter", "id", "id must be"),
    ({**completion(), "custom_id": None}, "missing_required_parameter", "custom_id", "custom_id"),
    ({**completion(), "method": "GET"}, "invalid_method", "method", "POST"),
    ({**completion(), "url": "/v1/embeddings"}, "invalid_url", "url", "/v1/embeddings"),
    (completion(model="gpt-4"), "mismatched_model", "model", "no model 'gpt-4' here: use tiny"),
    *((line, "unsupported_parameter", param, param) for param, line in (
        ("stream", completion(stream=True)), ("tools", chat_line(tools=[{}])),
        ("echo", completion(echo=True, logprobs=0)), ("echo", chat_line(echo=True)),
        ("reasoning_effort", completion(reasoning_effort="low")),
        ("messages[0].content", chat_line(
            messages=[{"role": "user", "content": [{"type": "image_url"}]}])),
        ("messages[0]", chat_line(
            messages=[{"role": "assistant", "content": "", "tool_calls": [1]}])))),
    *((line, "invalid_request_error", param, words) for param, words, line in (
        ("min_tokens", "max_tokens 4", completion(min_tokens=5, max_tokens=4)),
        ("stop_token_ids", ">= 0", completion(stop_token_ids=[1, -2])),
        ("logit_bias", "token ids", completion(logit_bias={"the": 1})),
        ("logit_bias", "at most 100", completion(logit_bias={"7": 101})),
        ("chat_template_kwargs", "mapping", chat_line(chat_template_kwargs=[])),
        ("chat_template_kwargs", "'tokenize'", chat_line(chat_template_kwargs={"tokenize": False})),
        ("continue_final_message", '"add_generation_prompt": false',
         chat_line(continue_final_message=True)),
        ("max_tokens", "at most", completion(max_tokens=10**400)),
        ("max_tokens", "contradict", chat_line(max_tokens=3, max_completion_tokens=4)),
        ("temperature", "at most 2", completion(temperature=2.1)),
        ("n", "2048", completion(n=128, prompt=["x"] * 17)),
        ("stop", "several", completion(stop=["a", 5])),
        ("top_logprobs", '"logprobs": true', chat_line(top_logprobs=3)),
        ("prompt", "token ids", completion(prompt=[1, -1])),
        ("messages[0].role", "'tool'", chat_line(messages=[{"role": "tool", "content": "x"}])),
        ("messages[0].content", "must be text", chat_line(messages=[{"role": "user"}]))))])
def test_bad_fields_are_named(line, code, param, words):
    with pytest.raises(BadRequest) as caught:
        read(line)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("line", [b"", b'"a', b"\xff", b"[" * 10**5, b'{"a": NaN}',
                                  b'{"prompt": "\\ud800"}', b'{"n": ' + b"1" * 9999 + b"}"])
def test_invalid_json_lines_are_errors(line):
    with pytest.raises(BadRequest, match="not JSON") as caught:
        requests.read_request(line, 1, DEFAULTS)
    assert caught.value.code == "invalid_json_line"


# --- answers


def output(text: str, tokens: list[int], **options) -> Output:
    return Output(None, [1, 2, 3], tokens, text, "length", **options)


def body_of(one: requests.JobRequest, *outputs: Output, kind: str | None = None) -> dict:
    """Return the body of a response of a model with a tiny tokenizer of a kind, or with none."""
    parser = kind and ReasoningParser(tiny_tokenizer(kind))
    record = json.loads(answer_line(one, outputs, key=255, model="tiny", created=9, parser=parser))
    assert record["id"] == "batch_req_00000000000000ff" and record["error"] is None
    assert record["custom_id"] == "a" and record["response"]["status_code"] == 200
    return record["response"]["body"]


def test_answers_have_the_shape_of_the_api():
    a, so, time = tiny_tokenizer("llama").convert_tokens_to_ids(["▁a", "▁so", "▁time"])
    probs = [TokenLogProb(so, -0.5, ((time, -0.25), (so, -0.5))),
             TokenLogProb(time, -float("inf"), ())]
    outputs = [output("ab STOP c", [so, time], log_probs=probs), output("", [])]
    one = read(completion(n=2, stop="STOP", logprobs=2))
    body = body_of(one, *(replace(answer, prompt_token_ids=[a, a, a]) for answer in outputs),
                   kind="llama")
    assert (body["object"], body["created"], body["model"]) == ("text_completion", 9, "tiny")
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert body["choices"][0] == {
        "index": 0, "text": "ab ", "finish_reason": "length", "logprobs": {
            "tokens": [" so", " time"], "token_logprobs": [-0.5, -9999.0],
            "top_logprobs": [{" time": -0.25, " so": -0.5}, {" time": -9999.0}],
            "text_offset": [0, 3]}}
    assert body["choices"][1]["logprobs"]["tokens"] == []
    one = read(chat_line(logprobs=True, top_logprobs=1))
    likely = [TokenLogProb(4, -0.5, ((5, -0.25),))]
    body = body_of(one, output("x", [4], log_probs=likely))
    assert body["object"] == "chat.completion" and body["choices"] == [{
        "index": 0, "message": {"role": "assistant", "content": "x", "refusal": None},
        "finish_reason": "length", "token_ids": [4], "logprobs": {"refusal": None, "content": [{
            "token": "token_id:4", "logprob": -0.5, "bytes": [*b"token_id:4"], "top_logprobs": [{
                "token": "token_id:5", "logprob": -0.25, "bytes": [*b"token_id:5"]}]}]}}]


def test_log_probs_of_partial_characters_have_bytes():
    tokenizer = tiny_tokenizer("llama")
    names = ["▁a", "a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "t", "</s>"]
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
    # The likeliest tokens differ by a space, and in bytes of no character by themselves.
    top = tuple((ids[name], -float(place)) for place, name in enumerate(names[:4], 1))
    probs = [TokenLogProb(token, -0.5, top) for token in ids.values()]
    given = replace(output("", [*ids.values()], log_probs=probs), prompt_token_ids=[ids["t"]])
    given = replace(given, text=Detokenizer(tokenizer).text(given.token_ids, [ids["t"]]))

    entries = body_of(read(chat_line(logprobs=True, top_logprobs=4)), given, kind="llama")[
        "choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [" a", "a", "\\xf0", "\\x9f", "\\x98",
                                                   "\\x80", "t", "</s>"]
    assert bytes(sum((entry["bytes"] for entry in entries[:-1]), [])).decode() == given.text
    assert [entry["token"] for entry in entries[0]["top_logprobs"]] == [" a", "a", "\\xf0", "\\x9f"]

    choice = body_of(read(completion(logprobs=4)), given, kind="llama")["choices"][0]
    assert choice["text"] == " aa😀t"
    assert choice["logprobs"]["tokens"] == [" a", "a", "bytes:\\xf0", "bytes:\\x9f",
                                           "bytes:\\x98", "bytes:\\x80", "t", "</s>"]
    assert choice["logprobs"]["text_offset"] == [0, 2, 3, 3, 3, 3, 4, 5]
    assert choice["logprobs"]["top_logprobs"][-1] == {
        " a": -1, "a": -2, "bytes:\\xf0": -3, "bytes:\\x9f": -4, "</s>": -0.5}


def test_token_ids_on_request():
    for kind in ("llama", None):
        for line, path in ((chat_line, []), (completion, ["choices", 0])):
            body = body_of(read(line(return_token_ids=True)), output("x", [4, 5]), kind=kind)
            assert body["choices"][0]["token_ids"] == [4, 5]
            for key in path:
                body = body[key]
            assert body["prompt_token_ids"] == [1, 2, 3]
    plain = body_of(read(completion(return_token_ids=False)), output("x", [4]), kind="llama")
    assert "token_ids" not in plain["choices"][0]


def test_reasoning_comes_beside_the_answer():
    tokenizer = tiny_tokenizer("byte-level")
    tokens = tokenizer("<think>so it is</think> so STOP")["input_ids"]
    given = output("<think>so it is</think> so STOP", tokens)
    message = body_of(read(chat_line(stop=" STOP")), given, kind="byte-level")["choices"][0][
        "message"]
    assert message == {"role": "assistant", "content": "so", "refusal": None,
                       "reasoning_content": "so it is"}
    # It may come back with the next question.
    history = [{"role": "user", "content": "a"}, message, {"role": "user", "content": "b"}]
    for name in ("reasoning_content", "reasoning"):  # the latter is vLLM's name
        message[name] = message.pop("reasoning_content", None) or message.pop("reasoning")
        assert read(chat_line(messages=history)).messages[1] == {
            "role": "assistant", "content": "so", "reasoning_content": "so it is"}


def test_lines_hold_no_separators_of_lines():
    text = "a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029b"
    line = answer_line(read(completion()), [output(text, [4])], key=1, model="tiny", created=9,
                  parser=None).decode()
    assert line.splitlines() == [line] and "\\u2028" in line
    assert json.loads(line)["response"]["body"]["choices"][0]["text"] == text


def test_echo_puts_each_prompt_before_its_choices():
    one = read(completion(prompt=["p ", "q "], n=2, echo=True, stop="STOP"))
    outputs = [output(f"{number} STOP", [4]) for number in range(4)]
    body = json.loads(answer_line(one, outputs, key=1, model="tiny", created=9, parser=None)
                      )["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["p 0 ", "p 1 ", "q 2 ", "q 3 "]


def test_failures_have_the_two_shapes_of_the_api():
    known = json.loads(failure_line(BadRequest("no", param="n"), key=3, number=4, custom_id="a"))
    assert known == {
        "id": "batch_req_0000000000000003", "custom_id": "a", "error": None, "response": {
            "status_code": 400, "request_id": "req_0000000000000003", "body": {"error": {
                "message": "line 4: no", "type": "invalid_request_error", "param": "n",
                "code": "invalid_request_error"}}}}
    lost = json.loads(failure_line(BadRequest("no", code="invalid_json_line"), key=3, number=4,
                              custom_id=None))
    assert lost["response"] is None and lost["error"] == {
        "code": "invalid_json_line", "message": "line 4: no", "param": None, "line": 4}
