"""Servers under the lab's control: a start tells why it failed, nothing stays behind, a fork is a server."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from psrl_sglang.lab import processes
from psrl_sglang.lab.servers import Server, ServerError
from psrl_sglang.lab.zygote import Zygote, ZygoteError

pytestmark = pytest.mark.engine

PROMPT = list(range(100))

PLUGIN = """
import os
from pathlib import Path
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

DIRECTORY = Path(os.environ["PROBE_DIRECTORY"])

def mark(result, *args, **kwargs):
    (DIRECTORY / f"hooked-{os.getpid()}").touch()

def register():
    (DIRECTORY / f"loaded-{os.getpid()}").touch()
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_init_info", mark, HookType.AFTER)
"""

OWNER = """
import sys, time
from psrl_sglang.lab.servers import Server
from psrl_sglang.lab.zygote import Zygote

model, log = sys.argv[1:]
zygote = Zygote(log_path=log + ".zygote")
server = Server(model, log_path=log, zygote=zygote, args=("--max-total-tokens", "4096"))
sys.stdout.write(f"{zygote.pid} {server.pid}\\n")
sys.stdout.flush()
time.sleep(600)
"""


def pids(directory, kind):
    return {int(file.name.removeprefix(f"{kind}-")) for file in directory.glob(f"{kind}-*")}


def test_every_process_of_a_forked_server_loads_its_plugins_itself(server_factory, tmp_path):
    site, probe = tmp_path / "site", tmp_path / "probe"
    info = site / "psrl_probe-1.0.dist-info"
    info.mkdir(parents=True)
    probe.mkdir()
    (site / "psrl_probe.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: psrl-probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\npsrl_probe = psrl_probe:register\n")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    server = server_factory(env={"PROBE_DIRECTORY": str(probe), "PYTHONPATH": path})
    children = {child.pid for child in psutil.Process(server.pid).children()}
    loaded, hooked = pids(probe, "loaded"), pids(probe, "hooked")
    assert server.pid in loaded
    # The scheduler and the detokenizer, both the server's own children, as after a genuine start.
    assert len(loaded - {server.pid}) == 2
    assert loaded - {server.pid} <= children
    assert len(hooked) == 1
    assert hooked < loaded - {server.pid}
    server.stop(grace_s=0.0)


def test_server_that_exits_early_tells_why(server_factory):
    with pytest.raises(ServerError, match=r"(?s)exited with code 2.*--no-such-flag"):
        server_factory(args=("--no-such-flag",))


def test_server_without_the_mends_of_its_platform_does_not_serve(server_factory):
    with pytest.raises(ServerError, match=r"(?s)not applied: .*_run_sdpa_forward_extend"):
        server_factory(env={"SGLANG_PLUGINS": "none_of_them"}, start_timeout_s=60.0)


def test_server_that_is_late_is_ended(zygote, models, tmp_path):
    log = tmp_path / "server.log"
    with pytest.raises(ServerError, match="not healthy after"):
        Server(models[1], zygote=zygote, log_path=log, start_timeout_s=0.2)
    commands = [" ".join(child.cmdline()) for child in psutil.Process(zygote.pid).children(recursive=True)]
    assert not [command for command in commands if str(log) in command]


def test_crash_is_reported_and_leaves_no_process(server_factory):
    server = server_factory()
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while server.exit_code() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.exit_code() == -signal.SIGKILL
    processes.wait_group_gone(server.pid, timeout_s=10)
    server.stop()
    server.stop()


def test_stop_is_graceful_and_may_be_repeated(server_factory):
    server = server_factory()
    server.stop(grace_s=30.0)
    assert server.exit_code() == 0
    assert processes.group_members(server.pid) == []
    server.stop()


def test_other_platform_is_refused(zygote, models, tmp_path):
    with pytest.raises(ZygoteError, match="psrl_cpu"):
        Server(models[1], zygote=zygote, log_path=tmp_path / "log", env={"SGLANG_PLATFORM": "cuda"})


def test_nothing_outlives_a_killed_owner(models, tmp_path):
    command = [sys.executable, "-c", OWNER, str(models[1]), str(tmp_path / "server.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            zygote_pid, server_pid = map(int, owner.stdout.readline().split())
            assert len(processes.group_members(server_pid)) >= 3
        finally:
            owner.kill()
    processes.wait_group_gone(server_pid, timeout_s=20)
    processes.wait_group_gone(zygote_pid, timeout_s=20)


def test_genuine_server_answers_as_a_forked_one(server_factory):
    with server_factory() as forked:
        expected = forked.generate(PROMPT, 16)
    with server_factory(zygote=None) as genuine:
        found = genuine.generate(PROMPT, 16)
        assert len(processes.group_members(genuine.pid)) >= 3
    assert (found.output_ids, found.logprobs) == (expected.output_ids, expected.logprobs)
    assert genuine.exit_code() == 0
    assert processes.group_members(genuine.pid) == []


def test_stopped_zygote_says_so(tmp_path):
    # Never started: the interpreter refuses the module's argument at once.
    log = tmp_path / "zygote.log"
    with pytest.raises(ZygoteError, match=r"(?s)ended.*no_such_directory|Error"):
        Zygote(log_path=log, env={"PYTHONHOME": str(tmp_path / "no_such_directory")})
