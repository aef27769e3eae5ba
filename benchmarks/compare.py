"""Compare other systems with this engine on one machine, in one run.

    python benchmarks/make_checkpoint.py --model facebook/opt-1.3b --out /tmp/models/opt-1.3b
    python benchmarks/compare.py --config configs/compare_cpu.yaml --models /tmp/models

Each run is a separate process with the same checkpoint, prompts, lengths, threads, allocator
settings and memory limit. The limit is a cgroup, which counts the page cache; the page cache is
dropped first. All systems are measured at the same batch size, and each at its own best one, which
is found by doubling. Systems take turns after a warm-up; figures are medians over the repeats. Each
row has its roofline, from rates measured before and after, and the share of tokens that equal those
of the first exact system.

A system that cannot run has a row with the reason. Each row is written when it is measured.
The same command resumes a stopped run and measures nothing twice. To repeat a cell, delete its row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median

from baselines import Baseline, baseline_class
from comparison import (
    BEST,
    COLUMNS,
    EQUAL,
    SEARCH,
    Comparison,
    ComparisonScenario,
    ComparisonSubject,
    System,
    Table,
    load,
    runs_never,
    subject_of,
)
from processes import MEMORY, OK, MemoryGroup, run_job
from rooflines import ITEMSIZES, Load, rooflines, work

from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.config.policy import OFFLOAD_DIR
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import report_partial_rows
from flexgen_h2o.metrics.provenance import origin
from flexgen_h2o.metrics.report import align_columns
from flexgen_h2o.metrics.trace import GB

RunJob = Callable[[dict, "int | None"], dict]
"""Function of a job and a memory limit in bytes: `run_job` with its other parameters bound."""

GROWTH = 1.25
"""Ratio of mean cache sizes, all steps to measured steps, above which growth is reported."""


class Cells:
    """Measure the cells that a table lacks."""

    def __init__(self, config: Comparison, table: Table, run_job: RunJob):
        self._config, self._table, self._run_job = config, table, run_job
        self._ready: dict[tuple[str, Path], dict] = {}

    def run(self) -> None:
        """Measure all scenarios. Raises `UserError` for a missing model or memory cgroup."""
        subjects = [subject_of(name, self._config.models) for name in self._config.scenarios]
        for scenario, subject in zip(self._config.scenarios, subjects, strict=True):
            if scenario.batch is not None:
                batches = dict.fromkeys(scenario.systems, scenario.batch)
                self._together(_Group(scenario, subject, EQUAL, batches))
            if scenario.best:
                # A system that cannot run has a row at batch size 1 with the reason.
                batches = {system: self._best(scenario, subject, system) or 1
                           for system in scenario.systems}
                self._together(_Group(scenario, subject, BEST, batches))

    def _best(self, scenario: ComparisonScenario, subject: ComparisonSubject,
              system: str) -> int | None:
        """Return the best batch size of a system; None if it cannot run."""
        if system in scenario.best_batch:
            return scenario.best_batch[system]
        rate = partial(self._tried, scenario, subject, system)
        with suppress(_NeverRuns):
            return best_batch(rate, first=scenario.first_batch, max_batch=scenario.max_batch)
        return None

    def _tried(self, scenario: ComparisonScenario, subject: ComparisonSubject, system: str,
               batch: int
               ) -> float | None:
        """Return the tokens per second of a search step; None if it failed.

        Raises `_NeverRuns` if it would fail at any batch size.
        """
        group = _Group(scenario, subject, SEARCH, {system: batch})
        row = self._table.find(self._place(group, system))
        if row is None:
            first = self._measured(group, system, 0)
            self._add(group, system, [first])
            row = self._table.find(self._place(group, system))
        if runs_never(row["status"]):
            raise _NeverRuns
        return float(row["tokens_per_s"]) if row["status"] == OK else None

    def _together(self, group: _Group) -> None:
        """Measure the systems of a group that have no row yet, in turn; rates before and after."""
        remaining = [system for system in group.batches
                     if self._table.find(self._place(group, system)) is None]
        if not remaining:
            return
        outcomes: dict[str, list[dict]] = {system: [] for system in remaining}
        rates = [self._rates(group)]
        for repeat in range(group.scenario.repeats or self._config.repeats):
            for system in remaining:
                if all(outcome["status"] == OK for outcome in outcomes[system]):
                    outcomes[system].append(self._measured(group, system, repeat))
        with suppress(UserError):  # the rates measured before are enough
            rates.append(self._rates(group))
        reference = next((system for system in remaining if self._config.systems[system].exact
                          and outcomes[system][-1].get("tokens")), None)
        for system in remaining:
            beside = {} if reference is None else {
                "equal_tokens_with": reference, "equal_tokens": equal_share(
                    outcomes[system][-1].get("tokens"), outcomes[reference][-1]["tokens"])}
            self._add(group, system, outcomes[system], rates=rates, **beside)

    def _measured(self, group: _Group, system: str, repeat: int) -> dict:
        """Return one run of a system, or the known reason why it cannot run."""
        never = self._table.never(self._place(group, system))
        if never is not None:
            return {name: never[name] for name in ("status", "reason", "page_cache")}
        settings = self._config.systems[system]
        job, place = group.job(settings), (system, group.subject.folder)
        prepares = baseline_class(settings.baseline).ready is not Baseline.ready
        if place not in self._ready and prepares:
            self._ready[place] = self._run_job(  # with all memory and time
                job | {"kind": "ready", "timeout": None}, None)
        result = self._ready.get(place, {"status": OK})
        if result["status"] == OK:
            result = self._run_job(job, group.scenario.memory)
        if result["status"] == OK and group.left_out(settings):
            result = _with_middle(result, self._run_job(group.job(settings, later=True),
                                                        group.scenario.memory))
        said = f"{result['status']}: {result.get('reason')}"
        if result["status"] == OK:
            steps = result.get("middle", result["steps"])
            said = (f"prefill {result['prefill']:.3g} s, step {fmean(steps):.3g} s "
                    f"({min(steps):.3g} to {max(steps):.3g})")
        print(f"{group.scenario.name}, {group.at} batch {group.batches[system]}, {system}, "
              f"repeat {repeat}: {said}", file=sys.stderr, flush=True)
        return result

    def _rates(self, group: _Group) -> dict:
        job = {"kind": "rates", "dtype": group.scenario.dtype,
               "file": str(group.subject.largest_file)}
        result = self._run_job(job, None)
        if result["status"] != OK:
            raise UserError(f"this machine's rates cannot be measured: {result['reason']}")
        return result

    def _place(self, group: _Group, system: str) -> dict[str, object]:
        """Return the columns that identify a cell."""
        scenario, settings = group.scenario, self._config.systems[system]
        return {
            "host": platform.node(), "threads": self._config.threads, "scenario": scenario.name,
            "model": scenario.model, "dtype": scenario.dtype,
            "prompts": "random" if scenario.prompts is None else Path(scenario.prompts).name,
            "prompt_len": group.mean_prompt_len(system), "gen_len": scenario.gen_len,
            "cut_gen_len": group.measured(system) if group.projected(system) else None,
            "memory_gb": _in_gb(scenario.memory),
            "device_memory_gb": _in_gb(scenario.device_memory),
            "system": system, "options": json.dumps(dict(settings.options), sort_keys=True),
            "at": group.at, "batch": group.batches[system]}

    def _add(self, group: _Group, system: str, outcomes: Sequence[dict], *,
             rates: Sequence[dict] = (), **beside: object) -> None:
        """Add a row of figures or of the reason why there are none."""
        settings, last = self._config.systems[system], outcomes[-1]
        row: dict[str, object] = dict.fromkeys(COLUMNS)
        row |= origin() | self._place(group, system) | {
            "documented": baseline_class(settings.baseline).documented, "status": last["status"],
            "reason": last.get("reason"), "page_cache": last["page_cache"],
            **settings.quality(group.scenario.model),
            **{name: rates[0][name] if rates else None for name in ("cpu", "device")}}
        if last["status"] == OK:
            row |= group.figures(settings, outcomes) | beside
            if rates:
                row |= group.bounds(settings, rates, row["total_s"])
        self._table.add(row)


def _in_gb(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / GB


def _with_middle(result: dict, later: dict) -> dict:
    """Return a run with the steps of one that starts later in the text, or why that failed.

    Its longer prompts may take more memory than the whole text. Then the first steps are kept.
    """
    if later["status"] == MEMORY:
        return result
    if later["status"] != OK:
        return later
    peaks = {name: max(result[name], later[name])
             for name in ("peak_rss", "peak_memory", "peak_device") if result.get(name) is not None}
    return result | peaks | {"middle": later["steps"]}


class _NeverRuns(Exception):
    """A system cannot run here at any batch size."""


class _Group:
    """Cells that are measured together: systems and their batch sizes in one scenario."""

    def __init__(self, scenario: ComparisonScenario, subject: ComparisonSubject, at: str,
                 batches: Mapping[str, int]):
        self.scenario, self.subject = scenario, subject
        self.at, self.batches = at, batches

    def mean_prompt_len(self, system: str) -> float:
        """Return the mean prompt length of a system's batch, in tokens."""
        return fmean(map(len, self.subject.prompts[: self.batches[system]]))

    def measured(self, system: str) -> int:
        """Return the number of tokens that a system generates for each prompt."""
        return self.scenario.measured(system, search=self.at == SEARCH)

    def projected(self, system: str) -> bool:
        """Return whether a system generates fewer tokens than the scenario has."""
        return self.measured(system) < self.scenario.gen_len

    def left_out(self, system: System) -> int:
        """Return the number of tokens between the prompt and the measured steps.

        With a growing cache, the first steps of a shortened run are the cheapest. If that matters,
        the steps are measured in a second run from the middle of the text, whose prompts are longer
        by half of the omitted tokens. If memory is too small for it, the first steps are used. The
        column `steps_from` says which.
        """
        remaining = self.scenario.gen_len - self.measured(system.name)
        cached = self.mean_prompt_len(system.name) + self.measured(system.name) / 2
        grows = system.cache_share >= 1 and cached + remaining / 2 > GROWTH * cached
        return remaining // 2 if grows else 0

    def job(self, system: System, *, later: bool = False) -> dict:
        """Return the job for `worker.py`; `later` measures steps from the middle of the text."""
        prompts = self.subject.prompts[: self.batches[system.name]]
        before = self.left_out(system) if later else 0
        prompts = [[*islice(cycle(prompt), len(prompt) + before)] for prompt in prompts]
        return {
            "kind": "run", "baseline": system.baseline, "model": str(self.subject.folder),
            "prompts": prompts, "generate": self.measured(system.name),
            "timeout": self.scenario.timeout,
            "limited_after_load": baseline_class(system.baseline).limited_after_load(
                system.options),
            "same_load": baseline_class(system.baseline).same_load,
            "environment": baseline_class(system.baseline).environment,
            "settings": {
                "dtype": self.scenario.dtype, "batch": len(prompts),
                "prompt_len": max(map(len, prompts)), "gen_len": self.scenario.gen_len - before,
                "mean_prompt_len": fmean(map(len, prompts)),
                "device_memory": self.scenario.device_memory, "options": dict(system.options)}}

    def figures(self, system: System, outcomes: Sequence[dict]) -> dict[str, object]:
        """Return medians of the repeats; omitted steps take the mean of the measured ones."""
        steps = self.scenario.gen_len - 1
        middle = all("middle" in outcome for outcome in outcomes)  # never a mixture
        means = [fmean(outcome["middle" if middle else "steps"]) for outcome in outcomes]
        total = median(outcome["prefill"] + steps * mean
                       for outcome, mean in zip(outcomes, means, strict=True))
        last = outcomes[-1]
        read = [outcome["read"] for outcome in outcomes if outcome["read"] is not None]
        return {
            "settings": last["settings"], "versions": last["versions"], "repeats": len(outcomes),
            "steps_from": self.mean_prompt_len(system.name)
            + (self.left_out(system) if middle else 0),
            "prefill_s": median(outcome["prefill"] for outcome in outcomes),
            "decode_step_s": median(means), "total_s": total,
            "tokens_per_s": self.batches[system.name] * self.scenario.gen_len / total,
            "projected": self.projected(system.name),
            "load_s": median(outcome["load"] for outcome in outcomes),
            "peak_rss_gb": max(outcome["peak_rss"] for outcome in outcomes) / GB,
            **{f"{name}_gb": _in_gb(max(outcome[name] for outcome in outcomes)
                                    if last.get(name) is not None else None)
               for name in ("peak_memory", "peak_device")},
            "gb_read": median(read) / GB if read else None}

    def bounds(self, system: System, rates: Sequence[dict], total: float) -> dict[str, object]:
        """Return the rooflines for this system's batch size, weights and cache."""
        scenario, prompt = self.scenario, self.mean_prompt_len(system.name)
        full_cache = system.cache_share >= 1
        amount = work(self.subject.model, Load(
            batch=self.batches[system.name], prompt_len=prompt, gen_len=scenario.gen_len,
            cached=prompt + scenario.gen_len / 2 if full_cache
            else system.cache_share * (prompt + scenario.gen_len),
            itemsize=ITEMSIZES[scenario.dtype], weight_bits=system.weight_bits,
            cache_bits=system.cache_bits))
        typical = {name: fmean(rate[name] for rate in rates)
                   for name in ("disk", "memory", "link", "gemm") if name in rates[0]}
        prefill, step = rooflines(amount, typical, scenario.memory, scenario.device_memory)
        return {
            "prefill_roofline_s": prefill, "decode_step_roofline_s": step,
            "total_over_roofline": total / (prefill + (scenario.gen_len - 1) * step),
            "disk_gb_per_s": typical["disk"] / GB, "memory_gb_per_s": typical["memory"] / GB,
            "link_gb_per_s": _in_gb(typical.get("link")),
            "gemm_tflop_per_s": typical["gemm"] / 1e12}


