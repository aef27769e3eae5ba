"""Packaging. Every dependency stands with the reason for it and for its minimum version."""

import ast
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

INSTALL = [
    "torch>=2.6",  # tensors and kernels; torch.load(weights_only=True) is safe from 2.6 on
    "numpy>=1.26",  # the arrays that gguf and memory-mapped files come as; first for Python 3.12
    "transformers>=5.0",  # configs, tokenizers and logits processors, in the spelling of version 5
    "huggingface_hub>=1.0",  # downloads checkpoints by repo id; what transformers 5 builds on
    "safetensors>=0.4.3",  # the checkpoint format, as transformers 5 reads and writes it
    "gguf>=0.10",  # reads .gguf files; `gguf.quants.dequantize` came with 0.10
    "tqdm>=4.66",  # progress bars of loading, prefill and decode
    "psutil>=5.9",  # free memory, for the plan that is made before anything is allocated
    "pyyaml>=6.0.1",  # --config and the resolved configs; 6.0.1 has the first wheels for 3.12
]

EXTRAS = {
    "test": [
        "pytest>=8",  # runs the tests
        "hypothesis>=6.100",  # property tests of placement, schedule and parsing
        "accelerate>=1.0",  # transformers' own GGUF loading, which ours is compared with, needs it
        "matplotlib>=3.8",  # the plots of tasks.quality are drawn once
        "ruff>=0.9",  # lints, as part of `make test`
    ],
    "bench": [
        "accelerate>=1.0",  # the peer that offloads transformers' models to disk
    ],
    "plot": [
        "matplotlib>=3.8",  # tasks.quality --plot; 3.7 brought "outside" legends, 3.8 Python 3.12
    ],
    "eval": [
        "lm_eval>=0.4.9",  # the harness that measures quality by cache budget
    ],
}


def version() -> str:
    """`__version__` of the package, read without importing it."""
    tree = ast.parse((ROOT / "flexgen_h2o" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__version__":
            return ast.literal_eval(node.value)
    raise RuntimeError("flexgen_h2o/__init__.py has no __version__")


setup(
    name="flexgen_h2o",
    version=version(),
    description="Generate text with models larger than memory, with a heavy-hitter KV cache",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["flexgen_h2o", "flexgen_h2o.*"]),
    install_requires=INSTALL,
    extras_require=EXTRAS,
)
