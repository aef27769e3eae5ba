"""Look at this machine: ``flexgen-h2o doctor``.

What it has, what runs on it, and what would be slow and why. Whatever cannot be looked at says so,
and the rest is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from flexgen_h2o.cli import parser as flag_parser
from flexgen_h2o.cli.command import entry_point
from flexgen_h2o.cli.parser import check_own
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag
from flexgen_h2o.commands.doctor import facts, sections
from flexgen_h2o.files.terminal import show


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The flag, checked."""

    offload_dir: str = flag(
        "path", RunConfig.offload_dir, metavar="DIR", group="policy",
        help="folder whose disk is measured: the one that the disk tier would write to",
    )

    def __post_init__(self) -> None:
        check_own(self)


def parser() -> flag_parser.Parser:
    """The parser of the flags."""
    return flag_parser.build_parser(
        fields(DoctorOptions), command="doctor", usage="%(prog)s [--offload-dir DIR]",
        description="What this machine has, which kernels run on it, and what would be slow and "
        "why. The disk is measured with a file of 256 MB, which is gone afterwards.")


def parse_args(argv: Sequence[str] | None = None) -> DoctorOptions:
    """Flags as checked `DoctorOptions`. Raises `UserError`."""
    return DoctorOptions(**vars(parser().parse_args(argv)))


def parts(options: DoctorOptions) -> dict[str, Callable[[], sections.Section]]:
    """The functions that look at each part of the machine, by the title of their sections."""
    folder = options.offload_dir
    return {
        "versions": lambda: sections.versions(facts.versions()),
        "environment": lambda: sections.environment(facts.environment()),
        "processor": lambda: sections.processor(facts.processor()),
        "kernels": lambda: sections.kernels(facts.kernels(folder)),
        "GPU": lambda: sections.gpus(facts.gpus()),
        "memory": lambda: sections.memory(facts.memory()),
        "disk": lambda: sections.disk(facts.disk(folder)),
    }


def run(options: DoctorOptions) -> None:
    """Look at one part after the other, and print each as soon as it is known."""
    found = []
    for title, look in parts(options).items():
        found.append(sections.section(title, look))
        show(found[-1].text())
    show("\n".join(sections.verdict(found)))


main = entry_point(parse_args, run)
