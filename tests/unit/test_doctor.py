"""The checks of `psrl-sglang doctor` that need nobody else: ports, addresses, memory, secret, CMA, NIXL."""

import json
import os
import signal
import socket
import sys
import time

import pytest
from typer.testing import CliRunner

from psrl_sglang.cli import app
from psrl_sglang.config import load_config
from psrl_sglang.doctor import cma, memory, nixl, pagehash, places, secrets
from psrl_sglang.doctor.processes import run_command
from psrl_sglang.doctor.result import State, ok
from psrl_sglang.doctor.runner import Check, run_all

MOVES = {"enable": True, "enable_p2p": True, "offload_size_gb": 0.001, "p2p_transfer_channel": "auto"}


def settings(lmcache=None, **sglang):
    return {"psrl": {"lmcache": {**MOVES, **(lmcache or {})}, "sglang": sglang}}


def config(lmcache=None, **sglang):
    return load_config(settings(lmcache, **sglang))


def states(results):
    return {result.name: result.state for result in results}


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one.getsockname()[1]


def test_a_check_that_hangs_holds_up_no_other_and_ends_at_its_deadline():
    began_s = time.monotonic()
    checks = [Check("hangs", lambda: time.sleep(60) or [], 0.2), Check("ends", lambda: [ok("ends", "")])]
    results = run_all(checks)
    assert states(results) == {"hangs": State.FAIL, "ends": State.OK}
    assert time.monotonic() - began_s < 30


def test_a_check_that_fails_itself_is_a_result():
    results = run_all([Check("broken", lambda: [ok("never", str(1 / 0))])])
    assert states(results) == {"broken": State.FAIL}
    assert "ZeroDivisionError" in results[0].found


def test_a_port_that_is_taken_is_told_with_who_has_it(listener):
    results = places.check_ports(config({"controller_base_port": listener}), 1)
    taken = next(result for result in results if result.name == "port controller_base_port")
    assert taken.state is State.WARN
    assert str(os.getpid()) in taken.found


def test_every_rank_has_two_ports_that_must_be_free(listener):
    results = places.check_ports(config(move_port=listener - 3), 2)
    moves = [result for result in results if "move_port" in result.name]
    assert len(moves) == 4
    assert moves[3].state is State.WARN


def test_the_ports_of_a_controller_elsewhere_need_not_be_free_here(listener):
    results = places.check_ports(config({"controller_host": "192.0.2.1", "controller_base_port": listener}), 1)
    assert states(results) == {"port move_port": State.OK}


@pytest.mark.parametrize(
    ("host", "is_remote", "state"),
    [
        ("127.0.0.1", False, State.OK),
        ("127.0.0.1", True, State.FAIL),
        ("203.0.113.9", False, State.FAIL),
        ("no-such-host.invalid", False, State.FAIL),
    ],
)
def test_move_host_is_an_address_of_this_machine_that_peers_can_dial(host, is_remote, state):
    results = places.check_move_host(config(move_host=host), has_remote_peers=is_remote)
    assert states(results) == {"move_host": state}
    assert (state is State.OK) or results[0].remedy


def test_an_offload_tier_that_does_not_fit_fails(tmp_path):
    assert states(memory.check_memory(config()))["memory"] is State.OK
    assert states(memory.check_memory(config({"offload_size_gb": 1e6})))["memory"] is State.FAIL


def test_the_limit_of_a_container_counts(tmp_path):
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 29}\n")
    free_bytes, limit = memory.available_bytes(tmp_path)
    assert free_bytes == 1 << 29
    assert "container" in limit
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes(tmp_path)[1] == ""


@pytest.mark.parametrize(
    ("text", "state"), [("always [madvise] never", State.OK), ("always madvise [never]", State.WARN)]
)
def test_huge_pages_that_are_off_are_a_warning(tmp_path, text, state):
    (tmp_path / "enabled").write_text(text)
    assert memory.huge_pages(tmp_path / "enabled").state is state


@pytest.mark.parametrize(
    ("content", "mode", "state"),
    [
        ("long enough to be a secret", 0o600, State.OK),
        ("long enough to be a secret", 0o644, State.WARN),
        ("short", 0o600, State.FAIL),
        (None, 0, State.FAIL),
    ],
)
def test_a_secret_is_there_long_enough_and_private(tmp_path, content, mode, state):
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    results = secrets.check_secret(config(secret_file=str(path)))
    assert states(results) == {"secret": state}
    assert content is None or content not in results[0].found


