"""Real engines behind the gateway: a session keeps its KV wherever its turns go, and an abort is not the end."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
import router_support
from move_support import assert_no_move_left, movable
from support import NOISE, Running, assert_books_hold, prompt, wait_until
from tier_support import PAGE, POOL_TOKENS, assert_nothing_held, start

from psrl_sglang.lab.servers import Server

pytestmark = pytest.mark.engine

TURN_TOKENS, ANSWER_TOKENS = 100, 8
# Sessions and turns. The long form is what is claimed, the short one what CI has time for.
SIZES = [pytest.param(16, 4, id="16x4"), pytest.param(64, 8, marks=pytest.mark.slow, id="64x8")]


@pytest.fixture(scope="module")
def pair(server_factory):
    """Two engines from one checkpoint."""
    args = ("--max-total-tokens", str(POOL_TOKENS))
    return tuple(start(server_factory, movable(sglang={"instance_id": name}), *args) for name in ("a", "b"))


@pytest.fixture
def engines(pair):
    yield pair
    assert_no_move_left(*pair)
    for server in pair:
        assert_nothing_held(server)
        assert_books_hold(server)


@contextmanager
def gateway(*engines: Server, mode: str = "sync"):
    """A client of a gateway that moves KV."""
    kv = {"enable": True, "transfer_mode": mode, "transfer_timeout_ms": 20_000}
    with (
        router_support.gateway(*(engine.url for engine in engines), kv_transfer=kv) as url,
        httpx.Client(base_url=url, timeout=120.0, trust_env=False) as client,
    ):
        workers = lambda: client.get("/workers").json()["workers"]  # noqa: E731
        wait_until(lambda: all(one["version"] and one["moves_kv"] for one in workers()), "all is known")
        yield client


def generate(client: httpx.Client, input_ids: list[int], count: int, **headers: str) -> httpx.Response:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
    return client.post("/generate", json=body, headers=headers).raise_for_status()


def play(
    client: httpx.Client, first_seed: int, sessions: int, turns: int, **headers: str
) -> tuple[int, int, int]:
    """All turns of all sessions: reused tokens, as many as there could be, and how often the engine changed."""
    reused = ceiling = changed = 0
    history: dict[int, list[int]] = {session: [] for session in range(sessions)}
    served: dict[int, str] = {}
    for turn in range(turns):
        if turn:
            # One more in each round, so that every session's next turn is the other engine's.
            generate(client, prompt(first_seed - 1, 20), 1)
        for session, before in history.items():
            asked = [*before, *prompt(first_seed + turn * sessions + session, TURN_TOKENS)]
            reply = generate(
                client, asked, ANSWER_TOKENS, **{"x-smg-routing-key": f"{first_seed}-{session}"}, **headers
            )
            said = reply.json()
            reused += said["meta_info"]["cached_tokens"]
            ceiling += len(before) // PAGE * PAGE
            changed += served.get(session, "") not in ("", reply.headers["x-psrl-worker"])
            served[session] = reply.headers["x-psrl-worker"]
            history[session] = [*asked, *said["output_ids"]]
    return reused, ceiling, changed


@pytest.mark.parametrize(("sessions", "turns"), SIZES)
@pytest.mark.parametrize("mode", ["sync", "pin_sync"])
def test_sessions_that_change_their_engine_at_every_turn_keep_their_kv(engines, mode, sessions, turns):
    with gateway(*engines, mode=mode) as client:
        seed = (1000 if mode == "sync" else 3000) + 10_000 * turns
        reused, ceiling, changed = play(client, seed, sessions, turns)
        assert changed == sessions * (turns - 1)
        assert reused >= 0.90 * ceiling, f"{reused} of {ceiling}: {client.get('/status').json()['kv']}"


@pytest.mark.parametrize(("sessions", "turns"), SIZES)
def test_sticky_sessions_stay_and_need_no_move(engines, sessions, turns):
    with gateway(*engines) as client:
        reused, ceiling, changed = play(client, 2000 + 10_000 * turns, sessions, turns, **{"x-is-sticky": "1"})
        assert changed == 0
        assert reused >= 0.97 * ceiling, f"{reused} of {ceiling}"
        assert client.get("/status").json()["kv"] == {}


def test_an_answer_that_a_pause_aborts_is_whole_and_the_same(engines):
    a, b = engines
    asked = prompt(77, 200)
    whole = b.generate(asked, 160)
    with gateway(a) as client:
        running = Running(cast(Server, SimpleNamespace(url=str(client.base_url).rstrip("/"))), asked, 160)
        running.wait_tokens(8)
        a.pause("abort")
        a.resume()
        answer = running.result()
        said = client.get("/metrics").text
        assert "psrl_gateway_loopbacks_total 1.0" in said or "psrl_gateway_loopbacks_total 2.0" in said
    assert answer.output_ids == whole.output_ids
    assert max(abs(x - y) for x, y in zip(answer.logprobs, whole.logprobs, strict=True)) <= NOISE
    meta = answer.meta_info
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (200, 160)
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 160}]


def test_the_kv_of_an_engine_that_drains_follows_its_sessions(engines):
    a, b = engines
    with gateway(a, b) as client:
        asked = prompt(88, 300)
        first = generate(client, asked, ANSWER_TOKENS, **{"x-smg-routing-key": "drained", "x-is-sticky": "1"})
        source = first.headers["x-psrl-worker"]
        name = next(one["id"] for one in client.get("/workers").json()["workers"] if one["url"] == source)
        client.post(f"/workers/{name}/drain").raise_for_status()
        longer = [*asked, *first.json()["output_ids"], *prompt(89, 50)]
        second = generate(client, longer, 1, **{"x-smg-routing-key": "drained", "x-is-sticky": "1"})
        assert second.headers["x-psrl-worker"] == ({a.url, b.url} - {source}).pop()
        assert second.headers["x-psrl-kv"].startswith("ok")
        assert second.json()["meta_info"]["cached_tokens"] >= 300 // PAGE * PAGE
