"""The ranks of a pipeline, and what they send each other: tensors, orders and agreements.

Ranks are processes, started by torchrun, on one host or several. Tensors go from point to point by
torch.distributed (gloo between CPUs, NCCL between GPUs). Nothing waits for ever: where the main
thread waits for a message it hears what the watch has found.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import distributed

from flexgen_h2o.config.launch import MESSAGES, Launch
from flexgen_h2o.config.stage import Stage
from flexgen_h2o.distributed.heartbeat import PatientStore, PipelineFailure, Watch
from flexgen_h2o.errors import UserError

HIDDEN, TOKENS, ORDERS, _ANSWERS = range(4)
"""Channels: messages of one kind from a rank to another come in the order in which they are
sent."""

RANK_TIMEOUT = 600.0
PATIENCE = 30.0
"""The most seconds without a heartbeat."""

_LOOK = 0.2  # seconds between looks at what the watch has found
_FOR_EVER = timedelta(days=1000)  # the watch ends what waits too long


class Message:
    """A tensor under way from or to another rank; it must live until then."""

    def __init__(self, tensor: torch.Tensor, peer: int, future: Future, watch: Watch):
        self.tensor, self._peer, self._future, self._watch = tensor, peer, future, watch

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there or has been read.

        Raises `PipelineFailure` if a rank has failed or gone.
        """
        if not self._future.done():
            with self._watch.waiting(self._peer):
                while not wait([self._future], timeout=_LOOK).done:
                    self._watch.check()
        try:
            self._future.result()
        except RuntimeError:
            raise self._watch.lost(self._peer) from None
        return self.tensor


class _Waiter:
    """A thread that waits for the messages of one channel, as that cannot be interrupted."""

    def __init__(self, group: Any, device: torch.device):
        self._queue: SimpleQueue = SimpleQueue()
        self._newest: Future | None = None
        # The group is the thread's, too: it must not go while the thread waits in it.
        self._thread = threading.Thread(target=self._run, args=(group, device), name=MESSAGES,
                                        daemon=True)
        self._thread.start()

    def add(self, work: Any, tensor: torch.Tensor) -> Future:
        future: Future = Future()
        self._queue.put((work, future, tensor))  # which must live as long
        self._newest = future
        return future

    def close(self) -> None:
        """End the thread, unless it waits for what will not come: that ends with the process."""
        self._queue.put(None)
        if self._newest is None or self._newest.done():
            self._thread.join()

    def _run(self, group: Any, device: torch.device) -> None:
        # A stream of its own: NCCL's `wait` lets the current stream wait, and not the host.
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        while (item := self._queue.get()) is not None:
            work, future, _ = item
            try:
                if stream is None:
                    work.wait()
                else:
                    with torch.cuda.stream(stream):
                        work.wait()
                    stream.synchronize()
            except RuntimeError as error:
                future.set_exception(error)
            else:
                future.set_result(None)


