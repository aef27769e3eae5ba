"""Which of four summaries is an article's, by a cache that keeps a part of the article."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from flexgen_h2o import LLM, H2OConfig, Policy
from policy_study import beside
from policy_study.needles import kept

TOGETHER = 8
"""Items of a batch."""


@dataclass(frozen=True)
class ChoiceItem:
    """An article, summaries, and which of them is its, as tokens; `lengths` are of characters."""

    prompt: list[int]
    choices: list[list[int]]
    lengths: list[int]
    gold: int

    def right(self, scores: Sequence[float]) -> bool:
        """True if the likeliest choice is the article's."""
        return max(range(len(scores)), key=scores.__getitem__) == self.gold

    def right_by_length(self, scores: Sequence[float]) -> bool:
        """The same of scores per character, as the harness's acc_norm counts."""
        return self.right([score / length for score, length in zip(scores, self.lengths,
                                                                   strict=True)])


def make(items: Iterable[Mapping], tokenizer) -> list[ChoiceItem]:
    """Items of `lm_eval_budgets.items` as the harness cuts them into tokens."""
    found = []
    for item in items:
        context = f"Article: {item['article']}\nSummary:"
        prompt = tokenizer(context)["input_ids"]
        texts = [f"{context} {choice}" for choice in item["choices"]]
        found.append(ChoiceItem(prompt, [tokenizer(text)["input_ids"][len(prompt):]
                                         for text in texts],
                                [len(choice) for choice in item["choices"]], item["gold"]))
    return found


def scores(items: Sequence[ChoiceItem], folder: str, h2o: H2OConfig | None
           ) -> tuple[list[list[float]], int]:
    """Log-probabilities of each item's choices by this engine, and bytes of a sequence's cache,
    with the room that it has for a choice.

    All choices of some items are a batch, for which a cache that is cut reads each article once.
    """
    each = len(items[0].choices)
    batch = each * min(TOGETHER, len(items))
    with LLM(folder, h2o=h2o, dtype="float32", progress=False,
             policy=Policy(gpu_batch_size=batch)) as llm:
        found = llm.score([(item.prompt, choice) for item in items for choice in item.choices])
        nbytes = llm.stats.kv_cache_bytes // batch
    sums = [sum(one.log_probs) for one in found]
    return [sums[at : at + each] for at in range(0, len(sums), each)], nbytes


def pressed_scores(items: Sequence[ChoiceItem], model, one: beside.Rival, percent: float
                   ) -> tuple[list[list[float]], int]:
    """The same by kvpress on transformers, which reads an article once too; bytes are those of the
    longest, when it has been cut."""
    beside.attention_of(model, one)
    found, most = [], 0
    for item in items:
        length = len(item.prompt)
        cache = DynamicCache()
        with beside.make_press(one, "cut", kept(percent, length), length)(model):
            first = model(torch.tensor([item.prompt]), past_key_values=cache,
                          logits_to_keep=1).logits
            most = max(most, beside.cache_bytes(cache))
            found.append([])
            for choice in item.choices:
                rest = torch.tensor([choice])
                logits = [first]
                if len(choice) > 1:
                    positions = torch.arange(length, length + len(choice) - 1)[None]
                    logits.append(model(rest[:, :-1], past_key_values=copy.deepcopy(cache),
                                        position_ids=positions).logits)
                found[-1].append(float(beside.chosen(torch.cat(logits, 1), rest).sum()))
    return found, most
