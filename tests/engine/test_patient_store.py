"""Calls of a store that may not come back: what they give, and when they are given up."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from flexgen_h2o.distributed import heartbeat
from flexgen_h2o.distributed.heartbeat import NoAnswer, PatientStore, answered


class Store:
    """A store of which `get` waits for an event."""

    def __init__(self):
        self.asked, self.speaks = 0, threading.Event()

    def set(self, key, value):
        self.asked += 1
        if key == "closed":
            raise ConnectionError("reset by peer")

    def get(self, key):
        assert self.speaks.wait(60)
        return key.encode()

    def add(self, key, amount):
        return amount + 1

    def check(self, keys):
        return keys == ["a", "b"]

    def compare_set(self, key, expected, desired):
        return f"{key} {expected} {desired}".encode()


def test_calls_give_what_the_store_gives():
    store = PatientStore(Store(), 60)
    assert store.set("a", b"value") is None
    assert (store.add("a", 2), store.check(["a", "b"])) == (3, True)
    assert store.compare_set("a", "b", "c") == b"a b c"
    with pytest.raises(ConnectionError, match="reset by peer"):
        store.set("closed", "value")


def test_a_store_that_does_not_answer_is_asked_no_more():
    silent = Store()
    store = PatientStore(silent, 0.01)
    with pytest.raises(NoAnswer, match=r"no answer for 0\.01 s"):
        store.get("a")
    silent.speaks.set()
    with pytest.raises(NoAnswer):
        store.set("a", "value")
    assert silent.asked == 0


def test_a_process_that_was_stopped_itself_finds_the_answer(monkeypatch):
    """The time of its first look is over, although the store has answered at once."""
    looks = []

    def look(futures, timeout):
        looks.append(timeout)
        done = set() if len(looks) == 1 else wait(futures, 60).done
        return SimpleNamespace(done=done)

    wait = heartbeat.wait
    monkeypatch.setattr(heartbeat, "wait", look)
    assert answered(len, "four", seconds=8) == 4
    assert looks == [1, 1]
