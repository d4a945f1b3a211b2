"""Moves at the same time: turns, one deadline over all steps, and one flight for what is the same."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from peer import Peer, PeerOptions
from peer_process import SLACK_S, eventually, is_settled, tokens_of

from psrl_sglang.transfer.client import MoveClient, MoveResult
from psrl_sglang.transfer.link import Deadline
from psrl_sglang.transfer.queueing import FairQueue

PAGES = 12


@pytest.fixture
def client() -> Iterator[MoveClient]:
    with MoveClient() as client:
        yield client


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a destination that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def move(client: MoveClient, a: Peer, to: str, tokens: list[int], timeout_s: float = 8.0) -> MoveResult:
    return client.transfer_direct(tokens, a.command, to, "1", timeout_s=timeout_s)


def assert_clean(*peers: Peer) -> None:
    for peer in peers:
        assert eventually(lambda peer=peer: is_settled(peer.state())), peer.state()
        assert peer.store.check_integrity() == []


def test_identical_moves_share_one_flight(client: MoveClient, pool: ThreadPoolExecutor) -> None:
    tokens = tokens_of(PAGES)
    with Peer(PeerOptions(send_pause_s=0.4)) as a, Peer(PeerOptions(instance_id="b")) as b:
        a.compute(tokens)
        results = list(pool.map(lambda _: move(client, a, b.data, tokens), range(6)))
        assert [result.present_tokens for result in results] == [len(tokens)] * 6
        assert [outcome for _, outcome in b.engine.landings] == ["landed"]
        assert_clean(a, b)


def test_a_shorter_limit_is_kept_beside_an_identical_move_with_a_longer_one(
    client: MoveClient, pool: ThreadPoolExecutor, nobody: str
) -> None:
    tokens = tokens_of(PAGES)
    with Peer(PeerOptions(moves_at_once=3)) as a:
        a.compute(tokens)
        long = pool.submit(move, client, a, nobody, tokens, 1.5)
        assert eventually(lambda: a.state()["moves"]["running_out"])
        began_s = time.monotonic()
        assert "late" in move(client, a, nobody, tokens, 0.5).reason
        assert time.monotonic() - began_s < 0.5 + SLACK_S
        assert not long.result().ok
        assert_clean(a)


def test_a_destination_that_hangs_does_not_keep_the_others_waiting(
    client: MoveClient, pool: ThreadPoolExecutor, nobody: str
) -> None:
    with Peer(PeerOptions(moves_at_once=2)) as a, Peer(PeerOptions(instance_id="b")) as b:
        prompts = [tokens_of(PAGES, seed) for seed in range(7)]
        for tokens in prompts:
            a.compute(tokens)
        hanging = [pool.submit(move, client, a, nobody, tokens, 2.0) for tokens in prompts[:6]]
        assert eventually(lambda: a.state()["moves"]["waiting_out"] == 5)
        began_s = time.monotonic()
        assert move(client, a, b.data, prompts[6]).ok
        assert time.monotonic() - began_s < 1.5
        assert b.verified(prompts[6]) == PAGES
        assert all("late" in one.result().reason for one in hanging)
        assert_clean(a, b)


def test_waiting_counts_toward_the_limit(client: MoveClient, pool: ThreadPoolExecutor, nobody: str) -> None:
    with Peer(PeerOptions(moves_at_once=1)) as a, Peer(PeerOptions(instance_id="b")) as b:
        first, second = tokens_of(PAGES, 1), tokens_of(PAGES, 2)
        a.compute(first)
        a.compute(second)
        hanging = pool.submit(move, client, a, nobody, first, 1.8)
        assert eventually(lambda: a.state()["moves"]["running_out"])
        began_s = time.monotonic()
        result = move(client, a, b.data, second, 0.5)
        assert time.monotonic() - began_s < 0.5 + SLACK_S
        assert result.reason.startswith("late: waiting for other moves")
        hanging.result()
        assert_clean(a, b)


@pytest.mark.parametrize("channel", ["cma", "tcp", "nixl"])
def test_many_moves_at_once_all_arrive(client: MoveClient, pool: ThreadPoolExecutor, channel: str) -> None:
    if channel == "nixl":
        pytest.importorskip("nixl_cu12")
    source = PeerOptions(channel=channel, moves_at_once=4, slots=64)
    with (
        Peer(source) as a,
        Peer(PeerOptions(instance_id="b", channel=channel, slots=64)) as b,
        Peer(PeerOptions(instance_id="c", channel=channel, slots=64)) as c,
    ):
        prompts = [tokens_of(PAGES, seed) for seed in range(12)]
        for tokens in prompts:
            a.compute(tokens)
        moves = [pool.submit(move, client, a, to.data, tokens) for tokens in prompts for to in (b, c)]
        assert all(one.result().present_tokens == PAGES * 16 for one in moves)
        assert all(to.verified(tokens) == PAGES for tokens in prompts for to in (b, c))
        assert_clean(a, b, c)


@pytest.mark.parametrize("channel", ["cma", "tcp", "nixl"])
def test_two_sources_of_one_prompt_bring_it_once(
    client: MoveClient, pool: ThreadPoolExecutor, channel: str
) -> None:
    if channel == "nixl":
        pytest.importorskip("nixl_cu12")
    tokens = tokens_of(40)
    slow = {"channel": channel, "slots": 64, "pace_s": 0.02}
    with (
        Peer(PeerOptions(instance_id="a", **slow)) as a,  # type: ignore[arg-type]
        Peer(PeerOptions(instance_id="c", **slow)) as c,  # type: ignore[arg-type]
        Peer(PeerOptions(instance_id="b", **slow)) as b,  # type: ignore[arg-type]
    ):
        a.compute(tokens)
        c.compute(tokens)
        results = list(pool.map(lambda source: move(client, source, b.data, tokens), (a, c)))
        assert [result.present_tokens for result in results] == [len(tokens)] * 2
        assert sum(result.num_tokens for result in results) == len(tokens)
        assert b.verified(tokens) == 40
        assert_clean(a, b, c)


def test_what_continues_the_pages_of_a_slower_move_waits_for_them(
    client: MoveClient, pool: ThreadPoolExecutor
) -> None:
    """The tail shares a chunk with the head that another source is still sending."""
    tokens = tokens_of(30)
    head = tokens[: 18 * 16]
    with (
        Peer(PeerOptions(instance_id="a", send_pause_s=0.5)) as a,
        Peer(PeerOptions(instance_id="c")) as c,
        Peer(PeerOptions(instance_id="b")) as b,
    ):
        a.compute(head)
        c.compute(tokens)
        slow = pool.submit(move, client, a, b.data, head)
        assert eventually(lambda: b.state()["moves"]["running_in"])
        assert move(client, c, b.data, tokens).present_tokens == len(tokens)
        assert slow.result().ok
        assert b.verified(tokens) == 30
        assert_clean(a, b, c)


def test_moves_go_on_while_the_destination_evicts(client: MoveClient) -> None:
    with Peer(PeerOptions(slots=64)) as a, Peer(PeerOptions(instance_id="b", slots=8)) as b:
        must_stop = threading.Event()

        def churn() -> None:
            seed = 1000
            while not must_stop.is_set():
                seed += 1
                b.compute(tokens_of(4, seed))

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for seed in range(20):
                tokens = tokens_of(10, seed)
                a.compute(tokens)
                result = move(client, a, b.data, tokens)
                assert result.ok, result.reason
                b.verified(tokens)
        finally:
            must_stop.set()
            thread.join()
        assert_clean(a, b)


def test_moves_under_way_are_answered_when_the_engine_stops(
    client: MoveClient, pool: ThreadPoolExecutor, nobody: str
) -> None:
    with Peer(PeerOptions(moves_at_once=2)) as a:
        prompts = [tokens_of(PAGES, seed) for seed in range(4)]
        for tokens in prompts:
            a.compute(tokens)
        moves = [pool.submit(move, client, a, nobody, tokens, 20.0) for tokens in prompts]
        assert eventually(lambda: a.state()["moves"]["waiting_out"] == 3)
        began_s = time.monotonic()
        a.worker.close()
        assert all(one.result().reason for one in moves)
        assert time.monotonic() - began_s < 8.0


# ---- the queue alone ----


def test_keys_take_turns_in_the_order_they_came() -> None:
    queue = FairQueue(1, "test")
    order: list[str] = []
    gate = threading.Event()
    queue.put("first", gate.wait, Deadline(10.0))
    assert eventually(lambda: queue.running == 1)
    for key in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.put(key[0], lambda key=key: order.append(key), Deadline(10.0))
    gate.set()
    assert eventually(lambda: len(order) == 6)
    queue.close()
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_task_whose_time_is_over_is_called_beside_the_others() -> None:
    queue = FairQueue(1, "test")
    gate, called = threading.Event(), threading.Event()
    queue.put("a", lambda: gate.wait(10.0), Deadline(10.0))
    queue.put("b", called.set, Deadline(0.2))
    assert called.wait(5.0)
    assert queue.waiting == 0
    gate.set()
    queue.close()


def test_a_closed_queue_takes_nothing_and_has_called_all_it_took() -> None:
    queue = FairQueue(2, "test")
    gate = threading.Event()
    called: list[int] = []
    for number in range(5):
        queue.put("a", lambda number=number: (gate.wait(5.0), called.append(number)), Deadline(30.0))
    threading.Timer(0.1, gate.set).start()
    queue.close()
    assert sorted(called) == [0, 1, 2, 3, 4]
    assert not queue.put("a", lambda: called.append(9), Deadline(1.0))


def test_a_task_that_raises_stops_no_thread() -> None:
    queue = FairQueue(1, "test")
    done = threading.Event()

    def fail() -> None:
        raise ValueError("as told")

    queue.put("a", fail, Deadline(5.0))
    queue.put("a", done.set, Deadline(5.0))
    assert done.wait(5.0)
    queue.close()
