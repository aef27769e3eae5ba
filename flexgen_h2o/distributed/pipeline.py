"""Point-to-point messages between the ranks of a pipeline.

Ranks are processes that torchrun has started, on one host or several. Tensors travel through
torch.distributed: gloo between CPUs, NCCL between GPUs. No wait is unbounded: while the main thread
waits for a message, it checks the heartbeat monitor.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import distributed

from flexgen_h2o.config.parallel import CONTROL_THREAD, Stage, TorchrunEnv
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.distributed.heartbeat import HeartbeatMonitor, PipelineFailure, TimeoutStore
from flexgen_h2o.errors import UserError

HIDDEN, TOKENS, _CONTROL, _GATHER = range(4)
"""Channels: messages of one channel between two ranks arrive in the order of their sends."""

RANK_TIMEOUT = 600.0
"""Default of `Pipeline.join`'s `rank_timeout`, in seconds."""

HEARTBEAT_TIMEOUT = 30.0
"""Upper limit of the seconds without a heartbeat after which a rank counts as dead."""

_POLL = 0.2  # seconds between checks of the heartbeat monitor
_UNBOUNDED = timedelta(days=1000)  # the heartbeat monitor ends waits that take too long


class Message:
    """A tensor that is being sent or received; the tensor must stay alive until `wait` returns."""

    def __init__(self, tensor: torch.Tensor, peer: int, future: Future, monitor: HeartbeatMonitor):
        self.tensor, self._peer, self._future, self._monitor = tensor, peer, future, monitor

    def wait(self) -> torch.Tensor:
        """Wait until the tensor is received or sent, and return it.

        Raises
        ------
        PipelineFailure
            A rank failed or disappeared.
        """
        if not self._future.done():
            with self._monitor.waiting(self._peer):
                while not wait([self._future], timeout=_POLL).done:
                    self._monitor.check()
        try:
            self._future.result()
        except RuntimeError:
            raise self._monitor.connection_lost(self._peer) from None
        return self.tensor


