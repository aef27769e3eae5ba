"""Numbers hidden in texts, and asked for at their end."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import DynamicCache

from flexgen_h2o import LLM, H2OConfig
from flexgen_h2o import Policy as RunPolicy
from policy_study.beside import Rival, attention_of, make_press

NEEDLE = " The secret number of the city of {city} is {number}. "
QUESTION = " The secret number of the city of {city} is"
CITIES = ("Oslo", "Lima", "Cairo", "Perth", "Delhi", "Turin")


@dataclass(frozen=True)
class NeedleTask:
    """Tokens of a text with its question, and those of the answer."""

    prompt: list[int]
    answer: list[int]


def make(texts: list[list[int]], tokenizer, *, tokens: int, count: int) -> list[NeedleTask]:
    """Tasks of about so many tokens; needles stand at even depths."""
    draw, words = random.Random(0), list(chain.from_iterable(texts))

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    made = []
    for index in range(count):
        city, number = CITIES[index % len(CITIES)], draw.randrange(10000, 99999)
        start = draw.randrange(len(words) - tokens)
        hay, depth = words[start : start + tokens], int(tokens * (index + 0.5) / count)
        needle = encode(NEEDLE.format(city=city, number=number))
        prompt = hay[:depth] + needle + hay[depth:] + encode(QUESTION.format(city=city))
        made.append(NeedleTask(prompt, encode(f" {number}")))
    return made


def solved(one: Rival, model, folder: str, tasks: list[NeedleTask], percent: int
           ) -> tuple[int, int, float]:
    """Tasks whose answer greedy decoding writes, the tokens kept (mean), and seconds.

    Prompts are cut with their questions in them.
    """
    keeps = [max(2, int(percent / 200 * len(task.prompt)) * 2) for task in tasks]
    began = time.perf_counter()
    if one.system == "kvpress":
        attention_of(model, one)
        found = sum(pressed(one, model, task, keep)
                    for task, keep in zip(tasks, keeps, strict=True))
    else:
        h2o = None if percent == 100 else H2OConfig(heavy_ratio=percent / 200, score=one.name,
                                                    evict_generated=False)
        with LLM(folder, h2o=h2o, dtype="float32", progress=False,
                 policy=RunPolicy(gpu_batch_size=8)) as llm:
            found = sum(each.greedy
                        for each in llm.score([(task.prompt, task.answer) for task in tasks]))
    return found, sum(keeps) // len(keeps), time.perf_counter() - began


def pressed(one: Rival, model, task: NeedleTask, keep: int) -> bool:
    """True if the answer is the likeliest, token by token."""
    cache, prompt = DynamicCache(), torch.tensor([task.prompt])
    with make_press(one, "cut", keep, len(task.prompt))(model):
        logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
        for at, token in enumerate(task.answer, start=len(task.prompt)):
            if int(logits.argmax(-1)) != token:
                return False
            logits = model(torch.tensor([[token]]), past_key_values=cache,
                           position_ids=torch.tensor([[at]])).logits
    return True
