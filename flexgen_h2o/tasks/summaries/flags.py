"""The flags of `tasks.summarize`, checked, and the caches that they ask for. No torch.

Names are the H2O repository's where it has the flag; each may be typed with - or _.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from flexgen_h2o.cache_flags import EVICTIONS
from flexgen_h2o.cli import Parser
from flexgen_h2o.config import OFFLOAD_DIR, Policy, check_choice, check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.flag_values import flag_name
from flexgen_h2o.run_config import RunConfig
from flexgen_h2o.tasks.shared.figures import check_plot
from flexgen_h2o.tasks.summaries.rouge import check_rouge
from flexgen_h2o.tasks.summaries.rows import Cache

POLICIES = tuple(name for name in EVICTIONS if name != "full")
WINDOW = 256
"""Tokens that stay cached where nothing says how many; half of them heavy hitters, as in H2O's."""

_SIZES = ("num_window_length", "num_heavy_hitter_tokens")
_OF_A_CACHE = ("eviction", *_SIZES)
_SWITCHES = ("evict_while_prefilling", "enable_position_rolling")  # of every cache that evicts
_FILES = ("input_path", "output_path", "csv", "plot", "from_csv")
# Flags of flex_opt by the same name; model_name and batch_size have another there.
_SHARED = ("path", "device", "dtype", "num_gpu_batches", "percent", "offload_dir", "prefill_chunk",
           "cache_bits", "evict_while_prefilling", "enable_position_rolling")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One value for each flag, checked. Lengths and budgets are tokens.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    model_name: str = "smollm2-135m"
    path: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    input_path: str | None = None
    output_path: str | None = None
    sample_num: int | None = None
    gen_len: int | None = None
    chat_template: bool = False
    batch_size: int = Policy.gpu_batch_size
    num_gpu_batches: int = Policy.num_gpu_batches
    percent: tuple[float, ...] = (100, 0, 100, 0, 100, 0)
    offload_dir: str = OFFLOAD_DIR
    prefill_chunk: int | None = None
    enable_h2o_generation: bool = False
    eviction: str | None = None
    num_window_length: int | None = None
    num_heavy_hitter_tokens: int | None = None
    evict_while_prefilling: bool = False
    enable_position_rolling: bool = False
    cache_bits: int | None = None
    sweep: tuple[str, ...] = ()
    policies: tuple[str, ...] | None = None
    csv: str | None = None
    plot: str | None = None
    from_csv: str | None = None

    def __post_init__(self) -> None:
        for name in _FILES:
            path = getattr(self, name)
            if path is not None and not path.strip():
                raise UserError(f"{flag_name(name)} must name a file, got {path!r}")
            object.__setattr__(self, name, path and os.path.expanduser(path))
        if self.from_csv is None:
            self._check_run()
        if self.plot is not None:
            if self.from_csv is None and not self.sweep:
                raise UserError("--plot draws several budgets: add --sweep, or --from-csv")
            check_plot("--plot", self.plot)
        self._check_files()

    def _check_run(self) -> None:
        for name in ("input_path", "output_path"):
            if getattr(self, name) is None:
                raise UserError("give --input-path, a .jsonl file of articles, and --output-path, "
                                "or --from-csv")
        if not self.model_name.strip():
            raise UserError("--model-name is empty")
        for name in ("sample_num", "gen_len", "batch_size"):
            if getattr(self, name) is not None:
                check_int(flag_name(name), getattr(self, name), low=1)
        for name in ("sweep", "policies"):
            values = getattr(self, name)
            object.__setattr__(self, name, values and tuple(map(str, values)))
        self._check_cache()
        self.configs()  # each checks itself
        check_rouge()

    def _check_cache(self) -> None:
        given = [name for name in _OF_A_CACHE if getattr(self, name) is not None]
        evicts = self.enable_h2o_generation or any(size != "full" for size in self.sweep)
        if self.sweep and (given or self.enable_h2o_generation):
            flag = flag_name(given[0] if given else "enable_h2o_generation")
            raise UserError(f"{flag} has no effect with --sweep, which sets the caches: leave it "
                            "out")
        if not self.sweep and self.policies is not None:
            raise UserError("--policies has no effect without --sweep: give --eviction")
        if self.eviction is not None:
            check_choice("--eviction", self.eviction, POLICIES)
        for policy in self.policies or ():
            check_choice("each of --policies", policy, POLICIES)
        if not evicts:
            given += [name for name in _SWITCHES if getattr(self, name)]
            given += ["policies"] * bool(self.policies)
            if given:
                raise UserError(f"{flag_name(given[0])} has no effect on the full cache: add "
                                + ("a budget to --sweep" if self.sweep
                                   else "--enable-h2o-generation"))
        for size in self.sweep:
            if size != "full" and not (size.isdecimal() and size.isascii() and int(size) > 0):
                raise UserError("each of --sweep must be a number of tokens or full, got "
                                f"{size!r}")

    def _check_files(self) -> None:
        named = [(name, getattr(self, name)) for name in _FILES if name != "output_path"]
        if self.output_path is not None and self.from_csv is None:
            named += [("output_path", path) for path in self.outputs().values()]
            named += [("output_path", f"{path}.config.yaml") for path in self.outputs().values()]
        seen: dict[str, str] = {}
        for name, path in named:
            if path is not None:
                other = seen.setdefault(os.path.realpath(path), name)
                if other != name:
                    raise UserError(f"{flag_name(other)} and {flag_name(name)} name the same file")

    def configs(self) -> dict[str, RunConfig]:
        """The run of each cache in the words of `flex_opt`, by the cache's name, in order."""
        if not self.sweep:
            return dict([self._config(self._policy, self.num_window_length,
                                      self.num_heavy_hitter_tokens)])
        budgets = sorted({int(size) for size in self.sweep if size != "full"})
        found = [self._config(policy, budget)
                 for policy in dict.fromkeys(self.policies or ("h2o", "window"))
                 for budget in budgets]
        return dict(found + [self._config("full")] * ("full" in self.sweep))

    @property
    def _policy(self) -> str:
        return (self.eviction or "h2o") if self.enable_h2o_generation else "full"

    def _config(self, policy: str, window: int | None = None, heavy: int | None = None
                ) -> tuple[str, RunConfig]:
        """A cache's name and its run: a window of tokens in all, of which so many are heavy."""
        values = {name: getattr(self, name) for name in _SHARED}
        if policy == "full":
            values |= dict.fromkeys(_SWITCHES, False)
        else:
            window = WINDOW if window is None and heavy is None else window
            values |= {"num_window_length": window, "num_heavy_hitter_tokens": heavy}
        config = RunConfig(model=self.model_name, gpu_batch_size=self.batch_size,
                           gen_len=self.gen_len or 1, eviction=policy, **values)
        h2o = config.h2o()
        if h2o is None:
            return policy, config
        return f"{policy}-{h2o.heavy_tokens + h2o.recent_tokens + h2o.sink_tokens}", config

    def caches(self) -> dict[str, Cache]:
        """What stays cached in each of `configs`, by the same names."""
        return {name: Cache(one.eviction, one.h2o(), one.resolved_cache_bits)
                for name, one in self.configs().items()}

    def outputs(self) -> dict[str, str]:
        """The file of lines of each of `configs`: its name is within the file's in a sweep."""
        path = Path(self.output_path)
        return {name: str(path.with_name(f"{path.stem}.{name}{path.suffix}")) if self.sweep
                else self.output_path for name in self.configs()}


