"""One job of `compare.py`: JSON on stdin, the answer in a file.

The key `kind` is "run" to measure a system once after a warm-up, "ready" for preparations that
need more memory than a run may have, or "rates" to measure the machine.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

from baselines import Baseline, BaselineSettings, baseline_class, no_cuda, ran_out_of_memory
from processes import FAILED, MEMORY, OK, REFUSED, drop_page_cache, enter_loaded
from rooflines import measure_rates

WARM_SHARE, WARM_TOKENS = 4, 2
"""A warm-up has 1/WARM_SHARE of each prompt and generates WARM_TOKENS. On a GPU it is a whole run,
as kernels are compiled and tuned for its lengths."""


def bytes_read() -> int | None:
    """Return the bytes read from disk by this process, page faults included; None if unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def peak_device_bytes() -> int | None:
    """Return the peak GPU memory of this process; None without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None


def run(job: dict) -> dict:
    """Measure a system or prepare it; an error becomes a status and a reason."""
    from flexgen_h2o.storage.device import open_device

    settings = BaselineSettings(scratch=job["scratch"], **job["settings"])
    baseline = baseline_class(job["baseline"])(settings)
    why = baseline.refusal()
    if why is not None:
        return {"status": REFUSED, "reason": why}
    try:
        if job["kind"] == "ready":
            baseline.ready(Path(job["model"]))
            return {"status": OK}
        if settings.device_memory is not None:
            open_device().limit(settings.device_memory)
        return {"status": OK, **measure(baseline, job)}
    except Exception as error:  # any error of a system goes into its row
        status = MEMORY if ran_out_of_memory(error) else FAILED
        words = " ".join(str(error).split())[:400]
        return {"status": status, "reason": f"{type(error).__name__}: {words}"}
    finally:
        baseline.close()


def measure(baseline: Baseline, job: dict) -> dict:
    """Load, warm up and generate once."""
    from flexgen_h2o.metrics.provenance import peak_process_bytes
    from flexgen_h2o.metrics.trace import GB

    prompts, began = job["prompts"], time.perf_counter()
    words = baseline.prepare(Path(job["model"]))
    load = time.perf_counter() - began
    Path(job["loaded"]).touch()
    resident = 0
    if "members_file" in job:
        drop_page_cache()  # pages read while loading would not count
        resident = enter_loaded(Path(job["members_file"]))
        words += f", limited once loaded (it held {resident / GB:.2f} GB of the limit)"
    if baseline.warms:
        share, tokens = (1, job["generate"]) if no_cuda() is None else (WARM_SHARE, WARM_TOKENS)
        baseline.generate([prompt[: max(1, len(prompt) // share)] for prompt in prompts], tokens)
    before = bytes_read()
    timings = baseline.generate(prompts, job["generate"])
    after = bytes_read()
    return {
        "settings": words, "versions": baseline.version(), "load": load, "prefill": timings.prefill,
        "steps": timings.steps, "tokens": timings.tokens, "peak_rss": peak_process_bytes(),
        "peak_device": peak_device_bytes(), "held": resident,
        "read": None if before is None or after is None else after - before,
    }


def rates(job: dict) -> dict:
    """Return this machine's rates, CPU and device."""
    from flexgen_h2o.metrics.provenance import cpu_model
    from flexgen_h2o.storage.device import open_device

    return {"status": OK, "cpu": cpu_model(), "device": open_device().description(),
            **measure_rates(job["file"], job["dtype"])}


KINDS = {"run": run, "ready": run, "rates": rates}


def main() -> None:
    job = json.load(sys.stdin)
    with suppress(OSError):  # the OOM killer should choose this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    answer = KINDS[job["kind"]](job)
    Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
