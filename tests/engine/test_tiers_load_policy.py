"""When KV below the device is loaded, what a request waits for, and what it finds that came while it waited."""

import pytest
from redis_server import RedisServer
from support import Running, assert_books_hold, assert_same, prompt, status, wait_until
from tier_support import (
    CHUNK,
    FEW_CHUNKS,
    NEW_TOKENS,
    SMALLER_POOL,
    assert_hit,
    assert_nothing_held,
    cached_from,
    push_out,
    start,
    stored,
    tier_status,
    tiers,
    total,
    whole_pages,
    with_remote,
)

from psrl_sglang.engine.estimates import LoadOrRecompute
from psrl_sglang.engine.gate import Gate

pytestmark = pytest.mark.engine
LENGTH = 2 * CHUNK + 90


def choice(server):
    return tier_status(server)["load_or_recompute"]


def test_never_recomputes_what_dram_has(server_factory):
    server = start(server_factory, tiers(sglang={"load_policy": "never"}))
    asked = prompt(6000)
    cold = stored(server, asked)
    server.overwrite_pool()
    again = server.generate(asked, NEW_TOKENS)
    assert again.cached_tokens == 0
    assert_same(again, cold)
    assert_hit(server, asked, cold, "device")
    assert choice(server)["policy"] == "never"
    assert choice(server)["loaded"] == 0
    assert choice(server)["recomputed"] == 1
    assert_books_hold(server)
    server.stop(grace_s=0.0)


def test_a_number_of_tokens_is_the_least_that_is_loaded(server_factory):
    server = start(server_factory, tiers(sglang={"load_policy": 304}))
    enough, too_few = prompt(6010, 305), prompt(6011, 304)
    cold = [stored(server, enough), stored(server, too_few)]
    server.overwrite_pool()
    assert_hit(server, enough, cold[0], "host", 304)
    again = server.generate(too_few, NEW_TOKENS)
    assert again.cached_tokens == 0
    assert_same(again, cold[1])
    assert (choice(server)["loaded"], choice(server)["recomputed"]) == (1, 1)
    # It is what would be loaded that counts, not what the device has anyway.
    longer = enough + prompt(6012, 200)
    server.generate(longer, 1)
    server.overwrite_pool()
    server.generate(enough, 1)
    assert cached_from(server.generate(longer, 1)) == {"device": 304, "host": 0, "storage": 0}
    server.stop(grace_s=0.0)


def test_auto_loads_until_it_knows_and_then_decides_by_what_it_has_measured(server_factory):
    server = start(server_factory, tiers(sglang={"load_policy": "auto"}))
    first = prompt(6020, 300)
    cold = stored(server, first)
    unknown = choice(server)
    assert unknown["policy"] == "auto"
    assert unknown["load_bytes_per_s"] is unknown["least_tokens_worth_loading"] is None
    server.overwrite_pool()
    assert_hit(server, first, cold, "host")
    asked = [prompt(6030 + number, 200 + 150 * number) for number in range(8)]
    for one in asked:
        stored(server, one)
    for _ in range(2):
        server.overwrite_pool()
        for one in asked:
            server.generate(one, 1)
    known = choice(server)
    assert known["prefill_tokens_per_s"] > 0
    assert known["loaded"] + known["recomputed"] == 1 + 2 * len(asked)
    if known["loaded"] >= 6:  # on a machine so slow that loading never pays, there is nothing more to know
        assert known["load_bytes_per_s"] > 0
        assert known["load_fixed_s"] >= 0
    server.stop(grace_s=0.0)


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def remote(server_factory, redis):
    """Redis that can be stopped makes a read take as long as a test wants."""
    sglang = {"namespace": "run", "remote_timeout_s": 30.0, "read_ahead_timeout_s": 60.0}
    settings = with_remote(redis.url, chunks=FEW_CHUNKS, save_unfull_chunk=True, sglang=sglang)
    return start(server_factory, settings, *SMALLER_POOL)


def waiting(server):
    return tier_status(server)["queues"]["gate"]


def stored_remotely(server, seed):
    asked = prompt(seed, LENGTH)
    answer = stored(server, asked)
    push_out(server)
    return asked, answer


