"""The machine model: measured rates and memory sizes, and their YAML file. No torch.

`calibrate` measures this machine. Files for others are in configs/hardware/. Their keys are the
fields of `Hardware` in practical units: GB, GB/s, TFLOP/s, microseconds, and seconds per billion.
Rates are from 1e-9 to 1e9 of their unit. Instead of the table `linear`, a file may give the two
rates of a roofline under `linear_roofline`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta, defstruct
from msgspec.structs import asdict

from flexgen_h2o.config.validation import Share, StrictStruct, Text, mapping_of, validate
from flexgen_h2o.config.weight_layout import INTEGER_BITS, WEIGHT_BITS, MatrixLayout
from flexgen_h2o.files.readers import read_yaml
from flexgen_h2o.files.writing import open_atomic
from flexgen_h2o.kernels.implementations import IMPLEMENTATIONS, AutotuneTable
from flexgen_h2o.metrics.trace import GB, LINKS


@dataclass(frozen=True)
class ComputeRates:
    """Rates of the compute device."""

    linear: Mapping[int, Mapping[int, float]]
    """Seconds of matmuls with a billion weights, by bits of a weight (16, 8, 4, and 12 where it was
    measured) and rows. Weights are far larger than the caches. Between two row counts it is
    interpolated; above the largest it is proportional to the rows."""
    prefill_attention: Mapping[str, float]
    """FLOP/s of causal attention over a prompt (4 x head_dim per visible pair of query and key),
    without and with scores."""
    decode_attention: Mapping[int, float]
    """Bytes of KV entries per second that decode attention reads from this device's memory, for a
    cache of 16, 8 or 4 bits."""
    head_seconds: float  # overhead of decode attention per sequence and KV head
    elementwise: float
    """Seconds of a decoder layer's norms, activations, residuals and copies, per billion elements
    of its hidden states (rows x hidden size), at hundreds of rows or more."""
    layer_seconds: float  # overhead of a decoder layer per GPU batch
    logit_seconds: float
    """Seconds to choose the next token, per billion logits (sequences x vocabulary)."""
    implementations: AutotuneTable = field(default_factory=dict)
    """Autotune table: the fastest implementations, where there is a choice."""
    rounded_linear: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """As `linear`, for matmuls with activations quantized to 8 bits; empty where not measured."""
    captured_layer_seconds: float | None = None
    """As `layer_seconds`, for captured and replayed decode steps (`engine.captured_step`); None
    where nothing is captured."""
    query_seconds: Mapping[str, float] = field(default_factory=dict)
    """Overhead of prefill attention per query and head; empty where not measured."""
    caching: Mapping[int, float] = field(default_factory=dict)
    """Seconds to select, quantize and copy a billion elements of a prompt's keys and values into a
    cache of 16, 8 or 4 bits; empty where not measured."""

    def linear_table(self, bits: int, activation_bits: int = 16) -> Mapping[int, float]:
        """Return the seconds of matmuls with a billion weights, by rows.

        12 bits cost as much as 16, and quantized activations nothing, where they were not measured.
        """
        plain = self.linear.get(bits, self.linear[16])
        rounded = self.rounded_linear if activation_bits == 8 else {}
        return rounded.get(bits, plain)


@dataclass(frozen=True)
class HostAttentionRates:
    """Rates of attention on the CPU of a machine with a GPU, over a cache in host memory.

    Attributes are as in `ComputeRates`. Transfers to and from the GPU are not included.
    """

    decode_attention: Mapping[int, float]
    head_seconds: float


@dataclass(frozen=True)
class RecallRates:
    """Costs of recall on a CPU and from a disk, relative to reading a cache sequentially.

    `calibrate` measures the first three. The defaults are fitted to measurements on one CPU (an
    EPYC with AVX2) and of one model on one disk (smollm2); tests check them against rows in
    benchmarks/results.
    """

    index_cost: float = 1.5
    """Time per byte of the key index over time per byte of a 16-bit cache. The index is read
    sequentially, but a byte has two or four quantized values."""
    gather_cost: float = 3
    """Time to read a selected key or value over time to read it sequentially: no hardware prefetch
    helps."""
    call_overhead: float = 2.5
    """Overhead per KV head over `head_seconds`: index, select and attend are separate calls."""
    miss_factor: float = 0.035
    """Factor m of the miss rate m * (1 - s) ** 1.5 / s ** 0.5, where s is the share of a cache's
    tokens in the hot set."""
    fetch_overhead: float = 5
    """Overhead per layer and GPU batch of reads from disk, over `layer_seconds`."""


@dataclass(frozen=True)
class Hardware:
    """A machine."""

    name: str
    gpu_bytes: int | None  # memory of the GPU; None where the CPU computes, in host memory
    # Host memory and disk space that a run may use.
    cpu_bytes: int
    disk_bytes: int
    links: Mapping[str, float]
    """Bytes per second of each of `trace.LINKS`; without a GPU only the links of the disk."""
    compute: ComputeRates
    host_attention: HostAttentionRates | None = None  # only on a machine with a GPU
    interference: float = 0.0
    """Slowdown of overlapping work: the busiest resource takes longer by this share, 0 to 1, of the
    time of the others."""
    read_interference: float = 0.0
    """The same share for compute during reads from disk, if larger: a CPU that computes also serves
    the disk."""
    # On a machine without a GPU, CPU time per layer and GPU batch of a decode step with a cache on
    # disk, and per sequence and KV head: it orders transfers, applies pending writes and records
    # new ones. Compute waits for it.
    fetch_seconds: float = 0.0
    fetch_head_seconds: float = 0.0
    recall: RecallRates = RecallRates()
    """Rates of recall on this machine's CPU, with or without a GPU."""

    @property
    def has_gpu(self) -> bool:
        """True if compute memory is separate from host memory."""
        return self.gpu_bytes is not None