def test_without_a_secret_only_loopback_is_let_pass(monkeypatch):
    monkeypatch.delenv("PSRL_SECRET", raising=False)
    assert states(secrets.check_secret(config())) == {"secret": State.WARN}
    assert states(secrets.check_secret(config(move_host="10.0.0.7"))) == {"secret": State.FAIL}


def test_another_process_of_this_user_may_read_our_memory():
    results = cma.check_cma("auto")
    assert states(results) == {"cma": State.OK}
    assert "user" in results[0].found


def test_what_decides_on_cma_is_told(tmp_path):
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "sys/kernel/yama/ptrace_scope").write_text("2\n")
    (tmp_path / "self/status").write_text("Name:\tx\nSeccomp:\t2\n")
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026532000]")
    told = cma.describe(tmp_path)
    for part in ("Yama scope 2 (CAP_SYS_PTRACE only)", "seccomp mode 2", "engines of the same container"):
        assert part in told


def test_nixl_that_is_not_there_is_a_warning_unless_it_is_forced(monkeypatch):
    monkeypatch.setattr(nixl, "PACKAGES", ("no-such-nixl",))
    assert states(nixl.check_nixl("auto")) == {"nixl": State.WARN}
    assert states(nixl.check_nixl("tcp")) == {"nixl": State.SKIP}


@pytest.mark.parametrize(
    ("variables", "state"),
    [
        ({}, State.OK),
        ({"UCX_TLS": "rc,cuda_copy"}, State.OK),
        ({"UCX_TLS": "^efa"}, State.OK),
        ({"UCX_TLS": "tcp"}, State.WARN),
        ({"UCX_TLS": "posix,sysv,cma"}, State.FAIL),
    ],
)
def test_transports_of_ucx_that_cannot_work_are_found(variables, state):
    assert nixl.check_environment(variables).state is state


def test_nixl_is_made_where_it_is_installed():
    if not nixl.installed():
        pytest.skip("no NIXL wheel")
    assert states(nixl.check_nixl("nixl")) == {"nixl environment": State.OK, "nixl": State.OK}


def test_nixl_that_cannot_be_made_fails_where_it_is_forced(monkeypatch):
    if not nixl.installed():
        pytest.skip("no NIXL wheel")
    monkeypatch.setenv("UCX_TLS", "posix")
    assert states(nixl.check_nixl("nixl"))["nixl"] is State.FAIL


def test_what_crashes_or_hangs_does_so_in_another_process():
    said = "import os; os.write(1, b'here\\n'); "
    crashed = run_command(
        [sys.executable, "-c", f"{said}os.kill(os.getpid(), {int(signal.SIGSEGV)})"], limit_s=20
    )
    assert (crashed.how, crashed.lines) == ("crashed with SIGSEGV", ["here"])
    hung = run_command([sys.executable, "-c", f"{said}import time; time.sleep(60)"], limit_s=2)
    assert (hung.how, hung.lines) == ("hung", ["here"])


def test_the_page_hash_needs_a_compiler_ninja_and_headers(monkeypatch, tmp_path):
    assert states(pagehash.check_page_hash(config())) == {"page hash": State.OK}
    monkeypatch.setenv("CXX", "/bin/false")
    assert states(pagehash.check_page_hash(config())) == {"page hash": State.FAIL}
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "compiler" in pagehash.check_page_hash(config())[0].found


def doctor(*args):
    return CliRunner().invoke(app, ["doctor", *args])


def test_exit_status_says_whether_something_fails(tmp_path):
    good = doctor("--config", json.dumps(settings()), "--json")
    said = json.loads(good.stdout)
    assert good.exit_code == 0, said
    assert said["ok"] is True
    assert {"name", "state", "found", "remedy"} == set(said["checks"][0])
    bad = doctor("--config", json.dumps(settings(move_host="203.0.113.9")), "--json")
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["ok"] is False


def test_settings_that_are_not_valid_fail_and_the_rest_is_checked(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("psrl: {lmcache: {chunk_size: minus}}")
    said = json.loads(doctor("--config", str(path), "--json").stdout)
    found = {check["name"]: check for check in said["checks"]}
    assert found["settings"]["state"] == "fail"
    assert "chunk_size" in found["settings"]["found"]
    assert "huge pages" in found


@pytest.mark.parametrize(
    "args",
    [("--config", "/no/such/file"), ("--peer", "nonsense"), ("--controller", "10.0.0.1:9000"), ("--tp", "0")],
)
def test_bad_input_is_refused_with_status_2(args):
    assert doctor(*args).exit_code == 2


def test_the_table_says_what_to_do():
    result = doctor("--config", json.dumps(settings(move_host="203.0.113.9")))
    assert "-> psrl.sglang.move_host" in result.stdout
