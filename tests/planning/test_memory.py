"""Resident memory: weights on disk stay there, and call after call takes no more.

How much Python, torch and the allocator take differs from build to build. So a bound is on what
comes on top of a run of a tiny model, or is a part of what the fault that it looks for would take.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.selection import full
from helpers.subprocesses import environment

from flexgen_h2o.models import family
from flexgen_h2o.models.convert import natural_key
from flexgen_h2o.models.dummy import DummyCheckpoint
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.models.safetensors_io import write_safetensors

MB = 10**6
BATCH, PROMPT, NEW = 4, 48, 6
LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
pytestmark = LINUX


def llama(**sizes) -> dict:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "tie_word_embeddings": False, "eos_token_id": None, **sizes}


# 26 layers of 26 MB and two tables of 16 MB.
LARGE = llama(vocab_size=8000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=26,
              num_attention_heads=16, num_key_value_heads=16)
# Small, but with tables and a cache of a megabyte or two: ten that were kept would be seen.
TINY = llama(vocab_size=4000, hidden_size=128, intermediate_size=128, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2)


def write_model(folder: Path, config: dict) -> None:
    """A folder of seeded random bfloat16 weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    cfg = from_transformers(config, folder.name)
    weights = family(cfg).weights(cfg)
    groups = (weights.embed, *weights.layers, weights.head)
    shapes = {spec.name: spec.shape for group in groups for spec in group.values()}
    dummy = DummyCheckpoint(shapes, torch.bfloat16, seed=0)

    def chunks(name: str):
        tensor = torch.empty(shapes[name], dtype=torch.bfloat16)
        dummy.read(name, tensor)
        yield tensor

    layout = {name: (torch.bfloat16, shapes[name]) for name in sorted(shapes, key=natural_key)}
    write_safetensors(folder / "model.safetensors", layout, chunks)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The folder of a model that would be seen in memory; removed as soon as it is not needed."""
    folder = tmp_path_factory.mktemp("memory") / "large"
    write_model(folder, LARGE)
    yield folder
    shutil.rmtree(folder)


COMMON = """
import json, os, sys, threading
import torch
torch.set_num_threads(1)  # beside other tests a second one waits for its core
from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.storage.disk import WORKERS
from flexgen_h2o.storage.transfer import LANES

# An engine's own start when they are first needed together, and are not counted; once each, so that
# what another engine left behind is.
POOLS = {f"{lane}_0" for lane in LANES} | {f"disk_{worker}" for worker in range(WORKERS)}

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

def held():
    names = [each.name for each in threading.enumerate()]
    return {"fds": len(os.listdir("/proc/self/fd")),
            "threads": len(names) - len(POOLS.intersection(names))}

"""


def measure(code: str, *argv: object) -> dict:
    """What `code` prints as JSON, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", COMMON + code, *map(str, argv)],
                          capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


RUN = """
folder, offload, *numbers = sys.argv[1:]
gpu, disk, batch, prompt, new = map(int, numbers)
policy = Policy(weights=Placement(gpu, 0, disk), gpu_batch_size=batch)
with LLM(folder, policy=policy, device="cpu", dtype="bfloat16", offload_dir=offload,
         progress=False) as llm:
    before = status("VmHWM")
    prompts = [[(7 * i + j) % 4000 for j in range(prompt)] for i in range(batch)]
    llm.generate(prompts, max_new_tokens=new, eos_token_id=-1)
    links = llm.stats.links
    cache = llm.stats.kv_cache_bytes
print(json.dumps({"peak": status("VmHWM"), "loaded": before, "cache": cache,
                  "read": links.get("disk->cpu", [0])[0]}))
"""


@pytest.mark.full
def test_weights_on_disk_are_never_all_in_memory(large, tmp_path):
    cfg = from_transformers(LARGE, "large")
    layer = 2 * cfg.layer_parameters()
    tables = 2 * (cfg.embed_parameters() + cfg.head_parameters())
    model = 2 * cfg.num_parameters()
    arguments = (BATCH, PROMPT, NEW)
    write_model(tmp_path / "tiny", TINY)
    bare = measure(RUN, tmp_path / "tiny", tmp_path, 100, 0, *arguments)
    away = measure(RUN, large, tmp_path, 0, 100, *arguments)
    here = measure(RUN, large, tmp_path, 100, 0, *arguments)
    # A layer that computes, one that is read and one of workspace; and as much again and a layer
    # for what the allocator keeps of what was freed. That is seven layers of 26.
    bound = bare["peak"] + 7 * layer + tables + away["cache"]
    figures = {"bound": bound, "layer": layer, "tables": tables, "model": model,
               "bare": bare, "on disk": away, "in memory": here}
    shown = json.dumps(figures, indent=1)
    assert model > 600 * MB and away["read"] > NEW * 0.95 * (model - tables), shown
    assert away["peak"] < bound, shown
    assert here["peak"] > bound, f"the bound would hold with all in memory too: {shown}"