BITS = (16, 8, 4)
"""Bits of caches, and of weights that every file has rates for."""
ROWS = (1, 4, 16, 64, 256, 2048)
"""Row counts at which matmuls are measured."""

HOST_LINKS = tuple(link for link in LINKS if "gpu" not in link)

TERA, MICRO, NANO, BILLION = 1e12, 1e-6, 1e-9, 1e9

_SCALARS = {
    "head_microseconds": ("head_seconds", MICRO),
    "elementwise_seconds_per_billion": ("elementwise", 1),
    "layer_microseconds": ("layer_seconds", MICRO),
    "logit_seconds_per_billion": ("logit_seconds", 1),
}
"""YAML key of a scalar of `ComputeRates`: its field, and the unit."""

RECALL_RATES = ("index_cost", "gather_cost", "call_overhead")
"""Fields of `RecallRates` that are measured."""

_EARLIER_NAMES = {
    "compute": {"bound_layer_microseconds": "captured_layer_microseconds"},
    "recall": {"index_work": "index_cost", "apart": "gather_cost", "calls": "call_overhead"},
}
"""Section to the keys that earlier versions wrote, and their names."""

_Size = Annotated[float, Meta(ge=0.001, le=1e18)]
_Rate = Annotated[float, Meta(ge=1e-9, le=1e9)]
"""A rate. Within these bounds all predicted times are finite."""
_Key = TypeVar("_Key")
_Rows = Annotated[int, Meta(ge=1)]
_AutotuneTable = defstruct("_AutotuneTable", [
    (operation, dict[Literal[WEIGHT_BITS], dict[_Rows, Literal[names]]],
     msgspec.field(default_factory=dict))
    for operation, names in IMPLEMENTATIONS.items()], bases=(StrictStruct,))


class _HostRates(StrictStruct, frozen=True):
    decode_attention_gb_per_s: mapping_of(BITS, _Rate)
    head_microseconds: _Rate


class _Roofline(StrictStruct, frozen=True):
    tflop_per_s: _Rate
    memory_gb_per_s: _Rate