class Pipeline:
    """The ranks of a pipeline as one of them sees them; a context manager. Make it with `join`.

    Parameters
    ----------
    connect : callable () -> store of torch.distributed
        Each call gives another connection to the one store.
    rank, ranks : int
    local_rank : int
        Which of its host's GPUs a rank has, if there are any.
    rank_timeout : float
        Seconds in which some rank has to get on while the pipeline works.

    Attributes
    ----------
    has_ordered : bool
        True if this rank has ever given orders.

    Raises
    ------
    UserError
        The ranks cannot reach each other.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, ranks: int, *, local_rank: int = 0,
                 rank_timeout: float = RANK_TIMEOUT):
        self.rank, self.ranks, self.local_rank = rank, ranks, local_rank
        patience = min(PATIENCE, rank_timeout)
        self._waiters: dict[tuple, _Waiter] = {}
        self._closed = self.has_ordered = False
        name = f"rank {rank} ({socket.gethostname()}, process {os.getpid()})"
        try:
            store = connect()
            store.set(f"name/{rank}", name)
            names = [store.get(f"name/{each}").decode() for each in range(ranks)]
            store.set(f"beat/{rank}", b'{"number":0,"progress":0,"state":"idle"}')
            store.wait([f"beat/{each}" for each in range(ranks)], timedelta(seconds=rank_timeout))
            self._host = self._group(distributed.ProcessGroupGloo, store, "host")
            self.watch = Watch(PatientStore(connect(), patience), rank, names, patience=patience,
                               limit=rank_timeout)
        except (RuntimeError, ValueError) as error:  # no launcher's variables are a ValueError
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"rank {rank} of {ranks} can't reach the others ({reason}): check that "
                            "torchrun has started all of them, and MASTER_ADDR and MASTER_PORT"
                            ) from None
        self._store = store
        self._device = torch.device("cpu")
        self._direct: Any = None
        self.watch.start()

    @classmethod
    def join(cls, launch: Launch, *, rank_timeout: float = RANK_TIMEOUT, name: str = "pipeline"
             ) -> Pipeline:
        """Join the ranks that torchrun has started, and that have this pipeline's name. Raises
        `UserError` if they do not come."""
        rendezvous = None

        def connect() -> Any:
            nonlocal rendezvous
            if rendezvous is None:
                found = distributed.rendezvous("env://", timeout=timedelta(seconds=rank_timeout))
                rendezvous, _, _ = next(iter(found))
                return distributed.PrefixStore(name, rendezvous)
            return distributed.PrefixStore(name, rendezvous.clone())

        return cls(connect, launch.rank, launch.ranks, local_rank=launch.local_rank,
                   rank_timeout=rank_timeout)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def use(self, device: torch.device) -> None:
        """Send hidden states from this device's memory; all ranks call it together."""
        if device.type == "cuda":
            self._device = device
            self._direct = self._group(distributed.ProcessGroupNCCL, self._store, "device")

    def _group(self, make: Any, store: Any, name: str) -> Any:
        return make(distributed.PrefixStore(name, store), self.rank, self.ranks, _FOR_EVER)

    @property
    def last(self) -> int:
        """The rank that has the head."""
        return self.ranks - 1

    def receive(self, source: int, channel: int, tensor: torch.Tensor) -> Message:
        """Make ready for a message of this shape; contiguous, in host memory unless `HIDDEN`."""
        return self._message("recv", source, channel, tensor)

    def send(self, target: int, channel: int, tensor: torch.Tensor) -> Message:
        """Start to send what compute has been given to write; contiguous."""
        return self._message("send", target, channel, tensor)

    def _message(self, doing: str, peer: int, channel: int, tensor: torch.Tensor) -> Message:
        self.watch.check()
        group, device = self._host, torch.device("cpu")
        if channel == HIDDEN and self._direct is not None:
            group, device = self._direct, self._device
        key = (doing, peer, channel)
        if key not in self._waiters:
            self._waiters[key] = _Waiter(group, device)
        flat = tensor.view(-1).view(torch.uint8)
        try:
            work = getattr(group, doing)([flat], peer, channel)
        except RuntimeError:
            raise self.watch.lost(peer) from None
        return Message(tensor, peer, self._waiters[key].add(work, flat), self.watch)

    def order(self, data: bytes) -> None:
        """Send words from the first rank to all others, for their `listen`."""
        self.has_ordered = True
        sent = [message for rank in range(1, self.ranks)
                for message in self._send_bytes(rank, ORDERS, data)]
        for message in sent:
            message.wait()

    def listen(self) -> bytes:
        """The next words from the first rank, however long it takes."""
        return self._receive_bytes(0, ORDERS)

    def agree(self, data: bytes) -> list[bytes]:
        """The words of each rank, in their order; all call it together."""
        if self.rank > 0:
            for message in self._send_bytes(0, _ANSWERS, data):
                message.wait()
            return [self.listen() for _ in range(self.ranks)]
        found = [data, *(self._receive_bytes(rank, _ANSWERS) for rank in range(1, self.ranks))]
        for each in found:
            self.order(each)
        return found

    def _send_bytes(self, target: int, channel: int, data: bytes) -> Sequence[Message]:
        size = torch.tensor([len(data)])
        content = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)
        return [self.send(target, channel, size), self.send(target, channel, content)]

    def _receive_bytes(self, source: int, channel: int) -> bytes:
        size = int(self.receive(source, channel, torch.zeros(1, dtype=torch.int64)).wait())
        content = torch.empty(max(size, 1), dtype=torch.uint8)
        return self.receive(source, channel, content).wait()[:size].numpy().tobytes()

    def fail(self, error: BaseException) -> bool:
        """Let the other ranks know that this one ends by an error. True if it is to tell the user:
        one does."""
        tells = self.watch.tells()
        if isinstance(error, PipelineFailure):
            self.watch.fail(str(error))  # who hears of it here hears of the first cause
        else:
            words = str(error) if isinstance(error, UserError) else (
                f"{type(error).__name__} {error}")
            self.watch.fail(f"{self.watch.names[self.rank]} has ended: {words}")
        return tells

    def close(self) -> None:
        """Leave the others; a second call does nothing."""
        if not self._closed:
            self._closed = True
            for waiter in self._waiters.values():
                waiter.close()
            self.watch.close()
            self._waiters.clear()
            self._host = self._direct = None


