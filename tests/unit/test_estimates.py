"""Load or recompute: the lines that are fitted, and the choice made with them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl_sglang.engine.estimates import Line, LoadOrRecompute

BYTES_PER_TOKEN = 1000


def taught(policy="auto", *, prefill_tokens_per_s=1000.0, load_bytes_per_s=1e7, load_fixed_s=0.1):
    choice = LoadOrRecompute(policy, BYTES_PER_TOKEN)
    for tokens in (100, 200, 400, 800, 1600, 3200):
        choice.observe_prefill(tokens, 0.02 + tokens / prefill_tokens_per_s)
        size_bytes = tokens * BYTES_PER_TOKEN
        choice.observe_load(size_bytes, load_fixed_s + size_bytes / load_bytes_per_s)
    return choice


def test_a_line_finds_slope_and_fixed_part():
    line = Line()
    for units in range(1, 50):
        line.observe(units, 0.5 + 0.25 * units)
    assert line.per_unit == pytest.approx(0.25)
    assert line.fixed == pytest.approx(0.5)
    assert line.predict(100) == pytest.approx(25.5)


def test_a_line_follows_a_change_of_speed():
    line = Line()
    for slope in (1.0, 0.1):
        for units in [*range(1, 20)] * 15:
            line.observe(units, slope * units)
    assert line.per_unit == pytest.approx(0.1, rel=0.05)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e3)), min_size=1, max_size=60))
def test_a_line_never_predicts_less_than_nothing_nor_that_more_costs_less(observed):
    line = Line()
    for units, seconds in observed:
        line.observe(units, seconds)
    assert 0 <= line.predict(0) <= line.predict(10) <= line.predict(1e6)
    assert line.per_unit > 0


def test_everything_is_loaded_until_both_costs_are_known():
    choice = LoadOrRecompute("auto", BYTES_PER_TOKEN)
    assert choice.should_load(1)
    for _ in range(10):
        choice.observe_prefill(100, 1e-9)
    assert choice.should_load(1)
    assert choice.status()["least_tokens_worth_loading"] is None


def test_short_hits_are_recomputed_and_long_ones_loaded():
    choice = taught()
    crossover = choice.status()["least_tokens_worth_loading"]
    assert 100 < crossover < 130  # 0.1 s fixed, against 1 ms a token saved less 0.1 ms a token loaded
    assert not choice.should_load(crossover - 1)
    assert choice.should_load(crossover)


def test_a_store_slower_than_prefill_is_never_loaded_from():
    choice = taught(load_bytes_per_s=1e5)
    assert not choice.should_load(100_000)
    assert choice.status()["least_tokens_worth_loading"] is None


@pytest.mark.parametrize(
    ("policy", "loaded"), [("always", [1, 10**6]), ("never", []), (500, [500, 10**6]), (1, [1, 500, 10**6])]
)
def test_a_fixed_policy_needs_no_estimate(policy, loaded):
    choice = taught(policy, load_bytes_per_s=random.Random(1).choice([1.0, 1e12]))
    assert {tokens for tokens in (1, 499, 500, 10**6) if choice.should_load(tokens)} >= set(loaded)
    assert choice.should_load(499) == (policy in ("always", 1))
