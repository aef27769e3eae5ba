"""The flags of `commands.summarize`, checked, and the caches that they ask for. No torch.

Names are the H2O repository's where it has the flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexgen_h2o.cli import measurements
from flexgen_h2o.cli import parser as task_flags
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag
from flexgen_h2o.commands.summarize.summaries import SummaryCache, check_rouge
from flexgen_h2o.config.h2o import EVICTIONS
from flexgen_h2o.errors import UserError

POLICIES = tuple(name for name in EVICTIONS if name != "full")
WINDOW = 256
"""Tokens that stay cached where nothing says how many; half of them heavy hitters, as in H2O's."""

_SIZES = ("num_window_length", "num_heavy_hitter_tokens")
_SWITCHES = ("evict_while_prefilling", "enable_position_rolling")  # of every cache that evicts
_FULL = {"eviction": "full", **dict.fromkeys(_SIZES), **dict.fromkeys(_SWITCHES, False)}
_SHARED = ("path", "device", "dtype", "gpu_batch_size", "num_gpu_batches", "percent", "offload_dir",
           "prefill_chunk", "cache_bits", "eviction", *_SIZES, *_SWITCHES)
_DEFAULTS = {"model": "smollm2-135m"}
_SHOWN = _DEFAULTS | {
    "eviction": f"{POLICIES[0]} with --enable-h2o-generation",
    "num_window_length": f"{WINDOW}, or twice --num-heavy-hitter-tokens"}
_HELPS = {"eviction": "which tokens stay: heavy hitters and recent ones (h2o), as many recent "
          "ones, or those and the first"}


@dataclass(frozen=True, kw_only=True)
class SummarizeOptions:
    """The flags, checked. `run` holds those that `flex_opt` has too; lengths are tokens.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    run: RunConfig
    input_path: str | None = flag(
        "path", None, shown="none", metavar="FILE.jsonl",
        help="prompts and references under the keys `article` and `summary_gt`, and each line's "
        "`stop` and `max_tokens`",
    )
    output_path: str | None = flag(
        "path", None, shown="none", metavar="FILE.jsonl",
        help="a line for each article; a run that was stopped goes on after the last. In a sweep a "
        "file for each cache, such as FILE.h2o-128.jsonl",
    )
    sample_num: int | None = flag(
        "int", None, low=1, shown="all", help="the first so many articles",
    )
    gen_len: int | None = flag(
        "int", None, low=1, shown="`max_tokens` of the line, or 64", help="most new tokens",
    )
    chat_template: bool = flag(
        "bool", False,
        help="send each prompt as a user's message in the model's chat template",
    )
    enable_h2o_generation: bool = flag(
        "bool", False, help="evict from the cache, as --eviction says; otherwise it keeps all",
    )
    sweep: tuple[str, ...] = flag(
        "words", (), shown="none", metavar="N|full",
        help="summarise with each of these budgets, for each of --policies",
    )
    policies: tuple[str, ...] | None = flag(
        "words", None, choices=POLICIES, shown="h2o window", metavar="POLICY",
        help=f"which tokens the caches of --sweep keep: {', '.join(POLICIES)}",
    )
    csv: str | None = flag(
        "path", None, shown="none", metavar="FILE",
        help="write a row for each cache, and one of lead-1, anew",
    )
    plot: str | None = measurements.plot_flag("ROUGE-2 and ROUGE-L by budget")
    from_csv: str | None = measurements.from_csv_flag()

    def __post_init__(self) -> None:
        task_flags.check_own(self)
        outputs: list[tuple[str, str]] = []
        if self.from_csv is None:
            self._check_run()
            outputs = [("output_path", path) for line_file in self.outputs().values()
                       for path in (line_file, f"{line_file}.config.yaml")]
        if self.plot is not None and self.from_csv is None and not self.sweep:
            raise UserError("--plot draws several budgets: add --sweep, or --from-csv")
        measurements.check_outputs(self, outputs)

    def _check_run(self) -> None:
        if self.input_path is None or self.output_path is None:
            raise UserError("give --input-path, a .jsonl file of articles, and --output-path, "
                            "or --from-csv")
        task_flags.check_placed(self.run)
        if self.policies and not self.sweep:
            raise UserError("--policies has no effect without --sweep: give --eviction")
        if self.policies and {*self.sweep} == {"full"}:
            raise UserError("--policies has no effect on the full cache: add a budget to --sweep")
        for size in self.sweep:
            if size != "full" and not (size.isdecimal() and size.isascii() and int(size) > 0):
                raise UserError("each of --sweep must be a number of tokens or full, got "
                                f"{size!r}")
        self.configs()  # each checks itself
        check_rouge()

    def configs(self) -> dict[str, RunConfig]:
        """The run of each cache in the words of `flex_opt`, by the cache's name, in order."""
        if not self.sweep:
            return {_name(self.run): self.run}
        budgets = sorted({int(size) for size in self.sweep if size != "full"})
        found = [replace(self.run, eviction=policy, num_window_length=budget)
                 for policy in dict.fromkeys(self.policies or ("h2o", "window"))
                 for budget in budgets]
        found += [replace(self.run, **_FULL)] if "full" in self.sweep else []
        return {_name(config): config for config in found}

    def caches(self) -> dict[str, SummaryCache]:
        """The H2O configuration of each of `configs`, by the same names."""
        return {name: SummaryCache(one.eviction, one.h2o(), one.resolved_cache_bits)
                for name, one in self.configs().items()}

    def outputs(self) -> dict[str, str]:
        """The file of lines of each of `configs`: its name is within the file's in a sweep."""
        path = Path(self.output_path)
        return {name: str(path.with_name(f"{path.stem}.{name}{path.suffix}")) if self.sweep
                else self.output_path for name in self.configs()}


