"""Calibration: measure this machine's links and compute once, and keep the figures.

They lie under ``hardware`` in the user's cache, in a file for each machine, device, disk and
version of what computes: of this package, of its kernels' build, and of PyTorch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.config.version import VERSION
from flexgen_h2o.config.weight_layout import INTEGER_BITS, WEIGHT_BITS
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.metrics.provenance import cpu_model
from flexgen_h2o.metrics.trace import LINKS
from flexgen_h2o.models.convert import cache_dir
from flexgen_h2o.planning.cache_rates import fetch_rates, recall_rates
from flexgen_h2o.planning.compute_rates import Rates, Sizes
from flexgen_h2o.planning.hardware import (
    RECALL_FIGURES,
    ComputeRates,
    Hardware,
    HostAttentionRates,
    load_hardware,
    save_hardware,
)
from flexgen_h2o.storage.disk import RunFolder
from flexgen_h2o.storage.free_memory import nearest_folder, whole_memory
from flexgen_h2o.storage.links import copy_rates, disk_read_rate, disk_write_rate
from flexgen_h2o.storage.tiers import Device

Note = Callable[[str], object]

_FORMAT = 6  # raise it when figures change their meaning: what was kept is then measured anew
_DIGITS = 4  # a measurement has no more

_log = logging.getLogger(__name__)


def load_or_calibrate(device: Device, offload_dir: str | os.PathLike, *, recalibrate: bool = False,
            progress: Note) -> Hardware:
    """This machine: as an earlier call has measured it, else measured now and kept.

    Parameters
    ----------
    device : Device
        That computes.
    offload_dir : path
        On the disk that runs write to; made if a file is to be written there.
    recalibrate : bool
        Measure in any case.
    progress : callable
        Gets a few words on each thing that is about to be measured.

    Raises
    ------
    UserError
        The disk cannot be measured.
    """
    path = _file(device, offload_dir)
    if not recalibrate:
        try:
            if (found := load_calibration(device, offload_dir)) is not None:
                return found
        except UserError as error:
            _log.warning("measuring this machine anew: %s", error)
    hardware = calibrate(device, offload_dir, progress=progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_hardware(hardware, path)
    except OSError as error:
        _log.warning("the next run must measure this machine again: cannot write %s (%s)", path,
                     error.strerror)
    return hardware


def load_calibration(device: Device, offload_dir: str | os.PathLike) -> Hardware | None:
    """This machine as an earlier call of `machine` has measured it; None if none has.

    Raises `UserError` for a file of its figures that is damaged.
    """
    path = _file(device, offload_dir)
    # A container may have another limit on its memory by now.
    return (replace(load_hardware(path), **_memory(device, offload_dir)) if os.path.exists(path)
            else None)


def measured_dtype(device: Device) -> torch.dtype:
    """The dtype in which a device is measured: the engine's default."""
    return torch.float16 if device.torch.type == "cuda" else torch.bfloat16


@torch.inference_mode()
def calibrate(device: Device, offload_dir: str | os.PathLike, *, progress: Note,
              sizes: Sizes | None = None) -> Hardware:
    """Measure this machine through the engine's own operations, in its default dtype.

    It takes about half a minute, at most 2.5 GB of memory on a CPU, and a scratch file of
    `sizes.scratch` bytes that is gone afterwards. Parameters and errors are those of `machine`;
    `sizes` None are those that suit the device.
    """
    sizes = sizes or Sizes.of(device)
    dtype = measured_dtype(device)
    rates = Rates(device, dtype, sizes)
    links, beside = _links(rates, device, offload_dir, progress)
    compute = _compute(rates, progress)
    host_attention = None
    if device.separate:
        progress("attention on the host")
        host_attention = HostAttentionRates(*_decode_attention(Rates(Device(), dtype, sizes)))
    progress("recall")
    recall = recall_rates(host_attention or compute, dtype, sizes)
    recall = replace(recall, **{name: _figure(getattr(recall, name)) for name in RECALL_FIGURES})
    return Hardware(name=_name(device), links=links, compute=compute, recall=recall,
                    host_attention=host_attention, **beside, **_memory(device, offload_dir))


