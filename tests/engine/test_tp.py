"""Two tensor-parallel ranks: versions, crossings, pins and retirement are the same on both."""

import pytest
from support import (
    NAMED,
    STRICT,
    Running,
    assert_books_hold,
    assert_same,
    post_ok,
    prompt,
    resident,
    send_weights,
)

pytestmark = pytest.mark.engine
TP_2 = (*NAMED, "--tp-size", "2", "--chunked-prefill-size", "256")


@pytest.fixture(scope="module")
def server(server_factory):
    # SGLang checks, where it can, that the ranks decide alike.
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    return server_factory(args=TP_2, psrl_config=STRICT, env=env)


def test_update_miss_repeat_hit_and_back(server, models, fresh):
    asked = prompt(600)
    first = server.generate(asked, 8)
    assert server.generate(asked, 8).cached_tokens == 592
    assert server.update_weights(models[2], version="2").success
    new = server.generate(asked, 8)
    assert new.cached_tokens == 0
    assert_same(new, fresh(2, asked, 8))
    assert server.update_weights(models[1], version="1").success
    back = server.generate(asked, 8)
    assert back.cached_tokens == 592
    assert_same(back, first)


def test_unnamed_and_failed_updates_get_the_same_epoch_on_both_ranks(server, models, tmp_path):
    asked = prompt(601)
    server.generate(asked, 8)
    assert server.update_weights(models[1]).success
    assert server.generate(asked, 8).cached_tokens == 0
    assert server.generate(asked, 8).cached_tokens == 592
    assert not server.update_weights(tmp_path / "missing", version="9").success
    assert server.generate(asked, 8).cached_tokens == 0
    assert server.update_weights(models[1], version="1").success


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_crossing_requests_are_cut_alike(server, models, fresh, mode):
    asked = prompt(610 + (mode == "retract"))
    request = Running(server, asked, 100)
    request.wait_tokens(10)
    server.pause(mode)
    assert server.update_weights(models[2], version="2").success
    server.resume()
    whole = asked + list(request.result().output_ids)
    turn = server.generate(whole, 8)
    assert_same(turn, fresh(2, whole, 8))
    assert resident(server, whole, "1") >= 592
    assert server.update_weights(models[1], version="1").success
    assert_books_hold(server)


def test_tensor_sessions_reach_both_ranks(server, models, fresh):
    asked = prompt(620)
    server.generate(asked, 8)
    send_weights(server, models[2], pieces=2, weight_version="2", ranks=2)
    new = server.generate(asked, 8)
    assert new.cached_tokens == 0
    assert_same(new, fresh(2, asked, 8))
    assert server.update_weights(models[1], version="1").success


def test_pins_and_retirement_keep_the_ranks_alike(server, models):
    asked = prompt(630)
    server.generate(asked, 1)
    post_ok(server, "/psrl/v1/pin", {"input_ids": asked, "owner": "me", "pin_id": "p"})
    server.overwrite_pool()
    assert resident(server, asked) == 592
    post_ok(server, "/psrl/v1/unpin", {"pin_id": "p"})
    assert server.update_weights(models[2], version="2").success
    post_ok(server, "/psrl/v1/retire", {"version": "1"})
    assert resident(server, asked, "1") == 0
    server.generate(prompt(631), 4)
    assert_books_hold(server)