def _name(config: RunConfig) -> str:
    """A cache's name: the policy, and how many tokens stay."""
    h2o = config.h2o()
    if h2o is None:
        return config.eviction
    return f"{config.eviction}-{h2o.heavy_tokens + h2o.recent_tokens + h2o.sink_tokens}"


def parser() -> Parser:
    """The parser of the flags."""
    return task_flags.command_parser(
        SummarizeOptions, _SHARED, prog=task_flags.program("summarize"),
        defaults=_SHOWN,
        helps=_HELPS,
        description="Summaries and their ROUGE with the full or an evicting KV cache.")


def parse_args(argv: Sequence[str] | None = None) -> SummarizeOptions:
    """Flags as checked `SummarizeOptions`. Raises `UserError`."""
    own, shared = task_flags.parse(argv, parser(), SummarizeOptions)
    task_flags.check_from_csv([*own, *shared])
    return SummarizeOptions(run=RunConfig(**_DEFAULTS | _cache(own, shared)), **own)


def _cache(own: dict[str, object], shared: dict[str, object]) -> dict[str, object]:
    """The shared flags, with the cache that they ask for; of a sweep, one of those that evict."""
    h2o, sweep = own.get("enable_h2o_generation"), own.get("sweep", ())
    if sweep:
        task_flags.refuse([*shared, *own], ("eviction", *_SIZES, "enable_h2o_generation"),
                          "has no effect with --sweep, which sets the caches: leave it out")
    elif h2o and shared.get("eviction") == "full":
        raise UserError("--enable-h2o-generation evicts: leave --eviction full out")
    if not h2o and {*sweep} <= {"full"}:
        add = "a budget to --sweep" if sweep else "--enable-h2o-generation"
        evicting = [name for name in shared if shared[name] not in (False, "full")]
        task_flags.refuse(evicting, _FULL, f"has no effect on the full cache: add {add}")
        return _FULL | shared
    return shared if shared.keys() & {*_SIZES} else {"num_window_length": WINDOW} | shared
