"""Moves and other commands through the controller: deadlines, refusals, what ranks say, and what is told of it."""

import concurrent.futures
import time

import msgspec
import pytest
from controller_support import DRAM, FakeWorker, RunningController, status, wait_until

from psrl_sglang.transfer import messages as wire

TOKENS = list(range(100))


@pytest.fixture(scope="module")
def shared():
    with RunningController() as controller:
        yield controller


@pytest.fixture
def fleet(shared):
    """`fleet(instance, ranks=..., answer=...)` registers fake workers that end with the test."""
    made = []

    def start(instance_id, ranks=1, answer=None, told=None, claimed=None, **more):
        group = []
        for rank in range(ranks):
            said = msgspec.structs.replace(told or status(), rank=rank, ranks=claimed or ranks)
            peer = f"127.0.0.1:{7000 + rank}"
            worker = FakeWorker(shared.ports, instance_id, rank, answer=answer, told=said, peer=peer, **more)
            worker.register()
            group.append(worker)
        made.extend(group)
        return group

    yield start
    for worker in made:
        worker.push(wire.DeRegisterMsg(worker.instance_id, worker.worker_id, "127.0.0.1", worker.port))
    wait_until(lambda: not shared.get("/instances")["instances"], "all are gone")
    for worker in made:
        worker.close()


def sends(num_tokens=64, present_tokens=96, reason=""):
    reply = wire.MoveWorkerRetMsg(num_tokens, present_tokens, 1000, 0.01, "tcp", reason)
    return lambda command: reply


def move(controller, source="A", destination="B", **more):
    body = {"old_position": [source, DRAM], "new_position": [destination, DRAM], "tokens": TOKENS}
    return controller.post("/move", **{**body, "should_copy": True, **more})


def test_a_move_asks_each_rank_to_send_to_its_counterpart_and_counts_what_all_have(shared, fleet):
    counts = iter([(64, 96), (48, 80)])

    def answer(command):
        num_tokens, present_tokens = next(counts)
        return wire.MoveWorkerRetMsg(num_tokens, present_tokens, 1000, 0.01, "tcp")

    senders = fleet("A", ranks=2, answer=answer)
    fleet("B", ranks=2)
    result = move(shared, version="7", cache_salt="user", extra_key="lora", session="s").json()
    assert (result["num_tokens"], result["present_tokens"], result["size_bytes"]) == (48, 80, 2000)
    assert (result["transport"], result["reason"]) == ("tcp", "")
    assert [rank["worker_id"] for rank in result["ranks"]] == [0, 1]
    for rank, worker in enumerate(senders):
        [command] = worker.commands
        assert command.new_position == (f"127.0.0.1:{7000 + rank}", DRAM)
        assert (command.tokens, command.copy, command.old_position) == (TOKENS, True, DRAM)
        timeout_s = command.request_configs.pop(wire.TIMEOUT_KEY)
        assert 4 < timeout_s < 5
        assert command.request_configs == {
            wire.VERSION_KEY: "7",
            wire.SALT_KEY: "user",
            wire.EXTRA_KEY: "lora",
            wire.SESSION_KEY: "s",
        }


def test_without_a_version_a_move_uses_the_one_both_are_on(shared, fleet):
    [sender] = fleet("A", answer=sends())
    fleet("B")
    assert move(shared).json()["num_tokens"] == 64
    assert sender.commands[0].request_configs[wire.VERSION_KEY] == "7"


def test_without_a_version_instances_on_different_ones_are_refused_with_both_names(shared, fleet):
    [sender] = fleet("A", answer=sends())
    fleet("B", told=status(version="8", tag="8", window=["8"]))
    answer = move(shared)
    assert answer.status_code == 409
    assert "'A' is on '7'" in answer.json()["detail"]
    assert "'B' on '8'" in answer.json()["detail"]
    assert sender.commands == []
    assert move(shared, version="7").status_code == 200


def test_without_a_version_a_worker_that_reports_none_is_refused(shared, fleet):
    fleet("A", foreign=True)
    fleet("B")
    answer = move(shared)
    assert answer.status_code == 422
    assert "version: needed" in answer.json()["detail"]


def test_a_worker_that_does_not_answer_costs_its_deadline_and_the_next_call_works(shared, fleet):
    answers = iter([None])
    [dead] = fleet("A", answer=lambda command: next(answers))
    fleet("B")
    start = time.monotonic()
    answer = move(shared, timeout_s=0.6)
    assert time.monotonic() - start < 2
    assert answer.status_code == 504
    assert f"no answer from {dead.address} in 0.6 s" in answer.json()["detail"]
    [alive] = fleet("A", answer=sends())
    assert move(shared).json()["num_tokens"] == 64
    assert len(alive.commands) == 1
    [latest] = shared.get("/moves?most=1")["moves"]
    assert (latest["outcome"], latest["source"], latest["destination"]) == ("failed", "A", "B")
    assert "no answer" in latest["reason"]


