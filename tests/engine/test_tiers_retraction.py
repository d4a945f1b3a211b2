"""Requests that SGLang takes back for want of memory go on from DRAM, and answer as if nothing had been."""

import pytest
from support import NAMED, Running, assert_books_hold, counters, prompt
from tier_support import assert_nothing_held, in_schedulers, tiers

pytestmark = pytest.mark.engine
# SGLang's own switch, SGLANG_TEST_RETRACT, which it reads when it is imported: every so many forwards, as if the
# pool were full.
RETRACTING = """
from sglang.srt.managers import scheduler
scheduler.TEST_RETRACT = True
scheduler.TEST_RETRACT_INTERVAL = 9
"""
REQUESTS, NEW_TOKENS = 4, 48


def answers(server) -> list[tuple[int, ...]]:
    running = [Running(server, prompt(seed, 200), NEW_TOKENS) for seed in range(REQUESTS)]
    return [one.result().output_ids for one in running]


def test_row_12_retracted_requests_answer_as_others_do_and_leave_nothing(server_factory, tmp_path):
    plain = server_factory(args=NAMED, psrl_config=tiers())
    expected = answers(plain)
    plain.stop(grace_s=2.0)
    server = server_factory(args=NAMED, psrl_config=tiers(), env=in_schedulers(tmp_path, RETRACTING))
    assert answers(server) == expected
    assert counters(server)["retract_saved_tokens"] > 0
    log = server.log_path.read_text(errors="replace")
    assert "etract" in log
    assert_nothing_held(server)
    assert_books_hold(server)
