"""The HTTP side: who may ask, how much may be sent, what is shown, and the stream of events."""

import contextlib
import json
import socket
import threading
import time

import pytest
from controller_support import SECRET, FakeWorker, RunningController, options, status, wait_until
from prometheus_client.parser import text_string_to_metric_families

from psrl_sglang.commands import NotAllowed
from psrl_sglang.controller.events import Feed
from psrl_sglang.controller.service import ControllerService
from psrl_sglang.transfer import messages as wire

TOKEN = "a-token-of-the-controller"
ROUTES = [
    ("GET", path)
    for path in (
        *("/status", "/instances", "/controller/workers", "/moves", "/sessions", "/sessions/s", "/metrics"),
        *("/events", "/openapi.json", "/nowhere"),
    )
] + [
    ("POST", path)
    for path in (
        *("/query_instance", "/lookup", "/move", "/check_finish", "/pin", "/unpin", "/clear", "/health"),
        *("/compress", "/decompress", "/query_worker_info"),
    )
]


@pytest.fixture(scope="module")
def guarded():
    with RunningController(options(token=TOKEN)) as controller:
        yield controller


@pytest.fixture(scope="module")
def controller():
    with RunningController() as running:
        yield running


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_wants_the_token(guarded, method, path):
    for given in ("", "Bearer", "Bearer wrong", f"bearer {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xe9"):
        answer = guarded.http.request(method, path, headers={"authorization": given.encode("latin-1")})
        assert answer.status_code == 401, given
        assert "--token-file" in answer.json()["detail"]


def test_with_the_token_routes_answer_and_only_health_and_the_empty_page_need_none(guarded):
    assert guarded.get("/status")["instances"] == 0
    for path in ("/healthz", "/"):
        assert guarded.http.get(path, headers={"authorization": ""}).status_code == 200
    assert guarded.metric("psrl_controller_http_unauthorized_total") > 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost.localdomain."])
@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, ["token", "secret"]), ({"token": TOKEN}, ["secret"]), ({"secret": SECRET}, ["token"])],
)
def test_beyond_this_machine_token_and_secret_are_needed(host, given, missing):
    with pytest.raises(NotAllowed, match="--allow-unauthenticated") as refused:
        ControllerService(options(host=host, **given))
    assert all(f"--{name}-file" in str(refused.value) for name in missing)
    assert TOKEN not in repr(options(token=TOKEN))


@pytest.mark.parametrize(
    "given", [{"token": TOKEN, "secret": SECRET}, {"allow_unauthenticated": True}], ids=["both", "said"]
)
def test_beyond_this_machine_it_serves_when_told_how(given):
    with RunningController(options(host="0.0.0.0", **given)) as running:
        assert running.get("/status")["instances"] == 0
        with FakeWorker(running.ports, secret=given.get("secret", b"")) as worker:
            assert worker.register().extra_config["heartbeat_url"] == f"127.0.0.1:{running.ports.reply}"


def test_a_body_that_is_too_large_is_refused_before_it_is_read(controller):
    with socket.create_connection(("127.0.0.1", controller.ports.http), timeout=5) as link:
        link.sendall(b"POST /lookup HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in link.recv(4096)
    with socket.create_connection(("127.0.0.1", controller.ports.http), timeout=5) as link:
        link.sendall(b"POST /lookup HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b" 411 " in link.recv(4096)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body: it is missing"),
        (b"{", "the body is not JSON"),
        (b"[1]", "the body"),
        (b'{"tokens": [' + b"1," * 1_000_001 + b"1]}", "at most 1000000 items"),
        (b'{"tokens": [1e99]}', "tokens.0"),
        (b'{"tokens": [NaN]}', "tokens.0"),
        (b'{"tokens": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", ""),
    ],
    ids=["empty", "no-json", "no-object", "too-many", "no-integer", "no-number", "deep"],
)
def test_a_body_that_is_none_is_refused_with_the_field(controller, body, said):
    answer = controller.http.post("/lookup", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)
    assert said in str(answer.json()["detail"])
    assert len(answer.text) < 2000


