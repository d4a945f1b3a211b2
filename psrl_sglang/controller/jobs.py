"""Moves as events: each has an id, goes on when nobody waits for it, and can be asked about afterwards."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from psrl_sglang.controller.orders import Orders, PlannedMove, RankResult, Refusal
from psrl_sglang.transfer.client import MoveResult, event_id

_MOST_RUNNING = 256
_MOST_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Outcome:
    """``result`` with "finished"; ``problem`` and the HTTP ``status`` with "failed"."""

    event_id: str
    state: Literal["running", "finished", "failed"]
    result: MoveResult | None = None
    ranks: tuple[RankResult, ...] = ()
    problem: str = ""
    status: int = 200


class MoveJobs:
    """Owns a task for each running move; `close` ends them."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._running: dict[str, asyncio.Task[Outcome]] = {}
        self._ended: OrderedDict[str, Outcome] = OrderedDict()

    @property
    def running(self) -> int:
        return len(self._running)

    def start(self, plan: PlannedMove) -> str:
        """The id of the event. Raises `Refusal`."""
        if len(self._running) >= _MOST_RUNNING:
            raise Refusal(503, f"{_MOST_RUNNING} moves are under way, which is the most; try again")
        event = event_id("Move")
        self._running[event] = asyncio.create_task(self._run(event, plan))
        return event

    async def wait(self, event: str) -> Outcome:
        """The move has its own deadline; it goes on if the caller is cancelled."""
        task = self._running.get(event)
        return self._ended[event] if task is None else await asyncio.shield(task)

    def look(self, event: str) -> Outcome | None:
        """None: unknown, or forgotten since."""
        return Outcome(event, "running") if event in self._running else self._ended.get(event)

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, event: str, plan: PlannedMove) -> Outcome:
        try:
            result, ranks = await self._orders.move(plan)
            outcome = Outcome(event, "finished", result, ranks)
        except Refusal as refusal:
            outcome = Outcome(event, "failed", None, refusal.ranks, str(refusal), refusal.status)
        finally:
            del self._running[event]
        self._ended[event] = outcome
        if len(self._ended) > _MOST_REMEMBERED:
            self._ended.popitem(last=False)
        return outcome
