"""Weights that change while requests run: what was computed before is kept under its version, the rest is
private, and nobody is ever answered from KV of other weights.

Each case runs with overlap scheduling on and off.
"""

import pytest
from support import (
    NAMED,
    STRICT,
    Running,
    assert_books_hold,
    assert_same,
    counters,
    post_ok,
    prompt,
    resident,
    send_weights,
    status,
    wait_until,
)

pytestmark = pytest.mark.engine
PAGE = 16
CHUNK = ("--chunked-prefill-size", "256")


@pytest.fixture(scope="module", params=["overlap", "no-overlap"])
def server(request, server_factory):
    args = (*NAMED, *CHUNK, "--enable-streaming-session")
    if request.param == "no-overlap":
        args += ("--disable-overlap-schedule",)
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    return server_factory(args=args, psrl_config=STRICT, env=env)


@pytest.fixture(autouse=True)
def start_at_version_1(server, models):
    assert server.update_weights(models[1], version="1").success
    assert server.flush_cache()
    yield
    assert_books_hold(server)


def whole_pages(tokens):
    return tokens // PAGE * PAGE


def test_row_1_update_succeeds_with_requests_running_and_nothing_is_flushed(server, models):
    running = [Running(server, prompt(100 + i, 200), 60) for i in range(7)]
    for request in running:
        request.wait_tokens(2)
    server.pause("in_place")
    kept = status(server)["device"]
    update = server.update_weights(models[2], version="2", flush_cache=True)
    assert update.success, update.message
    assert status(server)["requests"]["crossing"] == 7
    after = status(server)["device"]
    assert (
        after["evictable_tokens"] + after["locked_tokens"] == kept["evictable_tokens"] + kept["locked_tokens"]
    )
    server.resume()
    assert all(len(request.result().output_ids) == 60 for request in running)


def test_request_that_crosses_in_place_publishes_only_what_the_old_weights_computed(server, models, fresh):
    asked = prompt(110)
    request = Running(server, asked, 150)
    request.wait_tokens(11)
    server.pause("in_place")
    assert server.update_weights(models[2], version="2").success
    server.resume()
    crossed = request.result()
    assert crossed.meta_info["psrl"] == {
        "installed_version": "2",
        "oldest_version": "1",
        "version_lag": 0,
        "crossed_versions": True,
    }
    whole = asked + list(crossed.output_ids)
    assert resident(server, whole) == 0
    pure = resident(server, whole, "1")
    assert len(asked) <= pure + PAGE
    assert pure < len(whole) - PAGE

    turn = whole + prompt(111, 40)
    server.overwrite_pool()
    next_turn = server.generate(turn, 8)
    assert next_turn.cached_tokens == 0
    assert_same(next_turn, fresh(2, turn, 8))


def test_old_part_of_a_crossed_request_hits_after_going_back(server, models, fresh):
    asked = prompt(112)
    request = Running(server, asked, 150)
    request.wait_tokens(20)
    server.pause("in_place")
    assert server.update_weights(models[2], version="2").success
    server.resume()
    whole = asked + list(request.result().output_ids)
    assert server.update_weights(models[1], version="1").success
    back = server.generate(whole, 8)
    assert len(asked) - PAGE < back.cached_tokens < len(whole) - PAGE
    assert_same(back, fresh(1, whole, 8))


def test_mixed_kv_is_not_served_when_the_weights_change_there_and_back_while_it_runs(server, models, fresh):
    asked = prompt(113)
    request = Running(server, asked, 150)
    for seed, version in ((2, "2"), (1, "1")):
        request.wait_tokens(10)
        server.pause("in_place")
        assert server.update_weights(models[seed], version=version).success
        server.resume()
    whole = asked + list(request.result().output_ids)
    again = server.generate(whole, 8)
    assert again.cached_tokens < len(whole) - 2 * PAGE
    assert_same(again, fresh(1, whole, 8))


def test_row_9_retracted_request_keeps_its_old_part_and_is_recomputed_with_new_weights(server, models, fresh):
    asked = prompt(120)
    request = Running(server, asked, 150)
    request.wait_tokens(17)
    server.pause("retract")
    wait_until(lambda: status(server)["requests"]["running"] == 0, "retraction")
    shown = status(server)
    assert shown["device"]["locked_tokens"] == 0  # old KV is evictable at once
    assert shown["counters"]["retract_saved_tokens"] > 0
    assert server.update_weights(models[2], version="2").success
    server.resume()
    finished = request.result()
    whole = asked + list(finished.output_ids)
    assert resident(server, whole, "1") >= len(asked)
    turn = server.generate(whole + prompt(121, 20), 8)
    assert turn.cached_tokens >= whole_pages(len(whole) - 1)
    assert_same(turn, fresh(2, whole + prompt(121, 20), 8))


