"""One column of the demo: the agent sessions on one engine, and weight updates while they run."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from psrl_sglang.lab.demo_ledger import PageLedger
from psrl_sglang.lab.demo_request import Leg, RequestFailed, concatenated, send
from psrl_sglang.lab.demo_trainer import MODES, Trainer
from psrl_sglang.lab.sessions import Session

PAGE_TOKENS = 16
CHUNK_TOKENS = 64  # of DRAM and disk; sessions are short here
DISK_GIB = 1.0
_STILL_TO_COME_TOKENS = 4
_REQUEST_TIMEOUT_S = 120.0
_MOMENT_PATIENCE_S = 5.0
_MAX_LEGS = 20
# Traces hold seconds to minutes of tools and people; the demo keeps their order of size, not their length.
_LONGEST_PAUSE_S = 25.0


@dataclass(frozen=True)
class Scene:
    """What columns that are compared with each other have in common: so many sessions at a time, an update every
    so many turns, the device pool, and how much of the pauses between turns is kept. `is_of_tiers` is whether the
    comparison is about tiers."""

    title: str
    concurrency: int
    turns_per_sync: int
    pool_tokens: int
    pause_scale: float
    is_of_tiers: bool = False


@dataclass(frozen=True)
class Column:
    """One way to run the engine; `max_version_lag` None is stock SGLang.

    `flush` is whether its trainer flushes. `dram_tokens` is for how many tokens there is DRAM behind the device,
    `has_disk` whether there is a disk behind that.
    """

    key: str
    title: str
    scene: Scene
    max_version_lag: int | None = None
    flush: bool = False
    dram_tokens: int = 0
    has_disk: bool = False

    @property
    def is_psrl(self) -> bool:
        return self.max_version_lag is not None

    @property
    def is_strict(self) -> bool:
        """Whether the plugin promises that nothing stale is served."""
        return self.max_version_lag == 0

    @property
    def reuses_old_kv(self) -> bool:
        """Whether a request admitted now may be served KV computed with earlier weights."""
        return not self.flush and not self.is_strict

    def psrl_config(self, *, bytes_per_token: int, disk_path: Path) -> Mapping[str, Any] | None:
        """The settings of its engine; None for stock SGLang."""
        if not self.is_psrl:
            return None
        psrl: dict[str, Any] = {"sglang": {"max_version_lag": self.max_version_lag}}
        if self.dram_tokens:
            psrl["lmcache"] = {
                "enable": True,
                "offload_size_gb": self.dram_tokens * bytes_per_token / 2**30,
                "chunk_size": CHUNK_TOKENS,
            }
        if self.has_disk:
            psrl["lmcache"] |= {"backend": "disk", "disk_path": str(disk_path), "max_disk_size_gb": DISK_GIB}
        return {"psrl": psrl}


@dataclass(frozen=True)
class Workload:
    """What every column runs."""

    sessions: tuple[Session, ...]

    @property
    def turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    def sync_points(self, scene: Scene) -> list[int]:
        """Numbers of started turns at which an update is due; none so late that little could follow it."""
        step = scene.turns_per_sync
        return list(range(step, self.turns - step // 2, step))


@dataclass
class Outcome:
    """What a column did and what the engine and the client saw of it."""

    column: Column
    turns_done: int = 0
    sessions_done: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    dram_tokens: int = 0
    disk_tokens: int = 0
    repeated_tokens: int = 0
    client_stale_tokens: int = 0
    engine_prefill_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    counters: Mapping[str, Any] | None = None
    tiers: Mapping[str, Any] | None = None
    wall_s: float = 0.0

    @property
    def device_tokens(self) -> int:
        """Prompt tokens that were on the device."""
        return self.cached_tokens - self.dram_tokens - self.disk_tokens

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the cache did not serve."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def stale_by_lag(self) -> dict[int, int]:
        """The engine's own count, where it has one."""
        counts = (self.counters or {}).get("stale_tokens_by_lag", {})
        return {int(lag): tokens for lag, tokens in counts.items()}

    @property
    def stale_tokens(self) -> int:
        """By the engine's counter with psrl, by the client's ledger without."""
        return self.client_stale_tokens if self.counters is None else sum(self.stale_by_lag.values())

    def tier_total(self, name: str, **labels: str) -> float:
        """One of the engine's counters of its tiers; 0 without tiers."""
        counters = (self.tiers or {}).get("counters", ())
        return sum(c["total"] for c in counters if c["name"] == name and labels.items() <= c["labels"].items())


