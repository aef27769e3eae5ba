"""The number of tokens that stay cached, as documented in `H2OConfig`."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o.budget import Budget, budget, num_cached, num_slots


def test_full_cache_counts():
    for h2o in (None, H2OConfig(), H2OConfig(heavy_ratio=1.0, sink_tokens=3)):
        assert budget(h2o, 0, 7) is None
        assert (num_cached(h2o, 0, 7, 0), num_cached(h2o, 0, 7, 5),
                num_slots(h2o, 0, 7, 5)) == (7, 12, 12)


def test_simulation_needs_the_full_cache():
    h2o = H2OConfig(heavy_tokens=2, simulate=True)
    assert (num_cached(h2o, 0, 7, 0), num_cached(h2o, 0, 7, 5),
            num_slots(h2o, 0, 7, 5)) == (4, 4, 12)


@given(st.integers(1, 1000), st.integers(1, 10_000))
def test_a_ratio_is_read_as_typed(thousandths, prompt_len):
    found = budget(H2OConfig(recent_ratio=thousandths / 1000), 0, prompt_len)
    assert found == Budget(0, max(1, thousandths * prompt_len // 1000))


@pytest.mark.parametrize(("values", "expected"), [
    ({"heavy_ratio": 0.2}, Budget(2, 2)),
    ({"heavy_ratio": 0.2, "recent_ratio": 0.5}, Budget(2, 5)),
    ({"heavy_ratio": 1, "recent_tokens": 4}, Budget(10, 4)),
    ({"heavy_tokens": 3}, Budget(3, 3)),
    ({"heavy_tokens": 3, "recent_ratio": 1}, Budget(3, 10)),
    ({"recent_tokens": 3, "sink_tokens": 4}, Budget(0, 3, 4)),
    ({"heavy_ratio": 0.01, "recent_ratio": 1 / 3}, Budget(1, 3)),
    ({"heavy_ratio": [0.2, 1], "recent_ratio": [1, 0.5]}, Budget(10, 5)),
    ({"heavy_ratio": [0.2, 1]}, None),
    ({"heavy_ratio": 1, "recent_ratio": 1}, None),
    ({"heavy_tokens": 0, "recent_ratio": 0.5}, Budget(0, 5)),
])
def test_budget_of_a_layer(values, expected):
    assert budget(H2OConfig(**values), 1, 10) == expected
    assert expected is None or expected.total == sum(
        (expected.heavy, expected.recent, expected.sinks))


@given(st.data())
def test_text_budget_grows_by_at_most_a_token_a_step(data):
    """Step by step: a new token is cached, and one is evicted if the budget is exceeded."""
    share = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)
    h2o = H2OConfig(heavy_ratio=data.draw(st.none() | share), recent_ratio=data.draw(share),
                    sink_tokens=data.draw(st.integers(0, 4)), budget_of="text")
    assume(not h2o.is_full)
    prompt_len = data.draw(st.integers(1, 100))
    held = min(prompt_len, budget(h2o, 0, prompt_len).total)
    for new in range(60):
        if new:
            held = min(held + 1, budget(h2o, 0, prompt_len, new).total)
        assert num_cached(h2o, 0, prompt_len, new) == held
        assert num_slots(h2o, 0, prompt_len, new) == held


def test_ratios_of_the_prompt_and_of_the_text():
    for of, total in (("prompt", 20), ("text", 30)):
        h2o = H2OConfig(heavy_ratio=0.1, budget_of=of)
        assert budget(h2o, 0, 100).total == 20
        assert budget(h2o, 0, 100, 50).total == num_cached(h2o, 0, 100, 59) == total
