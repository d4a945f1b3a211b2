"""A session that turns up at another engine finds its KV there: fetched at the door, by a hint."""

import os
import signal
import time

import httpx
import pytest
from move_support import ask, assert_no_move_left, moves, pulling, reused
from support import Running, assert_books_hold, prompt, wait_until
from tier_support import NEW_TOKENS, assert_nothing_held, settle, start, total

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def pair(server_factory):
    return [start(server_factory, pulling(sglang={"instance_id": name})) for name in ("a", "b")]


@pytest.fixture
def engines(pair):
    yield pair
    assert_no_move_left(*pair)
    for server in pair:
        assert_nothing_held(server)
        assert_books_hold(server)


def test_a_hint_brings_the_kv_and_the_reply_says_so(engines):
    a, b = engines
    asked = prompt(1, 601)
    ask(a, asked, x_smg_routing_key="one")
    local, _ = ask(a, asked, x_smg_routing_key="one")
    reply, headers = ask(b, asked, x_smg_routing_key="one", x_request_id_psrl_src=a.url)
    assert reused(reply) == {"device": 0, "host": 592}
    assert reply["output_ids"] == local["output_ids"]
    assert headers["x-psrl-kv-source"] == "a"
    assert headers["x-psrl-kv-moved-tokens"] == "592"
    assert headers["x-psrl-oldest-version"] == headers["x-psrl-weight-version"] == "1"


def test_a_session_that_is_here_asks_nobody(engines):
    a, _ = engines
    asked = prompt(2, 601)
    ask(a, asked, x_smg_routing_key="two")
    reply, headers = ask(a, asked, x_smg_routing_key="two")
    assert reused(reply)["device"] == 592
    assert "x-psrl-kv-source" not in headers


def test_a_session_that_went_away_and_came_back_has_all_its_turns(engines):
    a, b = engines
    tokens, before = prompt(3, 401), []
    engines, sources = (a, b, a, b), (None, a, b, a)
    for turn, (engine, source) in enumerate(zip(engines, sources, strict=True)):
        hint = {"x_request_id_psrl_src": source.url} if source else {}
        reply, _ = ask(engine, tokens, x_smg_routing_key="three", **hint)
        if turn:
            assert sum(reused(reply).values()) >= len(before) // 16 * 16 - 16, turn
        before = [*tokens, *reply["output_ids"]]
        tokens = [*before, *prompt(30 + turn, 100)]


def test_a_stream_and_a_chat_are_fetched_for_too(engines):
    a, b = engines
    messages = [{"role": "user", "content": "word " * 700}]
    body = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0}
    first = a.post("/v1/chat/completions", body, headers={"x-smg-routing-key": "four"})
    assert first.status_code == 200, first.text
    settle(a)
    headers = {"x-smg-routing-key": "four", "x-request-id-psrl-src": a.url}
    with httpx.stream(
        "POST", f"{b.url}/v1/chat/completions", json={**body, "stream": True}, headers=headers, timeout=60
    ) as reply:
        assert reply.status_code == 200
        assert int(reply.headers["x-psrl-kv-moved-tokens"]) > 256
        assert reply.headers["x-psrl-oldest-version"] == "1"
        assert b"[DONE]" in b"".join(reply.iter_bytes())
    assert total(b, "hit_tokens", tier="dram") > 256


@pytest.mark.parametrize("hint", ["http://127.0.0.1:9", "nobody", "http://["])
def test_a_hint_that_leads_nowhere_costs_a_reason_and_no_more(engines, hint):
    _, b = engines
    asked = prompt(40, 300)
    reply, headers = ask(b, asked, x_request_id_psrl_src=hint)
    assert len(reply["output_ids"]) == NEW_TOKENS
    assert "x-psrl-kv-moved-tokens" not in headers or headers["x-psrl-kv-moved-tokens"] == "0"


