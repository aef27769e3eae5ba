"""Imports point downward: the one table of who stands on whom, held against the source."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexgen_h2o

ROOT = Path(flexgen_h2o.__file__).parent
PACKAGE = ROOT.name

# From low to high. A module may import only what stands on a higher line of this text, that is,
# lower in the building; neighbours on one line do not know each other. A package's own name is its
# __init__. Imports inside of functions count too, those under TYPE_CHECKING do not.
ORDER = """
    flexgen_h2o
    errors  output
    config  report  calls
    trace  text_files  argument_types
    breakdown  memory_samples

    storage  storage.extent  storage.quantization
    storage.tiers
    storage.placement
    storage.disk
    storage.transfer  storage.links

    kernels  kernels.abi  kernels.arguments  kernels.implementations  kernels.pieces
    kernels.matrix
    kernels.rotary
    kernels.eviction
    kernels.reference
    kernels.reference_matrix  kernels.reference_sparse
    kernels.native  kernels.sdpa  kernels.triton_common
    kernels.dispatch
    kernels.triton_groups  kernels.triton_decode  kernels.triton_prefill  kernels.triton_select
    kernels.triton_matrix
    kernels.library  kernels.spinning
    kernels.ops
    cache  cache.budget  cache.seats  cache.parts  cache.attending  cache.appending
    cache.fetched
    cache.simulation  cache.shape  cache.probing
    cache.bookkeeping
    cache.kv_cache

    models.model_config
    models.shapes  models.positions
    models.spec
    models.layers
    models.opt  models.llama  models.gpt_neox
    models.checkpoint_base  models.weight_format
    models.dummy  models.safetensors_io
    models.checkpoint
    models.convert
    models.from_gguf
    models.gguf_blocks  models.sources
    models.quantized
    models

    engine  engine.schedule  engine.batching  engine.packs
    engine.sampling  engine.stop_strings
    engine.scoring  engine.hidden  engine.weights  engine.loader  engine.progress
    engine.prompts  engine.room
    engine.executor

    planning  planning.free_memory  planning.rows  planning.hardware
    planning.memory_plan  planning.hardware_file
    planning.cost
    planning.placing
    planning.search
    planning.rates
    planning.calibrate
    integrations  integrations.transformers.progress
    integrations.transformers.rotations
    integrations.transformers.layer
    integrations.transformers.layers
    integrations.transformers.cache
    integrations.transformers.enabling
    integrations.transformers
    runtime
    streaming
    llm
    flag_values
    planning.plan_text
    cache_flags  plan_flags  cli
    run_flags
    run_config
    planner  results
    flex_opt
    integrations.lm_eval  integrations.lm_eval.arguments
    integrations.lm_eval.model
    integrations.lm_eval.__main__
    tasks  tasks.shared  tasks.shared.articles  tasks.shared.figures  tasks.shared.files
    tasks.shared.tables  tasks.shared.line_file  tasks.shared.flags  tasks.shared.statistics
    tasks.budgets  tasks.budgets.configurations
    tasks.budgets.measures  tasks.budgets.plot
    tasks.summaries  tasks.summaries.rouge
    tasks.summaries.articles
    tasks.summaries.rows  tasks.summaries.plot
    tasks.summaries.flags
    tasks.streams  tasks.streams.conversations  tasks.streams.printer
    tasks.streams.figures
    tasks.streams.pieces
    tasks.streams.plot
    tasks.analysis  tasks.analysis.columns  tasks.analysis.stats
    tasks.analysis.misses  tasks.analysis.evicted  tasks.analysis.table
    tasks.analysis.survey  tasks.analysis.plots
    tasks.quality  tasks.analyze  tasks.summarize  tasks.stream  tasks.stream_quality
