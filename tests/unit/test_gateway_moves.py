"""KV goes where its session goes: before the request, beside it, or not at all, and within the deadline."""

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from gateway_support import FakeEngine, ask, gateway_of, run, until

from psrl_sglang.gateway.call import read_call
from psrl_sglang.gateway.fields import read_fields
from psrl_sglang.gateway.fleet import Fleet, MoveAddresses
from psrl_sglang.gateway.moves import Brought, Mover
from psrl_sglang.gateway.settings import TransferSettings
from psrl_sglang.transfer.client import CountResult, MoveResult

sys.path.append(str(Path(__file__).parents[1] / "transfer"))
from peer import Peer, PeerOptions

PAGES = 8
TOKENS = random.Random(3).choices(range(1000), k=PAGES * 16)


class FakeMoves:
    """What `AsyncMoveClient` does, without workers."""

    def __init__(self, seconds: float = 0.0, result: MoveResult | None = None) -> None:
        self.seconds = seconds
        self.result = result or MoveResult(True, num_tokens=112, present_tokens=112)
        self.calls: list[tuple[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.pin_ok = True

    async def transfer_direct(self, tokens, src, dst, version, **options) -> MoveResult:
        self.calls.append(("move", (tuple(tokens), src, dst, version, options)))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(min(self.seconds, options["timeout_s"]))
        finally:
            self.at_once -= 1
        return (
            self.result
            if self.seconds <= options["timeout_s"]
            else MoveResult(False, reason="no answer from x", outcome="late")
        )

    async def pin(self, tokens, worker, version, **options) -> CountResult:
        self.calls.append(("pin", worker))
        return CountResult(self.pin_ok, 112, "" if self.pin_ok else "the budget is used up")

    async def unpin(self, tokens, worker, version, **options) -> CountResult:
        self.calls.append(("unpin", worker))
        return CountResult(True, 112)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Stage:
    """Workers with addresses, and a mover."""

    def __init__(
        self, moves: FakeMoves, mode: str = "sync", timeout_ms: int = 300, per_source: int = 8
    ) -> None:
        self.fleet = Fleet()
        self.a, self.b, self.c = (self.fleet.add(f"http://{name}", "static") for name in "abc")
        for worker in self.fleet.workers():
            self.fleet.restore(worker, "4")
            worker.addresses = MoveAddresses((f"{worker.url}:c",), (f"{worker.url}:d",))
        self.counted: list[Brought] = []
        settings = TransferSettings(enable=True, transfer_mode=cast(Any, mode), transfer_timeout_ms=timeout_ms)
        self.mover = Mover(
            settings,
            cast(Any, moves),
            per_source=per_source,
            counted=lambda brought, seconds: self.counted.append(brought),
        )

    @staticmethod
    def call(session: str = "s", body: bytes = b'{"input_ids": [1,2,3], "cache_salt": "x"}'):
        return read_call("/generate", "", body, {"x-psrl-session": session}, 5.0, consumed=frozenset())


def test_sync_waits_for_the_move_of_the_prompt_at_the_destinations_version():
    async def scenario():
        moves = FakeMoves(0.05)
        stage = Stage(moves)
        brought = await stage.mover.bring(stage.call(), stage.a, stage.b)
        assert (brought.outcome, brought.tokens, brought.hint) == ("ok", 112, "")
        tokens, src, dst, version, options = moves.calls[0][1]
        assert (tokens, src, dst, version) == ((1, 2, 3), ("http://a:c",), ("http://b:d",), "4")
        assert options["cache_salt"] == "x"
        assert options["session"] == "s"
        assert options["timeout_s"] <= 0.3
        assert stage.counted == [brought]
        assert (await stage.mover.bring(stage.call(), stage.a, stage.a)).outcome == "none"
        assert (await stage.mover.bring(stage.call(), None, stage.b)).outcome == "none"
        await stage.mover.close()

    run(scenario())


@pytest.mark.parametrize("mode", ["sync", "pin_sync"])
def test_it_waits_no_longer_than_the_deadline_which_covers_the_wait_for_a_turn(mode):
    async def scenario():
        moves = FakeMoves(0.25)
        stage = Stage(moves, mode, timeout_ms=260, per_source=1)
        start_s = time.monotonic()
        work = [stage.mover.bring(stage.call(f"s{at}"), stage.a, stage.b) for at in range(4)]
        brought = await asyncio.gather(*work)
        assert time.monotonic() - start_s < 2.0  # 4 moves in a row would be over the deadline of each
        assert [one.outcome for one in brought] == ["ok", "timeout", "timeout", "timeout"]
        await until(lambda: len(stage.counted) == 4, "all are counted")
        assert moves.names.count("move") <= 2, "those that are late are not begun"
        assert stage.mover.running == 0
        await stage.mover.close()

    run(scenario())


def test_moves_of_one_source_are_bounded_and_those_of_another_do_not_wait():
    async def scenario():
        moves = FakeMoves(0.05)
        stage = Stage(moves, timeout_ms=5000, per_source=2)
        work = [stage.mover.bring(stage.call(f"s{at}"), stage.a, stage.b) for at in range(6)]
        await asyncio.gather(*work)
        assert moves.most_at_once == 2
        moves.most_at_once = 0
        work = [stage.mover.bring(stage.call(f"s{at}"), [stage.a, stage.c][at % 2], stage.b) for at in range(6)]
        await asyncio.gather(*work)
        assert moves.most_at_once == 4
        await stage.mover.close()

    run(scenario())


def test_one_session_and_destination_is_one_move():
    async def scenario():
        moves = FakeMoves(0.05)
        stage = Stage(moves)
        brought = await asyncio.gather(*(stage.mover.bring(stage.call(), stage.a, stage.b) for _ in range(3)))
        assert [one.outcome for one in brought] == ["ok"] * 3
        assert moves.names == ["move"]
        await stage.mover.bring(stage.call(), stage.a, stage.c)
        assert len(moves.calls) == 2
        await stage.mover.close()

    run(scenario())


def test_pin_sync_pins_first_and_always_unpins():
    async def scenario():
        for moves in (
            FakeMoves(),
            FakeMoves(1.0),
            FakeMoves(result=MoveResult(False, reason="a: no KV of it", outcome="miss")),
        ):
            stage = Stage(moves, "pin_sync", timeout_ms=100)
            await stage.mover.bring(stage.call(), stage.a, stage.b)
            await until(lambda stage=stage: stage.mover.running == 0, "the move ended")
            assert moves.names == ["pin", "move", "unpin"]
            await stage.mover.close()
        moves = FakeMoves()
        moves.pin_ok = False
        stage = Stage(moves, "pin_sync")
        assert (await stage.mover.bring(stage.call(), stage.a, stage.b)).outcome == "ok"
        await stage.mover.close()

    run(scenario())


def test_a_gateway_that_stops_in_a_move_unpins():
    async def scenario():
        moves = FakeMoves(5.0)
        stage = Stage(moves, "pin_sync", timeout_ms=5000)
        waiting = asyncio.create_task(stage.mover.bring(stage.call(), stage.a, stage.b))
        await until(lambda: "move" in moves.names, "it moves")
        await stage.mover.close()
        assert moves.names[-1] == "unpin"
        assert (await waiting).outcome == "error"

    run(scenario())


def test_async_returns_at_once_and_moves_beside():
    async def scenario():
        moves = FakeMoves(0.2)
        stage = Stage(moves, "async")
        brought = await asyncio.wait_for(stage.mover.bring(stage.call(), stage.a, stage.b), 0.1)
        assert (brought.outcome, brought.hint) == ("async", "")
        assert not moves.calls, "not even begun when the request goes out"
        await until(lambda: stage.counted, "it was moved")
        assert stage.counted[0].outcome == "ok"
        await stage.mover.close()

    run(scenario())


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (MoveResult(False, reason="a: no KV of this prompt", outcome="miss"), "miss"),
        (MoveResult(False, reason="no answer from a in 1 s", outcome="late"), "timeout"),
        (MoveResult(False, reason="a: model=m there, model=other here"), "error"),
        (MoveResult(True, num_tokens=0, present_tokens=64, reason="there already"), "ok"),
    ],
)
def test_what_came_of_it_is_told_and_counted(result, outcome):
    async def scenario():
        stage = Stage(FakeMoves(result=result))
        brought = await stage.mover.bring(stage.call(), stage.a, stage.b)
        assert brought.outcome == outcome
        assert brought.text.startswith(outcome)
        assert stage.counted == [brought]
        await stage.mover.close()

    run(scenario())