class _ComputeEntries(StrictStruct, frozen=True):
    prefill_attention_tflop_per_s: mapping_of(("plain", "scored"), _Rate)
    decode_attention_gb_per_s: mapping_of(BITS, _Rate)
    head_microseconds: _Rate
    elementwise_seconds_per_billion: _Rate
    layer_microseconds: _Rate
    logit_seconds_per_billion: _Rate
    linear_seconds_per_billion_weights: dict[
        Literal[WEIGHT_BITS], dict[_Rows, _Rate]] | None = None
    rounded_linear_seconds_per_billion_weights: dict[
        Literal[INTEGER_BITS], dict[_Rows, _Rate]] = msgspec.field(default_factory=dict)
    linear_roofline: _Roofline | None = None
    captured_layer_microseconds: _Rate | None = None
    query_nanoseconds: mapping_of(("plain", "scored"), _Rate) | None = None
    caching_seconds_per_billion: mapping_of(BITS, _Rate) | None = None
    implementations: _AutotuneTable = _AutotuneTable()

    def __post_init__(self) -> None:
        table = self.linear_seconds_per_billion_weights
        if (self.linear_roofline is None) == (table is None):
            raise ValueError("give either linear_seconds_per_billion_weights or linear_roofline")
        missing = set() if table is None else set(BITS) - set(table)
        if missing:
            raise ValueError("linear_seconds_per_billion_weights: the key "
                             f"{max(missing)} is missing; add it")
        tables = {"linear_seconds_per_billion_weights": table or {},
                  "rounded_linear_seconds_per_billion_weights":
                      self.rounded_linear_seconds_per_billion_weights,
                  **asdict(self.implementations)}
        for name, table in tables.items():
            for bits, column in table.items():
                if not column or list(column) != sorted(column):
                    raise ValueError(f"{name}: {bits} must list one count of rows or more, in "
                                     "ascending order")


class _Machine(StrictStruct, frozen=True):
    name: Text
    cpu_gb: _Size
    disk_gb: _Size
    links_gb_per_s: dict[str, _Rate]
    compute: _ComputeEntries
    gpu_gb: _Size | None = None
    host_attention: _HostRates | None = None
    recall: mapping_of(RECALL_RATES, _Rate) | None = None
    interference: Share = 0.0
    read_interference: Share = 0.0
    fetch_microseconds: _Rate | None = None
    fetch_head_microseconds: _Rate | None = None

    def __post_init__(self) -> None:
        if self.host_attention and not self.gpu_gb:
            raise ValueError("host_attention is for machines with a GPU: add gpu_gb, or leave it "
                             "out")
        for name in ("fetch_microseconds", "fetch_head_microseconds"):
            if getattr(self, name) and self.gpu_gb:
                raise ValueError(f"{name} is for machines without a GPU: leave it out")


def load_hardware(path: str | os.PathLike) -> Hardware:
    """Read a machine from a YAML file.

    Raises `UserError` if the file cannot be read, or a key is unknown, missing or out of range; the
    message names the file and the key.
    """
    file = validate(_Machine, _with_current_names(read_yaml("hardware file", path)), str(path))
    validate(mapping_of(LINKS if file.gpu_gb else HOST_LINKS, _Rate), file.links_gb_per_s,
             f"{path}: links_gb_per_s")
    host = file.host_attention
    return Hardware(
        name=file.name,
        gpu_bytes=file.gpu_gb and int(_rounded(file.gpu_gb * GB)),
        cpu_bytes=int(_rounded(file.cpu_gb * GB)),
        disk_bytes=int(_rounded(file.disk_gb * GB)),
        links=_from_units(GB, file.links_gb_per_s),
        compute=_compute(file.compute),
        host_attention=host and HostAttentionRates(_from_units(GB, host.decode_attention_gb_per_s),
                                                   _rounded(host.head_microseconds * MICRO)),
        recall=RecallRates(**file.recall or {}),
        interference=file.interference,
        read_interference=file.read_interference,
        fetch_seconds=_rounded((file.fetch_microseconds or 0.0) * MICRO),
        fetch_head_seconds=_rounded((file.fetch_head_microseconds or 0.0) * MICRO),
    )


def _with_current_names(document: object) -> object:
    """Return the content of a hardware file without the key names of earlier versions."""
    if not isinstance(document, dict):
        return document
    sections = {section: {names.get(key, key): value for key, value in document[section].items()}
                for section, names in _EARLIER_NAMES.items()
                if isinstance(document.get(section), dict)}
    return document | sections


