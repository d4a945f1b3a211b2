"""Moves of every kind of KV pool, of what is on disk, and of requests that run."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_plugin import Faults
from move_support import assert_no_move_left, movable, move, moves
from support import Running, assert_books_hold, assert_same, prompt, wait_until
from tier_support import (
    NEW_TOKENS,
    assert_hit,
    assert_nothing_held,
    cached_from,
    gib,
    push_out,
    settle,
    start,
    stored,
    tier_status,
)

from psrl_sglang.lab.models import make_model
from psrl_sglang.transfer.client import MoveClient

pytestmark = pytest.mark.engine


def quiet(*servers):
    assert_no_move_left(*servers)
    for server in servers:
        assert_nothing_held(server)
        assert_books_hold(server)
        server.stop(grace_s=5.0)


@pytest.mark.parametrize("preset", ["mla", "swa"])
def test_latent_and_sliding_window_kv_is_served_after_a_move(server_factory, tmp_path, preset):
    model = make_model(tmp_path / preset, seed=1, preset=preset)
    a, b = (start(server_factory, movable(), model=model) for _ in range(2))
    asked = prompt(1, 689)
    stored(a, asked)
    local = a.generate(asked, NEW_TOKENS)
    result = move(asked, a, b)
    assert result.present_tokens == 688, result.reason
    assert_hit(b, asked, local, "host")
    settle(a)
    other = prompt(2, 401)
    a.generate(other, NEW_TOKENS)
    local = a.generate(other, NEW_TOKENS)
    settle(a)
    MoveClient().clear(moves(a)["command_address"])
    assert move(other, a, b).present_tokens == 400
    assert_hit(b, other, local, "host")
    quiet(a, b)


def test_kv_on_disk_is_moved(server_factory, tmp_path):
    disk = {
        "backend": "disk",
        "disk_path": str(tmp_path),
        "max_disk_size_gb": 0.5,
        "offload_size_gb": gib(16),
        "save_unfull_chunk": True,
    }
    a = start(server_factory, movable(lmcache=disk), "--max-total-tokens", "4096")
    b = start(server_factory, movable())
    asked = prompt(3, 1201)
    stored(a, asked)
    local = a.generate(asked, NEW_TOKENS)
    push_out(a)
    result = move(asked, a, b)
    assert result.present_tokens >= 1024, result.reason
    assert_hit(b, asked, local, "host", tokens=result.present_tokens)
    quiet(a, b)


def test_a_running_request_goes_on_elsewhere_and_recomputes_a_page_and_a_token_at_most(server_factory):
    """Aborted at the source with what it has, moved, and asked again with it."""
    a, b = (start(server_factory, movable()) for _ in range(2))
    asked = prompt(4, 333)
    expected = a.generate(prompt(4, 333), 160)
    a.overwrite_pool()
    MoveClient().clear(moves(a)["command_address"])
    running = Running(a, asked, 160, rid="the-one")
    running.wait_tokens(40)
    a.post("/abort_request", {"rid": "the-one"}).raise_for_status()
    said = list(running.result().output_ids)
    assert 40 <= len(said) < 160
    whole = [*asked, *said]
    result = move(whole, a, b)
    assert result.present_tokens >= len(whole) - 16 - 1, result.reason
    rest = b.generate(whole, 160 - len(said))
    assert cached_from(rest)["host"] >= len(whole) - 16 - 1
    assert [*said, *rest.output_ids] == list(expected.output_ids)
    quiet(a, b)


def test_a_request_waits_for_the_kv_that_is_coming_and_others_overtake_it(server_factory, tmp_path):
    faults = Faults(tmp_path)
    a = start(server_factory, movable())
    b = start(server_factory, movable(), env=faults.env)
    asked = prompt(5, 3201)
    a.generate(asked, 1)
    local = a.generate(asked, NEW_TOKENS)
    settle(a)
    faults.set(land_s=0.8)
    with ThreadPoolExecutor(1) as threads:
        moving = threads.submit(move, asked, a, b)
        wait_until(lambda: faults.seen("landed") > 0, "the bytes are coming")
        waiting = Running(b, asked, NEW_TOKENS)
        wait_until(lambda: tier_status(b)["queues"]["gate"] == 1, "the request waits")
        other = b.generate(prompt(6, 100), NEW_TOKENS)
        assert other.cached_tokens == 0
        assert not moving.done()
        assert moving.result().present_tokens == 3200
    answer = waiting.result()
    assert cached_from(answer)["host"] == 3200
    assert_same(answer, local)
    faults.set()
    quiet(a, b)


def test_kv_that_comes_too_late_is_computed(server_factory, tmp_path):
    faults = Faults(tmp_path)
    a = start(server_factory, movable())
    settings = movable()
    routing = settings["psrl"]["rollout_coordination"]["routing_strategy"]
    routing["kv_transfer"]["transfer_timeout_ms"] = 500
    b = start(server_factory, settings, env=faults.env)
    asked = prompt(7, 3201)
    a.generate(asked, 1)
    local = a.generate(asked, NEW_TOKENS)
    settle(a)
    faults.set(land_s=2.0)
    with ThreadPoolExecutor(1) as threads:
        moving = threads.submit(move, asked, a, b)
        wait_until(lambda: faults.seen("landed") > 0, "the bytes are coming")
        answer = b.generate(asked, NEW_TOKENS)
        assert answer.cached_tokens == 0
        assert answer.output_ids == local.output_ids
        moving.result()
    faults.set()
    quiet(a, b)
