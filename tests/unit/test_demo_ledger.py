"""The client's rule for stale tokens, and the verdict's raw material: which versions are behind a request."""

import pytest

from psrl_sglang.lab.demo_ledger import PageLedger, Reuse
from psrl_sglang.lab.demo_request import Leg

PROMPT = list(range(100, 112))


def ledger_with(version: int) -> PageLedger:
    ledger = PageLedger(page_tokens=4)
    ledger.record(PROMPT, [version] * len(PROMPT), 0)
    return ledger


def test_cached_pages_of_an_earlier_version_are_stale():
    ledger = ledger_with(1)
    assert ledger.reuse(PROMPT, 8, version=2) == Reuse(stale_tokens=8, repeated_tokens=4)
    assert ledger.reuse(PROMPT, 8, version=1) == Reuse(stale_tokens=0, repeated_tokens=4)


def test_a_page_computed_again_is_no_longer_stale():
    ledger = ledger_with(1)
    ledger.record(PROMPT, [2] * len(PROMPT), first_token=4)
    assert ledger.reuse(PROMPT, 12, version=2).stale_tokens == 4


def test_what_nobody_here_computed_and_what_was_flushed_is_not_counted():
    ledger = ledger_with(1)
    other = [7, *PROMPT[1:]]
    assert ledger.reuse(other, 12, version=2) == Reuse(0, 0)
    ledger.forget()
    assert ledger.reuse(PROMPT, 12, version=2) == Reuse(0, 0)
    assert ledger.reuse(PROMPT, 0, version=2) == Reuse(0, 12)


def test_a_page_is_as_old_as_its_oldest_token_and_stands_for_its_prefix():
    ledger = PageLedger(page_tokens=4)
    ledger.record(PROMPT[:8], [1, 1, 2, 2, 2, 2, 2, 2], 0)
    assert ledger.reuse(PROMPT, 8, version=2).stale_tokens == 4
    assert ledger.reuse(PROMPT[4:8], 4, version=2) == Reuse(0, 0)


def test_versions_must_match_the_tokens():
    with pytest.raises(ValueError, match="2 versions for 3 tokens"):
        PageLedger(4).record([1, 2, 3], [1, 1], 0)


def crossing_leg() -> Leg:
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 4}]
    meta = {"weight_version": "2", "weight_versions": spans, "cached_tokens": 0}
    return Leg((5, 6, 7), 4, sent_under=1, output_ids=(1, 2, 3, 4), meta=meta)


def test_kv_of_a_token_belongs_to_the_forward_that_sampled_the_next():
    leg = crossing_leg()
    assert leg.crossed
    assert leg.kv_versions(retracted_prompt_is_reused=True) == [1, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(("reused", "prompt"), [(True, 1), (False, 2)])
def test_what_a_retracted_request_had_computed_is_computed_again(reused: bool, prompt: int):
    leg = crossing_leg()
    leg.recomputed_under = 2
    assert leg.kv_versions(retracted_prompt_is_reused=reused) == [prompt] * 3 + [2] * 4
