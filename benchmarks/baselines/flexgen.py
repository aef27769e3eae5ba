"""FlexGen 0.1.8 and the H2O authors' fork of it, by their command lines. CUDA only.

They know OPT shapes by name and have their own prompts. They run on random weights (``--path
_DUMMY_``), so tokens cannot be compared. Each call is a process with FlexGen's own warm-up. A
shortened run keeps the whole cache and needs four tokens.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baselines import Baseline, BaselineSettings, Timings, installed, missing, no_cuda
from baselines.ours import ratio_of_text
from flexgen_h2o.config.validation import Count, Fraction
from flexgen_h2o.errors import UserError

LIMITED = """
import runpy, sys, torch
limit, module = int(sys.argv[1]), sys.argv[2]
torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
sys.argv[:] = sys.argv[2:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Program that runs a module like ``python -m`` in limited GPU memory: BYTES MODULE ARGUMENT..."""
_FIGURES = re.compile(r"prefill latency: ([\d.]+) s.*?decode latency: ([\d.]+) s", re.DOTALL)


def latencies(log: str) -> tuple[float, float]:
    """Return seconds of prefill and decode from FlexGen's log. Raises `UserError`."""
    match = _FIGURES.search(log)
    if match is None:
        raise UserError(f"FlexGen logged no latencies: {log.strip()[-200:]!r}")
    return float(match[1]), float(match[2])


class FlexGen(Baseline):
    """FlexGen.

    `flags` go to its command line, such as ``--percent 20 80 0 100 0 100``: the placement is chosen
    by hand. `num_gpu_batches` divides the batch.
    """

    documented = "https://github.com/FMInference/FlexLLMGen#readme"
    options: Mapping[str, Any] = {"flags": "--percent 0 100 100 0 100 0", "num_gpu_batches": 1}
    kinds: Mapping[str, Any] = {"flags": str, "num_gpu_batches": Count}
    warms = False
    _model = ""

    def refusal(self) -> str | None:
        return no_cuda() or missing("flexgen", "bench-flexgen")

    def version(self) -> str:
        return installed("flexgen", "torch")

    def prepare(self, model: Path) -> str:
        settings = self.settings
        if not model.name.startswith("opt-"):
            raise UserError(f"FlexGen knows OPT shapes by name, and {model.name} is no such name")
        batches = settings.options["num_gpu_batches"]
        if settings.batch % batches:
            raise UserError(f"num_gpu_batches {batches} does not divide a batch of "
                            f"{settings.batch}")
        self._model = f"facebook/{model.name}"
        return f"random weights, {settings.options['flags']} --num-gpu-batches {batches}"

    def command(self, gen_len: int, log: Path) -> list[str]:
        """Return the command line."""
        settings, batches = self.settings, self.settings.options["num_gpu_batches"]
        within = ["-m"] if settings.device_memory is None else [
            "-c", LIMITED, str(settings.device_memory)]
        return [sys.executable, *within, "flexgen.flex_opt", "--model", self._model,
                "--path", "_DUMMY_", "--offload-dir", settings.scratch,
                "--prompt-len", str(settings.prompt_len), "--gen-len", str(settings.gen_len),
                *(["--cut-gen-len", str(gen_len)] if gen_len < settings.gen_len else []),
                "--gpu-batch-size", str(settings.batch // batches),
                "--num-gpu-batches", str(batches), "--log-file", str(log), "--verbose", "1",
                *settings.options["flags"].split()]

    def folder(self) -> str | None:
        """Return the folder of its module; None for the installed package."""
        return None

    def generate(self, prompts: Sequence[Sequence[int]], gen_len: int) -> Timings:
        if len({len(prompt) for prompt in prompts}) > 1:
            raise UserError("FlexGen's command line takes prompts of one length only")
        if gen_len < min(4, self.settings.gen_len):
            raise UserError(f"FlexGen projects from four tokens on, not from {gen_len}")
        log = Path(self.settings.scratch) / "flexgen.log"
        done = subprocess.run(self.command(gen_len, log), cwd=self.folder(), capture_output=True,
                              text=True)
        if done.returncode:
            raise UserError(f"FlexGen failed: {done.stderr.strip()[-400:]}")
        prefill, decode = latencies(log.read_text(encoding="utf-8"))
        log.unlink()  # FlexGen appends
        step = decode / (self.settings.gen_len - 1)  # FlexGen projects a shortened run
        return Timings(prefill, (step,) * (gen_len - 1), None)


class H2OFork(FlexGen):
    """The H2O authors' fork of FlexGen, with ``--hh-ratio``.

    `path` is the folder ``h2o_flexgen`` of a checkout of https://github.com/FMInference/H2O;
    `cache_share` is the share of prompt and generated tokens that stays cached. The warm-up that
    the fork logs is commented out in its sources.
    """

    documented = "https://github.com/FMInference/H2O/tree/main/h2o_flexgen#readme"
    options: Mapping[str, Any] = {**FlexGen.options, "path": None, "cache_share": 0.2}
    kinds: Mapping[str, Any] = {**FlexGen.kinds, "cache_share": Fraction}

    def __init__(self, settings: BaselineSettings):
        super().__init__(settings)
        path = settings.options["path"]
        self._path = None if path is None else Path(os.path.expanduser(path))

    def refusal(self) -> str | None:
        if self._path is None:
            return "the option `path` names no checkout of github.com/FMInference/H2O"
        if not (self._path / "flexgen" / "flex_opt.py").is_file():
            return f"there is no flexgen/flex_opt.py in {self._path}"
        return no_cuda()

    def version(self) -> str:
        done = subprocess.run(["git", "-C", str(self._path), "rev-parse", "--short", "HEAD"],
                              capture_output=True, text=True)
        return f"H2O {done.stdout.strip() or 'of no commit'}"

    def prepare(self, model: Path) -> str:
        words = super().prepare(model)
        self._ratio = ratio_of_text(self.settings) or 1.0
        return f"{words} --hh-ratio {self._ratio:g} --hh-all"

    def command(self, gen_len: int, log: Path) -> list[str]:
        return [*super().command(gen_len, log), "--hh-ratio", f"{self._ratio:g}", "--hh-all"]

    def folder(self) -> str | None:
        return str(self._path)
