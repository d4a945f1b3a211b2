"""The queue in front of the workers: a request has a worker's slot, or waits for one here.

Whoever waits is tried in the order of arrival whenever a slot becomes free, a worker joins, returns or changes its
version; one that cannot be served yet, because of its version, does not keep those behind it waiting.
"""

from __future__ import annotations

import asyncio
import time

from psrl_sglang.gateway.call import Call
from psrl_sglang.gateway.fleet import Fleet, Worker
from psrl_sglang.gateway.selection import Selector


class NoWorker(Exception):
    """There was no slot: the queue is full, or the deadline has passed. The text says why."""


class Admission:
    def __init__(self, fleet: Fleet, selector: Selector, *, most_queued: int, interval_s: float) -> None:
        self._fleet = fleet
        self._selector = selector
        self._most_queued = most_queued
        self._interval_s = interval_s
        self._waiting: dict[Call, asyncio.Future[Worker]] = {}
        self._sweep_is_due = False
        self._timer: asyncio.TimerHandle | None = None
        fleet.on_change = self.changed

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def acquire(self, call: Call) -> Worker:
        """A worker with a slot for the request, which the caller must `release`. Raises `NoWorker`."""
        if not self._waiting and (worker := self._take(call)) is not None:
            return worker
        if len(self._waiting) >= self._most_queued:
            raise NoWorker(f"{len(self._waiting)} requests wait already: {self._selector.why_not(call)}")
        slot: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._waiting[call] = slot
        self.changed()
        self._start_timer()
        try:
            await asyncio.wait([slot], timeout=max(0.0, call.queue_deadline_s - time.monotonic()))
        except asyncio.CancelledError:
            if slot.done():
                self.release(call, slot.result())
            raise
        finally:
            self._waiting.pop(call, None)
        if slot.done():
            return slot.result()
        waited_s = time.monotonic() - call.arrived_s
        raise NoWorker(f"no worker in {waited_s:.1f} s: {self._selector.why_not(call)}")

    def release(self, call: Call, worker: Worker) -> None:
        worker.in_flight -= 1
        worker.tokens -= call.cost_tokens
        call.cost_tokens = 0
        self._fleet.released(worker)
        self.changed()

    def changed(self) -> None:
        """Something is free, or otherwise as it was not before."""
        if self._waiting and not self._sweep_is_due:
            self._sweep_is_due = True
            asyncio.get_running_loop().call_soon(self._sweep)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _take(self, call: Call) -> Worker | None:
        worker = self._selector.pick(call)
        if worker is not None:
            call.cost_tokens = call.estimated_tokens()
            worker.in_flight += 1
            worker.tokens += call.cost_tokens
            worker.served += 1
            self._selector.taken(call, worker)
        return worker

    def _sweep(self) -> None:
        self._sweep_is_due = False
        # Thousands may wait for the same weights: whether there are any is asked once.
        hopeless: set[str | None] = set()
        for call, slot in list(self._waiting.items()):
            if call.tag in hopeless or slot.done():
                continue
            if not self._selector.has_room(call.tag):
                hopeless.add(call.tag)
                continue
            worker = self._take(call)
            if worker is not None:
                slot.set_result(worker)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._waiting:
            self.changed()
            self._start_timer()
