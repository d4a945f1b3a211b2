"""Alerts and the dashboard ask only for what the code exports, and every alert is explained to operators."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from store_support import CHUNK_PAGES, LAYOUT, SLOT_BYTES, make_disk, never_dead

from psrl_sglang.controller.metrics import Metrics as ControllerMetrics
from psrl_sglang.controller.recent import Sessions
from psrl_sglang.controller.registry import Registry
from psrl_sglang.engine.estimates import LoadOrRecompute
from psrl_sglang.engine.metrics import PrometheusMirror
from psrl_sglang.engine.tier_metrics import COUNTERS, TierMirror
from psrl_sglang.gateway.fleet import Fleet
from psrl_sglang.gateway.metrics import Metrics as GatewayMetrics
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.remote import RemoteTier
from psrl_sglang.store.remote_client import connect
from psrl_sglang.store.stats import StoreStats
from psrl_sglang.store.store import KVStore, LowerTiers

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "configs" / "prometheus-alerts.yml"
DASHBOARD = ROOT / "configs" / "grafana-dashboard.json"
GUIDE = ROOT / "docs" / "operating.md"

LABELS = {"model_name": "m", "tp_rank": "0"}
OF_PROMETHEUS = {"up": {"job"}}
OF_EVERY_SERIES = {"instance", "job"}
NEVER_S = 3600.0

SAMPLES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
SELECTOR = re.compile(r"(?<![\w.$])([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan"}

Exported = dict[str, list[dict[str, str]]]
"""The labels of each series there is from the start, by the name of the metric."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    """What an engine with every tier, a controller and a gateway export before much has happened."""
    stats, registry = StoreStats(), CollectorRegistry()
    disk = make_disk(tmp_path_factory.mktemp("disk"), load=False, stats=stats, budget_bytes=1 << 20)
    client = connect("redis://127.0.0.1:1", timeout_s=0.1)  # nothing is asked of it
    remote = RemoteTier(client, layout=LAYOUT, chunk_pages=CHUNK_PAGES, stats=stats)
    lower = LowerTiers(disk=disk, remote=remote)
    store = KVStore(LAYOUT, Arena(4, SLOT_BYTES), lower, policy="LRU", dead_rank=never_dead, stats=stats)
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("Counter", "Gauge", "Histogram"):
            into = partial(getattr(prometheus_client, kind), registry=registry)
            patch.setattr(prometheus_client, kind, into)
        PrometheusMirror(LABELS).admission(1, 1, lag=1)  # there is a series for each lag once it was served
    choice = LoadOrRecompute("auto", bytes_per_token=10)
    mirror = TierMirror(LABELS, store, choice=choice, period_s=NEVER_S, registry=registry)
    fleet = Fleet()
    fleet.add("http://127.0.0.1:30000", "static")
    texts = (
        generate_latest(registry),
        ControllerMetrics(Registry(), Sessions()).text(),
        GatewayMetrics(fleet, lambda: 0, lambda: 0).text(),
    )
    yield {name: series for text in texts for name, series in series_of(text.decode())}
    mirror.close()
    store.close()


def series_of(text: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    for family in text_string_to_metric_families(text):
        for suffix in SAMPLES[family.type]:
            name = family.name + suffix
            yield name, [sample.labels for sample in family.samples if sample.name == name]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def dashboard_queries() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    variables = [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    return variables + [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def selectors(expression: str) -> list[tuple[str, dict[str, str]]]:
    """The metrics of an expression, and the labels that each is picked by."""
    plain = GROUPING.sub(" ", re.sub(r"\[[^]]*\]", " ", expression))
    found = []
    for match in SELECTOR.finditer(plain):
        name, matchers = match.groups()
        is_function = matchers is None and plain[match.end() :].lstrip().startswith("(")
        if not is_function and name.lower() not in WORDS:
            found.append((name, dict(re.findall(r'(\w+)\s*=\s*"([^"]*)"', matchers or ""))))
    return found


def label_names(name: str, exported: Exported) -> set[str]:
    """Of a metric of which there may be no series yet."""
    seen = {label for labels in exported.get(name, ()) for label in labels}
    counted = [metric for metric in COUNTERS.values() if f"psrl:{metric.name}" == name]
    declared = {label for metric in counted for label in (*LABELS, *metric.labels)}
    return seen | declared | OF_PROMETHEUS.get(name, set()) | OF_EVERY_SERIES


def test_selectors_are_found_and_functions_are_not():
    found = selectors('sum by (a, b) (rate(x:y_total{a="1", b="2"}[5m])) / on (a) max(z) > 0.5 or up == 1')
    assert found == [("x:y_total", {"a": "1", "b": "2"}), ("z", {}), ("up", {})]


def test_every_metric_of_the_alerts_is_exported(exported):
    asked = {name for rule in rules() for name, _ in selectors(rule["expr"])}
    assert len(asked) > 20
    assert asked - set(OF_PROMETHEUS) <= set(exported)


def test_every_metric_of_the_dashboard_is_exported(exported):
    asked = {name for query in dashboard_queries() for name in re.findall(r"psrl[:_]\w+", query)}
    assert len(asked) > 20
    assert asked <= set(exported)


def test_alerts_pick_series_that_there_are(exported):
    """By a label that the metric has, and where it is there from the start by a value that it has."""
    for rule in rules():
        for name, matchers in selectors(rule["expr"]):
            assert set(matchers) <= label_names(name, exported), rule["alert"]
            series = exported.get(name, [])
            assert not series or any(matchers.items() <= labels.items() for labels in series), rule["alert"]


def test_alerts_are_whole():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0m"))
        for opened, closed in ("()", "{}", "[]"):
            assert rule["expr"].count(opened) == rule["expr"].count(closed)


def test_a_summary_names_only_labels_that_the_expression_leaves(exported):
    for rule in rules():
        kept = [set(re.split(r",\s*", labels)) for labels in re.findall(r"by \(([^)]*)\)", rule["expr"])]
        of_metrics = [label_names(name, exported) for name, _ in selectors(rule["expr"])]
        left = set.intersection(*(kept or of_metrics))
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= left, rule["alert"]


def test_every_alert_is_explained_with_its_expression():
    rows = re.findall(r"^\| `(Psrl\w+)` \| `([^`]+)` \| (.+) \| (.+) \|$", GUIDE.read_text(), re.MULTILINE)
    explained = {name: expression for name, expression, _, _ in rows}
    assert explained == {rule["alert"]: " ".join(rule["expr"].split()) for rule in rules()}
