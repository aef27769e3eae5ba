"""The YAML file of a sweep: flags of every run, and a grid of others. Every cell is checked."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from flexgen_h2o.cli.launch import read_prompts
from flexgen_h2o.cli.results import CSV_COLUMNS
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag_name, load_yaml
from flexgen_h2o.config.validation import Count, Entries, validated
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import csv_cell

PLACE = ("sweep", "flags", "repeat")
"""Columns that say which run a row is."""
ENDING = ("status", "reason")
NOT_SWEPT = ("config", "plan_only", "hardware", "output", "csv", "trace", "log_file", "no_log",
             "verbose", "debug_mode")
"""Flags of files and printing, of which a sweep has its own, and of runs that compute nothing."""


@dataclass(frozen=True)
class Cell:
    """A point of the grid.

    Attributes
    ----------
    sweep : str
        The sweep's name.
    axes : mapping of str to str
        Each key of the grid and its value here, as the CSV file has it.
    given : mapping of str to object
        The flags that the file gives it, and their checked values.
    config : RunConfig
        All flags.
    """

    sweep: str
    axes: Mapping[str, str]
    given: Mapping[str, object]
    config: RunConfig

    @property
    def label(self) -> str:
        """The values of the grid, in short."""
        return _label(self.axes)

    @property
    def flags(self) -> str:
        """The given values as arguments of the command line."""
        words: list[str] = []
        for name, value in self.given.items():
            several = value if isinstance(value, tuple) else () if value is None else (value,)
            texts = [str(each).lower() if isinstance(each, bool) else str(each)
                     for each in several]
            if name == "prompt":
                words += [word for text in texts for word in (flag_name(name), text)]
            elif texts:
                words += [flag_name(name), *texts]
        return shlex.join(words)

    def place(self, repeat: int) -> dict[str, object]:
        """The columns `PLACE` of one of its runs."""
        return {"sweep": self.sweep, "flags": self.flags, "repeat": repeat}


@dataclass(frozen=True)
class Sweep:
    """All of a file: its name without the ending, the cells in order, and runs of each cell."""

    name: str
    cells: tuple[Cell, ...]
    repeats: int

    @property
    def axes(self) -> tuple[str, ...]:
        """The keys of the grid."""
        return tuple(self.cells[0].axes)


class _SweepFile(Entries):
    grid: Annotated[dict[str, Any], Meta(
        min_length=1, description="give flags with a list of values each")]
    base: dict[str, Any] = {}
    repeats: Count = 1


def load(path: Path, *, models: Path) -> Sweep:
    """Read and check a file.

    Parameters
    ----------
    path : Path
    models : Path
        A model that is a folder below it is taken from there.

    Raises
    ------
    UserError
        The file cannot be read, a key in it is unknown, a value is wrong, or the flags of a cell
        contradict each other; it names the cell.
    """
    file = validated(_SweepFile, load_yaml(path), str(path))
    base = file.base
    try:
        _check_swept("base", base)
        axes = {name: _axis(name, spec) for name, spec in file.grid.items()}
        _check_apart(base, axes)
        cells = tuple(_cell(path.stem, base, dict(zip(axes, point, strict=True)),
                            models=models)
                      for point in itertools.product(*axes.values()))
        _check_different(cells)
        for prompts in {cell.config.prompts for cell in cells} - {None}:
            read_prompts(prompts)
        return Sweep(path.stem, cells, file.repeats)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


@dataclass(frozen=True)
class _Value:
    """One of an axis: the flags that it stands for, under a name if it has one."""

    shown: str
    flags: Mapping[str, object]
    named: bool


def _axis(name: str, spec: object) -> list[_Value]:
    """The values of a key of the grid.

    A flag has a list of them; any other key is a label, of names that stand for flags each.
    """
    is_flag = name in {spec.name for spec in fields(RunConfig)}
    if not spec or not isinstance(spec, (list, dict)):
        raise UserError(f"grid: {name} takes a list of values" if is_flag else
                        f"grid: {name} takes a list if it is a flag, or names with flags each")
    if isinstance(spec, list):
        _check_swept("grid", {name: spec})
        return [_Value(str(value), {name: value}, named=False) for value in spec]
    if is_flag or name in (*CSV_COLUMNS, *PLACE, *ENDING):
        raise UserError(f"grid: {name} is {'a flag' if is_flag else 'a column'} and can't be the "
                        "label of names")
    for key, flags in spec.items():
        if not isinstance(key, str) or not isinstance(flags, dict):
            raise UserError(f"grid: {name}: {key!r} must be a text (in quotes if need be) that "
                            "stands for flags, as in {hh_ratio: 0.1}")
        _check_swept(f"grid: {name}: {key}", flags)
    return [_Value(key, flags, named=True) for key, flags in spec.items()]


def _check_swept(where: str, flags: Mapping[str, object]) -> None:
    for name in flags:
        if name in NOT_SWEPT:
            raise UserError(f"{where}: {name} has no place in a sweep, which writes one row a run")


def _check_apart(base: Mapping[str, object], axes: Mapping[str, list[_Value]]) -> None:
    """Refuse a flag that two keys of the grid set, or the base for nothing."""
    owners: dict[str, str] = {}
    for axis, values in axes.items():
        for name in dict.fromkeys(name for value in values for name in value.flags):
            if owners.setdefault(name, axis) != axis:
                raise UserError(f"grid: {owners[name]} and {axis} both set {name}")
            if name in base and all(name in value.flags for value in values):
                raise UserError(f"base: all of the grid's {axis} set {name}: leave it out here")


def _cell(sweep: str, base: Mapping[str, object], point: Mapping[str, _Value], *, models: Path
          ) -> Cell:
    """A point of the grid: the flags that its values stand for, over those of the base."""
    flags = dict(base)
    for value in point.values():
        flags |= value.flags
    try:
        config = RunConfig.from_mapping(flags)
        given = {name: getattr(config, name) for name in flags}
        if config.path is None and (models / config.model).is_dir():
            config = RunConfig.from_mapping(flags | {"path": str(models / config.model)})
    except UserError as error:
        shown = _label({axis: value.shown for axis, value in point.items()})
        raise UserError(f"cell {shown}: {error}") from None
    axes = {axis: value.shown if value.named else str(csv_cell(given[axis]))
            for axis, value in point.items()}
    return Cell(sweep, axes, given, config)


def _check_different(cells: tuple[Cell, ...]) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        other = seen.setdefault(cell.flags, cell)
        if other is not cell:
            raise UserError(f"cells {other.label} and {cell.label} are the same")


def _label(axes: Mapping[str, str]) -> str:
    return " ".join(f"{axis}={value}" for axis, value in axes.items())
