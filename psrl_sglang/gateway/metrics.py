"""The gateway's own metrics, in a registry of their own."""

from __future__ import annotations

import logging
from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from psrl_sglang.gateway.fleet import Fleet
from psrl_sglang.gateway.moves import Brought

logger = logging.getLogger(__name__)

_MOVE_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
MOVE_RESULTS = ("ok", "miss", "timeout", "error")
SKIP_REASONS = (
    "disabled",
    "no_endpoint",
    "unequal_ranks",
    "no_version",
    "no_tokens",
    "batch",
    "malformed",
)
OUTCOMES = ("done", "broken", "client_gone", "no_worker", "no_reply", "refused")


class Metrics:
    def __init__(self, fleet: Fleet, queued: Callable[[], int], sessions: Callable[[], int]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Gauges(fleet, queued, sessions))
        self.requests = Counter(
            "psrl_gateway_requests", "Requests by what became of them.", ["outcome"], registry=self._registry
        )
        self.retries = Counter(
            "psrl_gateway_retries", "Requests sent to another worker.", ["reason"], registry=self._registry
        )
        self.loopbacks = Counter(
            "psrl_gateway_loopbacks", "Aborted answers that were taken up again.", registry=self._registry
        )
        self.not_continued = Counter(
            "psrl_gateway_aborts", "Aborted answers that were not.", ["reason"], registry=self._registry
        )
        self.moves = Counter(
            "psrl_gateway_kv_moves", "Moves of KV before a turn.", ["result"], registry=self._registry
        )
        self.skipped = Counter(
            "psrl_gateway_kv_moves_skipped", "Turns without a move.", ["reason"], registry=self._registry
        )
        self.moved_tokens = Counter(
            "psrl_gateway_kv_moved_tokens", "Tokens whose KV was moved.", registry=self._registry
        )
        self.move_seconds = Histogram(
            "psrl_gateway_kv_move_seconds",
            "Seconds of a move, its wait for its turn included.",
            buckets=_MOVE_SECONDS,
            registry=self._registry,
        )
        self.unauthorized = Counter(
            "psrl_gateway_unauthorized", "Requests without the token.", registry=self._registry
        )
        # A series that appears with its first event cannot be seen to have grown by it.
        for result in MOVE_RESULTS:
            self.moves.labels(result)
        for reason in SKIP_REASONS:
            self.skipped.labels(reason)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.tally: Tally[str] = Tally()
        self._told: Tally[str] = Tally()

    def count_move(self, brought: Brought, seconds: float) -> None:
        if brought.outcome == "skipped":
            self.skipped.labels(brought.reason).inc()
            self.tally[f"skipped:{brought.reason}"] += 1
            return
        self.moves.labels(brought.outcome).inc()
        self.moved_tokens.inc(brought.tokens)
        self.move_seconds.observe(seconds)
        self.tally[brought.outcome] += 1
        self.tally["tokens"] += brought.tokens

    def log_moves(self) -> None:
        """A line about the moves since the last one, if there were any."""
        new = self.tally - self._told
        if not new:
            return
        self._told = Tally(self.tally)
        tried = sum(new[result] for result in MOVE_RESULTS)
        counts = " ".join(f"{name}={count}" for name, count in sorted(new.items()))
        share = f" success_rate={new['ok'] / tried:.2f}" if tried else ""
        logger.info("KV moves: %s total=%d%s", counts, tried, share)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Gauges(Collector):
    """Read off the fleet when they are asked for."""

    def __init__(self, fleet: Fleet, queued: Callable[[], int], sessions: Callable[[], int]) -> None:
        self._fleet, self._queued, self._sessions = fleet, queued, sessions

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("psrl_gateway_worker_up", "1 if it answers.", labels=["worker"])
        running = GaugeMetricFamily(
            "psrl_gateway_worker_requests", "Requests under way on a worker.", labels=["worker"]
        )
        for worker in self._fleet.workers():
            up.add_metric([worker.url], float(worker.is_up))
            running.add_metric([worker.url], worker.in_flight)
        yield up
        yield running
        yield GaugeMetricFamily("psrl_gateway_queued", "Requests that wait for a worker.", value=self._queued())
        yield GaugeMetricFamily("psrl_gateway_sessions", "Sessions remembered.", value=self._sessions())
