"""Structured outputs: texts keep their form, whatever the logits."""

import json
import re

import pytest
import torch
from helpers.error_cases import refused
from helpers.selection import examples
from helpers.tiny_tokenizers import tiny_tokenizer, with_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import LLM, Policy, StructuredOutputs
from flexgen_h2o.commands import batch
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.blocks import Request
from flexgen_h2o.engine.detokenization import Detokenizer
from flexgen_h2o.engine.sampling import Sampler
from flexgen_h2o.engine.structured_outputs import GrammarCompiler
from flexgen_h2o.errors import StructureError
from flexgen_h2o.requests.request import BadRequest, Defaults, read_request

SCHEMA = {"type": "object", "required": ["name", "age", "tags"], "additionalProperties": False,
          "properties": {"name": {"type": "string", "maxLength": 4},
                         "age": {"type": "integer", "minimum": 0, "maximum": 99},
                         "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2}}}
CHOICES = ["so", "so so", "日本"]


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (set(person) == {"name", "age", "tags"} and len(person["name"]) <= 4
            and person["age"] in range(100) and set(person["tags"]) <= {"a", "é"})


FORMS = [
    (StructuredOutputs(json=SCHEMA), is_person),
    (StructuredOutputs(json=json.dumps(SCHEMA)), is_person),
    (StructuredOutputs(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    (StructuredOutputs(regex="[a-c]{1,3}-é+x"), re.compile("[a-c]{1,3}-é+x").fullmatch),
    (StructuredOutputs(choice=CHOICES), CHOICES.__contains__),
    (StructuredOutputs(grammar='start: "a" b? "c"\nb: /[0-9]{2}/'),
     re.compile("a([0-9]{2})?c").fullmatch),
    (StructuredOutputs(grammar='root ::= "x" [0-9] [0-9]? "y"'),
     re.compile("x[0-9]{1,2}y").fullmatch)]


@pytest.fixture(scope="module", params=["byte-level", "llama"])
def tokenizer(request):
    return tiny_tokenizer(request.param)


ENDS = (2, 5)
"""End tokens: the tokenizer's own, and one that is also a part of texts."""
ASCII = 97
"""Size of a vocabulary with the ASCII characters of the byte-level tokenizer alone."""
PADDING = 3
"""Number of token ids of the model that the tokenizer lacks."""


def sampler_of(tokenizer, outputs, **options) -> Sampler:
    params = SamplingParams(do_sample=True, top_k=0, **options)
    compiler = GrammarCompiler(tokenizer, len(tokenizer) + PADDING)
    return Sampler(params, ENDS, compiler.masks(outputs, ENDS))


def step(sampler, tokenizer, requests, generator) -> None:
    """Append a token to each request, sampled from random logits."""
    logits = 4 * torch.randn(len(requests), len(tokenizer) + PADDING, generator=generator)
    logits[:, list(ENDS)] += 6
    for request, token in zip(requests, sampler(logits, requests), strict=True):
        if not request.finish_reason:
            request.generated.append(token)
            request.finish_reason = "stop" if token in ENDS else ""


def generate(tokenizer, sampler, *, rows=3, seed=0, most=300) -> list[str]:
    """Return the texts that end within `most` tokens."""
    requests = [Request(key, [1], seed=seed + key) for key in range(rows)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(most):
        step(sampler, tokenizer, requests, generator)
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.text(request.generated[:-1], request.prompt) for request in requests
            if request.finish_reason]


@pytest.mark.parametrize(("outputs", "holds"), FORMS)
def test_texts_have_the_required_form(tokenizer, outputs, holds):
    texts = generate(tokenizer, sampler_of(tokenizer, outputs))
    assert texts
    assert all(holds(text) for text in texts), texts


@settings(max_examples=examples(20), deadline=None)
@given(options=st.fixed_dictionaries({}, optional={
    "presence_penalty": st.floats(-2, 2), "repetition_penalty": st.floats(0.5, 2),
    "top_p": st.floats(0.1, 1), "logit_bias": st.dictionaries(st.integers(0, 99),
                                                             st.floats(-50, 50), max_size=4)}),
       seed=st.integers(0, 2**32))
def test_other_parameters_keep_the_form(options, seed):
    tokenizer = tiny_tokenizer("byte-level")
    outputs = StructuredOutputs(regex="(so|time) [0-9]{2,4}")
    texts = generate(tokenizer, sampler_of(tokenizer, outputs, **options), seed=seed, most=12)
    assert len(texts) == 3
    assert all(re.fullmatch("(so|time) [0-9]{2,4}", text) for text in texts)


def test_a_restarted_request_gets_the_same_text(tokenizer):
    sampler = sampler_of(tokenizer, StructuredOutputs(json=SCHEMA))
    requests = [Request(key, [1], seed=key) for key in range(2)]
    texts = []
    for steps in (5, 40):  # the first attempt is given up
        generator = torch.Generator().manual_seed(1)
        for request in requests:
            request.restart()
            sampler.forget(request)
        for _ in range(steps):
            step(sampler, tokenizer, requests, generator)
        texts.append([request.generated[:5] for request in requests])
    assert texts[0] == texts[1]


def test_dropped_tokens_leave_no_trace(tokenizer):
    sampler, generator = (sampler_of(tokenizer, StructuredOutputs(json=SCHEMA)),
                          torch.Generator().manual_seed(2))
    request = Request(0, [1])
    for _ in range(6):
        step(sampler, tokenizer, [request], generator)
    kept = request.generated[:3]
    del request.generated[3:]
    masks = sampler_of(tokenizer, StructuredOutputs(json=SCHEMA))._masks
    zeros = torch.zeros(1, len(tokenizer) + PADDING)
    assert torch.equal(sampler._masks.apply(zeros, [request]), masks.apply(zeros, [request]))
    assert request.generated == kept


def test_a_text_that_left_its_form_fails_by_its_number(tokenizer):
    sampler = sampler_of(tokenizer, StructuredOutputs(regex="[0-9]+"))
    requests = [Request(3, [1]), Request(4, [1], tokenizer.encode("x", add_special_tokens=False))]
    with pytest.raises(StructureError) as caught:
        step(sampler, tokenizer, requests, torch.Generator())
    assert caught.value.key == 4


def test_a_text_that_ends_needs_no_further_token():
    compiler, outputs = GrammarCompiler(tiny_tokenizer("byte-level"), ASCII), StructuredOutputs(
        regex="[a-c]{2}é")
    sampler = Sampler(SamplingParams(), ENDS, compiler.masks(outputs, ENDS))
    ended, goes_on = requests = [Request(0, [1]), Request(1, [1])]
    for _ in range(2):
        for request, token in zip(requests, sampler(torch.zeros(2, ASCII), requests), strict=True):
            request.generated.append(token)
    ended.finish_reason = "length"
    sampler.forget(ended)
    with pytest.raises(StructureError) as caught:  # no token for é
        sampler(torch.zeros(2, ASCII), requests)
    assert caught.value.key == goes_on.key


@pytest.mark.parametrize("options", [
    {}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"choice": "yes"}, {"choice": [1]},
    {"regex": 3}, {"regex": "\ud800"}, {"json": 5}, {"json": {"a": {1, 2}}}, {"json_object": 1}])
def test_wrong_values_are_refused(options):
    refused(lambda: StructuredOutputs(**options), match="structured_outputs|json|choice")


@pytest.mark.parametrize("outputs", [
    StructuredOutputs(json="{"), StructuredOutputs(json="[]"),
    StructuredOutputs(json={"type": "nonsense"}), StructuredOutputs(regex="("),
    StructuredOutputs(grammar="start: missing"),
    StructuredOutputs(json={"allOf": [{"type": "string"}, {"type": "integer"}]}),
    StructuredOutputs(json={"$ref": "http://localhost/schema.json"}),
    StructuredOutputs(json={"enum": [1, [-2**63]]}), StructuredOutputs(json={"const": 512 - 2**63}),
    StructuredOutputs(grammar='start: %json {"const": -9223372036854775808}'),
    StructuredOutputs(json={"type": "number", "multipleOf": 2**31}),
    StructuredOutputs(json='{"type": "integer", "multiple\\u004ff": 999983.0}'),
    StructuredOutputs(json={"allOf": [{"multipleOf": 9.97}, {"multipleOf": 991}]}),
    StructuredOutputs(grammar='start: %json {"multipleOf" : 16777217}')])
def test_grammars_that_cannot_be_met_are_refused(outputs):
    refused(lambda: outputs.compile(), match="structured_outputs")


def test_a_text_without_end_token_is_refused(tokenizer):
    compiler = GrammarCompiler(tokenizer, len(tokenizer))
    refused(lambda: compiler.masks(StructuredOutputs(json_object=True), ()), match="end token")


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory) -> str:
    """A model with the first tokens of a byte-level tokenizer: ASCII."""
    return with_bytes(tiny_model("llama").folder, tmp_path_factory.mktemp("bytes") / "model")


def test_texts_with_and_without_a_form_in_one_call(folder):
    forms = [None, StructuredOutputs(regex="[a-c]+x")] * 3
    params = [SamplingParams(max_new_tokens=30, eos_token_id=7, do_sample=True, seed=seed,
                             structured_outputs=form, suppress_tokens=[2] if form is None else None)
              for seed, form in enumerate(forms)]
    prompts = [[4, 9, 3 + number] for number in range(len(forms))]
    with LLM(folder, dtype="float32", policy=Policy(gpu_batch_size=2, num_gpu_batches=2)) as llm:
        outputs = llm.generate(prompts, params)
        free = llm.generate(prompts[::2], params[::2])
    assert [output.token_ids for output in outputs[::2]] == [output.token_ids for output in free]
    for output in outputs[1::2]:
        assert re.fullmatch("[a-c]+x?", output.text)
        assert (output.finish_reason == "stop") == output.text.endswith("x")


def test_drafts_of_speculative_decoding_keep_the_form(folder):
    params = SamplingParams(max_new_tokens=24, eos_token_id=2, do_sample=True, temperature=0.5,
                            structured_outputs=StructuredOutputs(regex="((ab|ac)[0-9])+x"))
    prompts = [list(range(3, 20)) * 2, [40, 41, 42] * 6]
    outputs = []
    for policy in (Policy(), Policy(speculate="ngram", num_speculative_tokens=4)):
        with LLM(folder, dtype="float32", policy=policy) as llm:
            outputs.append(llm.generate(prompts, params))
            drafted = llm.stats.draft_tokens
    assert drafted
    assert outputs[0] == outputs[1]


def read(**body):
    line = json.dumps({"prompt": "x", **body}).encode()
    return read_request(line, 1, Defaults(("m",), max_tokens=8)).params.structured_outputs


def form(type_, **fields):
    return {"response_format": {"type": type_, **fields}}


@pytest.mark.parametrize(("body", "outputs"), [
    (form("text"), None), (form("json_object"), StructuredOutputs(json_object=True)),
    (form("json_schema", json_schema={"name": "person", "strict": True, "schema": SCHEMA}),
     StructuredOutputs(json=SCHEMA)),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
    ({"structured_outputs": {"choice": ["a", "b"], "regex": None}},
     StructuredOutputs(choice=["a", "b"]))])
def test_requests_name_a_form_as_openai_or_vllm_do(body, outputs):
    assert read(**body) == outputs


@pytest.mark.parametrize("body", [
    form("json_schema"), form("xml"), {"response_format": "json_object"},
    form("json_schema", json_schema={"schema": {"type": "nonsense"}}),
    {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"regexp": "a"}},
    {"structured_outputs": []}, {"structured_outputs": {"json_object": False}},
    form("json_object") | {"structured_outputs": {"regex": "a"}},
    form("json_object") | {"ignore_eos": True}])
def test_requests_with_a_wrong_form_are_refused(body):
    with pytest.raises(BadRequest) as caught:
        read(**body)
    assert caught.value.param in body


def test_one_request_that_cannot_keep_its_form_fails_alone(folder, tmp_path):
    lines = [{"prompt": [5, 6], "max_tokens": 4},
             {"prompt": [5, 7], "max_tokens": 4, "structured_outputs": {"choice": ["日本"]}},
             {"prompt": [5, 8], "max_tokens": 4, "structured_outputs": {"regex": "[0-9]{3}"}}]
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert batch.main(["-i", str(requests), "-o", str(results), "--model", folder]) == 0
    answers = {answer["custom_id"]: answer
               for answer in map(json.loads, results.read_text().splitlines())}
    assert answers["line-1"]["response"]["status_code"] == 200
    error = answers["line-2"]["response"]["body"]["error"]
    assert (error["param"], answers["line-2"]["response"]["status_code"]) == (
        "structured_outputs", 400)
    text = answers["line-3"]["response"]["body"]["choices"][0]["text"]
    assert re.fullmatch("[0-9]{3}", text)
