"""The controller of LMCache drives our move workers, as it would its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from peer import PAGE_TOKENS, Peer, PeerOptions

from psrl_sglang.lab import processes
from psrl_sglang.lab.servers import free_port

pytestmark = pytest.mark.engine
LOCATION = "LocalCPUBackend"
_START_S = 180.0


class LMCacheController:
    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        self.http, self.pull, self.reply, self.heartbeat = (free_port() for _ in range(4))
        ports = {"pull": self.pull, "reply": self.reply, "heartbeat": self.heartbeat}
        command = [sys.executable, "-m", "lmcache.v1.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.http), "--monitor-ports", json.dumps(ports)]
        self._log = directory / "controller.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _START_S
        while not self._is_up():
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < deadline, self._log.read_text()[-2000:]
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.http}/metrics", trust_env=False).status_code < 500
        except httpx.TransportError:
            return False

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.http}{path}", json=body, timeout=30, trust_env=False)

    def workers(self, instance: str) -> list[dict]:
        reply = self.post("/query_worker_info", instance_id=instance)
        return reply.json()["worker_infos"] if reply.status_code == 200 else []

    def stop(self) -> None:
        processes.kill_group(self._process.pid)
        self._process.wait(30)


@pytest.fixture(scope="module")
def controller(tmp_path_factory, lmcache_env):
    one = LMCacheController(tmp_path_factory.mktemp("controller"), lmcache_env)
    yield one
    one.stop()


@pytest.fixture(scope="module")
def peers(controller):
    """Made once: this controller goes on to call the old address of a worker that registers anew."""
    options = {"controller": ("127.0.0.1", controller.pull, controller.reply), "takes_unversioned": True}
    # Its chunks are of 256 tokens, whatever the engines use.
    a = Peer(PeerOptions(instance_id="a", chunk_pages=256 // PAGE_TOKENS, page_bytes=4096, **options))
    b = Peer(PeerOptions(instance_id="b", chunk_pages=256 // PAGE_TOKENS, page_bytes=4096, **options))
    until(lambda: controller.workers("a") and controller.workers("b"))
    yield a, b
    for peer in (a, b):
        until(peer.is_idle)
        peer.close()


def until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_registers_our_workers_and_tells_where_they_are(controller, peers):
    a, _ = peers
    (shown,) = controller.workers("a")
    assert f"{shown['ip']}:{shown['port']}" == a.command
    assert shown["peer_init_url"] == a.data


def test_heartbeats_keep_a_worker_alive_and_bring_what_it_holds(controller, peers):
    a, _ = peers
    a.compute(range(512))
    before = controller.workers("a")[0]["last_heartbeat_time"]
    until(lambda: controller.workers("a")[0]["last_heartbeat_time"] > before)
    until(lambda: a.worker.status()["controller"]["registered"])

    def known() -> int:
        reply = httpx.get(f"http://127.0.0.1:{controller.http}/controller/key-stats", trust_env=False)
        return int(reply.json().get("total_key_count", 0))

    until(lambda: known() >= 2)


def test_it_moves_kv_from_one_to_the_other(controller, peers):
    a, b = peers
    tokens = list(range(1000, 1640))
    a.compute(tokens)
    reply = controller.post(
        "/move", old_position=["a", LOCATION], new_position=["b", LOCATION], tokens=tokens, should_copy=True
    )
    assert reply.status_code == 200, reply.text
    assert reply.json()["num_tokens"] == 640
    assert b.verified(tokens) == 40
    again = controller.post(
        "/move", old_position=["a", LOCATION], new_position=["b", LOCATION], tokens=tokens, should_copy=True
    )
    assert again.json()["num_tokens"] == 0


def test_it_pins_clears_and_checks_health(controller, peers):
    a, _ = peers
    tokens = list(range(2000, 2512))
    a.compute(tokens)
    pinned = controller.post("/pin", instance_id="a", location=LOCATION, tokens=tokens)
    assert pinned.json()["num_tokens"] == 512
    assert a.worker.status()["pins"]["held"] == 1
    a.worker._pins.close()
    cleared = controller.post("/clear", instance_id="a", location=LOCATION)
    assert cleared.json()["num_tokens"] >= 512
    assert a.verified(tokens) == 0
    assert controller.post("/health", instance_id="a").json()["error_codes"] == {"0": 0}


def test_a_move_that_names_no_version_is_refused_unless_allowed(controller, peers):
    """The controller turns the reason into a 500 of its own; what counts is that nothing goes over."""
    _, b = peers
    options = {"controller": ("127.0.0.1", controller.pull, controller.reply)}
    with Peer(PeerOptions(instance_id="strict", page_bytes=4096, **options)) as strict:
        until(lambda: controller.workers("strict"))
        tokens = list(range(3000, 3256))
        strict.compute(tokens)
        reply = controller.post(
            "/move", old_position=["strict", LOCATION], new_position=["b", LOCATION], tokens=tokens
        )
        assert reply.status_code == 500
        assert b.verified(tokens) == 0
