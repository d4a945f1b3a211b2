"""Holding sessions back: the next turn of a hung session waits here until the session is continued.

What already runs is left alone. Sessions that are with their environment (no turn under way) are hung and continued
before others, small ones before large ones.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


class TurnRefused(Exception):
    """``status`` is for HTTP; the text says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(eq=False, slots=True)
class Session:
    id: str
    created_s: float = field(default_factory=time.time)
    turns: int = 0
    running: int = 0
    waiting: int = 0
    is_hung: bool = False
    is_deleted: bool = False
    free: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.free.set()

    @property
    def state(self) -> str:
        return "hung" if self.is_hung else "running" if self.running else "env"


class Turns:
    """``tokens_of``: about how large a session is."""

    def __init__(
        self, *, most: int, most_waiting: int, timeout_s: float, tokens_of: Callable[[str], int]
    ) -> None:
        self._most = most
        self._most_waiting = most_waiting
        self._timeout_s = timeout_s
        self._tokens_of = tokens_of
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, session_id: str | None = None) -> Session:
        """Raises `TurnRefused` for an id that is taken, or too many sessions."""
        if session_id is not None and session_id in self._sessions:
            raise TurnRefused(409, f"session_id: {session_id!r} is there already")
        if len(self._sessions) >= self._most:
            raise TurnRefused(503, f"{self._most} sessions are there already; delete some")
        session = Session(session_id or uuid.uuid4().hex)
        self._sessions[session.id] = session
        return session

    def get(self, session_id: str) -> Session:
        """Raises `TurnRefused`."""
        session = self._sessions.get(session_id)
        if session is None:
            raise TurnRefused(404, f"there is no session {session_id!r}; POST /sessions makes one")
        return session

    def delete(self, session_id: str) -> None:
        """Turns that wait for it are refused at once."""
        session = self.get(session_id)
        del self._sessions[session_id]
        session.is_deleted = True
        session.free.set()

    def sessions(self) -> list[Session]:
        return list(self._sessions.values())

    def hang(self, ids: Iterable[str] | None = None, count: int | None = None) -> list[str]:
        """By id, or so many in order. Returns whom. Raises `TurnRefused`."""
        chosen = self._chosen(ids, count, [one for one in self.sessions() if not one.is_hung])
        for session in chosen:
            session.is_hung = True
            session.free.clear()
        return [session.id for session in chosen]

    def resume(self, ids: Iterable[str] | None = None, count: int | None = None) -> list[str]:
        chosen = self._chosen(ids, count, [one for one in self.sessions() if one.is_hung])
        for session in chosen:
            session.is_hung = False
            session.free.set()
        return [session.id for session in chosen]

    @asynccontextmanager
    async def turn(self, session_id: str) -> AsyncIterator[None]:
        """Around one turn. Waits while the session is hung; a session that nobody made is not held back. Raises
        `TurnRefused`."""
        session = self._sessions.get(session_id) if session_id else None
        if session is None:
            yield
            return
        await self._pass(session)
        session.running += 1
        session.turns += 1
        try:
            yield
        finally:
            session.running -= 1

    def view(self, session: Session) -> dict[str, Any]:
        return {
            "session_id": session.id,
            "state": session.state,
            "tokens": self._tokens_of(session.id),
            "turns": session.turns,
            "running": session.running,
            "waiting": session.waiting,
            "created_s": session.created_s,
        }

    async def _pass(self, session: Session) -> None:
        if session.free.is_set():
            return
        if session.waiting >= self._most_waiting:
            raise TurnRefused(
                429, f"{session.waiting} turns of session {session.id!r} wait already; it is hung"
            )
        session.waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                while session.is_hung and not session.is_deleted:
                    await session.free.wait()
        except TimeoutError as error:
            text = f"session {session.id!r} was hung for {self._timeout_s:g} s; POST /control/continue"
            raise TurnRefused(503, text) from error
        finally:
            session.waiting -= 1
        if session.is_deleted:
            raise TurnRefused(410, f"session {session.id!r} was deleted")

    def _chosen(self, ids: Iterable[str] | None, count: int | None, among: list[Session]) -> list[Session]:
        if ids is not None:
            eligible = {session.id for session in among}
            return [session for session in map(self.get, ids) if session.id in eligible]
        ordered = sorted(among, key=lambda one: (one.running > 0, self._tokens_of(one.id), one.created_s))
        return ordered if count is None else ordered[:count]
