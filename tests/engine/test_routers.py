"""Behind the routers that trainers use, started as configs/ says: sessions that stay reuse all they left, and those
that are sent elsewhere find it there.

``PSRL_ROUTERS_DIR`` is where `tests/routers/install.sh` put the routers.
"""

import os
import signal
from contextlib import ExitStack

import httpx
import pytest
from move_support import TOKEN, Controller, assert_no_move_left, pulling
from router_support import Conversations, Line, Router, gateway, share
from support import assert_books_hold, wait_until
from tier_support import assert_nothing_held, start

DIRECTORY = os.environ.get("PSRL_ROUTERS_DIR", "")
FAST = {"HEALTH_S": "1", "SMG_ARGS": "--health-check-interval-secs 1 --health-failure-threshold 2"}
# Sessions and turns. The long form is what is claimed, the short one what CI has time for.
SIZES = [pytest.param(16, 4, id="16x4"), pytest.param(64, 8, marks=pytest.mark.slow, id="64x8")]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not DIRECTORY, reason="PSRL_ROUTERS_DIR does not say where the routers are"),
]


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


@pytest.fixture
def router(tmp_path):
    """Starts a router that ends with the test: `router(script, policy, urls)`."""
    running = []

    def start_router(script, policy, urls):
        path = os.pathsep.join(filter(None, [DIRECTORY, os.environ.get("PYTHONPATH")]))
        log_path = tmp_path / f"router-{len(running)}.log"
        running.append(Router(script, policy, urls, log_path=log_path, env={"PYTHONPATH": path, **FAST}))
        return running[-1]

    yield start_router
    for one in running:
        one.stop()


@pytest.mark.parametrize(("sessions", "turns_each"), SIZES)
@pytest.mark.parametrize(
    ("script", "policy"),
    [
        ("smg.sh", "manual"),
        pytest.param("smg.sh", "consistent_hashing", marks=pytest.mark.slow),
        pytest.param("smg.sh", "sticky", marks=pytest.mark.slow),
        pytest.param("sglang-router.sh", "manual", marks=pytest.mark.slow),
        ("sglang-router.sh", "consistent_hashing"),
    ],
)
def test_row_21_sessions_that_stay_reuse_what_they_left(engines, router, script, policy, sessions, turns_each):
    url = router(script, policy, [server.url for server in engines]).url
    turns = Conversations(url, f"{script}{policy}{sessions}", sessions).turns(turns_each)
    assert share(turns) >= 0.97
    assert not any(turn.source for turn in turns)


@pytest.mark.parametrize(("sessions", "turns_each"), SIZES)
@pytest.mark.parametrize("script", ["smg.sh", "sglang-router.sh"])
def test_row_21_sessions_that_go_round_find_their_kv_at_every_stop(
    engines, router, script, sessions, turns_each
):
    url = router(script, "round_robin", [server.url for server in engines]).url
    turns = Conversations(url, f"{script}round{sessions}", sessions).turns(turns_each)
    assert share(turns) >= 0.90
    assert {turn.source for turn in turns} >= {"a", "b"}


@pytest.mark.parametrize("script", ["smg.sh", pytest.param("sglang-router.sh", marks=pytest.mark.slow)])
def test_behind_a_gateway_and_a_router_sessions_find_their_kv(engines, router, script):
    behind = router(script, "round_robin", [server.url for server in engines])
    with gateway(behind.url, kv_transfer={"enable": False}) as url:
        turns = Conversations(url, f"{script}behind").turns(3)
    assert share(turns) >= 0.90
    assert {turn.source for turn in turns} >= {"a", "b"}


@pytest.mark.parametrize("script", ["smg.sh", pytest.param("sglang-router.sh", marks=pytest.mark.slow)])
def test_behind_a_router_and_several_gateways_sessions_find_their_kv(engines, router, script):
    urls = [server.url for server in engines]
    with ExitStack() as running:
        gateways = [running.enter_context(gateway(*urls, kv_transfer={"enable": False})) for _ in range(2)]
        before = router(script, "consistent_hashing", gateways)
        turns = Conversations(before.url, f"{script}before").turns(3)
    assert share(turns) >= 0.90
    assert {turn.source for turn in turns} >= {"a", "b"}


def test_kv_follows_to_the_other_engine_and_back_when_a_router_loses_sight_of_one(engines, router):
    a, b = engines
    line = Line(a.port)
    try:
        smg = router("smg.sh", "manual", [line.url, b.url])
        talk = Conversations(smg.url, "line")
        talk.turns(2)
        line.cut()
        away = talk.turns(2)
        assert share(away) >= 0.90
        assert "a" in {turn.source for turn in away}
        smg.wait_down(line.url)
        line.mend()
        smg.wait_healthy([line.url, b.url])
        back = talk.turns(2)
        assert share(back) >= 0.90
        assert "b" in {turn.source for turn in back}
    finally:
        line.close()


def test_kv_comes_back_to_an_engine_that_hung(engines, router):
    a, b = engines
    smg = router("smg.sh", "manual", [a.url, b.url])
    talk = Conversations(smg.url, "hung")
    talk.turns(2)
    os.killpg(a.pid, signal.SIGSTOP)
    try:
        smg.wait_down(a.url)
        talk.turns(2)  # what only the other one had is computed anew
    finally:
        os.killpg(a.pid, signal.SIGCONT)
    smg.wait_healthy([a.url, b.url])
    assert share(talk.turns(2)) >= 0.90


@pytest.mark.slow
def test_kv_comes_back_to_an_engine_that_was_started_again(engines, router, server_factory, controller):
    _, b = engines
    env = {"PSRL_CONTROLLER_TOKEN": TOKEN}
    c = start(server_factory, controller.engine("c", pulling), env=env)
    smg = router("smg.sh", "manual", [c.url, b.url])
    talk = Conversations(smg.url, "again")
    talk.turns(2)
    port = c.port
    c.kill()
    c.stop(grace_s=0.0)
    smg.wait_down(c.url)
    talk.turns(2)
    settings = controller.engine("c", pulling)
    c = server_factory(
        args=("--weight-version", "1"),
        psrl_config=settings,
        env={"OMP_NUM_THREADS": "1", **env},
        port=port,
    )
    smg.wait_healthy([c.url, b.url])
    back = talk.turns(2)
    assert share(back) >= 0.90
    assert "b" in {turn.source for turn in back}
    c.stop(grace_s=5.0)


def test_the_rl_control_plane_of_smg_reaches_the_routes_of_the_plugin(engines, router):
    smg = router("smg.sh", "manual", [server.url for server in engines])
    reply = httpx.get(
        f"{smg.url}/v1/rl/engine/psrl/v1/status",
        params={"selector": "engine=sglang"},
        timeout=30,
        trust_env=False,
    )
    assert reply.status_code == 200, reply.text
    results = reply.json()["results"]
    assert len(results) == 2, reply.text
    assert {one["body"]["version"] for one in results.values()} == {"1"}
