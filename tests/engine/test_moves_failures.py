"""Engines that die, hang or come back in the middle of a move: the other one goes on as if nothing had been."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_plugin import Faults
from move_support import assert_no_move_left, free_ports, movable, move, moves
from support import assert_books_hold, assert_same, prompt, wait_until
from tier_support import NEW_TOKENS, assert_hit, assert_nothing_held, settle, start

from psrl_sglang.lab import processes
from psrl_sglang.lab.servers import Server
from psrl_sglang.transfer.client import MoveClient

pytestmark = pytest.mark.engine
LONG = 3201


@pytest.fixture(scope="module")
def a(server_factory):
    return start(server_factory, movable(sglang={"instance_id": "a"}))


@pytest.fixture
def source(a):
    """The engine that must come through all of it."""
    yield a
    assert a.exit_code() is None
    assert_no_move_left(a)
    assert_nothing_held(a)
    assert_books_hold(a)


@pytest.fixture
def faults(tmp_path):
    return Faults(tmp_path)


def known(server: Server, seed: int, length: int = LONG) -> tuple[list[int], object]:
    asked = prompt(seed, length)
    server.generate(asked, 1)
    answer = server.generate(asked, NEW_TOKENS)
    settle(server)
    return asked, answer


def test_the_destination_is_killed_while_the_bytes_come(source, server_factory, faults):
    faults.set(land_s=0.5)
    b = start(server_factory, movable(), env=faults.env)
    address = moves(b)["data_address"]
    asked, answer = known(source, 1)
    with ThreadPoolExecutor(1) as threads:
        began_s = time.monotonic()
        moving = threads.submit(move, asked, source, b)
        wait_until(lambda: faults.seen("landed") > 0, "the bytes come")
        processes.kill_group(b.pid)
        result = moving.result()
    assert not result.ok
    assert result.reason
    assert time.monotonic() - began_s < 20.0
    late = MoveClient().transfer_direct(asked, moves(source)["command_address"], address, "1")
    assert not late.ok
    c = start(server_factory, movable())
    assert move(asked, source, c).present_tokens == LONG - 1
    assert_hit(c, asked, answer, "host")
    c.stop(grace_s=5.0)


def test_the_destination_hangs_until_the_deadline_and_another_one_is_served(source, server_factory, faults):
    b, c = start(server_factory, movable(), env=faults.env), start(server_factory, movable())
    asked, answer = known(source, 2)
    addresses = moves(source)["command_address"], moves(b)["data_address"]
    os.killpg(b.pid, signal.SIGSTOP)
    try:
        result = MoveClient().transfer_direct(asked, *addresses, "1", timeout_s=3.0)
        assert not result.ok
        assert "late" in result.reason or "no answer" in result.reason
        assert move(asked, source, c).present_tokens == LONG - 1
        assert_hit(c, asked, answer, "host")
    finally:
        os.killpg(b.pid, signal.SIGCONT)
    assert move(asked, source, b).present_tokens == LONG - 1
    assert_hit(b, asked, answer, "host")
    for server in (b, c):
        assert_no_move_left(server)
        server.stop(grace_s=5.0)


def test_the_source_is_killed_and_its_request_is_computed(source, server_factory, faults):
    faults.set(land_s=0.5)
    dying = start(server_factory, movable())
    b = start(server_factory, movable(), env=faults.env)
    asked, answer = known(dying, 3)
    thread = threading.Thread(target=move, args=(asked, dying, b), kwargs={"timeout_s": 5.0})
    thread.start()
    wait_until(lambda: faults.seen("landed") > 0, "the bytes come")
    processes.kill_group(dying.pid)
    again = b.generate(asked, NEW_TOKENS)
    assert again.output_ids == answer.output_ids
    thread.join(30)
    faults.set()
    assert_no_move_left(b)
    assert_nothing_held(b)
    other, told = known(source, 4)
    assert move(other, source, b).present_tokens == LONG - 1
    assert_hit(b, other, told, "host")
    b.stop(grace_s=5.0)


def test_an_engine_that_comes_back_at_its_address_is_moved_to_again(source, server_factory):
    settings = movable(sglang={"move_port": free_ports(2)})
    asked, answer = known(source, 5, 601)
    for _ in range(2):
        b = start(server_factory, settings)
        result = move(asked, source, b)
        assert result.num_tokens == 592, result.reason
        again = b.generate(asked, NEW_TOKENS)
        assert again.cached_tokens == 592
        assert_same(again, answer)
        b.stop(grace_s=0.0)