def equal_share(tokens: Sequence[Sequence[int]] | None, reference: Sequence[Sequence[int]]
                ) -> float | None:
    """Return the share of equal tokens among those that both have; None without any."""
    pairs = [pair for prompt in zip(tokens or (), reference, strict=False)
             for pair in zip(*prompt, strict=False)]
    return fmean(token == expected for token, expected in pairs) if pairs else None


def best_batch(rate: Callable[[int], float | None], *, first: int, max_batch: int) -> int | None:
    """Return the batch size with the highest rate.

    The batch size is doubled from `first` until memory is too small or two steps in a row gain
    nothing. If `first` is too large, it is halved until it fits.

    `rate`: tokens per second at a batch size; None if it cannot run. `first` and `max_batch`: first
    and largest batch size.

    Returns
    -------
    int or None
        None if not even one sequence could be measured.
    """
    best: tuple[float, int] | None = None
    batch, idle = first, 0
    while batch <= max_batch and idle < 2:
        tokens_per_second = rate(batch)
        if tokens_per_second is None:
            break
        if best is None or tokens_per_second > best[0]:
            best, idle = (tokens_per_second, batch), 0
        else:
            idle += 1
        batch *= 2
    batch = first // 2
    while best is None and batch >= 1:
        tokens_per_second = rate(batch)
        best = None if tokens_per_second is None else (tokens_per_second, batch)
        batch //= 2
    return None if best is None else best[1]


