"""Asking the workers whether they are there, at which version, and where their move workers listen.

A worker that is out is asked again soon, then less often; one that is up at a fixed interval.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from psrl_sglang.gateway.fleet import Fleet, MoveAddresses, Worker
from psrl_sglang.gateway.upstream import NoReply, Upstream, WorkerUnreachable

logger = logging.getLogger(__name__)

_SOON_S = 0.1
_ADDRESSES_EVERY = 15
_SILENT_PROBES = 3


class Prober:
    """Owns a task for each worker of the fleet, from its joining to its leaving."""

    def __init__(
        self, fleet: Fleet, upstream: Upstream, *, interval_s: float, timeout_s: float, wants_addresses: bool
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._wants_addresses = wants_addresses
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._due: dict[Worker, asyncio.Event] = {}
        fleet.on_join, fleet.on_leave, fleet.on_trouble = self._join, self._leave, self._trouble
        for worker in fleet.workers():
            self._join(worker)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _join(self, worker: Worker) -> None:
        self._due[worker] = asyncio.Event()
        self._tasks[worker] = asyncio.get_running_loop().create_task(self._watch(worker))

    def _leave(self, worker: Worker) -> None:
        self._due.pop(worker).set()
        self._tasks.pop(worker).cancel()

    def _trouble(self, worker: Worker) -> None:
        if (due := self._due.get(worker)) is not None:
            due.set()

    async def _watch(self, worker: Worker) -> None:
        wait_s, silent, round_number = _SOON_S, 0, 0
        while True:
            due = self._due[worker]
            due.clear()
            try:
                await self._probe(worker, round_number)
                silent = 0
            except WorkerUnreachable as error:
                self._note_failure(worker, str(error), is_gone=True)
            except NoReply as error:
                # Busy is not dead: only silence that lasts counts, unless it is out already.
                silent += 1
                if silent >= _SILENT_PROBES or not worker.is_up:
                    self._note_failure(worker, str(error), is_gone=False)
            round_number += 1
            wait_s = self._interval_s if worker.is_up else min(self._interval_s, wait_s * 2)
            try:
                async with asyncio.timeout(wait_s):
                    await due.wait()
                wait_s = _SOON_S
            except TimeoutError:
                continue

    def _note_failure(self, worker: Worker, reason: str, *, is_gone: bool) -> None:
        self._fleet.fail(worker, reason, is_gone=is_gone)
        self._due[worker].clear()  # of its own making

    async def _probe(self, worker: Worker, round_number: int) -> None:
        generation = worker.generation
        status, info = await self._upstream.ask("GET", f"{worker.url}/model_info", self._timeout_s)
        if status == 404:
            status, info = await self._upstream.ask("GET", f"{worker.url}/get_model_info", self._timeout_s)
        if status >= 500:
            raise NoReply(f"/model_info answered {status}")
        version = info.get("weight_version") if isinstance(info, dict) else None
        if worker.generation != generation and worker.is_up:
            return  # an answer from before a loss
        self._fleet.restore(worker, str(version) if version is not None else None)
        if self._wants_addresses and (worker.addresses is None or round_number % _ADDRESSES_EVERY == 0):
            await self._learn_addresses(worker)

    async def _learn_addresses(self, worker: Worker) -> None:
        try:
            status, told = await self._upstream.ask("GET", f"{worker.url}/psrl/v1/status", self._timeout_s)
        except NoReply as error:
            logger.info("%s does not say where its move workers are: %s", worker.url, error)
            return
        if status == 200 and (addresses := read_addresses(told)) is not None:
            worker.addresses = addresses


def read_addresses(status: Any) -> MoveAddresses | None:
    """From an engine's ``/psrl/v1/status``; None where it moves no KV."""
    moves = status.get("moves") if isinstance(status, dict) else None
    if not isinstance(moves, dict):
        return None
    ranks = moves.get("ranks")
    ranks = ranks if isinstance(ranks, list) and ranks else [moves]
    try:
        return MoveAddresses(
            tuple(str(rank["command_address"]) for rank in ranks),
            tuple(str(rank["data_address"]) for rank in ranks),
        )
    except (KeyError, TypeError):
        return None