def test_many_requests_of_one_session_fetch_once(engines):
    a, b = engines
    asked = prompt(5, 1201)
    ask(a, asked, x_smg_routing_key="five")
    settle(a)
    before = total(a, "moves", direction="out")
    running = [Running(b, [*asked, number], 4, routing_key="five") for number in range(4)]
    hinted = ask(b, asked, 4, x_smg_routing_key="five", x_request_id_psrl_src=a.url)
    for one in running:
        one.result()
    assert hinted[0]["meta_info"]["cached_tokens"] >= 0
    assert total(a, "moves", direction="out") <= before + 1


def test_several_http_workers_fetch_as_one_does(engines, server_factory):
    a, _ = engines
    c = start(server_factory, pulling(sglang={"instance_id": "c"}), "--tokenizer-worker-num", "2")
    asked = prompt(6, 601)
    ask(a, asked, x_smg_routing_key="six")
    local, _ = ask(a, asked, x_smg_routing_key="six")
    reply, headers = ask(c, asked, x_smg_routing_key="six", x_request_id_psrl_src=a.url)
    assert reused(reply)["host"] == 592
    assert headers["x-psrl-kv-source"] == "a"
    assert reply["output_ids"] == local["output_ids"]
    c.stop(grace_s=5.0)


@pytest.mark.parametrize("mode", ["async", "pin_sync"])
def test_the_other_modes_bring_it_too_and_leave_no_pin(engines, server_factory, mode):
    a, _ = engines
    c = start(server_factory, pulling(mode, sglang={"instance_id": mode}))
    asked = prompt(7, 601)
    ask(a, asked, x_smg_routing_key=mode)
    settle(a)
    before = total(a, "moves", direction="out")
    reply, _ = ask(c, asked, x_smg_routing_key=mode, x_request_id_psrl_src=a.url)
    if mode == "pin_sync":
        assert reused(reply)["host"] == 592
    # Without waiting it may be computed before it comes.
    wait_until(lambda: total(a, "moves", direction="out") == before + 1, "it was sent")
    wait_until(lambda: not moves(a)["pins"]["held"], "nothing is pinned")
    c.stop(grace_s=5.0)


def test_a_source_that_hangs_costs_the_deadline_and_no_more(engines, server_factory):
    dead = start(server_factory, pulling(sglang={"instance_id": "dead"}))
    c = start(server_factory, pulling(timeout_ms=1000))
    asked = prompt(8, 601)
    ask(dead, asked, x_smg_routing_key="eight")
    ask(c, prompt(9, 300), x_request_id_psrl_src=dead.url)
    os.killpg(dead.pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        reply, headers = ask(c, asked, x_smg_routing_key="eight", x_request_id_psrl_src=dead.url)
        assert time.monotonic() - began_s < 20
        assert reply["meta_info"]["cached_tokens"] == 0
        assert headers.get("x-psrl-kv-moved-tokens", "0") == "0"
    finally:
        os.killpg(dead.pid, signal.SIGCONT)
    for server in (dead, c):
        server.stop(grace_s=5.0)


def test_kv_of_the_last_version_is_fetched_by_an_engine_that_accepts_a_lag(server_factory, models):
    lagging = pulling(sglang={"max_version_lag": 1})
    a, b = (start(server_factory, lagging) for _ in range(2))
    asked = prompt(60, 601)
    ask(a, asked, x_smg_routing_key="lag")
    settle(a)
    for server in (a, b):
        assert server.update_weights(models[2], version="2").success
    reply, headers = ask(b, asked, x_smg_routing_key="lag", x_request_id_psrl_src=a.url)
    assert reused(reply)["host"] == 592
    assert headers["x-psrl-oldest-version"] == "1"
    for server in (a, b):
        assert server.update_weights(models[1], version="3").success
    reply, _ = ask(b, prompt(60, 601), x_smg_routing_key="older", x_request_id_psrl_src=a.url)
    assert reply["meta_info"]["psrl"]["version_lag"] <= 1
    for server in (a, b):
        server.stop(grace_s=5.0)
