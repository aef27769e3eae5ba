"""Feeds damaged and hostile files, flags and requests to all that reads them, and counts.

    nice -n 19 python tools/fuzz.py --seconds 300 --csv benchmarks/results/fuzz.csv
    nice -n 19 python tools/fuzz.py --atheris --seconds 60 --csv benchmarks/results/fuzz.csv
    python tools/fuzz.py --only gguf --case 1234         one case again, with its traceback

A case must end with a `UserError` or well: other exceptions are counted as tracebacks, as is a
case that takes more than `SLOW` seconds. Resident memory is compared after a tenth of the cases and
at the end. Files that are opened, made, moved or removed outside the folder of the case are noted
by an audit hook. Cases are drawn from seeds that count up; with `--atheris` libFuzzer makes them,
guided by the lines of this package that they reach (`pip install atheris`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SLOW = 10.0
COLUMNS = ("target", "drawn_by", "cases", "refused", "taken", "tracebacks", "slowest_seconds",
           "grown_mb", "files_outside", "cpu", "date", "commit")
_CODE = tuple(str(path) for path in (ROOT, sys.prefix, sys.base_prefix, "/usr", "/lib", "/proc",
                                     "/sys", "/dev", "/etc/ld.so"))
_EVENTS = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")


class Watch:
    """Notes what is touched outside a folder, and programs and connections that are started.

    What is installed may be read; files that a user names by flags are the user's own.
    """

    def __init__(self, folder: Path):
        self.folder, self.on, self.outside = str(folder), False, set()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        if event in _STARTS:
            self.outside.add(f"{event} {arguments[0]}")
            return
        if event != "open" and event not in _EVENTS or not isinstance(arguments[0], (str, bytes)):
            return
        path = os.path.abspath(os.fsdecode(arguments[0]))
        writes = event != "open" or bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        if not path.startswith(self.folder) and (writes or not path.startswith(_CODE)):
            self.outside.add(f"{event} {path}")


@dataclass
class Count:
    """What became of a target's cases."""

    cases: int = 0
    refused: int = 0
    taken: int = 0
    tracebacks: int = 0
    slowest_seconds: float = 0.0
    grown_mb: float = 0.0
    files_outside: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


