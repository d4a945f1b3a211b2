"""LMCache's own structs and its own worker against ours; skipped where LMCache is not installed.

`test_our_frames_have_not_changed` needs no LMCache: its vectors were made with LMCache 0.5.6.
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from controller_support import DRAM, FakeWorker, RunningController, options, status, wait_until

from psrl_sglang.controller.registry import Limits
from psrl_sglang.lab.servers import free_port
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.client import request_configs

PEER = Path(__file__).with_name("controller_lmcache_peer.py")
EVERY_KIND = wire.WorkerRequest | wire.WorkerEvent | wire.ControllerReply | wire.Command | wire.CommandReply
PLACE = ("inst", 1)
OPERATIONS = [wire.KVOpEvent(wire.OpType.ADMIT, -5, 1), wire.KVOpEvent(wire.OpType.EVICT, 2**62, 2)]
CONFIGS = request_configs("7", cache_salt="user", timeout_s=1.5)
OURS = [
    wire.RegisterMsg(*PLACE, "10.0.0.1", 5000, None, status()),
    wire.RegisterRetMsg({"heartbeat_url": "h:1"}),
    wire.HeartbeatMsg(*PLACE, "10.0.0.1", 5000, "10.0.0.1:5001", status()),
    wire.HeartbeatRetMsg([wire.FullSyncCommand(reason="r")]),
    wire.HeartbeatRetMsg([]),
    wire.BatchedP2PLookupMsg([1, -2], *PLACE),
    wire.BatchedP2PLookupRetMsg([("a", DRAM, 2, "h:1")]),
    wire.DeRegisterMsg(*PLACE, "10.0.0.1", 5000),
    wire.BatchedKVOperationMsg(*PLACE, DRAM, OPERATIONS, "tag"),
    wire.FullSyncStartMsg(*PLACE, DRAM, "s", 3, 1),
    wire.FullSyncStartRetMsg("s", False, "no"),
    wire.FullSyncBatchMsg(*PLACE, DRAM, "s", 0, [1, -2, 3], "tag"),
    wire.FullSyncEndMsg(*PLACE, DRAM, "s", 3),
    wire.FullSyncStatusMsg(*PLACE, "s"),
    wire.FullSyncStatusRetMsg("s", False, 0.5, False, [1]),
    wire.MoveWorkerMsg("e", DRAM, ("h:1", DRAM), [1, 2, 3], True, CONFIGS),
    wire.MoveWorkerRetMsg(256, 512, 4096, 0.5, "tcp", "why"),
    wire.PinWorkerMsg("e", DRAM, [1], CONFIGS),
    wire.PinWorkerRetMsg(256),
    wire.ClearWorkerMsg("e", DRAM),
    wire.ClearWorkerRetMsg(256),
    wire.HealthWorkerMsg("e"),
    wire.HealthWorkerRetMsg(0),
    wire.CompressWorkerMsg("e", "m", DRAM, [1]),
    wire.DecompressWorkerMsg("e", "m", DRAM, [1]),
    wire.CheckFinishWorkerMsg("e"),
    wire.ErrorMsg("e"),
]


@pytest.fixture(scope="module")
def environment():
    directory = os.environ.get("PSRL_LMCACHE_DIR", "")
    paths = [path for path in (directory, os.environ.get("PYTHONPATH", "")) if path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LMCACHE_TRACK_USAGE": "false"}
    found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lmcache') is None)"
    if subprocess.run([sys.executable, "-c", found], env=env, timeout=60).returncode:
        pytest.skip(
            "this interpreter cannot import lmcache: run tests/lmcache/install.sh, set PSRL_LMCACHE_DIR"
        )
    return env


@pytest.fixture(scope="module")
def exchanged(environment):
    frames = json.dumps([wire.encode(message).hex() for message in OURS])
    ended = subprocess.run(
        [sys.executable, PEER, "structs"],
        input=frames,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout[ended.stdout.index('{"read"') :])


def plain(value):
    return json.loads(msgspec.json.encode(value))


@pytest.mark.lmcache
def test_lmcache_reads_what_we_write(exchanged):
    for message, read in zip(OURS, exchanged["read"], strict=True):
        assert read.pop("type") == type(message).__name__
        if isinstance(message, wire.HeartbeatRetMsg):
            assert [command["reason"] for command in read["commands"]] == [
                one.reason for one in message.commands
            ]
            continue
        assert read == {name: plain(getattr(message, name)) for name in read}, type(message)


@pytest.mark.lmcache
def test_we_read_what_lmcache_writes(exchanged):
    for name, frame, fields in exchanged["own"]:
        mine = wire.decode(bytes.fromhex(frame), EVERY_KIND)
        assert type(mine).__name__ == name
        if isinstance(mine, wire.HeartbeatRetMsg):
            assert mine.commands == [wire.FullSyncCommand("r")]
            continue
        assert fields.pop("type") == name
        assert {field: plain(getattr(mine, field)) for field in fields} == fields, name


@pytest.mark.lmcache
def test_every_kind_of_message_that_both_have_was_exchanged(exchanged):
    ours_alone = {
        "UnpinWorkerMsg",
        "UnpinWorkerRetMsg",
        "LookupWorkerMsg",
        "LookupWorkerRetMsg",
        "MovedMsg",
        "SessionsMsg",
    }
    every = {kind.__name__ for kind in EVERY_KIND.__args__}
    assert {type(message).__name__ for message in OURS} == every - ours_alone
    assert {name for name, _, _ in exchanged["own"]} == every - ours_alone


@pytest.mark.parametrize(
    ("message", "frame"),
    [
        (
            wire.MoveWorkerMsg("e", DRAM, ("h:1", DRAM), [1, 2, 3], True),
            "86a474797065ad4d6f7665576f726b65724d7367af776f726b65725f6576656e745f6964a165ac6f6c645f706f736974696f6e"
            "af4c6f63616c4350554261636b656e64ac6e65775f706f736974696f6e92a3683a31af4c6f63616c4350554261636b656e64"
            "a6746f6b656e7393010203a4636f7079c3",
        ),
        (
            wire.MoveWorkerRetMsg(256),
            "82a474797065b04d6f7665576f726b65725265744d7367aa6e756d5f746f6b656e73cd0100",
        ),
        (
            wire.RegisterMsg("i", 0, "h", 1, None),
            "86a474797065ab52656769737465724d7367ab696e7374616e63655f6964a169a9776f726b65725f696400a26970a168"
            "a4706f727401ad706565725f696e69745f75726cc0",
        ),
        (
            wire.RegisterRetMsg({"heartbeat_url": "h:1"}),
            "82a474797065ae52656769737465725265744d7367ac65787472615f636f6e66696781ad6865617274626561745f75726ca3683a31",
        ),
        (
            wire.HeartbeatRetMsg([wire.FullSyncCommand("r")]),
            "82a474797065af4865617274626561745265744d7367a8636f6d6d616e64739183ac636f6d6d616e645f74797065a966756c6c"
            "5f73796e63a6726561736f6ea172a461726773c0",
        ),
        (
            wire.BatchedKVOperationMsg("i", 0, DRAM, [wire.KVOpEvent(wire.OpType.ADMIT, -5, 1)]),
            "85a474797065b5426174636865644b564f7065726174696f6e4d7367ab696e7374616e63655f6964a169a9776f726b65725f69"
            "6400a86c6f636174696f6eaf4c6f63616c4350554261636b656e64aa6f7065726174696f6e739183a76f705f74797065a561646d"
            "6974a36b6579fba77365715f6e756d01",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, wire.Message) else "",
)
def test_our_frames_have_not_changed(message, frame):
    assert wire.encode(message).hex() == frame
    assert wire.decode(bytes.fromhex(frame), EVERY_KIND) == message


@contextmanager
def lmcache_worker(environment, ports, port, log):
    command = [sys.executable, str(PEER), "worker", str(ports.pull), str(ports.reply), str(port)]
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@pytest.mark.lmcache
def test_lmcaches_own_worker_registers_reports_obeys_and_syncs_after_a_restart(environment, tmp_path):
    log = tmp_path / "worker.log"
    controller = RunningController(options(limits=Limits(foreign_lease_s=30.0)))
    ports, port = controller.ports, free_port()
    try:
        with lmcache_worker(environment, ports, port, log), FakeWorker(ports, "B") as receiver:
            wait_until(lambda: controller.get("/instances")["instances"], "it is registered", timeout_s=60)
            wait_until(lambda: controller.get("/status")["chunks"] == 2, "what it admits is counted")
            receiver.register()
            assert controller.post("/health", instance_id="lmcache-0").json()["error_codes"] == {"0": 0}
            body = {"old_position": ["lmcache-0", DRAM], "new_position": ["B", DRAM], "should_copy": True}
            assert controller.post("/move", **body, tokens=[1, 2, 3], version="7").json()["num_tokens"] == 3
            refused = controller.post("/move", **body, tokens=[666], version="7")
            assert (refused.status_code, "no such tokens" in refused.json()["detail"]) == (502, True)
            pinned = controller.post("/pin", instance_id="lmcache-0", location=DRAM, tokens=[1, 2])
            assert pinned.json()["num_tokens"] == 2
            unpinned = controller.post(
                "/unpin", instance_id="lmcache-0", location=DRAM, tokens=[1, 2], version="7"
            )
            assert unpinned.status_code == 502
            assert controller.post("/clear", instance_id="lmcache-0", location=DRAM).json()["num_tokens"] == 3
            controller.stop()
            same = options(http_port=ports.http, pull_port=ports.pull, reply_port=ports.reply)
            controller = RunningController(same)
            wait_until(lambda: controller.get("/status")["chunks"] == 3, "it tells all it holds", timeout_s=20)
        wait_until(lambda: not controller.get("/instances")["instances"], "it has left", timeout_s=10)
    except AssertionError:
        sys.stderr.write(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        controller.stop()