def check_limits(config: Comparison) -> None:
    """Raise `UserError` for limits that cannot be set on this machine."""
    if any(scenario.device_memory is not None for scenario in config.scenarios):
        import torch  # only now: it takes seconds

        if not torch.cuda.is_available():
            raise UserError("--config limits device_memory, and there is no GPU here: choose other "
                            "--scenarios")
    for scenario in config.scenarios:
        if scenario.memory is not None:
            with MemoryGroup(scenario.memory):
                pass


def summary(rows: Sequence[dict[str, str]]) -> str:
    """Format the rows as an aligned table. Rows of the batch size search are omitted."""
    lines = [("scenario", "at", "batch", "system", "tokens/s", "step s", "x roofline", "equal",
              "x perplexity")]
    for row in rows:
        if row["at"] == SEARCH:
            continue
        figures = [row[name] for name in ("tokens_per_s", "decode_step_s", "total_over_roofline",
                                          "equal_tokens", "perplexity_factor")]
        if row["status"] != OK:
            figures = [row["status"], "", "", "", ""]
        elif row["projected"] == "True":
            figures[0] += " (projected)"
        lines.append((row["scenario"], row["at"], row["batch"], row["system"], *figures))
    return align_columns(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, default=argparse.SUPPRESS,
                        help="YAML file of the comparison")
    parser.add_argument("--models", type=Path, default=Path("."),
                        help="folder that holds the models' folders")
    parser.add_argument("--out", default="benchmarks/results/compare_cpu.csv",
                        help="CSV file; an existing one is continued")
    parser.add_argument("--scratch", type=Path, default=Path(OFFLOAD_DIR).expanduser(),
                        help="folder for offloaded data")
    parser.add_argument("--systems", nargs="+", default=(), help="only these names of the config")
    parser.add_argument("--scenarios", nargs="+", default=(), help="only these names of the config")
    args = parser.parse_args(argv)
    config = load(args.config, models=args.models, systems=args.systems,
                  scenarios=args.scenarios)
    check_limits(config)
    table = Table(os.path.expanduser(args.out))

    def run(job: dict, memory: int | None) -> dict:
        timeout = job.get("timeout") or config.timeout
        return run_job(job, threads=config.threads, timeout=timeout, memory=memory,
                       scratch=args.scratch)

    with report_partial_rows(table.file):
        Cells(config, table, run).run()
    table.finish()
    print(summary(table.rows()))


if __name__ == "__main__":
    sys.exit(exit_status(main))
