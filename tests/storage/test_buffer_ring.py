"""A ring of staging buffers: in any order of use, nothing is read or written while in use."""

import itertools
import random

import pytest
import torch
from helpers.delays import SEEDS, random_delays
from helpers.fakes import LazyComputeDevice, LazyPool
from helpers.internals import flush, keep_latest_in, queues_with
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.metrics.trace import LinkStats, Trace
from flexgen_h2o.storage.device import Device
from flexgen_h2o.storage.transfer import (
    D2H,
    H2D,
    QUEUES,
    BackingStore,
    BufferRing,
    StagingBuffer,
    Transfers,
)

KEYS = frozenset(range(4))
ACTS = ("load", "load_and_write_back", "take", "compute", "compute", "store", "release",
        "run a job", "run copies", "wait for all")


class Engine:
    """Loads, computes with and stores the bytes of four keys, and knows what each has to be.

    Jobs, copies and compute are as late as allowed unless an act runs them: where a wait is
    missing, something sees wrong bytes. With `threads`, queues run their jobs at once.
    """

    def __init__(self, count: int = 3, *, threads: bool = False):
        self.device = LazyComputeDevice()
        self.transfers = Transfers(self.device, links=LinkStats(), trace=Trace(enabled=False))
        self.pools = {} if threads else dict(
            zip(QUEUES, queues_with(self.transfers, LazyPool), strict=True))
        self.ring = BufferRing(self.transfers, [
            StagingBuffer(self.device.empty(1), self.device.host_empty(1)) for _ in range(count)])
        self.turns = itertools.cycle(range(count))
        self.owners = [None] * count
        self.values = itertools.cycle(range(1, 251))
        self.stores = [BackingStore(host=torch.zeros(4096, dtype=torch.uint8)) for _ in KEYS]
        self.stored = [0] * len(KEYS)
        self.live: dict[int, int] = {}
        self.unread: set[int] = set()
        self.met: list[tuple[list[int], int]] = []

    def act(self, act: str, number: int) -> None:
        """Do what `act` says to the queue, or to the key or one that is fit for it, of a number."""
        queue = QUEUES[number % len(QUEUES)]
        if act == "run a job":
            if self.pools and self.pools[queue].jobs:
                self.pools[queue].run_one()
        elif act == "run copies":
            flush(self.transfers, queue)
        elif act == "wait for all":
            self.wait_for_all(drop_errors=number % 2 == 1)
        else:
            # As in the engine: a load is used before the key is loaded again or stored, and what is
            # stored is loaded before it is created again.
            loadable, held = KEYS - self.unread, self.live.keys()
            fit = {"store": held - self.unread, "release": held, "compute": held,
                   "take": {key for key in loadable if not self.stores[key].busy}
                   }.get(act, loadable)
            if fit:
                getattr(self, act)(sorted(fit)[number % len(fit)])
        for key in KEYS - self.live.keys():
            with pytest.raises(KeyError):
                self.ring.get(key)

    def wait_for_all(self, *, drop_errors: bool = False) -> None:
        self.ring.reset() if drop_errors else self.ring.synchronize()
        self.live, self.unread, self.owners = {}, set(), [None] * len(self.owners)

    def meet(self, tensor: torch.Tensor, value: int) -> None:
        self.met.append((tensor.unique().tolist(), value))

    def own(self, key: int, value: int) -> None:
        """Give the next buffer to the key."""
        turn = next(self.turns)
        self.live.pop(self.owners[turn], None)
        self.owners = [None if owner == key else owner for owner in self.owners]
        self.owners[turn], self.live[key] = key, value

    def load(self, key: int, *, writes: bool = False) -> None:
        store, value = self.stores[key], self.stored[key]

        def fill(queue, buffer):
            buffer.host.copy_(store.host)  # at once, as a disk is read
            queue.copy(buffer.device, buffer.host, H2D)
            return [self.transfers.submit("stores", lambda queue: self.meet(buffer.host, value))
                    ] if writes else None

        before, store.busy = store.busy, []
        self.ring.load(key, fill, after=before)
        self.own(key, value)
        self.unread.add(key)

    def load_and_write_back(self, key: int) -> None:
        self.load(key, writes=True)

    def take(self, key: int) -> None:
        device, value = self.ring.take(key).device, next(self.values)
        self.device.compute(lambda: device.fill_(value))
        self.own(key, value)

    def compute(self, key: int) -> None:
        device, value, new = self.ring.get(key).device, self.live[key], next(self.values)
        self.device.compute(lambda: (self.meet(device, value), device.fill_(new)))
        self.live[key] = new
        self.unread.discard(key)

    def store(self, key: int) -> None:
        store = self.stores[key]

        def empty(queue, buffer):
            queue.copy(buffer.host, buffer.device, D2H)
            queue.flush()
            store.host.copy_(buffer.host)  # at once, as a disk is written

        store.busy.append(self.ring.store(key, empty))
        self.stored[key] = self.live.pop(key)

    def release(self, key: int) -> None:
        self.ring.release(key)
        del self.live[key]