# The exchange of a block between the ranks of a pipeline: hidden states, and what sinks found.


class Exchange:
    """The messages of one rank, block after block.

    Sends do not wait, but for the oldest of as many as the batches of a group: a rank that is ahead
    of the next one holds no more than that.

    Parameters
    ----------
    pipeline : Pipeline
    stage : Stage
    groups : int
        Into which each block's batches are cut, the same number on all ranks.
    width : int
        Of hidden states, [rows, width] of `dtype` on `device`.
    """

    def __init__(self, pipeline: Pipeline, stage: Stage, groups: int, *, width: int,
                 dtype: torch.dtype, device: torch.device):
        self.stage, self.groups, self.pipeline = stage, groups, pipeline
        self.sent_bytes = 0
        self._width, self._dtype, self._device = width, dtype, device
        self._spare: list[torch.Tensor] = []  # flat, of `dtype`
        self._hidden: dict[int, Message] = {}
        self._tokens: dict[int, tuple[int, Message]] = {}
        self._sent: deque[Message] = deque()
        self._most = 1

    def begin(self, num_batches: int) -> None:
        """Start a block of so many batches."""
        self._most = math.ceil(num_batches / min(self.groups, num_batches))

    def _buffer(self, rows: int) -> torch.Tensor:
        """[rows, width], of which nothing is known."""
        size = rows * self._width
        found = self._spare.pop() if self._spare else None
        if found is None or found.numel() < size:
            found = torch.empty(size, dtype=self._dtype, device=self._device)
        return found

    def receive_hidden(self, batch: int, rows: int) -> None:
        """Make ready for a batch's hidden states from the rank before."""
        buffer = self._buffer(rows)[: rows * self._width]
        self._hidden[batch] = self.pipeline.receive(self.stage.rank - 1, HIDDEN, buffer)

    def take_hidden(self, batch: int, into: torch.Tensor) -> None:
        """Wait for a batch's hidden states, and copy them: [rows, width]."""
        received = self._hidden.pop(batch).wait()
        into.copy_(received.view_as(into))
        self._spare.append(received)

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Start to send a batch's hidden states [rows, width], which are copied, to the next rank.
        """
        while len(self._sent) >= self._most:
            self._spare.append(self._sent.popleft().wait())
        buffer = self._buffer(len(hidden))[: hidden.numel()]
        buffer.view_as(hidden).copy_(hidden)
        self._sent.append(self.pipeline.send(self.stage.rank + 1, HIDDEN, buffer))
        self.sent_bytes += buffer.nbytes

    def receive_tokens(self, batch: int, forward_pass: int, shape: tuple[int, int]) -> None:
        """Make ready for what the last rank finds for a batch: float64 of this shape."""
        found = torch.empty(shape, dtype=torch.float64)
        self._tokens[batch] = forward_pass, self.pipeline.receive(self.pipeline.last, TOKENS, found)

    def take_tokens(self, batch: int, forward_pass: int) -> torch.Tensor | None:
        """Wait for what has been found for a batch in a forward pass; None if nothing was to be.
        """
        awaited, message = self._tokens.get(batch, (None, None))
        if message is None or awaited != forward_pass:
            return None
        del self._tokens[batch]
        return message.wait()

    def under_way(self) -> list[tuple[int, int]]:
        """Batches, and forward passes of them, whose tokens have not been taken."""
        return [(batch, forward_pass) for batch, (forward_pass, _) in self._tokens.items()]

    def send_tokens(self, found: torch.Tensor) -> None:
        """Start to send what was found for a batch to all other ranks."""
        for rank in range(self.pipeline.last):
            # They have made ready for it, so that it is soon over.
            self.pipeline.send(rank, TOKENS, found)
            self.sent_bytes += found.nbytes

    def settle(self) -> None:
        """Wait until all that was sent has been taken, at the end of a block."""
        while self._sent:
            self._spare.append(self._sent.popleft().wait())