"""

# (importer, imported): why it may point upward all the same.
UPWARD: dict[tuple[str, str], str] = {}

# Modules that import by a computed name, which no parser can follow, and why they may.
DYNAMIC = {
    "flexgen_h2o": "the public names are loaded on first use, so that flags answer without torch",
    "models": "a family is found by its name in the config, and loads torch",
    "kernels.library": "Triton's modules are loaded when a GPU first needs them",
}

TORCH_FREE = (
    "flexgen_h2o", "errors", "output", "config", "report", "trace", "breakdown",
    "memory_samples", "planning",
    "planning.free_memory", "planning.rows", "planning.memory_plan", "planning.hardware",
    "planning.hardware_file", "planning.cost", "planning.placing", "planning.search",
    "planning.plan_text", "plan_flags", "planner",
    "flag_values", "cache_flags", "run_flags", "run_config", "results", "flex_opt", "cli",
    "text_files", "calls", "argument_types",
    "models", "models.model_config", "models.shapes", "models.positions", "models.spec",
    "integrations", "integrations.lm_eval", "integrations.lm_eval.arguments",
    "integrations.lm_eval.__main__",
    "engine.schedule", "engine.batching", "engine.stop_strings", "storage.extent",
    "storage.placement", "storage.quantization", "cache", "cache.budget", "cache.seats",
    "tasks", "tasks.shared", "tasks.shared.files", "tasks.shared.flags",
    "tasks.streams.conversations", "tasks.streams.figures", "tasks.streams.pieces",
    "tasks.streams.plot", "tasks.stream", "tasks.stream_quality", "tasks.summarize",
    "tasks.analysis.columns", "tasks.analysis.table", "tasks.analysis.plots", "tasks.analyze",
)


def full(name: str) -> str:
    return name if name == PACKAGE else f"{PACKAGE}.{name}"


def short(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}.")


def modules() -> dict[str, Path]:
    """Every module of the package, by short name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[short(".".join(parts[:-1] if parts[-1] == "__init__" else parts))] = path
    return found


def levels() -> dict[str, int]:
    """Module to the number of its line in `ORDER`."""
    lines = [line.split() for line in ORDER.splitlines()]
    names = [name for line in lines for name in line]
    assert len(names) == len(set(names)), "a module stands in ORDER twice"
    return {name: number for number, line in enumerate(lines) for name in line}


def imports(source: str, known: set[str]) -> Iterator[str]:
    """Short names of the package's modules that a source text imports, at any depth."""
    for node in running(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (short(alias.name) for alias in node.names if ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            if ours(node.module):
                for alias in node.names:
                    inner = short(f"{node.module}.{alias.name}")
                    yield inner if inner in known else short(node.module)


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield other
                yield from running(other)
        else:
            yield from running(node)


def ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == PACKAGE


def edges() -> dict[str, set[str]]:
    found = modules()
    return {name: set(imports(path.read_text(encoding="utf-8"), set(found))) - {name}
            for name, path in found.items()}


def test_the_parser_sees_every_kind_of_import():
    source = """
import flexgen_h2o.errors, os
import flexgen_h2o.config as c
from flexgen_h2o import report, __version__
from flexgen_h2o.models.spec import TensorSpec
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from flexgen_h2o import llm
else:
    from flexgen_h2o import results
def lazy():
    if True:
        from flexgen_h2o.models import sources, family
class C:
    import flexgen_h2o.storage.disk
"""
    known = {"report", "llm", "results", "models.sources"}
    assert list(imports(source, known)) == [
        "errors", "config", "report", PACKAGE, "models.spec", "results", "models.sources",
        "models", "storage.disk"]
    with pytest.raises(AssertionError, match="relative"):
        list(imports("from . import errors", known))


def test_every_module_has_its_place():
    assert set(modules()) == set(levels()), "put new modules into ORDER, take old ones out"


def test_imports_point_downward():
    level = levels()
    upward = {(name, other) for name, others in edges().items() for other in others
              if name in level and other in level and level[other] >= level[name]}
    assert upward == set(UPWARD)
    assert all(UPWARD.values())


def test_there_is_no_cycle():
    order = list(graphlib.TopologicalSorter(edges()).static_order())  # CycleError names it
    assert set(order) == set(modules())


def test_only_those_with_a_reason_import_by_a_computed_name():
    found = set()
    for name, path in modules().items():
        for node in running(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.split(".")[-1] in ("import_module", "__import__"):
                found.add(name)
    assert found == set(DYNAMIC)
    assert all(DYNAMIC.values())


def test_what_answers_before_torch_imports_without_it():
    """Flags, the memory plan and the schedule: no seconds spent on loading torch."""
    assert set(TORCH_FREE) <= set(modules())
    code = f"""
import importlib, sys
for name in ("torch", "transformers", "safetensors", "huggingface_hub", "gguf"):
    sys.modules[name] = None  # importing it fails
failed = []
for name in {[full(name) for name in TORCH_FREE]!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{{name}}: {{error}}")
print(*failed, sep="\\n", end="")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT.parent)})
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