def _links(rates: Rates, device: Device, offload_dir: str | os.PathLike, progress: Note
           ) -> tuple[dict[str, float], dict[str, float]]:
    """`Hardware.links`, and the fields of `Hardware` that say what transfers take of compute."""
    progress("disk")
    sizes = rates.sizes
    with contextlib.closing(RunFolder(offload_dir)) as folder:
        scratch = folder.file("calibration.bin", sizes.scratch)
        # Written first: what is read must be no hole in the file.
        written = disk_write_rate(scratch, nbytes=sizes.scratch)
        found = (disk_read_rate(scratch, nbytes=sizes.scratch), written)
        progress("disk and products at once")
        names = ("interference", "read_interference")
        beside = dict(zip(names, map(_figure, rates.interference(scratch)), strict=True))
        if not device.separate:
            progress("a cache on disk")
            names = ("fetch_seconds", "fetch_head_seconds")
            beside |= zip(names, map(_figure, fetch_rates(device, scratch)), strict=True)
    if device.separate:
        progress("copies between host and GPU")
        found += copy_rates(device, nbytes=sizes.copied)
    return _figures(dict(zip(LINKS, found, strict=False))), beside


def _compute(rates: Rates, progress: Note) -> ComputeRates:
    linear = {}
    for bits in WEIGHT_BITS:
        progress(f"products with weights of {bits} bits")
        linear[bits] = _figures(rates.linear(bits))
    rounded = {}
    for bits in INTEGER_BITS if rates.rounds_activations else ():
        progress(f"products of rounded activations with weights of {bits} bits")
        rounded[bits] = _figures(rates.linear(bits, activation_bits=8))
    progress("attention")
    plain, scored = (rates.prefill_attention(scored=each) for each in (False, True))
    prefill, query_seconds = (dict(zip(("plain", "scored"), each, strict=True))
                              for each in zip(plain, scored, strict=True))
    decode, head_seconds = _decode_attention(rates)
    progress("a decoder layer, and the choice of tokens")
    bound = rates.captured_layer_seconds()
    return ComputeRates(linear=linear, prefill_attention=_figures(prefill), decode_attention=decode,
                   head_seconds=head_seconds, elementwise=_figure(rates.elementwise()),
                   layer_seconds=_figure(rates.layer_seconds()),
                   captured_layer_seconds=bound and _figure(bound),
                   logit_seconds=_figure(rates.logit_seconds()),
                   query_seconds=_figures(query_seconds), caching=_figures(rates.caching()),
                   implementations=rates.implementations, rounded_linear=rounded)


def _decode_attention(rates: Rates) -> tuple[dict[int, float], float]:
    by_bits, head_seconds = rates.decode_attention()
    return _figures(by_bits), _figure(head_seconds)


def _figures(figures: Mapping[Any, float]) -> dict[Any, float]:
    return {key: _figure(figure) for key, figure in figures.items()}


def _figure(figure: float) -> float:
    """Rounded to the digits that mean something, which a file gives back as they are."""
    return float(f"{figure:.{_DIGITS}g}")


def _memory(device: Device, offload_dir: str | os.PathLike) -> dict[str, int | None]:
    """The fields of `Hardware` that say what the machine has in all."""
    return asdict(whole_memory(offload_dir, device.total_bytes()))


def _name(device: Device) -> str:
    compute = device.description() if device.separate else cpu_model()
    return f"{platform.node()}: {compute}, {torch.get_num_threads()} CPU threads"


def _file(device: Device, offload_dir: str | os.PathLike) -> Path:
    """File of the figures of this machine, named after all that they depend on."""
    parts = (_FORMAT, platform.node(), cpu_model(), os.cpu_count(), torch.get_num_threads(),
             device.description(), torch.__version__, nearest_folder(offload_dir).stat().st_dev,
             VERSION, cpu_library.missing() or (cpu_library.instruction_set(), cpu_library.build()),
             os.environ.get("FLEXGEN_H2O_KERNELS"))
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    host = re.sub(r"[^A-Za-z0-9._-]", "_", platform.node())[:60]
    return cache_dir() / "hardware" / f"{host}-{key}.yaml"
