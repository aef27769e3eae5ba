"""Imports between the subpackages: direction, no cycles, and modules without torch."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from helpers.subprocesses import environment

import flexgen_h2o

ROOT = Path(flexgen_h2o.__file__).parent
PACKAGE = ROOT.name
BENCHMARKS = ROOT.parent / "benchmarks"

# Packages and modules from the lowest layer to the highest: a module imports from its own package
# and from lower layers. Packages on one line are independent of each other. Imports inside of
# functions and for type checking count too. The package's __init__ imports names on first use.
LAYERS = """
    errors  outputs
    config  files
    h2o  metrics
    kernels  storage
    distributed
    cache  models
    engine  planning
    requests  sessions
    llm
    cli  serving
    commands  integrations
    flex_opt  batch  __main__
"""

# Modules that import by a computed name, and why.
DYNAMIC = {
    "flexgen_h2o": "the public names are loaded on first use, so that flags answer without torch",
    "cli.commands": "a command is found by its name, above what commands share",
    "models.model_config": "a family is found by its name in the config",
    "kernels.ops": "Triton's modules are loaded when a GPU first needs them"}

TORCH_PACKAGES = {"kernels", "storage", "cache", "models", "engine", "integrations",
                  "sessions", "llm"}
TORCH = {"h2o.eviction", "h2o.key_smoothing", "h2o.policies", "h2o.recall", "h2o.simulation",
         "planning.compute_rates", "planning.calibrate", "distributed.control_messages",
         "distributed.pipeline"}
"""Modules that may import torch, beside `TORCH_PACKAGES`."""
LIGHT = {"kernels", "kernels.abi", "kernels.implementations", "storage", "storage.free_memory",
         "storage.offload_dirs", "cache", "models", "models.model_config", "models.shapes",
         "models.positions", "models.registry", "models.fields", "models.rope", "models.decoder",
         "models.tensors", "models.families", "models.quantization", "models.gguf.architectures",
         "models.gguf", "models.gguf.config", "models.gguf.header", "models.gguf.values", "engine",
         "engine.schedule", "engine.blocks", "distributed.heartbeat", "engine.detokenization",
         "engine.slot_policy", "engine.expert_counts", "integrations", "integrations.lm_eval",
         "integrations.lm_eval.arguments", "integrations.lm_eval.__main__"}


def short(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}.")


@functools.cache
def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module below a folder, by its name there; the package's own is `PACKAGE`."""
    paths = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        paths[".".join(parts) or PACKAGE] = path
    return paths


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """The imports and the calls in a source file, at any depth."""
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call))]


def imports(path: Path, known: set[str]) -> Iterator[str]:
    """Names of the package's modules that a source file imports, at any depth."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (short(alias.name) for alias in node.names if ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            if ours(node.module):
                for alias in node.names:
                    inner = short(f"{node.module}.{alias.name}")
                    yield inner if inner in known else short(node.module)


def ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == PACKAGE


@functools.cache
def edges() -> dict[str, set[str]]:
    """Module to the modules that it imports; __init__ imports nothing when it is imported."""
    paths = modules()
    return {name: set(imports(path, set(paths))) - {name, PACKAGE}
            for name, path in paths.items() if name != PACKAGE}


def package(name: str) -> str:
    return name.split(".")[0]


def test_imports_point_downward():
    level = {name: number for number, line in enumerate(LAYERS.splitlines())
             for name in line.split()}
    assert {package(name) for name in edges()} == set(level), "add new packages to LAYERS"
    upward = {f"{name} imports {other}" for name, others in edges().items() for other in others
              if package(name) != package(other) and level[package(other)] >= level[package(name)]}
    assert not upward


def test_packages_that_never_import_each_other():
    never = [("h2o", "kernels"), ("h2o", "cache"), ("h2o", "storage"), ("planning", "cli"),
             ("engine", "planning")]
    uses = {(package(name), package(other)) for name, others in edges().items() for other in others}
    assert not uses & set(never)
    for path in BENCHMARKS.rglob("*.py"):
        used = set(imports(path, set(modules())))
        assert not [name for name in used
                    if name.startswith("commands.") and name != "commands.generate"], path


def test_imports_have_no_cycle():
    graphlib.TopologicalSorter(edges()).prepare()  # CycleError names it
    names = modules(BENCHMARKS)
    between = {name: set() for name in names}
    for name, path in names.items():
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom):
                between[name] |= {module for alias in node.names for module in (
                    f"{node.module}.{alias.name}", node.module) if module in names} - {name}
    graphlib.TopologicalSorter(between).prepare()


def test_modules_that_import_by_a_computed_name_are_listed():
    dynamic = set()
    for name, path in modules().items():
        for node in nodes(path):
            called = node.func if isinstance(node, ast.Call) else None
            function = getattr(called, "attr", getattr(called, "id", ""))
            if function in ("import_module", "__import__"):
                dynamic.add(name)
    assert dynamic == set(DYNAMIC)
    assert all(DYNAMIC.values())


def test_light_modules_import_without_torch():
    """Flags, the memory plan and the schedule: no seconds spent on loading torch."""
    assert set(modules()) >= LIGHT | TORCH
    light = [name for name in modules() if name in LIGHT or name.startswith("models.families.")
             or (package(name) not in TORCH_PACKAGES and name not in TORCH)]
    names = [name if name == PACKAGE else f"{PACKAGE}.{name}" for name in light]
    code = f"""
import importlib, sys
for name in ("torch", "transformers", "safetensors", "huggingface_hub", "gguf"):
    sys.modules[name] = None  # importing it fails
failed = []
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{{name}}: {{error}}")
print(*failed, sep="\\n", end="")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=environment())
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
