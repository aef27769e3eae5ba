"""Long runs: flat memory, nothing leaked, disk errors that end a run, Ctrl-C in every phase.

What has to be killed if it hangs runs in a subprocess: functions named `in_child_...`. One process
loads the package and forks a child for each case, as loading torch would take most of the time.
"""

import contextlib
import errno
import gc
import importlib
import json
import os
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import selection
from helpers.error_cases import error_line
from helpers.fakes import LazyDevice
from helpers.generation import token_ids
from helpers.internals import READ, WRITE, open_devices
from helpers.subprocesses import environment
from helpers.tiny_tokenizers import with_words

import flexgen_h2o
from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.engine.sampling import GenerationSampler
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.errors import UserError
from flexgen_h2o.storage.device import PAGE, Pages
from flexgen_h2o.storage.disk import WORKERS, Disk
from flexgen_h2o.storage.run_folder import RUN_PREFIX
from flexgen_h2o.storage.transfer import QUEUES

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

HANG = 100  # seconds that a child may take, far more than on a busy machine
FILE = "model.safetensors"
NEW = 20  # more than the write-back log of a cache on disk
FIRST, LAST = 40, 190  # tokens of a long run after which its resources are compared
SIZES = {"vocab_size": 4000, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "tie_word_embeddings": False, "eos_token_id": None}
"""Small, but with tables and a cache of a megabyte or two: copies that are kept would be seen."""
LARGE = {"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 2816,
         "num_hidden_layers": 26, "num_attention_heads": 16, "num_key_value_heads": 16}
"""26 layers of 26 MB and two tables of 16 MB."""
POOLS = {f"{queue}_0" for queue in QUEUES} | {f"disk_{worker}" for worker in range(WORKERS)}
"""Threads of an engine, which start when they are first needed together. They are not counted, once
each; what another engine left behind is.
"""


def write_model(folder: Path, **sizes: int) -> None:
    """Save a LLaMA of random bfloat16 weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.default_generator.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES | sizes)).bfloat16().save_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model of a megabyte that takes 4096 tokens, with a tokenizer."""
    folder = tmp_path_factory.mktemp("long")
    write_model(folder / "bare", max_position_embeddings=4096, num_hidden_layers=2, vocab_size=1000)
    return with_words(folder / "bare", folder / "tiny")


@pytest.fixture(scope="module")
def run_child(tmp_path_factory, model):
    """Return a function that runs ``in_child_{work}(folder, model, *arguments)`` in a subprocess.

    It returns a dict: status (of the exit; negative for a signal), out, err, seconds (wall and CPU
    time since the child called `note_time`, or None), result (what the function returned, or None)
    and folder, in which the child worked. Equal calls run once.
    """
    root, tests = tmp_path_factory.mktemp("children"), Path(__file__).parent
    children: dict[str, dict] = {}
    code = "import test_long_runs; test_long_runs.fork_children()"
    folders = Path(flexgen_h2o.__file__).parents[1], tests, tests.parent
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True,
                          env=environment(*folders, OMP_NUM_THREADS="1")) as process:
        def run(work: str, *arguments) -> dict:
            key = json.dumps([work, arguments])
            if key not in children:
                folder = root / str(len(children))
                folder.mkdir()
                print(json.dumps([work, [str(folder), str(model), *arguments]]),
                      file=process.stdin, flush=True)
                children[key] = json.loads(process.stdout.readline()) | {"folder": folder}
            return children[key]

        yield run
        process.stdin.close()
    shutil.rmtree(root / "large", ignore_errors=True)


def fork_children() -> None:
    """Fork for each case that comes on stdin, and print the result of its child."""
    importlib.import_module("transformers.generation.logits_process")
    torch.set_num_threads(1)
    gc.freeze()
    for line in sys.stdin:
        work, arguments = json.loads(line)
        folder = Path(arguments[0])
        child = os.fork()
        if child == 0:
            signal.alarm(HANG)  # ends a hang, wherever it is
            os.chdir(folder)
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
            result = globals()[f"in_child_{work}"](*arguments)
            (folder / "result").write_text(json.dumps(result))
            os._exit(0)  # spares the second that torch takes to leave
        _, status, used = os.wait4(child, 0)
        stopped = time.monotonic(), used.ru_utime + used.ru_stime
        noted, result = folder / "time", folder / "result"
        since = map(float, noted.read_text().split()) if noted.exists() else None
        print(json.dumps({
            "status": os.waitstatus_to_exitcode(status), "out": (folder / "out").read_text(),
            "err": (folder / "err").read_text(),
            "result": json.loads(result.read_text()) if result.exists() else None,
            "seconds": since and [end - begin for end, begin in zip(stopped, since, strict=True)]}),
            flush=True)


