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
    sources = Sources(config, ask_engine, lambda: None)
    puller = Puller(config, sources)
    try:
        yield puller, sources
    finally:
        await puller.close()
        await controller.stop()


async def turn(puller, session):
    note = RequestNote(session=session)
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
