"""`psrl-sglang controller` and `psrl-sglang move` as processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from controller_support import FakeWorker, RunningController, options, wait_until

from psrl_sglang.controller.service import Ports
from psrl_sglang.transfer import messages as wire

ENV = {name: value for name, value in os.environ.items() if not name.startswith("PSRL_")}
FREE = ("--http-port", "0", "--pull-port", "0", "--reply-port", "0")
TOKEN = "a-token-of-the-controller"


def run(*args, env=None):
    return subprocess.run(
        [sys.executable, "-c", "from psrl_sglang.cli import main; main()", *args],
        env={**ENV, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )


class Process:
    def __init__(self, *args, env=None):
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from psrl_sglang.cli import main; main()",
                "controller",
                "--json-ready",
                *args,
            ],
            env={**ENV, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(self._process.communicate(timeout=10)[1])
        ready = json.loads(line)
        self.ports = Ports(ready["http_port"], ready["pull_port"], ready["reply_port"])
        self.url = f"http://127.0.0.1:{self.ports.http}"

    def stop(self, number=signal.SIGTERM):
        start = time.monotonic()
        self._process.send_signal(number)
        _, errors = self._process.communicate(timeout=10)
        return self._process.returncode, time.monotonic() - start, errors

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate(timeout=10)


def test_it_says_what_it_listens_on_serves_and_ends_at_a_signal(tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    with Process(*FREE, "--token-file", str(token_file), "--lease-s", "2") as process:
        assert httpx.get(f"{process.url}/status", trust_env=False).status_code == 401
        headers = {"authorization": f"Bearer {TOKEN}"}
        told = httpx.get(f"{process.url}/status", headers=headers, trust_env=False).json()
        assert told["lease_s"] == 2.0
        with (
            FakeWorker(process.ports) as worker,
            httpx.stream("GET", f"{process.url}/events", headers=headers, trust_env=False) as stream,
        ):
            worker.register()
            next(stream.iter_lines())
            status, seconds, errors = process.stop()
        assert (status, seconds < 5) == (0, True), errors
        assert "Traceback" not in errors


def test_a_port_that_is_taken_is_named_with_the_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option, setting in (("--http-port", "base"), ("--pull-port", "pull"), ("--reply-port", "reply")):
            ended = run("controller", *FREE, option, str(port))
            assert ended.returncode == 2
            assert f"127.0.0.1:{port}" in ended.stderr
            assert f"{option} or psrl.lmcache.controller_{setting}_port" in ended.stderr


def test_ports_and_secret_come_from_the_settings(tmp_path):
    with RunningController() as used:
        ports = used.ports
    secret = tmp_path / "secret"
    secret.write_text("the secret of the fleet")
    lmcache = {
        "controller_base_port": ports.http,
        "controller_pull_port": ports.pull,
        "controller_reply_port": ports.reply,
    }
    settings = json.dumps({"psrl": {"lmcache": lmcache, "sglang": {"secret_file": str(secret)}}})
    with Process("--config", settings) as process:
        assert process.ports == ports
        with FakeWorker(ports, secret=b"the secret of the fleet") as worker:
            assert isinstance(worker.register(), wire.RegisterRetMsg)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--host", "0.0.0.0"), "--allow-unauthenticated"),
        (("--host", "no.such.host.invalid", "--allow-unauthenticated"), "no address of this machine"),
        (("--config", "{"), ""),
        (("--token-file", "/nowhere"), "cannot read /nowhere"),
        (("--secret-file", "/nowhere"), "/nowhere"),
        (("--http-port", "70000"), "65535"),
        (("--lease-s", "0"), "--lease-s"),
    ],
)
def test_options_that_cannot_be_are_refused(args, said):
    ended = run("controller", *FREE, *args)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("token", ["short", "with a space in the middle"])
def test_a_token_that_is_none_is_refused(token):
    ended = run("controller", *FREE, env={"PSRL_CONTROLLER_TOKEN": token})
    assert ended.returncode == 2
    assert token not in ended.stderr


@pytest.fixture
def fleet():
    """A controller with A, which sends, and B."""
    replies = []
    answer = lambda command: replies[-1]  # noqa: E731
    with (
        RunningController(options(token=TOKEN)) as controller,
        FakeWorker(controller.ports, "A", answer=answer) as sender,
        FakeWorker(controller.ports, "B") as receiver,
    ):
        sender.register()
        receiver.register()
        yield controller, sender, replies


def move(controller, *args, token=TOKEN):
    return run("move", "--controller", controller.url, *args, env={"PSRL_CONTROLLER_TOKEN": token})


def test_move_says_what_was_moved(fleet, tmp_path):
    controller, sender, replies = fleet
    replies.append(wire.MoveWorkerRetMsg(2, 3, 4096, 0.01, "tcp", "the last page is not full"))
    ended = move(
        controller, "--from", "A", "--to", "B", "--version", "7", "--tokens", "1,2, 3", "--session", "s"
    )
    assert ended.returncode == 0, ended.stderr
    assert "2 tokens moved (4096 bytes in" in ended.stdout
    assert "B has the first 3: the last page is not full" in ended.stdout
    assert sender.commands[0].tokens == [1, 2, 3]
    ids = tmp_path / "ids.json"
    ids.write_text("[4,\n 5]\n")
    ended = move(controller, "--from", "A", "--to", "B", "--input-ids-file", str(ids), "--give-up", "--json")
    assert json.loads(ended.stdout)["num_tokens"] == 2
    assert (sender.commands[1].tokens, sender.commands[1].copy) == ([4, 5], False)


def test_move_tells_why_nothing_was_moved(fleet):
    controller, _, replies = fleet
    replies.append(wire.MoveWorkerRetMsg(0, 0, reason="nothing of it is held"))
    ended = move(controller, "--from", "A", "--to", "B", "--tokens", "1")
    assert (ended.returncode, "nothing of it is held" in ended.stdout) == (1, True)
    replies.append(wire.ErrorMsg("no room"))
    ended = move(controller, "--from", "A", "--to", "B", "--tokens", "1")
    assert (ended.returncode, "no room" in ended.stderr) == (1, True)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--from", "A", "--to", "nobody", "--tokens", "1"), "no instance 'nobody'"),
        (("--from", "A", "--to", "B"), "one of --input-ids-file and --tokens"),
        (("--from", "A", "--to", "B", "--tokens", "1,x"), "'x' is no token id"),
        (("--from", "A", "--to", "B", "--input-ids-file", "/nowhere"), "cannot read /nowhere"),
        (("--to", "B", "--tokens", "1"), "name a `session`"),
    ],
)
def test_move_refuses_bad_input(fleet, args, said):
    ended = move(fleet[0], *args)
    assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr


def test_move_tells_when_there_is_no_controller_or_no_right_to_ask(fleet):
    ended = move(fleet[0], "--from", "A", "--to", "B", "--tokens", "1", token="another-token-altogether")
    assert (ended.returncode, "token" in ended.stderr) == (2, True)
    for url in ("http://127.0.0.1:1", "nonsense"):
        ended = run("move", "--controller", url, "--from", "A", "--to", "B", "--tokens", "1")
        assert (ended.returncode, "cannot reach the controller" in ended.stderr) == (2, True)


def test_a_worker_finds_a_controller_that_was_killed_and_started_again():
    with Process(*FREE) as first:
        ports = first.ports
        worker = FakeWorker(ports)
        worker.register()
        first._process.kill()
        first._process.communicate(timeout=10)
    same = ("--http-port", str(ports.http), "--pull-port", str(ports.pull), "--reply-port", str(ports.reply))
    with Process(*same) as second, worker:
        assert worker.heartbeat().commands
        worker.full_sync([[1, 2, 3]])

        def chunks():
            return httpx.get(f"{second.url}/status", trust_env=False).json()["chunks"]

        wait_until(lambda: chunks() == 3, "what it holds is known again")
