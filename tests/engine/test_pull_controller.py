"""Sessions that routers send to and fro without a word: with a controller, each turn finds its KV."""

import pytest
from move_support import TOKEN, Controller, ask, assert_no_move_left, pulling, reused
from support import assert_books_hold, prompt, wait_until
from tier_support import assert_nothing_held, settle, start

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    one = Controller(tmp_path_factory.mktemp("controller"))
    yield one
    one.stop()


@pytest.fixture(scope="module")
def pair(server_factory, controller):
    env = {"PSRL_CONTROLLER_TOKEN": TOKEN}
    engines = [start(server_factory, controller.engine(name, pulling), env=env) for name in ("a", "b")]
    wait_until(lambda: controller.workers("a") and controller.workers("b"), "both are registered")
    return engines


@pytest.fixture
def engines(pair):
    yield pair
    assert_no_move_left(*pair)
    for server in pair:
        assert_nothing_held(server)
        assert_books_hold(server)


def test_row_22_a_session_that_is_sent_to_and_fro_recomputes_nothing_but_what_is_new(engines, controller):
    sessions = {f"session-{number}": prompt(100 + number, 300 + 16 * number) for number in range(4)}
    before = {name: 0 for name in sessions}
    for turn in range(6):
        for name, tokens in sessions.items():
            reply, _ = ask(engines[turn % 2], tokens, x_smg_routing_key=name)
            assert sum(reused(reply).values()) >= before[name] - 16, (name, turn)
            tokens += [*reply["output_ids"], *prompt(turn, 60)]
            before[name] = (len(tokens) - 60) // 16 * 16
        for name in sessions:
            wait_until(lambda name=name: controller.knows(name), "the controller knows who has it")


def test_a_prompt_without_a_session_is_found_by_its_tokens(engines, controller):
    a, b = engines
    asked = prompt(200, 801)
    a.generate(asked, 8)
    local = a.generate(asked, 8)
    settle(a)
    wait_until(lambda: "a" in controller.holders(asked), "the owner is known")
    reply, headers = ask(b, asked)
    assert headers["x-psrl-kv-source"] == "a"
    assert reused(reply)["host"] == 800
    assert reply["output_ids"] == list(local.output_ids)


def test_without_its_controller_an_engine_computes(engines, controller):
    _, b = engines
    controller.stop()
    reply, headers = ask(b, prompt(300, 600), x_smg_routing_key="alone")
    assert reply["meta_info"]["cached_tokens"] == 0
    assert "x-psrl-kv-moved-tokens" not in headers
    controller.start()
