"""The measured cost of fetching a cache from disk, beside its bytes."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from flexgen_h2o.cache.fetched import FetchedPart
from flexgen_h2o.cache.parts import Changed, Grid, Records
from flexgen_h2o.config.limits import WRITE_BACK_TOKENS
from flexgen_h2o.metrics.links import LinkStats
from flexgen_h2o.metrics.trace import Trace
from flexgen_h2o.storage.tiers import Device
from flexgen_h2o.storage.transfer import Transfers

SEQUENCES, KV_HEADS, WIDTH, SLOTS = 4, 32, 8, 16
"""A cache of few bytes, but with as many places to write to in a step as a model of 1.3 billion
parameters has at batch 4."""

ROUNDS = 8
"""Times `WRITE_BACK_TOKENS` steps."""


def fetch_seconds(device: Device, file: Path) -> float:
    """`Hardware.fetch_seconds`: the time of all processors for a decode step of one layer.

    Parameters
    ----------
    device : Device
        Without memory of its own.
    file : Path
        Is written over; large enough for the cache.
    """
    transfers = Transfers(device, links=LinkStats(), trace=Trace(enabled=False))
    try:
        part = FetchedPart(Records(KV_HEADS, WIDTH, torch.bfloat16), 0, SEQUENCES,
                           grid=Grid(1, (SLOTS,)), transfers=transfers, path=file)
        part.begin(0, [(SEQUENCES, SLOTS)])
        part.load(0, 0, fetch=False)
        part.get(0, 0).zero_()
        part.store(0, 0, None)

        def steps() -> None:
            for step in range(WRITE_BACK_TOKENS):
                part.load(0, 0, fetch=True)
                slots = torch.full((SEQUENCES, KV_HEADS), step)
                part.store(0, 0, Changed.read(part.get(0, 0), slots))
            part.settle()

        steps()
        began = time.process_time()
        for _ in range(ROUNDS):
            steps()
        return (time.process_time() - began) / (ROUNDS * WRITE_BACK_TOKENS)
    finally:
        transfers.close()
