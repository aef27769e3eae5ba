"""Some hundred damaged cases for each parser, of which `tools/fuzz.py` makes thousands."""

from __future__ import annotations

import contextlib
import random
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import ROOT

from flexgen_h2o.errors import UserError

NAMES = ("safetensors", "index", "config", "generation config", "gguf", "gguf converted", "yaml",
         "hardware", "flags", "prompts", "tokenizer.json", "tokenizer_config.json")
SLOW = {"tokenizer.json": 40, "tokenizer_config.json": 40, "gguf converted": 20}
CASES = 200


@pytest.fixture(scope="module")
def fuzz():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        import fuzz
        import fuzz_cases  # noqa: F401

        with fuzz.workplace() as folder:
            yield fuzz, sys.modules["fuzz_cases"].targets(folder), fuzz.Watch(folder)


def test_every_target_is_tried(fuzz):
    _, targets, _ = fuzz
    assert set(NAMES) == targets.keys() - {"requests"}, "add the new one to NAMES"


@pytest.mark.parametrize("name", [*NAMES, "requests"])
def test_damage_is_refused_in_a_line_or_taken(fuzz, name):
    tool, targets, watch = fuzz
    if name not in targets:
        pytest.skip("there is no batch command")
    target, count = targets[name], tool.Count()

    @settings(max_examples=SLOW.get(name, CASES), suppress_health_check=list(HealthCheck))
    @given(rng=st.randoms(use_true_random=True))
    def hold(rng: random.Random) -> None:
        raw = target.draw(rng)
        watch.on, watch.outside = True, set()
        failed = tool.try_case(target, raw, count)
        watch.on = False
        assert failed is None, raw
        assert not watch.outside, raw

    hold()
    assert count.refused, "the damage is none"
    assert count.taken or name == "gguf converted", "what is damaged is no good to begin with"


class Bad:
    """A target with faults of all kinds."""

    def read(self, raw: bytes) -> None:
        {b"error": lambda: int("x"), b"lines": lambda: self.refuse("\x00"),
         b"good": lambda: None, b"outside": self.peek}[raw]()

    def peek(self) -> None:
        with contextlib.suppress(OSError):
            open("/nowhere/outside").close()

    def refuse(self, text: str) -> None:
        error = UserError("x")
        error.args = (text,)
        raise error


def test_the_tool_sees_what_it_looks_for(fuzz):
    tool, _, watch = fuzz
    count = tool.Count()
    assert "ValueError" in tool.try_case(Bad(), b"error", count)
    assert "is no line" in tool.try_case(Bad(), b"lines", count)
    watch.on, watch.outside = True, set()
    assert tool.try_case(Bad(), b"good", count) is None and not watch.outside
    tool.try_case(Bad(), b"outside", count)
    watch.on = False
    assert watch.outside == {"open /nowhere/outside"}
    assert (count.cases, count.tracebacks, count.refused, count.taken) == (4, 2, 1, 2)