class ColumnRun:
    """Runs a workload once against the engine at `client`'s base URL; `run` may be called once."""

    def __init__(
        self,
        column: Column,
        workload: Workload,
        trainer: Trainer,
        client: httpx.AsyncClient,
        *,
        on_progress: Callable[["ColumnRun"], None],
    ) -> None:
        self.outcome = Outcome(column)
        self.trainer = trainer
        self._workload = workload
        self._client = client
        self._on_progress = on_progress
        self._ledger = PageLedger(PAGE_TOKENS)
        self._legs: dict[int, Leg] = {}
        self._started_turns = 0
        self._ended = False
        self._changed = asyncio.Event()

    async def run(self, *, timeout_s: float) -> Outcome:
        """Play all sessions; raises TimeoutError when that takes longer than `timeout_s`."""
        began_s = time.perf_counter()
        waiting = iter(self._workload.sessions)
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            syncs = group.create_task(self._train())
            players = [
                group.create_task(self._play(waiting)) for _ in range(self.outcome.column.scene.concurrency)
            ]
            await asyncio.wait(players)
            self._ended = True
            self._note()
            await syncs
        self.outcome.wall_s = time.perf_counter() - began_s
        await self._read_engine()
        return self.outcome

    async def _play(self, waiting: Iterator[Session]) -> None:
        scene = self.outcome.column.scene
        for session in waiting:
            sequence: list[int] = []
            version = self._expected_version()
            for number, turn in enumerate(session.turns):
                if number:
                    await asyncio.sleep(min(turn.think_s, _LONGEST_PAUSE_S) * scene.pause_scale)
                prompt = session.prompt(number, sequence)
                legs = await self._turn(prompt, turn.output_tokens, version)
                sequence = prompt + list(concatenated(legs))
                version = legs[-1].first_version
                self.outcome.turns_done += 1
                self._note()
            self.outcome.sessions_done += 1

    async def _turn(self, prompt: list[int], output_tokens: int, session_version: int) -> list[Leg]:
        """Answer one prompt, sending it again with the tokens so far whenever it is aborted."""
        self._started_turns += 1
        self._note()
        began_s = time.perf_counter()
        legs: list[Leg] = []
        while len(done := concatenated(legs)) < output_tokens:
            if len(legs) == _MAX_LEGS:
                raise RequestFailed(f"aborted {_MAX_LEGS} times with {len(done)} of {output_tokens} tokens")
            leg = Leg(tuple(prompt) + done, output_tokens - len(done), self._expected_version())
            leg.resumes_session_after_sync = leg.sent_under > session_version
            await self._leg(leg)
            legs.append(leg)
        first_s = min(leg.first_token_at_s for leg in legs if leg.first_token_at_s is not None)
        self.outcome.ttft_s.append(first_s - began_s)
        return legs

    async def _leg(self, leg: Leg) -> None:
        def on_chunk(is_first: bool) -> None:
            if is_first:
                self._admit(leg)
            self._note()

        self._legs[id(leg)] = leg
        try:
            await send(self._client, leg, on_chunk=on_chunk, timeout_s=_REQUEST_TIMEOUT_S)
        finally:
            del self._legs[id(leg)]
        if leg.output_ids:
            self._settle(leg)
        elif not leg.is_aborted:
            raise RequestFailed(f"no token and no abort: {leg.meta}")

    def _admit(self, leg: Leg) -> None:
        """The first token is here: the prompt has been computed, and what the cache served is known."""
        reuse = self._ledger.reuse(leg.prompt, leg.cached_tokens, leg.sent_under)
        self.outcome.client_stale_tokens += reuse.stale_tokens
        self.outcome.repeated_tokens += reuse.repeated_tokens
        self.outcome.prompt_tokens += len(leg.prompt)
        self.outcome.cached_tokens += leg.cached_tokens
        self.outcome.dram_tokens += leg.cached_from("host")
        self.outcome.disk_tokens += leg.cached_from("storage")
        self._ledger.record(leg.prompt, [leg.version] * len(leg.prompt), leg.cached_tokens)

    def _settle(self, leg: Leg) -> None:
        """The request has ended: the KV of its output is in the cache, that of the last token excepted."""
        reused = self.outcome.column.reuses_old_kv
        versions = leg.kv_versions(retracted_prompt_is_reused=reused)
        again = leg.recomputed_under and not reused
        sequence = leg.prompt + leg.output_ids
        self._ledger.record(sequence[:-1], versions[:-1], 0 if again else len(leg.prompt))
        self.outcome.legs.append(leg)

    async def _train(self) -> None:
        for number, started_turns in enumerate(self._workload.sync_points(self.outcome.column.scene)):
            if not await self._moment(started_turns):
                return
            await self.trainer.sync(MODES[number % len(MODES)], on_installed=self._installed)
            self._note()

    async def _moment(self, started_turns: int) -> bool:
        """Wait until so many turns have started and a request is in the middle of its answer.

        False when the sessions have ended. When no request qualifies for a while, now is the moment.
        """
        deadline_s = None
        while not self._ended:
            if self._started_turns >= started_turns:
                if any(leg.has_output_left >= _STILL_TO_COME_TOKENS for leg in self._legs.values()):
                    return True
                deadline_s = deadline_s or time.monotonic() + _MOMENT_PATIENCE_S
                if time.monotonic() > deadline_s:
                    return True
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), _MOMENT_PATIENCE_S)
            except TimeoutError:
                continue
        return False

    def _installed(self, gave_back_kv: bool) -> None:
        """The trainer has installed a version and not yet let the engine go on."""
        if self.trainer.flush:
            self._ledger.forget()
        for leg in self._legs.values():
            # Sent while the engine was paused: not admitted yet, so it does not cross.
            if leg.sent_under == self.trainer.version:
                continue
            leg.in_flight_at_update = True
            if gave_back_kv:
                leg.recomputed_under = self.trainer.version
                if not self.outcome.column.reuses_old_kv:
                    # Computed again as soon as the engine goes on, and then there for others to hit.
                    self._ledger.record(leg.prompt, [self.trainer.version] * len(leg.prompt), 0)

    def _expected_version(self) -> int:
        return self.trainer.version + (1 if self.trainer.is_paused else 0)

    def _note(self) -> None:
        self._changed.set()
        self._on_progress(self)

    async def _read_engine(self) -> None:
        metrics = (await self._client.get("/metrics", follow_redirects=True)).raise_for_status().text
        self.outcome.engine_prefill_tokens = _metric(
            metrics, "sglang:realtime_tokens_total{", 'mode="prefill_compute"'
        )
        if self.outcome.column.is_psrl:
            status = (await self._client.get("/psrl/v1/status")).raise_for_status().json()
            self.outcome.counters, self.outcome.tiers = status["counters"], status["tiers"]


def _metric(text: str, name: str, label: str) -> int:
    """The sum of a counter over all its series with a label, in Prometheus' text format."""
    lines: Sequence[str] = [line for line in text.splitlines() if line.startswith(name) and label in line]
    return round(sum(float(re.split(r"\s+", line)[-1]) for line in lines))
