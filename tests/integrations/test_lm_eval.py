"""The lm-evaluation-harness model on a local task, and its arguments."""

import functools
import json
import os
import random
import re
import sys
from contextlib import ExitStack, closing
from dataclasses import replace

import datasets
import huggingface_hub
import lm_eval
import pytest
import torch
from helpers.batch_jobs import write_lines
from helpers.error_cases import refused
from helpers.internals import plan_with
from helpers.selection import full
from helpers.tiny_tokenizers import WORDS, with_words
from huggingface_hub import errors as hub_errors
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from flexgen_h2o import LLM, H2OConfig
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.integrations.lm_eval.__main__ import main
from flexgen_h2o.integrations.lm_eval.arguments import FLAGS, MAX_SEQUENCES, PROMPT_CHUNK, parse
from flexgen_h2o.integrations.lm_eval.model import FlexGenLM, sampling_of

H2O = {"hh_ratio": 0.1}
YAML = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}, train: {file}}}
output_type: {kind}
test_split: test
fewshot_split: train
doc_to_text: "{{{{text}}}}"
{more}
"""
KINDS = {
    "multiple_choice": 'doc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
                       "metric_list: [{metric: acc}, {metric: acc_norm}]",
    "loglikelihood_rolling": 'doc_to_target: "{{text}}"\nmetric_list: [{metric: word_perplexity}]',
    "generate_until": 'doc_to_target: "{{answer}}"\n'
                      "generation_kwargs: {until: ['###'], max_gen_toks: 6}\n"
                      "metric_list: [{metric: exact_match}]"}


def words(*tokens: int) -> str:
    return " ".join(WORDS[token] for token in tokens)


def seeded(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(2, 118), k=length)


TEXTS = [seeded(20 + 7 * seed, seed) for seed in range(4)]
CHOICES = [[seeded(3 + option, 10 * seed + option) for option in range(3)] for seed in range(4)]


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory) -> str:
    return with_words(tiny_model("llama").folder, tmp_path_factory.mktemp("words"),
                      chat_template="{% for m in messages %}{{ m.content }} {% endfor %}w1")


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A function that makes a task of a kind: a TaskManager and the task's name."""
    # Listing the harness's thousands of tasks takes seconds.
    monkeypatch.setattr(TaskManager, "__init__", functools.partialmethod(
        TaskManager.__init__, include_defaults=False))
    # The environment was read at import.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for config in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)

    def make(kind: str, answers=None) -> tuple[TaskManager, str]:
        file = write_lines(tmp_path / "docs.jsonl", [
            {"text": words(*text), "choices": [words(*choice) for choice in choices],
             "gold": number % 3, "answer": answers[number] if answers else "w1"}
            for number, (text, choices) in enumerate(zip(TEXTS, CHOICES, strict=True))])
        (tmp_path / f"{kind}.yaml").write_text(
            YAML.format(name=f"tiny_{kind}", kind=kind, file=json.dumps(file), more=KINDS[kind]),
            encoding="utf-8")
        return TaskManager(include_path=str(tmp_path)), f"tiny_{kind}"

    return make


def evaluate(folder: str, task: tuple[TaskManager, str], *, shots: int = 0, **arguments):
    """Return the result of a task and the whole report."""
    manager, name = task
    report = lm_eval.simple_evaluate(
        "flexgen_h2o", model_args={"pretrained": folder, "dtype": "float32", **arguments},
        tasks=[name], task_manager=manager, num_fewshot=shots, bootstrap_iters=0, batch_size=3)
    return report["results"][name], report


def responses_of(report: dict) -> list[float]:
    """The log-likelihoods of all choices of a report."""
    return [response[0] for samples in report["samples"].values() for sample in samples
            for response in sample["filtered_resps"]]


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=values, idx=0) for values in arguments]


@pytest.fixture
def opened():
    """A function that opens a model, which is closed at the end."""
    with ExitStack() as stack:
        yield lambda folder, **arguments: stack.enter_context(closing(FlexGenLM(
            pretrained=folder, **{"dtype": "float32", "batch_size": 3} | arguments)))


