"""Fetching KV at the door, against a controller that is nothing but HTTP, or hangs."""

import asyncio
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from aiohttp import web

from psrl_sglang.config import load_config
from psrl_sglang.engine.middleware import RequestNote, current
from psrl_sglang.engine.pull import Puller
from psrl_sglang.engine.sources import Sources

TOKENS = list(range(64))
LIMIT_S = 0.5
KV_TRANSFER = {"enable": True, "transfer_mode": "sync", "transfer_timeout_ms": int(LIMIT_S * 1000)}


class Controller:
    """``hangs``: takes connections and says nothing. Else it has not heard of anything."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs
        self.asked = []

    async def start(self) -> int:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.Response:
        self.asked.append(request.raw_path)
        if self.hangs:
            await asyncio.sleep(60)
        if request.path == "/lookup":
            return web.json_response({"layout_info": {}})
        return web.json_response({}, status=404)


async def ask_engine():
    return {
        "instance_id": "a",
        "version": "1",
        "versions": ["1"],
        "tag": "1",
        "ranks": [{"data_address": "127.0.0.1:1"}],
        "left_address": "inproc://nobody",
    }


@asynccontextmanager
async def puller_of(controller):
    settings = {
        "psrl": {
            "lmcache": {
                "enable": True,
                "enable_p2p": True,
                "chunk_size": 16,
                "controller_host": "127.0.0.1",
                "controller_base_port": await controller.start(),
            },
            "rollout_coordination": {
                "routing_strategy": {
                    "kv_transfer": {
                        "enable": True,
                        "transfer_mode": "sync",
                        "transfer_timeout_ms": int(LIMIT_S * 1000),
                    }
                }
            },
        }
    }
    config = load_config(settings)
    sources = Sources(config, ask_engine)
    puller = Puller(config, sources)
    try:
        yield puller, sources
    finally:
        await puller.close()
        await controller.stop()


async def turn(puller, session, hint=""):
    note = RequestNote(session=session, hint=hint)
    token = current.set(note)
    try:
        obj = SimpleNamespace(cache_salt=None, extra_key=None)
        await puller.before_send(obj, SimpleNamespace(input_ids=TOKENS, routing_key=None))
    finally:
        current.reset(token)
    return dict(note.headers())


def test_a_session_is_reported_as_ours_only_after_the_controller_was_asked_whose_it_is():
    async def scenario():
        controller = Controller(hangs=False)
        async with puller_of(controller) as (puller, sources):
            reported = []
            sources.serves = lambda name, tokens: reported.append((name, len(controller.asked)))
            await turn(puller, "s")
            assert [path for path in controller.asked] == ["/sessions/s", "/lookup"]
            assert reported == [("s", 2)]
            await turn(puller, "s")  # known: nobody is asked
            assert reported == [("s", 2), ("s", 2)]

    asyncio.run(scenario())


def test_a_controller_that_hangs_costs_one_turn_its_deadline_and_not_each():
    async def scenario():
        controller = Controller(hangs=True)
        async with puller_of(controller) as (puller, _):
            began_s = time.monotonic()
            first = await turn(puller, "s0")
            assert b"late" in first[b"x-psrl-kv-reason"]
            for number in range(1, 20):
                said = await turn(puller, f"s{number}")
                assert said[b"x-psrl-kv-reason"] == b"the controller did not answer a moment ago"
            assert time.monotonic() - began_s < 10 * LIMIT_S  # 20 times without
            assert controller.asked == ["/sessions/s0"]

    asyncio.run(scenario())


@pytest.mark.parametrize("session", ["s", "a/b c"])
def test_a_turn_nobody_has_kv_for_says_why(session):
    async def scenario():
        async with puller_of(Controller(hangs=False)) as (puller, _):
            said = await turn(puller, session)
            assert said == {b"x-psrl-kv-reason": b"the controller knows nobody who has it"}

    asyncio.run(scenario())


class Peer(Controller):
    """Whatever is at a hinted address: ``body`` is what it says."""

    def __init__(self, body: bytes, *, status: int = 200) -> None:
        super().__init__(hangs=False)
        self.body, self.status = body, status
        self.headers = []

    async def _serve(self, request: web.Request) -> web.Response:
        self.headers.append({name.lower() for name in request.headers})
        return web.Response(body=self.body, status=self.status, content_type="application/json")


def hinted(body: bytes, *, status: int = 200):
    async def scenario():
        peer = Peer(body, status=status)
        url = f"http://127.0.0.1:{await peer.start()}"
        try:
            async with puller_of(Controller(hangs=False)) as (puller, _):
                return await turn(puller, "s", hint=url), peer
        finally:
            await peer.stop()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"x" * (1 << 20), b"what is at the hinted address is no engine"),
        (b"[" * 100_000, b"the hinted engine does not answer"),
        (b'{"instance_id": 7, "ranks": []}', b"the hinted engine does not answer"),
        (b"{}", b"the hinted engine does not answer"),
    ],
)
def test_what_a_hinted_address_says_cannot_harm_and_it_is_told_nothing(body, reason):
    said, peer = hinted(body)
    assert reason in said[b"x-psrl-kv-reason"]
    assert not peer.headers[0] & {"authorization", "cookie", "x-smg-routing-key"}


def test_a_hinted_engine_that_wants_a_key_does_not_get_ours():
    said, peer = hinted(b"{}", status=401)
    assert b"only a controller can tell" in said[b"x-psrl-kv-reason"]
    assert len(peer.headers) == 1


class Knowing(Controller):
    """A controller that knows an engine at ``url``."""

    def __init__(self, url: str) -> None:
        super().__init__(hangs=False)
        self.url = url

    async def _serve(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path == "/instances":
            return web.json_response({"instances": [{"instance_id": "b", "http_url": self.url}]})
        return web.json_response({"worker_infos": [{"worker_id": 0, "ip": "127.0.0.1", "port": 9}]})


def test_a_hinted_address_that_the_controller_knows_is_not_asked_itself():
    async def scenario():
        peer = Peer(b"{}")
        url = f"http://127.0.0.1:{await peer.start()}"
        controller = Knowing(url)
        async with puller_of(controller) as (puller, _):
            said = await turn(puller, "s", hint=url)
        await peer.stop()
        assert said[b"x-psrl-kv-source"] == b"b"
        assert controller.asked == ["/instances", "/query_worker_info"]
        assert peer.headers == []

    asyncio.run(scenario())
