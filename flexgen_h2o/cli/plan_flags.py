"""The flags of the planner together: what they contradict. No torch.

`--percent auto` searches for a policy, `--plan-only` prints a plan and runs nothing, `--hardware`
plans for another machine. `planner` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.errors import UserError

AUTO = "auto"
GOALS = ("throughput", "latency")


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Values of the flags of `RunConfig` that say what is planned and for which machine.

    Raises `UserError` for flags that contradict each other and for one that would do nothing;
    `called` says what it calls a flag.
    """

    percent: tuple[float, ...] | str
    goal: str
    allow_compression: bool
    plan_only: bool
    recalibrate: bool
    hardware: str | None
    device: str
    device_memory_limit: int | None
    weight_bits: int | None
    compress_weight: bool
    cache_bits: int | None
    compress_cache: bool
    output: str | None
    csv: str | None
    trace: str | None
    debug_mode: str | None
    called: Callable[[str], str] = flag_name

    def __post_init__(self) -> None:
        for flag, given, reason in self._idle():
            if given:
                raise UserError(f"{flag} has no effect {reason}")
        if self.hardware is not None and not self.plan_only:
            raise UserError("--hardware describes another machine: add --plan-only")

    def _idle(self) -> Iterator[tuple[str, bool, str]]:
        """Each flag that may do nothing, whether it is given and does, and why."""
        fixed = self.percent != AUTO
        yield "--goal", fixed and self.goal != GOALS[0], "on a fixed policy: add --percent auto"
        yield ("--allow-compression", fixed and self.allow_compression,
               "on a fixed policy: add --percent auto")
        chosen = [self.weight_bits is not None or self.compress_weight,
                  self.cache_bits is not None or self.compress_cache]
        yield ("--allow-compression", self.allow_compression and all(chosen),
               "as the bits of weights and cache are both given: leave one of them out")
        elsewhere = self.hardware is not None
        yield ("--recalibrate", self.recalibrate and fixed and not self.plan_only,
               "on a fixed policy: add --percent auto or --plan-only")
        yield ("--recalibrate", self.recalibrate and elsewhere,
               "with --hardware: that file says how fast the machine is")
        yield ("--device", elsewhere and self.device != "auto",
               "with --hardware: that file says what computes")
        yield (self.called("device_memory_limit"),
               self.device_memory_limit is not None and self.device == "cpu",
               f"on {self.called('device')} cpu: give {self.called('memory_limit')}")
        for name in ("output", "csv", "trace", "debug_mode"):
            yield (flag_name(name), self.plan_only and getattr(self, name) is not None,
                   "with --plan-only, which runs nothing")
