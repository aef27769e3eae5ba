"""A file of rows that grows from run to run: those that it has are known again."""

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
from flexgen_h2o.files.writing import check_writable, writing

INPUT = "input_digest"
"""The column with the `digest` of what the rows were made of."""


def digest(texts: Sequence[object]) -> str:
    """16 hex digits that stand for these texts, or for tasks made of them."""
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


class GrowingTable:
    """A CSV file of `columns`, of which those of `key` say which row it is.

    Parameters
    ----------
    path : str
        Made with the first row if it is not there.
    columns, key : sequence of str
    common : mapping
        Columns that all new rows share.

    Raises
    ------
    UserError
        It cannot be written, or has other columns.
    """

    def __init__(self, path: str, columns: Sequence[str], key: Sequence[str], common: Mapping):
        check_writable("--csv", path)
        check_header(path, columns, flag="--csv")
        self._path, self._columns, self._key = Path(path), tuple(columns), tuple(key)
        self._common = dict(common)

    def find(self, **row) -> dict[str, str] | None:
        """The file's row of this key, None if it has none."""
        if not os.path.exists(self._path):
            return None
        wanted = {name: str((self._common | row).get(name, "")) for name in self._key}
        with self._path.open(newline="", encoding="utf-8") as file:
            return next((old for old in csv.DictReader(file)
                         if all(old[name] == wanted[name] for name in self._key)), None)

    def add(self, **row) -> None:
        """Write a row. `UserError` if it cannot be written."""
        with writing("--csv", str(self._path)):
            append_row(self._path, self._columns, self._common | row, flag="--csv")


try:
    import kvpress
except ImportError:
    kvpress = None

SNAP_WINDOW = 32
"""Queries that SnapKV looks at when a prompt is cut."""
INTERVAL = 8
"""Steps after each of which kvpress evicts while decoding: of the sizes in between, the mean is the
budget."""
FEWEST = 7
"""Queries that SnapKV looks at while decoding, fewer than it is handed."""


@dataclass(frozen=True)
class Rival:
    """A way to keep less: an engine's policy, or a press of kvpress."""

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
"""Evicts nothing: of its cache as many tokens as others keep are attended to."""


def systems(part: str) -> list[Rival]:
    """Those of a part; of kvpress none where it is not installed."""
    ours = OURS if part == "cut" else [*OURS, RECALL]
    if kvpress is None:
        logging.warning("kvpress is not installed: its rows are left out")
        return ours
    return [*ours, *PRESSES, *(ADAPTIVE if part == "cut" else [])]


def scored(folder: str, ids: torch.Tensor, prompt: int, h2o: H2OConfig | None
           ) -> tuple[torch.Tensor, float]:
    """Log-probabilities [articles, tokens] of what follows the prompts by this engine, and the
    seconds that it took, with the prompts."""
    with LLM(folder, h2o=h2o, dtype="float32", progress=False,
             policy=Policy(gpu_batch_size=len(ids))) as llm:
        began = time.perf_counter()
        found = llm.loglikelihood([(row[:prompt], row[prompt:]) for row in ids.tolist()])
        return torch.tensor(found), time.perf_counter() - began


def make_press(one: Rival, part: str, keep: int, prompt: int):
    """A press that leaves `keep` of `prompt` tokens, and evicts later ones too in part `decode`."""

    def press(ratio: float, queries: int):
        options = {"window_size": queries} if one.name.endswith("SnapKV") else {}
        made = getattr(kvpress, one.press)(compression_ratio=ratio, **options)
        return kvpress.AdaKVPress(made) if one.adaptive else made

    cut = press(1 - (keep + 0.5) / prompt, SNAP_WINDOW if keep > SNAP_WINDOW else keep // 2)
    if part == "cut":
        return cut
    decoding = kvpress.DecodingPress(press(0.0, FEWEST), compression_interval=INTERVAL,
                                     target_size=keep - INTERVAL // 2)
    return kvpress.PrefillDecodingPress(prefilling_press=cut, decoding_press=decoding)


def attention_of(model, one: Rival) -> None:
    """Weights have to be seen for the attention that was observed."""
    model.set_attn_implementation("eager" if one.name == "ObservedAttention" else "sdpa")


def pressed(made, model, ids: torch.Tensor, prompt: int, *, steps: bool
            ) -> tuple[torch.Tensor, int]:
    """Logits [articles, tokens, vocabulary] of what follows the prompts under a press of kvpress on
    transformers, and bytes of keys and values after the prompts were cut; a forward pass for each
    token, or one for all."""
    found, cache, width = [], DynamicCache(), 1 if steps else ids.shape[1]
    with made(model):
        logits = model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1).logits
        nbytes = cache_bytes(cache)
        found.append(logits)
        for at in range(prompt, ids.shape[1] - 1, width):
            end = min(at + width, ids.shape[1] - 1)
            found.append(model(ids[:, at:end], past_key_values=cache,
                               position_ids=torch.arange(at, end)[None]).logits)
    return torch.cat(found, 1), nbytes


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of keys and values."""
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def chosen(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of tokens [articles, n]."""
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def kept(percent: float, prompt: int) -> int:
    """Tokens kept of a prompt of so many, half of them heavy hitters."""
    return 2 * max(1, int(percent / 200 * prompt + 1e-9))
