"""Traces of runs: spans, samples of memory, and the written file."""

import json
import threading
from pathlib import Path

import psutil
import pytest
from helpers.error_cases import refused
from helpers.internals import before_blocks

from flexgen_h2o import LLM
from flexgen_h2o.metrics.provenance import sampled_memory
from flexgen_h2o.metrics.trace import DEVICE_MEMORY, PROCESS_MEMORY, Trace


def test_trace_is_chrome_json(tmp_path):
    trace = Trace()
    with trace.span("layer 1", "compute"):
        pass
    with pytest.raises(ValueError, match="boom"), trace.span("layer 2", "compute"):
        raise ValueError("boom")
    start = trace.spans()[0][2]
    trace.add("chunk", "disk->cpu", start + 1, start + 3, 4 * 10**9)
    trace.about = {"model": "opt", "decode_steps": 3, "predicted_prefill_seconds": None}
    trace.sample(PROCESS_MEMORY, start + 0.5, 10**9)
    trace.sample(DEVICE_MEMORY, start + 2, 7)
    trace.write_chrome(tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["otherData"] == trace.about
    events = document["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert sorted(names.values()) == ["compute", "disk->cpu"]
    assert [names[e["tid"]] for e in spans] == ["compute", "compute", "disk->cpu"]
    assert spans[2]["dur"] == pytest.approx(2e6)
    assert spans[2]["ts"] - spans[0]["ts"] == pytest.approx(1e6)
    assert spans[2]["args"] == {"bytes": 4 * 10**9, "GB/s": pytest.approx(2.0)}
    process, device = (e for e in events if e["ph"] == "C")
    assert (process["name"], process["args"]) == (PROCESS_MEMORY, {"bytes": 10**9})
    assert (device["name"], device["args"]) == (DEVICE_MEMORY, {"bytes": 7})
    assert device["ts"] - process["ts"] == pytest.approx(1.5e6)
    assert list(tmp_path.iterdir()) == [tmp_path / "t.json"]


def test_disabled_trace_records_nothing():
    trace = Trace(enabled=False)
    with trace.span("layer", "compute"):
        trace.add("chunk", "disk->cpu", 0.0, 1.0, 5)
    assert trace.spans() == []
    with sampled_memory(trace, lambda: pytest.fail("sampled")):
        assert not samplers()
    trace.sample(PROCESS_MEMORY, 1.0, 5)
    assert trace.samples() == []


# Memory


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memory samples"]


def test_memory_is_sampled_as_long_as_the_body_runs():
    trace, calls, enough = Trace(), [], threading.Event()

    def device_bytes():
        calls.append(threading.current_thread())
        if len(calls) == 5:
            enough.set()
        return 100 + len(calls)

    with sampled_memory(trace, device_bytes, interval=0):
        assert enough.wait(60) and len(samplers()) == 1
    count = len(calls)
    assert not samplers(), "the thread has ended"
    main = threading.main_thread()
    assert calls[0] is main and calls[-1] is main, "a sample at both ends"
    assert all(thread is not main for thread in calls[1:-1])
    device = [nbytes for what, _, nbytes in trace.samples() if what == DEVICE_MEMORY]
    process = [nbytes for what, _, nbytes in trace.samples() if what == PROCESS_MEMORY]
    assert device == list(range(101, 101 + count)) and len(process) == count
    assert all(0 < nbytes < psutil.virtual_memory().total for nbytes in process)
    times = [time for _, time, _ in trace.samples()]
    assert times == sorted(times)


def test_a_model_is_sampled_while_it_is_loaded_and_runs(tiny_model, monkeypatch):
    trace, seen = Trace(), []
    folder = str(tiny_model("opt").folder)
    with LLM(folder, dtype="float32", trace=trace) as llm:
        loaded = len(trace.samples())
        assert loaded >= 2 and not samplers()
        before_blocks(monkeypatch, lambda: seen.append(len(samplers())))
        llm.generate([[5, 6, 7]], max_new_tokens=2, eos_token_id=-1)
        assert seen == [1] and not samplers()
        assert len(trace.samples()) >= loaded + 2
        phases = [span for span in trace.spans() if span[1] == "phases"]
        assert trace.samples()[loaded][1] <= min(span[2] for span in phases)
        assert trace.samples()[-1][1] >= max(span[3] for span in phases)

        def fail():
            raise RuntimeError("boom")

        before_blocks(monkeypatch, fail)
        with pytest.raises(RuntimeError, match="boom"):
            llm.generate([[5, 6, 7]], max_new_tokens=2)
        assert not samplers()
    refused(lambda: LLM(str(Path(folder) / "absent"), trace=trace))
    assert not samplers()