def test_others_overtake_a_request_that_waits_for_its_kv(remote, redis, fresh):
    asked, expected = stored_remotely(remote, 6100)
    resident = prompt(6101, 200)
    remote.generate(resident, 1)
    redis.freeze()
    try:
        held = Running(remote, asked, NEW_TOKENS)
        wait_until(lambda: waiting(remote) == 1, "the request waits for Redis")
        assert cached_from(remote.generate(resident, NEW_TOKENS))["device"] == whole_pages(200)
        assert waiting(remote) == 1
    finally:
        redis.thaw()
    answer = held.result()
    assert cached_from(answer) == {"device": 0, "host": 0, "storage": whole_pages(LENGTH)}
    assert_same(answer, expected)
    assert total(remote, "gate_requests", outcome="read") >= 1
    assert_nothing_held(remote)


def test_two_requests_for_one_prefix_read_it_once(remote, redis):
    asked, expected = stored_remotely(remote, 6110)
    before = total(remote, "bytes", tier="remote", direction="load")
    redis.freeze()
    try:
        requests = [Running(remote, asked, NEW_TOKENS)]
        wait_until(lambda: waiting(remote) == 1, "the first waits")
        requests += [Running(remote, asked + [9] * number, NEW_TOKENS) for number in (0, 1, 2)]
        wait_until(lambda: waiting(remote) == 4, "all wait")
    finally:
        redis.thaw()
    answers = [request.result() for request in requests]
    for answer in answers:
        assert cached_from(answer)["storage"] + cached_from(answer)["host"] >= whole_pages(LENGTH)
    for answer in answers[:2]:
        assert_same(answer, expected)
    read = total(remote, "bytes", tier="remote", direction="load") - before
    assert read == whole_pages(LENGTH) * 2048
    assert_nothing_held(remote)
    assert_books_hold(remote)


def test_kv_that_becomes_resident_while_a_request_waits_is_used(remote, redis):
    """Its prefix is still being generated by another request when it arrives, and it waits for a read that will
    bring nothing."""
    asked = prompt(6120, 200)
    first = Running(remote, asked, 300)
    first.wait_tokens(100)
    whole = asked + list(first._last["output_ids"][:100])
    redis.freeze()
    try:
        late = Running(remote, whole + prompt(6121, 40), NEW_TOKENS)
        wait_until(lambda: waiting(remote) == 1, "it waits for Redis")
        assert status(remote)["requests"]["waiting"] == 1
        first.result()
    finally:
        redis.thaw()
    assert cached_from(late.result())["device"] == whole_pages(len(whole) + 1)
    assert_nothing_held(remote)


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing_behind(remote, redis):
    asked, expected = stored_remotely(remote, 6130)
    redis.freeze()
    try:
        held = Running(remote, asked, NEW_TOKENS, rid="gone")
        wait_until(lambda: waiting(remote) == 1, "it waits for Redis")
        assert remote.post("/abort_request", {"rid": "gone"}).status_code == 200
        wait_until(lambda: waiting(remote) == 0, "it is gone")
    finally:
        redis.thaw()
    held._thread.join(60)
    assert_nothing_held(remote)
    assert_books_hold(remote)
    again = remote.generate(asked, NEW_TOKENS)
    assert again.cached_tokens == whole_pages(LENGTH)
    assert_same(again, expected)


def test_weights_that_change_while_a_request_waits_are_what_it_is_answered_with(remote, redis, models, fresh):
    asked, _ = stored_remotely(remote, 6140)
    redis.freeze()
    try:
        held = Running(remote, asked, NEW_TOKENS)
        wait_until(lambda: waiting(remote) == 1, "it waits for Redis")
        remote.pause("in_place")
        assert remote.update_weights(models[2], version="2").success
    finally:
        redis.thaw()
    remote.resume()
    answer = held.result()
    assert answer.cached_tokens == 0
    assert_same(answer, fresh(2, asked, NEW_TOKENS))
    assert remote.update_weights(models[1], version="1").success
    assert_nothing_held(remote)
    assert_books_hold(remote)


def test_never_reads_nothing_ahead_on_several_ranks_either():
    """They may not go by what each of them has in DRAM, but they agree on this."""

    class Linker:
        choice = LoadOrRecompute("never", 2048)

        def missing(self, rid):
            raise AssertionError(f"{rid} is looked up")

    gate = Gate(None, Linker(), wait_s=1.0, ranks=2)  # type: ignore[arg-type]
    gate.on_arrival("request")
    assert gate.is_open("request")