def test_a_worker_that_is_asked_again_after_it_missed_a_deadline_answers(shared, fleet):
    """Nothing of the first question is left that could be in the way of the second."""
    slow = iter([0.8, 0.0])

    def answer(command):
        time.sleep(next(slow))
        return sends()(command)

    fleet("A", answer=answer)
    fleet("B")
    assert move(shared, timeout_s=0.3).status_code == 504
    assert move(shared, timeout_s=5).json()["num_tokens"] == 64


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (wire.ErrorMsg("the version is not in the window: 7"), "the version is not in the window: 7"),
        (b"\xff", "an answer of"),
        (wire.PinWorkerRetMsg(3), "answered a MoveWorkerMsg with a PinWorkerRetMsg"),
    ],
    ids=["error", "garbage", "wrong-kind"],
)
def test_what_a_worker_says_instead_of_moving_is_told(shared, fleet, reply, said):
    fleet("A", answer=lambda command: reply)
    fleet("B")
    answer = move(shared)
    assert answer.status_code == 502
    assert said in answer.json()["detail"]
    assert "rank 0 of 'A'" in answer.json()["detail"]
    assert answer.json()["ranks"][0]["ok"] is False


def test_when_nothing_moved_the_reason_is_told(shared, fleet):
    fleet("A", answer=sends(0, 0, "nothing of it is held under tag 7"))
    fleet("B")
    result = move(shared).json()
    assert (result["num_tokens"], result["reason"]) == (0, "nothing of it is held under tag 7")


def test_unequal_ranks_are_refused_before_anything_is_sent(shared, fleet):
    senders = fleet("A", ranks=2, answer=sends())
    fleet("B", ranks=1)
    answer = move(shared)
    assert answer.status_code == 409
    assert "'A' has 2 ranks and 'B' 1" in answer.json()["detail"]
    assert all(worker.commands == [] for worker in senders)