def log_probs(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Of transformers' model: the sum over the continuation, and whether it is greedy."""
    logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    rows = torch.arange(len(continuation)), torch.tensor(continuation)
    return (logits.log_softmax(-1)[rows].sum().item(),
            bool((logits.argmax(-1) == torch.tensor(continuation)).all()))


# Through the harness


@pytest.mark.parametrize("shots", [2, *full(0)])
def test_accuracy_of_the_likeliest_choice(tiny_model, folder, task, shots):
    model = tiny_model("llama").model
    result, report = evaluate(folder, task("multiple_choice"), shots=shots)
    samples = report["samples"]["tiny_multiple_choice"]
    correct = 0
    for sample in samples:
        scores = []
        for pair, response in zip(sample["arguments"], sample["filtered_resps"], strict=True):
            tokens = [[WORDS.index(word) for word in text.split()] for text in pair]
            assert len(tokens[0]) >= 20 + 20 * shots
            value, greedy = log_probs(model, *tokens)
            assert response[0] == pytest.approx(value, abs=1e-3) and response[1] == greedy
            scores.append(value)
        correct += scores.index(max(scores)) == sample["doc"]["gold"]
    assert len(samples) == len(TEXTS) and result["acc,none"] == correct / len(TEXTS)
    config = report["config"]
    assert (config["batch_sizes"], config["model_dtype"]) == ([3], "float32")
    assert config["kv_cache_bytes"] > 0


@pytest.mark.full
@pytest.mark.parametrize("arguments", [
    {"hh_ratio": 0.1}, {"hh_ratio": 0.1, "evict_prompt": True, "prompt_chunk": 1},
    {"num_window_length": 6, "eviction": "window", "evict_prompt": True, "prompt_chunk": 5}])
def test_eviction_equals_the_simulation(folder, task, arguments):
    choices = task("multiple_choice")
    evicted, masked, full_cache = (responses_of(evaluate(folder, choices, **options)[1])
                                   for options in (arguments, arguments | {"simulate": True}, {}))
    assert evicted == pytest.approx(masked, abs=1e-4)
    assert evicted != pytest.approx(full_cache, abs=1e-2)


def test_rolling_perplexity_equals_transformers(tiny_model, folder, task):
    model = tiny_model("llama").model
    result, _ = evaluate(folder, task("loglikelihood_rolling"))
    total = sum(log_probs(model, [model.config.bos_token_id], text)[0] for text in TEXTS)
    expected = torch.tensor(-total / sum(map(len, TEXTS))).exp().item()
    assert result["word_perplexity,none"] == pytest.approx(expected, rel=1e-4)


def test_generation_ends_at_the_stop_string(folder, task):
    with LLM(folder, dtype="float32", progress=False) as llm:
        outputs = llm.generate([words(*text) for text in TEXTS], max_new_tokens=6)
    answers = [out.text.split("###")[0] for out in outputs]
    result, report = evaluate(folder, task("generate_until", answers))
    assert result["exact_match,none"] == 1
    assert {s["filtered_resps"][0] for s in report["samples"]["tiny_generate_until"]} == {*answers}


def test_main_runs_the_harness_with_our_model(folder, task, tmp_path, monkeypatch, capfd):
    """What git says, which the harness asks for a revision, is not shown."""
    task("multiple_choice")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "bin").mkdir()
    git = tmp_path / "bin" / "git"
    git.write_text("#!/bin/sh\necho fatal: not a git repository >&2\nexit 128\n")
    git.chmod(0o755)
    output = tmp_path / "found.json"
    status = main(["--model_args", f"pretrained={folder},dtype=float32,hh_ratio=0.1,"
                   "recent_ratio=0.1,evict_prompt=true,percent=0/100/100/0",
                   "--tasks", "tiny_multiple_choice", "--include_path", str(tmp_path),
                   "--batch_size", "auto", "--output_path", str(output)])
    text, errors = capfd.readouterr()
    assert status == 0 and "fatal" not in errors, text + errors
    assert "flexgen_h2o" in text and "tiny_multiple_choice" in text and "acc" in text
    (written,) = tmp_path.glob("found*.json")
    assert json.loads(written.read_text())["config"]["model"] == "flexgen_h2o"


