"""The page's files, their headers, and the events of the status."""

import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from helpers.fake_llm import run_stats
from helpers.planning_cases import CPU, planned
from helpers.servers import DEADLINE, flags, request, serving

from flexgen_h2o.config.policy import Workload
from flexgen_h2o.planning.roofline import DecodeRoofline, ideal_plan
from flexgen_h2o.serving import dashboard, metrics
from flexgen_h2o.serving.metrics import Metrics, Rate


def events(response):
    """Yield the values of a stream of events."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def status_until(served, is_reached) -> dict:
    """Return the status of a page once it has a property."""
    status: dict = {}
    with served.http.stream("GET", "/events") as response:
        for changes in events(response):
            status |= changes
            if is_reached(status):
                return status
    raise AssertionError(f"the events ended with {status}")


def test_page_and_files_come_with_a_strict_policy(served):
    page = served.http.get("/")
    links = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert len(links) > 3 and not re.search(r"<script(?! src)|<style| style=| on\w+=", page.text)
    for path in ["", *(link for link in links if link != "data:,")]:
        answer = served.http.get(f"/{path}").raise_for_status()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy
        assert not re.search(r"unsafe|\*|http", policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ("", "static/page.js", "static/page.css", "static/uPlot.min.css"):
        text = served.http.get(f"/{path}").text
        assert "//" not in re.sub(r"(^|\s)//.*", "", text), "it names another host"
    for name in ("none.js", "..%2fdashboard.py", "uplot%2fLICENSE", ""):
        assert served.http.get(f"/static/{name}").status_code == 404


def test_unchanged_files_are_not_sent_again(served):
    first = served.http.get("/static/page.js")
    again = served.http.get("/static/page.js", headers={"If-None-Match": first.headers["etag"]})
    other = served.http.get("/static/page.js", headers={"If-None-Match": '"other"'})
    assert (again.status_code, again.content, other.content) == (304, b"", first.content)
    assert first.headers["cache-control"] == "no-cache"


def test_events_begin_with_everything_then_have_changes(served):
    with served.http.stream("GET", "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        changes = events(response)
        first = next(changes)
        assert first["model"] == "tiny" and first["state"] == "ok" and len(first["plan"]) > 3
        file_id = served.upload([request("a", prompt="w1")])
        for change in changes:
            assert "plan" not in change and "model" not in change
            if "files" in change:
                break
        assert change["files"][0] == served.openai.files.retrieve(file_id).to_dict()


def test_events_show_a_batch_to_its_end(served):
    batch = served.batch([request(str(number), prompt="w1 w2", max_tokens=4)
                          for number in range(9)])
    status = status_until(served, lambda status: (batch.id, "completed") in {
        (record["id"], record["status"]) for record in status["batches"]})
    shown = next(record for record in status["batches"] if record["id"] == batch.id)
    assert shown["request_counts"] == {"total": 9, "completed": 9, "failed": 0}
    assert status["generation_tokens"] >= 9


def test_old_batches_that_run_are_shown(served, monkeypatch):
    monkeypatch.setattr(dashboard, "SHOWN", 1)
    old = served.batch([request(str(number), prompt="w1", max_tokens=100, min_tokens=100)
                        for number in range(2000)])
    served.wait(old.id, "in_progress")
    new = served.batch([request("a", prompt="w1")])
    status = status_until(served, lambda status: len(status["batches"]) == 2)
    served.openai.batches.cancel(old.id)
    assert [batch["id"] for batch in status["batches"]] == [new.id, old.id]


def test_events_show_bytes_of_tiers_and_links(words_model, tmp_path):
    argv = flags(words_model, tmp_path, "--percent", "0", "0", "100", "0")
    with serving(argv) as served:
        served.wait(served.batch([request("a", prompt="w1", max_tokens=4)]).id)
        status = status_until(served, lambda status: status["generation_tokens"])
        tiers = {tier["name"]: tier for tier in status["tiers"]}
        assert tiers["disk"]["read_bytes"] > tiers["disk"]["holds_bytes"] > 0
        assert tiers["memory"]["written_bytes"] == tiers["disk"]["read_bytes"]
        assert tiers["disk"]["written_bytes"] == 0


def test_events_end_with_the_server(words_model, tmp_path):
    ended = threading.Event()

    def follow(url: str) -> None:
        with httpx.stream("GET", f"{url}/events", timeout=DEADLINE) as response:
            for _ in events(response):
                began.set()
        ended.set()

    began = threading.Event()
    with serving(flags(words_model, tmp_path)) as served:
        thread = threading.Thread(target=follow, args=(served.url,))
        thread.start()
        assert began.wait(DEADLINE)
    thread.join(DEADLINE)
    assert ended.is_set()


def test_page_is_public_but_not_its_data(words_model, tmp_path):
    with serving(flags(words_model, tmp_path, "--api-key", "secret")) as served:
        assert served.http.get("/").status_code == 200
        assert served.http.get("/static/page.js").status_code == 200
        for path in ("/events", "/static", "/v1/files"):
            assert served.http.get(path).status_code == 401
        with served.http.stream("GET", "/events", headers={"Authorization": "Bearer secret"}) as it:
            assert next(events(it))["model"] == "tiny"


def test_rate_is_of_the_last_seconds(monkeypatch):
    now = 100.0
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now))
    rate = Rate(10)
    now = 105.0
    assert rate.sample(50) == 10
    now = 110.0
    assert rate.sample(50) == 5
    for _ in range(20):
        now += 1
        last = rate.sample(50)
    assert last == 0


def test_share_of_the_roofline_is_of_blocks_with_one():
    least = iter([None, 2.0, 3.0])
    counted = Metrics("m", SimpleNamespace(seconds=lambda stats: next(least)))
    assert counted.shares() == {}
    for seconds in (9.0, 4.0, 4.0):
        counted.count_block(run_stats(decode_seconds=seconds), 9.0)
    assert counted.shares() == {"Decode, share of roofline": 5 / 8}


def test_roofline_is_that_of_the_rows_and_lengths():
    run = planned(gpu=False, batch=(4, 2), lengths=(99, 1))
    roofline = DecodeRoofline(CPU, run)
    steps = [1.0, 1.0, 1.0]
    begun = run_stats(num_prompts=0, prompt_tokens=0, generated_tokens=0, step_seconds=steps,
                      decode_slots=24)
    assert roofline.seconds(begun) is None  # no length is known
    ended = replace(begun, num_prompts=8, prompt_tokens=8 * 50, generated_tokens=8 * 10)
    expected = ideal_plan(CPU, replace(run, workload=Workload(50, 10, 4, 2))).estimate.step.seconds
    assert roofline.seconds(ended) == pytest.approx(3 * expected)
    few = roofline.seconds(replace(begun, decode_slots=12, idle_slots=6))
    assert few == pytest.approx(3 * ideal_plan(
        CPU, replace(run, workload=Workload(50, 10, 2, 1))).estimate.step.seconds)
    assert few < 3 * expected
    assert roofline.seconds(run_stats(step_seconds=[])) is None  # prefill alone


def test_blocks_add_to_counters_of_links_and_caches():
    counted = Metrics("m")
    for _ in range(2):
        counted.count_block(run_stats(links={"disk->cpu": (1000, 0.5)}, expert_hits=3,
                                      expert_loads=1), 1.0)
    assert counted.values("flexgen_h2o:link_bytes", "link") == {("disk->cpu",): 2000}
    assert counted.values("flexgen_h2o:link_seconds", "link") == {("disk->cpu",): 1}
    assert counted.values("flexgen_h2o:lookups", "cache", "result") == {
        ("experts", "hit"): 6, ("experts", "miss"): 2}
    counted.count_block(run_stats(recall_loads=5), 1.0)
    assert counted.shares() == {"Hit rate, experts": 0.75, "Hit rate, recall": 0.0}
