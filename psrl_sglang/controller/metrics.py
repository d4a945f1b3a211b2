"""The controller's own metrics, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from psrl_sglang.controller.frames import REASONS
from psrl_sglang.controller.recent import Move, Sessions
from psrl_sglang.controller.registry import Registry

_MOVE_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_OUTCOMES = ("moved", "present", "nothing", "failed")


class Metrics:
    def __init__(self, registry: Registry, sessions: Sessions) -> None:
        self._collectors = CollectorRegistry(auto_describe=False)
        self._collectors.register(_Gauges(registry, sessions))
        self.rejected = Counter(
            "psrl_controller_frames_rejected",
            "Frames of workers that were refused.",
            ["reason"],
            registry=self._collectors,
        )
        self.moves = Counter(
            "psrl_controller_moves", "Moves of a rank's KV.", ["outcome"], registry=self._collectors
        )
        self.moved_tokens = Counter(
            "psrl_controller_moved_tokens", "Tokens moved, over all ranks.", registry=self._collectors
        )
        self.moved_bytes = Counter(
            "psrl_controller_moved_bytes", "Bytes moved, over all ranks.", registry=self._collectors
        )
        self.move_seconds = Histogram(
            "psrl_controller_move_seconds",
            "Seconds of a move that moved something.",
            buckets=_MOVE_SECONDS,
            registry=self._collectors,
        )
        self.unauthorized = Counter(
            "psrl_controller_http_unauthorized", "HTTP requests without the token.", registry=self._collectors
        )
        # A series that appears with its first event cannot be seen to have grown by it.
        for reason in REASONS:
            self.rejected.labels(reason)
        for outcome in _OUTCOMES:
            self.moves.labels(outcome)

    def count(self, move: Move) -> None:
        self.moves.labels(move.outcome).inc()
        self.moved_tokens.inc(max(0, move.record.num_tokens))
        self.moved_bytes.inc(max(0, move.record.size_bytes))
        if move.outcome == "moved":
            self.move_seconds.observe(move.record.seconds)

    def text(self) -> bytes:
        return generate_latest(self._collectors)


class _Gauges(Collector):
    """Read off the registry when they are asked for."""

    def __init__(self, registry: Registry, sessions: Sessions) -> None:
        self._registry = registry
        self._sessions = sessions

    def collect(self) -> Iterable[Metric]:
        registry = self._registry
        states = {"live": 0, "late": 0}
        for worker in registry.workers():
            states[registry.state(worker)] += 1
        yield GaugeMetricFamily(
            "psrl_controller_instances", "Instances registered.", value=len(registry.instance_ids)
        )
        workers = GaugeMetricFamily(
            "psrl_controller_workers", "Workers registered, by state.", labels=["state"]
        )
        for state, number in states.items():
            workers.add_metric([state], number)
        yield workers
        yield GaugeMetricFamily(
            "psrl_controller_chunks", "Chunks held, over all workers and locations.", value=len(registry.index)
        )
        yield GaugeMetricFamily(
            "psrl_controller_sessions", "Sessions with a known holder.", value=len(self._sessions)
        )
