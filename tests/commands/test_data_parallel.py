"""Data-parallel batch jobs: the queue and leftover files; whole jobs are in test_batch_ranks."""

import time
from collections.abc import Callable

import pytest
from helpers.batch_jobs import answers, job_flags, requests, write_lines
from helpers.error_cases import command_refused, refused
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.commands import batch
from flexgen_h2o.config.parallel import torchrun_env
from flexgen_h2o.distributed.replicas import QueueLost, ReplicaRank, WindowQueue
from flexgen_h2o.requests.results import ResultsFile

# --- the queue


class DictStore:
    """The store of one process; it fails once it is `closed`."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self.closed = False

    def set(self, key, value):
        self.check([key])
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        if self.closed:
            raise RuntimeError("Connection reset by peer")
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        if self.values.get(key, b"") == expected.encode():
            self.set(key, desired)
        return self.values.get(key, expected.encode())


class Clock:
    """A manual clock that advances with each wait and then calls `meanwhile`."""

    def __init__(self):
        self.now = 0.0
        self.meanwhile: Callable[[], None] = lambda: None

    def wait(self, seconds):
        self.now += seconds
        self.meanwhile()
        assert self.now < 1000

    def queue(self, store, replica, replicas=2):
        return WindowQueue(store, replica, replicas, timeout=5, clock=lambda: self.now,
                           wait=self.wait)


@given(st.lists(st.sampled_from(["free", "done", "held", "left", "slow"]), max_size=12))
def test_each_window_is_done_once_or_retried_if_lost(states):
    store, clock = DictStore(), Clock()
    holders = {"held": b"1", "left": b"2", "slow": b"3", "done": b"done"}
    for window, state in enumerate(states):
        if state != "free":
            store.values[f"window/{window}"] = holders[state]
    store.values |= {"beat/1": b"7", "beat/2": b"left", "beat/3": b"0"}

    def meanwhile():  # replica 3 is alive, and is done after a while
        store.values["beat/3"] = str(clock.now).encode()
        if clock.now > 20:
            store.values |= {f"window/{window}": b"done" for window, state in enumerate(states)
                             if state == "slow"}

    clock.meanwhile = meanwhile
    windows = list(clock.queue(store, 0, 4).windows(len(states)))
    assert sorted(windows) == [window for window, state in enumerate(states)
                            if state in ("free", "held", "left")]
    assert all(store.values[f"window/{window}"] == b"done" for window in range(len(states)))
    assert clock.now > 20 or "slow" not in states
    assert clock.now > 5 or "held" not in states


def test_slow_replica_does_not_take_back_a_window():
    store, clock = DictStore(), Clock()
    slow = clock.queue(store, 1).windows(2)
    assert next(slow) == 0
    other = clock.queue(store, 0)
    windows = other.windows(2)
    assert [next(windows), next(windows)] == [1, 0] and clock.now > 5
    assert next(slow, None) is None
    assert store.values["window/0"] == b"0"
    assert list(windows) == [] and store.values["window/0"] == b"done"


def test_a_store_that_is_gone_ends_the_queue_in_a_line():
    store, clock = DictStore(), Clock()
    queue = clock.queue(store, 1)
    windows = queue.windows(3)
    assert next(windows) == 0 and not queue.ended
    store.closed = True
    assert queue.ended and queue.lost
    with pytest.raises(QueueLost, match="replica 0, which keeps the queue"):
        next(windows)
    refused(lambda: clock.queue(store, 1).wait_for_job(), "has stopped")
    with clock.queue(store, 1).heartbeats():
        pass  # there is no store to write to


def test_replica_0_is_waited_for_while_it_sends_heartbeats():
    store, clock = DictStore(), Clock()
    first, second = clock.queue(store, 0), clock.queue(store, 1)

    def meanwhile():
        store.values["beat/0"] = str(clock.now).encode()
        if clock.now > 60:
            first.publish("words")

    clock.meanwhile = meanwhile
    assert second.wait_for_job() == b"words" and clock.now > 60
    first.end()
    assert second.ended
    assert not second.is_gone(0)
    with first.heartbeats():
        assert store.values["beat/0"] != b"left"
    assert second.is_gone(0)
    second_too = clock.queue(store, 1)
    clock.meanwhile = lambda: None
    with second_too.heartbeats():
        while not second_too.lost:
            time.sleep(0.01)
    first.wait_for_others()
    assert clock.now < 70  # no wait was needed


# --- the launcher's variables


def test_the_replica_of_a_rank():
    variables = {"RANK": "3", "WORLD_SIZE": "6", "MASTER_ADDR": "h", "MASTER_PORT": "1",
             "LOCAL_RANK": "1"}
    assert ReplicaRank.from_env(torchrun_env(variables)) == ReplicaRank(3, 6, 1)
    assert ReplicaRank.from_env(torchrun_env(variables), 2) == ReplicaRank(1, 3, 1, leads=False)
    assert ReplicaRank.from_env(torchrun_env(variables | {"RANK": "4"}), 2) == ReplicaRank(2, 3, 1)
    refused(lambda: ReplicaRank.from_env(torchrun_env(variables), 4),
            "cannot be divided", "start a multiple of 4")


# --- whole jobs


def test_leftover_replica_files_are_resumed(words_model, tmp_path, capsys):
    out, bad = tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    write_lines(tmp_path / "in.jsonl", [*requests(20), "{broken\n"])
    flags = job_flags(tmp_path, words_model, "out.jsonl", "--errors", str(bad), "--memory-limit",
                      "200MB")
    assert batch.main(flags) == 0
    whole, failed = answers(out), bad.read_text()
    lines = out.read_text().splitlines(keepends=True)
    # Some requests have been answered by two, and a line is torn.
    (tmp_path / "out.jsonl.rank1").write_text("".join(lines[3:10]) + failed + lines[18][:50])
    (tmp_path / "out.jsonl.rank12").write_text("".join(lines[8:17]))
    (tmp_path / "out.jsonl.rankle").write_text("of somebody else")
    out.write_text("".join(lines[:4]))
    bad.unlink()
    with ResultsFile("--output", str(tmp_path / "out.jsonl.rank12")):
        command_refused(batch.main, capsys, flags, "rank12 is being written by another job")
    assert "made with seed" in command_refused(batch.main, capsys, [*flags, "--seed", "1"])
    capsys.readouterr()
    assert batch.main(flags) == 0
    assert "resuming: 18 of 21 requests are answered" in "".join(capsys.readouterr())
    assert answers(out) == whole and bad.read_text() == failed
    assert [path.name for path in tmp_path.glob("out*rank*")] == ["out.jsonl.rankle"]
    # A file of another job is refused as it is; with --overwrite it goes.
    (tmp_path / "out.jsonl.rank1").write_text(lines[0].replace("batch_req_", "batch_req_f"))
    command_refused(batch.main, capsys, flags, "rank1 line 1")
    assert batch.main([*flags, "--overwrite"]) == 0
    assert answers(out) == whole and not (tmp_path / "out.jsonl.rank1").exists()