_FLAGS: dict[str, tuple[dict, str]] = {
    "model_name": ({"metavar": "NAME"}, "model name, Hugging Face repo id or local folder"),
    "path": ({}, "folder or .gguf file of the weights, if not by name"),
    "device": ({"metavar": "auto|cpu|cuda[:n]"}, "the device that computes"),
    "dtype": ({}, "number format of weights, cache and compute"),
    "input_path": ({"metavar": "FILE.jsonl"},
                   "prompts and references under the keys `article` and `summary_gt`, and each "
                   "line's `stop` and `max_tokens`"),
    "output_path": ({"metavar": "FILE.jsonl"},
                    "a line for each article; a run that was stopped goes on after the last. "
                    "In a sweep a file for each cache, such as FILE.h2o-128.jsonl"),
    "sample_num": ({"type": int, "metavar": "N"}, "the first so many articles (default: all)"),
    "gen_len": ({"type": int, "metavar": "N"},
                "most new tokens (default: `max_tokens` of the line, or 64)"),
    "chat_template": ({"action": "store_true"},
                      "send each prompt as a user's message in the model's chat template"),
    "batch_size": ({"type": int, "metavar": "N"}, "sequences computed together"),
    "num_gpu_batches": ({"type": int, "metavar": "N"},
                        "batches that share each load of a layer's weights"),
    "percent": ({"type": float, "nargs": "+", "metavar": "P"},
                "percent of weights on gpu, cpu; of cache on gpu, cpu; of activations on gpu, cpu; "
                "the rest is on disk"),
    "offload_dir": ({"metavar": "DIR"}, "folder for what the disk tier writes; emptied at exit"),
    "prefill_chunk": ({"type": int, "metavar": "N"},
                      "read prompts in pieces of this many tokens (default: whole)"),
    "enable_h2o_generation": ({"action": "store_true"},
                              "keep a part of the cache (default: all of it)"),
    "eviction": ({"metavar": "|".join(POLICIES)},
                 "which part: heavy hitters and recent tokens (h2o), as many recent ones, or those "
                 "and the first (default: h2o)"),
    "num_window_length": ({"type": int, "metavar": "N"},
                          "tokens to keep in all (default: 256, or twice "
                          "--num-heavy-hitter-tokens)"),
    "num_heavy_hitter_tokens": ({"type": int, "metavar": "N"},
                                "heavy hitters among them (default: half)"),
    "evict_while_prefilling": ({"action": "store_true"},
                               "evict after each --prefill-chunk of a prompt too, so that one of "
                               "any length fits; changes what is kept"),
    "enable_position_rolling": ({"action": "store_true"},
                                "a cached token's position is its rank in the cache"),
    "cache_bits": ({"type": int, "metavar": "16|8|4"}, "bits of a number in the cache"),
    "sweep": ({"nargs": "+", "metavar": "N|full"},
              "summarise with each of these budgets, for each of --policies"),
    "policies": ({"nargs": "+", "metavar": "POLICY"},
                 f"{', '.join(POLICIES)} (default: h2o window)"),
    "csv": ({"metavar": "FILE"}, "write a row for each cache, and one of lead-1, anew"),
    "plot": ({"metavar": "FILE.png"}, "draw ROUGE-2 and ROUGE-L by budget (or .svg, .pdf)"),
    "from_csv": ({"metavar": "FILE"}, "run nothing: table, and --plot, of a file that --csv wrote"),
}


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Flags as checked `Options`. Raises `UserError`."""
    parser = Parser(prog="python -m flexgen_h2o.tasks.summarize", allow_abbrev=False,
                    argument_default=argparse.SUPPRESS,
                    description="Summaries and their ROUGE with the full or an evicting KV cache.")
    for spec in fields(Options):
        options, text = _FLAGS[spec.name]
        if spec.default not in (None, False, ()):
            default = spec.default if not isinstance(spec.default, tuple) else " ".join(
                map(str, spec.default))
            text = f"{text} (default: {default})"
        names = dict.fromkeys((flag_name(spec.name), f"--{spec.name}"))
        parser.add_argument(*names, dest=spec.name, **options, help=text.replace("%", "%%"))
    given = vars(parser.parse_args(argv))
    extra = sorted(given.keys() - {"from_csv", "plot"})
    if "from_csv" in given and extra:
        raise UserError(f"{flag_name(extra[0])} has no effect with --from-csv: leave it out")
    return Options(**given)
