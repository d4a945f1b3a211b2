"""Sessions that are held back: their next turn waits, what runs goes on, and nothing waits for ever."""

import asyncio

import pytest
from gateway_support import FakeEngine, ask, gateway_of, run, until

from psrl_sglang.gateway.turns import TurnRefused, Turns

CHAT = "/v1/chat/completions"
TURN = {"messages": [{"role": "user", "content": "hi"}]}


def turns_of(sizes: dict[str, int] | None = None, **changes) -> Turns:
    values = {"most": 10, "most_waiting": 2, "timeout_s": 0.2, "tokens_of": (sizes or {}).get, **changes}
    return Turns(**values)


def test_a_session_is_made_used_listed_and_deleted():
    async def scenario():
        engine = FakeEngine()
        async with gateway_of(engine) as gateway:
            made = (await gateway.request("POST", "/sessions", {})).json["session_id"]
            assert (await gateway.request("POST", "/sessions", {"session_id": "mine"})).status == 200
            assert (await gateway.request("POST", "/sessions", {"session_id": "mine"})).status == 409
            assert (await gateway.request("POST", "/sessions", {"session_id": "a b"})).status == 400
            reply = await gateway.request("POST", f"/sessions/{made}{CHAT}", TURN)
            assert reply.status == 200
            assert engine.seen[0].path == CHAT
            assert engine.seen[0].headers["x-smg-routing-key"] == made
            view = (await gateway.get(f"/sessions/{made}")).json
            assert (view["turns"], view["running"], view["state"]) == (1, 0, "env")
            assert len((await gateway.get("/sessions")).json["sessions"]) == 2
            assert (await gateway.request("DELETE", f"/sessions/{made}")).status == 200
            assert (await gateway.get(f"/sessions/{made}")).status == 404
            assert (await gateway.request("POST", f"/sessions/{made}{CHAT}", TURN)).status == 404
            assert (await gateway.request("POST", "/sessions/mine/nothing", TURN)).status == 404

    run(scenario())


def test_the_next_turn_of_a_hung_session_waits_until_it_is_continued():
    async def scenario():
        engine = FakeEngine(token_s=0.05)
        async with gateway_of(engine) as gateway:
            await gateway.request("POST", "/sessions", {"session_id": "s"})
            running = asyncio.create_task(gateway.generate([1], 4, x_psrl_session="s"))
            await until(lambda: engine.running == 1, "it runs")
            hung = await gateway.request("POST", "/control/hang", {"session_ids": ["s"]})
            assert hung.json == {"session_ids": ["s"]}
            assert (await running).status == 200, "what runs goes on"
            waiting = asyncio.create_task(gateway.request("POST", f"/sessions/s{CHAT}", TURN))
            other = await gateway.request("POST", CHAT, TURN, x_psrl_session="not-made-here")
            assert other.status == 200
            view = (await gateway.get("/control/sessions")).json["sessions"][0]
            assert (view["state"], view["waiting"]) == ("hung", 1)
            assert not waiting.done()
            assert (await gateway.request("POST", "/control/continue", {})).json == {"session_ids": ["s"]}
            assert (await waiting).status == 200
            assert view["tokens"] > 0

    run(scenario())


def test_deleting_a_hung_session_releases_who_waits():
    async def scenario():
        async with gateway_of(FakeEngine()) as gateway:
            await gateway.request("POST", "/sessions", {"session_id": "s"})
            await gateway.request("POST", "/control/hang", {})
            waiting = asyncio.create_task(gateway.generate([1], 1, x_psrl_session="s"))
            await until(lambda: gateway.service.turns.get("s").waiting == 1, "it waits")
            await gateway.request("DELETE", "/sessions/s")
            assert (await waiting).status == 410

    run(scenario())


def test_who_waits_is_bounded_in_number_and_time():
    async def scenario():
        ours = {"hung_turns_per_session": 2, "hang_timeout_s": 0.3}
        async with gateway_of(FakeEngine(), gateway=ours) as gateway:
            await gateway.request("POST", "/sessions", {"session_id": "s"})
            await gateway.request("POST", "/control/hang", {"count": 1})
            tasks = [asyncio.create_task(gateway.generate([1], 1, x_psrl_session="s")) for _ in range(3)]
            replies = await asyncio.gather(*tasks)
            assert sorted(reply.status for reply in replies) == [429, 503, 503]
            assert all(reply.headers["Retry-After"] for reply in replies)
            gone = asyncio.create_task(gateway.generate([1], 1, x_psrl_session="s"))
            await until(lambda: gateway.service.turns.get("s").waiting == 1, "it waits")
            gone.cancel()
            await until(lambda: gateway.service.turns.get("s").waiting == 0, "its client went away")

    run(scenario())


def test_those_with_their_environment_come_first_and_small_ones_before_large_ones():
    async def scenario():
        turns = turns_of({"large": 90, "small": 10, "busy": 1, "middle": 50})
        for name in ("large", "small", "busy", "middle"):
            turns.create(name)
        async with turns.turn("busy"):
            assert turns.hang(count=2) == ["small", "middle"]
            assert turns.hang() == ["large", "busy"]
            assert turns.resume(count=1) == ["small"]
            assert turns.resume(["large", "small"]) == ["large"]
        assert turns.resume() == ["busy", "middle"]

    run(scenario())


def test_unknown_sessions_and_too_many_are_refused():
    async def scenario():
        turns = turns_of(most=1)
        turns.create("a")
        for call, status in (
            (lambda: turns.create("b"), 503),
            (lambda: turns.create("a"), 409),
            (lambda: turns.get("b"), 404),
            (lambda: turns.hang(["b"]), 404),
        ):
            with pytest.raises(TurnRefused) as refused:
                call()
            assert refused.value.status == status
        async with gateway_of(FakeEngine()) as gateway:
            for body in ({"session_ids": "s"}, {"count": -1}, [1]):
                assert (await gateway.request("POST", "/control/hang", body)).status == 400
            assert (await gateway.request("POST", "/control/nothing", {})).status == 404
            assert (await gateway.request("POST", "/generate", ask([1]), x_psrl_session="s")).status == 200

    run(scenario())
