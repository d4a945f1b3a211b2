"""The same promise on SGLang's Rust tree core, with the reduced eviction order it allows."""

import pytest
from support import NAMED, Running, assert_books_hold, assert_same, post_ok, prompt, resident, status

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(server_factory):
    return server_factory(args=NAMED, psrl_config={"psrl": {"sglang": {"tree_core": "rust"}}})


@pytest.fixture(autouse=True)
def start_at_version_1(server, models):
    assert server.update_weights(models[1], version="1").success
    assert server.flush_cache()
    yield
    assert_books_hold(server)


def test_it_is_the_rust_core(server):
    assert status(server)["tree_core"] == "RustUnifiedTreeCore"


def test_miss_hit_update_and_back(server, models, fresh):
    asked = prompt(800)
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


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_crossing_requests_are_cut_at_the_boundary(server, models, fresh, mode):
    asked = prompt(810 + (mode == "retract"))
    request = Running(server, asked, 150)
    request.wait_tokens(10)
    server.pause(mode)
    assert server.update_weights(models[2], version="2").success
    server.resume()
    whole = asked + list(request.result().output_ids)
    assert resident(server, whole, "1") >= 592
    turn = server.generate(whole, 8)
    assert_same(turn, fresh(2, whole, 8))


def test_the_oldest_version_is_evicted_first(server, models):
    old, kept = prompt(820, 1600), prompt(821, 1600)
    assert server.update_weights(models[2], version="old").success
    server.generate(old, 1)
    assert server.update_weights(models[1], version="new").success
    server.generate(kept, 1)
    for seed in range(4):
        server.generate(prompt(830 + seed, 1600), 1)
    assert resident(server, old, "old") < 1600
    assert resident(server, kept) == 1600


def test_retire_takes_all_of_a_version_but_what_is_pinned(server, models):
    asked, other = prompt(840), prompt(841)
    server.generate(asked, 1)
    server.generate(other, 1)
    post_ok(server, "/psrl/v1/pin", {"input_ids": asked, "owner": "me", "pin_id": "kept"})
    assert server.update_weights(models[2], version="2").success
    retired = post_ok(server, "/psrl/v1/retire", {"version": "1"})
    assert retired["device_tokens"] >= 592
    assert resident(server, asked, "1") == 592
    assert resident(server, other, "1") == 0
    post_ok(server, "/psrl/v1/unpin", {"pin_id": "kept"})
    assert post_ok(server, "/psrl/v1/retire", {"version": "1"})["kept_tokens"] == 0