def resident() -> int:
    """Bytes of this process in memory, without garbage."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def try_case(target, raw: bytes, count: Count) -> str | None:
    """Read one case and count it; the traceback, if there is one."""
    from flexgen_h2o.errors import UserError

    began, failed = time.perf_counter(), None
    count.cases += 1
    try:
        target.read(raw)
        count.taken += 1
    except UserError as error:
        message = str(error)
        if not message or not message.isprintable() or len(message) > 5000:
            failed = f"the message {message!r:.300} is no line"
        count.refused += 1
    except SystemExit as error:  # --help and --version
        count.taken += error.code in (0, None)
        failed = None if error.code in (0, None) else f"exit {error.code}"
    except KeyboardInterrupt:
        raise
    except BaseException:  # what is looked for, panics of libraries in Rust among it
        failed = traceback.format_exc()
    took = time.perf_counter() - began
    count.slowest_seconds = max(count.slowest_seconds, took)
    if failed is None and took > SLOW:
        failed = f"took {took:.0f} s"
    if failed is not None:
        count.tracebacks += 1
        last = failed.strip().splitlines()[-1][:160]
        count.kinds[last] = count.kinds.get(last, 0) + 1
    return failed


@contextmanager
def workplace() -> Iterator[Path]:
    """An empty folder, with home, caches and temporary files in it; it is the current one, too."""
    kept, here = dict(os.environ), os.getcwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        for variable in ("HOME", "FLEXGEN_H2O_CACHE", "HF_HOME", "TMPDIR"):
            os.environ[variable] = name
        os.environ["HF_HUB_OFFLINE"] = "1"
        tempfile.tempdir = None
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(kept)
            tempfile.tempdir = None


def campaign(name: str, target, watch: Watch, *, seconds: float, cases: int, first: int,
             show: int = 3) -> Count:
    """Cases of one target by number, until the time or the number is over."""
    count, end, base = Count(), time.monotonic() + seconds, None
    for seed in range(first, first + cases):
        if time.monotonic() > end:
            break
        late = seed - first > cases / 10 or time.monotonic() > end - 0.9 * seconds
        if base is None and late and seed - first >= min(20, cases - 1):  # libraries have loaded
            base = resident()
        raw = target.draw(random.Random(seed))
        watch.on, watch.outside = True, set()
        failed = try_case(target, raw, count)
        watch.on = False
        if watch.outside:
            count.files_outside += 1
            print(f"{name} case {seed} touched {sorted(watch.outside)[:3]}", file=sys.stderr)
        if failed is not None and sum(count.kinds.values()) <= show:
            lines = failed.splitlines()
            print(f"{name} case {seed}: {raw[:200]!r}", *lines[-8:], sep="\n", file=sys.stderr)
    count.grown_mb = round((resident() - (base or resident())) / 1e6, 1)
    return count


def guided(name: str, seconds: float) -> Count:
    """Cases of one target that libFuzzer makes, in a process of its own."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); " \
           f"import fuzz; fuzz.guided_here({name!r}, {int(seconds)})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          errors="replace", env={**os.environ, "PYTHONPATH": str(ROOT)},
                          check=False)
    found = re.findall(r"#(\d+)\s", done.stderr)
    growth = re.findall(r"rss: (\d+)Mb", done.stderr)
    tail = done.stderr[-3000:]
    count = Count(cases=int(found[-1]) if found else 0, tracebacks=int(done.returncode != 0))
    if growth:
        count.grown_mb = float(growth[-1]) - float(growth[len(growth) // 10])
    outside = re.findall(r"touched outside: (.*)", done.stderr)
    count.files_outside = len(outside)
    if done.returncode or outside:
        print(f"{name}: {tail}", file=sys.stderr)
    return count


def guided_here(name: str, seconds: int) -> None:
    """What `guided` runs: it ends the process."""
    import atheris

    from flexgen_h2o.errors import UserError

    with atheris.instrument_imports(include=[f"flexgen_h2o.{room}" for room in (
            "files", "models", "config", "cli", "commands.batch", "planning.hardware")]):
        from fuzz_cases import targets
    with workplace() as folder:
        target = targets(folder)[name]
        watch, corpus = Watch(folder), folder / "corpus"
        corpus.mkdir()
        for seed in range(40):
            (corpus / str(seed)).write_bytes(target.draw(random.Random(seed)))

        def one(raw: bytes) -> None:
            watch.on, watch.outside = True, set()
            try:
                target.read(raw)
            except (UserError, SystemExit):
                pass
            finally:
                watch.on = False
            if watch.outside:
                print(f"touched outside: {sorted(watch.outside)}", file=sys.stderr)

        atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-max_len=16384", "-timeout=20",
                       "-rss_limit_mb=4096", "-print_final_stats=1", f"-artifact_prefix={folder}/",
                       str(corpus)], one)
        gc.freeze()
        atheris.Fuzz()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--cases", type=int, default=10**9, help="of each target, at most")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", nargs="+", metavar="TARGET", help="not all targets")
    parser.add_argument("--case", type=int, help="one case alone")
    parser.add_argument("--atheris", action="store_true", help="let libFuzzer make the cases")
    parser.add_argument("--csv", help="append a row for each target")
    options = parser.parse_args(argv)
    if options.case is not None:
        options.first, options.cases = options.case, 1
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parent))
    from fuzz_cases import targets

    failed = 0
    with workplace() as folder:
        found = targets(folder)
        chosen = {name: found[name] for name in options.only or found}
        watch, weights = Watch(folder), sum(each.weight for each in chosen.values())
        gc.freeze()  # or what is loaded would put off the collection of what the cases leave
        for name, target in chosen.items():
            seconds = options.seconds * target.weight / weights
            count = guided(name, seconds) if options.atheris else campaign(
                name, target, watch, seconds=seconds, cases=options.cases, first=options.first)
            failed += count.tracebacks + count.files_outside
            kinds = f" {json.dumps(count.kinds)}" if count.kinds else ""
            print(f"{name}: {count.cases} cases, {count.refused} refused, {count.tracebacks} "
                  f"tracebacks, {count.grown_mb} MB, {count.files_outside} touched outside, at "
                  f"most {count.slowest_seconds:.2f} s{kinds}", flush=True)
            if options.csv:
                _add_row(ROOT / options.csv, name, count, "atheris" if options.atheris else "seeds")
    gc.unfreeze()
    return int(failed > 0)


def _add_row(path: Path, name: str, count: Count, drawn_by: str) -> None:
    from flexgen_h2o.files.rows import append_row
    from flexgen_h2o.metrics.provenance import cpu_model, origin

    row = asdict(count) | {"target": name, "drawn_by": drawn_by, "cpu": cpu_model()} | origin()
    append_row(path, COLUMNS, row, flag="--csv")


if __name__ == "__main__":
    sys.exit(main())
