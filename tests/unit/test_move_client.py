"""Asking workers without a controller: one deadline, a reason for everything, nothing left behind."""

import asyncio
import concurrent.futures
import socket
import time
from contextlib import ExitStack

import numpy as np
import pytest
from controller_support import SECRET, FakeWorker

from psrl_sglang.controller.service import Ports
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.client import AsyncMoveClient, MoveClient, MoveResult

NOBODY = Ports(1, 1, 1)
MOVED = wire.MoveWorkerRetMsg(64, 96, 1000, 0.01, "cma")


class Blocking:
    """`AsyncMoveClient` with the calls of `MoveClient`, for tests of both."""

    def __init__(self, secret=b""):
        self._secret = secret

    def __getattr__(self, name):
        async def call(*args, **options):
            async with AsyncMoveClient(self._secret) as client:
                return await getattr(client, name)(*args, **options)

        return lambda *args, **options: asyncio.run(call(*args, **options))

    def close(self):
        pass


@pytest.fixture(params=[MoveClient, Blocking], ids=["sync", "async"])
def make(request):
    with ExitStack() as owned:

        def client(secret=b""):
            made = request.param(secret)
            owned.callback(made.close)
            return made

        yield client


@pytest.fixture
def worker():
    with ExitStack() as owned:
        yield lambda answer, **more: owned.enter_context(FakeWorker(NOBODY, answer=answer, **more))


def test_a_move_says_what_went_over(make, worker):
    source = worker(lambda command: MOVED)
    result = make().transfer_direct(
        np.arange(3), source.address, "127.0.0.1:9", "7", cache_salt="user", extra_key="lora", session="s"
    )
    assert result == MoveResult(True, 64, 96, 1000, result.seconds, "cma", "", "moved")
    assert 0 < result.seconds < 5
    [command] = source.commands
    assert (command.tokens, command.copy) == ([0, 1, 2], True)
    assert command.new_position[0] == "127.0.0.1:9"
    assert command.request_configs == {
        wire.VERSION_KEY: "7",
        wire.SALT_KEY: "user",
        wire.EXTRA_KEY: "lora",
        wire.SESSION_KEY: "s",
        wire.TIMEOUT_KEY: 4.75,
    }


def test_over_ranks_the_least_counts(make, worker):
    ranks = [worker(lambda command, n=n: wire.MoveWorkerRetMsg(n, n + 16, 100, 0.01, "tcp")) for n in (64, 32)]
    result = make().transfer_direct([1], [one.address for one in ranks], ["h:1", "h:2"], "7", copy=False)
    assert (result.ok, result.num_tokens, result.present_tokens, result.size_bytes) == (True, 32, 48, 200)
    assert [one.commands[0].new_position[0] for one in ranks] == ["h:1", "h:2"]
    assert not ranks[0].commands[0].copy


def test_a_program_reads_what_became_of_a_move_and_over_ranks_the_worst(make, worker):
    def outcome(*replies):
        ranks = [worker(lambda command, one=one: one) for one in replies]
        return make().transfer_direct([1], [one.address for one in ranks], ["h:1"] * len(ranks), "7").outcome

    moved, present, missed = (
        wire.MoveWorkerRetMsg(16, 16, outcome="moved"),
        wire.MoveWorkerRetMsg(0, 16, outcome="present"),
        wire.MoveWorkerRetMsg(0, reason="anything", outcome="miss"),
    )
    assert outcome(moved, moved) == "moved"
    assert outcome(moved, present) == "present"
    assert outcome(missed, moved) == "miss"
    assert outcome(missed, wire.MoveWorkerRetMsg(0, outcome="late")) == "late"
    assert outcome(moved, wire.ErrorMsg("no")) == "failed"
    assert [outcome(wire.MoveWorkerRetMsg(*of_lmcache)) for of_lmcache in ((16,), (0, 16), (0,))] == [
        "moved",
        "present",
        "miss",
    ]
    assert make().transfer_direct([1], "127.0.0.1:1", "h:1", "7", timeout_s=0.1).outcome == "late"
    assert make().transfer_direct([1], [], ["h:1"], "7").outcome == "failed"


@pytest.mark.parametrize(("src", "dst"), [(["a:1"], ["b:1", "b:2"]), ([], []), (["a:1", "a:2"], "b:1")])
def test_unequal_ranks_are_refused_without_asking(make, src, dst):
    result = make().transfer_direct([1], src, dst, "7")
    assert not result.ok
    assert "source ranks" in result.reason


def test_nothing_moved_is_not_ok_and_has_a_reason(make, worker):
    client = make()
    said = worker(lambda command: wire.MoveWorkerRetMsg(0, reason="not held"))
    assert client.transfer_direct([1], said.address, "h:1", "7").reason == "not held"
    silent = worker(lambda command: wire.MoveWorkerRetMsg(0))
    result = client.transfer_direct([1], silent.address, "h:1", "7")
    assert (result.ok, "gave no reason" in result.reason) == (False, True)
    present = worker(lambda command: wire.MoveWorkerRetMsg(0, 96, reason="all was there"))
    result = client.transfer_direct([1], present.address, "h:1", "7")
    assert (result.ok, result.present_tokens, result.reason) == (True, 96, "all was there")


