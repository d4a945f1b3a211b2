"""Agent sessions whose every turn goes to another engine, weights that change meanwhile, and an engine that dies.

The gateway sends turns round robin, so that each finds its KV at its engine only if it was moved there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from psrl_sglang.lab.demo_ledger import PageLedger
from psrl_sglang.lab.demo_request import Leg, RequestFailed, send
from psrl_sglang.lab.demo_trainer import Trainer
from psrl_sglang.lab.fleet import Fleet
from psrl_sglang.lab.sessions import Session

CONCURRENCY = 4
_PAGE_TOKENS = 16
_REQUEST_TIMEOUT_S = 120.0
_MOST_TRIES = 8
_RETRY_S = 0.5
_UPDATE_MODES = ("in_place", "retract")


@dataclass
class Rerouted:
    """What the clients of one fleet saw, and what its engines counted."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    repeated_tokens: int = 0  # computed although some engine had computed them under the same weights
    stale_tokens: int = 0
    moved_tokens: int = 0
    moved_bytes: int = 0
    retried: int = 0
    updates: int = 0
    failed_updates: int = 0
    wall_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True)
class Plan:
    """An update every ``turns_per_sync`` turns; the second engine is killed after ``kill_after`` (0: never)."""

    sessions: Sequence[Session]
    turns_per_sync: int
    kill_after: int = 0


class RerouteRun:
    """Plays a plan once against a fleet."""

    def __init__(self, fleet: Fleet, plan: Plan) -> None:
        self.outcome = Rerouted()
        self._fleet = fleet
        self._plan = plan
        self._version = 1
        self._started = 0
        self._ledgers: dict[str, PageLedger] = {}
        self._anywhere = PageLedger(_PAGE_TOKENS)
        self._has_ended = False
        self._changed = asyncio.Event()
        self._is_down = False
        self._updating = asyncio.Lock()
        self._lost: list[dict[str, Any]] = []

    async def run(self, *, timeout_s: float) -> Rerouted:
        began_s = time.perf_counter()
        waiting = iter(self._plan.sessions)
        async with (
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(base_url=self._fleet.url, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            others = [group.create_task(self._train()), group.create_task(self._kill())]
            await asyncio.gather(*(self._play(client, waiting) for _ in range(CONCURRENCY)))
            self._has_ended = True
            self._changed.set()
            await asyncio.gather(*others)
        self.outcome.wall_s = time.perf_counter() - began_s
        self._count()
        return self.outcome

    async def _play(self, client: httpx.AsyncClient, waiting: Iterator[Session]) -> None:
        for session in waiting:
            sequence: list[int] = []
            for number, turn in enumerate(session.turns):
                prompt = session.prompt(number, sequence)
                self._started += 1
                self._changed.set()
                leg = await self._turn(client, session.session_id, prompt, turn.output_tokens)
                sequence = prompt + list(leg.output_ids)
                self.outcome.turns += 1

    async def _turn(
        self, client: httpx.AsyncClient, session: str, prompt: list[int], output_tokens: int
    ) -> Leg:
        """One turn; asked again where its engine died in mid-answer, which no gateway can hide."""
        began_s = time.perf_counter()
        headers = {"x-smg-routing-key": session}
        for _ in range(_MOST_TRIES):
            leg = Leg(tuple(prompt), output_tokens, self._version)
            version = self._version
            try:
                await send(client, leg, on_chunk=lambda _: None, timeout_s=_REQUEST_TIMEOUT_S, headers=headers)
            except (RequestFailed, httpx.HTTPError):
                self.outcome.retried += 1
                await asyncio.sleep(_RETRY_S)
                continue
            leg.in_flight_at_update = version != self._version
            assert leg.first_token_at_s is not None
            self.outcome.ttft_s.append(leg.first_token_at_s - began_s)
            self._note(leg)
            return leg
        raise RequestFailed(f"a turn failed {_MOST_TRIES} times")

    def _note(self, leg: Leg) -> None:
        self.outcome.legs.append(leg)
        self.outcome.prompt_tokens += len(leg.prompt)
        self.outcome.cached_tokens += leg.cached_tokens
        known_tokens = self._anywhere.leading_tokens(leg.prompt[:-1], leg.first_version)
        self.outcome.repeated_tokens += max(0, known_tokens - leg.cached_tokens)
        sequence = (leg.prompt + leg.output_ids)[:-1]
        versions = leg.kv_versions(retracted_prompt_is_reused=True)[:-1]
        self._anywhere.record(sequence, versions, leg.cached_tokens)
        if self._fleet.way.max_version_lag is None:
            ledger = self._ledgers.setdefault(leg.worker, PageLedger(_PAGE_TOKENS))
            reuse = ledger.reuse(leg.prompt, leg.cached_tokens, leg.first_version)
            self.outcome.stale_tokens += reuse.stale_tokens
            ledger.record(sequence, versions, leg.cached_tokens)

    async def _train(self) -> None:
        due = self._plan.turns_per_sync
        while await self._until(due):
            due += self._plan.turns_per_sync
            mode = _UPDATE_MODES[self._version % len(_UPDATE_MODES)]
            async with self._updating:  # an engine dies between two updates, not in one
                await asyncio.gather(*(self._sync(number, mode) for number in range(len(self._fleet.engines))))
                self._version += 1
                self.outcome.updates += 1

    async def _sync(self, number: int, mode: str) -> None:
        if self._is_down and number == 1:
            return  # it comes back with the weights of then
        url = self._fleet.engines[number].url
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            trainer = Trainer(client, self._fleet.models, self._fleet.way.flush, version=self._version)

            def on_installed(gave_back_kv: bool) -> None:
                if self._fleet.way.flush and url in self._ledgers:
                    self._ledgers[url].forget()

            await trainer.sync(mode, on_installed=on_installed)
            self.outcome.failed_updates += trainer.failed_updates + trainer.failed_flushes

    async def _kill(self) -> None:
        if not self._plan.kill_after or not await self._until(self._plan.kill_after):
            return
        async with self._updating:
            self._lost = self._fleet.statuses()[1:]
            self._is_down = True
            self._fleet.kill(1)
            self._ledgers.pop(self._fleet.engines[1].url, None)
        while self._is_down:
            version = self._version
            await asyncio.to_thread(self._fleet.revive, 1, version)
            async with self._updating:
                self._is_down = version != self._version

    async def _until(self, turns: int) -> bool:
        """Wait until so many turns have started; False when there will not be so many."""
        while self._started < turns and not self._has_ended:
            self._changed.clear()
            await self._changed.wait()
        return not self._has_ended

    def _count(self) -> None:
        for status in [*self._lost, *self._fleet.statuses()]:
            self.outcome.stale_tokens += sum(status["counters"].get("stale_tokens_by_lag", {}).values())
            for entry in status["tiers"]["counters"]:
                if entry["labels"].get("direction") == "out":
                    self.outcome.moved_tokens += int(entry["total"]) if entry["name"] == "move_tokens" else 0
                    self.outcome.moved_bytes += int(entry["total"]) if entry["name"] == "move_bytes" else 0
