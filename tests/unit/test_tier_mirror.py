"""What the store counts is in Prometheus: by difference, from zero on, and without anybody asking."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from store_support import LAYOUT, SLOT_BYTES, keys_of, make_disk, never_dead, put, wait_until

import psrl_sglang
from psrl_sglang.engine.estimates import LoadOrRecompute
from psrl_sglang.engine.tier_metrics import COUNTERS, TierMirror, count_hits
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.fetch import ReadSpan
from psrl_sglang.store.stats import StoreStats
from psrl_sglang.store.store import KVStore, LowerTiers

LABELS = {"model_name": "m", "tp_rank": "0"}
NEVER_S = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    stats = StoreStats()
    disk = make_disk(tmp_path, load=False, stats=stats, budget_bytes=1 << 20)
    one = KVStore(
        LAYOUT, Arena(4, SLOT_BYTES), LowerTiers(disk=disk), policy="LRU", dead_rank=never_dead, stats=stats
    )
    yield one
    one.close()


class Shown:
    """A mirror and what a scrape of it would say."""

    def __init__(self, store: KVStore, *, period_s: float = NEVER_S, **options) -> None:
        self._registry = CollectorRegistry()
        self.mirror = TierMirror(LABELS, store, period_s=period_s, registry=self._registry, **options)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"psrl:{name}", {**LABELS, **labels})


@pytest.fixture
def shown(store: KVStore) -> Iterator[Shown]:
    one = Shown(store, choice=LoadOrRecompute("auto", bytes_per_token=10))
    yield one
    one.mirror.close()


def test_totals_are_mirrored_by_difference(store: KVStore, shown: Shown):
    for size_bytes, total in ((100, 100), (150, 250)):
        store.stats.observe("dram", "load", size_bytes, 0.5)
        shown.mirror.update()
        shown.mirror.update()
        assert shown("tier_bytes_total", tier="dram", direction="load") == total
    assert shown("tier_seconds_total", tier="dram", direction="load") == 1.0
    assert shown("tier_transfers_total", tier="dram", direction="load") == 2


def test_what_has_not_happened_is_zero_and_what_is_not_there_is_absent(shown: Shown):
    assert shown("tier_checksum_failures_total", tier="disk") == 0
    assert shown("tier_evicted_pages_total", tier="dram", reason="dead") == 0
    assert shown("tier_rejected_total", tier="dram", reason="full") == 0
    assert shown("tier_hit_tokens_total", tier="device") == 0
    assert shown("gate_requests_total", outcome="late") == 0
    assert shown("tier_bytes_total", tier="remote", direction="load") is None
    assert shown("tier_breaker_open", tier="remote") is None


def test_a_count_without_a_label_has_it_empty(store: KVStore, shown: Shown):
    store.stats.add("errors", tier="remote", reason="timeout")
    store.stats.add("not a metric", tier="remote")
    shown.mirror.update()
    assert shown("tier_errors_total", tier="remote", direction="", reason="timeout") == 1


def test_use_budget_and_queues(store: KVStore, shown: Shown):
    put(store.dram, keys_of(5))
    shown.mirror.update()
    assert shown("tier_used_bytes", tier="dram") == 2 * SLOT_BYTES
    assert shown("tier_budget_bytes", tier="dram") == 4 * SLOT_BYTES
    assert shown("tier_page_locked_bytes", tier="dram") == 0
    assert shown("tier_used_bytes", tier="disk") is not None
    assert shown("tier_budget_bytes", tier="disk") == 1 << 20
    assert shown("tier_queue_depth", queue="write_disk") == 0
    assert shown("tier_queue_depth", queue="fetch") == 0


def test_memory_that_is_page_locked_is_shown(store: KVStore, shown: Shown):
    lock = SimpleNamespace(close=lambda: None)
    store.dram.arena.page_lock(lambda memory, slot_bytes: lock)
    shown.mirror.update()
    assert shown("tier_page_locked_bytes", tier="dram") == 4 * SLOT_BYTES
    assert store.status()["tiers"]["dram"]["page_locked"] is True


def test_estimates_are_unknown_then_numbers_then_never(store: KVStore):
    choice = LoadOrRecompute("auto", bytes_per_token=10)
    shown = Shown(store, choice=choice, queues=lambda: {"gate": 3})
    assert math.isnan(shown("load_crossover_tokens") or 0)
    assert math.isnan(shown("prefill_tokens_per_second") or 0)
    for step in range(1, 9):
        choice.observe_prefill(100 * step, 1.0 * step)
        choice.observe_load(1000 * step, 0.1 + 0.01 * step)
    choice.loaded, choice.recomputed = 4, 2
    shown.mirror.update()
    assert shown("prefill_tokens_per_second") == pytest.approx(100)
    assert shown("load_bytes_per_second") == pytest.approx(100_000)
    assert 10 <= (shown("load_crossover_tokens") or 0) <= 12
    assert shown("load_decisions_total", decision="loaded") == 4
    assert shown("load_decisions_total", decision="recomputed") == 2
    assert shown("tier_queue_depth", queue="gate") == 3
    for step in range(1, 200):
        choice.observe_load(1000 * step, 10.0 * step)
    shown.mirror.close()
    assert shown("load_crossover_tokens") == math.inf


def test_an_idle_engine_shows_what_happened_and_the_end_is_counted_too(store: KVStore):
    shown = Shown(store, period_s=0.01)
    store.stats.add("bad_files", tier="disk")
    wait_until(lambda: shown("tier_bad_files_total", tier="disk") == 1)
    shown.mirror.close()
    assert not shown.mirror.is_running
    late = Shown(store)
    store.stats.add("bad_files", tier="disk")
    late.mirror.close()
    assert late("tier_bad_files_total", tier="disk") == 2


def test_another_store_goes_on_where_the_one_before_ended(store: KVStore, shown: Shown):
    store.stats.add("hit_tokens", 5, tier="device")
    stats = StoreStats()
    options = {"policy": "LRU", "dead_rank": never_dead, "stats": stats}
    another = KVStore(LAYOUT, Arena(8, SLOT_BYTES), LowerTiers(), **options)
    shown.mirror.follow(another)
    stats.add("hit_tokens", 2, tier="device")
    shown.mirror.update()
    assert shown("tier_hit_tokens_total", tier="device") == 7
    assert shown("tier_budget_bytes", tier="dram") == 8 * SLOT_BYTES
    another.close()


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        ([], {"device": 32, "dram": 64}),
        ([ReadSpan("disk", 2, 4)], {"device": 32, "disk": 64}),
        (
            [ReadSpan("disk", 2, 1), ReadSpan("remote", 5, 1)],
            {"device": 32, "dram": 32, "disk": 16, "remote": 16},
        ),
        # Of what was read, the device had some by then, and some was not loaded.
        (
            [ReadSpan("disk", 0, 3), ReadSpan("remote", 5, 9)],
            {"device": 32, "dram": 32, "disk": 16, "remote": 16},
        ),
    ],
)
def test_hits_by_tier_add_up_to_the_prefix(read: list[ReadSpan], expected: dict[str, int]):
    stats = StoreStats()
    count_hits(stats, prefix_tokens=96, loaded_tokens=64, read=read, page_tokens=16)
    assert {entry["labels"]["tier"]: entry["total"] for entry in stats.snapshot()} == expected
    assert stats.total("hit_tokens") == 96


def test_everything_that_is_counted_has_a_metric():
    """By the source: the first name in each call of ``stats.add``."""
    package = Path(psrl_sglang.__file__).parent
    text = "\n".join(path.read_text() for part in ("store", "engine") for path in (package / part).glob("*.py"))
    counted = set(re.findall(r'stats\.add\(\s*"(\w+)"', text))
    assert len(counted) > 8
    assert counted <= set(COUNTERS)
