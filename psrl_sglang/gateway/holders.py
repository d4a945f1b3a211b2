"""Who has the KV of a session, as far as this gateway sent it there; and which worker a prompt group is tied to."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from psrl_sglang.gateway.fleet import Fleet, Worker

Value = TypeVar("Value")


class BoundedMap(Generic[Value]):
    """The least lately used go first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: OrderedDict[str, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: str) -> Value | None:
        value = self._items.get(key)
        if value is not None:
            self._items.move_to_end(key)
        return value

    def set(self, key: str, value: Value) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._most:
            self._items.popitem(last=False)

    def drop(self, key: str) -> None:
        self._items.pop(key, None)

    def items(self) -> list[tuple[str, Value]]:
        return list(self._items.items())


@dataclass(frozen=True, slots=True)
class Holder:
    """``generation`` is the worker's when it served: after a loss of the worker its KV is taken for gone."""

    url: str
    generation: int
    tokens: int


class Holders:
    def __init__(self, fleet: Fleet, most: int) -> None:
        self._fleet = fleet
        self._sessions: BoundedMap[Holder] = BoundedMap(most)
        self._groups: BoundedMap[str] = BoundedMap(most)

    def __len__(self) -> int:
        return len(self._sessions)

    def holder(self, session: str) -> Worker | None:
        """The worker that has the session's KV, if it still can have it."""
        held = self._sessions.get(session) if session else None
        if held is None:
            return None
        worker = self._fleet.get(held.url)
        if worker is None or worker.generation != held.generation or not worker.is_up:
            return None
        return worker

    def tokens(self, session: str) -> int:
        held = self._sessions.get(session)
        return held.tokens if held is not None else 0

    def served(self, session: str, worker: Worker, tokens: int) -> None:
        if session:
            self._sessions.set(session, Holder(worker.url, worker.generation, tokens))

    def forget(self, session: str) -> None:
        self._sessions.drop(session)

    def group(self, prompt_id: str) -> str | None:
        """The URL a group is tied to, for as long as that worker is there."""
        url = self._groups.get(prompt_id) if prompt_id else None
        if url is not None and self._fleet.get(url) is None:
            self._groups.drop(prompt_id)
            return None
        return url

    def tie(self, prompt_id: str, worker: Worker) -> None:
        """Written once: the first worker of a group keeps it."""
        if prompt_id and self.group(prompt_id) is None:
            self._groups.set(prompt_id, worker.url)
