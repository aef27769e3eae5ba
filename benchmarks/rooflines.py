"""Rooflines: bytes over measured bandwidth, FLOPs over the measured matmul rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.quantization import weight_options
from flexgen_h2o.models.registry import published_quantization
from flexgen_h2o.planning.planned_run import bytes_at_rest, kv_entry_bytes

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Load:
    """The workload of a system: batch size, mean lengths in tokens, and number formats.

    `cached` is the mean number of tokens that a decode step attends to in each sequence.
    """

    batch: int
    prompt_len: float
    gen_len: int
    cached: float
    itemsize: int = 2
    weight_bits: int = 16
    cache_bits: int = 16


@dataclass(frozen=True)
class WorkAmount:
    """Bytes and FLOPs of a workload."""

    # All weights at rest; weights that a decode step reads (layers and head).
    all_bytes: int
    weight_bytes: int
    cache_bytes: float  # cache that a decode step reads
    # FLOPs of a decode step and of the prefill, attention included.
    step_flops: float
    prefill_flops: float


def work(model: ModelConfig, load: Load) -> WorkAmount:
    """Return the bytes and FLOPs of a workload. A published shape has its checkpoint's format."""
    experts, mixed, touched = model.experts, model.expert_layers, 0.0
    matrices = model.over_layers(lambda layer: layer.parameters)
    if experts is not None:
        matrices += mixed * experts.per_token * model.expert_shapes().parameters
        touched = experts.touched(load.batch)
    head = model.vocab_size * model.embed_dim
    stored, attention = published_quantization(model.name), 4 * model.num_layers * model.q_size
    options = weight_options(WeightOptions(), load.weight_bits, model, stored, on_gpu=False)
    layers = model.over_layers(partial(bytes_at_rest, options, itemsize=load.itemsize))
    expert = 0 if experts is None else mixed * bytes_at_rest(
        options, model.expert_shapes(), load.itemsize)
    ends = sum(bytes_at_rest(options, unit, load.itemsize)
               for unit in (model.embed_shapes(), model.head_shapes()))
    record = model.num_layers * kv_entry_bytes(
        CacheOptions(bits=load.cache_bits), model, load.itemsize)
    return WorkAmount(
        all_bytes=layers + ends + (0 if experts is None else experts.count * expert),
        weight_bytes=layers + int(touched * expert) + options.matrix_bytes(
            (model.vocab_size, model.embed_dim), load.itemsize),
        cache_bytes=load.batch * load.cached * record,
        step_flops=load.batch * (2 * (matrices + head) + attention * load.cached),
        prefill_flops=load.batch * load.prompt_len * (
            2 * matrices + attention * load.prompt_len / 2) + 2 * load.batch * head,
    )


def rooflines(work: WorkAmount, rates: Mapping[str, float], memory: int | None,
              device_memory: int | None = None) -> tuple[float, float]:
    """Return the least seconds of the prefill and of a decode step.

    Parameters
    ----------
    rates : dict
        Bytes per second of `disk`, of the compute device's `memory` and, with a GPU, of the `link`
        from host memory; FLOP per second of `gemm`.
    memory, device_memory : int or None
        Bytes of host and GPU memory that the system may use; None for all. Weights beyond both are
        read from disk for each pass over the layers, with the cache that takes their place. Weights
        beyond GPU memory cross the link. The cache need not, as attention can run on the host.
    """
    far = 0 if device_memory is None else max(0, work.weight_bytes - device_memory)
    beyond = 0 if memory is None else max(0, work.weight_bytes - memory - (device_memory or 0))
    swept = beyond + work.cache_bytes if beyond else 0
    linked = far / rates["link"] if far else 0
    prefill = max(work.prefill_flops / rates["gemm"], beyond / rates["disk"], linked)
    step = max(work.step_flops / rates["gemm"], swept / rates["disk"], linked,
               (work.weight_bytes + work.cache_bytes) / rates["memory"])
    return prefill, step


def measure_rates(file: str, dtype: str) -> dict[str, float]:
    """Measure this machine's rates, in the units of `rooflines`. Loads torch.

    `file` is a large file on the disk to measure; `dtype` is that of matmuls. A GPU is used if
    there is one.
    """
    from pathlib import Path

    import torch
    from device_rates import best_gemm_rate, memory_read_rate

    from flexgen_h2o.storage.device import open_device
    from flexgen_h2o.storage.links import copy_rates, disk_read_rate

    device, number = open_device(), getattr(torch, dtype)
    link = {"link": copy_rates(device)[0]} if device.is_gpu else {}
    return {"disk": disk_read_rate(Path(file)), "memory": memory_read_rate(device=device),
            "gemm": max(best_gemm_rate(rows, number, device=device) for rows in (256, 2048)),
            **link}