def test_an_instance_that_is_not_all_there_is_refused(shared, fleet):
    fleet("A", ranks=1, claimed=2, answer=sends())
    fleet("B")
    answer = move(shared)
    assert answer.status_code == 409
    assert "1 of the 2 ranks of 'A' are registered" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("changes", "status_code", "said"),
    [
        ({"source": "nobody"}, 404, "old_position: no instance 'nobody'; known are A, B"),
        ({"destination": "nobody"}, 404, "new_position: no instance 'nobody'"),
        ({"destination": "A"}, 422, "nothing to move"),
        ({"old_position": None}, 422, "name a `session`"),
        ({"old_position": None, "session": "unheard of"}, 404, "no instance has reported 'unheard of'"),
        ({"tokens": []}, 422, "tokens: list should have at least 1 item"),
        ({"tokens": [1, 2**31]}, 422, "tokens.1: input should be less than 2147483648"),
        ({"tokens": ["1"]}, 422, "tokens.0: input should be a valid integer"),
        ({"timeout_s": 0}, 422, "timeout_s: input should be greater than 0"),
        ({"timeout_s": 1e9}, 422, "timeout_s: input should be less than or equal to 600"),
        ({"new_position": ["B"]}, 422, "new_position.1: it is missing"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field_and_the_remedy(shared, fleet, changes, status_code, said):
    fleet("A", answer=sends())
    fleet("B")
    answer = move(shared, **changes)
    assert (answer.status_code, said in answer.json()["detail"]) == (status_code, True), answer.text


def test_a_destination_that_takes_no_moves_is_named(shared, fleet):
    fleet("A", answer=sends())
    [receiver] = fleet("B")
    receiver.peer = None
    receiver.register()
    answer = move(shared)
    assert answer.status_code == 409
    assert "psrl.lmcache.enable_p2p" in answer.json()["detail"]


def test_a_session_is_moved_from_whoever_holds_it_and_the_new_holder_is_known(shared, fleet):
    [first] = fleet("A", answer=sends(64, 96))
    fleet("B")
    first.push(wire.SessionsMsg("A", 0, [wire.SessionHeld("agent/7 x", 96, "7")]))
    wait_until(lambda: shared.http.get("/sessions/agent/7 x").status_code == 200, "the session is known")
    assert shared.get("/sessions/agent/7 x")["instance_id"] == "A"
    answer = shared.post(
        "/move", old_position=None, new_position=["B", DRAM], tokens=TOKENS, session="agent/7 x"
    )
    assert answer.json()["num_tokens"] == 64
    assert shared.get("/sessions/agent/7 x")["instance_id"] == "B"


def test_a_move_that_nobody_waits_for_goes_on_and_can_be_asked_about(shared, fleet):
    def answer(command):
        time.sleep(0.3)
        return sends()(command)

    fleet("A", answer=answer)
    fleet("B")
    started = move(shared, wait=False).json()
    assert started["status"] == "running"
    event = started["event_id"]
    assert shared.post("/check_finish", event_id=event).json()["status"] == "running"
    wait_until(
        lambda: shared.post("/check_finish", event_id=event).json()["status"] == "finished", "it has ended"
    )
    assert shared.post("/check_finish", event_id=event).json()["num_tokens"] == 64
    assert shared.post("/check_finish", event_id="none").status_code == 404


def test_a_move_that_failed_can_be_asked_about(shared, fleet):
    fleet("A", answer=lambda command: wire.ErrorMsg("no room"))
    fleet("B")
    event = move(shared, wait=False).json()["event_id"]
    wait_until(lambda: shared.post("/check_finish", event_id=event).json()["status"] == "failed", "it failed")
    assert "no room" in shared.post("/check_finish", event_id=event).json()["reason"]


def test_moves_to_different_workers_do_not_wait_for_each_other(shared, fleet):
    def answer(command):
        time.sleep(0.4)
        return sends()(command)

    for name in "ABCDEFGH":
        fleet(name, answer=answer)
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        pairs = [("A", "B"), ("C", "D"), ("E", "F"), ("G", "H"), ("B", "A"), ("D", "C"), ("F", "E"), ("H", "G")]
        results = list(pool.map(lambda pair: move(shared, *pair).json(), pairs))
    assert [result["num_tokens"] for result in results] == [64] * 8
    assert time.monotonic() - start < 2.5


def test_what_a_worker_tells_of_its_moves_is_listed_and_counted_once(shared, fleet):
    [sender] = fleet("A", answer=sends())
    fleet("B")
    before = shared.metric('psrl_controller_moves_total{outcome="moved"}')
    move(shared)
    record = wire.MoveRecord("A", "B", "7", 64, 96, 4096, 0.02, "tcp", "", "s", 1.0)
    sender.push(wire.MovedMsg("A", 0, [record]))
    name = 'psrl_controller_moves_total{outcome="moved"}'
    wait_until(lambda: shared.metric(name) == before + 1, "it is counted once")
    [latest] = shared.get("/moves?most=1")["moves"]
    assert (latest["num_tokens"], latest["size_bytes"], latest["session"]) == (64, 4096, "s")
    assert latest["outcome"] == "moved"


def test_a_worker_that_is_not_ours_moves_with_the_version_given(shared, fleet):
    [sender] = fleet("A", foreign=True, answer=lambda command: wire.MoveWorkerRetMsg(64))
    fleet("B", foreign=True)
    assert move(shared, version="7").json()["num_tokens"] == 64
    assert sender.commands[0].request_configs[wire.VERSION_KEY] == "7"
    assert shared.get("/moves?most=1")["moves"][0]["outcome"] == "moved"


@pytest.mark.parametrize(
    ("path", "kind", "reply"),
    [
        ("/pin", wire.PinWorkerMsg, wire.PinWorkerRetMsg),
        ("/unpin", wire.UnpinWorkerMsg, wire.UnpinWorkerRetMsg),
    ],
)
def test_pins_reach_every_rank_with_the_version(shared, fleet, path, kind, reply):
    counts = iter([96, 80])
    workers = fleet("A", ranks=2, answer=lambda command: reply(next(counts)))
    answer = shared.post(path, instance_id="A", location=DRAM, tokens=TOKENS, cache_salt="user").json()
    assert (answer["num_tokens"], answer["version"]) == (80, "7")
    for worker in workers:
        [command] = worker.commands
        assert type(command) is kind
        assert command.request_configs[wire.VERSION_KEY] == "7"
        assert command.request_configs[wire.SALT_KEY] == "user"


def test_clear_reaches_every_rank(shared, fleet):
    fleet("A", ranks=2, answer=lambda command: wire.ClearWorkerRetMsg(512))
    assert shared.post("/clear", instance_id="A", location=DRAM).json()["num_tokens"] == 512


def test_health_tells_of_each_rank_even_if_one_does_not_answer(shared, fleet):
    codes = iter([wire.HealthWorkerRetMsg(0), None])
    fleet("A", ranks=2, answer=lambda command: next(codes))
    answer = shared.post("/health", instance_id="A", timeout_s=0.5).json()
    assert sorted(answer["error_codes"].values()) == [-1, 0]
    [problem] = answer["problems"].values()
    assert "no answer" in problem


@pytest.mark.parametrize("path", ["/compress", "/decompress"])
def test_what_is_not_built_says_so(shared, path):
    answer = shared.post(path, instance_id="A", method="cachegen", location=DRAM)
    assert answer.status_code == 501
    assert "not built" in answer.json()["detail"]


def test_worker_infos_are_exact_and_have_lmcaches_fields(shared, fleet):
    assert shared.post("/query_worker_info", instance_id="all").json()["worker_infos"] == []
    fleet("A", ranks=2)
    fleet("B")
    every = shared.post("/query_worker_info", instance_id="all").json()["worker_infos"]
    assert [(one["instance_id"], one["worker_id"]) for one in every] == [("A", 0), ("A", 1), ("B", 0)]
    fields = {"instance_id", "worker_id", "ip", "port", "peer_init_url"}
    assert fields | {"registration_time", "last_heartbeat_time"} <= set(every[0])
    one = shared.post("/query_worker_info", instance_id="A", worker_ids=[1]).json()["worker_infos"]
    assert [info["worker_id"] for info in one] == [1]
    assert shared.post("/query_instance", event_id="e", ip="127.0.0.1").json()["res"] == "A"
    assert shared.post("/query_instance", event_id="e", ip="10.0.0.9").status_code == 404