def _compute(file: _ComputeEntries) -> ComputeRates:
    table, rates = file.linear_seconds_per_billion_weights, file.linear_roofline
    return ComputeRates(
        linear=linear_roofline(_rounded(rates.tflop_per_s * TERA),
                               _rounded(rates.memory_gb_per_s * GB))
        if rates else {bits: _from_units(1, column) for bits, column in table.items()},
        prefill_attention=_from_units(TERA, file.prefill_attention_tflop_per_s),
        decode_attention=_from_units(GB, file.decode_attention_gb_per_s),
        **{figure: _rounded(getattr(file, key) * unit) for key, (figure, unit) in _SCALARS.items()},
        captured_layer_seconds=file.captured_layer_microseconds and _rounded(
            file.captured_layer_microseconds * MICRO),
        query_seconds=_from_units(NANO, file.query_nanoseconds or {}),
        caching=_from_units(1, file.caching_seconds_per_billion or {}),
        implementations={name: by_bits for name, by_bits in asdict(file.implementations).items()
                         if by_bits},
        rounded_linear={bits: _from_units(1, column) for bits, column in
                        file.rounded_linear_seconds_per_billion_weights.items()},
    )


def save_hardware(hardware: Hardware, path: str | os.PathLike) -> None:
    """Write a machine as YAML that `load_hardware` reads, atomically.

    Figures of up to 15 digits are preserved. Raises OSError if the file cannot be written.
    """
    compute, host = hardware.compute, hardware.host_attention
    values = {
        "name": hardware.name,
        "gpu_gb": hardware.gpu_bytes and _rounded(hardware.gpu_bytes / GB),
        "cpu_gb": _rounded(hardware.cpu_bytes / GB),
        "disk_gb": _rounded(hardware.disk_bytes / GB),
        "links_gb_per_s": _to_units(hardware.links, GB),
        "compute": {
            "linear_seconds_per_billion_weights": _seconds_by_rows(compute.linear),
            **({"rounded_linear_seconds_per_billion_weights":
                _seconds_by_rows(compute.rounded_linear)} if compute.rounded_linear else {}),
            "prefill_attention_tflop_per_s": _to_units(compute.prefill_attention, TERA),
            "decode_attention_gb_per_s": _to_units(compute.decode_attention, GB),
            **{key: _rounded(getattr(compute, field) / unit)
               for key, (field, unit) in _SCALARS.items()},
            **({"captured_layer_microseconds": _rounded(compute.captured_layer_seconds / MICRO)}
               if compute.captured_layer_seconds else {}),
            **({"query_nanoseconds": _to_units(compute.query_seconds, NANO)}
               if compute.query_seconds else {}),
            **({"caching_seconds_per_billion": _to_units(compute.caching, 1)}
               if compute.caching else {}),
            **({"implementations": compute.implementations} if compute.implementations else {}),
        },
        "host_attention": host and {
            "decode_attention_gb_per_s": _to_units(host.decode_attention, GB),
            "head_microseconds": _rounded(host.head_seconds / MICRO),
        },
        "recall": {name: getattr(hardware.recall, name) for name in RECALL_RATES},
        "interference": hardware.interference,
        "read_interference": hardware.read_interference,
        "fetch_microseconds": _rounded(hardware.fetch_seconds / MICRO) or None,
        "fetch_head_microseconds": _rounded(hardware.fetch_head_seconds / MICRO) or None,
    }
    present = {key: value for key, value in values.items() if value is not None}
    with open_atomic(path) as file:
        yaml.safe_dump(present, file, sort_keys=False, default_flow_style=None, width=100)


def linear_roofline(flops: float, bandwidth: float) -> dict[int, dict[int, float]]:
    """Return `ComputeRates.linear` from FLOP/s and bytes per second of weights.

    A matmul takes as long as its FLOPs or its weights' bytes, whichever is longer.
    """
    side = 1 << 15
    sizes = {16: 2.0} | {bits: MatrixLayout(side, side, bits).nbytes / side**2
                         for bits in WEIGHT_BITS[1:]}
    return {bits: {rows: _rounded(BILLION * max(2 * rows / flops, size / bandwidth))
                   for rows in ROWS} for bits, size in sizes.items()}


def _from_units(unit: float, figures: Mapping[_Key, float]) -> dict[_Key, float]:
    return {key: _rounded(figure * unit) for key, figure in figures.items()}


def _seconds_by_rows(tables: Mapping[int, Mapping[int, float]]) -> dict[int, dict[int, float]]:
    return {bits: _to_units(dict(sorted(table.items())), 1) for bits, table in tables.items()}


def _to_units(figures: Mapping[_Key, float], unit: float) -> dict[_Key, float]:
    return {key: _rounded(figure / unit) for key, figure in figures.items()}


def _rounded(figure: float) -> float:
    """Round to 15 digits, which removes the error of a conversion between units and back."""
    return float(f"{figure:.15g}")
