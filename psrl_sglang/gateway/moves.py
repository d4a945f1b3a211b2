"""Bringing a session's KV to the worker that gets its next turn: pushed by the worker that has it.

Moves of one session to one worker are one move. All a request waits is one deadline, the wait for its turn at the
source included; a move that comes late goes on by itself and is there for the next turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psrl_sglang.gateway.call import Call
from psrl_sglang.gateway.fleet import MoveAddresses, Worker
from psrl_sglang.gateway.settings import TransferSettings
from psrl_sglang.transfer.client import AsyncMoveClient, CountResult, Salts

_UNPIN_S = 5.0
_IN_BACKGROUND = "async"
_OUTCOMES = {"miss": "miss", "late": "timeout"}


@dataclass(frozen=True, slots=True)
class Brought:
    """``outcome``: "none" (nothing was to do), "ok", "miss" (the source had nothing), "timeout", "error",
    "skipped", or "async" (it is on its way). ``hint``: the worker to fetch it from, where the engine may do so."""

    outcome: str
    tokens: int = 0
    reason: str = ""
    hint: str = ""

    @property
    def text(self) -> str:
        """For a reply header."""
        said = f"{self.outcome}; tokens={self.tokens}" if self.outcome == "ok" else self.outcome
        reason = " ".join(self.reason.split())[:200].encode("ascii", "replace").decode()
        return f"{said}; {reason}" if reason else said


NOTHING = Brought("none")


@dataclass(frozen=True, slots=True)
class _Plan:
    source: Worker
    at: MoveAddresses
    to: MoveAddresses
    version: str
    tokens: list[int]
    salts: Salts
    session: str
    deadline_s: float


class Mover:
    """Owns every move it starts; `close` ends them. ``counted`` gets each outcome with its reason and seconds."""

    def __init__(
        self,
        settings: TransferSettings,
        client: AsyncMoveClient,
        *,
        per_source: int,
        counted: Callable[[Brought, float], None],
    ) -> None:
        self._settings = settings
        self._client = client
        self._per_source = per_source
        self._counted = counted
        self._sources: dict[str, asyncio.Semaphore] = {}
        self._running: dict[tuple[str, str], asyncio.Future[Brought]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        return len(self._running)

    async def bring(self, call: Call, source: Worker | None, destination: Worker) -> Brought:
        """What a request does about its KV before it is sent: at most waits until the deadline of a move."""
        if source is None or source is destination:
            return NOTHING
        if not self._settings.enable:
            return self._skip("disabled", source)
        started_s = time.monotonic()
        deadline_s = started_s + self._settings.transfer_timeout_ms / 1000
        if self._settings.transfer_mode == _IN_BACKGROUND:
            if problem := self._unknown(source, destination):
                return self._skip(problem, source)
            self._own(self._in_background(call, source, destination, deadline_s))
            return Brought(_IN_BACKGROUND)
        result = self._start(call, source, destination, deadline_s)
        if isinstance(result, Brought):
            return result
        await asyncio.wait([result], timeout=max(0.0, deadline_s - time.monotonic()))
        if result.done():
            return result.result()
        return Brought("timeout", reason="the move goes on by itself")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _in_background(self, call: Call, source: Worker, destination: Worker, deadline_s: float) -> None:
        # The request is being sent; reading its tokens may take longer than that.
        await asyncio.sleep(0)
        self._start(call, source, destination, deadline_s)

    def _start(
        self, call: Call, source: Worker, destination: Worker, deadline_s: float
    ) -> asyncio.Future[Brought] | Brought:
        """The move's result to come, or why there is none."""
        if problem := self._unknown(source, destination) or call.fields.problem:
            return self._skip(problem, source)
        at, to, version = source.addresses, destination.addresses, destination.version
        assert at is not None
        assert to is not None
        assert version is not None
        key = (call.session, destination.url)
        result = self._running.get(key)
        if result is None:
            result = self._running[key] = asyncio.get_running_loop().create_future()
            salts = Salts(cache_salt=call.fields.cache_salt, extra_key=call.fields.extra_key)
            tokens, session = call.fields.tokens, call.session
            plan = _Plan(source, at, to, version, tokens, salts, session, deadline_s)
            self._own(self._run(plan, key, result))
        return result

    def _unknown(self, source: Worker, destination: Worker) -> str:
        if source.addresses is None or destination.addresses is None:
            return "no_endpoint"
        if len(source.addresses.command) != len(destination.addresses.data):
            return "unequal_ranks"
        return "" if destination.version is not None else "no_version"

    def _skip(self, problem: str, source: Worker) -> Brought:
        skipped = Brought("skipped", reason=problem, hint=source.url)
        self._counted(skipped, 0.0)
        return skipped

    def _own(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, plan: _Plan, key: tuple[str, str], result: asyncio.Future[Brought]) -> None:
        started_s = time.monotonic()
        turn = self._sources.setdefault(plan.source.url, asyncio.Semaphore(self._per_source))
        brought = Brought("error", reason="the gateway is stopping")
        try:
            async with asyncio.timeout_at(_loop_time(plan.deadline_s)):
                await turn.acquire()
            try:
                brought = await self._push(plan, result)
            finally:
                turn.release()
        except TimeoutError:
            brought = Brought("timeout", reason=f"{self._per_source} moves of {plan.source.url} are under way")
        finally:
            self._running.pop(key, None)
            if not result.done():
                result.set_result(brought)
            self._counted(brought, time.monotonic() - started_s)

    async def _push(self, plan: _Plan, result: asyncio.Future[Brought]) -> Brought:
        """With a pin around it in the mode that says so; the result is there before the pin is taken off."""
        if self._settings.transfer_mode != "pin_sync":
            return await self._transfer(plan)
        try:
            await self._client.pin(
                plan.tokens, plan.at.command, plan.version, timeout_s=_left_s(plan), **plan.salts
            )
            brought = await self._transfer(plan)
            if not result.done():
                result.set_result(brought)
            return brought
        finally:
            # Also where nobody knows whether the pin was taken, and when the gateway stops.
            await asyncio.shield(self._unpin(plan))

    def _unpin(self, plan: _Plan) -> asyncio.Task[CountResult]:
        work = self._client.unpin(plan.tokens, plan.at.command, plan.version, timeout_s=_UNPIN_S, **plan.salts)
        return asyncio.get_running_loop().create_task(work)

    async def _transfer(self, plan: _Plan) -> Brought:
        left_s = _left_s(plan)
        moved = await self._client.transfer_direct(
            plan.tokens,
            plan.at.command,
            plan.to.data,
            plan.version,
            timeout_s=left_s,
            session=plan.session or None,
            **plan.salts,
        )
        if moved.ok:
            return Brought("ok", moved.num_tokens, moved.reason)
        return Brought(_OUTCOMES.get(moved.outcome, "error"), reason=moved.reason)


def _left_s(plan: _Plan) -> float:
    return max(0.01, plan.deadline_s - time.monotonic())


def _loop_time(deadline_s: float) -> float:
    return asyncio.get_running_loop().time() + deadline_s - time.monotonic()
