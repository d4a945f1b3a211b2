"""The checks of `psrl-sglang doctor` that ask others: real move workers, a real controller, and impostors."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from move_support import SECRET, TOKEN, Controller
from support import wait_until
from test_controller_real_workers import Peer

from psrl_sglang.doctor.controller import ControllerPorts, check_controller
from psrl_sglang.doctor.pairs import check_pairs
from psrl_sglang.doctor.peers import check_peer
from psrl_sglang.doctor.result import State
from psrl_sglang.transfer.handshake import Challenge

NO_PORTS = ControllerPorts(None, None)


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    one = Controller(tmp_path_factory.mktemp("controller"))
    one.url = f"http://127.0.0.1:{one.http}"
    yield one
    one.stop()


def found(results):
    return {result.name: result for result in results}


@contextmanager
def answering(reply):
    """A listener that says so many bytes to everybody, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            held = []
            while True:
                try:
                    held.append(listener.accept()[0])
                    held[-1].sendall(reply)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def framed(message):
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def test_a_move_worker_is_known_by_its_first_word(controller):
    with Peer(controller, instance_id="alone", secret=SECRET) as peer:
        (result,) = check_peer(peer.data)
        assert result.state is State.OK
        (other,) = check_peer(peer.command)
        assert other.state is State.FAIL
        assert "move_port + 1" in other.remedy


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"", "says nothing"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "no move worker"),
        (framed(Challenge(99, b"n" * 16)), "speaks version 99"),
    ],
)
def test_an_impostor_is_told_within_the_deadline(reply, said):
    began_s = time.monotonic()
    with answering(reply) as address:
        (result,) = check_peer(address, 0.5)
    assert result.state is State.FAIL
    assert said in result.found
    assert time.monotonic() - began_s < 20


def test_a_port_where_nobody_listens_fails():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (result,) = check_peer(f"127.0.0.1:{port}")
    assert result.state is State.FAIL


def test_a_controller_is_reached_with_its_token_on_all_its_ports(controller):
    results = found(check_controller(controller.url, TOKEN, ControllerPorts(controller.pull, controller.reply)))
    names = ("controller", "controller token", "controller controller_pull_port", "clock of the controller")
    assert {results[name].state for name in names} == {State.OK}


@pytest.mark.parametrize("token", ["", "another token altogether"])
def test_a_token_that_is_not_taken_fails(controller, token):
    results = found(check_controller(controller.url, token, NO_PORTS))
    assert results["controller token"].state is State.FAIL
    assert "PSRL_CONTROLLER_TOKEN" in results["controller token"].remedy
    assert "instances" not in results


def test_a_report_port_that_nobody_has_fails(controller):
    results = found(check_controller(controller.url, TOKEN, ControllerPorts(9, None)))
    assert results["controller controller_pull_port"].state is State.FAIL


def test_workers_are_paired_and_told_why_not(controller):
    given = {
        "a": {},
        "b": {},
        "c": {"version": "2"},
        "d": {"model": "another"},
        "e": {"namespace": "elsewhere"},
    }
    peers = [Peer(controller, instance_id=name, secret=SECRET, **more) for name, more in given.items()]
    try:
        wait_until(lambda: all(controller.workers(name) for name in given), "all are registered")
        results = found(check_controller(controller.url, TOKEN, NO_PORTS))
        assert results["a and b"].state is State.OK
        assert "by tcp" in results["a and b"].found
        assert results["a and c"].state is State.WARN
        assert "1 and 2" in results["a and c"].found
        assert results["a and d"].state is State.FAIL
        assert "model=" in results["a and d"].found
        assert "elsewhere" in results["a and e"].found
    finally:
        for peer in peers:
            peer.__exit__()


def instance(name, **more):
    common = {"layout": "model=m", "tag": "psrl:1", "version": "1", "window": ["psrl:1"], "ranks": 1}
    common |= {"transports": ["cma", "nixl", "tcp"], "workers": [{"ip": "10.0.0.1"}]}
    return {"instance_id": name, **common, **more}


def test_cma_is_for_one_host_and_nixl_for_one_version():
    there = {"workers": [{"ip": "10.0.0.2"}]}
    (same,) = check_pairs([instance("a"), instance("b")])
    assert "by cma" in same.found
    (apart,) = check_pairs([instance("a"), instance("b", **there)])
    assert "by nixl" in apart.found
    versions = [instance("a", nixl_version="1.5.1"), instance("b", nixl_version="1.3.2", **there)]
    (skewed,) = check_pairs(versions)
    assert "by tcp" in skewed.found
    (none,) = check_pairs([instance("a", transports=["cma"]), instance("b", **there)])
    assert none.state is State.FAIL


def test_versions_that_nobody_named_are_told_what_they_cost():
    pair = [instance("a", version="1#e1-x", tag="psrl:1#e1-x", window=[]), instance("b")]
    (result,) = check_pairs(pair)
    assert result.state is State.WARN
    assert "weight_version" in result.remedy


def test_of_very_many_pairs_only_those_that_are_not_well_are_told():
    many = [instance(f"i{number}") for number in range(12)]
    results = check_pairs([*many, instance("odd", layout="model=n")])
    assert len(results) == 1 + 12
    assert "66 of 78" in results[0].found


@contextmanager
def controller_with_clock(skew_s):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b"ok\n" if self.path == "/healthz" else json.dumps({"instances": []}).encode()
            self.send_response_only(200)
            self.send_header("date", formatdate(time.time() + skew_s, usegmt=True))
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("skew_s", "state"), [(0, State.OK), (15, State.WARN), (-40, State.FAIL), (3600, State.FAIL)]
)
def test_clocks_that_are_apart_are_found(skew_s, state):
    with controller_with_clock(skew_s) as url:
        results = found(check_controller(url, "", NO_PORTS))
    assert results["clock of the controller"].state is state
    assert results["controller token"].state is State.WARN  # it takes anybody
    assert results["instances"].state is State.WARN


def test_what_is_no_controller_fails_within_the_deadline():
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno") as address:
        (result,) = check_controller(f"http://{address}", "", NO_PORTS)
    assert result.state is State.FAIL
