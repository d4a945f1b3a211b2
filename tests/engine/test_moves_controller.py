"""Engines, a controller beside them, and moves that somebody asks the controller for."""

import time

import httpx
import pytest
from move_support import Controller, assert_no_move_left, movable, move
from support import assert_books_hold, prompt, wait_until
from tier_support import NEW_TOKENS, assert_hit, assert_nothing_held, settle, start

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    one = Controller(tmp_path_factory.mktemp("controller"))
    yield one
    one.stop()


@pytest.fixture(scope="module")
def pair(server_factory, controller):
    engines = []
    for name in ("a", "b"):
        settings = controller.engine(name, movable)
        engines.append(start(server_factory, settings, "--max-total-tokens", "8192"))
    wait_until(lambda: controller.workers("a") and controller.workers("b"), "both are registered")
    return engines


@pytest.fixture
def engines(pair):
    yield pair
    assert_no_move_left(*pair)
    for server in pair:
        assert_nothing_held(server)
        assert_books_hold(server)


def test_row_20_and_lmcache_13_the_controller_names_the_owner_soon_after_a_store(engines, controller):
    a, _ = engines
    asked = prompt(1, 801)
    assert controller.holders(asked) == {}
    a.generate(asked, NEW_TOKENS)
    settle(a)
    began_s = time.monotonic()
    wait_until(lambda: controller.holders(asked), "the owner is known")
    assert time.monotonic() - began_s < 1.0
    assert controller.holders(asked) == {"a": ["LocalCPUBackend", 768]}
    exact = controller.post("/lookup", tokens=asked, exact=True).json()["layout_info"]
    assert exact == {"a": ["LocalCPUBackend", 800]}


def test_it_moves_between_engines_and_says_how_much(engines, controller):
    a, b = engines
    asked = prompt(2, 601)
    a.generate(asked, NEW_TOKENS)
    local = a.generate(asked, NEW_TOKENS)
    reply = controller.move(asked, "a", "b", version="1", session="trajectory-1")
    assert reply.status_code == 200, reply.text
    assert reply.json()["num_tokens"] == 592, reply.text
    assert_hit(b, asked, local, "host")
    nothing = controller.move(prompt(3, 601), "a", "b", version="1").json()
    assert nothing["num_tokens"] == 0
    assert "no KV of this prompt" in nothing["reason"]


def test_row_20_and_lmcache_2_a_restarted_controller_is_told_everything_again(engines, controller):
    a, b = engines
    asked = prompt(4, 801)
    a.generate(asked, NEW_TOKENS)
    settle(a)
    wait_until(lambda: controller.holders(asked), "the owner is known")
    controller.stop()
    local = a.generate(asked, NEW_TOKENS)  # engines do not need it
    controller.start()
    wait_until(lambda: controller.holders(asked), "the owner is known again", timeout_s=20)
    assert controller.move(asked, "a", "b").json()["present_tokens"] == 800
    assert_hit(b, asked, local, "host")


def test_who_does_not_know_the_token_or_the_secret_gets_nothing(engines, controller, server_factory, tmp_path):
    a, _ = engines
    url = f"http://127.0.0.1:{controller.http}/lookup"
    assert httpx.post(url, json={"tokens": [1]}, trust_env=False).status_code == 401
    asked = prompt(5, 201)
    a.generate(asked, NEW_TOKENS)
    unsigned = move(asked, a, a)
    assert not unsigned.ok
    assert "not signed" in unsigned.reason
