"""This engine and NVIDIA's kvpress over the same articles with as many tokens kept."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from flexgen_h2o import LLM, H2OConfig
from flexgen_h2o import Policy as RunPolicy

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
class System:
    """A way to keep less: an engine's policy, or a press of kvpress."""

    system: str
    name: str
    press: str = ""
    adaptive: bool = False


SUM = System("flexgen_h2o", "sum")
OURS = [SUM, System("flexgen_h2o", "mean"), System("flexgen_h2o", "caote")]
PRESSES = [System("kvpress", name, name + "Press") for name in (
    "ObservedAttention", "SnapKV", "KeyDiff", "TOVA", "ExpectedAttention")]
ADAPTIVE = [System("kvpress", f"AdaKV on {one.name}", one.press, adaptive=True)
            for one in PRESSES if one.name in ("SnapKV", "ExpectedAttention")]


@dataclass(frozen=True)
class Measured:
    """Log-probabilities [articles, tokens], seconds, and bytes of keys and values after the prompts
    were cut."""

    log_probs: torch.Tensor
    seconds: float
    nbytes: int


def systems(part: str) -> list[System]:
    """Those of a part; of kvpress none where it is not installed."""
    if kvpress is None:
        logging.warning("kvpress is not installed: its rows are left out")
        return OURS
    return [*OURS, *PRESSES, *(ADAPTIVE if part == "cut" else [])]


def full_cache(folder: str, ids: torch.Tensor, prompt: int) -> Measured:
    """This engine with everything cached, a step for each token."""
    return engine(folder, None, ids, prompt)


def measure(one: System, part: str, folder: str, model, ids: torch.Tensor, prompt: int,  # noqa: PLR0913, PLR0917, E501
            keep: int) -> Measured:
    """A system with `keep` tokens of each prompt."""
    if one.system == "kvpress":
        return pressed(one, part, model, ids, prompt, keep)
    h2o = H2OConfig(heavy_tokens=keep // 2, recent_tokens=keep - keep // 2, score=one.name,
                    evict_generated=part == "decode")
    return engine(folder, h2o, ids, prompt)


def engine(folder: str, h2o: H2OConfig | None, ids: torch.Tensor, prompt: int) -> Measured:
    """This engine: articles together."""
    pairs = [(row[:prompt], row[prompt:]) for row in ids.tolist()]
    with LLM(folder, h2o=h2o, dtype="float32", progress=False,
             policy=RunPolicy(gpu_batch_size=len(pairs))) as llm:
        began = time.perf_counter()
        found = llm.loglikelihood(pairs)
        seconds = time.perf_counter() - began
        return Measured(torch.tensor(found), seconds, llm.stats.kv_cache_bytes)


def make_press(one: System, part: str, keep: int, prompt: int):
    """A press that leaves `keep` of `prompt` tokens, and of later ones too if decoding is pressed."""
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


def attention_of(model, one: System) -> None:
    """Weights have to be seen for the attention that was observed."""
    model.set_attn_implementation("eager" if one.name == "ObservedAttention" else "sdpa")


def pressed(one: System, part: str, model, ids: torch.Tensor, prompt: int, keep: int  # noqa: PLR0913, PLR0917, E501
            ) -> Measured:
    """kvpress on transformers: articles together, a forward pass for each token where decoding is
    pressed."""
    attention_of(model, one)
    began, found = time.perf_counter(), []
    cache = DynamicCache()
    with make_press(one, part, keep, prompt)(model):
        logits = model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1).logits
        nbytes = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        found.append(chosen(logits, ids[:, prompt : prompt + 1]))
        for at in range(prompt, ids.shape[1] - 1):
            logits = model(ids[:, at : at + 1], past_key_values=cache,
                           position_ids=torch.tensor([[at]])).logits
            found.append(chosen(logits, ids[:, at + 1 : at + 2]))
    return Measured(torch.cat(found, 1), time.perf_counter() - began, nbytes)


def chosen(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of tokens [articles, n]."""
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
