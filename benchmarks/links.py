"""Measure the raw rate of every link of this machine, and the rate that the engine reaches.

    python benchmarks/links.py --model FOLDER

The raw rate is the best over a grid of request sizes and threads, with O_DIRECT into reused,
page-aligned memory. The engine's rate is of weights that the weight store fetches and of cache
parts that are loaded and stored. Both bypass the page cache, but not caches below this system, such
as a hypervisor's. The grid is measured first, in rounds. Then the best setting and the engine take
turns, as rates drift by more than the two differ; the ratio is the median over pairs. With a GPU,
weights and cache are copied to it during reads, as in a run. Neither side syncs writes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import itertools
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from csv_files import write_csv

from flexgen_h2o.cache.layout import Capacity, SlotLayout
from flexgen_h2o.cache.tiers import FetchedTier
from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.config.limits import CACHE_BUFFERS
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.config.policy import OFFLOAD_DIR
from flexgen_h2o.engine.weight_files import WeightFiles
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import catch_write_errors, check_writable
from flexgen_h2o.metrics.provenance import source_commit
from flexgen_h2o.metrics.trace import GB, LinkStats, Trace
from flexgen_h2o.models import family
from flexgen_h2o.models.checkpoint import resolve
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.quantized import WeightFormat
from flexgen_h2o.models.registry import from_transformers, read_config
from flexgen_h2o.models.tensors import ModelWeights
from flexgen_h2o.storage.disk import CHUNK, READ, WRITE, Extent, RunFolder
from flexgen_h2o.storage.links import memory_read_rate
from flexgen_h2o.storage.tiers import PAGE, open_device
from flexgen_h2o.storage.transfer import D2H, H2D, Transfers

COLUMNS = ("date", "commit", "host", "link", "what", "raw_gb_per_s", "engine_gb_per_s",
           "engine_over_raw", "request_mb", "threads", "nbytes", "repeats")
MB = 1 << 20
SETTINGS = list(itertools.product((1 * MB, 4 * MB, 16 * MB), (1, 2, 3, 4)))
QUICK_SETTINGS = list(itertools.product((1 * MB, 16 * MB), (1, 4)))
"""Request sizes in bytes, and threads."""
GOAL = 0.95
WINDOW = 16 * CHUNK
PAIRS = 3
"""Pairs of raw and engine runs for each repeat."""
LAYERS = 3
"""Least number of whole decoder layers to read."""
KV_SLOTS, KV_BYTES = 205, 13 << 20
"""Slots of a sequence in a cache part, and approximate bytes of the part."""
COPY = 256 * MB
MEMORY = "host memory"
TO_GPU, TO_HOST = 1, 2
"""cudaMemcpyKind"""


def chosen_layers(layers: Sequence[dict], size: Callable[[object], int], nbytes: int, *,
                  all_tensors: bool) -> list[dict]:
    """Return the first decoder layers of about `nbytes`, at least `LAYERS` whole ones.

    Without `all_tensors`, return the first tensors of two layers, half of the bytes each.
    """
    if all_tensors:
        layer = sum(map(size, layers[0].values()))
        return list(layers[: max(LAYERS, nbytes // layer)])
    selected = []
    for specs in layers[:2]:
        ends = itertools.accumulate(map(size, specs.values()))
        count = 1 + sum(end < nbytes // 2 for end in ends)
        selected.append(dict(itertools.islice(specs.items(), count)))
    return selected


class Weights:
    """The weight store of some decoder layers of a model, all of them on disk.

    Raises `UserError` if the folder holds no model, or its tensors cannot be read in place.
    """

    def __init__(self, folder: Path, transfers: Transfers, nbytes: int, *, all_tensors: bool):
        self.config: ModelConfig = from_transformers(read_config(folder), str(folder))
        kind = family(self.config)
        self._checkpoint = open_checkpoint(folder)
        layers = kind.weights(self.config).layers
        first = next(iter(layers[0].values()))
        try:
            names = resolve(self._checkpoint, [first], kind.aliases)
            self.dtype = self._checkpoint.info(names[first.name]).dtype
            form = WeightFormat(self.dtype)
            layers = chosen_layers(layers, form.nbytes, nbytes,
                                   all_tensors=all_tensors)
            specs = [spec for layer in layers for spec in layer.values()]
            names = resolve(self._checkpoint, specs, kind.aliases)
            self._store = WeightStore(
                ModelWeights({}, tuple(layers), {}, ()),
                WeightFiles(self._checkpoint, names, form, transfers), transfers,
                placement=Placement(0, 0, 100))
            self._store.load(self._refuse)
        except BaseException:
            self._checkpoint.close()
            raise
        self._count = len(layers)
        self.reads = [read for unit in self._store.units for part in unit.fetched
                      for read in part.reads]

    def _refuse(self):
        raise UserError(f"{self._checkpoint.source}: tensors do not lie in safetensors as a run "
                        "reads them, all of one dtype; choose another --model")

    def close(self) -> None:
        self._checkpoint.close()

    def fetch_all(self) -> None:
        """Fetch every layer in turn, prefetching the next one."""
        self._store.fetch(1)
        for index in range(1, self._count + 1):
            if index < self._count:
                self._store.fetch(index + 1)
            self._store.get(index)
            self._store.release(index)

    def work(self) -> TimedWork:
        return TimedWork(self.fetch_all, sum(read.nbytes for read in self.reads))


class CacheOnDisk:
    """A cache on disk of about `nbytes`, one part a layer."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, nbytes: int):
        self._slot_layout = SlotLayout(config.num_kv_heads, config.head_dim, dtype)
        self._sequences = max(1, KV_BYTES // self._slot_layout.nbytes(1, KV_SLOTS))
        part = self._slot_layout.nbytes(self._sequences, KV_SLOTS)
        # At least as many layers as staging buffers, so that the warm-up touches each buffer.
        self._capacity = Capacity(1, (KV_SLOTS,) * max(CACHE_BUFFERS, nbytes // part))
        self.nbytes = FetchedTier.file_bytes(self._slot_layout, self._sequences, self._capacity)
        self.what = f"cache, parts of {part / 1e6:.1f} MB"

    def make(self, path: Path, transfers: Transfers) -> None:
        """Create the cache in the file `path` of `nbytes`."""
        self._transfers = transfers
        self._part = FetchedTier(self._slot_layout, 0, self._sequences, capacity=self._capacity,
                                 transfers=transfers, path=path)
        for layer, slots in enumerate(self._capacity.slots):
            self._part.begin(layer, [(self._sequences, slots)])

    def load_all(self) -> None:
        """Load every layer in turn, prefetching the next two."""
        count = len(self._capacity.slots)
        for layer in range(-2, count):
            if layer + 2 < count:
                self._part.load(layer + 2, 0, fetch=True)
            if layer >= 0:
                self._part.get(layer, 0)
        self._transfers.drain()

    def store_all(self) -> None:
        """Store every layer's part in turn, as after a prefill."""
        for layer in range(len(self._capacity.slots)):
            self._part.load(layer, 0, fetch=False)
            self._part.get(layer, 0)
            self._part.store(layer, 0, None)
        self._transfers.drain()


def write_ranges(transfers: Transfers, path: Path, nbytes: int, buffer: torch.Tensor) -> None:
    """Write the start of a file in ranges of `WINDOW` bytes."""
    for offset, length in spans(0, nbytes, WINDOW):
        extent = Extent(path, offset, length)
        transfers.submit("stores", lambda lane, extent=extent: lane.disk.write(
            extent, buffer[: extent.nbytes]))
    transfers.drain()


def default_file(folder: Path) -> Path:
    """Return the largest safetensors file of a folder."""
    files = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    if not files:
        raise UserError(f"no safetensors file in {folder}: give another --model, or --file")
    return files[-1]


def read_range(path: Path, reads: Iterable, nbytes: int) -> tuple[int, int]:
    """Return start and length of the raw reads: the layers' range, if they are in this file."""
    try:
        size = path.stat().st_size // PAGE * PAGE
    except OSError as error:
        raise UserError(f"cannot read --file {path}: {error.strerror}") from error
    if not path.is_file() or not size:
        raise UserError(f"--file {path} is not a file of a page or more")
    nbytes = min(nbytes, size)
    start = min((r.offset for r in reads if r.path.resolve() == path.resolve()), default=0)
    return min(start, size - nbytes), nbytes


@dataclasses.dataclass
class TimedWork:
    """A call to time, which moves `nbytes`."""

    run: Callable[[], object]
    nbytes: int


@dataclasses.dataclass
class Row:
    """A link, the engine's work on it, and raw works to compare with."""

    link: str
    what: str
    raw: dict[tuple, TimedWork]
    engine: TimedWork


def _seconds(work: TimedWork) -> float:
    began = time.perf_counter()
    work.run()
    return time.perf_counter() - began


def rates(works: dict[tuple, TimedWork], repeats: int) -> dict[tuple, float]:
    """Return the median bytes per second of each work; they take turns after a warm-up round."""
    seconds: dict[tuple, list[float]] = {key: [] for key in works}
    for repeat in range(repeats + 1):
        for key, work in works.items():
            seconds[key].append(_seconds(work))
        print(f"round {repeat} of {repeats}" + (" (warms up)" if repeat == 0 else ""), flush=True)
    return {key: works[key].nbytes / statistics.median(times[1:]) for key, times in seconds.items()}


def beside(raw: TimedWork, engine: TimedWork, repeats: int) -> tuple[float, float, float]:
    """Return bytes per second of both and their ratio: medians over pairs of runs.

    A pair is one run of each in succession, as a disk's rate drifts by more than the difference.
    Every other pair starts with the engine.
    """
    measured_rates = []
    for repeat in range(repeats):
        order = (raw, engine) if repeat % 2 == 0 else (engine, raw)
        seconds = {id(work): _seconds(work) for work in order}
        measured_rates.append((raw.nbytes / seconds[id(raw)], engine.nbytes / seconds[id(engine)]))
    ratios = [ours / plain for plain, ours in measured_rates]
    plain, ours = (statistics.median(column) for column in zip(*measured_rates, strict=True))
    return plain, ours, statistics.median(ratios)


def spans(start: int, nbytes: int, request: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each request over a range; the last may be shorter."""
    return ((start + done, min(request, nbytes - done)) for done in range(0, nbytes, request))


class RawFile:
    """Plain O_DIRECT requests on one file.

    Parameters
    ----------
    start, nbytes : int
        The range to read or write, in whole pages.
    buffer : uint8 Tensor, page-aligned, on the host
        Divided among the threads.
    """

    def __init__(self, path: Path, start: int, nbytes: int, buffer: torch.Tensor, *, write: bool):
        self._path, self._start, self.nbytes = path, start, nbytes
        self._view = memoryview(buffer.numpy())
        self._call = os.pwritev if write else os.preadv
        try:
            self._file = os.open(path, os.O_DIRECT | (os.O_RDWR if write else os.O_RDONLY))
        except OSError as error:
            raise UserError(f"{path} can't be opened with O_DIRECT: {error.strerror}; choose a "
                            "file system on a disk") from error

    def close(self) -> None:
        os.close(self._file)

    def sweep(self, request: int, threads: int) -> None:
        """Move the whole range in order, each thread one request at a time."""
        todo, lock = spans(self._start, self.nbytes, request), threading.Lock()

        def work(thread: int) -> None:
            view = self._view[thread * request : (thread + 1) * request]
            while True:
                with lock:
                    offset, length = next(todo, (0, 0))
                if not length:
                    return
                if self._call(self._file, [view[:length]], offset) != length:
                    raise UserError(f"{self._path}: a request came back short")

        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, range(threads)))
        except OSError as error:
            raise UserError(f"{self._path}: {error.strerror}") from error

    def works(self, name: str, settings: Iterable[tuple[int, int]]) -> dict[tuple, TimedWork]:
        """Return a work for each setting, by (name, request, threads)."""
        return {(name, request, threads): TimedWork(
                    lambda request=request, threads=threads: self.sweep(request, threads),
                    self.nbytes)
                for request, threads in settings}


def disk_rows(args, transfers: Transfers, opened: contextlib.ExitStack) -> list[Row]:
    """Return rows of the disk. `opened` closes their files and removes the scratch file."""
    settings = QUICK_SETTINGS if args.quick else SETTINGS
    weights = Weights(args.model, transfers, args.nbytes, all_tensors=not args.quick)
    opened.callback(weights.close)
    start, length = read_range(args.file, weights.reads, args.nbytes)
    cache = CacheOnDisk(weights.config, weights.dtype, args.nbytes)
    folder = RunFolder(args.offload_dir)
    opened.callback(folder.close)
    opened.callback(transfers.abandon)  # before the folder goes
    scratch = folder.file("links.bin", max(args.nbytes, cache.nbytes))
    buffer = transfers.device.host_empty(max(WINDOW, max(r * t for r, t in settings)))
    buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))

    def raw(name: str, *where, write: bool = False) -> dict[tuple, TimedWork]:
        file = RawFile(*where, buffer, write=write)
        opened.callback(file.close)
        return file.works(name, settings)

    plain = raw("write scratch", scratch, 0, args.nbytes, write=True)
    cache.make(scratch, transfers)
    written = TimedWork(lambda: write_ranges(transfers, scratch, args.nbytes, buffer), args.nbytes)
    # Written before it is read, so that data are random and no hole is read.
    return [Row(READ, "weights, layer by layer",
                raw("read --file", args.file, start, length), weights.work()),
            Row(WRITE, f"ranges of {WINDOW // MB} MB", plain, written),
            Row(READ, cache.what, raw("read scratch", scratch, 0, args.nbytes),
                TimedWork(cache.load_all, cache.nbytes)),
            Row(WRITE, cache.what, plain, TimedWork(cache.store_all, cache.nbytes))]


def cuda_memcpy() -> Callable[..., int]:
    """Return cudaMemcpyAsync of the runtime that PyTorch has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    library = next((line.split(maxsplit=5)[5] for line in lines if "libcudart" in line), None)
    if library is None:
        raise UserError("PyTorch has loaded no libcudart: raw copies to the GPU can't be measured")
    copy = ctypes.CDLL(library).cudaMemcpyAsync
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
                     ctypes.c_void_p)
    return copy


def gpu_rows(args, transfers: Transfers) -> list[Row]:
    """Return rows of the links to the GPU: pinned memory, chunks of `COPY` bytes."""
    device, memcpy, stream = transfers.device, cuda_memcpy(), torch.cuda.Stream()
    chunks = [(device.empty(COPY), device.host_empty(COPY)) for _ in range(1 if args.quick else 4)]
    nbytes, rows = len(chunks) * COPY, []
    for link, kind_of_job, kind in ((H2D, "loads", TO_GPU), (D2H, "stores", TO_HOST)):
        pairs = chunks if link == H2D else [(host, gpu) for gpu, host in chunks]

        def plain(pairs=pairs, kind=kind) -> None:
            for target, source in pairs:
                status = memcpy(target.data_ptr(), source.data_ptr(), COPY, kind,
                                stream.cuda_stream)
                if status:
                    raise UserError(f"cudaMemcpyAsync failed: CUDA error {status}")
            stream.synchronize()

        def job(lane, pairs=pairs, link=link) -> None:
            for target, source in pairs:
                lane.copy(target, source, link)

        def ours(kind_of_job=kind_of_job, job=job) -> None:
            transfers.submit(kind_of_job, job).synchronize()
            transfers.record_finished()

        rows.append(Row(link, f"pinned, pieces of {COPY // MB} MB",
                        {(link, COPY, 1): TimedWork(plain, nbytes)}, TimedWork(ours, nbytes)))
    return rows


def cells(row: Row, measured_rates: dict[tuple, float], repeats: int) -> dict[str, object]:
    """Return a row's measured columns: the engine against the fastest raw work."""
    key = max(row.raw, key=measured_rates.__getitem__)
    raw, engine, ratio = beside(row.raw[key], row.engine, repeats)
    return {"link": row.link, "what": row.what, "raw_gb_per_s": raw / GB,
            "engine_gb_per_s": engine / GB, "engine_over_raw": ratio,
            "request_mb": key[1] // MB, "threads": key[2], "nbytes": row.engine.nbytes}


def show_grids(measured_rates: dict[tuple, float]) -> None:
    """Print the raw rates by request size and threads."""
    for name in dict.fromkeys(key[0] for key in measured_rates if len(key) == 3):
        grid = {key[1:]: rate for key, rate in measured_rates.items() if key[0] == name
                and len(key) == 3}
        threads = sorted({threads for _, threads in grid})
        print(f"\nraw, {name}, GB/s" + "".join(f"{t:>6} thr." for t in threads))
        for request in sorted({request for request, _ in grid}):
            print(f"{request // MB:>6} MB".ljust(len(name) + 11)
                  + "".join(f"{grid[request, t] / GB:11.3f}" for t in threads))


def show(rows: list[dict]) -> None:
    print(f"\n{'link':12} {'what':28} {'raw GB/s':>9} {'engine':>9} {'of raw':>7}   goal {GOAL}")
    for row in rows:
        line = f"{row['link']:12} {row['what']:28} {row['raw_gb_per_s']:9.3f}"
        if ratio := row.get("engine_over_raw"):
            line += (f" {row['engine_gb_per_s']:9.3f} {ratio:7.3f}   "
                     + ("met" if ratio >= GOAL else "missed"))
        print(line)


def write(path: Path, rows: list[dict], repeats: int) -> None:
    common = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
              "commit": source_commit(), "host": platform.node(), "repeats": repeats}
    write_csv(path, COLUMNS, (common | row for row in rows))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the flags. Raises `UserError`."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True,
                        help="folder with config.json and safetensors, whose layers are read")
    parser.add_argument("--file", type=Path, help="file for raw reads (the largest safetensors)")
    parser.add_argument("--offload-dir", type=Path, default=Path(OFFLOAD_DIR).expanduser(),
                        help="folder of the scratch file")
    parser.add_argument("--gb", type=float, default=0.5, help="about the GB of each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true",
                        help="some MB, once: only to try this script")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/links.csv"))
    args = parser.parse_args(argv)
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats} must be at least 1")
    if not 0.001 <= args.gb <= 1000:
        raise UserError(f"--gb {args.gb} must be from 0.001 to 1000")
    if not args.model.is_dir():
        raise UserError(f"--model {args.model} is not a folder")
    args.nbytes = 32 * MB if args.quick else int(args.gb * GB) // PAGE * PAGE
    args.repeats = 1 if args.quick else args.repeats
    args.file = args.file or default_file(args.model)
    with catch_write_errors("--out", str(args.out)):
        args.out.parent.mkdir(parents=True, exist_ok=True)
    check_writable("--out", str(args.out))
    return args


def measure(args: argparse.Namespace) -> list[dict]:
    """Return the rows of the table, and print the grids."""
    with contextlib.ExitStack() as opened:
        device = open_device()
        transfers = Transfers(device, links=LinkStats(), trace=Trace(enabled=False))
        opened.callback(transfers.close)
        rows = disk_rows(args, transfers, opened)
        if device.is_gpu:
            rows += gpu_rows(args, transfers)
        else:
            print(f"no GPU here: rows of {H2D} and {D2H} are left out")
        print(f"{platform.node()}: O_DIRECT, page cache bypassed; raw reads of {args.file}, "
              f"scratch file in {args.offload_dir}", flush=True)
        works: dict[tuple, TimedWork] = {}
        for row in rows:
            works |= row.raw
        measured = rates(works, args.repeats)
        show_grids({key: rate for key, rate in measured.items() if key[0] not in (H2D, D2H)})
        table = [cells(row, measured, PAIRS * args.repeats) for row in rows]
    nbytes = (64 << 20) if args.quick else 2 << 30
    memory = {"link": MEMORY, "what": "sum of float32", "nbytes": nbytes,
              "raw_gb_per_s": memory_read_rate(nbytes) / GB, "threads": torch.get_num_threads()}
    return [*table, memory]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    rows = measure(args)
    show(rows)
    write(args.out, rows, args.repeats)


if __name__ == "__main__":
    sys.exit(exit_status(main))
