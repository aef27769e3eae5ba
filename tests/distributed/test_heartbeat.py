"""Heartbeat monitors with a store in memory and a manual clock; store calls that time out."""

import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from flexgen_h2o.distributed import heartbeat
from flexgen_h2o.distributed.heartbeat import (
    IDLE,
    WAITING,
    WORKING,
    Heartbeat,
    HeartbeatMonitor,
    PipelineFailure,
    StoreTimeout,
    TimeoutStore,
    call_with_timeout,
)

NAMES = ["rank 0 (a)", "rank 1 (b)", "rank 2 (c)"]


class MemoryStore(dict):
    """A store in memory."""

    def set(self, key, value):
        self[key] = value

    def get(self, key):
        return self[key]

    def add(self, key, amount):
        self[key] = self[key] + amount if key in self else amount
        return self[key]


class Ranks:
    """The monitor of rank 0, and the heartbeats of two others."""

    def __init__(self):
        self.store, self.now = MemoryStore(), 0.0
        self.monitor = HeartbeatMonitor(self.store, 0, NAMES, timeout=10, progress_timeout=60,
                                        clock=lambda: self.now)
        self.beats = {1: Heartbeat(0, 0, WORKING), 2: Heartbeat(0, 0, WORKING)}

    def after(self, seconds, *, alive=(1, 2), moved=()):
        """Let seconds pass, with a heartbeat of each rank that is alive."""
        for _ in range(seconds):
            self.now += 1
            for rank, beat in self.beats.items():
                beat.number += rank in alive
                beat.progress += rank in moved
                self.store.set(f"beat/{rank}", msgspec.json.encode(beat))
            self.monitor.poll()

    def failure(self):
        with pytest.raises(PipelineFailure) as caught:
            self.monitor.check()
        return str(caught.value)


@pytest.fixture
def ranks():
    return Ranks()


def test_ranks_that_make_progress_do_not_fail(ranks):
    with ranks.monitor.state(WORKING):
        ranks.after(200, moved=(2,))
        ranks.monitor.check()


def test_a_rank_without_a_heartbeat_fails(ranks):
    ranks.after(5, moved=(1,))
    ranks.after(11, alive=(1,), moved=(1,))
    assert ranks.failure().startswith("rank 2 (c) has not answered for 10 s")


def test_a_rank_that_computes_without_progress_fails(ranks):
    with ranks.monitor.state(WAITING, "for rank 1 (b)"):
        ranks.beats[2].state = WAITING
        ranks.after(62)
    assert ranks.failure() == "rank 1 (b) has made no progress for 60 s"


def test_ranks_that_all_wait_fail(ranks):
    ranks.beats[1].state = ranks.beats[2].state = WAITING
    with ranks.monitor.state(WAITING, "for rank 1 (b)"):
        ranks.after(62)
    assert ranks.failure() == "rank 0 (a) has waited for rank 1 (b) for 60 s"


def test_an_idle_pipeline_does_not_time_out(ranks):
    for beat in ranks.beats.values():
        beat.state = IDLE
    ranks.after(500)
    ranks.monitor.check()
    with ranks.monitor.state(WORKING):
        ranks.after(30)
        ranks.monitor.check()  # it has only begun
        ranks.monitor.advance()
        ranks.after(50)
        ranks.monitor.check()


def test_waiting_counts_only_within_work(ranks):
    with ranks.monitor.waiting(1):
        ranks.after(100)
        ranks.monitor.check()
    with ranks.monitor.state(WORKING), ranks.monitor.waiting(1):
        for beat in ranks.beats.values():
            beat.state = IDLE
        ranks.after(62)
    assert ranks.failure() == "rank 0 (a) has waited for rank 1 (b) for 60 s"


def test_the_reason_of_a_failed_rank_is_reported_once(ranks):
    alone = HeartbeatMonitor(MemoryStore(), 0, NAMES, timeout=0.1, progress_timeout=60)
    assert "rank 2 (c) has exited" in str(alone.connection_lost(2))
    ranks.after(1)
    other = HeartbeatMonitor(ranks.store, 1, NAMES, timeout=10, progress_timeout=60)
    other.fail("rank 1 (b) has ended: the disk is full")
    ranks.store.set("beat/2", msgspec.json.encode(ranks.beats[2]))
    ranks.monitor.poll()
    assert ranks.failure() == "rank 1 (b) has ended: the disk is full"
    assert str(ranks.monitor.connection_lost(1)) == "rank 1 (b) has ended: the disk is full"
    assert other.claim_report() and not ranks.monitor.claim_report()


def test_a_closed_rank_is_not_a_failure(ranks):
    other = HeartbeatMonitor(ranks.store, 1, NAMES, timeout=10, progress_timeout=60)
    other.close()
    left = ranks.store["beat/1"]
    for _ in range(50):
        ranks.now += 1
        ranks.beats[2].number += 1
        ranks.store.set("beat/1", left)
        ranks.store.set("beat/2", msgspec.json.encode(ranks.beats[2]))
        ranks.monitor.poll()
    ranks.monitor.check()


def test_a_silent_store_fails_the_monitor():
    """As where the host of rank 0 is gone without a word: what asks it waits without end."""
    silent = threading.Event()

    class SilentStore(MemoryStore):
        def get(self, key):
            silent.wait(60)
            raise RuntimeError("Connection reset by peer")

        def add(self, key, amount):
            return self.get(key)

    monitor = HeartbeatMonitor(TimeoutStore(SilentStore(), 0.01), 1, NAMES, timeout=60,
                               progress_timeout=60)
    monitor.interval = 0.01
    monitor.start()
    assert "which keeps the ranks' store, has not answered" in str(failure_of(monitor))
    assert monitor.claim_report()
    monitor.fail("it ends")
    monitor.close()
    silent.set()


def failure_of(monitor) -> PipelineFailure:
    """Return the failure that a started monitor detects."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            monitor.check()
        except PipelineFailure as failure:
            return failure
        time.sleep(0.001)
    raise AssertionError("no failure was detected")


class BlockingStore:
    """A store whose `get` waits for an event."""

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


def test_timeout_store_forwards_calls():
    store = TimeoutStore(BlockingStore(), 60)
    assert store.set("a", b"value") is None
    assert (store.add("a", 2), store.check(["a", "b"])) == (3, True)
    assert store.compare_set("a", "b", "c") == b"a b c"
    with pytest.raises(ConnectionError, match="reset by peer"):
        store.set("closed", "value")


def test_a_silent_store_is_not_called_again():
    silent = BlockingStore()
    store = TimeoutStore(silent, 0.01)
    with pytest.raises(StoreTimeout, match=r"no answer for 0\.01 s"):
        store.get("a")
    silent.speaks.set()
    with pytest.raises(StoreTimeout):
        store.set("a", "value")
    assert silent.asked == 0


def test_a_process_that_was_stopped_does_not_time_out(monkeypatch):
    """The time of its first look is over, although the store has answered at once."""
    looks = []

    def look(futures, timeout):
        looks.append(timeout)
        done = set() if len(looks) == 1 else wait(futures, 60).done
        return SimpleNamespace(done=done)

    wait = heartbeat.wait
    monkeypatch.setattr(heartbeat, "wait", look)
    assert call_with_timeout(len, "four", seconds=8) == 4
    assert looks == [1, 1]
