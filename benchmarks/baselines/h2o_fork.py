"""The H2O authors' fork of FlexGen, from a checkout that the user gives. CUDA only.

The checkout is of https://github.com/FMInference/H2O; its command line is FlexGen's and has
``--hh-ratio`` beside. The warm-up that it logs is commented out in its sources.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baselines.base import BaselineSettings, no_cuda
from baselines.flexgen import FlexGen
from baselines.ours import ratio_of_text
from flexgen_h2o.config.validation import check_number


class H2OFork(FlexGen):
    """See `baselines.base.Baseline` and `FlexGen`.

    The option `path` is the checkout's folder ``h2o_flexgen``; `cache_share` is that of prompt and
    generated tokens which stays cached.
    """

    documented = "https://github.com/FMInference/H2O/tree/main/h2o_flexgen#readme"
    options: Mapping[str, Any] = {**FlexGen.options, "path": None, "cache_share": 0.2}

    def __init__(self, settings: BaselineSettings):
        super().__init__(settings)
        path = settings.options["path"]
        self._path = None if path is None else Path(os.path.expanduser(path))

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        found = super().check(name, options)
        check_number(f"system {name}: cache_share", found["cache_share"], above=0, high=1)
        return found

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
