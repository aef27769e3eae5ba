"""The runs of an `LLM` that are open, and the workspaces that ended ones have left."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from flexgen_h2o.config.workload import Workload
from flexgen_h2o.engine.batch import Request
from flexgen_h2o.engine.block_run import BlockRun
from flexgen_h2o.engine.call_work import CallWork
from flexgen_h2o.engine.orders import Orders, Step
from flexgen_h2o.engine.runner import Runner
from flexgen_h2o.engine.sinks import Scoring
from flexgen_h2o.engine.workspace import Workspace, WorkspaceSize


class BlockRuns:
    """Begins and ends runs, and runs their blocks on all ranks.

    A run takes a workspace with its first block: one that another run has left, if it is large
    enough.

    Parameters
    ----------
    orders : Orders
    """

    def __init__(self, orders: Orders):
        self._orders = orders
        self._open: weakref.WeakSet[BlockRun] = weakref.WeakSet()
        self._spares: list[Workspace] = []  # of runs that have ended

    def begin(self, runtime: Runner, work: CallWork) -> BlockRun:
        """A run of all the requests of a call."""
        run = BlockRun(runtime, work, shares=not isinstance(work.sink, Scoring))
        self._open.add(run)
        return run

    def step(self, run: BlockRun, runtime: Runner, refuse: Callable[[Workload], None]
             ) -> list[Request]:
        """Run the next block of a run, on all ranks. Returns what has ended with it.

        Parameters
        ----------
        run : BlockRun
        runtime : Runner
            Makes a workspace if none is left that is large enough.
        refuse : callable
            Raises `TooLittleMemory` if there is no room for a new workspace.

        Raises
        ------
        UserError
            As of `BlockRun.step`; or another run has been begun on several ranks.
        """
        self._orders.give(Step(), run)
        with self._orders.working():
            return run.step(partial(self._enter, runtime, refuse))

    def _enter(self, runtime: Runner, refuse: Callable[[Workload], None], size: WorkspaceSize,
               workload: Workload) -> Workspace:
        """The room for a run: one that is there if it is large enough, else a new one."""
        found = next((spare for spare in self._spares if spare.size.covers(size)), None)
        if found is not None:
            self._spares.remove(found)
        self.free()  # what is left of several runs would only take memory
        # Other ranks may have a room where this one has none.
        self._orders.agree_to_fit(lambda: None if found is not None else refuse(workload))
        return runtime.workspace(size) if found is None else found

    def leave(self, run: BlockRun) -> None:
        """End a run, and keep its workspace for another."""
        workspace = run.leave()
        if workspace is not None:
            self._spares.append(workspace)

    def free(self) -> None:
        """Close the workspaces that no run is in."""
        while self._spares:
            self._spares.pop().close()

    def close(self) -> None:
        """End all runs, and close all workspaces."""
        for run in self._open:
            run.end()
        self.free()
