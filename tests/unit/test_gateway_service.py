"""Settings, the command, tokens, and the controller as the source of who is there."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from controller_support import FakeWorker, RunningController
from controller_support import options as controller_options
from controller_support import status as worker_status
from gateway_support import FakeEngine, ask, gateway_of, run, until

from psrl_sglang.commands import is_loopback
from psrl_sglang.config_problem import ConfigError
from psrl_sglang.gateway.cost_model import CostModel
from psrl_sglang.gateway.settings import Settings, clean_url
from psrl_sglang.gateway.settings_file import load_settings
from psrl_sglang.transfer import messages as wire

COMMAND = str(Path(sys.executable).with_name("psrl-sglang"))
CONFIG = Path(__file__).parents[2] / "configs" / "gateway.yaml"


def problems_of(source) -> dict[str, str]:
    with pytest.raises(ConfigError) as refused:
        load_settings(source)
    return {problem.field: str(problem) for problem in refused.value.problems}


def test_the_shipped_file_lists_every_setting_with_its_default():
    assert load_settings(str(CONFIG)) == Settings()
    text = CONFIG.read_text()
    for section in Settings.model_fields.values():
        for name in section.annotation.model_fields:
            if name not in ("secret_file", "controller_host", "controller_base_port"):
                assert f"{name}:" in text, name


def test_a_file_of_psrl_is_read_with_all_that_it_has_beside():
    settings = load_settings(
        {
            "psrl": {
                "ps_manager_ip": "10.0.0.1",
                "unknown": {"x": "${nowhere}"},
                "lmcache": {"enable": True, "controller_host": "${psrl.ps_manager_ip}", "chunk_size": "odd"},
                "rollout_coordination": {
                    "routing_strategy": {
                        "method": "cache_aware_v1",
                        "request_sort_indicator": "small_id",
                        "kv_query_timeout_ms": "${nowhere}",
                        "cache_aware_policy": {"block_size": 16, "balance_abs_threshold": 4},
                        "kv_transfer": {"enable": True, "transfer_mode": "pin_sync", "new_field": 1},
                    },
                    "partial_rollout": {"enable": False},
                },
            }
        }
    )
    assert settings.routing.method == "cache_aware_v1"
    assert settings.cache_aware.balance_abs_threshold == 4
    assert settings.transfer.transfer_mode == "pin_sync"
    assert not settings.partial_rollout.enable
    assert settings.controller_url == "http://10.0.0.1:9000"


def test_wrong_values_are_told_all_at_once_with_a_remedy():
    wrong = problems_of(
        {
            "psrl": {
                "gateway": {
                    "workers": ["nonsense"],
                    "retries": -1,
                    "quue_timeout_s": 3,
                    "max_body_bytes": "64",
                },
                "rollout_coordination": {
                    "routing_strategy": {
                        "method": "fastest",
                        "enable_group_sticky": "yes",
                        "kv_transfer": {"transfer_mode": "later", "transfer_timeout_ms": 0},
                        "cache_aware_policy": [],
                    }
                },
            }
        }
    )
    routing = "psrl.rollout_coordination.routing_strategy"
    assert set(wrong) == {
        "psrl.gateway.workers",
        "psrl.gateway.retries",
        "psrl.gateway.quue_timeout_s",
        "psrl.gateway.max_body_bytes",
        f"{routing}.method",
        f"{routing}.enable_group_sticky",
        f"{routing}.kv_transfer.transfer_mode",
        f"{routing}.kv_transfer.transfer_timeout_ms",
        f"{routing}.cache_aware_policy",
    }
    assert "did you mean `queue_timeout_s`?" in wrong["psrl.gateway.quue_timeout_s"]
    assert "one of random, round_robin" in wrong[f"{routing}.method"]
    assert all("value:" in text and "remedy:" in text for text in wrong.values())


def test_what_cannot_be_read_is_said():
    assert "psrl" in problems_of({"other": 1})
    assert "file" in problems_of("/nowhere/x.yaml")
    assert "psrl.gateway.retries" in problems_of({"psrl": {"gateway": {"retries": "${nowhere}"}}})
    assert "psrl.gateway" in problems_of({"psrl": {"gateway": 3}})


def test_a_cost_model_is_needed_and_checked_where_it_is_used(tmp_path):
    def problem(**routing) -> str:
        source = {"psrl": {"rollout_coordination": {"routing_strategy": routing}}}
        return problems_of(source)["psrl.rollout_coordination.routing_strategy.cost_model_path"]

    assert "is needed" in problem(method="throughput_optimal")
    path = tmp_path / "cost.json"
    for text, said in (
        ("{", "not JSON"),
        ("{}", "no layout"),
        ('{"TP1_PP1": 3}', "not a mapping"),
        ('{"TP1_PP1": {"attn_latency_b": "x"}}', "must be a number"),
        (json.dumps({"TP1_PP1": dict.fromkeys(CostModelNames, 0)}), "would take 0"),
    ):
        path.write_text(text)
        assert said in problem(method="throughput_optimal", cost_model_path=str(path))
    path.write_text(json.dumps({"TP2_PP1": dict.fromkeys(CostModelNames, 0.5)}))
    assert CostModel.read(str(path)).of(1).step_s(1, 0) == 1.5


CostModelNames = (
    "attn_latency_b",
    "attn_latency_k",
    "other_latency_b",
    "other_latency_k",
    "other_threshold",
)


def test_urls_and_addresses_are_recognised():
    assert clean_url("http://h:1/") == "http://h:1"
    for url in ("h:1", "ftp://h", "http://", "http://a b", "http://h?x", "http://u:p@h"):
        with pytest.raises(ValueError, match="is no URL"):
            clean_url(url)
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")


def test_the_token_is_wanted_everywhere_but_for_health_and_does_not_reach_the_engines():
    async def scenario():
        engine = FakeEngine()
        async with gateway_of(engine, token="a-token-of-16-chars") as gateway:
            assert (await gateway.generate([1], 1)).status == 200
            assert "authorization" not in engine.seen[0].headers
            for path in ("/workers", "/status", "/metrics", "/v1/models", "/nothing"):
                reply = await gateway.get(path, Authorization="Bearer other")
                assert reply.status == 401
            assert (
                await gateway.request("POST", "/generate", ask([1]), Authorization="Bearer é")
            ).status == 401
            assert (await gateway.get("/health", Authorization="")).status == 200
            assert await gateway.metric("psrl_gateway_unauthorized_total") == 6

    run(scenario())


def test_without_a_token_the_clients_own_key_goes_to_the_engine():
    async def scenario():
        engine = FakeEngine()
        async with gateway_of(engine) as gateway:
            await gateway.generate([1], 1, Authorization="Bearer of-the-engine")
            assert engine.seen[0].headers["authorization"] == "Bearer of-the-engine"

    run(scenario())


def test_status_and_health_tell_what_there_is():
    async def scenario():
        engine = FakeEngine(version="3")
        async with gateway_of(engine) as gateway:
            await gateway.generate([1], 1, x_psrl_session="s")
            told = (await gateway.get("/status")).json
            assert told["workers"][0]["version"] == "3"
            assert told["workers"][0]["served"] == 1
            assert (told["queued"], told["sessions"], told["controller"]) == (0, 1, None)
            await engine.stop()
            await until(lambda: not gateway.fleet.workers()[0].is_up, "it is seen to be gone")
            assert (await gateway.get("/health")).status == 503
            assert (await gateway.get("/v1/models")).status == 503

    run(scenario())


def test_the_controllers_instances_join_with_their_versions_and_leave_with_it():
    async def scenario():
        engines = [await FakeEngine(version="5").start(), await FakeEngine(version="5").start()]
        with RunningController(controller_options()) as controller:
            told = [worker_status(version="5", http_url=engine.url) for engine in engines]
            workers = [
                FakeWorker(controller.ports, name, told=one) for name, one in zip("AB", told, strict=True)
            ]
            for worker in workers:
                worker.register()
            ours = {"controller": controller.url, "controller_poll_s": 0.05}
            async with gateway_of(kv={}, gateway=ours, method="round_robin") as gateway:
                await until(lambda: len(gateway.fleet) == 2, "both are known")
                assert {(await gateway.generate([at], 1)).worker for at in range(4)} == {
                    one.url for one in engines
                }
                views = (await gateway.get("/workers")).json["workers"]
                assert {view["instance_id"] for view in views} == {"A", "B"}
                assert {view["origin"] for view in views} == {"controller"}
                await until(
                    lambda: all(one.addresses for one in gateway.fleet.workers()), "and their move workers"
                )
                assert gateway.fleet.workers()[0].addresses.command == (workers[0].address,)
                workers[1].push(wire.DeRegisterMsg(**workers[1].place, ip="127.0.0.1", port=workers[1].port))
                await until(lambda: len(gateway.fleet) == 1, "it has left")
                await asyncio.to_thread(controller.stop)
                await until(lambda: gateway.service.fleet.workers(), "who was there stays")
                await asyncio.sleep(0.2)
                assert len(gateway.fleet) == 1
                assert (await gateway.generate([1], 1)).status == 200
            for worker in workers:
                worker.close()
        for engine in engines:
            await engine.stop()

    run(scenario())


def test_the_controller_is_asked_what_is_off_the_device_where_that_counts():
    async def scenario():
        engines = [await FakeEngine().start(), await FakeEngine().start()]
        with RunningController(controller_options()) as controller:
            for name, engine in zip("AB", engines, strict=True):
                told = worker_status(http_url=engine.url)
                worker = FakeWorker(controller.ports, name, told=told)
                worker.register()
                if name == "B":
                    worker.admit(_chunk_keys(list(range(256))))
            weights = {"lmcache_overlap_weight": 1.0}
            ours = {"controller": controller.url, "controller_poll_s": 0.05, "lookup_timeout_ms": 2000}
            routing = {"method": "cache_aware_v1", "cache_aware_policy": weights}
            async with gateway_of(gateway=ours, **routing) as gateway:
                await until(lambda: len(gateway.fleet) == 2, "both are known")
                await until(lambda: controller.get("/status")["chunks"] == 4, "the report is there")
                reply = await gateway.generate(list(range(256)), 1)
                assert reply.worker == engines[1].url
        for engine in engines:
            await engine.stop()

    run(scenario())


def _chunk_keys(tokens: list[int]) -> list[int]:
    from controller_support import CHUNK, PAGE

    from psrl_sglang.namespace import compose_salt
    from psrl_sglang.pagehash import chunk_key, page_digests

    pages = page_digests(tokens, PAGE, extra_key=None, cache_salt=compose_salt("7", None))
    return [chunk_key(page) for page in pages[CHUNK // PAGE - 1 :: CHUNK // PAGE]]


class Process:
    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [COMMAND, "gateway", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate(timeout=10)


def test_the_command_says_when_it_is_ready_serves_and_ends_with_sigterm():
    with Process("--port", "0", "--json-ready", "--worker", "http://127.0.0.1:9") as running:
        told = json.loads(running.process.stdout.readline())
        assert told["ready"] is True
        assert told["pid"] == running.process.pid
        url = f"http://127.0.0.1:{told['port']}"
        workers = httpx.get(f"{url}/workers", trust_env=False).json()["workers"]
        assert [one["url"] for one in workers] == ["http://127.0.0.1:9"]
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(10) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--host", "0.0.0.0"), "--token-file"),
        (("--worker", "nonsense"), "--worker 'nonsense' is no URL"),
        (("--config", '{"psrl": {"gateway": {"retries": "x"}}}'), "psrl.gateway.retries"),
        (("--host", "192.0.2.1", "--allow-unauthenticated"), "--port"),
        (("--token-file", "/nowhere"), "cannot read /nowhere"),
    ],
    ids=["open", "worker", "config", "address", "token"],
)
def test_bad_options_are_refused_with_what_to_do(arguments, said):
    done = subprocess.run(
        [COMMAND, "gateway", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
