"""Growth of the gateway: simulated engines, sessions and versions, against what the choice of an engine takes.

The gateway's own queue, selection, policies and books, without HTTP: a request gets an engine, its session is
remembered there, and it ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable

from results import Row

from psrl_sglang.gateway.admission import Admission
from psrl_sglang.gateway.call import Call, read_call
from psrl_sglang.gateway.fleet import Fleet
from psrl_sglang.gateway.holders import Holders
from psrl_sglang.gateway.policies import make_policy
from psrl_sglang.gateway.selection import Selector
from psrl_sglang.gateway.settings import Method, RoutingSettings, Settings
from psrl_sglang.gateway.turns import Turns

METHODS: tuple[Method, ...] = (
    "random",
    "round_robin",
    "request_num_balance",
    "cache_aware",
    "cache_aware_v1",
    "throughput_optimal",
)
ENGINES = 1000
_SESSIONS = 2000
_ROUNDS = 5
_REQUESTS = 60  # a round
_SYSTEM = b'{"input_ids": [7' + b", 7" * 1365  # 4 KiB, which the prompts of all sessions begin with
_OWN_BYTES = 4096  # of a prompt, behind that
_MOST_UNDER_WAY = 8  # requests of one engine before the measurement
_COSTS = {
    "TP1_PP1": {
        "attn_latency_b": 0.002,
        "attn_latency_k": 1e-7,
        "other_latency_b": 0.004,
        "other_latency_k": 5e-5,
        "other_threshold": 0.008,
    }
}


class _Gateway:
    def __init__(self, engines: int, sessions: int, method: Method, *, versions: int = 1, sticky: bool = False):
        self._source = random.Random(1)
        self._sessions = sessions
        self._oldest = "1"
        self.fleet = Fleet()
        with tempfile.NamedTemporaryFile("w", suffix=".json") as costs:
            json.dump(_COSTS, costs)
            costs.flush()
            routing = RoutingSettings(
                method=method, cost_model_path=costs.name, enable_trajectory_sticky=sticky
            )
            settings = Settings(routing=routing)
            self.holders = Holders(self.fleet, settings.gateway.max_sessions)
            policy = make_policy(settings, self.holders)
        for number in range(engines):
            worker = self.fleet.add(f"http://engine-{number}:30000", "api")
            self.fleet.restore(worker, str(1 + number % versions))
            worker.in_flight = self._source.randrange(_MOST_UNDER_WAY)
            worker.tokens = 4000 * worker.in_flight
        workers = self.fleet.workers()
        for number in range(sessions):
            self.holders.served(f"session-{number:08}", workers[number % engines], 4000)
        self._selector = Selector(self.fleet, self.holders, policy, settings.routing)
        self._admission = Admission(self.fleet, self._selector, most_queued=0, interval_s=1.0)
        for worker in workers:  # each has seen the prompt that all begin with
            policy.served(self._call(0, _SYSTEM), worker)

    def calls(self, count: int) -> list[Call]:
        """Turns of sessions that are known here, each with its own history behind the common prompt."""
        calls = []
        for _ in range(count):
            number = self._source.randrange(self._sessions)
            own = b"".join(b", %05d" % (10000 + (number + at) % 80000) for at in range(_OWN_BYTES // 7))
            calls.append(self._call(number, _SYSTEM + own + b"]}"))
        return calls

    async def serve(self, call: Call) -> None:
        worker = await self._admission.acquire(call)
        self.holders.served(call.session, worker, 4000)
        self._admission.release(call, worker)

    def _call(self, number: int, body: bytes) -> Call:
        headers = {"x-smg-routing-key": f"session-{number:08}", "x-version-tag": self._oldest}
        return read_call("/generate", "", body, headers, 1.0, consumed=frozenset())


def by_engines(engines: int) -> list[Row]:
    rows = []
    for method in METHODS:
        gateway = _Gateway(engines, _SESSIONS, method)
        rows.append(_row(method, "engines", engines, "choice of an engine", 1e6 * _request_s(gateway), "us"))
        peak_bytes = _peak_bytes(gateway)
        rows.append(_row(method, "engines", engines, "memory for the choice, at most", peak_bytes / 1e3, "kB"))
    sticky = _Gateway(engines, _SESSIONS, "request_num_balance", sticky=True)
    rows.append(
        _row("sticky sessions", "engines", engines, "choice of an engine", 1e6 * _request_s(sticky), "us")
    )
    return rows


def by_sessions(sessions: int, engines: int = ENGINES) -> list[Row]:
    rows = []
    for method in ("request_num_balance", "cache_aware"):
        case = f"{method}, {engines:,} engines"
        gateway = _Gateway(engines, sessions, method, sticky=method == "request_num_balance")
        case = f"{case}, sticky" if method == "request_num_balance" else case
        rows.append(_row(case, "sessions", sessions, "choice of an engine", 1e6 * _request_s(gateway), "us"))
    return rows + _remembered(sessions)


def by_versions(versions: int, engines: int = ENGINES) -> list[Row]:
    """Engines of so many versions; requests may go to all of them, the oldest first."""
    gateway = _Gateway(engines, _SESSIONS, "request_num_balance", versions=versions)
    case = f"request_num_balance, {engines:,} engines"
    return [_row(case, "versions", versions, "choice of an engine", 1e6 * _request_s(gateway), "us")]


def _remembered(sessions: int) -> list[Row]:
    """What sessions take that are known, and those that were made by `POST /sessions` and may be held back."""
    fleet = Fleet()
    worker = fleet.add("http://engine-0:30000", "api")
    tracemalloc.start()
    holders = Holders(fleet, sessions)
    for number in range(sessions):
        holders.served(f"session-{number:08}", worker, 4000)
    gc.collect()
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    turns = Turns(most=sessions, most_waiting=8, timeout_s=1.0, tokens_of=holders.tokens)
    for number in range(sessions):
        turns.create(f"session-{number:08}")

    def hold(count: int | None, ids: list[str] | None) -> Callable[[], None]:
        def once() -> None:
            assert len(turns.resume(ids=turns.hang(ids=ids, count=count))) == 1

        return once

    def row(metric: str, value: float, unit: str) -> Row:
        return _row("gateway", "sessions", sessions, metric, value, unit)

    return [
        row("memory of a remembered session", taken_bytes / sessions, "bytes"),
        row("one session held back and let go, by id", 1e3 * _median(hold(None, ["session-00000007"])), "ms"),
        row("one session held back and let go, by count", 1e3 * _median(hold(1, None)), "ms"),
    ]


def _row(case: str, x_name: str, x: int, metric: str, value: float, unit: str) -> Row:
    case = case if case.startswith("gateway") else f"gateway, {case}"
    return Row(benchmark="growth", case=case, x_name=x_name, x=x, metric=metric, value=value, unit=unit)


def _request_s(gateway: _Gateway) -> float:
    """Of one request: the median round's mean."""

    async def rounds() -> list[float]:
        found = []
        for _ in range(_ROUNDS):
            calls = gateway.calls(_REQUESTS)
            began_s = time.thread_time()
            for call in calls:
                await gateway.serve(call)
            found.append((time.thread_time() - began_s) / _REQUESTS)
        return found

    return statistics.median(asyncio.run(rounds()))


def _peak_bytes(gateway: _Gateway) -> int:
    """What one choice allocates beyond the request, at its worst moment."""
    [call] = gateway.calls(1)

    async def peak() -> int:
        await gateway.serve(call)  # what is made once
        began_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        await gateway.serve(call)
        return tracemalloc.get_traced_memory()[1] - began_bytes

    tracemalloc.start()
    try:
        return asyncio.run(peak())
    finally:
        tracemalloc.stop()


def _median(action: Callable[[], None]) -> float:
    times = []
    for _ in range(_ROUNDS):
        began_s = time.thread_time()
        action()
        times.append(time.thread_time() - began_s)
    return statistics.median(times)
