"""The requests of one call on their way through blocks, one block after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flexgen_h2o.config.workload import Workload
from flexgen_h2o.engine.batch import Request
from flexgen_h2o.engine.block_queue import BlockQueue
from flexgen_h2o.engine.call_work import CallWork
from flexgen_h2o.engine.progress import RunBars
from flexgen_h2o.engine.runner import Runner
from flexgen_h2o.engine.workspace import Workspace, WorkspaceSize
from flexgen_h2o.errors import TooLittleMemory, UserError
from flexgen_h2o.storage.tiers import lacks_memory

_log = logging.getLogger(__name__)


class BlockRun:
    """Runs requests block by block, in a workspace that is its own until `end`.

    Parameters
    ----------
    runtime : Runner
    work : CallWork
    shares : bool
        A batch computes equal prompts once.

    Attributes
    ----------
    stats : RunStats
        The figures of the blocks so far; tokens are those of requests that have ended.
    """

    def __init__(self, runtime: Runner, work: CallWork, *, shares: bool):
        self._runtime, self._sink = runtime, work.sink
        self._queue: BlockQueue | None = runtime.queue(work.requests, work.new, shares=shares)
        self._planned = work.planned
        self.stats = runtime.new_stats()
        self._workspace: Workspace | None = None
        self._bars: RunBars | None = None
        self._halved = self._began = False

    @property
    def done(self) -> bool:
        """True if all blocks have been run. Of a run that was ended before, it never is."""
        return self._queue is not None and not self._queue.left

    def step(self, enter: Callable[[WorkspaceSize, Workload], Workspace]) -> list[Request]:
        """Run the next block. Returns the requests that have ended with it.

        The first block asks `enter` for a workspace. One for which memory can't be had is run
        again from its beginning with half the sequences, and so are those after it; results do not
        depend on that. Whatever else goes wrong closes the workspace.

        Raises
        ------
        UserError
            There is no memory even for one sequence, or `enter` refuses the first workspace.
        """
        while True:
            try:
                return self._run_block(enter)
            except BaseException as error:
                self._close()  # work may be under way in the workspace, and its state is unknown
                refused = self._halved and isinstance(error, UserError) and not self._began
                if not (refused or lacks_memory(error)):
                    self.end()
                    raise
                if self._runtime.seat is not None:  # the other ranks are in the middle of the block
                    self.end()
                    raise UserError(f"out of memory ({_line(error)}): use smaller batches, or "
                                    "slower tiers") from error
                self._halve(error)

    def _run_block(self, enter: Callable[[WorkspaceSize, Workload], Workspace]) -> list[Request]:
        self._began = False
        if self._workspace is None:
            self._workspace = enter(*self._largest())
        self._began = True
        self._bars = self._bars or self._runtime.bars()
        block = self._queue.next()
        stats = self._runtime.run(self._workspace, block, self._sink, bars=self._bars)
        self.stats = self.stats.followed_by(stats)
        return [request for batch in block for request in batch.requests if request.finish_reason]

    def _halve(self, error: BaseException) -> None:
        """Begin the block anew with half the sequences, on account of an error."""
        text = _line(error) or "out of memory"
        requests = self._queue.halve()
        if requests is None:
            self.end()
            raise TooLittleMemory(f"there is too little memory for one sequence alone ({text}): "
                                  "use shorter prompts, fewer new tokens, or slower tiers"
                                  ) from error
        for request in requests:
            request.restart()
            self._sink.restart(request)
        self._halved = True
        size = self._queue.size
        _log.warning("too little memory (%s): trying again with blocks of %d x %d sequences", text,
                     size.gpu_batch_size, size.num_gpu_batches)

    def _largest(self) -> tuple[WorkspaceSize, Workload]:
        """Sizes that hold every block."""
        settings = self._runtime.settings
        size = WorkspaceSize.of(self._queue, settings.cache.h2o, self._runtime.own.num_layers)
        return size, Workload(
            prompt_len=self._queue.longest, gen_len=self._planned,
            gpu_batch_size=size.cache.sequences, num_gpu_batches=size.cache.batches)

    def leave(self) -> Workspace | None:
        """End, but give the workspace to the caller."""
        workspace, self._workspace = self._workspace, None
        self.end()
        return workspace

    def end(self) -> None:
        """Close what is open; a second call does nothing."""
        self._queue = None
        if self._bars is not None:
            self._bars.close()
        self._close()

    def _close(self) -> None:
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
