"""Counters of the version policy, and their form in SGLang's own ``/metrics``.

Plain integers are the truth (``/psrl/v1/status`` shows them, metrics on or off); Prometheus mirrors them when
the server runs with ``--enable-metrics``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


class PrometheusMirror:
    """The Prometheus side. Made after SGLang has set its multiprocess directory, in the scheduler process."""

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        names = list(labels)

        def counter(name: str, text: str, *extra: str) -> Any:
            return Counter(f"psrl:{name}", text, [*names, *extra])

        self.labels = labels
        self._hit_tokens = counter(
            "cache_hit_tokens_total", "Tokens reused at admission, by version lag.", "lag"
        )
        self._miss_tokens = counter("cache_miss_tokens_total", "Tokens computed at admission.")
        self._stale_tokens = counter(
            "stale_tokens_total", "Tokens reused from an older version, by lag.", "lag"
        )
        self._retired = counter("versions_retired_total", "Versions retired.")
        self._capped = counter("requests_crossing_total", "Requests that held KV across a version change.")
        self._changes = counter("version_changes_total", "Changes of the weights' identity.")
        self._change_seconds = Histogram(
            "psrl:version_change_seconds",
            "Scheduler time a version change took, the load of the weights excluded.",
            names,
            buckets=(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0),
        )
        self._oldest = Gauge(
            "psrl:oldest_version_lag_served",
            "Largest version lag of any token served so far.",
            names,
            multiprocess_mode="max",
        )
        always = (self._miss_tokens, self._retired, self._capped, self._changes, self._change_seconds)
        for metric in (*always, self._oldest):
            metric.labels(**labels)  # zero until something happens, so that its first time shows as a change

    def admission(self, reused: int, computed: int, lag: int) -> None:
        self._hit_tokens.labels(**self.labels, lag=str(lag)).inc(reused)
        self._miss_tokens.labels(**self.labels).inc(computed)
        if lag and reused:
            self._stale_tokens.labels(**self.labels, lag=str(lag)).inc(reused)

    def oldest(self, lag: int) -> None:
        self._oldest.labels(**self.labels).set(lag)

    def change(self, crossing: int, seconds: float) -> None:
        self._changes.labels(**self.labels).inc()
        self._capped.labels(**self.labels).inc(crossing)
        self._change_seconds.labels(**self.labels).observe(seconds)

    def retired(self) -> None:
        self._retired.labels(**self.labels).inc()


@dataclass(slots=True)
class VersionMetrics:
    """Written by the scheduler thread of one rank."""

    mirror: PrometheusMirror | None = None
    hit_requests: int = 0
    miss_requests: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    stale_tokens_by_lag: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    oldest_lag_served: int = 0
    changes: int = 0
    crossing_requests: int = 0
    private_tokens: int = 0
    retagged: int = 0
    sessions_dropped: int = 0
    versions_retired: int = 0
    retract_saved_tokens: int = 0
    last_change_s: float = 0.0
    longest_change_s: float = 0.0

    def observe_admission(self, reused: int, computed: int, lag: int) -> None:
        """A request got its row of KV: ``reused`` leading tokens from the cache, ``computed`` to prefill."""
        if reused:
            self.hit_requests += 1
            self.hit_tokens += reused
        else:
            self.miss_requests += 1
        self.computed_tokens += computed
        if lag and reused:
            self.stale_tokens_by_lag[lag] += reused
            if lag > self.oldest_lag_served:
                self.oldest_lag_served = lag
                if self.mirror is not None:
                    self.mirror.oldest(lag)
        if self.mirror is not None:
            self.mirror.admission(reused, computed, lag)

    def observe_change(self, crossing: int, seconds: float) -> None:
        self.changes += 1
        self.crossing_requests += crossing
        self.last_change_s = seconds
        self.longest_change_s = max(self.longest_change_s, seconds)
        if self.mirror is not None:
            self.mirror.change(crossing, seconds)

    def observe_retired(self) -> None:
        self.versions_retired += 1
        if self.mirror is not None:
            self.mirror.retired()

    def snapshot(self) -> dict[str, Any]:
        """All counters as JSON-ready values."""
        names = [name for name in self.__slots__ if name not in ("mirror", "stale_tokens_by_lag")]
        stale = {str(lag): tokens for lag, tokens in sorted(self.stale_tokens_by_lag.items())}
        total = sum(self.stale_tokens_by_lag.values())
        return {name: getattr(self, name) for name in names} | {
            "stale_tokens": total,
            "stale_tokens_by_lag": stale,
        }