class _WaitThread:
    """Thread that waits for the messages of one channel, since these waits cannot be interrupted.
    """

    def __init__(self, group: Any, device: torch.device):
        self._queue: SimpleQueue = SimpleQueue()
        self._newest: Future | None = None
        # The thread keeps the group alive while it waits inside of it.
        self._thread = threading.Thread(target=self._run, args=(group, device), name=CONTROL_THREAD,
                                        daemon=True)
        self._thread.start()

    def add(self, work: Any, tensor: torch.Tensor) -> Future:
        future: Future = Future()
        self._queue.put((work, future, tensor))  # keeps the tensor alive
        self._newest = future
        return future

    def close(self) -> None:
        """End the thread. One that waits for a lost message ends with the process."""
        self._queue.put(None)
        if self._newest is None or self._newest.done():
            self._thread.join()

    def _run(self, group: Any, device: torch.device) -> None:
        # NCCL's `wait` blocks the current stream and not the host: use a separate stream.
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
    """This rank's connections to all others; a context manager. Create it with `join`.

    Parameters
    ----------
    connect : callable () -> torch.distributed.Store
        Returns a new connection to the store that all ranks share.
    local_rank : int
        Index of this rank's GPU on its host, if it has GPUs.
    rank_timeout : float
        Seconds in which some rank must make progress while the pipeline works.

    Attributes
    ----------
    monitor : HeartbeatMonitor
    has_broadcast : bool
        True once this rank has sent a broadcast.

    Raises
    ------
    UserError
        The ranks cannot reach each other.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, ranks: int, *, local_rank: int = 0,
                 rank_timeout: float = RANK_TIMEOUT):
        self.rank, self.ranks, self.local_rank = rank, ranks, local_rank
        timeout = min(HEARTBEAT_TIMEOUT, rank_timeout)
        self._threads: dict[tuple, _WaitThread] = {}
        self._closed = self.has_broadcast = False
        name = f"rank {rank} ({socket.gethostname()}, process {os.getpid()})"
        try:
            store = connect()
            store.set(f"name/{rank}", name)
            names = [store.get(f"name/{other}").decode() for other in range(ranks)]
            store.set(f"beat/{rank}", b'{"number":0,"progress":0,"state":"idle"}')
            store.wait([f"beat/{other}" for other in range(ranks)],
                       timedelta(seconds=rank_timeout))
            self._host_group = self._new_group(distributed.ProcessGroupGloo, store, "host")
            self.monitor = HeartbeatMonitor(TimeoutStore(connect(), timeout), rank, names,
                                            timeout=timeout, progress_timeout=rank_timeout)
        except (RuntimeError, ValueError) as error:  # ValueError: no variables of a launcher
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"rank {rank} of {ranks} can't reach the others ({reason}): check that "
                            "torchrun has started all of them, and MASTER_ADDR and MASTER_PORT"
                            ) from None
        self._store = store
        self._device = torch.device("cpu")
        self._device_group: Any = None
        self.monitor.start()

    @classmethod
    def join(cls, launch: TorchrunEnv, *, rank_timeout: float = RANK_TIMEOUT, name: str = "pipeline"
             ) -> Pipeline:
        """Join the ranks that torchrun has started and that use the same pipeline name.

        Raises
        ------
        UserError
            The other ranks do not join in time.
        """
        first_connection = None

        def connect() -> Any:
            nonlocal first_connection
            if first_connection is None:
                rendezvous = distributed.rendezvous("env://",
                                                    timeout=timedelta(seconds=rank_timeout))
                first_connection, _, _ = next(iter(rendezvous))
                return distributed.PrefixStore(name, first_connection)
            return distributed.PrefixStore(name, first_connection.clone())

        return cls(connect, launch.rank, launch.ranks, local_rank=launch.local_rank,
                   rank_timeout=rank_timeout)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def use_device(self, device: torch.device) -> None:
        """Send hidden states from the memory of this device. A collective call of all ranks."""
        if device.type == "cuda":
            self._device = device
            self._device_group = self._new_group(distributed.ProcessGroupNCCL, self._store,
                                                 "device")

    def _new_group(self, group_class: Any, store: Any, name: str) -> Any:
        return group_class(distributed.PrefixStore(name, store), self.rank, self.ranks, _UNBOUNDED)

    @property
    def last(self) -> int:
        """Number of the last rank, which computes the logits."""
        return self.ranks - 1

    def receive(self, source: int, channel: int, tensor: torch.Tensor) -> Message:
        """Start to receive into a contiguous tensor, on the device for `HIDDEN`, else on the host.
        """
        return self._start("recv", source, channel, tensor)

    def send(self, target: int, channel: int, tensor: torch.Tensor) -> Message:
        """Start to send a contiguous tensor, after the work that compute has queued."""
        return self._start("send", target, channel, tensor)

    def _start(self, operation: str, peer: int, channel: int, tensor: torch.Tensor) -> Message:
        self.monitor.check()
        group, device = self._host_group, torch.device("cpu")
        if channel == HIDDEN and self._device_group is not None:
            group, device = self._device_group, self._device
        key = (operation, peer, channel)
        if key not in self._threads:
            self._threads[key] = _WaitThread(group, device)
        flat = tensor.view(-1).view(torch.uint8)
        try:
            work = getattr(group, operation)([flat], peer, channel)
        except RuntimeError:
            raise self.monitor.connection_lost(peer) from None
        return Message(tensor, peer, self._threads[key].add(work, flat), self.monitor)

    def broadcast(self, data: bytes) -> None:
        """Send bytes from the first rank to all others, which call `receive_broadcast`."""
        self.has_broadcast = True
        sent = [message for rank in range(1, self.ranks)
                for message in self._send_bytes(rank, _CONTROL, data)]
        for message in sent:
            message.wait()

    def receive_broadcast(self) -> bytes:
        """Wait for the next broadcast of the first rank, without a time limit."""
        return self._receive_bytes(0, _CONTROL)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by rank. A collective call of all ranks."""
        if self.rank > 0:
            for message in self._send_bytes(0, _GATHER, data):
                message.wait()
            return [self.receive_broadcast() for _ in range(self.ranks)]
        gathered = [data, *(self._receive_bytes(rank, _GATHER) for rank in range(1, self.ranks))]
        for part in gathered:
            self.broadcast(part)
        return gathered

    def _send_bytes(self, target: int, channel: int, data: bytes) -> Sequence[Message]:
        size = torch.tensor([len(data)])
        content = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)
        return [self.send(target, channel, size), self.send(target, channel, content)]

    def _receive_bytes(self, source: int, channel: int) -> bytes:
        size = int(self.receive(source, channel, torch.zeros(1, dtype=torch.int64)).wait())
        content = torch.empty(max(size, 1), dtype=torch.uint8)
        return self.receive(source, channel, content).wait()[:size].numpy().tobytes()

    def fail(self, error: BaseException) -> bool:
        """Tell the other ranks that this one ends with an error.

        Returns
        -------
        bool
            True if this rank must report the error to the user; exactly one rank does.
        """
        reports = self.monitor.claim_report()
        if isinstance(error, PipelineFailure):
            self.monitor.fail(str(error))  # pass the first cause on
        else:
            reason = str(error) if isinstance(error, UserError) else (
                f"{type(error).__name__} {error}")
            self.monitor.fail(f"{self.monitor.names[self.rank]} has ended: {reason}")
        return reports

    def close(self) -> None:
        """Leave the pipeline. A second call is a no-op."""
        if not self._closed:
            self._closed = True
            for thread in self._threads.values():
                thread.close()
            self.monitor.close()
            self._threads.clear()
            self._host_group = self._device_group = None