def test_where_there_is_nothing_to_do_itself_the_engine_is_told_the_source():
    async def scenario():
        stage = Stage(FakeMoves())
        for body, reason in (
            (b'{"text": "hello"}', "no_tokens"),
            (b'{"input_ids": [[1], [2]]}', "batch"),
            (b'{"input_ids": [1', "malformed"),
            (b'{"messages": []}', "no_tokens"),
        ):
            brought = await stage.mover.bring(stage.call(body=body), stage.a, stage.b)
            assert (brought.outcome, brought.reason, brought.hint) == ("skipped", reason, "http://a")
        stage.b.version = None
        assert (await stage.mover.bring(stage.call(), stage.a, stage.b)).reason == "no_version"
        stage.b.addresses = MoveAddresses(("1", "2"), ("1", "2"))
        assert (await stage.mover.bring(stage.call(), stage.a, stage.b)).reason == "unequal_ranks"
        stage.b.addresses = None
        assert (await stage.mover.bring(stage.call(), stage.a, stage.b)).reason == "no_endpoint"
        await stage.mover.close()

    run(scenario())


def test_only_what_a_move_needs_is_read_of_a_body():
    fields = read_fields(
        b'{"x": {"input_ids": [9]}, "input_ids": [1, 2], "routing_key": "k", "extra_key": "e"}'
    )
    assert (fields.tokens, fields.routing_key, fields.extra_key, fields.problem) == ([1, 2], "k", "e", "")
    assert read_fields(b'{"input_ids": [], "routing_key": "k"}').problem == "no_tokens"
    assert read_fields(b'{"text": "a", "routing_key": "k"}').routing_key == "k"
    assert read_fields(b'{"input_ids": [1.5]}').problem == "batch"
    assert read_fields(b"\xff").problem == "malformed"
    assert read_fields(b"[" * 100_000).problem == "malformed"