def note_time() -> None:
    """Note the moment in the child's folder, and the CPU time until then."""
    Path("time").write_text(f"{time.monotonic()} {time.process_time()}")


def status(key: str) -> int:
    """Return a size in /proc/self/status in bytes: VmRSS is in memory, VmHWM was at most."""
    (size,) = re.findall(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(size) * 1024


def forget_peak() -> None:
    """Reset VmHWM to the current resident size."""
    Path("/proc/self/clear_refs").write_text("5")


def held() -> dict[str, int]:
    """Count the resources that this process could leak."""
    gc.collect()
    objects = gc.get_objects()
    names = [thread.name for thread in threading.enumerate()]
    return {"descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(names) - len(POOLS.intersection(names)),
            "buffers": sum(type(item) is Pages for item in objects), "objects": len(objects),
            "mappings": len(Path("/proc/self/maps").read_text().splitlines())}


def placed(disk: int) -> Policy:
    """Return a policy with this percentage of everything on disk."""
    place = Placement(100 - disk, 0, disk)
    return Policy(gpu_batch_size=4, weights=place, cache=place)


@contextlib.contextmanager
def at_each_token(look):
    """Call ``look(forward_pass)`` after each forward pass."""
    reduce = GenerationSampler.reduce

    def watched(self, batch, forward_pass, *rest):
        look(forward_pass)
        return reduce(self, batch, forward_pass, *rest)

    with mock.patch.object(GenerationSampler, "reduce", watched):
        yield


# Memory and other things that a process holds


def in_child_decode(folder: str, model: str, disk: int, heavy: float | None) -> dict:
    """Return the growth of resources between two points of one run.

    It is the least of five steps at each point, as jobs in progress hold some.
    """
    seen = {}

    def look(forward_pass: int) -> None:
        for point in (FIRST, LAST):
            if 0 <= point - forward_pass < 5:
                counts = {**held(), "bytes": status("VmRSS")}
                least = seen.get(point, counts)
                seen[point] = {name: min(value, least[name]) for name, value in counts.items()}

    h2o = None if heavy is None else H2OConfig(heavy_ratio=heavy)
    with at_each_token(look), LLM(model, policy=placed(disk), h2o=h2o, device="cpu",
                                  dtype="bfloat16", offload_dir=folder, progress=False) as llm:
        llm.generate([[1 + i] * 16 for i in range(4)], max_new_tokens=LAST + 2, eos_token_id=-1)
    return {key: seen[LAST][key] - before for key, before in seen[FIRST].items()}


@pytest.mark.parametrize(("disk", "heavy"), [
    (100, 0.25), *selection.full_cases((0, 0.25), (0, None), (100, None))])
def test_memory_does_not_grow_with_the_steps(run_child, disk, heavy):
    """With weights and cache in memory and on disk, the full cache and H2O."""
    child = run_child("decode", disk, heavy)
    assert child["status"] == 0, child
    grown = child["result"]
    # Less than if each of the 150 steps kept one: 150 objects or mappings, or 15 MB of a layer's
    # weights. The rest is for what Python and the allocator do on their own.
    assert grown["objects"] < 100 and grown["mappings"] < 100, child
    assert grown["bytes"] < 7_500_000, child
    assert grown["descriptors"] <= 0 and grown["threads"] <= 0 and grown["buffers"] <= 0, child


def in_child_calls(folder: str, model: str) -> dict:
    """Return the resources after each of 16 calls, every fourth of which fails, and after close."""
    read = os.preadv

    def fail(descriptor, buffers, offset):
        if offset > PAGE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, buffers, offset)

    def engine() -> LLM:
        return LLM(model, policy=placed(50), h2o=H2OConfig(heavy_ratio=0.25), weight_bits=4,
                   weight_cache=f"{folder}/cache", device="cpu", dtype="bfloat16",
                   offload_dir=f"{folder}/offload", progress=False)

    engine().close()
    bare, after = held(), []
    with engine() as llm:
        for call in range(16):
            ends = mock.patch.object(os, "preadv", fail) if call % 4 == 3 else None
            with ends or contextlib.nullcontext(), \
                    contextlib.suppress(UserError) if ends else contextlib.nullcontext():
                llm.generate([[1 + i] * 16 for i in range(6)], max_new_tokens=5, eos_token_id=-1)
            after.append(held())
    del llm
    return {"bare": bare, "after": after, "closed": held(), "left": os.listdir(f"{folder}/offload")}


