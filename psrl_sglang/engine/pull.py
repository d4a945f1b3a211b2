"""KV for a request that another engine served before: fetched at the door, before the scheduler sees it.

Routers re-route silently (a worker is down, and back), so the engine itself notices that a session is new here. It
asks whoever may have its KV, from the hint of a gateway or from the controller, to send it, once for each session,
and within one deadline; then the request goes on, with the KV or without.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from psrl_sglang.config import PsrlConfig
from psrl_sglang.engine.middleware import NoteMiddleware, RequestNote, current
from psrl_sglang.engine.sources import Mine, NoSource, Source, Sources
from psrl_sglang.transfer.auth import read_secret
from psrl_sglang.transfer.client import AsyncMoveClient, MoveResult, Salts

logger = logging.getLogger(__name__)

_MOST_KNOWN = 1 << 16
_RETRY_S = 5.0
_TRUST_S = 2.0  # a session that was away longer is asked for again: an engine that hung heard nothing of it
_OWN_SHARE = 0.9  # of the time for a move: the worker is to answer before we stop to wait


class Puller:
    """One HTTP process's. Lives on its event loop."""

    def __init__(self, config: PsrlConfig, sources: Sources) -> None:
        self._config = config
        self._sources = sources
        self._client = AsyncMoveClient(secret=read_secret(config.sglang.secret_file))
        self._known: OrderedDict[str, float] = OrderedDict()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._mode = config.kv_transfer.transfer_mode
        self._limit_s = config.kv_transfer.transfer_timeout_ms / 1000

    async def before_send(self, obj: Any, tokenized: Any) -> None:
        """For a request that is about to go to the scheduler: see that its KV is on its way, or here. Never raises
        for trouble of others."""
        note = current.get() or RequestNote()
        obj._psrl_note = note
        tokens = tokenized.input_ids
        if tokens is None or (len(tokens) < self._config.lmcache.chunk_size and not note.hint):
            return
        name = getattr(tokenized, "routing_key", None) or note.session or self._name_of(tokens)
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        if time.monotonic() - self._known.get(name, -math.inf) < _TRUST_S and not note.hint:
            self._sources.serves(name, len(tokens))
            self._know(name)
            return
        task = self._running.get(name)
        if task is None:
            task = asyncio.create_task(self._pull(name, note, tokens, obj))
            self._running[name] = task
            task.add_done_callback(lambda _: self._running.pop(name, None))
        if self._mode == "async":
            return
        try:
            await asyncio.wait_for(asyncio.shield(task), self._limit_s)
        except TimeoutError:
            note.reason = note.reason or f"late: not within {self._limit_s:.1f} s"

    async def close(self) -> None:
        for task in [*self._running.values(), *([self._following] if self._following else ())]:
            task.cancel()
        await self._sources.close()

    def _name_of(self, tokens: Any) -> str:
        """Of a request without a session: its first chunk, which its turns have in common."""
        head = array("q", tokens[: self._config.lmcache.chunk_size]).tobytes()
        return "#" + hashlib.blake2b(head, digest_size=12).hexdigest()

    async def _pull(self, name: str, note: RequestNote, tokens: Any, obj: Any) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                try:
                    source = await self._sources.find(note.hint, name, list(tokens), obj)
                finally:  # not sooner: else the controller would name this engine
                    self._sources.serves(name, len(tokens))
                note.source = source.name
                await self._move(source, name, note, list(tokens), obj)
        except NoSource as why:
            note.reason = str(why)
        except TimeoutError:
            note.reason = f"late: not within {self._limit_s:.1f} s"
        except Exception as error:
            logger.exception("psrl: KV of a request could not be fetched")
            note.reason = f"{type(error).__name__}: {error}"
        finally:
            self._know(name)

    async def _move(self, source: Source, name: str, note: RequestNote, tokens: list[int], obj: Any) -> None:
        mine = await self._sources.mine()
        for version in mine.versions:
            result = await self._transfer(source, mine, version, name, tokens, obj)
            note.moved_tokens, note.present_tokens = result.num_tokens, result.present_tokens
            note.reason = result.reason
            if result.ok:
                return
        self._sources.forget(source)

    async def _transfer(
        self, source: Source, mine: Mine, version: str, name: str, tokens: list[int], obj: Any
    ) -> MoveResult:
        salts: Salts = {"cache_salt": obj.cache_salt or None, "extra_key": obj.extra_key or None}
        where, limit_s = source.commands, self._limit_s
        is_pinned = False
        try:
            if self._mode == "pin_sync":
                pin = await self._client.pin(tokens, where, version, timeout_s=limit_s, **salts)
                is_pinned = pin.num_tokens > 0
            own_s = limit_s * _OWN_SHARE
            return await self._client.transfer_direct(
                tokens, where, mine.data, version, timeout_s=own_s, session=name, **salts
            )
        finally:
            if is_pinned:
                unpin = self._client.unpin(tokens, where, version, timeout_s=limit_s, **salts)
                await asyncio.shield(asyncio.ensure_future(unpin))

    async def _follow(self) -> None:
        """Forget sessions whose KV another engine took: their next turn here will be behind."""
        try:
            socket, _ = await self._sources.left()
        except (TimeoutError, OSError, KeyError) as error:
            logger.warning("psrl: sessions that leave this engine are not noticed: %r", error)
            await asyncio.sleep(_RETRY_S)
            return
        try:
            while True:
                self._known.pop((await socket.recv()).decode(), None)
        finally:
            socket.close()

    def _know(self, name: str) -> None:
        self._known[name] = time.monotonic()
        self._known.move_to_end(name)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


_puller: Puller | None = None  # of this process


async def around_tokenize(original: Callable[..., Any], self: Any, obj: Any) -> Any:
    """Around ``TokenizerManager._tokenize_one_request``: the first place where a request's tokens are known."""
    tokenized = await original(self, obj)
    if _puller is not None:
        await _puller.before_send(obj, tokenized)
    return tokenized


def install(
    app: Any,
    config: PsrlConfig,
    ask_engine: Callable[[], Awaitable[dict[str, Any]]],
) -> None:
    """Fetch KV for the requests of this HTTP process from now on."""
    global _puller

    app.add_middleware(NoteMiddleware)
    _puller = Puller(config, Sources(config, ask_engine))
