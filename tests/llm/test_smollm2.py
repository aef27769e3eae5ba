"""The real model, smollm2-135m in float32: transformers' tokens on real text, and common sense."""

import pytest
import torch
from helpers import selection
from helpers.generation import token_ids
from helpers.selection import full

from flexgen_h2o import LLM, Placement, Policy, SamplingParams
from flexgen_h2o.models import checkpoint_folder

NAME, NEW = "smollm2-135m", 64 if selection.every_case else 10

STORY = "Once upon a time, in a village by the sea, there lived"
# Of different lengths, so that a batch of them has pads.
PROMPTS = [
    "The capital of France is",
    "Bread rises because yeast eats the sugar in the dough and gives off a gas. To bake a simple "
    "loaf at home, you need flour, water, salt and",
    STORY,
    "Dear Mr. Ortega,\n\nThank you for your letter about the noise from the workshop next door. We "
    "have spoken to the owner, who has agreed to close the windows after six in the evening and "
    "to move the large saw to the far side of the building. If the noise does not get better "
    "within two weeks, please",
    "In 1928 Alexander Fleming came back from a holiday and saw that a mould had grown on one of "
    "his dishes. Around it, the bacteria were dead. He wrote:",
][: None if selection.every_case else 3]


@pytest.fixture(scope="module")
def generate():
    """transformers' generate: the new tokens of a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = checkpoint_folder(NAME)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                 attn_implementation="sdpa")

    def new_tokens(prompt: str, **options) -> list[int]:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, pad_token_id=0, tokenizer=tokenizer,
                                **{"do_sample": False, "eos_token_id": None} | options)
        return tokens[0, inputs["input_ids"].shape[1]:].tolist()

    return new_tokens


@pytest.fixture(scope="module")
def expected(generate) -> list[list[int]]:
    """transformers' greedy tokens, one prompt at a time."""
    return [generate(prompt, max_new_tokens=NEW) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def llm():
    with LLM(NAME, dtype="float32", device="cpu", progress=False,
             policy=Policy(gpu_batch_size=3, num_gpu_batches=2)) as llm:
        yield llm


def test_greedy_tokens_equal_transformers(llm, expected):
    outputs = llm.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=-1)
    lengths = [len(out.prompt_token_ids) for out in outputs]
    assert len(set(lengths)) == len(PROMPTS), "prompts of one length would need no pads"
    assert token_ids(outputs) == expected
    assert all(len(out.token_ids) == NEW and out.finish_reason == "length" for out in outputs)
    assert [out.prompt for out in outputs] == PROMPTS
    assert "Paris" in outputs[0].text
    for out in outputs:
        assert out.text == llm.tokenizer.decode(out.token_ids, skip_special_tokens=True)
        assert all(c.isprintable() or c.isspace() for c in out.text) and "\ufffd" not in out.text


ALIKE = {  # by name: options of transformers' generate, and ours where they are called otherwise
    "repetition_penalty": ({"repetition_penalty": 1.3}, {}),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, {}),
    "eos_token_id": ({"eos_token_id": [198, 30]}, {}),
    "stop_strings": ({"stop_strings": ["killed sail", "\n\n"]}, {}),
    "logit_bias": ({"sequence_bias": [[[9357], -4.0], [[30], 3.5]]},
                   {"logit_bias": {9357: -4.0, 30: 3.5}}),
    "stop_token_ids": ({"eos_token_id": [2, 30]}, {"eos_token_id": 2, "stop_token_ids": [30]}),
    "together": ({"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 12,
                  "eos_token_id": [30], "sequence_bias": [[[525], 2.0]]},
                 {"logit_bias": {525: 2.0}})}
SOME = ALIKE if selection.every_case else {
    name: ALIKE[name] for name in ("stop_strings", "together")}


def test_each_parameter_gives_the_tokens_of_transformers(llm, generate):
    """All of them in one call, so that they share blocks."""
    plain = generate(STORY, max_new_tokens=24)
    params = [SamplingParams(**{"max_new_tokens": 24, "eos_token_id": -1}
                             | {name: value for name, value in (theirs | ours).items()
                                if name != "sequence_bias"}) for theirs, ours in SOME.values()]
    outputs = llm.generate([STORY] * len(params), params)
    for (name, (theirs, _)), out in zip(SOME.items(), outputs, strict=True):
        want = generate(STORY, max_new_tokens=24, **theirs)
        assert out.token_ids == want, name
        assert want != plain, f"{name} should change something"


@pytest.mark.parametrize("bits", ["auto", *full(16)])
def test_the_same_tokens_with_everything_on_disk(expected, tmp_path, bits):
    """Straight from the bytes of a real checkpoint, and from its codes, in other batches."""
    disk, middle = Placement(0, 0, 100), slice(1, 4)
    read = {16: 500e6, "auto": 90e6}[bits]
    policy = Policy(gpu_batch_size=2, num_gpu_batches=2, weights=disk, cache=disk, activations=disk)
    with LLM(NAME, dtype="float32", device="cpu", policy=policy, progress=False,
             weight_bits=bits, offload_dir=str(tmp_path)) as llm:
        outputs = llm.generate(PROMPTS[middle], max_new_tokens=4, eos_token_id=-1)
        assert llm.stats.links["disk->cpu"][0] > 4 * read  # all weights for each token
    assert token_ids(outputs) == [tokens[:4] for tokens in expected[middle]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("context", "continuation", "scored"), [
    ("The capital of France is ", "Paris", " Paris"), ("Hello\n\n", "World", "\n\nWorld"),
    ("def f():\n    ", "return 1", "\n    return 1"),
    ("It was interest", "ing", " interesting"),  # one token with the end of the context
    (" \n", "Hello there", " \nHello there"),  # after BOS
    ("", "Hello there", "Hello there"),
    ("Hello", " ", " ")])
def test_a_text_is_scored_by_the_tokens_that_spell_it(llm, context, continuation, scored):
    tokens = llm.tokenizer(context + continuation)["input_ids"]
    (actual,) = llm.score([(context, continuation)])
    count = len(actual.log_probs)
    assert llm.tokenizer.decode(tokens[-count:]) == scored
    head = tokens[:-count] or [llm.model_config.bos_token_id]
    (expected,) = llm.score([(head, tokens[-count:])])
    assert actual.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
