"""List and remove converted models on disk: ``flexgen-h2o cache [prune]``. No torch."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from flexgen_h2o.cli.entry_point import entry_point
from flexgen_h2o.cli.parser import Parser, build_parser, check_flags, flag_fields
from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.errors import UserError, did_you_mean
from flexgen_h2o.files.disk_cache import KINDS, Entry, cache_dir, entries, remove_leftovers
from flexgen_h2o.files.terminal import print_stdout
from flexgen_h2o.metrics.report import WIDTH, format_bytes

ACTIONS = ("list", "prune")
_NAMES = {"hardware": "measured rates", "experts": "expert counts"}
"""Entries that are not made from files, or are no copies of them."""
_UNITS = {"w": 604800, "d": 86400, "h": 3600, "min": 60, "s": 1}


@dataclass(frozen=True, kw_only=True)
class CacheFlags:
    """The checked flags. Raises `UserError` for flags that contradict each other."""

    action: str = "list"
    older_than: str | None = flag(
        "text", None, shown="any age", metavar="AGE",
        help="entries that no run has used for this long: a number of w, d, h, min or s, such as "
        "30d",
    )
    model: str | None = flag(
        "text", None, shown="all models", metavar="NAME",
        help="entries of this model, as the list names it; * matches any text",
    )
    all: bool = flag("bool", False, help="prune every entry")
    dry_run: bool = flag("bool", False, help="show what prune would remove, and remove nothing")

    def __post_init__(self) -> None:
        check_flags(self)
        if self.action not in ACTIONS:
            raise UserError(f"unknown action {self.action!r}"
                            f"{did_you_mean(self.action, ACTIONS, 'use list or prune')}")
        parse_age(self.older_than)
        filters = [name for name in ("older_than", "model") if getattr(self, name) is not None]
        if self.action == "list" and (self.all or self.dry_run):
            raise UserError(f"--{'all' if self.all else 'dry-run'} has no effect on a list: leave "
                            "it out, or use cache prune")
        if self.all and filters:
            raise UserError(f"--all removes every entry: leave it or {flag_name(filters[0])} out")
        if self.action == "prune" and not (self.all or filters):
            raise UserError("prune what? Give --older-than 30d, --model NAME or --all; --dry-run "
                            "shows what would be removed")

    def selects(self, entry: Entry) -> bool:
        """Return True if the flags choose an entry."""
        old = time.time() - entry.used >= parse_age(self.older_than)
        return old and (self.model is None or fnmatch(entry.model.lower(), self.model.lower()))


def parse_age(text: str | None) -> float:
    """Return a time such as 30d in seconds; None is 0. Raises `UserError`."""
    if text is None:
        return 0
    match = re.fullmatch(rf"(\d{{1,9}}(?:\.\d+)?) ?({'|'.join(_UNITS)})", text.strip().lower())
    if match is None:
        raise UserError(f"--older-than takes a number of {', '.join(_UNITS)}, such as 30d or 12h, "
                        f"got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def parser() -> Parser:
    """Return the parser of the flags."""
    flags = build_parser(
        flag_fields(CacheFlags), command="cache",
        description="List converted models, quantized weights, measured rates and expert counts on "
        "disk, or remove them (prune). What a running process uses is not removed.")
    flags.add_argument("action", nargs="?", metavar="|".join(ACTIONS),
                       help="list the entries, or remove them (default: list)")
    return flags


def parse_args(argv: Sequence[str] | None = None) -> CacheFlags:
    """Parse flags into checked `CacheFlags`. Raises `UserError`."""
    return CacheFlags(**vars(parser().parse_args(argv)))


def run(options: CacheFlags) -> None:
    """List or remove the entries that the flags choose."""
    selected = [entry for entry in entries() if options.selects(entry)]
    if options.action == "prune":
        prune(selected, dry_run=options.dry_run)
        return
    print_stdout(f"{cache_dir()}: {total(selected)}")
    for line in table(selected):
        print_stdout(line)


def prune(selected: Sequence[Entry], *, dry_run: bool) -> None:
    """Remove entries, and report each."""
    removed = []
    for entry in selected:
        try:
            removable = not entry.in_use if dry_run else entry.remove()
        except OSError as error:
            raise UserError(f"cannot remove {entry.path} ({error.strerror or error}): check its "
                            "permissions") from None
        action = ("would remove" if dry_run else "removed") if removable else "in use, kept"
        print_stdout(_fitted(f"{action:<12}  {_size(entry.nbytes):>9}  ", entry))
        removed += [entry] if removable else []
    if not dry_run:
        for kind in KINDS:
            remove_leftovers(cache_dir() / kind)
    print_stdout(f"{'would remove' if dry_run else 'removed'} {total(removed)}")


def total(selected: Sequence[Entry]) -> str:
    """Return the number of entries and their size as text."""
    number = f"{len(selected)} {'entry' if len(selected) == 1 else 'entries'}"
    return f"{number}, {_size(sum(entry.nbytes for entry in selected))}"


def table(selected: Sequence[Entry]) -> Iterator[str]:
    """Yield the lines of a list: each entry, and below it its source files."""
    if selected:
        yield f"{'size':>9}  {'last use':>8}  model (format)"
    for entry in selected:
        age = "in use" if entry.in_use else _age(time.time() - entry.used)
        yield _fitted(f"{_size(entry.nbytes):>9}  {age:>8}  ", entry)
        for source in entry.sources:
            missing = " (missing)" if os.path.isabs(source) and not os.path.exists(source) else ""
            yield f"{'':>21}from {source}{missing}"
        if not entry.sources and entry.kind not in _NAMES:
            yield f"{'':>21}made by an older version, which newer ones do not use"


def _fitted(begin: str, entry: Entry) -> str:
    """Return a line with the model and the format of an entry, which has `WIDTH` columns."""
    form = entry.form or _NAMES.get(entry.kind, entry.kind)
    width = WIDTH - len(begin) - len(form) - 3
    model = entry.model if len(entry.model) <= width else f"{entry.model[: max(1, width - 3)]}..."
    return f"{begin}{model} ({form})"


def _size(nbytes: int) -> str:
    return format_bytes(nbytes)[0]


def _age(seconds: float) -> str:
    """Return a time in its largest unit."""
    unit = next((unit for unit in ("d", "h", "min") if seconds >= _UNITS[unit]), "s")
    return f"{max(0, int(seconds / _UNITS[unit]))} {unit}"


main = entry_point(parse_args, run)
