"""What no system can be faster than: bytes over measured bandwidth, FLOPs over measured rates."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.planning.rows import CacheOptions, WeightOptions

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Load:
    """What is asked of a system: sequences, mean lengths in tokens, and how it keeps things.

    `cached` is tokens of each sequence that a decode step attends to, on average.
    """

    batch: int
    prompt_len: float
    gen_len: int
    cached: float
    itemsize: int = 2
    weight_bits: int = 16
    cache_bits: int = 16


@dataclass(frozen=True)
class Work:
    """What a load comes to.

    Attributes
    ----------
    all_bytes, weight_bytes : int
        Of all weights at rest, and of those that a decode step reads: layers and head.
    cache_bytes : float
        That a decode step reads.
    step_flops, prefill_flops : float
        Of a decode step and of the prefill, attention included.
    """

    all_bytes: int
    weight_bytes: int
    cache_bytes: float
    step_flops: float
    prefill_flops: float


def work(model: ModelConfig, load: Load) -> Work:
    """Bytes and FLOPs of a load."""
    matrices = model.num_layers * model.layer_parameters()
    head = model.vocab_size * model.embed_dim
    options, attention = WeightOptions(load.weight_bits), 4 * model.num_layers * model.q_size
    layers = model.num_layers * options.part_bytes(model.layer_shapes(), load.itemsize)
    ends = sum(options.part_bytes(part, load.itemsize)
               for part in (model.embed_shapes(), model.head_shapes()))
    record = model.num_layers * CacheOptions(bits=load.cache_bits).record_bytes(
        model, load.itemsize)
    return Work(
        all_bytes=layers + ends,
        weight_bytes=layers + options.matrix_bytes((model.vocab_size, model.embed_dim),
                                                   load.itemsize),
        cache_bytes=load.batch * load.cached * record,
        step_flops=load.batch * (2 * (matrices + head) + attention * load.cached),
        prefill_flops=load.batch * load.prompt_len * (
            2 * matrices + attention * load.prompt_len / 2) + 2 * load.batch * head,
    )


def floors(work: Work, rates: dict[str, float], memory: int | None) -> tuple[float, float]:
    """Seconds of the prefill and of a decode step.

    Parameters
    ----------
    work : Work
    rates : dict
        Bytes per second of `disk` and `memory`, FLOP per second of `gemm`.
    memory : int or None
        Bytes that the system may use. Of weights that exceed it, the rest is read from disk again
        for every sweep over the layers; and then so is what the cache takes from their place.
    """
    beyond = 0 if memory is None else max(0, work.weight_bytes - memory)
    swept = beyond + work.cache_bytes if beyond else 0
    prefill = max(work.prefill_flops / rates["gemm"], beyond / rates["disk"])
    step = max(work.step_flops / rates["gemm"], swept / rates["disk"],
               (work.weight_bytes + work.cache_bytes) / rates["memory"])
    return prefill, step


def measure_rates(file: str, dtype: str) -> dict[str, float]:
    """This machine's rates, measured now, in `floors`' units. Loads torch.

    `file` is a large one on the disk that counts; `dtype` is that of products.
    """
    from pathlib import Path

    import torch

    from flexgen_h2o.storage.links import disk_read_rate, gemm_rate, memory_read_rate

    number = getattr(torch, dtype)
    return {"disk": disk_read_rate(Path(file)), "memory": memory_read_rate(),
            "gemm": max(gemm_rate(256, number), gemm_rate(2048, number))}
