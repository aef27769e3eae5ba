"""The watch over ranks, with a board in memory and a clock that is set by hand."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from flexgen_h2o.distributed.heartbeat import (
    IDLE,
    WAITING,
    WORKING,
    Beat,
    PatientStore,
    PipelineFailure,
    Watch,
)

NAMES = ["rank 0 (a)", "rank 1 (b)", "rank 2 (c)"]


class Board(dict):
    """A store."""

    def set(self, key, value):
        self[key] = value

    def get(self, key):
        return self[key]

    def add(self, key, amount):
        self[key] = self[key] + amount if key in self else amount
        return self[key]


class Ranks:
    """Rank 0's watch, and the beats of two others."""

    def __init__(self):
        self.board, self.now = Board(), 0.0
        self.watch = Watch(self.board, 0, NAMES, patience=10, limit=60, clock=lambda: self.now)
        self.beats = {1: Beat(0, 0, WORKING), 2: Beat(0, 0, WORKING)}

    def after(self, seconds, *, alive=(1, 2), moved=()):
        """So many seconds, beat by beat: who is alive, and whose work gets on."""
        for _ in range(seconds):
            self.now += 1
            for rank, beat in self.beats.items():
                beat.number += rank in alive
                beat.progress += rank in moved
                self.board.set(f"beat/{rank}", msgspec.json.encode(beat))
            self.watch.look()

    def failure(self):
        with pytest.raises(PipelineFailure) as caught:
            self.watch.check()
        return str(caught.value)


@pytest.fixture
def ranks():
    return Ranks()


def test_ranks_that_live_and_get_on_are_left_alone(ranks):
    with ranks.watch.state(WORKING):
        ranks.after(200, moved=(2,))
        ranks.watch.check()


def test_a_rank_without_a_heartbeat_is_named(ranks):
    ranks.after(5, moved=(1,))
    ranks.after(11, alive=(1,), moved=(1,))
    assert ranks.failure().startswith("rank 2 (c) has not answered for 10 s")


def test_the_rank_that_computes_and_does_not_get_on_is_named_and_not_those_that_wait(ranks):
    with ranks.watch.state(WAITING, "for rank 1 (b)"):
        ranks.beats[2].state = WAITING
        ranks.after(62)
    assert ranks.failure() == "rank 1 (b) has not got on for 60 s"


def test_ranks_that_all_wait_are_ended_too(ranks):
    ranks.beats[1].state = ranks.beats[2].state = WAITING
    with ranks.watch.state(WAITING, "for rank 1 (b)"):
        ranks.after(62)
    assert ranks.failure() == "rank 0 (a) has waited for rank 1 (b) for 60 s"


def test_nothing_is_expected_while_the_first_rank_has_nothing_to_do(ranks):
    for beat in ranks.beats.values():
        beat.state = IDLE
    ranks.after(500)
    ranks.watch.check()
    with ranks.watch.state(WORKING):
        ranks.after(30)
        ranks.watch.check()  # it has only begun
        ranks.watch.advance()
        ranks.after(50)
        ranks.watch.check()


def test_waiting_counts_only_within_work(ranks):
    with ranks.watch.waiting(1):
        ranks.after(100)
        ranks.watch.check()
    with ranks.watch.state(WORKING), ranks.watch.waiting(1):
        for beat in ranks.beats.values():
            beat.state = IDLE
        ranks.after(62)
    assert ranks.failure() == "rank 0 (a) has waited for rank 1 (b) for 60 s"


def test_a_rank_that_has_failed_says_why_and_one_alone_tells(ranks):
    other = Watch(ranks.board, 1, NAMES, patience=10, limit=60)
    ranks.after(1)
    other.fail("rank 1 (b) has ended: the disk is full")
    ranks.board.set("beat/2", msgspec.json.encode(ranks.beats[2]))
    ranks.watch.look()
    assert ranks.failure() == "rank 1 (b) has ended: the disk is full"
    assert str(ranks.watch.lost(1)) == "rank 1 (b) has ended: the disk is full"
    assert other.tells() and not ranks.watch.tells()


def test_a_rank_that_has_left_is_not_missed(ranks):
    other = Watch(ranks.board, 1, NAMES, patience=10, limit=60)
    other.close()
    left = ranks.board["beat/1"]
    for _ in range(50):
        ranks.now += 1
        ranks.beats[2].number += 1
        ranks.board.set("beat/1", left)
        ranks.board.set("beat/2", msgspec.json.encode(ranks.beats[2]))
        ranks.watch.look()
    ranks.watch.check()


def test_a_closed_connection_names_its_rank_where_nobody_knows_more():
    watch = Watch(Board(), 0, NAMES, patience=0.1, limit=60)
    assert str(watch.lost(2)) == "rank 2 (c) has gone: its connection has closed"


def test_a_store_that_does_not_answer_is_told_and_holds_nobody_up():
    """As where the host of rank 0 is gone without a word: what asks it waits without end."""
    silent = threading.Event()

    class SilentBoard(Board):
        def get(self, key):
            silent.wait(60)
            raise RuntimeError("Connection reset by peer")

        def add(self, key, amount):
            return self.get(key)

    watch = Watch(PatientStore(SilentBoard(), 0.01), 1, NAMES, patience=60, limit=60)
    watch.interval = 0.01
    watch.start()
    assert "which keeps the ranks' store, has not answered" in str(noted(watch))
    assert watch.tells()
    watch.fail("it ends")
    watch.close()
    silent.set()


def noted(watch) -> PipelineFailure:
    """What a watch that has been started finds."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            watch.check()
        except PipelineFailure as found:
            return found
        time.sleep(0.001)
    raise AssertionError("it has found nothing")