def test_instances_show_what_their_ranks_tell(controller):
    told = {"tiers": {"dram": (100, 1000)}, "pages_by_tag": {"7": 5}, "moves_running": 1, "ranks": 2}
    ranks = [FakeWorker(controller.ports, "A", rank, told=status(rank=rank, **told)) for rank in range(2)]
    ranks[0].register()
    [view] = controller.get("/instances")["instances"]
    assert view["state"] == "incomplete"
    ranks[1].register()
    [view] = controller.get("/instances")["instances"]
    assert (view["state"], view["version"], view["window"], view["ranks"]) == ("live", "7", ["7"], 2)
    assert view["tiers"] == {"dram": {"used_bytes": 200, "budget_bytes": 2000}}
    assert (view["moves_running"], view["pages_by_tag"], view["versions_differ"]) == (2, {"7": 5}, False)
    ranks[0].admit([1, 2, 3])
    wait_until(lambda: controller.get("/status")["chunks"] == 3, "chunks are counted")
    ranks[0].push(wire.SessionsMsg("A", 0, [wire.SessionHeld("s", 32, "7")]))
    wait_until(lambda: controller.get("/sessions")["sessions"], "the session is shown")
    families = {one.name: one for one in text_string_to_metric_families(controller.http.get("/metrics").text)}
    values = {
        sample.name + json.dumps(sample.labels): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["psrl_controller_instances{}"] == 1
    assert values['psrl_controller_workers{"state": "live"}'] == 2
    assert values["psrl_controller_chunks{}"] == 3
    assert values["psrl_controller_sessions{}"] == 1
    for worker in ranks:
        worker.push(wire.DeRegisterMsg("A", worker.worker_id, "127.0.0.1", worker.port))
    wait_until(lambda: not controller.get("/instances")["instances"], "they are gone")
    gone = controller.http.get("/sessions/s")
    assert (gone.status_code, "'A' is gone" in gone.json()["detail"]) == (404, True)
    for worker in ranks:
        worker.close()


def events(response):
    kind = None
    for line in response.iter_lines():
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            yield kind, json.loads(line[6:])


def test_moves_are_streamed_as_they_happen(controller):
    with FakeWorker(controller.ports) as worker, controller.http.stream("GET", "/events") as response:
        worker.register()
        seen = events(response)
        assert next(seen)[0] == "moves"
        assert next(seen)[0] == "state"
        nan = wire.MoveRecord("A", "B", "7", 64, 64, 4096, float("nan"), reason="x" * 5000)
        worker.push(wire.MovedMsg("A", 0, [nan]))
        move = next(data for kind, data in seen if kind == "move")
        assert (move["num_tokens"], move["seconds"], len(move["reason"])) == (64, None, 1000)
        state = next(data for kind, data in seen if kind == "state")
        assert [one["instance_id"] for one in state["instances"]] == ["A"]
        worker.push(wire.DeRegisterMsg("A", 0, "127.0.0.1", worker.port))
    wait_until(lambda: controller.get("/status")["watchers"] == 0, "the watcher is gone")


def test_a_watcher_that_does_not_read_holds_nobody_up_and_the_next_is_turned_away(controller):
    with contextlib.ExitStack() as open_streams:
        for _ in range(64):
            link = socket.create_connection(("127.0.0.1", controller.ports.http), timeout=5)
            open_streams.callback(link.close)
            link.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: controller.get("/status")["watchers"] == 64, "all watch")
        answer = controller.http.get("/events")
        assert (answer.status_code, "64 watch already" in answer.json()["detail"]) == (503, True)
        with FakeWorker(controller.ports, "A") as worker:
            worker.register()
            record = wire.MoveRecord("A", "B", "7", 1, 1, 1, 0.01)
            for _ in range(20):
                worker.push(wire.MovedMsg("A", 0, [record] * 100))
            wait_until(lambda: controller.get("/status")["moves"] >= 2000, "all moves are counted")
            worker.push(wire.DeRegisterMsg("A", 0, "127.0.0.1", worker.port))
    wait_until(lambda: controller.get("/status")["watchers"] == 0, "all are gone", timeout_s=15)


def test_a_slow_watcher_misses_the_oldest_events():
    feed = Feed()
    with feed.watch() as watcher:
        for number in range(600):
            feed.publish("move", b"%d" % number)
        assert watcher.missed == 88
    assert feed.watchers == 0


def test_an_answer_does_not_wait_for_an_acknowledgement(controller):
    """40 ms is what a delayed one costs each request of a connection."""
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        controller.get("/status")
        taken.append(time.perf_counter() - start)
    assert sorted(taken)[5] < 0.03


def test_it_ends_while_someone_watches():
    running = RunningController()
    started = threading.Event()

    def watch():
        with running.http.stream("GET", "/events") as response:
            for _ in events(response):
                started.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert started.wait(5)
    running.stop()
    watcher.join(5)
    assert not watcher.is_alive()
