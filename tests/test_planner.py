"""The memory plan: sums by hand, a suggestion that fits itself, and what counts as free."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import planner
from flexgen_h2o.config import Placement, Policy, parse_percent
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.spec import published
from flexgen_h2o.planner import MemoryLimits, Workload, cgroup_free, free_memory, memory_plan

OPT_30B = published("facebook/opt-30b")
LOAD = Workload(prompt_len=512, gen_len=32, gpu_batch_size=4, num_gpu_batches=2)


def make_policy(*percent) -> Policy:
    weights, cache, activations = parse_percent(percent)
    return Policy(weights=weights, cache=cache, activations=activations)


def make_plan(*percent, load=LOAD, **options):
    return memory_plan(OPT_30B, make_policy(*percent), load, itemsize=2, **options)


def rows(plan) -> dict[str, tuple[int, int, int]]:
    return {row.name: (row.gpu, row.cpu, row.disk) for row in plan.rows}


def test_sums_without_a_gpu():
    plan = make_plan(0, 100, 100, 0)
    found = rows(plan)
    weights = found["weights"][1] + found["embeddings"][1]
    assert weights == pytest.approx(OPT_30B.num_parameters() * 2, rel=1e-9)
    assert found["cache"] == (0, 8 * 544 * OPT_30B.kv_bytes_per_token(2), 0)
    assert found["activations"] == (0, 8 * 512 * 7168 * 2, 0)
    for buffers in ("weight buffers", "cache buffers", "activation buffers"):
        assert found[buffers] == (0, 0, 0), "memory is used in place"
    assert plan.total("gpu") == plan.total("disk") == 0
    assert plan.total("cpu") == sum(row.cpu for row in plan.rows)


def test_weights_on_disk_need_two_layers_and_no_space_unless_written():
    layer = OPT_30B.layer_parameters() * 2
    found = rows(make_plan(0, 0, 100, 0))
    assert found["weights"] == (0, 0, 0)
    assert found["weight buffers"] == (0, 2 * layer, 0)
    written = rows(make_plan(0, 0, 100, 0, writes_weights=True))
    assert written["weights"][2] == OPT_30B.num_layers * layer


def test_a_gpu_needs_staging_for_what_is_on_the_host():
    layer = OPT_30B.layer_parameters() * 2
    part = 4 * 544 * OPT_30B.kv_bytes_per_token(2) // OPT_30B.num_layers
    found = rows(make_plan(0, 100, 0, 100, 0, 100, has_gpu=True))
    assert found["weight buffers"] == (2 * layer, 2 * layer, 0)
    assert found["cache buffers"] == (3 * part, 3 * part, 0)
    assert found["activation buffers"] == (3 * 4 * 512 * 7168 * 2, 0, 0)


def test_a_partly_fetched_layer_needs_a_part_of_a_buffer():
    whole = rows(make_plan(0, 0, 100, 0))["weight buffers"][1]
    part = rows(make_plan(80, 0, 100, 0))["weight buffers"][1]
    assert 0 < part < whole


def test_cache_is_split_by_whole_sequences():
    found = rows(make_plan(100, 0, 30, 30, has_gpu=True))
    assert [size // found["cache"][1] for size in found["cache"]] == [1, 1, 2]


def test_the_issues_example_is_refused_in_one_line():
    """opt-30b with random weights and --percent 0 100 100 0 on 24 GB."""
    plan = make_plan(0, 100, 100, 0, load=replace(LOAD, num_gpu_batches=1), writes_weights=True)
    with pytest.raises(UserError) as caught:
        plan.check(MemoryLimits(None, 24 * 10**9, 80 * 10**9))
    message = str(caught.value)
    assert "\n" not in message
    assert "host memory: needs 63.5 GB" in message and "24.0 GB free" in message
    assert re.search(r"--percent [\d .]+ would fit", message)


@pytest.mark.parametrize(("writes", "limits"), [
    (False, MemoryLimits(None, 10**9, 10**12)),  # not even the buffers
    (True, MemoryLimits(None, 24 * 10**9, 10**6)),  # neither memory nor disk
])
def test_nothing_fits_and_says_so(writes, limits):
    with pytest.raises(UserError, match="no --percent would fit.*gpu-batch-size"):
        make_plan(0, 100, 100, 0, writes_weights=writes).check(limits)


def test_what_fits_passes():
    make_plan(0, 100, 100, 0).check(MemoryLimits(None, 80 * 10**9, 0))
    make_plan(100, 0, 100, 0, has_gpu=True).check(MemoryLimits(80 * 10**9, 10**6, 0))


def test_loaded_weights_are_not_counted_twice():
    plan = make_plan(0, 100, 100, 0)
    left = MemoryLimits(None, plan.total("cpu") - rows(plan)["weights"][1], 0)
    with pytest.raises(UserError):
        plan.check(left)
    plan.check(left, loaded=True)


def test_weights_go_to_disk_first_then_the_cache():
    plan = make_plan(0, 100, 0, 100)
    weights_only = plan.suggest(MemoryLimits(None, 30 * 10**9, 0))
    assert weights_only.cache == Placement(0, 100, 0)
    assert 0 < weights_only.weights.disk < 100
    both = plan.suggest(MemoryLimits(None, 8 * 10**9, 10**12))
    assert both.weights.disk == 100 and both.cache.disk > 0


def test_a_full_disk_sends_weights_back_to_memory():
    plan = make_plan(0, 0, 100, 0, writes_weights=True)
    fitting = plan.suggest(MemoryLimits(None, 50 * 10**9, 40 * 10**9))
    assert fitting is not None and fitting.weights.disk < 100


shares = st.integers(0, 20).flatmap(
    lambda gpu: st.integers(0, 20 - gpu).map(lambda cpu: (5 * gpu, 5 * cpu)))
sizes = st.integers(0, 90).map(lambda gigabytes: gigabytes * 10**9)


@settings(max_examples=60, deadline=None)
@given(st.tuples(shares, shares, shares), st.one_of(st.none(), sizes), sizes, sizes, st.booleans())
def test_a_suggestion_fits_itself(percent, gpu, cpu, disk, writes):
    limits = MemoryLimits(gpu, cpu, disk)
    plan = make_plan(*(share for pair in percent for share in pair), has_gpu=gpu is not None,
                     writes_weights=writes)
    try:
        plan.check(limits)
        assert not plan.shortfalls(limits)
    except UserError as error:
        found = re.search(r"--percent ([\d .]+) would fit", str(error))
        if found is None:
            assert "no --percent would fit" in str(error)
            return
        suggested = make_plan(*map(float, found[1].split()), has_gpu=gpu is not None,
                              writes_weights=writes)
        suggested.check(limits)


def test_the_table_shows_every_row_and_the_sums():
    plan = make_plan(50, 50, 100, 0, has_gpu=True)
    text = plan.table(MemoryLimits(10**9, 2 * 10**9, 3 * 10**9))
    for name in (*rows(plan), "device memory", "host memory", "disk space", "sum", "free"):
        assert name in text
    assert "device memory" not in make_plan(50, 50, 100, 0).table()


@pytest.mark.parametrize("field", ["prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches"])
def test_workload_refuses_nothing_to_do(field):
    with pytest.raises(UserError, match=field):
        replace(LOAD, **{field: 0})


# What is free


def group(folder: Path, names, *, limit, used, inactive) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 9\n{names[2]} {inactive}\nrss 7\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def membership(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cgroup"
    path.write_text(text)
    return path


def test_cgroup_v2_takes_the_tightest_limit_above(tmp_path):
    mount = tmp_path / "fs"
    group(mount / "a", V2, limit=1000, used=700, inactive=100)
    group(mount / "a" / "b", V2, limit="max", used=600, inactive=0)
    assert cgroup_free(mount, membership(tmp_path, "0::/a/b\n")) == 400


def test_cgroup_v1_and_its_no_limit(tmp_path):
    mount = tmp_path / "fs"
    lines = "5:cpu:/x\n4:memory:/job\n0::/\n"
    group(mount / "memory", V1, limit=9223372036854771712, used=5, inactive=0)
    group(mount / "memory" / "job", V1, limit=2000, used=500, inactive=50)
    assert cgroup_free(mount, membership(tmp_path, lines)) == 1550
    (mount / "memory" / "job" / V1[0]).write_text("9223372036854771712")
    assert cgroup_free(mount, membership(tmp_path, lines)) is None


def test_cgroup_path_of_the_host_falls_back_to_the_root(tmp_path):
    mount = tmp_path / "fs"
    group(mount / "memory", V1, limit=3000, used=1000, inactive=0)
    assert cgroup_free(mount, membership(tmp_path, "4:memory:/docker/abc\n")) == 2000


def test_no_cgroups_no_limit(tmp_path):
    assert cgroup_free(tmp_path, tmp_path / "none") is None
    assert cgroup_free(tmp_path, membership(tmp_path, "0::/\n")) is None


def test_free_memory_heeds_the_cgroup_and_needs_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "cgroup_free", lambda: 12345)
    limits = free_memory(tmp_path / "not" / "there", 77)
    assert (limits.gpu_bytes, limits.cpu_bytes) == (77, 12345)
    assert limits.disk_bytes > 0
    monkeypatch.setattr(planner, "cgroup_free", lambda: None)
    assert 0 < free_memory(tmp_path, None).cpu_bytes <= psutil.virtual_memory().total
