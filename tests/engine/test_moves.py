"""KV computed by one engine is served by another after a move, and by no other weights."""

import pytest
from move_support import assert_no_move_left, movable, move, moves
from support import assert_books_hold, assert_same, prompt, wait_until
from tier_support import (
    NEW_TOKENS,
    POOL_TOKENS,
    assert_hit,
    assert_nothing_held,
    cached_from,
    settle,
    start,
    total,
    whole_pages,
)

from psrl_sglang.transfer.client import MoveClient

pytestmark = pytest.mark.engine
CHANNELS = ("cma", "tcp", "nixl")


@pytest.fixture(scope="module")
def pair(server_factory):
    """Two engines from one checkpoint."""
    settings = [movable(sglang={"instance_id": name}) for name in ("a", "b")]
    args = ("--max-total-tokens", str(POOL_TOKENS), "--enable-metrics")
    return tuple(start(server_factory, one, *args) for one in settings)


@pytest.fixture
def engines(pair):
    yield pair
    assert_no_move_left(*pair)
    for server in pair:
        assert_nothing_held(server)
        assert_books_hold(server)


def test_the_kv_of_a_prompt_and_its_answer_is_served_by_the_engine_it_was_moved_to(engines):
    a, b = engines
    asked = prompt(1, 601)
    answer = a.generate(asked, NEW_TOKENS * 4)
    whole = [*asked, *answer.output_ids]
    local = a.generate(whole, NEW_TOKENS)
    result = move(whole, a, b)
    assert result.ok, result.reason
    assert result.present_tokens >= whole_pages(len(whole))
    assert result.num_tokens == result.present_tokens
    assert_hit(b, whole, local, "host")


def test_kv_that_only_the_device_has_is_moved_too(engines):
    a, b = engines
    asked = prompt(2, 401)
    a.generate(asked, NEW_TOKENS)
    local = a.generate(asked, NEW_TOKENS)
    assert cached_from(local)["device"] == 400
    settle(a)
    assert MoveClient().clear(moves(a)["command_address"]).num_tokens > 0
    result = move(asked, a, b)
    assert result.present_tokens == 400, result.reason
    assert_hit(b, asked, local, "host")


def test_a_second_move_finds_all_there_and_says_so(engines):
    a, b = engines
    asked = prompt(3, 300)
    a.generate(asked, NEW_TOKENS)
    first, second = move(asked, a, b), move(asked, a, b)
    assert (first.num_tokens, second.num_tokens) == (288, 0)
    assert second.ok
    assert second.present_tokens == 288
    assert "already" in second.reason


def test_a_longer_turn_moves_only_what_is_new(engines):
    a, b = engines
    asked = prompt(4, 320)
    a.generate(asked, NEW_TOKENS)
    move(asked, a, b)
    longer = [*asked, *prompt(5, 320)]
    local = a.generate(longer, NEW_TOKENS)
    result = move(longer, a, b)
    assert result.present_tokens == 640
    assert result.num_tokens == 320
    assert_hit(b, longer, local, "host")


def test_lmcache_14_nothing_to_move_is_said_with_the_reason(engines):
    a, b = engines
    result = move(prompt(6, 200), a, b)
    assert not result.ok
    assert "no KV of this prompt" in result.reason
    result = move(prompt(6, 200), a, b, "77")
    assert not result.ok
    assert "never installed" in result.reason


def test_a_salt_or_an_extra_key_belongs_to_the_prefix(engines):
    a, b = engines
    asked = prompt(7, 200)
    local = a.generate(asked, NEW_TOKENS, cache_salt="tenant", extra_key="k")
    assert not move(asked, a, b).ok
    assert not move(asked, a, b, cache_salt="tenant").ok
    assert move(asked, a, b, cache_salt="tenant", extra_key="k").present_tokens == 192
    again = b.generate(asked, NEW_TOKENS, cache_salt="tenant", extra_key="k")
    assert cached_from(again)["host"] == 192
    assert_same(again, local)


def test_the_metrics_tell_of_moves(engines):
    a, b = engines
    asked = prompt(8, 200)
    a.generate(asked, NEW_TOKENS)
    move(asked, a, b)
    wait_until(lambda: "psrl:moves_total{" in b.get("/metrics").text, "moves are counted")
    assert total(a, "moves", direction="out") >= 1
    assert total(a, "move_bytes", direction="out") == total(b, "move_bytes", direction="in") > 0


@pytest.mark.parametrize("channel", CHANNELS)
def test_lmcache_17_each_transport_moves_kv_that_is_equal(server_factory, pair, channel):
    a, _ = pair
    settings = movable(lmcache={"p2p_transfer_channel": channel}, sglang={"instance_id": "c"})
    c = start(server_factory, settings)
    seed = 20 + 2 * CHANNELS.index(channel)
    asked = prompt(seed, 1201)
    answer = c.generate(asked, NEW_TOKENS)
    whole = [*asked, *answer.output_ids]
    local = c.generate(whole, NEW_TOKENS)
    result = move(whole, c, a)
    assert result.transport == channel
    assert result.present_tokens >= 1200
    assert_hit(a, whole, local, "host", tokens=result.present_tokens)
    back = prompt(seed + 1, 400)
    local = a.generate(back, NEW_TOKENS)
    assert move(back, a, c).present_tokens == 400
    assert_hit(c, back, local, "host")
    assert_no_move_left(a, c)
    assert_nothing_held(c)
    assert_books_hold(c)
    c.stop(grace_s=5.0)


def test_after_a_sync_of_one_engine_only_old_kv_is_refused_with_the_reason(server_factory, models):
    settings = movable()
    a, b = (start(server_factory, settings) for _ in range(2))
    asked = prompt(30, 400)
    local = a.generate(asked, NEW_TOKENS)
    assert b.update_weights(models[2], version="2").success
    result = move(asked, a, b)
    assert not result.ok
    assert "not in use at the destination" in result.reason
    assert cached_from(b.generate(asked, NEW_TOKENS)) == {"device": 0, "host": 0, "storage": 0}
    assert a.update_weights(models[2], version="2").success
    fresh = a.generate(asked, NEW_TOKENS)
    assert cached_from(fresh)["device"] == 0
    assert fresh.logprobs != local.logprobs
    longer = prompt(31, 400)
    local = a.generate(longer, NEW_TOKENS)
    assert move(longer, a, b, "2").present_tokens == 400
    assert_hit(b, longer, local, "host")
    assert_no_move_left(a, b)
    for server in (a, b):
        server.stop(grace_s=5.0)