@settings(max_examples=examples(60))
@given(count=st.integers(1, 3),
       acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 11)), min_size=30,
                     max_size=60))
def test_buffers_in_use_are_never_touched(count, acts):
    check_acts(Engine(count), acts)


@pytest.mark.parametrize("seed", SEEDS)
def test_buffers_in_use_are_never_touched_by_threads(seed):
    draw, engine = random.Random(seed), Engine(2 + seed % 2, threads=True)
    with random_delays(seed):
        check_acts(engine, [(draw.choice(ACTS), draw.randrange(12)) for _ in range(150)])
        engine.transfers.close()


def check_acts(engine: Engine, acts: list[tuple[str, int]]) -> None:
    """Run all acts, and check all values that were read."""
    for act, number in acts:
        engine.act(act, number)
    engine.wait_for_all()
    engine.transfers.drain()
    engine.device.record_event().synchronize()
    assert all(actual == [value] for actual, value in engine.met), engine.met
    assert [store.host.unique().tolist() for store in engine.stores] == [
        [value] for value in engine.stored]


def test_buffers_wait_only_for_their_own_use():
    engine = Engine(2)
    for key in (0, 1):
        engine.load(key)
    engine.compute(1)
    assert len(engine.pools["loads 0"].jobs) == 1, "the other buffer's load is still to come"
    engine.compute(0)
    engine.release(0)
    engine.compute(1)
    engine.load(2)  # where 0 was
    engine.pools["loads 0"].run_one()
    engine.act("run copies", QUEUES.index("loads 0"))
    assert [value for _, value in engine.met] == [0, 0], "compute up to the release, and no more"


def test_errors_are_raised_at_the_wait():
    def fail(queue, buffer):
        raise OSError("no such disk")

    def failing(wait):
        """A load that has failed in the only buffer, and one after it."""
        engine = Engine(1)
        engine.ring.load(0, fail)
        engine.ring.load(1, lambda queue, buffer: None)
        with pytest.raises(OSError, match="no such disk"):
            wait(engine.ring)
        engine.wait_for_all(drop_errors=True)
        engine.take(2)
        engine.compute(2)
        engine.load(2)
        engine.compute(2)
        engine.wait_for_all()

    for wait in (lambda ring: ring.get(1), lambda ring: ring.take(2), BufferRing.synchronize):
        failing(wait)


def test_compute_ends_before_buffers_are_freed():
    """Kernels of a GPU read and write host memory in place, which is unmapped then."""
    device, done = LazyComputeDevice(), []
    transfers = Transfers(device, links=LinkStats(), trace=Trace(enabled=False))
    device.compute(lambda: done.append("compute"))
    transfers.abandon()
    transfers.close()
    assert done == ["compute"]


def test_interrupted_submit_ends_before_buffers_are_freed(monkeypatch):
    class Interrupted(dict):
        """The latest jobs; Ctrl-C comes when one is queued."""

        def __setitem__(self, queue, handle):
            raise KeyboardInterrupt

    transfers, done = Transfers(Device(), links=LinkStats(), trace=Trace(enabled=False)), []
    queues_with(transfers, LazyPool)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        keep_latest_in(patch, transfers, Interrupted())
        transfers.submit("stores", lambda queue: transfers.submit("loads", done.append))
    transfers.abandon()
    transfers.close()
    assert len(done) == 1