@dataclass(frozen=True)
class RankContext:
    """Position of a rank in its pipeline.

    Attributes
    ----------
    pipeline : Pipeline
    stage : Stage
        Decoder layers that this rank computes.
    groups : int
        Groups that the GPU batches of a block are split into, the same on all ranks.
    workload : Workload or None
        Workload that the first rank expects, if it is known.
    """

    pipeline: Pipeline
    stage: Stage
    groups: int
    workload: Workload | None = None


class Exchange:
    """Hidden states and tokens that one rank sends and receives, block after block.

    A send waits only for the oldest of as many sends as a group has batches. That bounds the memory
    of a rank that runs ahead of the next one.

    Parameters
    ----------
    width : int
        Width of hidden states [rows, width] of `dtype` on `device`.

    Attributes
    ----------
    sent_bytes : int
        Bytes of all messages so far.
    """

    def __init__(self, rank: RankContext, *, width: int, dtype: torch.dtype,
                 device: torch.device):
        self.stage, self.groups, self._pipeline = rank.stage, rank.groups, rank.pipeline
        self.sent_bytes = 0
        self._width, self._dtype, self._device = width, dtype, device
        self._spare: list[torch.Tensor] = []  # flat, of `dtype`
        self._hidden: dict[int, Message] = {}
        self._tokens: dict[int, tuple[int, Message]] = {}
        self._sent: deque[Message] = deque()
        self._max_sent = 1

    def begin(self, num_batches: int) -> None:
        """Start a block of `num_batches` GPU batches."""
        self._max_sent = math.ceil(num_batches / min(self.groups, num_batches))

    def _buffer(self, rows: int) -> torch.Tensor:
        """Return an uninitialized buffer of at least rows * width elements."""
        size = rows * self._width
        buffer = self._spare.pop() if self._spare else None
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer

    def receive_hidden(self, batch: int, rows: int) -> None:
        """Start to receive the hidden states of a batch from the previous rank."""
        buffer = self._buffer(rows)[: rows * self._width]
        self._hidden[batch] = self._pipeline.receive(self.stage.rank - 1, HIDDEN, buffer)

    def take_hidden(self, batch: int, into: torch.Tensor) -> None:
        """Wait for the hidden states of a batch and copy them to `into` [rows, width]."""
        received = self._hidden.pop(batch).wait()
        into.copy_(received.view_as(into))
        self._spare.append(received)

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Copy the hidden states [rows, width] of a batch and start to send them to the next rank.
        """
        while len(self._sent) >= self._max_sent:
            self._spare.append(self._sent.popleft().wait())
        buffer = self._buffer(len(hidden))[: hidden.numel()]
        buffer.view_as(hidden).copy_(hidden)
        self._sent.append(self._pipeline.send(self.stage.rank + 1, HIDDEN, buffer))
        self.sent_bytes += buffer.nbytes

    def receive_tokens(self, batch: int, forward_pass: int, shape: tuple[int, int]) -> None:
        """Start to receive the sampler's output for a batch from the last rank: float64 [shape]."""
        buffer = torch.empty(shape, dtype=torch.float64)
        self._tokens[batch] = forward_pass, self._pipeline.receive(
            self._pipeline.last, TOKENS, buffer)

    def take_tokens(self, batch: int, forward_pass: int) -> torch.Tensor | None:
        """Wait for the sampler's output of a forward pass; None if no receive was started for it.
        """
        awaited, message = self._tokens.get(batch, (None, None))
        if message is None or awaited != forward_pass:
            return None
        del self._tokens[batch]
        return message.wait()

    def pending_tokens(self) -> list[tuple[int, int]]:
        """Return (batch, forward pass) of all tokens to receive that have not been taken."""
        return [(batch, forward_pass) for batch, (forward_pass, _) in self._tokens.items()]

    def send_tokens(self, tokens: torch.Tensor) -> None:
        """Start to send the sampler's output for a batch to all other ranks."""
        for rank in range(self._pipeline.last):
            # Nothing waits for these sends: their receivers are ready.
            self._pipeline.send(rank, TOKENS, tokens)
            self.sent_bytes += tokens.nbytes

    def finish_sends(self) -> None:
        """Wait until all sends are received, at the end of a block."""
        while self._sent:
            self._spare.append(self._sent.popleft().wait())
