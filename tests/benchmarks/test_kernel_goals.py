"""Timings of benchmarks/kernels.py."""

import itertools

import pytest
from helpers.programs import benchmark_modules


def test_timings_exclude_warm_up(monkeypatch, capsys):
    """Calls return the seconds that they take."""
    with benchmark_modules("kernel_timing") as found:
        rows = found.kernel_timing
    reads, products = iter([99.0, *[rows.READ / 1e9] * 3]), iter([1e9, 2e9])
    monkeypatch.setattr(rows, "memory_reader", lambda nbytes: lambda: next(reads))
    monkeypatch.setattr(rows, "best_gemm_rate", lambda count, dtype: next(products))
    monkeypatch.setattr(rows, "_seconds", lambda function, **given: function(**given))
    table = rows.TimedRows(3)
    for kind in ({"nbytes": {rows.OURS: 10**9, rows.PLAIN: 2 * 10**9}}, {"flops": 4e9}):
        reads = itertools.chain(reads, [99.0] * 4)
        took = {rows.OURS: iter([9.0, 1.0, 2.0, 1.5]), rows.PLAIN: iter([9.0, 5.0, 3.0, 4.0])}
        table.measure("linear", "a shape", {name: took[name].__next__ for name in took},
                      {name: itertools.repeat({}) for name in took}, **kind)
    figures = [(row["ms"], row["fastest_ms"], row["roofline_ms"]) for row in table.rows]
    assert figures == [pytest.approx(each) for each in (
        (1500, 1000, 1000), (4000, 3000, 2000), (1500, 1000, 2000), (4000, 3000, 2000))]
    assert [row["speedup_over_plain"] for row in table.rows[:2]] == [4 / 1.5, 1]
    assert table.rows[1]["share_of_roofline"] == pytest.approx(0.5)
    assert "(0.50 of 1.0 GB/s)" in capsys.readouterr().out