def test_a_worker_that_does_not_answer_is_a_result_in_time_and_the_next_call_works(make, worker):
    answers = iter([None])
    dead = worker(lambda command: next(answers))
    alive = worker(lambda command: MOVED)
    client = make()
    for address in (dead.address, "127.0.0.1:1"):
        start = time.monotonic()
        result = client.transfer_direct([1], address, "h:1", "7", timeout_s=0.3)
        assert time.monotonic() - start < 1.5
        assert (result.ok, result.reason) == (False, f"no answer from {address} in 0.3 s")
    assert client.transfer_direct([1], alive.address, "h:1", "7").ok


def test_one_rank_that_does_not_answer_is_named_and_fails_the_move(make, worker):
    alive, dead = worker(lambda command: MOVED), worker(lambda command: None)
    result = make().transfer_direct([1], [alive.address, dead.address], ["h:1", "h:2"], "7", timeout_s=0.3)
    assert (result.ok, result.num_tokens) == (False, 0)
    assert result.reason == f"no answer from {dead.address} in 0.3 s"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (wire.ErrorMsg("no room"), ": no room"),
        (b"\xff\xff", "that is none"),
        (wire.HealthWorkerRetMsg(0), "answered a MoveWorkerMsg with a HealthWorkerRetMsg"),
    ],
)
def test_any_other_answer_is_a_result_with_the_reason(make, worker, reply, said):
    source = worker(lambda command: reply)
    result = make().transfer_direct([1], source.address, "h:1", "7")
    assert (result.ok, said in result.reason) == (False, True)


@pytest.mark.parametrize("address", ["", "nonsense", "host:port", "host:99999999", "tcp://"])
def test_an_address_that_is_none_is_a_result(make, address):
    result = make().transfer_direct([1], address, "h:1", "7", timeout_s=0.3)
    assert not result.ok
    assert result.reason


def test_a_secret_is_proved_both_ways(make, worker):
    source = worker(lambda command: MOVED, secret=SECRET)
    assert make(SECRET).transfer_direct([1], source.address, "h:1", "7").ok
    unsigned = worker(lambda command: MOVED)
    result = make(SECRET).transfer_direct([1], unsigned.address, "h:1", "7")
    assert (result.ok, "not signed" in result.reason) == (False, True)


def test_the_other_commands(make, worker):
    replies = {
        wire.PinWorkerMsg: wire.PinWorkerRetMsg(96),
        wire.UnpinWorkerMsg: wire.UnpinWorkerRetMsg(96),
        wire.LookupWorkerMsg: wire.LookupWorkerRetMsg(80),
        wire.ClearWorkerMsg: wire.ClearWorkerRetMsg(512),
        wire.HealthWorkerMsg: wire.HealthWorkerRetMsg(0),
    }
    one = worker(lambda command: replies[type(command)])
    client = make()
    assert client.pin([1], one.address, "7", cache_salt="user").num_tokens == 96
    assert client.unpin([1], [one.address], "7").num_tokens == 96
    assert client.lookup([1], one.address, "7").num_tokens == 80
    assert client.clear(one.address).num_tokens == 512
    assert (client.health(one.address).ok, client.health(one.address).error_codes) == (True, (0,))
    assert one.commands[0].request_configs == {wire.VERSION_KEY: "7", wire.SALT_KEY: "user"}
    assert not client.pin([1], [], "7").ok


def test_health_tells_of_each_rank(make, worker):
    sick, dead = worker(lambda command: wire.HealthWorkerRetMsg(3)), worker(lambda command: None)
    result = make().health([sick.address, dead.address], timeout_s=0.3)
    assert (result.ok, result.error_codes) == (False, (3, None))
    assert "no answer" in result.reason


def test_many_threads_may_share_a_client(worker):
    sources = [worker(lambda command: MOVED) for _ in range(4)]
    with MoveClient() as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(client.transfer_direct, [1], one.address, "h:1", "7") for one in sources * 10]
        assert all(job.result().ok for job in jobs)
    assert sum(len(one.commands) for one in sources) == 40


def test_many_moves_at_once_on_one_loop(worker):
    sources = [worker(lambda command: MOVED) for _ in range(4)]

    async def main():
        async with AsyncMoveClient() as client:
            calls = (client.transfer_direct([1], one.address, "h:1", "7") for one in sources * 10)
            assert all(result.ok for result in await asyncio.gather(*calls))
            cancelled = asyncio.create_task(client.health("127.0.0.1:1"))
            await asyncio.sleep(0.05)
            cancelled.cancel()

    start = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - start < 5


def test_more_questions_than_sockets_are_all_answered_in_time():
    async def main():
        async with AsyncMoveClient() as client:
            nobody = ["127.0.0.1:1"] * 600
            return await client.health(nobody, timeout_s=1.0)

    start = time.monotonic()
    result = asyncio.run(main())
    assert (result.ok, set(result.error_codes), len(result.error_codes)) == (False, {None}, 600)
    assert time.monotonic() - start < 4


def test_closing_does_not_wait_for_a_peer_that_is_not_there():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        client = MoveClient()
        client.health(f"127.0.0.1:{deaf.getsockname()[1]}", timeout_s=0.2)
        start = time.monotonic()
        client.close()
        assert time.monotonic() - start < 1
