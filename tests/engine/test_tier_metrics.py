"""The tiers in SGLang's own /metrics, and the dashboard that queries them, on one real server."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer
from support import NAMED, prompt, status, wait_until
from tier_support import CHUNK_BYTES, assert_hit, settle, stored, tier_status, with_disk

from psrl_sglang.engine.tier_metrics import COUNTERS
from psrl_sglang.lab.servers import Server

pytestmark = pytest.mark.engine
DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana-dashboard.json"
POOL = ("--max-total-tokens", "2048", "--context-length", "2048")
CHUNK_TOKENS = 64
DRAM_CHUNKS = 16  # of 256 tokens: twice the pool


@pytest.fixture(scope="module")
def server(server_factory, models, tmp_path_factory):
    """With every tier, a device pool that 2,048 tokens fill, and DRAM for 4,096."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        settings = with_disk(
            tmp_path_factory.mktemp("disk"),
            chunks=DRAM_CHUNKS,
            chunk_size=CHUNK_TOKENS,
            remote_url=redis.url,
            sglang={
                "max_version_lag": 1,
                "load_policy": "auto",
                "read_ahead_timeout_s": 30.0,
                "namespace": "run",
            },
        )
        server = server_factory(args=(*NAMED, *POOL, "--enable-metrics"), psrl_config=settings)
        yield server
        server.stop(grace_s=0.0)


def series(server: Server) -> dict[str, float]:
    """Every sample of ours, by its name with its labels but those of the model and the rank."""
    shown = {}
    for line in server.get("/metrics", follow_redirects=True).text.splitlines():
        if line.startswith("psrl:"):
            sample, _, value = line.rpartition(" ")
            name, _, labels = sample.partition("{")
            own = re.findall(r'(\w+)="([^"]*)"', labels)
            rest = ",".join(f"{k}={v}" for k, v in sorted(own) if k not in ("model_name", "tp_rank"))
            shown[f"{name}{{{rest}}}"] = float(value)
    return shown


def counted(server: Server) -> dict[str, float]:
    """What /psrl/v1/status counts, under the names of /metrics."""
    shown = {}
    for entry in tier_status(server)["counters"]:
        metric = COUNTERS[entry["name"]]
        labels = ",".join(f"{k}={entry['labels'].get(k, '')}" for k in sorted(metric.labels))
        shown[f"psrl:{metric.name}{{{labels}}}"] = entry["total"]
    return shown


def hits(server: Server) -> dict[str, float]:
    return {
        tier: counted(server).get(f"psrl:tier_hit_tokens_total{{tier={tier}}}", 0)
        for tier in ("device", "dram", "disk", "remote")
    }


def fill(server: Server, seed: int, prompts: int) -> None:
    for number in range(prompts):
        stored(server, prompt(seed + number, 800), 1)


@pytest.fixture(scope="module")
def traffic(server, models) -> dict[str, Any]:
    """A prompt hit on the device, in DRAM and on disk, a change of weights with a stale hit; and the hits."""
    asked = prompt(900, 400)
    first = stored(server, asked, 8)
    steps = [hits(server)]
    assert_hit(server, asked, first, "device")
    steps.append(hits(server))
    fill(server, 910, 3)
    assert_hit(server, asked, first, "host")
    steps.append(hits(server))
    fill(server, 920, 6)
    assert_hit(server, asked, first, "storage")
    steps.append(hits(server))
    assert server.update_weights(models[2], version="2").success
    server.generate(asked, 1)
    settle(server)
    return {"steps": steps}


def test_hits_are_counted_where_they_came_from(server, traffic):
    """384 tokens are 6 chunks of the 400; all else is computed, so the sums are those of every admission."""
    before, device, dram, disk = traffic["steps"]
    assert before == dict.fromkeys(("device", "dram", "disk", "remote"), 0)
    assert device == {**before, "device": 384}
    assert dram == {**device, "dram": 384}
    assert disk == {**dram, "disk": 384}
    assert sum(hits(server).values()) == status(server)["counters"]["hit_tokens"]


def test_an_idle_server_shows_in_metrics_what_status_counts(server, traffic):
    wanted = counted(server)
    assert len(wanted) > 15
    wait_until(lambda: series(server).items() >= wanted.items(), "the mirror has come", timeout_s=10.0)
    shown = series(server)
    for tier in ("dram", "disk", "remote"):
        assert shown[f"psrl:tier_bytes_total{{direction=store,tier={tier}}}"] >= CHUNK_BYTES
        assert shown[f"psrl:tier_seconds_total{{direction=store,tier={tier}}}"] > 0
    assert shown["psrl:tier_bytes_total{direction=load,tier=dram}"] == 2 * 384 * 2048
    assert shown["psrl:tier_bytes_total{direction=load,tier=disk}"] == 384 * 2048
    assert shown["psrl:tier_evicted_pages_total{reason=full,tier=dram}"] > 0
    assert shown["psrl:tier_checksum_failures_total{tier=disk}"] == 0
    assert shown["psrl:gate_requests_total{outcome=read}"] == 1
    assert shown["psrl:load_decisions_total{decision=loaded}"] == 2
    assert shown["psrl:prefill_tokens_per_second{}"] > 0
    assert shown["psrl:stale_tokens_total{lag=1}"] > 0
    used = tier_status(server)["tiers"]
    for tier in ("dram", "disk"):
        assert shown[f"psrl:tier_used_bytes{{tier={tier}}}"] == used[tier]["used_bytes"] > 0
        assert shown[f"psrl:tier_budget_bytes{{tier={tier}}}"] == used[tier]["budget_bytes"]
    assert {key for key in shown if "queue_depth" in key} == {
        f"psrl:tier_queue_depth{{queue={queue}}}" for queue in tier_status(server)["queues"]
    }


def test_every_metric_of_the_dashboard_is_exported(server, traffic):
    text = server.get("/metrics", follow_redirects=True).text
    exported = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    queried = {name for query in queries() for name in re.findall(r"(?:psrl|sglang):\w+", query)}
    assert len(queried) > 25
    assert queried <= exported
    # And the other way round: what is exported can be seen.
    unseen = {
        f"psrl:{COUNTERS[name].name}"
        for name in ("evicted_bytes", "bad_files", "duplicates", "errors", "untold_pages")
    }
    ours = {re.sub("_(created|count|sum)$", "", name) for name in exported if name.startswith("psrl:")}
    assert {name for name in ours - queried if f"{name}_bucket" not in queried} <= unseen


def test_the_dashboard_can_be_imported():
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] >= 36
    assert board["title"]
    assert "id" not in board  # of another Grafana
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ["Weight versions", "Tiers"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    for panel in panels:
        for one in (panel, *panel.get("targets", ())):
            assert panel["type"] == "row" or one["datasource"]["uid"] == "${datasource}"
    names = set(variables) | {"__rate_interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) <= names
    for query in queries():
        assert query.count("(") == query.count(")")
        assert query.count("{") == query.count("}")


def queries() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    variables = [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    return variables + [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