def moves_of(peer: Peer) -> dict[str, Any]:
    return {"ranks": [{"command_address": peer.command, "data_address": peer.data}]}


async def _two_turns(mode: str, peers: list[Peer], engines: list[FakeEngine], **kv: Any) -> list:
    for peer, engine in zip(peers, engines, strict=True):
        engine.moves = moves_of(peer)
    peers[0].compute(TOKENS)
    settings = {"transfer_mode": mode, "transfer_timeout_ms": 4000, **kv}
    async with gateway_of(*engines, kv=settings, method="round_robin") as gateway:
        await until(lambda: all(one.addresses for one in gateway.fleet.workers()), "addresses are known")
        first = await gateway.generate(TOKENS, 1, x_psrl_session="s")
        second = await gateway.generate(TOKENS, 1, x_psrl_session="s")
        assert first.worker == engines[0].url
        assert second.worker == engines[1].url
        await until(lambda: gateway.service.metrics.tally["ok"], "the move ended")
        assert await gateway.metric('psrl_gateway_kv_moves_total{result="ok"}') == 1
        assert await gateway.metric("psrl_gateway_kv_moved_tokens_total") == len(TOKENS)
        gateway.service.metrics.log_moves()
        return [first, second]


@pytest.mark.parametrize("mode", ["async", "sync", "pin_sync"])
def test_real_move_workers_bring_the_kv_of_a_session_that_changes_its_engine(mode, caplog):
    async def scenario():
        engines = [FakeEngine(), FakeEngine()]
        with Peer(PeerOptions()) as a, Peer(PeerOptions(instance_id="b")) as b:
            first, second = await _two_turns(mode, [a, b], engines)
            assert first.kv == ""
            assert second.kv == ("async" if mode == "async" else f"ok; tokens={len(TOKENS)}")
            assert b.verified(TOKENS) == PAGES
            assert "x-request-id-psrl-src" not in engines[1].seen[0].headers
            await until(lambda: a.is_idle() and b.is_idle(), "nothing is pinned or moving")
            assert not a.worker.status()["pins"]["held"]

    with caplog.at_level("INFO"):
        run(scenario())
    assert f"KV moves: ok=1 tokens={len(TOKENS)} total=1 success_rate=1.00" in caplog.text


