"""The controller with real move workers: each a process with a real store and a stand-in for the engine."""

import json
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from controller_support import DRAM, SECRET, RunningController, options, wait_until

from psrl_sglang.controller.registry import Limits
from psrl_sglang.transfer.client import MoveClient

PEER = Path(__file__).parents[1] / "transfer" / "peer.py"
PAGE_TOKENS, CHUNK_TOKENS = 16, 64
TOKENS = random.Random(1).choices(range(1000), k=10 * PAGE_TOKENS)
WHOLE = 2 * CHUNK_TOKENS  # in whole chunks, which are what workers report


class Peer:
    def __init__(self, ports, **given):
        given = {"heartbeat_s": 0.2, "controller": ["127.0.0.1", ports.pull, ports.reply], **given}
        self._process = subprocess.Popen(
            [sys.executable, str(PEER), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        told = json.loads(self._process.stdout.readline())
        self.command, self.data = told["command"], told["data"]

    def ask(self, *question):
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def kill(self):
        self._process.kill()
        self._process.communicate(timeout=10)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._process.communicate(timeout=10)  # its input ends, and so does it
        except subprocess.TimeoutExpired:
            self.kill()


@pytest.fixture
def start():
    """`start(**options)` runs a controller, `start.peer(name, **options)` a worker of it; all end with the test."""
    with ExitStack() as owned:

        def controller(**changes):
            running = RunningController(options(**changes))
            owned.callback(running.stop)
            return running

        controller.peer = lambda running, name, **given: owned.enter_context(
            Peer(running.ports, instance_id=name, **given)
        )
        yield controller


def known(controller, *names):
    def live():
        return sorted({one["instance_id"] for one in controller.get("/controller/workers")["workers"]})

    wait_until(lambda: live() == sorted(names), f"{names} are registered", timeout_s=20)


def layout(controller, tokens=TOKENS, **more):
    return controller.post("/lookup", tokens=tokens, **more).json()["layout_info"]


def move(controller, source="a", destination="b", tokens=TOKENS, **more):
    body = {"old_position": [source, DRAM], "new_position": [destination, DRAM], "should_copy": True}
    return controller.post("/move", **body, tokens=tokens, **more)


def test_kv_is_found_moved_and_found_where_it_went(start):
    controller = start()
    a, b = (start.peer(controller, name) for name in "ab")
    known(controller, "a", "b")
    a.ask("compute", TOKENS)
    stored = time.monotonic()
    wait_until(lambda: layout(controller) == {"a": [DRAM, WHOLE]}, "the owner is named")
    assert time.monotonic() - stored < 1
    result = move(controller, session="s-1").json()
    assert (result["num_tokens"], result["present_tokens"]) == (len(TOKENS), len(TOKENS)), result
    assert result["size_bytes"] == 10 * (64 << 10)
    assert result["transport"] == "tcp"
    assert b.ask("verified", TOKENS) == 10
    wait_until(lambda: set(layout(controller)) == {"a", "b"}, "both are named")
    assert controller.get("/sessions/s-1")["instance_id"] == "b"
    again = move(controller).json()
    assert (again["num_tokens"], again["present_tokens"]) == (0, len(TOKENS))
    assert again["reason"]
    wait_until(lambda: len(controller.get("/moves")["moves"]) == 2, "both moves are told")
    present, moved = controller.get("/moves")["moves"]
    assert (moved["outcome"], moved["num_tokens"], moved["session"]) == ("moved", len(TOKENS), "s-1")
    assert present["outcome"] == "present"
    assert controller.metric("psrl_controller_moved_tokens_total") == len(TOKENS)
    exact = controller.post("/lookup", tokens=TOKENS, exact=True).json()
    assert exact["layout_info"] == {"a": [DRAM, len(TOKENS)], "b": [DRAM, len(TOKENS)]}, exact


def test_pins_health_and_clear_reach_the_worker(start):
    controller = start()
    a = start.peer(controller, "a")
    known(controller, "a")
    a.ask("compute", TOKENS)
    target = {"instance_id": "a", "location": DRAM}
    assert controller.post("/health", instance_id="a").json()["error_codes"] == {"0": 0}
    assert controller.post("/pin", **target, tokens=TOKENS).json()["num_tokens"] == len(TOKENS)
    assert controller.post("/unpin", **target, tokens=TOKENS).json()["num_tokens"] == len(TOKENS)
    wait_until(lambda: layout(controller), "it is reported")
    controller.post("/clear", **target).raise_for_status()
    wait_until(lambda: layout(controller) == {}, "nothing is left")
    with MoveClient() as client:
        assert client.health(a.command).ok


def test_versions_that_gather_in_one_report_are_all_found(start):
    controller = start()
    a = start.peer(controller, "a", window=["psrl:1", "psrl:2", "psrl:3"])
    known(controller, "a")
    prompts = [random.Random(seed).choices(range(1000), k=CHUNK_TOKENS) for seed in range(7)]
    for number, tokens in enumerate(prompts):
        a.ask("compute", tokens, str(1 + number % 3))
    wait_until(lambda: all(layout(controller, tokens) for tokens in prompts), "all are found")
    time.sleep(2.5)
    [worker] = controller.get("/controller/workers")["workers"]
    assert (worker["sync_wanted"], worker["syncing"]) == ("", False)


def test_after_a_restart_of_the_controller_everything_is_known_again(start):
    first = start()
    a = start.peer(first, "a")
    known(first, "a")
    a.ask("compute", TOKENS)
    wait_until(lambda: layout(first), "it is found")
    first.stop()
    ports = first.ports
    second = start(http_port=ports.http, pull_port=ports.pull, reply_port=ports.reply)
    known(second, "a")
    wait_until(lambda: layout(second) == {"a": [DRAM, WHOLE]}, "it is found again", timeout_s=10)
    a.ask("forget_all")
    wait_until(lambda: layout(second) == {}, "what goes afterwards is told")


def test_a_worker_that_was_killed_costs_a_deadline_and_is_then_gone(start):
    controller = start(limits=Limits(lease_s=1.5))
    a, _ = (start.peer(controller, name) for name in "ab")
    known(controller, "a", "b")
    a.ask("compute", TOKENS)
    wait_until(lambda: layout(controller), "it is found")
    a.kill()
    begun = time.monotonic()
    answer = move(controller, timeout_s=0.5)
    assert (answer.status_code, time.monotonic() - begun < 2) == (504, True)
    known(controller, "b")
    assert layout(controller) == {}
    assert "no instance 'a'" in move(controller).json()["detail"]


def test_with_a_secret_all_of_it_is_signed(start):
    controller = start(secret=SECRET)
    for name in "ab":
        start.peer(controller, name, secret=SECRET.decode())
    stranger = start.peer(controller, "c")
    known(controller, "a", "b")
    assert move(controller).status_code == 200
    with MoveClient(b"the secret of another fleet") as client:
        assert not client.health(stranger.command).ok
    assert controller.metric('psrl_controller_frames_rejected_total{reason="not_authorized"}') > 0
    known(controller, "a", "b")


def test_ranks_move_side_by_side(start):
    controller = start()
    peers = {
        (name, rank): start.peer(controller, name, rank=rank, ranks=2) for name in "ab" for rank in range(2)
    }
    wait_until(lambda: len(controller.get("/controller/workers")["workers"]) == 4, "all are there", 20)
    peers["a", 0].ask("compute", TOKENS)
    wait_until(lambda: controller.get("/status")["chunks"] == 2, "one rank has it")
    assert layout(controller) == {}
    assert move(controller).json()["num_tokens"] == 0
    peers["a", 1].ask("compute", TOKENS)
    wait_until(lambda: layout(controller), "all ranks have it")
    result = move(controller).json()
    assert result["present_tokens"] == len(TOKENS), result
    assert [peers["b", rank].ask("verified", TOKENS) for rank in range(2)] == [10, 10]
