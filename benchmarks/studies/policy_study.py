"""Shared by the studies of policies: a table that grows, and presses of kvpress as baselines."""

from __future__ import annotations

import csv
import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.files.rows import append_row, check_header
from flexgen_h2o.files.writing import catch_write_errors, check_writable

INPUT = "input_digest"
"""Column with the `digest` of the input."""


def digest(texts: Sequence[object]) -> str:
    """Return 16 hex digits that identify these texts or tasks."""
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


class GrowingTable:
    """A CSV file of `columns`, whose rows are identified by the columns `key`.

    Parameters
    ----------
    path : str
        Created with the first row.
    columns, key : sequence of str
    common : mapping
        Columns that all new rows share.

    Raises
    ------
    UserError
        The file cannot be written or has other columns.
    """

    def __init__(self, path: str, columns: Sequence[str], key: Sequence[str], common: Mapping):
        check_writable("--csv", path)
        check_header(path, columns, flag="--csv")
        self._path, self._columns, self._key = Path(path), tuple(columns), tuple(key)
        self._common = dict(common)

    def find(self, **row) -> dict[str, str] | None:
        """Return the row with this key, or None."""
        if not os.path.exists(self._path):
            return None
        values = {name: str((self._common | row).get(name, "")) for name in self._key}
        with self._path.open(newline="", encoding="utf-8") as file:
            return next((old for old in csv.DictReader(file)
                         if all(old[name] == values[name] for name in self._key)), None)

    def add(self, **row) -> None:
        """Append a row. Raises `UserError`."""
        with catch_write_errors("--csv", str(self._path)):
            append_row(self._path, self._columns, self._common | row, flag="--csv")


try:
    import kvpress
except ImportError:
    kvpress = None

SNAP_WINDOW = 32
"""Observation window of SnapKV for prompts."""
INTERVAL = 8
"""Decode steps between evictions of kvpress, whose mean cache size is the budget."""
DECODE_WINDOW = 7
"""Observation window of SnapKV while decoding."""


@dataclass(frozen=True)
class Rival:
    """A policy of this engine, or a press of kvpress."""

    system: str
    name: str
    press: str = ""
    adaptive: bool = False


PRESSES = [Rival("kvpress", name, name + "Press") for name in (
    "ObservedAttention", "SnapKV", "KeyDiff", "TOVA", "ExpectedAttention")]
ADAPTIVE = [Rival("kvpress", f"AdaKV on {one.name}", one.press, adaptive=True)
            for one in PRESSES if one.name in ("SnapKV", "ExpectedAttention")]
ALL_PRESSES = {one.name: one for one in [*PRESSES, *ADAPTIVE]}
"""By name."""
OURS = [Rival("flexgen_h2o", name) for name in ("sum", "mean", "caote")]
RECALL = Rival("flexgen_h2o", "recall")
"""Recall attends to as many tokens as the others keep."""


def systems(part: str) -> list[Rival]:
    """Return the systems of a part, without kvpress if it is not installed."""
    ours = OURS if part == "cut" else [*OURS, RECALL]
    if kvpress is None:
        logging.warning("kvpress is not installed: its rows are left out")
        return ours
    return [*ours, *PRESSES, *(ADAPTIVE if part == "cut" else [])]


def scored(folder: str, ids: torch.Tensor, prompt: int, h2o: H2OConfig | None
           ) -> tuple[torch.Tensor, float]:
    """Return log-probabilities [articles, tokens] after the prompts by this engine, and seconds."""
    with LLM(folder, h2o=h2o, dtype="float32", progress=False,
             policy=Policy(gpu_batch_size=len(ids))) as llm:
        began = time.perf_counter()
        scores = llm.loglikelihood([(row[:prompt], row[prompt:]) for row in ids.tolist()])
        return torch.tensor(scores), time.perf_counter() - began


def make_press(rival: Rival, part: str, keep: int, prompt: int):
    """Return a press that keeps `keep` of `prompt` tokens; part `decode` evicts later ones, too."""

    def press(ratio: float, queries: int):
        options = {"window_size": queries} if rival.name.endswith("SnapKV") else {}
        press_of_rival = getattr(kvpress, rival.press)(compression_ratio=ratio, **options)
        return kvpress.AdaKVPress(press_of_rival) if rival.adaptive else press_of_rival

    cut = press(1 - (keep + 0.5) / prompt, SNAP_WINDOW if keep > SNAP_WINDOW else keep // 2)
    if part == "cut":
        return cut
    decoding = kvpress.DecodingPress(press(0.0, DECODE_WINDOW), compression_interval=INTERVAL,
                                     target_size=keep - INTERVAL // 2)
    return kvpress.PrefillDecodingPress(prefilling_press=cut, decoding_press=decoding)


def attention_of(model, rival: Rival) -> None:
    """Select the attention implementation; ObservedAttention needs attention weights."""
    model.set_attn_implementation("eager" if rival.name == "ObservedAttention" else "sdpa")


def pressed(press, model, ids: torch.Tensor, prompt: int, *, steps: bool
            ) -> tuple[torch.Tensor, int]:
    """Return logits [articles, tokens, vocabulary] after the prompts, and bytes of the cut cache.

    With `steps` there is a forward pass for each token, else one for all.
    """
    parts, cache, width = [], DynamicCache(), 1 if steps else ids.shape[1]
    with press(model):
        logits = model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1).logits
        nbytes = cache_bytes(cache)
        parts.append(logits)
        for at in range(prompt, ids.shape[1] - 1, width):
            end = min(at + width, ids.shape[1] - 1)
            parts.append(model(ids[:, at:end], past_key_values=cache,
                               position_ids=torch.arange(at, end)[None]).logits)
    return torch.cat(parts, 1), nbytes


def cache_bytes(cache: DynamicCache) -> int:
    """Return the bytes of keys and values."""
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def chosen(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of tokens [articles, n]."""
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def kept(percent: float, prompt: int) -> int:
    """Return the number of kept tokens of a prompt, half of them heavy hitters."""
    return 2 * max(1, int(percent / 200 * prompt + 1e-9))
