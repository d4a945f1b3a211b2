"""The tiers in SGLang's own ``/metrics``.

Store and engine count into ``StoreStats``. A ``TierMirror`` carries the totals over to Prometheus by difference,
once a second and on a thread of its own, so that an engine with nothing to do shows them too.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from psrl_sglang.engine.estimates import LoadOrRecompute
from psrl_sglang.store.fetch import ReadSpan
from psrl_sglang.store.stats import StoreStats
from psrl_sglang.store.store import KVStore

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_CLOSE_S = 5.0


class _Metric(NamedTuple):
    name: str
    labels: tuple[str, ...]
    text: str


# By the name they are counted under. A label that a count does not have is empty.
COUNTERS = {
    "hit_tokens": _Metric("tier_hit_tokens_total", ("tier",), "Prompt tokens reused, by where they came from."),
    "bytes": _Metric("tier_bytes_total", ("tier", "direction"), "Bytes of KV moved."),
    "seconds": _Metric("tier_seconds_total", ("tier", "direction"), "Seconds that moving KV took."),
    "transfers": _Metric("tier_transfers_total", ("tier", "direction"), "Moves of KV."),
    "evicted_pages": _Metric("tier_evicted_pages_total", ("tier", "reason"), "Pages evicted."),
    "evicted_bytes": _Metric("tier_evicted_bytes_total", ("tier", "reason"), "Bytes of other layouts deleted."),
    "rejected": _Metric("tier_rejected_total", ("tier", "reason"), "Pages not taken; calls, where breaker."),
    "checksum_failures": _Metric("tier_checksum_failures_total", ("tier",), "Reads with a wrong checksum."),
    "bad_files": _Metric("tier_bad_files_total", ("tier",), "Files found torn or foreign."),
    "misses_late": _Metric("tier_late_misses_total", ("tier",), "Chunks gone between look-up and read."),
    "duplicates": _Metric("tier_duplicates_total", ("tier",), "Chunks that the store had already."),
    "errors": _Metric("tier_errors_total", ("tier", "direction", "reason"), "Transfers and calls that failed."),
    "untold_pages": _Metric("tier_untold_pages_total", ("call",), "Pages whose version HiCache did not say."),
    "gate_requests": _Metric("gate_requests_total", ("outcome",), "Requests that waited for KV to be read."),
    "gate_seconds": _Metric("gate_seconds_total", (), "Seconds that requests waited for KV to be read."),
    "moves": _Metric("moves_total", ("direction", "outcome", "transport"), "Moves of KV between engines."),
    "move_tokens": _Metric("move_tokens_total", ("direction",), "Tokens whose KV went over."),
    "move_bytes": _Metric("move_bytes_total", ("direction",), "Bytes of KV moved between engines."),
    "move_seconds": _Metric("move_seconds_total", ("direction",), "Seconds that moves took."),
    "load_decisions": _Metric("load_decisions_total", ("decision",), "Requests with KV in DRAM."),
}
_GAUGES = {
    "used": _Metric("tier_used_bytes", ("tier",), "Bytes in use."),
    "budget": _Metric("tier_budget_bytes", ("tier",), "Bytes that may be in use."),
    "locked": _Metric("tier_page_locked_bytes", ("tier",), "Bytes that a device copies to and from by itself."),
    "depth": _Metric("tier_queue_depth", ("queue",), "Offloads, requests or chunks that wait."),
    "breaker": _Metric("tier_breaker_open", ("tier",), "1 while a remote store is left alone."),
    "prefill": _Metric("prefill_tokens_per_second", (), "Estimated speed of prefill; NaN: not known yet."),
    "load": _Metric("load_bytes_per_second", (), "Estimated speed of loads; NaN: not known yet."),
    "crossover": _Metric(
        "load_crossover_tokens", (), "Tokens from which on a load is cheaper; +Inf: never, NaN: not known yet."
    ),
}


class TierMirror:
    """The Prometheus side of one store at a time. Owns its thread until ``close``.

    Made after SGLang has set its multiprocess directory, in the scheduler process. ``queues`` tells the depths
    that the store does not know; it is called on the thread.
    """

    def __init__(
        self,
        labels: dict[str, str],
        store: KVStore,
        *,
        choice: LoadOrRecompute | None = None,
        queues: Callable[[], dict[str, int]] = dict,
        period_s: float = _PERIOD_S,
        registry: Any = None,
    ) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = registry or REGISTRY
        self._labels = labels
        self._store = store
        self._choice = choice
        self._queues = queues
        self._counters = {
            key: Counter(f"psrl:{name}", text, [*labels, *extra], registry=registry)
            for key, (name, extra, text) in COUNTERS.items()
        }
        self._gauges = {
            key: Gauge(
                f"psrl:{name}", text, [*labels, *extra], registry=registry, multiprocess_mode="mostrecent"
            )
            for key, (name, extra, text) in _GAUGES.items()
        }
        self._seen: dict[Any, float] = {}
        self._lock = threading.Lock()
        for name, known in _from_the_start(store, has_gate=choice is not None):
            self._counter(name, known)
        self.update()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(period_s,), name="psrl-metrics", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def follow(self, store: KVStore) -> None:
        """Mirror another store from now on. It takes the place of the one so far, whose totals stay counted."""
        self.update()
        with self._lock:
            self._store = store
            self._seen.clear()

    def update(self) -> None:
        """Bring Prometheus up to date."""
        with self._lock:
            self._update(self._store)

    def _update(self, store: KVStore) -> None:
        for entry in store.stats.snapshot():
            self._count(entry["name"], entry["labels"], entry["total"])
        self._set("used", store.dram.used_bytes, tier="dram")
        arena = store.dram.arena
        self._set("budget", arena.size_bytes, tier="dram")
        self._set("locked", arena.size_bytes if arena.is_page_locked else 0, tier="dram")
        if store.disk is not None:
            self._set("used", store.disk.used_bytes, tier="disk")
            self._set("budget", store.disk.budget_bytes, tier="disk")
        if store.remote is not None:
            self._set("breaker", store.remote.is_open, tier="remote")
        for queue, depth in (store.queues() | self._queues()).items():
            self._set("depth", depth, queue=queue)
        if self._choice is not None:
            self._update_choice(self._choice.status())

    def close(self) -> None:
        """End the thread and mirror a last time; call it while the store is open."""
        self._stop.set()
        self._thread.join(_CLOSE_S)
        if not self.is_running:  # else it has the lock
            self.update()

    def _run(self, period_s: float) -> None:
        while not self._stop.wait(period_s):
            try:
                self.update()
            except Exception:
                logger.exception("psrl: the tiers' metrics will not change any more")
                return

    def _update_choice(self, now: dict[str, Any]) -> None:
        for decision in ("loaded", "recomputed"):
            self._count("load_decisions", {"decision": decision}, now[decision])
        prefill, load = now["prefill_tokens_per_s"], now["load_bytes_per_s"]
        crossover = now["least_tokens_worth_loading"]
        is_known = prefill is not None and load is not None
        self._set("prefill", math.nan if prefill is None else prefill)
        self._set("load", math.nan if load is None else load)
        self._set("crossover", crossover or (math.inf if is_known else math.nan))

    def _count(self, name: str, labels: dict[str, str], total: float) -> None:
        if name in COUNTERS:
            key = (name, *sorted(labels.items()))
            self._counter(name, labels).inc(total - self._seen.get(key, 0))
            self._seen[key] = total

    def _counter(self, name: str, labels: dict[str, str]) -> Any:
        extra = {label: labels.get(label, "") for label in COUNTERS[name].labels}
        return self._counters[name].labels(**self._labels, **extra)

    def _set(self, gauge: str, value: float, **labels: str) -> None:
        self._gauges[gauge].labels(**self._labels, **labels).set(value)


def count_hits(
    stats: StoreStats, *, prefix_tokens: int, loaded_tokens: int, read: Sequence[ReadSpan], page_tokens: int
) -> None:
    """Count where a prefix came from: its last ``loaded_tokens`` from DRAM, and of these what was ``read`` for
    this request from the tier it was read from; the rest was on the device."""
    first = prefix_tokens - loaded_tokens
    tokens = {"device": first, "dram": loaded_tokens}
    for span in read:
        begin, end = span.start * page_tokens, (span.start + span.pages) * page_tokens
        inside = max(0, min(end, prefix_tokens) - max(begin, first))
        tokens[span.tier] = tokens.get(span.tier, 0) + inside
        tokens["dram"] -= inside
    for tier, amount in tokens.items():
        if amount:
            stats.add("hit_tokens", amount, tier=tier)


def _from_the_start(store: KVStore, *, has_gate: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """What is shown as zero until it happens: a rate does not see the first time of what was not there."""
    reasons = {
        "dram": ("queue", "full"),
        "disk": ("queue", "full", "paused", "loading", "busy", "headless"),
        "remote": ("queue", "breaker"),
    }
    lower = [name for name, tier in (("disk", store.disk), ("remote", store.remote)) if tier is not None]
    for tier in ("device", "dram", *lower) if has_gate else ("device", "host", "storage"):
        yield "hit_tokens", {"tier": tier}
    for tier in ("dram", *lower):
        for direction in ("load", "store"):
            for name in ("bytes", "seconds", "transfers"):
                yield name, {"tier": tier, "direction": direction}
        for reason in reasons[tier]:
            yield "rejected", {"tier": tier, "reason": reason}
    for tier in ("dram", "disk"):
        for reason in ("full", "dead", "retired"):
            yield "evicted_pages", {"tier": tier, "reason": reason}
    for tier in lower:
        yield "checksum_failures", {"tier": tier}
        yield "misses_late", {"tier": tier}
    if lower and has_gate:
        for outcome in ("read", "nothing", "late"):
            yield "gate_requests", {"outcome": outcome}
