"""A machine as a YAML file for people: configs/hardware/ has examples. No torch.

Keys are the fields of `Hardware`, in units that suit them: GB, GB/s, TFLOP/s, microseconds, and
seconds for a billion. Where `linear` was not measured, a file may give the rates from which the
roofline makes it, under `linear_roofline`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from flexgen_h2o.config.checks import check_int, check_number
from flexgen_h2o.config.formats import MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.atomic import open_atomic
from flexgen_h2o.files.readers import read_yaml
from flexgen_h2o.kernels.implementations import IMPLEMENTATIONS, Winners
from flexgen_h2o.metrics.links import GB, LINKS
from flexgen_h2o.planning.hardware import Compute, Hardware, HostAttentionRates

BITS = (16, 8, 4)
ROWS = (1, 4, 16, 64, 256, 2048)
"""Rows at which products are measured, or put under the roofline."""

HOST_LINKS = tuple(link for link in LINKS if "gpu" not in link)

TERA, MICRO, BILLION = 1e12, 1e-6, 1e9

_TABLE, _ROOFLINE = "linear_seconds_per_billion_weights", "linear_roofline"
_PREFILL, _DECODE = "prefill_attention_tflop_per_s", "decode_attention_gb_per_s"
_CHOSEN = "implementations"
_FIGURES = {
    "head_microseconds": ("head_seconds", MICRO),
    "elementwise_seconds_per_billion": ("elementwise", 1),
    "layer_microseconds": ("layer_seconds", MICRO),
    "logit_seconds_per_billion": ("logit_seconds", 1),
}
"""Keys of single figures of `Compute`: the field, and the unit in that of the field."""


def load_hardware(path: str | os.PathLike) -> Hardware:
    """Read a machine from a YAML file.

    Raises
    ------
    UserError
        The file can't be read, or a key is unknown, missing or has a value that cannot be; the
        message names the file and the key.
    """
    top = _Entry(str(path), read_yaml("hardware file", path)).fields(
        ("name", "cpu_gb", "disk_gb", "links_gb_per_s", "compute"),
        ("gpu_gb", "host_attention", "interference"))
    links = LINKS if "gpu_gb" in top else HOST_LINKS
    if "gpu_gb" not in top and "host_attention" in top:
        raise UserError(f"{path}: host_attention is for machines with a GPU: add gpu_gb, or leave "
                        "it out")
    return Hardware(
        name=top["name"].text(),
        gpu_bytes=_bytes(top["gpu_gb"]) if "gpu_gb" in top else None,
        cpu_bytes=_bytes(top["cpu_gb"]),
        disk_bytes=_bytes(top["disk_gb"]),
        links=top["links_gb_per_s"].figures(links, GB),
        compute=_compute(top["compute"]),
        host_attention=_host(top["host_attention"]) if "host_attention" in top else None,
        interference=top["interference"].share() if "interference" in top else 0.0,
    )


def save_hardware(hardware: Hardware, path: str | os.PathLike) -> None:
    """Write a machine as YAML that `load_hardware` reads; whole, or not at all.

    Figures of up to 15 digits come back as they are. OSError if the file can't be written.
    """
    compute, host = hardware.compute, hardware.host_attention
    values = {
        "name": hardware.name,
        "gpu_gb": hardware.gpu_bytes and _rounded(hardware.gpu_bytes / GB),
        "cpu_gb": _rounded(hardware.cpu_bytes / GB),
        "disk_gb": _rounded(hardware.disk_bytes / GB),
        "links_gb_per_s": _in_units(hardware.links, GB),
        "compute": {
            _TABLE: {bits: _in_units(dict(sorted(table.items())), 1)
                     for bits, table in compute.linear.items()},
            _PREFILL: _in_units(compute.prefill_attention, TERA),
            _DECODE: _in_units(compute.decode_attention, GB),
            **{key: _rounded(getattr(compute, field) / unit)
               for key, (field, unit) in _FIGURES.items()},
            **({_CHOSEN: compute.implementations} if compute.implementations else {}),
        },
        "host_attention": host and {
            _DECODE: _in_units(host.decode_attention, GB),
            "head_microseconds": _rounded(host.head_seconds / MICRO),
        },
        "interference": hardware.interference,
    }
    present = {key: value for key, value in values.items() if value is not None}
    with open_atomic(path) as file:
        yaml.safe_dump(present, file, sort_keys=False, default_flow_style=None, width=100)


def roofline(flops: float, bandwidth: float) -> dict[int, dict[int, float]]:
    """`Compute.linear` from FLOP/s, and bytes per second at which weights are read.

    A product takes as long as its FLOPs or its weights' bytes, whichever is more.
    """
    side = 1 << 15
    sizes = {16: 2.0} | {bits: MatrixLayout(side, side, bits).nbytes / side**2
                         for bits in BITS if bits != 16}
    return {bits: {rows: _rounded(BILLION * max(2 * rows / flops, size / bandwidth))
                   for rows in ROWS} for bits, size in sizes.items()}


@dataclass(frozen=True)
class _Entry:
    """A value of the file, and where it stands: the file, and the keys down to it."""

    where: str
    value: object

    def fields(self, names: Sequence[object], optional: Sequence[object] = ()
               ) -> dict[object, _Entry]:
        """The values of a mapping with the keys `names`, maybe `optional` ones, and no other."""
        known = (*names, *optional)
        entries = self._mapping()
        for name in entries:
            if name not in known:
                raise UserError(f"{self.where}: unknown key {name}; the keys here are "
                                f"{', '.join(map(str, known))}")
        for name in names:
            if name not in entries:
                raise UserError(f"{self.where}: the key {name} is missing; add it")
        return entries

    def figures(self, names: Sequence[object], unit: float) -> dict[object, float]:
        """A mapping of exactly `names` to positive numbers, times their unit."""
        return {name: entry.figure(unit) for name, entry in self.fields(names).items()}

    def by_rows(self, read: Callable[..., Any], *arguments: object) -> dict[int, Any]:
        """A mapping of counts of rows, in ascending order, to what `read` makes of each value."""
        entries = self._mapping()
        for rows in entries:
            check_int(f"{self.where}: a count of rows", rows, low=1)
        if not entries or list(entries) != sorted(entries):
            raise UserError(f"{self.where} must list one count of rows or more, in ascending order")
        return {rows: read(entry, *arguments) for rows, entry in entries.items()}

    def figure(self, unit: float) -> float:
        """A positive number, times its unit."""
        check_number(self.where, self.value, above=0, high=1e18)
        return _rounded(self.value * unit)

    def share(self) -> float:
        """A number from 0 to 1."""
        check_number(self.where, self.value, low=0, high=1)
        return float(self.value)

    def one_of(self, names: Sequence[str]) -> str:
        """One of some names."""
        if self.value not in names:
            raise UserError(f"{self.where} must be one of {', '.join(names)}, got {self.value!r}")
        return self.value

    def text(self) -> str:
        """A text that is not empty."""
        if not isinstance(self.value, str) or not self.value.strip():
            raise UserError(f"{self.where} must be text that is not empty, got {self.value!r}")
        return self.value

    def _mapping(self) -> dict[object, _Entry]:
        if not isinstance(self.value, dict):
            raise UserError(f"{self.where} must hold lines of `key: value`, got {self.value!r}")
        return {key: _Entry(f"{self.where}: {key}", value) for key, value in self.value.items()}


def _compute(entry: _Entry) -> Compute:
    entries = entry.fields((_PREFILL, _DECODE, *_FIGURES), (_TABLE, _ROOFLINE, _CHOSEN))
    if (_TABLE in entries) == (_ROOFLINE in entries):
        raise UserError(f"{entry.where} must have either {_TABLE} or {_ROOFLINE}")
    if _TABLE in entries:
        linear = {bits: table.by_rows(_Entry.figure, 1)
                  for bits, table in entries[_TABLE].fields(BITS).items()}
    else:
        rates = entries[_ROOFLINE].fields(("tflop_per_s", "memory_gb_per_s"))
        linear = roofline(rates["tflop_per_s"].figure(TERA), rates["memory_gb_per_s"].figure(GB))
    return Compute(
        linear=linear,
        prefill_attention=entries[_PREFILL].figures(("plain", "scored"), TERA),
        decode_attention=entries[_DECODE].figures(BITS, GB),
        **{field: entries[key].figure(unit) for key, (field, unit) in _FIGURES.items()},
        implementations=_implementations(entries[_CHOSEN]) if _CHOSEN in entries else {},
    )


def _implementations(entry: _Entry) -> Winners:
    return {operation: {bits: of_bits.by_rows(_Entry.one_of, IMPLEMENTATIONS[operation])
                        for bits, of_bits in table.fields((), BITS).items()}
            for operation, table in entry.fields((), tuple(IMPLEMENTATIONS)).items()}


def _host(entry: _Entry) -> HostAttentionRates:
    entries = entry.fields((_DECODE, "head_microseconds"))
    return HostAttentionRates(entries[_DECODE].figures(BITS, GB),
                              entries["head_microseconds"].figure(MICRO))


def _bytes(entry: _Entry) -> int:
    check_number(entry.where, entry.value, low=0.001)
    return int(entry.figure(GB))


def _in_units(figures: Mapping[object, float], unit: float) -> dict[object, float]:
    return {key: _rounded(figure / unit) for key, figure in figures.items()}


def _rounded(figure: float) -> float:
    """To 15 digits: there and back between units, the error of the product is rounded away."""
    return float(f"{figure:.15g}")
