"""Numbers hidden in texts, and asked for after them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.errors import UserError
from flexgen_h2o.outputs import Scored
from policy_study import beside

QUESTIONS = (
    " The secret number of the city of Oslo is",
    " The password of Professor Lindqvist's computer is",
    " The phone extension of the harbour office is",
    " The serial number of the old red tractor is",
    " Goalkeeper Almeida's locker has the code",
    " The number of visitors to the glass museum was",
)
"""Each is followed by a number where a text hides it, and by nothing where it is asked for."""
ASKED = ("later", "in the prompt")
"""Places of the question: after the prompt, which was read and cut without it, or at its end."""


@dataclass(frozen=True)
class NeedleTask:
    """A text with numbers in it, the question for one of them, and this number, as tokens."""

    text: list[int]
    question: list[int]
    answer: list[int]

    def parts(self, asked: str) -> tuple[list[int], list[int]]:
        """The prompt and what follows it, which ends with the answer."""
        if asked == "later":
            return self.text, self.question + self.answer
        return self.text + self.question, self.answer


def make(hay: Sequence[int], tokenizer, *, tokens: int, texts: int) -> list[NeedleTask]:
    """A task for each of `QUESTIONS` in each of so many texts of so many tokens.

    Needles stand at even depths, in an order that is drawn for each text.

    Parameters
    ----------
    hay : sequence of int
        Tokens of articles, each of which gets into one text at most.
    tokenizer : tokenizer of transformers
    tokens, texts : int

    Raises
    ------
    UserError
        There is too little hay.
    """
    draw, taken = random.Random(0), 0
    made: list[NeedleTask] = []

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for _ in range(texts):
        questions = draw.sample(QUESTIONS, len(QUESTIONS))
        numbers = draw.sample(range(10000, 100000), len(QUESTIONS))
        hidden = [encode(f"{question} {number}.")
                  for question, number in zip(questions, numbers, strict=True)]
        room = tokens - sum(map(len, hidden))
        if room < len(QUESTIONS) or taken + room > len(hay):
            raise UserError(f"{texts} texts of {tokens} tokens need articles of {texts * room} "
                            f"tokens, and there are {len(hay)}; a text holds "
                            f"{len(QUESTIONS)} needles")
        places = [int(room * (index + 0.5) / len(QUESTIONS)) for index in range(len(QUESTIONS))]
        text: list[int] = []
        for start, end, needle in zip([0, *places], [*places, room], [*hidden, []], strict=True):
            text += [*hay[taken + start : taken + end], *needle]
        taken += room
        made += [NeedleTask(text, encode(question), encode(f" {number}"))
                 for question, number in zip(questions, numbers, strict=True)]
    return made


def answers(tasks: Sequence[NeedleTask], folder: str, h2o: H2OConfig | None, asked: str
            ) -> tuple[list[Scored], int]:
    """The scores of the answers' tokens by this engine, and its cache's bytes.

    The questions of a text are a batch, which reads it once.
    """
    with LLM(folder, h2o=h2o, dtype="float32", progress=False,
             policy=Policy(gpu_batch_size=len(QUESTIONS))) as llm:
        found = llm.score([task.parts(asked) for task in tasks])
        nbytes = llm.stats.kv_cache_bytes // len(QUESTIONS)
    return [Scored(one.log_probs[-len(task.answer) :], one.likeliest[-len(task.answer) :])
            for task, one in zip(tasks, found, strict=True)], nbytes


def pressed_answers(tasks: Sequence[NeedleTask], model, one: beside.Rival, percent: float,
                    asked: str) -> tuple[list[Scored], int]:
    """The same by kvpress on transformers, which cuts prompts alone."""
    beside.attention_of(model, one)
    found, most = [], 0
    for task in tasks:
        prompt, rest = task.parts(asked)
        press = beside.make_press(one, "cut", kept(percent, len(prompt)), len(prompt))
        logits, nbytes = beside.pressed(press, model, torch.tensor([prompt + rest]), len(prompt),
                                        steps=False)
        mine = logits[0, -len(task.answer) :].log_softmax(-1)
        answer = torch.tensor(task.answer)
        found.append(Scored(mine.gather(-1, answer[:, None])[:, 0].tolist(),
                            (mine.argmax(-1) == answer).tolist()))
        most = max(most, nbytes)
    return found, most


def kept(percent: float, prompt: int) -> int:
    """Tokens kept of a prompt of so many, half of them heavy hitters."""
    return 2 * max(1, int(percent / 200 * prompt + 1e-9))