def test_calls_leave_nothing_behind(run_child):
    """Weights have 4 bits, and some of the calls fail."""
    child = run_child("calls")
    assert child["status"] == 0, child
    result = child["result"]
    for early, late in zip(result["after"][4:8], result["after"][12:], strict=True):
        for key in ("descriptors", "threads", "buffers"):
            assert late[key] == early[key], (key, result)
        # A call that kept anything of a sequence or a layer would keep ten objects, and one that
        # kept a buffer a mapping: eight times as many after eight calls. A few may be Python's own.
        assert late["objects"] - early["objects"] < 80, result
        assert late["mappings"] - early["mappings"] < 8, result
    for key in ("descriptors", "threads", "buffers"):
        assert result["closed"][key] == result["bare"][key], (key, result)
    assert result["left"] == []


def test_pinned_memory_is_released(model, tmp_path, monkeypatch):
    """On a fake GPU that counts buffers as CUDA would its pinned ones."""
    locked: list[int] = []

    class Locking(LazyDevice):
        def empty(self, nbytes):
            return torch.full((-(-nbytes // PAGE) * PAGE,), 255, dtype=torch.uint8)

        def _pin(self, tensor, pages, pinned):
            if pinned:
                locked.append(tensor.nbytes)
                pages.on_free = partial(locked.remove, tensor.nbytes)

    open_devices(monkeypatch, Locking)
    place = Placement(30, 40, 30)
    policy = Policy(gpu_batch_size=4, num_gpu_batches=2, weights=place, cache=place,
                    activations=place)
    gc.collect()
    with LLM(str(model), policy=policy, weight_bits=4, weight_cache=str(tmp_path / "cache"),
             offload_dir=str(tmp_path / "offload"), progress=False) as llm:
        seen = []
        for call in range(6):
            llm.generate([[1 + i] * (8, 40)[call % 2] for i in range(5)], max_new_tokens=2)
            gc.collect()
            seen.append(sum(locked))
        assert min(seen) > 0 and len(set(seen[1::2])) == len(set(seen[2::2])) == 1
    del llm
    gc.collect()
    assert locked == []


def in_child_prompt(folder: str, model: str, chunk: int | None) -> dict:
    """Return the memory that a prompt of 3,000 tokens takes for a moment, and its cache's bytes."""
    with LLM(model, policy=Policy(gpu_batch_size=1, prefill_chunk=chunk),
             h2o=H2OConfig(heavy_ratio=0.1), device="cpu", dtype="bfloat16", progress=False) as llm:
        llm.generate([[5] * 40], max_new_tokens=3)
        before = status("VmRSS")
        forget_peak()
        llm.generate([[(7 * i) % 999 for i in range(3000)]], max_new_tokens=3, eos_token_id=-1)
        return {"above": status("VmHWM") - before, "cache": llm.stats.kv_cache_bytes}


@pytest.mark.parametrize("chunk", [None, *selection.full(500)])
def test_a_long_prompt_takes_linear_memory(run_child, chunk):
    """3,000 tokens, whose caches are far less than one matrix of scores."""
    child = run_child("prompt", chunk)
    assert child["status"] == 0, child
    whole = 3000 * 2 * 2 * 2 * 32 * 2  # layers, keys and values, KV heads, head_dim, bfloat16
    assert child["result"]["cache"] == whole // 5
    scores = 4 * 3000 * 3000 * 4  # of the four heads of one layer, in float32
    # The keys and values twice and activations as large as they; a tenth of the matrix for threads'
    # buffers and the allocator.
    assert child["result"]["above"] < 3 * whole + scores // 10, child


def in_child_write(folder: str, model: str) -> None:
    """Write the models of the next children beside their folders."""
    for name, sizes in (("large", LARGE), ("small", {})):
        write_model(Path(folder).parent / name, **sizes)


def in_child_run(folder: str, model: str, gpu: int, name: str) -> dict:
    """Return the peak of memory of a run of a model with weights on disk, or not."""
    policy = Policy(weights=Placement(gpu, 0, 100 - gpu), gpu_batch_size=4)
    with LLM(Path(folder).parent / name, policy=policy, device="cpu", dtype="bfloat16",
             offload_dir=folder, progress=False) as llm:
        prompts = [[(7 * i + j) % 4000 for j in range(48)] for i in range(4)]
        llm.generate(prompts, max_new_tokens=6, eos_token_id=-1)
        stats, config = llm.stats, llm.model_config
    return {"peak": status("VmHWM"), "cache": stats.kv_cache_bytes,
            "read": stats.links.get("disk->cpu", [0])[0], "layer": 2 * config.layer_parameters(),
            "tables": 2 * (config.embed_shapes().parameters
                           + config.head_shapes().parameters),
            "model": 2 * config.num_parameters()}


@pytest.mark.full
def test_weights_on_disk_are_never_all_in_memory(run_child):
    run_child("write")
    bare, disk, memory = (run_child("run", gpu, name)["result"] for gpu, name in (
        (100, "small"), (0, "large"), (100, "large")))
    # A layer that computes, one that is read and one of workspace; and as much again and a layer
    # for what the allocator keeps of what was freed. That is seven layers of 26.
    bound = bare["peak"] + 7 * disk["layer"] + disk["tables"] + disk["cache"]
    assert disk["model"] > 600_000_000, disk
    assert disk["read"] > 6 * 0.95 * (disk["model"] - disk["tables"]), disk
    assert disk["peak"] < bound, (bare, disk)
    assert memory["peak"] > bound, ("the bound would hold with all in memory too", bare, memory)


def in_child_quantize(folder: str, model: str, name: str) -> dict:
    """Return the peak of memory of opening a model with weights on disk in 4 bits."""
    root = Path(folder).parent
    with LLM(root / "large", policy=Policy(weights=Placement(0, 0, 100)), device="cpu",
             dtype="bfloat16", weight_bits=4, weight_cache=root / "quantized",
             progress=False) as llm:
        peak = status("VmHWM")
        llm.generate([[1]], max_new_tokens=1)
        return {"peak": peak, "weights": llm.stats.weight_bytes,
                "layer": 2 * llm.model_config.layer_parameters()}


@pytest.mark.full
def test_weights_are_quantized_a_few_tensors_at_a_time(run_child):
    run_child("write")
    first, again = (run_child("quantize", name)["result"] for name in ("first", "again"))
    assert first["weights"] > 3 * first["layer"], "as much as that would be seen"
    # The tensors at work, with their codes, are less than two layers; and as much for what the
    # allocator keeps of those before them. The whole model has 28.
    assert first["peak"] - again["peak"] < 4 * first["layer"], (first, again)


TRAINING_MODULES = ("torch._dynamo", "torch._inductor", "sympy", "triton", "accelerate", "scipy",
                    "matplotlib")


def in_child_imports(folder: str, model: str) -> list[str]:
    """Return the modules for training that generating from a text imports."""
    with LLM(model, h2o=H2OConfig(heavy_ratio=0.2), device="cpu", progress=False) as llm:
        llm.generate(["w1 w2 ### w118"], max_new_tokens=2, do_sample=True, temperature=0.5, top_k=9)
    return [name for name in TRAINING_MODULES if name in sys.modules]


def test_generating_imports_no_training_modules(run_child):
    child = run_child("imports")
    assert (child["status"], child["result"]) == (0, []), child


# Errors of the disk, and threads that die


def file_of(descriptor: int) -> str:
    """The path of an open file."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


def failing(armed: threading.Event, owner, name: str, code: int | None, part: str = ""):
    """A patch of a function: once `armed`, an error for files with `part`, or of its thread."""
    work = getattr(owner, name)

    def fail(*args, **options):
        if armed.is_set():
            if code is None:
                raise RuntimeError("the thread died")
            if part in file_of(args[0]):
                raise OSError(code, os.strerror(code))
        return work(*args, **options)

    return mock.patch.object(owner, name, fail)


ERRORS = {
    "weights read": (os, "preadv", errno.EIO, FILE),
    "cache read": (os, "preadv", errno.EIO, RUN_PREFIX),
    "disk full": (os, "pwritev", errno.ENOSPC, RUN_PREFIX),
    "write": (os, "pwritev", errno.EIO, RUN_PREFIX),
    "reader dies": (Disk, "_read_chunk", None),
    "writer dies": (Disk, "_write_chunk", None),
    "queue dies": (WeightStore, "load_unit", None),
    "no thread starts": (threading.Thread, "start", None)}
CHANGES = {"removed": os.remove,
           "halved": lambda path: os.truncate(path, os.path.getsize(path) // 2),
           "cut": lambda path: os.truncate(path, os.path.getsize(path) - 1)}
SAYS = {
    "weights read": "reading .*model.safetensors failed: Input/output error; check the disk",
    "cache read": "reading .*failed: Input/output error; check the disk",
    "disk full": "the disk of .* is full: free some space, .* choose another --offload-dir",
    "write": "writing .* failed: Input/output error; check --offload-dir",
    "halved": "model.safetensors ends at byte [0-9]+: it was cut short during the run",
    "cut": "model.safetensors ends at byte [0-9]+: it was cut short during the run",
    **dict.fromkeys(("reader dies", "writer dies", "queue dies", "no thread starts"),
                    "^the thread died$")}


def in_child_fault(folder: str, model: str, *form) -> dict:
    """Return the error of a run by a fault in its fifth forward pass, what the run leaves behind,
    and the tokens of the next run. Threads fail to start in the first pass."""
    bits, overlap, fault = form
    armed, offload = threading.Event(), Path(folder) / "offload"
    model = shutil.copytree(model, f"{folder}/tiny")

    def look(forward_pass: int) -> None:
        if forward_pass == 5 and not armed.is_set():
            armed.set()
            if fault in CHANGES:
                CHANGES[fault](file)

    place = Placement(0, 0, 100)
    policy = Policy(gpu_batch_size=1, num_gpu_batches=2, weights=place, cache=place,
                    overlap=overlap)
    result = {"error": None, "tokens": None, "again": None}
    llm = LLM(model, policy=policy, weight_bits=bits, weight_cache=f"{folder}/weights",
              device="cpu", dtype="bfloat16", offload_dir=str(offload), progress=False)
    [file] = Path(folder).glob(f"weights/*/{FILE}" if bits != 16 else f"tiny/{FILE}")

    def tokens(new: int) -> list[list[int]]:
        return token_ids(llm.generate([[7] * 9, [8, 9]], max_new_tokens=new, eos_token_id=-1))

    if fault == "no thread starts":
        armed.set()
    patch = failing(armed, *ERRORS[fault]) if fault in ERRORS else contextlib.nullcontext()
    with patch, at_each_token(look):
        try:
            result["tokens"] = tokens(NEW)
        except (UserError, RuntimeError) as error:
            result["error"] = str(error)
    result["armed"] = armed.is_set()
    result["left"] = os.listdir(offload)
    try:
        result["again"] = tokens(4)
    except UserError as error:
        result["again"] = str(error)
    llm.close()
    result["closed"] = os.listdir(offload)
    result["threads"] = [thread.name for thread in threading.enumerate()]
    return result


COMMON = ("none", "weights read", "disk full", "writer dies", "halved")


@pytest.mark.parametrize(("bits", "overlap"), [
    (4, True), *selection.full_cases((16, True), (4, False))])
@pytest.mark.parametrize("fault", [
    *COMMON, *selection.full(*(fault for fault in (*ERRORS, *CHANGES) if fault not in COMMON))])
def test_a_fault_ends_the_run_and_not_the_engine(run_child, bits, overlap, fault):
    child, plain = (run_child("fault", bits, overlap, name) for name in (fault, "none"))
    assert child["status"] == 0 and child["err"] == "", "a hang if it is -SIGALRM"
    result, expected = child["result"], plain["result"]["tokens"]
    assert result["armed"] and expected is not None
    if fault in SAYS:
        assert "\n" not in result["error"] and result["left"] == [], result
        assert re.search(SAYS[fault], result["error"]), result
    else:  # a file that is open can be removed: its bytes stay
        assert result["error"] is None and result["tokens"] == expected
    if fault in ("halved", "cut"):
        assert re.search(SAYS[fault], result["again"]), result
    else:
        assert result["again"] == [tokens[:4] for tokens in expected], result
    assert result["closed"] == []
    assert not [name for name in result["threads"] if name.startswith(("disk", "weights"))]


# Limits and places that the system sets


def in_child_limit(folder: str, model: str, flags: list[str], home: str, most: int) -> int:
    """The status of a command whose home is `home` and whose files hold `most` bytes."""
    os.environ["HOME"] = home
    os.environ.pop("FLEXGEN_H2O_CACHE", None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    from flexgen_h2o.commands import generate

    return generate.main(["--model", model, "--prompt-len", "60", "--gen-len", "4", "--no-log",
                          "--device", "cpu", "--gpu-batch-size", "2", "--verbose", "0", *flags])


ANY, FEW = 1 << 30, 1 << 15
WEIGHTS = ["--percent", "0", "0", "100", "0"]  # on disk
CACHE = ["--percent", "100", "0", "0", "0"]
HERE = ["--offload-dir", "offload"]
BITS = ["--weight-bits", "4"]
LIMITS = {
    "home, in memory": ([], "/proc", ANY, None),
    "home, weights on disk": (WEIGHTS, "/proc", ANY, None),
    "home, cache on disk": (CACHE, "/proc", ANY, "the run does not fit. disk space: .* 0 bytes"),
    "home, cache elsewhere": ([*CACHE, *HERE], "/proc", ANY, None),
    "home, converted": ([*WEIGHTS, "--dtype", "float16"], "/proc", ANY, "set FLEXGEN_H2O_CACHE"),
    "home, quantized": (BITS, "/proc", ANY, "choose another --weight-cache, or"),
    "home, not kept": ([*BITS, "--no-weight-cache"], "/proc", ANY, None),
    "size, cache on disk": ([*CACHE, *HERE], ".", FEW, "writing .*: File too large; check"),
    "size, dummy weights": (["--path", "_DUMMY_", "--model", "opt-125m", *WEIGHTS, *HERE], ".", FEW,
                            "writing .*weights.bin.*: File too large; check --offload-dir"),
    "size, quantized": ([*BITS, "--weight-cache", "kept"], ".", FEW,
                        "cannot write a converted copy .*File too large")}
"""Flags, home and most bytes of a file; what is said, or None where the run ends well. /proc takes
no folders, not even from root."""


COMMON_LIMITS = ("home, cache on disk", "home, converted", "size, cache on disk", "size, quantized")


@pytest.mark.parametrize("case", [
    *COMMON_LIMITS, *selection.full(*(case for case in LIMITS if case not in COMMON_LIMITS))])
def test_read_only_home_and_limited_file_size(run_child, case):
    *arguments, message = LIMITS[case]
    child = run_child("limit", *arguments)
    assert child["status"] == 0, child
    if message is None:
        assert (child["result"], child["err"]) == (0, ""), child
    else:
        assert child["result"] == 2 and child["out"] == "", child
        assert re.search(message, error_line(child["err"])), child
    left = [path for path in child["folder"].glob("*/**/*") if path.is_file()]
    assert not [path for path in left if path.suffix != ".lock"], left


# Ctrl-C


QUANTIZE, PREFILL, DECODE = (f"kernels.ops:{name}" for name in (
    "quantize_matrix", "prefill_attention", "decode_attention"))
REMOVE = "storage.run_folder:shutil.rmtree"
CLEANING = ("llm:LLM.close", "engine.workspace:Workspace.close", "storage.transfer:Transfers.close",
            "storage.run_folder:_remove_folder", REMOVE)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DISK = ["--percent", "0", "0", "0", "0"]
ANEW = ["--weight-bits", "4", "--no-weight-cache"]
KEPT = ["--weight-bits", "4", "--weight-cache", "cache"]
PHASES = {
    "loading": ([READ], []),
    "loading and quantizing": ([QUANTIZE], ANEW),
    "loading to the offload folder": ([WRITE], ANEW + DISK),
    "quantizing": ([QUANTIZE] * 2, KEPT),
    "prefill": ([PREFILL] * 2, DISK),
    "prefill, at a write": ([PREFILL, WRITE], KEPT + DISK),
    "decode": ([DECODE] * 9, DISK),
    "decode, by SIGTERM": ([DECODE] * 9, DISK, signal.SIGTERM),
    "decode, by SIGHUP": ([DECODE] * 9, DISK, signal.SIGHUP),
    "making the run folder": (["storage.run_folder:fcntl.flock"] * 2, DISK),
    "removing the run folder": ([REMOVE], DISK, signal.SIGTERM),
    "decode, at a read": ([DECODE] * 9 + [READ], KEPT + DISK)}
"""What is called, one after the other, before Ctrl-C comes in the last; flags that lead there; and
another signal in place of Ctrl-C. While all is cleaned up more signals come than could be typed.
Chunks are read and written in threads, matrices quantized in them: there the main one waits."""


def interrupt_at(spots: list[str], number: int = signal.SIGINT) -> None:
    """Patch the package so that the last of `spots` sends a signal, once the others were called.

    From then on each of `CLEANING` sends all that end a program.
    """
    waiting, lock = list(spots), threading.Lock()

    def patched(spot: str, work):
        def call(*args, **options):
            with lock:
                is_next = waiting[:1] == [spot]
                if is_next:
                    waiting.pop(0)
                last = is_next and not waiting
                later = not (is_next or waiting) and spot in CLEANING
            if last:
                note_time()
                os.kill(os.getpid(), number)
            for other in ENDING if later else ():
                os.kill(os.getpid(), other)
            return work(*args, **options)

        return call

    for spot in {*spots, *CLEANING}:
        module, _, path = spot.partition(":")
        owner = importlib.import_module(f"flexgen_h2o.{module}")
        *holders, name = path.split(".")
        for holder in holders:
            owner = getattr(owner, holder)
        setattr(owner, name, patched(spot, getattr(owner, name)))


def in_child_interrupt(folder: str, model: str, spots: list[str], flags: list[str],
                       number: int = signal.SIGINT) -> None:
    """Run the command line, which ends this process with its status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt_at(spots, number)
    sys.argv = ["flex_opt", "--model", model, "--prompt-len", "60", "--gen-len", "60",
                "--gpu-batch-size", "2", "--offload-dir", "offload", "--device", "cpu", "--no-log",
                *flags]
    sys.modules.pop("flexgen_h2o.flex_opt", None)  # -m runs a module that is not loaded yet
    runpy.run_module("flexgen_h2o.flex_opt", run_name="__main__", alter_sys=True)


COMMON_PHASES = ("loading", "prefill, at a write", "decode, by SIGTERM")


@pytest.mark.parametrize("phase", [
    *COMMON_PHASES, *selection.full(*(phase for phase in PHASES if phase not in COMMON_PHASES))])
def test_an_interrupt_ends_the_command(run_child, phase):
    child = run_child("interrupt", *PHASES[phase])
    assert child["status"] == 128 + (PHASES[phase][2:] or (signal.SIGINT,))[0], child
    assert child["err"] == "interrupted\n" and child["out"] == "", child
    wall, cpu = child["seconds"]
    assert wall < 10 and cpu < 2, child
    offload, cache = child["folder"] / "offload", child["folder"] / "cache"
    assert not offload.exists() or list(offload.iterdir()) == []
    kept = list(cache.glob("[!.]*/[!.]*")) if cache.exists() else []
    assert [path.name for path in kept] == [FILE] * (phase.endswith(("write", "read"))), kept
    assert not list(cache.glob(".*.tmp"))
