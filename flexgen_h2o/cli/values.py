"""Flags as dataclass fields: their metadata, and the check of one value. No torch.

A value comes from the command line, Python or YAML and is normalized to one form. `run_config`
checks flags together.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import Field, field
from typing import Any

from flexgen_h2o.config import validation
from flexgen_h2o.config.placement import parse_percent, parse_shares
from flexgen_h2o.config.validation import check_bool, check_choice, check_int, check_number
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import read_yaml


def flag(flag_type: str, default: object, *, help: str, **rules: object) -> Any:
    """Return a dataclass field with the metadata of its flag.

    `flag_type`: text, path, int, float, bool, size (bytes, such as 6GB), bits (an integer or auto),
    percent (4 or 6 numbers, or auto), shares (3 percentages) or ratios (fractions, or a YAML file
    of them); of several values: texts (the flag is repeated), words, paths or numbers.

    `rules`: `choices`, `ge`, `gt` and `le` (bounds), `metavar`, `const` (value of the flag without
    an argument), `shown` (the default as --help shows it), `short` (a one-letter alias such as
    ``-i``) and `group` (of --help).
    """
    return field(default=default, metadata={"type": flag_type, "help": help, **rules})


def csv_flag(subject: str) -> Any:
    """Return the field ``--csv``; each row is of a `subject`."""
    return flag("path", None, shown="none", metavar="FILE",
                help=f"write a row per {subject}; an existing file is replaced. Until the run "
                "ends, the file is FILE.partial")


def plot_flag(subject: str) -> Any:
    """Return the field ``--plot``, which draws `subject`."""
    return flag("path", None, shown="none", metavar="FILE.png",
                help=f"draw {subject}; also .svg and .pdf")


def from_csv_flag() -> Any:
    """Return the field ``--from-csv``."""
    return flag("path", None, shown="none", metavar="FILE",
                help="run nothing: print the table, and draw --plot, from a file of --csv")


def flag_name(name: str) -> str:
    """Return the flag of a field: ``gen_len`` is ``--gen-len``."""
    return "--" + name.replace("_", "-")


OTHER_NAMES = {"model_name": "model", "batch_size": "gpu_batch_size",  # the H2O repository's
               "fetch_chosen": "selective_fetch", "fast_set": "hot_set"}  # columns of CSV files
"""Other names of flags, and the fields that they set."""


def checked(spec: Field, value: object) -> object:
    """Return a value of a field, checked and normalized by the metadata of its flag.

    Several values become a tuple, a file of ratios its numbers, and ``~`` in a path the home
    folder. Raises `UserError`.
    """
    name, rules = flag_name(spec.name), spec.metadata
    if value is None and spec.default is None:
        return None
    match rules["type"]:
        case "bool":
            check_bool(name, value)
        case "int":
            check_int(name, value, ge=rules.get("ge"))
        case "bits":
            if not isinstance(value, str):  # its value is checked against the choices
                check_int(name, value)
        case "float":
            check_number(name, value, ge=rules.get("ge"), gt=rules.get("gt"),
                         le=rules.get("le"))
        case "percent":
            value = _percentages(name, value)
        case "shares":
            value = _shares(name, value)
        case "size":
            value = parse_size(name, value)
        case "ratios":
            value = _ratios(name, value)
        case "path":
            value = _path(name, value)
        case "paths":
            paths = tuple(_path(name, path) for path in _several(value))
            if not paths:
                raise UserError(f"{name} is empty: give a path, or several")
            value = paths if len(paths) > 1 else paths[0]
        case "texts" | "words":
            value = _texts(name, value)
        case "numbers":
            value = _several(value)
            for number in value:
                check_number(f"each of {name}", number, gt=rules.get("gt"),
                             le=rules.get("le"))
        case "text":
            value = validation.validate(validation.Text, value, name)
    if "choices" in rules:
        item_name = f"each of {name}" if isinstance(value, tuple) else name
        for item in _several(value):
            check_choice(item_name, item, rules["choices"])
    return value


def _path(flag: str, value: object) -> str:
    path = validation.validate(validation.Text, value, flag)
    if "\0" in path:
        raise UserError(f"{flag} is not a path: it contains a zero byte")
    return os.path.expanduser(path)


def _texts(flag: str, value: object) -> tuple[str, ...]:
    """Return one or several texts. Raises `UserError` for an empty one."""
    texts = _several(value)
    names = [flag] if len(texts) == 1 else [f"{flag} {n}" for n in range(1, len(texts) + 1)]
    return tuple(validation.validate(validation.Text, *pair)
                 for pair in zip(texts, names, strict=True))


def _several(value: object) -> tuple:
    """Return a value as a tuple: of a list its items."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def parse_size(flag: str, value: object) -> int:
    """Return a size in bytes, from a number or a text such as ``6GB``, ``500 MB`` or ``1.5GiB``."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(I?)B|B)?", value.strip().upper())
        if match is None:
            raise UserError(f"{flag} takes bytes, or a size such as 6GB, 500MB or 1.5GiB, "
                            f"got {value!r}")
        number, prefix, binary = match.groups()
        scale = (1024 if binary else 1000) ** (" KMGT".index(prefix) if prefix else 0)
        value = float(number) * scale
    return math.floor(check_number(flag, value, ge=1))


def _percentages(flag: str, value: object) -> tuple[float, ...] | str:
    """Return ``--percent`` as six numbers, or ``auto``. YAML may give a list or ``0 100 100 0``."""
    numbers = value.split() if isinstance(value, str) else value
    if not isinstance(numbers, (list, tuple)):
        raise UserError(f"{flag} takes 4 or 6 numbers, got {value!r}")
    if list(numbers) == ["auto"]:
        return "auto"
    shares = [s for p in parse_percent(numbers, flag) for s in (p.gpu, p.cpu)]
    return tuple(int(share) if share == int(share) else share for share in shares)


def _shares(flag: str, value: object) -> tuple[float, ...]:
    """Return the percentages of gpu, cpu and disk. YAML may give a list or ``0 100 0``."""
    numbers = value.split() if isinstance(value, str) else value
    placement = parse_shares(_several(numbers), flag)
    shares = (placement.gpu, placement.cpu, placement.disk)
    return tuple(int(share) if share == int(share) else share for share in shares)


def _ratios(flag: str, value: object) -> float | tuple[float, ...]:
    """Return one fraction or several, from numbers, a text, or a YAML file that lists them."""
    path = ratio_file(value)
    if path is not None:
        value = read_yaml(flag, path)
        if not isinstance(value, list):
            raise UserError(f"{flag} {path} must hold a list of numbers, such as [0.1, 0.2]")
    elif isinstance(value, str):
        value = value.split()
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if not numbers:
        raise UserError(f"{flag} is empty: give a number, or one for each decoder layer")
    ratios = tuple(_ratio(flag, number) for number in numbers)
    return ratios if len(ratios) > 1 else ratios[0]


def ratio_file(value: object) -> str | None:
    """Return the YAML file that a flag of ratios names, or None if it has numbers."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, str) and value.endswith((".yaml", ".yml")):
        return os.path.expanduser(value)
    return None


def _ratio(flag: str, value: object) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise UserError(f"{flag} takes numbers above 0, at most 1, or a .yaml file of them, "
                            f"got {value!r}") from None
    return check_number(flag, value, gt=0, le=1)


def load_yaml(path: str | os.PathLike) -> dict[str, object]:
    """Read flags from a YAML file; `RunConfig.from_mapping` checks its keys.

    Raises `UserError` if the file is missing, unreadable, not UTF-8, not YAML, not a mapping, or
    names `config`.
    """
    values = read_yaml("--config", path)
    if not isinstance(values, dict):
        raise UserError(f"--config {path} must hold lines of `name: value`")
    if "config" in values:
        raise UserError(f"--config {path} names another config: put its lines into one file")
    return values
