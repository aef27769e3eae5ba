"""What the benchmark of kernels says of its goals."""

import pytest
from programs import benchmark_modules


@pytest.fixture(scope="module")
def goals():
    with benchmark_modules("kernel_timing.goals") as found:
        yield found.goals


def row(operation, shape, contestant, **values):
    return {"operation": operation, "shape": shape, "contestant": contestant,
            "speedup_over_plain": 1.0, "share_of_roofline": 0.5, "over_sdpa": "", **values}


@pytest.mark.parametrize(("chosen", "wanted"), [("avx512bf16", ">= 1.7: reached"),
                                             ("amx", ">= 2.5: not reached")])
def test_a_goal_depends_on_the_kind_of_cpu(goals, chosen, wanted):
    rows = [row("linear", "16 x 4096 x 16384", "ours, 4 bits", speedup_over_plain=1.8),
            row("linear", "16 x 4096 x 16384", "plain PyTorch")]
    (line,) = goals.goal_lines(rows, chosen)
    assert line.endswith(wanted) and "1.80" in line


def test_less_time_than_sdpa_is_better(goals):
    rows = [row("prefill", "batch 4, 2048 tokens", "ours", over_sdpa=0.25)]
    assert [line.split(":")[-1] for line in goals.goal_lines(rows, "avx2")] == [" reached"]
    rows[0]["over_sdpa"] = 0.4
    assert [line.split(":")[-1] for line in goals.goal_lines(rows, "avx2")] == [" not reached"]


def test_every_goal_finds_one_row_of_a_whole_run(goals):
    shapes = {"linear": [f"{n} x 4096 x 16384" for n in (1, 2, 4, 8, 16, 32, 64, 256, 1024)],
              "prefill": ["batch 4, 2048 tokens", "batch 1, 8192 tokens"],
              "decode": ["batch 16, 32 KV heads, 205 slots", "batch 16, 8 KV heads, 205 slots"]}
    rows = [row(operation, shape, contestant, over_sdpa=1.0) for operation, all_ in shapes.items()
            for shape in all_ for contestant in ("ours", "ours, 4 bits")]
    rows.append(row("recall", "batch 4, 8 KV heads, 8192 slots", "recall 20%, 4 bits"))
    assert len(list(goals.goal_lines(rows, "amx"))) == len(goals.GOALS)