def test_absent_data_is_an_error_in_one_line(folder, task, tmp_path, capsys):
    task("generate_until")
    text = (tmp_path / "generate_until.yaml").read_text(encoding="utf-8")
    (tmp_path / "absent.yaml").write_text(
        text.replace("task: tiny_generate_until", "task: absent").replace(
            "dataset_path: json", "dataset_path: someone/none"), encoding="utf-8")
    assert main(["--model_args", f"pretrained={folder}", "--tasks", "absent",
                 "--include_path", str(tmp_path)]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.match("error: .*'someone/none'.*: run it once with a network", last)


def raised_from(cause: Exception) -> Exception:
    """Return the error of a dataset whose download fails halfway."""
    error = datasets.exceptions.DatasetGenerationError("no data")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(("error", "network"), [
    (ConnectionError("the cause"), True), (hub_errors.HTTPError("the cause"), True),
    (raised_from(hub_errors.HTTPError("the cause")), True), (OSError(28, "no space"), False),
    (ValueError("a defect"), False), (raised_from(ValueError("a defect")), False)], ids=str)
def test_only_network_errors_are_reported_in_one_line(monkeypatch, capsys, error, network):
    def command():
        raise error

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", command)
    if network:
        assert main([]) == 2
        text = capsys.readouterr().err
        assert "the cause): run it once" in text and text.count("\n") == 1
    else:
        with pytest.raises(type(error)) as caught:
            main([])
        assert caught.value is error


@pytest.mark.parametrize(("arguments", "text"), [
    ("pretrained={folder},hh_ration=0.1", "did you mean hh_ratio?"),
    ("pretrained={folder}/none", "none"), ("hh_ratio=0.1", "give pretrained=NAME")])
def test_user_errors_of_main_are_one_line(folder, task, tmp_path, capsys, arguments, text):
    task("multiple_choice")
    before = list(sys.argv)
    assert main(["--model", "flexgen_h2o", "--tasks", "tiny_multiple_choice", "--include_path",
                 str(tmp_path), "--model_args", arguments.format(folder=folder)]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and text in last and sys.argv == before


def test_without_the_harness_main_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["--tasks", "x"]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "flexgen_h2o[eval]" in text


# The model alone


def test_scores_do_not_depend_on_batches_or_order(folder, opened):
    pairs = [(words(*text), " " + words(*choice))
             for text, choices in zip(TEXTS, CHOICES, strict=True) for choice in choices]
    scores = [opened(folder, **H2O, batch_size=size).loglikelihood(
        requests("loglikelihood", *ordered))
        for size, ordered in ((1, pairs), (5, pairs[::-1]), ("auto", pairs))]
    scores[1].reverse()
    for other in scores[1:]:
        assert [value for value, _ in other] == pytest.approx([v for v, _ in scores[0]], abs=1e-4)
        assert [greedy for _, greedy in other] == [greedy for _, greedy in scores[0]]


def test_greedy_text_is_reported_as_greedy(folder, opened):
    for arguments in ({}, H2O, {**H2O, "evict_prompt": True}):
        lm = opened(folder, **arguments)
        (out,) = lm.llm.generate([TEXTS[0]], max_new_tokens=5, eos_token_id=-1)
        other = [*out.token_ids[:-1], (out.token_ids[-1] + 1) % 118]
        pairs = [((None, None), TEXTS[0], tokens) for tokens in (out.token_ids, other)]
        assert [greedy for _, greedy in lm._loglikelihood_tokens(pairs)] == [True, False]


@pytest.mark.full
def test_scores_of_texts_equal_those_of_llm(opened):
    lm = opened("smollm2-135m")
    pairs = [("The capital of France is ", "Paris"), ("Hello\n\n", "World"), ("Hello", " there"),
             ("", "Hello there"), ("x =  ", "\n  1")]
    scores = lm.loglikelihood(requests("loglikelihood", *pairs))
    for (value, greedy), scored in zip(scores, lm.llm.score(pairs), strict=True):
        assert sum(scored.log_probs) == pytest.approx(value, abs=1e-3) and scored.greedy == greedy


def test_a_long_context_is_truncated_on_the_left(tiny_model, folder, opened, caplog):
    lm = opened(folder, max_length=24)
    text, tail = seeded(40, 1), seeded(5, 2)
    (score,) = lm._loglikelihood_tokens([(None, text, tail)])
    assert score[0] == pytest.approx(log_probs(tiny_model("llama").model, text[-20:], tail)[0],
                                     abs=1e-3)
    assert "cut on the left to 20" in caplog.text
    with pytest.raises(UserError, match="raise max_length"):
        lm._loglikelihood_tokens([(None, text, seeded(30, 3))])
    (answer,) = lm.generate_until(requests("generate_until", (words(*text), {"max_gen_toks": 4})))
    (out,) = lm.llm.generate([text[-21:]], max_new_tokens=4)
    assert answer == out.text
    with pytest.raises(UserError, match="lower max_gen_toks"):
        lm.generate_until(requests("generate_until", ("w3", {"max_gen_toks": 25})))


def test_rolling_windows_cover_a_long_text(tiny_model, folder, opened):
    model, text = tiny_model("llama").model, seeded(50, 4)
    lm = opened(folder, max_length=20)
    expected = sum(log_probs(model, [([1] + text)[start]] if start == 0 else context, tail)[0]
                   for start, context, tail in ((0, None, text[:20]), (20, [text[19]], text[20:40]),
                                                (40, text[29:40], text[40:])))
    (score,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (words(*text),)))
    assert score == pytest.approx(expected, abs=1e-3)


def test_rolling_needs_a_budget_in_tokens(folder, opened):
    instances = requests("loglikelihood_rolling", (words(*TEXTS[0]),))
    with pytest.raises(UserError, match="give num_window_length"):
        opened(folder, **H2O).loglikelihood_rolling(instances)
    scores = [opened(folder, num_window_length=8, **options).loglikelihood_rolling(instances)[0]
             for options in ({}, {"simulate": True})]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_generation_options_of_a_request(folder, opened):
    lm = opened(folder)
    text = words(*TEXTS[1])
    (out,) = lm.llm.generate([text], max_new_tokens=6)
    third = out.text.split()[2]
    arguments = [(text, {"max_gen_toks": 6}), (text, {"until": third, "max_gen_toks": 6}),
                 (text, {"until": [third, ""], "max_new_tokens": 6, "temperature": 0}),
                 (text, {"do_sample": True, "temperature": 2.0, "max_gen_toks": 6})]
    texts = lm.generate_until(requests("generate_until", *arguments))
    cut = out.text.split(third)[0]
    assert texts[:3] == [out.text, cut, cut] and texts[3] != out.text
    with pytest.raises(UserError, match="no option 'beams'"):
        lm.generate_until(requests("generate_until", (text, {"beams": 3})))


def test_sampling_parameters_of_a_task():
    greedy = {"max_new_tokens": 9, "stop_strings": None, "do_sample": False}
    assert sampling_of({}, 9) == greedy
    assert sampling_of({"do_sample": True, "temperature": 0.0}, 9) == greedy
    assert sampling_of({"temperature": 1, "top_p": 0.5, "max_tokens": "3", "until": "x"}, 9) == {
        "max_new_tokens": 3, "stop_strings": ["x"], "do_sample": True, "temperature": 1.0,
        "top_p": 0.5}


def test_chat_templates_and_special_tokens(folder, opened, tiny_model, monkeypatch):
    lm = opened(folder)
    history = [{"role": "user", "content": "w5"}]
    assert lm.apply_chat_template(history) == "w5 w1"
    assert lm.apply_chat_template(history, add_generation_prompt=False) == "w5"
    refusal = "{{ raise_exception('no system role') }}"
    monkeypatch.setattr(lm, "_renderer", None)
    monkeypatch.setattr(lm.tokenizer, "chat_template", refusal)
    with pytest.raises(UserError, match="does not take these messages: .*no system role"):
        lm.apply_chat_template(history)
    monkeypatch.undo()
    assert "messages" in lm.chat_template(True) and "/" not in lm.tokenizer_name
    assert lm.prefix_token_id == tiny_model("llama").config.bos_token_id
    with pytest.raises(UserError, match="no EOS token"):
        _ = lm.eot_token_id
    refused(lambda: lm.tok_encode("w5 \ud800"), match="a text of the task is not text in UTF-8")
    assert lm.tok_encode("w5 w7") == [5, 7] == opened(
        folder, add_bos_token=False).tok_encode("w5 w7")
    lm.tokenizer.chat_template = None
    refused(lambda: lm.apply_chat_template(history), match="no chat template")


def test_text_needs_a_tokenizer(tiny_model):
    with pytest.raises(UserError, match="no tokenizer"):
        FlexGenLM(pretrained=str(tiny_model("opt").folder), dtype="float32")


def test_automatic_batch_size(folder, opened):
    pairs = requests("loglikelihood", *((words(*text), " w3 w4") for text in TEXTS))
    lm = opened(folder, batch_size="auto", **H2O)
    expected = lm.loglikelihood(pairs)
    assert lm.batch_sizes == {"loglikelihood": 4}, "all that there are"
    lm = opened(folder, batch_size="auto", max_batch_size=2, **H2O)
    assert [v for v, _ in lm.loglikelihood(pairs)] == pytest.approx([v for v, _ in expected])
    assert lm.batch_sizes == {"loglikelihood": 2}


def test_fit_batch_halves_until_the_plan_fits(folder):
    with LLM(folder, dtype="float32", progress=False) as llm:
        sizes = []

        def poor(workload, limits):
            sizes.append(workload.gpu_batch_size)
            return limits.capped(cpu=0, gpu=None) if sizes[-1] > 4 else limits

        plan_with(llm, poor)
        assert llm.fit_batch(prompt_len=10, gen_len=2, max_batch_size=12) == 4
        assert sizes == [12, 8, 4]
        assert llm.fit_batch(prompt_len=10, gen_len=2, max_batch_size=5) == 4
        assert llm.policy.gpu_batch_size == 4
        llm.generate([[5, 6]], max_new_tokens=1)
        assert llm.stats.gpu_batch_size == 4
        with pytest.raises(UserError, match="max_batch_size must be at least 1"):
            llm.fit_batch(prompt_len=10, gen_len=2, max_batch_size=0)


# Arguments


@pytest.mark.parametrize("given, text", [
    ({"hh_ratio": 2}, "hh_ratio must be at most 1"), ({"evict_prompt": 3, **H2O}, "evict_prompt"),
    ({"hh_ratio": 0.1, "num_window_length": 9}, "not both"),
    ({"prompt_chunk": 4, **H2O}, "add evict_prompt=true"),
    ({"evict_prompt": True, "prefill_chunk": 4, **H2O}, "give prompt_chunk alone"),
    ({"simulate": True}, "simulate has no effect"), ({"add_bos_token": 1}, "add_bos_token"),
    ({"simulate": True, "cache_bits": 4, **H2O}, "leave cache_bits out"),
    ({"batch_size": "auto:4"}, "batch_size must be an integer"),
    ({"batch_size": 2, "max_batch_size": 4}, "no effect without --batch_size auto"),
    ({"batch_size": 2, "gpu_batch_size": 4}, "give --batch_size or gpu_batch_size"),
    ({"percent": "auto"}, "give numbers here"), ({"percent": "0/100/100"}, "4 or 6 numbers"),
    ({"pretrained": "opt-125m", "weight_cache": "w"}, "weight_cache has no effect"),
    ({"attn_sparsity": 0.5, **H2O}, "attn_sparsity"), ({"qqq": 1}, "unknown key 'qqq'"),
    ({"num_window_length": 2, "sink_tokens": 2}, "no recent tokens"),
    ({"evict_prmpt": True}, "did you mean evict_prompt?")])
def test_wrong_arguments_raise(given, text):
    refused(lambda: parse({"pretrained": "smollm2-135m", **given}), text)


def test_flags_reach_the_engine():
    """Shares are separated by slashes, as commas separate the harness's arguments."""
    given = parse({"pretrained": "m", "percent": "0/100/50/50", "expert_percent": "0/50/50",
                   "overlap": False, "cache_bits": 8, "seed": 3, **H2O}).for_llm()
    config = RunConfig(model="m", percent=(0, 100, 50, 50), expert_percent=(0, 50, 50),
                       overlap=False, cache_bits=8, seed=3, hh_ratio=0.1)
    assert given["policy"] == replace(config.policy(),
                                      gpu_batch_size=given["policy"].gpu_batch_size)
    assert given["h2o"] == config.h2o() and (given["cache_bits"], given["seed"]) == (8, 3)


def test_arguments_without_a_flag():
    arguments = parse({"pretrained": "m", **H2O, "evict_prompt": True})
    assert arguments.h2o() == H2OConfig(heavy_ratio=0.1, prompt_chunk=PROMPT_CHUNK)
    assert arguments.for_llm()["policy"].prefill_chunk == PROMPT_CHUNK
    assert parse({"pretrained": "m", **H2O, "evict_prompt": True, "prompt_chunk": 1,
                  "simulate": True}).h2o() == H2OConfig(heavy_ratio=0.1, prompt_chunk=1,
                                                        simulate=True)
    assert parse({"pretrained": "m", "batch_size": "6"}).for_llm()["policy"].gpu_batch_size == 6
    assert parse({"pretrained": "m", "batch_size": "auto"}).max_sequences == MAX_SEQUENCES
    assert parse({"pretrained": "m", "gpu_batch_size": 6}).max_sequences is None
    assert parse({"pretrained": "m"}).h2o() is None


def test_flags_of_the_harness_beside_model_args(folder):
    make = FlexGenLM.create_from_arg_obj
    with pytest.raises(UserError, match="give --device or device"):
        make({"pretrained": folder, "device": "cpu"}, {"device": "cuda:1"})
    # Defaults of the command line.
    lm = make({"pretrained": folder, "device": "cpu", "gpu_batch_size": 2},
              {"device": "cuda:0", "batch_size": 1})
    assert lm.llm.policy.gpu_batch_size == 2
    lm.close()
    lm = FlexGenLM.create_from_arg_string(f"pretrained={folder},hh_ratio=0.1", {"device": "cpu"})
    assert lm.llm.h2o == H2OConfig(heavy_ratio=0.1)
    lm.close()


@given(st.dictionaries(st.sampled_from([*FLAGS, "evict_prompt", "prompt_chunk", "simulate",
                                        "batch_size", "max_batch_size", "max_length", "other"]),
                       st.one_of(st.booleans(), st.integers(-2, 9), st.floats(), st.text("a1. /"),
                                 st.sampled_from(["auto", "h2o", "window", 0.1])), max_size=5))
def test_any_arguments_are_taken_or_raise_user_errors(given):
    try:
        parse({"pretrained": "m", **given}).for_llm()
    except UserError as error:
        assert "\n" not in str(error)
        flags = re.findall(r"--[\w-]+", str(error))
        assert {*flags} <= {"--batch_size", "--max_batch_size"}, "those of the harness alone"
