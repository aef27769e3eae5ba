"""benchmarks/studies/analyze.py: the command, its files, and figures against transformers."""

from __future__ import annotations

import json
import random
from collections import Counter

import analyze
import pytest
import torch
from attention_report import EVICTED, NAMES, PARTS, RANKS, RUN, SEEN
from attention_survey import KINDS
from helpers.read_back import read_csv
from helpers.selection import full

from flexgen_h2o import LLM


class NumberTokenizer:
    """A text of numbers is its token ids."""

    def __call__(self, text: str, verbose: bool = True) -> dict:
        return {"input_ids": [int(word) for word in text.split()]}


@pytest.fixture
def numbers(monkeypatch):
    """Models without a tokenizer get one."""
    monkeypatch.setattr(LLM, "tokenizer", NumberTokenizer())


def number_text(length: int, seed: int) -> str:
    return " ".join(map(str, random.Random(seed).choices(range(100), k=length)))


@pytest.fixture
def articles(tmp_path) -> str:
    """Texts of 30, 8, 41 and 50 numbers."""
    path = tmp_path / "in.jsonl"
    texts = [number_text(length, length) for length in (30, 8, 41, 50)]
    path.write_text("".join(json.dumps({"article": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def command(articles, tiny_model, tmp_path) -> list[str]:
    """All of the texts of 30 and 41, in tmp_path / out."""
    return ["--input-path", articles, "--model-name", str(tiny_model("llama").folder),
            "--device", "cpu", "--articles", "2", "--min-tokens", "20", "--max-tokens", "41",
            "--output-dir", str(tmp_path / "out")]


def test_analysis_writes_every_file(numbers, command, tmp_path, capsys):
    out = tmp_path / "out"
    assert analyze.main([*command, "--budgets", "50", "20", "--evict", "10", "100"]) == 0
    assert {path.name for path in out.iterdir()} == {
        *(f"{name}.csv" for name in NAMES), "misses.png"}
    assert (out / "misses.png").read_bytes().startswith(b"\x89PNG")
    rows = {name: read_csv(out / f"{name}.csv") for name in NAMES}
    for name, found in rows.items():
        assert tuple(found[0]) == (*RUN, *PARTS.get(name, EVICTED))
        assert found[0]["articles"] == "2" and found[0]["tokens_mean"] == "35.5"
        assert found[0]["dtype"] == "float32" and found[0]["device"] == "cpu"
    layers, heads = 3, 6
    assert {name: len(found) for name, found in rows.items()} == {
        "sparsity": layers * heads, "scores": layers * len(RANKS),
        "local": layers * len(SEEN) * 2, "frequency": layers, "misses": layers * 4 * 2,
        "evicted": 1 + 2 * len(KINDS)}
    assert Counter((row["evicted"], row["evicted_tokens_mean"]) for row in rows["evicted"]) == {
        ("none", "0"): 1, **{(kind, count): 1 for kind in KINDS for count in ("1.5", "17.5")}}
    assert {row["budget_percent"] for row in rows["misses"]} == {"20", "50"}
    # With all keys of the first half gone it is the same which of them.
    last = {row["perplexity"] for row in rows["evicted"][-len(KINDS):]}
    assert len(last) == 1 and last != {rows["evicted"][0]["perplexity"]}
    text = capsys.readouterr()
    assert text.err == "" and "attention lost at" in text.out and "heavy 100 %" in text.out


@pytest.mark.parametrize("key", ["llama", *full("opt")])
def test_sparsity_is_that_of_transformers_own_attention(numbers, command, tiny_model, key,
                                                        tmp_path):
    """Of a whole model: rotation, scale and the order of heads are as they should be."""
    from transformers import AutoModelForCausalLM

    folder = str(tiny_model(key).folder)
    assert analyze.main([*command, "--model", folder, "--only", "sparsity"]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    shares = []
    for length in (30, 41):
        ids = torch.tensor([list(map(int, number_text(length, length).split()))[:-1]])
        with torch.no_grad():
            attention = torch.cat(model(ids, output_attentions=True).attentions)
        visible = torch.ones(attention.shape[2:], dtype=torch.bool).tril()
        small = (attention < 0.01 * attention.amax(-1, keepdim=True)) & visible
        shares.append(small.sum((2, 3)) / visible.sum())
    expected = torch.stack(shares).mean(0)
    assert expected.max() > 0
    found = {(int(row["layer"]), int(row["head"])): float(row["sparsity"])
             for row in read_csv(tmp_path / "out/sparsity.csv")}
    assert found == {(layer, head): pytest.approx(expected[layer, head].item(), abs=2e-3)
                     for layer in range(len(expected)) for head in range(expected.shape[1])}
