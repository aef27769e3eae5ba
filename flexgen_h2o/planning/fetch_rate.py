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
from flexgen_h2o.planning.clock import LEAST_SECONDS
from flexgen_h2o.storage.tiers import Device
from flexgen_h2o.storage.transfer import Transfers

KV_HEADS, WIDTH, SLOTS = 32, 8, 16
"""Of a cache whose bytes are few beside what else a fetch takes."""

SEQUENCES = (1, 33)
"""Of two caches, whose difference tells what each sequence takes."""

ROUNDS = 6
"""Times `WRITE_BACK_TOKENS` steps."""


def fetch_rates(device: Device, file: Path) -> tuple[float, float]:
    """`Hardware.fetch_seconds` and `Hardware.fetch_head_seconds`, of all processors together.

    Parameters
    ----------
    device : Device
        Without memory of its own.
    file : Path
        Is written over; large enough for the cache.
    """
    few, many = SEQUENCES
    short, long = (_fetch_seconds(device, file, sequences) for sequences in SEQUENCES)
    each = max((long - short) / (many - few), 0.0)
    return max(short - few * each, LEAST_SECONDS), max(each / KV_HEADS, LEAST_SECONDS)


def _fetch_seconds(device: Device, file: Path, sequences: int) -> float:
    """Seconds of a decode step of one layer."""
    transfers = Transfers(device, links=LinkStats(), trace=Trace(enabled=False))
    try:
        part = FetchedPart(Records(KV_HEADS, WIDTH, torch.bfloat16), 0, sequences,
                           grid=Grid(1, (SLOTS,)), transfers=transfers, path=file)
        part.begin(0, [(sequences, SLOTS)])
        part.load(0, 0, fetch=False)
        part.get(0, 0).zero_()
        part.store(0, 0, None)

        def steps() -> None:
            for step in range(WRITE_BACK_TOKENS):
                part.load(0, 0, fetch=True)
                slots = torch.full((sequences, KV_HEADS), step)
                part.store(0, 0, Changed.read(part.get(0, 0), slots))
            part.settle()

        steps()
        began = time.process_time()
        for _ in range(ROUNDS):
            steps()
        return (time.process_time() - began) / (ROUNDS * WRITE_BACK_TOKENS)
    finally:
        transfers.close()
