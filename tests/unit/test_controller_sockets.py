"""What workers say over real sockets: framing, garbage, signatures, restarts."""

import json

import pytest
import zmq
from controller_support import (
    DRAM,
    SECRET,
    FakeWorker,
    RunningController,
    options,
    raw,
    status,
    wait_until,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl_sglang.controller.frames import Rejected, decode, payloads
from psrl_sglang.controller.inbox import local_address
from psrl_sglang.controller.registry import Limits
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.auth import Signer


@pytest.fixture(scope="module")
def shared():
    with RunningController() as controller:
        yield controller


@pytest.fixture
def controller(shared):
    """One for the tests that need no start of their own, with nobody registered."""
    yield shared
    for worker in shared.get("/controller/workers")["workers"]:
        names = ("instance_id", "worker_id", "ip", "port")
        shared.core.registry.deregister(wire.DeRegisterMsg(*(worker[name] for name in names)))


def held(controller):
    return controller.get("/status")["chunks"]


def workers(controller):
    return controller.get("/controller/workers")["workers"]


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_a_worker_registers_and_is_told_where_to_send_heartbeats(controller, kind):
    with FakeWorker(controller.ports) as worker:
        answer = worker.register(kind=kind)
        assert answer == wire.RegisterRetMsg({"heartbeat_url": f"127.0.0.1:{controller.ports.reply}"})
        [seen] = workers(controller)
        assert (seen["instance_id"], seen["port"], seen["state"]) == ("A", worker.port, "live")


def test_a_worker_that_comes_back_on_another_port_is_asked_there_at_once(controller):
    healthy = lambda command: wire.HealthWorkerRetMsg(0)  # noqa: E731
    with (
        FakeWorker(controller.ports, answer=healthy) as old,
        FakeWorker(controller.ports, answer=healthy) as new,
    ):
        old.register()
        new.register()
        assert controller.post("/health", instance_id="A").json()["error_codes"] == {"0": 0}
        assert (len(old.commands), len(new.commands)) == (0, 1)


def test_several_reports_may_come_in_one_message_as_lmcache_sends_them(controller):
    with FakeWorker(controller.ports, foreign=True) as worker:
        worker.register()
        events = [
            wire.BatchedKVOperationMsg("A", 0, DRAM, [wire.KVOpEvent(wire.OpType.ADMIT, key, key)])
            for key in range(3)
        ]
        worker.push_raw([wire.encode(event) for event in events])
        wait_until(lambda: held(controller) == 3, "all three are counted")


def test_json_is_understood_on_both_sockets(controller):
    with FakeWorker(controller.ports) as worker:
        presence = {"type": "RegisterMsg", **worker.place, "ip": "127.0.0.1", "port": worker.port}
        answer = worker.ask_raw([json.dumps({**presence, "peer_init_url": None}).encode()])
        assert isinstance(answer, wire.RegisterRetMsg)
        operation = {"op_type": "admit", "key": -(1 << 63), "seq_num": 0}
        event = {"type": "BatchedKVOperationMsg", **worker.place, "location": DRAM, "operations": [operation]}
        worker.push_raw([json.dumps(event).encode()])
        wait_until(lambda: held(controller) == 1, "it is counted")


GARBAGE = [
    [b""],
    [b"\xff\xff\xff"],
    [b"{"],
    [b"{" * 100_000],
    [b"\x81" * 5000],
    [raw({"type": "NoSuchMsg"})],
    [raw({"type": "BatchedKVOperationMsg", "instance_id": "A"})],
    [
        raw(
            {
                "type": "RegisterMsg",
                "instance_id": 7,
                "worker_id": "x",
                "ip": None,
                "port": [],
                "peer_init_url": 0,
            }
        )
    ],
    [raw({"type": "MoveWorkerMsg", "worker_event_id": "e"})],
    [b"a", b"b", b"c", b"d"],
]


@pytest.mark.parametrize("frames", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_counted_and_stops_nothing(controller, frames):
    bad = "psrl_controller_frames_rejected_total"

    def rejected():
        text = controller.http.get("/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(bad + "{"))

    with FakeWorker(controller.ports) as worker:
        worker.register()
        before = rejected()
        worker.push_raw(frames)
        answer = worker.ask_raw(frames)
        assert isinstance(answer, wire.ErrorMsg)
        assert answer.error
        wait_until(lambda: rejected() >= before + 2, "both are counted")
        worker.admit([1, 2, 3])
        wait_until(lambda: held(controller) == 3, "reports are still taken")
        assert isinstance(worker.heartbeat(), wire.HeartbeatRetMsg)


def test_a_request_without_an_empty_frame_before_it_is_answered_the_same_way(controller):
    with FakeWorker(controller.ports) as worker, worker._context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 5000
        socket.connect(f"tcp://127.0.0.1:{controller.ports.reply}")
        socket.send(wire.encode(worker._presence(wire.RegisterMsg)))
        [answer] = socket.recv_multipart()
        assert isinstance(wire.decode(answer, wire.ControllerReply), wire.RegisterRetMsg)


def test_a_registration_that_cannot_be_is_answered_with_the_reason(controller):
    with FakeWorker(controller.ports, "all") as worker:
        assert "no name for one instance" in worker.register().error
    endless = status(window=["x" * 100] * 5000)
    with FakeWorker(controller.ports, told=endless) as worker:
        assert "bytes about one worker" in worker.register().error


def test_reports_of_a_worker_that_never_registered_are_not_taken(controller):
    before = controller.metric('psrl_controller_frames_rejected_total{reason="unknown_worker"}')
    with FakeWorker(controller.ports, "stranger") as worker:
        worker.admit([1])
        worker.push(wire.SessionsMsg("stranger", 0, [wire.SessionHeld("s-stranger", 1, "7")]))
        wait_until(
            lambda: (
                controller.metric('psrl_controller_frames_rejected_total{reason="unknown_worker"}')
                == before + 2
            ),
            "both are counted",
        )
    assert held(controller) == 0
    assert controller.http.get("/sessions/s-stranger").status_code == 404


def test_a_worker_that_leaves_is_gone_at_once(controller):
    with FakeWorker(controller.ports) as worker:
        worker.register()
        worker.admit([1, 2])
        wait_until(lambda: held(controller) == 2, "it holds two")
        worker.push(wire.DeRegisterMsg("A", 0, "127.0.0.1", worker.port))
        wait_until(lambda: workers(controller) == [], "it is gone")
        assert held(controller) == 0


def test_a_full_sync_over_the_sockets(controller):
    with FakeWorker(controller.ports) as worker:
        worker.register()
        worker.admit([1, 2, 3])
        assert worker.full_sync([[5], [6, 7], []]).accepted
        wait_until(lambda: held(controller) == 3, "the new set counts")
        state = worker.ask(wire.FullSyncStatusMsg("A", 0, "sync-1"))
        assert (state.is_complete, state.can_exit_freeze, state.missing_batches) == (True, True, [])
        answer = worker.ask(wire.BatchedP2PLookupMsg([6, 7, 1], "B", 0))
        assert answer.layout_info == [("A", DRAM, 2, "127.0.0.1:1")]
        assert worker.ask(wire.BatchedP2PLookupMsg([6], "A", 0)).layout_info == [("", "", 0, "")]


def test_after_a_restart_of_the_controller_workers_tell_everything_again():
    with RunningController() as first:
        ports = first.ports
        worker = FakeWorker(ports)
        worker.register()
        worker.full_sync([[1, 2]])
        wait_until(lambda: held(first) == 2, "two are held")
    chosen = options(http_port=ports.http, pull_port=ports.pull, reply_port=ports.reply)
    with RunningController(chosen) as second, worker:
        assert workers(second) == []
        [command] = worker.heartbeat().commands
        assert command.reason == "the controller did not know this worker"
        assert worker.full_sync([[1, 2]], "sync-2").accepted
        wait_until(lambda: held(second) == 2, "two are held again")
        assert worker.heartbeat().commands == []


def test_a_worker_without_heartbeats_is_late_and_then_gone():
    with (
        RunningController(options(limits=Limits(lease_s=0.8))) as controller,
        FakeWorker(controller.ports) as worker,
    ):
        worker.register()
        wait_until(lambda: workers(controller)[0]["state"] == "late", "it is late")
        worker.heartbeat()
        assert workers(controller)[0]["state"] == "live"
        wait_until(lambda: workers(controller) == [], "it is gone")
        assert "no instance 'A'" in controller.post("/health", instance_id="A").json()["detail"]


def test_with_a_secret_only_signed_frames_count():
    with (
        RunningController(options(secret=SECRET)) as controller,
        FakeWorker(controller.ports, secret=SECRET) as friend,
        FakeWorker(controller.ports, "B") as stranger,
        FakeWorker(controller.ports, "C", secret=b"the secret of another fleet") as other,
    ):
        name = 'psrl_controller_frames_rejected_total{reason="not_authorized"}'
        assert isinstance(friend.register(), wire.RegisterRetMsg)
        stranger.admit([1])
        wait_until(lambda: controller.metric(name) == 1, "an unsigned report is counted")
        for intruder in (stranger, other):
            before = controller.metric(name)
            signed = intruder._signer.sign(wire.encode(intruder._presence(wire.RegisterMsg)))
            with intruder._context.socket(zmq.REQ) as socket:
                socket.linger, socket.rcvtimeo = 0, 5000
                socket.connect(f"tcp://127.0.0.1:{controller.ports.reply}")
                socket.send_multipart(signed)
                assert b"ErrorMsg" in socket.recv_multipart()[0]
            assert controller.metric(name) == before + 1
        assert [one["instance_id"] for one in workers(controller)] == ["A"]
        friend.admit([1, 2])
        wait_until(lambda: held(controller) == 2, "signed reports are taken")


def test_a_report_that_is_sent_twice_counts_once_where_there_is_a_secret():
    with (
        RunningController(options(secret=SECRET)) as controller,
        FakeWorker(controller.ports, secret=SECRET) as friend,
    ):
        frames = Signer(SECRET).sign(wire.encode(friend._presence(wire.HeartbeatMsg)))
        assert isinstance(friend.ask_raw(frames), wire.HeartbeatRetMsg)
        assert "heard before" in friend.ask_raw(frames).error


def test_a_signed_report_is_understood_where_there_is_no_secret(controller):
    with FakeWorker(controller.ports) as worker:
        worker.register()
        worker._signer = Signer(SECRET)
        worker.admit([1])
        wait_until(lambda: held(controller) == 1, "it is counted")


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=80)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5) | st.just("RegisterMsg") | st.just("type"),
        lambda inner: st.dictionaries(st.text(max_size=5) | st.just("type"), inner, max_size=4),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode())
)
def test_no_frame_does_more_than_be_refused(frame):
    for kind in (wire.WorkerEvent, wire.WorkerRequest):
        with pytest.raises(Rejected, match="not a message"):
            decode(frame, kind)


@given(st.lists(st.binary(max_size=10), max_size=4))
def test_framing_is_refused_or_understood(frames):
    assert payloads(frames, Signer(b"")) in (frames, frames[:1])
    with pytest.raises(Rejected):
        payloads(frames, Signer(SECRET))


def test_workers_are_told_an_address_they_can_reach():
    assert local_address("10.1.2.3", "10.9.9.9") == "10.1.2.3"
    assert local_address("0.0.0.0", "127.0.0.1") == "127.0.0.1"
    assert local_address("0.0.0.0", "no address") != "0.0.0.0"
