"""Where the KV of a session may be, by a gateway's hint or the controller; and where this engine's ranks are.

One HTTP process's, on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import msgspec
import zmq
import zmq.asyncio

from psrl_sglang.config import PsrlConfig
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.auth import CONTROLLER_TOKEN_VARIABLE, Signer, read_secret

logger = logging.getLogger(__name__)

_ADDRESS_S = 30.0  # how long the addresses of a source are believed
_TAG_S = 5.0
_REPORT_S = 0.2
_CALL_S = 5.0
_SILENT_S = 5.0


_MOST_FOUND = 1024
_MOST_PEER_BYTES = 256 << 10
_PLAIN = {"accept-encoding": "identity"}


class _Rank(msgspec.Struct, frozen=True):
    command_address: str


class _Told(msgspec.Struct, frozen=True):
    instance_id: str
    ranks: Annotated[list[_Rank], msgspec.Meta(min_length=1, max_length=4096)]


class NoSource(Exception):
    """Nobody is known to have it, or they cannot be asked; the text says which."""


@dataclass(frozen=True, slots=True)
class Source:
    """``commands``: where each rank takes commands."""

    name: str
    commands: list[str]


@dataclass(frozen=True, slots=True)
class Mine:
    """This engine: ``versions`` are those it may reuse KV of, the newest first, by name; ``data`` is where
    each rank takes KV, ``left_address`` tells of sessions that left it."""

    name: str
    version: str
    versions: tuple[str, ...]
    tag: str
    data: list[str]
    left_address: str


class Sources:
    """``ask_engine`` gives what `EngineMoves.shown` does; ``key`` authorizes at the peers, which have the same."""

    def __init__(
        self,
        config: PsrlConfig,
        ask_engine: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        lmcache = config.lmcache
        self._ask_engine = ask_engine
        self._peers = httpx.AsyncClient(timeout=_CALL_S, trust_env=False)
        self._controller: httpx.AsyncClient | None = None
        self._signer = Signer(read_secret(config.sglang.secret_file))
        self._silent_until_s = 0.0
        self._push_url = ""
        if lmcache.controller_host is not None:
            host = f"[{lmcache.controller_host}]" if ":" in lmcache.controller_host else lmcache.controller_host
            token = os.environ.get(CONTROLLER_TOKEN_VARIABLE)
            self._controller = httpx.AsyncClient(
                base_url=f"http://{host}:{lmcache.controller_base_port}",
                headers={"authorization": f"Bearer {token}"} if token else {},
                timeout=_CALL_S,
                trust_env=False,
            )
            self._push_url = f"tcp://{host}:{lmcache.controller_pull_port}"
        self._context: zmq.asyncio.Context | None = None
        self._found: dict[str, tuple[float, Source]] = {}
        self._mine: tuple[float, Mine] | None = None
        self._served: dict[str, int] = {}
        self._reporting: asyncio.Task[None] | None = None

    async def find(self, hint: str, name: str, tokens: list[int], obj: Any) -> Source:
        """Who is to send the KV of session ``name``. Raises `NoSource`."""
        if hint:
            return await self._at(hint) if "://" in hint else await self._named(hint)
        if self._controller is None:
            raise NoSource("no hint, and no controller to ask")
        mine = await self.mine(within_s=_ADDRESS_S)
        known = await self._get_controller(f"/sessions/{quote(name, safe='')}")
        instance = (known or {}).get("instance_id")
        if instance is None:
            mine = await self.mine()
            body = {"tokens": tokens, "version": mine.version}
            body |= {key: value for key in ("cache_salt", "extra_key") if (value := getattr(obj, key, None))}
            held = await self._post_controller("/lookup", body)
            others = {who: where for who, where in held["layout_info"].items() if who != mine.name}
            instance = max(others, key=lambda who: others[who][1], default=None)
        if instance is None:
            raise NoSource("the controller knows nobody who has it")
        if instance == mine.name:
            raise NoSource("it is here")
        return await self._named(instance)

    def forget(self, source: Source) -> None:
        """Its addresses did not work."""
        self._found = {key: one for key, one in self._found.items() if one[1] != source}

    async def mine(self, *, within_s: float = 0.0) -> Mine:
        """This engine as it is now, or was ``within_s`` ago."""
        if self._mine is None or time.monotonic() - self._mine[0] > within_s:
            shown = await self._ask_engine()
            data = [rank["data_address"] for rank in shown["ranks"]]
            one = Mine(
                name=shown["instance_id"],
                version=shown["version"],
                versions=tuple(shown["versions"]),
                tag=shown["tag"],
                data=data,
                left_address=shown["left_address"],
            )
            self._mine = (time.monotonic(), one)
        return self._mine[1]

    def serves(self, name: str, tokens: int) -> None:
        """Tell the controller, soon, that a session is here."""
        if not self._push_url:
            return
        self._served[name] = tokens
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._report())

    async def left(self) -> tuple[zmq.asyncio.Socket, Mine]:
        """A socket that receives the names of sessions whose KV another engine took. The caller's to close."""
        mine = await self.mine(within_s=_ADDRESS_S)
        socket = self._sockets().socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.subscribe(b"")
        socket.connect(mine.left_address)
        return socket, mine

    async def close(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        await self._peers.aclose()
        if self._controller is not None:
            await self._controller.aclose()
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _report(self) -> None:
        socket = self._sockets().socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._push_url)
        try:
            while self._served:
                await asyncio.sleep(_REPORT_S)
                mine = await self.mine(within_s=_TAG_S)
                served, self._served = self._served, {}
                held = [wire.SessionHeld(name, tokens, mine.tag) for name, tokens in served.items()]
                frames = self._signer.sign(wire.encode(wire.SessionsMsg(mine.name, 0, held)))
                async with asyncio.timeout(_CALL_S):
                    await socket.send_multipart(frames)
        except TimeoutError:
            logger.info("psrl: the controller does not take reports of sessions")
        finally:
            socket.close(linger=1000)

    def _sockets(self) -> zmq.asyncio.Context:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        return self._context

    async def _at(self, url: str) -> Source:
        """An engine by its HTTP address. Anyone may name one with his request, so it is told nothing: no key, and
        nothing that is long is read from it. One that wants a key is found by way of the controller."""
        cached = self._cached(url)
        if cached is not None:
            return cached
        source = await self._registered(url) or await self._ask_peer(url)
        mine = await self.mine(within_s=_ADDRESS_S)
        if source.name == mine.name:
            raise NoSource("it is here")
        self._remember(url, source)
        return source

    async def _registered(self, url: str) -> Source | None:
        if self._controller is None:
            return None
        try:
            shown = await self._get_controller("/instances") or {}
        except NoSource:
            return None
        of_url = (
            one["instance_id"] for one in shown.get("instances", ()) if one.get("http_url") == url.rstrip("/")
        )
        name = next(of_url, None)
        return None if name is None else await self._named(name)

    async def _ask_peer(self, url: str) -> Source:
        body = b""
        try:
            async with self._peers.stream("GET", f"{url.rstrip('/')}/psrl/v1/moves", headers=_PLAIN) as reply:
                reply.raise_for_status()
                async for piece in reply.aiter_raw():
                    body += piece
                    if len(body) > _MOST_PEER_BYTES:
                        raise NoSource("what is at the hinted address is no engine")
            told = msgspec.json.decode(body, type=_Told)
        except httpx.HTTPStatusError as error:
            needs_key = error.response.status_code in (401, 403)
            why = "it wants a key, so only a controller can tell" if needs_key else "it does not say so"
            raise NoSource(f"where the workers of the hinted engine are: {why}") from error
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError, RecursionError) as error:
            raise NoSource(f"the hinted engine does not answer: {type(error).__name__}") from error
        return Source(told.instance_id, [rank.command_address for rank in told.ranks])

    def _remember(self, key: str, source: Source) -> None:
        if len(self._found) >= _MOST_FOUND:
            self._found.clear()
        self._found[key] = (time.monotonic(), source)

    async def _named(self, instance: str) -> Source:
        cached = self._cached(instance)
        if cached is not None:
            return cached
        if self._controller is None:
            raise NoSource(
                f"the source is named {instance!r}, and there is no controller that knows its address"
            )
        shown = await self._post_controller("/query_worker_info", {"instance_id": instance})
        workers = sorted(shown["worker_infos"], key=lambda worker: worker["worker_id"])
        if not workers:
            raise NoSource(f"the controller does not know {instance!r}")
        source = Source(instance, [f"{worker['ip']}:{worker['port']}" for worker in workers])
        self._remember(instance, source)
        return source

    def _cached(self, key: str) -> Source | None:
        when_s, source = self._found.get(key, (0.0, None))
        return source if source is not None and time.monotonic() - when_s < _ADDRESS_S else None

    async def _get_controller(self, path: str) -> dict[str, Any] | None:
        return await self._controller_answer("GET", path, None)

    async def _post_controller(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._controller_answer("POST", path, body)
        if answer is None:
            raise NoSource(f"the controller does not know it ({path})")
        return answer

    async def _controller_answer(self, method: str, path: str, body: Any) -> dict[str, Any] | None:
        """None for 404. Raises `NoSource`; at once for a while after it did not answer: turns are not to wait."""
        assert self._controller is not None
        if time.monotonic() < self._silent_until_s:
            raise NoSource("the controller did not answer a moment ago")
        try:
            reply = await self._controller.request(method, path, json=body)
            return None if reply.status_code == 404 else reply.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            if isinstance(error, httpx.TransportError):
                self._silent_until_s = time.monotonic() + _SILENT_S
            raise NoSource(f"the controller: {error or type(error).__name__}") from error
        except asyncio.CancelledError:  # the request's deadline
            self._silent_until_s = time.monotonic() + _SILENT_S
            raise