QUANTIZE = """
folder, cache = sys.argv[1:]
with LLM(folder, policy=Policy(weights=Placement(0, 0, 100)), device="cpu", dtype="bfloat16",
         weight_bits=4, weight_cache=cache, progress=False) as llm:
    peak = status("VmHWM")
    llm.generate([[1]], max_new_tokens=1)
    print(json.dumps({"peak": peak, "weights": llm.stats.weight_bytes}))
"""


@pytest.mark.full
def test_weights_are_quantized_a_few_tensors_at_a_time(large, tmp_path):
    cfg = from_transformers(LARGE, "large")
    layer, model = 2 * cfg.layer_parameters(), 2 * cfg.num_parameters()
    first, again = (measure(QUANTIZE, large, tmp_path / "cache") for _ in range(2))
    assert first["weights"] > 3 * layer, "as much as that would be seen"
    # The tensors at work, with their codes, are less than two layers; and as much for what the
    # allocator keeps of those before them. The whole model has 28.
    assert first["peak"] - again["peak"] < 4 * layer, (first, again, layer, model)


CALLS = """
folder, offload = sys.argv[1:]

def engine(disk):
    place = Placement(100 - disk, 0, disk)
    return LLM(folder, device="cpu", dtype="bfloat16", offload_dir=offload, progress=False,
               policy=Policy(gpu_batch_size=8, num_gpu_batches=2, weights=place, cache=place,
                             activations=place))

def call(llm, requests, length):
    llm.generate([[1 + i] * length for i in range(requests)], max_new_tokens=18, eos_token_id=-1)
    return status("VmRSS"), held(), llm.stats.kv_cache_bytes

engine(50).close()
bare = held()  # with tqdm's one thread, which stays
with engine(0) as llm:
    same = [call(llm, 16, 150) for _ in range(10)]
with engine(50) as llm:
    # Few long ones and many short ones do not fit into each other's room.
    rooms = [call(llm, *((4, 230) if i % 2 else (16, 150))) for i in range(10)]
fresh = []
for _ in range(10):
    with engine(50) as llm:
        rss, each, cache = call(llm, 9, 100)
        fresh.append((rss, each, cache + llm.stats.weight_bytes))
print(json.dumps({"same": same, "rooms": rooms, "fresh": fresh, "bare": bare,
                  "closed": held(), "offload": os.listdir(offload)}))
"""


@pytest.mark.full
def test_calls_and_engines_leak_nothing(tmp_path):
    """No memory, no file descriptors, no threads, however often one generates or opens."""
    write_model(tmp_path / "tiny", TINY)
    found = measure(CALLS, tmp_path / "tiny", tmp_path / "offload")
    shown = json.dumps(found, indent=1)
    for name in ("same", "rooms", "fresh"):
        rss, held, sizes = zip(*found[name], strict=True)
        # Of two neighbours the smaller, as every other call may be of another kind. Half of what
        # the calls between would take if each kept its cache, or each engine its weights too: the
        # allocator may keep some of what was freed.
        assert min(rss[-2:]) - min(rss[1:3]) < sum(sizes[2:-1]) / 2, (name, shown)
        assert all(each == held[1] for each in held[2:]), (name, shown)
    assert found["closed"] == found["bare"], shown
    assert found["offload"] == []


LONG = """
from flexgen_h2o import H2OConfig

folder, chunk = sys.argv[1:]
policy = Policy(gpu_batch_size=1, prefill_chunk=int(chunk) or None)
with LLM(folder, policy=policy, h2o=H2OConfig(heavy_ratio=0.1), device="cpu", dtype="bfloat16",
         progress=False) as llm:
    llm.generate([[5] * 40], max_new_tokens=3)
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # forgets the peak so far
    llm.generate([[(7 * i) % 3999 for i in range(4000)]], max_new_tokens=3, eos_token_id=-1)
    print(json.dumps({"above": status("VmHWM") - before, "cache": llm.stats.kv_cache_bytes}))
"""


@pytest.mark.parametrize("chunk", [0, *full(500)])
def test_a_long_prompt_takes_linear_memory(tmp_path, chunk):
    """4,000 tokens, whose caches are far less than one matrix of scores."""
    write_model(tmp_path / "long", TINY | {"max_position_embeddings": 8192})
    found = measure(LONG, tmp_path / "long", chunk)
    whole = 4000 * 3 * 2 * 2 * 32 * 2  # layers, keys and values, KV heads, head_dim, bfloat16
    assert found["cache"] == whole // 5
    scores = 4 * 4000 * 4000 * 4  # of the four heads of one layer, in float32
    # The keys and values twice and activations as large as they; a tenth of the matrix for threads'
    # buffers and the allocator.
    assert found["above"] < 3 * whole + scores // 10, found
