"""Calibration: measure this machine's links and compute once, and cache the figures.

The figures are files in the folder ``hardware`` of the user's cache. There is a file for each
machine, device, disk, version of this package, build of its kernels, and version of PyTorch.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.cache.layout import Capacity, SlotLayout
from flexgen_h2o.cache.tiers import FetchedTier, SlotUpdate
from flexgen_h2o.config.cache_layout import IndexLayout
from flexgen_h2o.config.limits import WRITE_BACK_TOKENS
from flexgen_h2o.config.version import VERSION
from flexgen_h2o.config.weight_layout import INTEGER_BITS, WEIGHT_BITS
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.disk_cache import cache_dir
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import recall as native_recall
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.metrics.provenance import cpu_model
from flexgen_h2o.metrics.trace import LINKS, LinkStats, Trace
from flexgen_h2o.planning.cache_cost import RecalledTokens, fit_recall_rates
from flexgen_h2o.planning.compute_rates import MIN_SECONDS, Rates, Sizes, Timer
from flexgen_h2o.planning.hardware import (
    HOST_LINKS,
    RECALL_RATES,
    ComputeRates,
    Hardware,
    HostAttentionRates,
    RecallRates,
    load_hardware,
    save_hardware,
)
from flexgen_h2o.storage.device import Device, typed
from flexgen_h2o.storage.disk import READ
from flexgen_h2o.storage.free_memory import folders_by_disk, nearest_folder, whole_memory
from flexgen_h2o.storage.links import copy_rates, disk_read_rate, disk_write_rate
from flexgen_h2o.storage.offload_dirs import AnyDirs, AnyPath, OffloadDirs
from flexgen_h2o.storage.run_folder import RunFolder
from flexgen_h2o.storage.transfer import Transfers

ProgressCallback = Callable[[str], object]

_FORMAT = 6  # increment it when the meaning of a figure changes, to measure again
_DIGITS = 4  # significant digits of a measurement

_log = logging.getLogger(__name__)


def load_or_calibrate(device: Device, offload_dir: AnyDirs, *, recalibrate: bool = False,
                      progress: ProgressCallback) -> Hardware:
    """Return the figures of this machine: cached ones, or else measured ones, which are cached.

    Several disks count as one, with files that are spread over them as `by_measured_rates` does.
    Raises `UserError` if a disk cannot be measured.

    Parameters
    ----------
    device : Device
        The device that computes.
    offload_dir : path, sequence of path, or OffloadDirs
        A folder on each disk that runs write to; it is made if missing.
    recalibrate : bool
        Measure again.
    progress : callable
        Gets a description of each measurement before it starts.
    """
    dirs = OffloadDirs.parse(offload_dir)
    machines: list[Hardware] = []
    for folders in folders_by_disk(dirs):
        machines.append(_load_or_calibrate(device, dirs.paths[folders[0]], recalibrate, progress,
                                           other_disk=machines[0] if machines else None))
    return _as_one_disk(dirs, machines)


def _load_or_calibrate(device: Device, offload_dir: AnyPath, recalibrate: bool,
                       progress: ProgressCallback, other_disk: Hardware | None) -> Hardware:
    """Do as `load_or_calibrate` for one disk, given the machine's figures with another disk."""
    path = _calibration_file(device, offload_dir)
    if not recalibrate:
        try:
            if (calibration := load_calibration(device, offload_dir)) is not None:
                with contextlib.suppress(OSError):
                    os.utime(path)  # its last use
                return calibration
        except UserError as error:
            _log.warning("measuring this machine again: %s", error)
    if other_disk is None:
        hardware = calibrate(device, offload_dir, progress=progress)
    else:
        hardware = _with_disk(other_disk, device, offload_dir, progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_hardware(hardware, path)
    except OSError as error:
        _log.warning("the next run must measure this machine again: cannot write %s (%s)", path,
                     error.strerror)
    return hardware


def load_calibration(device: Device, offload_dir: AnyDirs) -> Hardware | None:
    """Return the cached figures of this machine; None if there are none for one of the disks.

    Raises `UserError` if the cached file is damaged.
    """
    dirs = OffloadDirs.parse(offload_dir)
    machines = _cached_by_disk(device, dirs)
    return _as_one_disk(dirs, machines) if machines else None


def _cached_by_disk(device: Device, dirs: OffloadDirs) -> list[Hardware]:
    """Return the cached figures for each of `folders_by_disk`; none if one of them has none."""
    machines = []
    for folders in folders_by_disk(dirs):
        folder = dirs.paths[folders[0]]
        path = _calibration_file(device, folder)
        if not os.path.exists(path):
            return []
        # The memory limit of a container may have changed.
        machines.append(replace(load_hardware(path), **_memory(device, folder)))
    return machines


def by_measured_rates(device: Device, offload_dir: AnyDirs) -> OffloadDirs:
    """Return offload folders with shares in proportion to the cached read rates of their disks.

    Folders on one disk divide its rate. If a disk has not been measured, all folders have equal
    shares.
    """
    dirs = OffloadDirs.parse(offload_dir)
    if dirs.striped:
        with contextlib.suppress(OSError, UserError):  # a damaged file
            if machines := _cached_by_disk(device, dirs):
                return _by_rates(dirs, machines)
    return dirs


def _by_rates(dirs: OffloadDirs, machines: Sequence[Hardware]) -> OffloadDirs:
    rates = [0.0] * len(dirs.paths)
    for folders, machine in zip(folders_by_disk(dirs), machines, strict=True):
        for folder in folders:
            rates[folder] = machine.links[READ] / len(folders)
    return dirs.by_rates(rates)


def _as_one_disk(dirs: OffloadDirs, machines: Sequence[Hardware]) -> Hardware:
    """Return the machine with one disk in place of several that are used by their read rates."""
    dirs = _by_rates(dirs, machines)
    disks = [(machine, dirs.share(folders))
             for folders, machine in zip(folders_by_disk(dirs), machines, strict=True)]
    links = {link: min(machine.links[link] / share for machine, share in disks)
             for link in HOST_LINKS}
    return replace(machines[0], links={**machines[0].links, **links},
                   disk_bytes=min(int(machine.disk_bytes / share) for machine, share in disks))


def measured_hardware(device: Device, offload_dir: AnyDirs, dtype: str) -> Hardware | str:
    """Return the cached figures of this machine, or why there are none for a run in `dtype`."""
    measured = str(measured_dtype(device)).removeprefix("torch.")
    if dtype != measured:
        return f"not known in {dtype}: rates are measured in {measured}"
    try:
        hardware = load_calibration(device, offload_dir)
    except (OSError, UserError) as error:
        return f"not known: {error}"
    return hardware or ("not known: flexgen-h2o plan, with the same --offload-dir, measures this "
                        "machine")


def measured_dtype(device: Device) -> torch.dtype:
    """Return the dtype in which a device is measured: the engine's default."""
    return torch.float16 if device.torch_device.type == "cuda" else torch.bfloat16


@torch.inference_mode()
def calibrate(device: Device, offload_dir: str | os.PathLike, *, progress: ProgressCallback,
              sizes: Sizes | None = None) -> Hardware:
    """Measure this machine with the engine's own operations, in its default dtype.

    It takes about half a minute and at most 2.5 GB of memory on a CPU. A scratch file of
    `sizes.scratch` bytes is removed at the end. Parameters and errors are as in
    `load_or_calibrate`; `sizes` default to those that suit the device.
    """
    sizes = sizes or Sizes.for_device(device)
    dtype = measured_dtype(device)
    rates = Rates(device, dtype, sizes)
    links, slowdowns = _links(rates, device, offload_dir, progress)
    compute = _compute(rates, progress)
    host_attention = None
    if device.is_gpu:
        progress("attention on the host")
        host_attention = HostAttentionRates(*_decode_attention(Rates(Device(), dtype, sizes)))
    progress("recall")
    recall = recall_rates(host_attention or compute, dtype, sizes)
    recall = replace(recall, **{name: _figure(getattr(recall, name)) for name in RECALL_RATES})
    return Hardware(name=_name(device), links=links, compute=compute, recall=recall,
                    host_attention=host_attention, **slowdowns, **_memory(device, offload_dir))


@torch.inference_mode()
def _with_disk(machine: Hardware, device: Device, offload_dir: AnyPath,
               progress: ProgressCallback) -> Hardware:
    """Return a calibrated machine with another disk, of which only the links are measured."""
    rates = Rates(device, measured_dtype(device), Sizes.for_device(device))
    links, slowdowns = _links(rates, device, offload_dir, progress)
    return replace(machine, links=links, **slowdowns, **_memory(device, offload_dir))


def _links(rates: Rates, device: Device, offload_dir: str | os.PathLike, progress: ProgressCallback
           ) -> tuple[dict[str, float], dict[str, Any]]:
    """Return `Hardware.links`, and the fields of `Hardware` that say how transfers slow compute."""
    progress("disk")
    sizes = rates.sizes
    with contextlib.closing(RunFolder(offload_dir)) as folder:
        scratch = folder.file("calibration.bin", sizes.scratch)
        # Write first: a read must not hit a hole in the file.
        written = disk_write_rate(scratch, nbytes=sizes.scratch)
        measured: tuple[float, ...] = (disk_read_rate(scratch, nbytes=sizes.scratch), written)
        progress("disk and matmuls at once")
        names = ("interference", "read_interference")
        slowdowns: dict[str, Any] = dict(
            zip(names, map(_figure, rates.interference(scratch)), strict=True))
        if not device.is_gpu:
            progress("cache on disk")
            names = ("fetch_seconds", "fetch_head_seconds")
            slowdowns |= zip(names, map(_figure, fetch_rates(device, scratch)), strict=True)
    if device.is_gpu:
        progress("copies between host and GPU")
        measured = (*measured, *copy_rates(device, nbytes=sizes.copied))
    return _figures(dict(zip(LINKS, measured, strict=False))), slowdowns


def _compute(rates: Rates, progress: ProgressCallback) -> ComputeRates:
    linear = {}
    for bits in WEIGHT_BITS:
        progress(f"matmuls with {bits}-bit weights")
        linear[bits] = _figures(rates.linear(bits))
    rounded = {}
    for bits in INTEGER_BITS if rates.quantizes_activations else ():
        progress(f"matmuls of quantized activations with {bits}-bit weights")
        rounded[bits] = _figures(rates.linear(bits, activation_bits=8))
    progress("attention")
    plain, scored = (rates.prefill_attention(scored=with_scores) for with_scores in (False, True))
    prefill, query_seconds = (dict(zip(("plain", "scored"), rate, strict=True))
                              for rate in zip(plain, scored, strict=True))
    decode, head_seconds = _decode_attention(rates)
    progress("decoder layer and argmax")
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
    """Round all figures."""
    return {key: _figure(figure) for key, figure in figures.items()}


def _figure(figure: float) -> float:
    """Round to the significant digits of a measurement, which the file preserves."""
    return float(f"{figure:.{_DIGITS}g}")


def _memory(device: Device, offload_dir: str | os.PathLike) -> dict[str, Any]:
    """Return the fields of `Hardware` for the machine's total memory and disk."""
    return asdict(whole_memory(offload_dir, device.total_bytes()))


def _name(device: Device) -> str:
    compute = device.description() if device.is_gpu else cpu_model()
    return f"{platform.node()}: {compute}, {torch.get_num_threads()} CPU threads"


def _calibration_file(device: Device, offload_dir: str | os.PathLike) -> Path:
    """Return the file of this machine's figures, named after all that they depend on."""
    parts = (_FORMAT, platform.node(), cpu_model(), os.cpu_count(), torch.get_num_threads(),
             device.description(), torch.__version__, nearest_folder(offload_dir).stat().st_dev,
             VERSION, cpu_library.missing() or (cpu_library.instruction_set(), cpu_library.build()),
             os.environ.get("FLEXGEN_H2O_KERNELS"))
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    host = re.sub(r"[^A-Za-z0-9._-]", "_", platform.node())[:60]
    return cache_dir() / "hardware" / f"{host}-{key}.yaml"


KV_HEADS, WIDTH, SLOTS = 32, 8, 16
"""Shape of a cache whose fetches are dominated by overhead."""

SEQUENCES = (1, 33)
"""Sequences of two of these caches, whose difference is the overhead per sequence."""

ROUNDS = 6
"""Number of times that `WRITE_BACK_TOKENS` steps are run."""


def fetch_rates(device: Device, file: Path) -> tuple[float, float]:
    """Measure `Hardware.fetch_seconds` and `fetch_head_seconds`: CPU time, all cores together.

    `device`: a device without its own memory. `file`: an existing file that is large enough for the
    cache; it is overwritten.
    """
    few, many = SEQUENCES
    short, long = (_fetch_seconds(device, file, sequences) for sequences in SEQUENCES)
    per_call = max((long - short) / (many - few), 0.0)
    return max(short - few * per_call, MIN_SECONDS), max(per_call / KV_HEADS, MIN_SECONDS)


def _fetch_seconds(device: Device, file: Path, sequences: int) -> float:
    """Return the CPU seconds of a decode step of one layer with a cache on disk."""
    transfers = Transfers(device, links=LinkStats(), trace=Trace(enabled=False))
    try:
        tier = FetchedTier(SlotLayout(KV_HEADS, WIDTH, torch.bfloat16), 0, sequences,
                           capacity=Capacity(1, (SLOTS,)), transfers=transfers, path=file)
        tier.begin(0, [(sequences, SLOTS)])
        tier.load(0, 0, fetch=False)
        tier.get(0, 0).zero_()
        tier.store(0, 0, None)

        def steps() -> None:
            for step in range(WRITE_BACK_TOKENS):
                tier.load(0, 0, fetch=True)
                slots = torch.full((sequences, KV_HEADS), step)
                tier.store(0, 0, SlotUpdate.gather(tier.get(0, 0), slots))
            tier.synchronize()

        steps()
        began = time.process_time()
        for _ in range(ROUNDS):
            steps()
        return (time.process_time() - began) / (ROUNDS * WRITE_BACK_TOKENS)
    finally:
        transfers.close()


GROUP = 4
"""Query heads per KV head."""

MEASURED_INDEX_BITS = 4


@dataclass(frozen=True)
class _RandomCache:
    """A layer's random keys and values, and their key index.

    `slots` are [2, sequences, kv_heads, slots, head_dim], in the engine's memory (huge pages).
    """

    slots: torch.Tensor
    index: torch.Tensor

    @classmethod
    def make(cls, block: torch.Tensor) -> _RandomCache:
        layout = IndexLayout(block.shape[-1], MEASURED_INDEX_BITS)
        _, sequences, kv_heads, tokens, _ = block.shape
        shape = (sequences, kv_heads, layout.tiles(tokens), layout.tile_bytes)
        device = Device()
        slots = typed(device.empty(block.nbytes), 0, block.shape, block.dtype).copy_(block)
        index = typed(device.empty(torch.Size(shape).numel()), 0, shape, torch.uint8)
        native_recall.index_keys(slots[0], index, _spans(sequences, 0, tokens), layout=layout,
                                 key_layout=None)
        return cls(slots, index)

    def capture(self, cached: int, selected: int) -> CapturedCalls:
        """Capture a decode step that selects `selected` of the first `cached` tokens."""
        _, sequences, kv_heads, _, head_dim = self.slots.shape
        layout, calls = IndexLayout(head_dim, MEASURED_INDEX_BITS), CapturedCalls()
        q, k, v = (torch.randn(sequences, heads, head_dim, dtype=self.slots.dtype)
                   for heads in (GROUP * kv_heads, kv_heads, kv_heads))
        metadata = torch.tensor([[cached], [selected]], dtype=torch.int32).repeat(1, sequences)
        slots = native_recall.select_keys(q, k, index=self.index, metadata=metadata, layout=layout,
                                          top_k=selected, capture=calls)
        native_recall.recall_attention(q, k, v, slots=self.slots, selected=slots, metadata=metadata,
                                       layout=None, capture=calls)
        native_recall.index_keys(self.slots[0], self.index, _spans(sequences, cached, 1),
                                 layout=layout, key_layout=None, capture=calls)
        return calls


def _replay_next(steps: Iterator[CapturedCalls]) -> None:
    next(steps).replay()


def _spans(sequences: int, first: int, count: int) -> torch.Tensor:
    return torch.tensor([[first], [first], [count]], dtype=torch.int32).repeat(1, sequences)


def recall_rates(rates: ComputeRates | HostAttentionRates, dtype: torch.dtype, sizes: Sizes
                 ) -> RecallRates:
    """Measure `Hardware.recall` on this machine's CPU.

    `rates`: rates of the CPU's attention over a cache that is read sequentially. `dtype`: data type
    of the cache.

    Returns
    -------
    RecallRates
        The defaults where the C++ kernels are missing.
    """
    if ops.uses_reference("cpu"):
        return RecallRates()
    few, many = sizes.recalled
    kv_heads = max(1, sizes.heads // GROUP)
    block = torch.randn(2, sizes.sequences, kv_heads, many + 1, sizes.head_dim, dtype=dtype)
    count = -(-sizes.rotated // block.nbytes)
    caches = [_RandomCache.make(block) for _ in range(count)]
    timer = Timer(Device(), sizes.seconds)
    heads = sizes.sequences * kv_heads
    record = block[:, 0, 0, 0].nbytes
    times = []
    for cached, selected in ((few, few // 4), (many, few // 4), (many, many // 4)):
        steps = itertools.cycle([cache.capture(cached, selected) for cache in caches])
        tokens = RecalledTokens(selected, cached, heads, heads * record)
        times.append((tokens, timer.seconds(partial(_replay_next, steps))))
    return fit_recall_rates(rates, times, index=IndexLayout(sizes.head_dim, MEASURED_INDEX_BITS))