def test_aborted_request_leaves_only_pure_kv(server, models, fresh):
    asked = prompt(130)
    request = Running(server, asked, 150)
    request.wait_tokens(12)
    server.pause("abort")
    aborted = request.result()
    assert aborted.meta_info["finish_reason"]["type"] == "abort"
    assert server.update_weights(models[2], version="2").success
    server.resume()
    whole = asked + list(aborted.output_ids)
    resumed = server.generate(whole, 8)
    assert resumed.cached_tokens == 0
    assert_same(resumed, fresh(2, whole, 8))
    assert server.update_weights(models[1], version="1").success
    back = server.generate(whole, 8)
    assert back.cached_tokens >= whole_pages(len(asked) - 1)
    assert_same(back, fresh(1, whole, 8))


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_change_in_the_middle_of_a_chunked_prefill(server, models, fresh, mode):
    asked = prompt(140 + (mode == "retract"), 3000)
    request = Running(server, asked, 4)
    wait_until(lambda: resident(server, asked) >= 512, "two chunks of the prompt are computed")
    server.pause(mode)
    assert server.update_weights(models[2], version="2").success
    server.resume()
    request.result()
    old, new = resident(server, asked, "1"), resident(server, asked)
    assert 512 <= old < 3000
    assert new == (0 if mode == "in_place" else whole_pages(3000))
    turn = server.generate(asked, 8)
    assert_same(turn, fresh(2, asked, 8))


def test_waiting_request_is_answered_with_the_weights_it_is_admitted_under(server, models, fresh):
    asked = prompt(150)
    server.generate(asked, 4)
    server.pause("retract")
    request = Running(server, asked, 8)
    assert server.update_weights(models[2], version="2").success
    server.resume()
    answer = request.result()
    assert answer.cached_tokens == 0
    assert_same(answer, fresh(2, asked, 8))


def test_sessions_of_tensor_pieces_during_a_pause(server, models, fresh):
    asked = prompt(160)
    request = Running(server, asked, 150)
    request.wait_tokens(8)
    server.pause("in_place")
    send_weights(server, models[2], pieces=4, weight_version="2", flush_cache=True)
    server.resume()
    whole = asked + list(request.result().output_ids)
    turn = server.generate(whole, 8)
    assert turn.cached_tokens == 0
    assert_same(turn, fresh(2, whole, 8))


def test_streaming_session_does_not_carry_kv_of_old_weights_into_a_turn(server, models, fresh):
    first, second = prompt(170, 200), prompt(171, 40)
    session = server.post("/open_session", {"capacity_of_str_len": 100000, "streaming": True}).json()
    params = {"session_params": {"id": session}}
    one = server.generate(first, 16, **params)
    two = server.generate(second, 16, **params)
    assert two.cached_tokens >= len(first)
    assert server.update_weights(models[2], version="2").success
    third = prompt(172, 40)
    three = server.generate(third, 16, **params)
    assert three.cached_tokens == 0
    assert counters(server)["sessions_dropped"] >= 1
    history = first + list(one.output_ids) + second + list(two.output_ids) + third
    assert_same(three, fresh(2, history, 16))
    four = server.generate(prompt(173, 40), 16, **params)
    assert four.cached_tokens >= len(history)
    server.post("/close_session", {"session_id": session})


def test_streaming_session_that_crossed_is_not_trusted_after_going_back(server, models, fresh):
    first = prompt(180, 200)
    session = server.post("/open_session", {"capacity_of_str_len": 100000, "streaming": True}).json()
    params = {"session_params": {"id": session}}
    request = Running(server, first, 300, **params)
    request.wait_tokens(8)
    server.pause("in_place")
    assert server.update_weights(models[2], version="2").success
    server.resume()
    one = request.result()
    assert one.meta_info["psrl"]["crossed_versions"]
    assert server.update_weights(models[1], version="1").success
    second = prompt(181, 40)
    two = server.generate(second, 16, **params)
    assert two.cached_tokens < len(first) + len(one.output_ids) - PAGE
    assert_same(two, fresh(1, first + list(one.output_ids) + second, 16))
    server.post("/close_session", {"session_id": session})


def test_a_turn_that_waits_does_not_keep_its_sessions_old_kv_across_a_change(server, models, fresh):
    first = prompt(185, 200)
    session = server.post("/open_session", {"capacity_of_str_len": 100000, "streaming": True}).json()
    params = {"session_params": {"id": session}}
    one = server.generate(first, 16, **params)
    server.pause("retract")  # the turn below is looked up, and lent the session's KV, but not admitted
    second = prompt(186, 40)
    request = Running(server, second, 16, **params)
    assert server.update_weights(models[2], version="2").success
    server.resume()
    two = request.result()
    assert two.cached_tokens == 0
    assert_same(two, fresh(2, first + list(one.output_ids) + second, 16))
    server.post("/close_session", {"session_id": session})


def test_row_3_flush_answers_at_once_while_requests_run_and_says_what_stayed(server):
    old = prompt(190)
    server.generate(old, 4)
    running = [Running(server, prompt(191 + i, 200), 100) for i in range(3)]
    for request in running:
        request.wait_tokens(2)
    reply = server.post("/flush_cache")
    assert reply.status_code == 200
    assert "running" in reply.text
    assert "Stayed" in reply.text
    assert resident(server, old) == 0
    assert all(len(request.result().output_ids) == 100 for request in running)


def test_pause_update_continue_as_slime_sends_it_succeeds_at_the_first_try(server, models):
    running = [Running(server, prompt(200 + i, 200), 60) for i in range(3)]
    for request in running:
        request.wait_tokens(4)
    post_ok(server, "/pause_generation", {"mode": "retract"})
    assert server.post("/flush_cache").status_code == 200
    assert server.update_weights(models[2], version="2", flush_cache=True).success
    server.resume()
    assert all(len(request.result().output_ids) == 60 for request in running)