def test_the_pin_of_a_gateway_that_was_killed_ends_with_its_lease():
    async def scenario():
        with (
            Peer(PeerOptions(pin_s=0.5, send_pause_s=2.0)) as a,
            Peer(PeerOptions(instance_id="b")) as b,
        ):
            a.compute(TOKENS)
            process = await _gateway_process([a, b])
            await until(lambda: a.worker.status()["pins"]["held"], "it is pinned")
            process.kill()
            await process.wait()
            assert a.worker.status()["pins"]["held"]
            await until(lambda: not a.worker.status()["pins"]["held"], "the lease has ended")
            await until(lambda: a.is_idle() and b.is_idle(), "nothing is moving")

    run(scenario())


async def _gateway_process(peers: list[Peer]):
    """A gateway as a process of its own that is in the middle of a move."""
    engines = [await FakeEngine(moves=moves_of(peer)).start() for peer in peers]
    routing = {"method": "round_robin", "kv_transfer": {"enable": True, "transfer_mode": "pin_sync"}}
    config = json.dumps({"psrl": {"rollout_coordination": {"routing_strategy": routing}}})
    command = ["gateway", "--port", "0", "--json-ready", "--config", config]
    for engine in engines:
        command += ["--worker", engine.url]
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("psrl-sglang"), *command, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = f"http://127.0.0.1:{json.loads(await process.stdout.readline())['port']}"
    http = aiohttp.ClientSession()

    async def ready() -> bool:
        async with http.get(f"{url}/workers") as reply:
            return all(worker["moves_kv"] for worker in (await reply.json())["workers"])

    while not await ready():
        await asyncio.sleep(0.02)
    for _ in range(2):
        turn = asyncio.create_task(_turn(http, url))
        await asyncio.wait([turn], timeout=0.3)
    turn.add_done_callback(lambda done: done.exception())
    return process


async def _turn(http, url: str) -> None:
    async with http.post(f"{url}/generate", json=ask(TOKENS, 1), headers={"x-psrl-session": "s"}) as reply:
        await reply.read()


def test_text_turns_leave_the_move_to_the_engine_and_say_where_the_kv_is():
    async def scenario():
        engines = [FakeEngine(), FakeEngine()]
        with Peer(PeerOptions()) as a, Peer(PeerOptions(instance_id="b")) as b:
            for peer, engine in zip((a, b), engines, strict=True):
                engine.moves = moves_of(peer)
            async with gateway_of(*engines, kv={"transfer_mode": "sync"}, method="round_robin") as gateway:
                await until(lambda: all(one.addresses for one in gateway.fleet.workers()), "addresses")
                for _ in range(2):
                    path = "/v1/chat/completions"
                    reply = await gateway.request("POST", path, {"messages": []}, x_psrl_session="s")
                assert reply.kv == "skipped; no_tokens"
                assert engines[1].seen[0].headers["x-request-id-psrl-src"] == engines[0].url
                assert engines[1].seen[0].headers["x-smg-routing-key"] == "s"
                skipped = 'psrl_gateway_kv_moves_skipped_total{reason="no_tokens"}'
                assert await gateway.metric(skipped) == 1

    run(scenario())


def test_a_source_that_is_gone_is_not_asked_and_the_request_is_served():
    async def scenario():
        engines = [FakeEngine(), FakeEngine()]
        async with gateway_of(*engines, kv={"transfer_mode": "sync"}, method="round_robin") as gateway:
            await gateway.generate([1], 1, x_psrl_session="s")
            await engines[0].stop()
            await until(lambda: not gateway.fleet.workers()[0].is_up, "it is seen to be gone")
            reply = await gateway.generate([1], 1, x_psrl_session="s")
            assert reply.status == 200
            assert reply.kv == ""

    run(scenario())
