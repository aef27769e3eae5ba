"""The plot of `tasks.batch`: tokens per second and memory over the job."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_h2o.metrics.figures import COLOURS, new_figure, save
from flexgen_h2o.metrics.links import GB
from flexgen_h2o.tasks.jobs.progress import JobSample

_POINTS = 60  # of a rate: blocks differ, and what matters is how it goes on


def draw(samples: Sequence[JobSample], path: str, *, title: str) -> None:
    """Draw the samples of a job into a file, which is there whole or not at all.

    OSError if the file cannot be written.
    """
    figure = new_figure(8, 5.5)
    rate, memory = figure.subplots(2, 1, sharex=True)
    apart = max(1, len(samples) // _POINTS)
    ends = [*samples[::apart], samples[-1]]
    spans = [(first, last) for first, last in zip(ends, ends[1:], strict=False)
             if last.seconds > first.seconds]
    rate.stairs([(last.generated - first.generated) / (last.seconds - first.seconds)
                 for first, last in spans],
                [*(first.seconds for first, _ in spans), samples[-1].seconds],
                color=COLOURS["blue"])
    rate.set(ylabel="generated tokens/s", ylim=(0, None))
    seconds = [each.seconds for each in samples]
    memory.plot(seconds, [each.process_bytes / GB for each in samples], label="process",
                color=COLOURS["vermillion"])
    if samples[-1].device_bytes:
        memory.plot(seconds, [each.device_bytes / GB for each in samples], label="GPU, at most",
                    color=COLOURS["green"], linestyle="--")
    memory.legend(frameon=False, fontsize=9)
    memory.set(ylabel="memory, GB", xlabel="seconds of the job", ylim=(0, None))
    for axes in (rate, memory):
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=10)
    save(figure, path)
