"""The remote tier when the store is dead, frozen, slow or back again: bounded, only misses, and no restart."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis_server import HOST, RedisServer
from remote_support import (
    CHUNK_PAGES,
    PAGE_BYTES,
    image,
    images,
    payload_of,
    quick_breaker,
    read_all,
    read_one,
    sequence,
    tier,
    wanted,
)

from psrl_sglang.store.breaker import CircuitBreaker
from psrl_sglang.store.chunk import Found
from psrl_sglang.store.remote import RemoteTier
from psrl_sglang.store.remote_client import RemoteError, connect
from psrl_sglang.store.stats import StoreStats

TIMEOUT_S = 0.3
# For one call of the tier, of a few round trips. Far from what it takes, near to for ever.
BOUND_S = 10 * TIMEOUT_S
RECOVERY_S = 20.0

KEYS = sequence(2 * CHUNK_PAGES)
WANT = wanted(KEYS)
FOUND = Found(name=WANT.keys[-16:], first=0, keys=WANT.keys[-16 * CHUNK_PAGES :])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


@pytest.fixture
def stats() -> StoreStats:
    return StoreStats()


def impatient(url: str, stats: StoreStats, breaker: CircuitBreaker | None = None) -> RemoteTier:
    return tier(url, timeout_s=TIMEOUT_S, stats=stats, breaker=breaker or quick_breaker())


@contextmanager
def bounded(seconds: float = BOUND_S) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < seconds


def only_misses(remote: RemoteTier) -> None:
    """Every call ends in time and says no."""
    calls: list[tuple[Callable[[], object], object]] = [
        (lambda: remote.find(WANT), []),
        (lambda: read_one(remote, FOUND, WANT), None),
        (lambda: remote.write(image(KEYS, 0, CHUNK_PAGES)), False),
        (lambda: remote.drop_tag("1"), -1),
        (lambda: remote.clear(), -1),
    ]
    for call, expected in calls:
        with bounded():
            assert call() == expected


def works_again(remote: RemoteTier) -> None:
    """The breaker closes by itself, and what is written then is found."""
    deadline = time.monotonic() + RECOVERY_S
    while not all(remote.write(one) for one in images(KEYS)):
        assert time.monotonic() < deadline, remote.last_error
        time.sleep(0.02)
    assert not remote.is_open
    assert read_all(remote, WANT) == 2 * CHUNK_PAGES


def test_a_store_that_is_dead_at_the_start_is_used_once_it_is_there(server: RedisServer, stats: StoreStats):
    server.kill()
    with bounded():
        remote = impatient(server.url, stats)
    only_misses(remote)
    assert remote.is_open
    assert stats.total("errors", tier="remote", reason="unreachable") == 3
    server.start()
    works_again(remote)


def test_a_store_that_dies_and_comes_back_is_used_again_by_the_same_client(
    server: RedisServer, stats: StoreStats
):
    remote = impatient(server.url, stats)
    works_again(remote)
    server.kill()
    only_misses(remote)
    server.start()
    works_again(remote)


def test_a_restart_between_two_calls_costs_no_error(server: RedisServer, stats: StoreStats):
    remote = impatient(server.url, stats)
    works_again(remote)
    server.kill()
    server.start()
    assert remote.find(WANT) == []
    works_again(remote)
    assert stats.total("errors") == 0


def test_a_store_that_dies_between_find_and_read_is_a_miss(server: RedisServer, stats: StoreStats):
    remote = impatient(server.url, stats)
    works_again(remote)
    found = remote.find(WANT)
    server.kill()
    with bounded():
        assert [read_one(remote, one, WANT) for one in found] == [None, None]
    assert stats.total("misses_late") == 0


def test_a_frozen_store_costs_its_time_out_and_no_more(server: RedisServer, stats: StoreStats):
    remote = impatient(server.url, stats)
    works_again(remote)
    server.freeze()
    only_misses(remote)
    assert stats.total("errors", tier="remote", reason="timeout") == 3
    server.thaw()
    works_again(remote)


def test_answers_that_come_too_late_are_nobody_elses(server: RedisServer, stats: StoreStats):
    remote = impatient(server.url, stats, CircuitBreaker(failures=1000))
    works_again(remote)
    others = sequence(["other"] * CHUNK_PAGES)
    assert remote.write(image(others, 0, CHUNK_PAGES))
    for _ in range(3):
        server.freeze()
        assert remote.find(WANT) == []
        server.thaw()
        assert read_all(remote, wanted(others)) == CHUNK_PAGES
        assert read_all(remote, WANT) == 2 * CHUNK_PAGES


def test_while_the_breaker_is_open_nobody_connects(stats: StoreStats):
    with _listener() as (url, connections):
        remote = impatient(url, stats, CircuitBreaker(failures=3, open_s=1000.0))
        while not remote.is_open:
            with bounded():
                assert remote.find(WANT) == []
        tried = len(connections)
        assert tried >= 3
        for _ in range(200):
            only_misses(remote)
        assert len(connections) == tried
    assert stats.total("rejected", tier="remote", reason="breaker") == 1000
    assert stats.total("errors") == 3


def test_a_network_that_swallows_everything_is_bounded(stats: StoreStats):
    # A full queue of connections: what comes then is not even refused.
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex((HOST, port))
        only_misses(impatient(f"redis://{HOST}:{port}/0", stats))
        for one in waiting:
            one.close()
    assert stats.total("errors", tier="remote", reason="timeout") == 3


def test_a_store_that_trickles_is_bounded_too(server: RedisServer, stats: StoreStats):
    with _relay(server.port) as (port, slow):
        remote = impatient(f"redis://{HOST}:{port}/0", stats)
        works_again(remote)
        found = remote.find(WANT)
        before = stats.total("errors", tier="remote", reason="timeout")
        slow.set()
        # A byte every fiftieth of a second is never late, and a chunk would take minutes.
        with bounded():
            assert read_one(remote, found[0], WANT) is None
        assert stats.total("errors", tier="remote", reason="timeout") == before + 1
        slow.clear()
        works_again(remote)


def test_a_peer_that_is_no_redis_is_bounded(stats: StoreStats):
    with _listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as (url, _):
        only_misses(impatient(url, stats))
    assert stats.total("errors") == 3


@pytest.mark.parametrize(
    "reply",
    [
        b"$99999999999\r\n",
        b"$5\r\nab",
        b"*3\r\n$1\r\na\r\n",
        b"\r\n",
        b"$x\r\n",
        b":7\r\n",
        b"$3\r\nabc\r\n",
        b"+" + b"a" * 99999,
    ],
    ids=["huge", "cut", "missing", "empty", "not-a-size", "number", "string", "endless"],
)
def test_a_reply_that_makes_no_sense_is_an_error(reply: bytes):
    with _listener(b"+OK\r\n" * 2, reply) as (url, _):
        client = connect(url, timeout_s=TIMEOUT_S)
        with bounded(), pytest.raises(RemoteError):
            client.get_small(["a", "b"])


def test_threads_at_once_through_an_outage_see_only_right_pages(server: RedisServer, stats: StoreStats):
    remote = impatient(server.url, stats)
    stop = threading.Event()
    wrong: list[BaseException] = []
    reads: list[int] = []

    def run(number: int) -> None:
        keys = sequence([number, *range(2 * CHUNK_PAGES)])
        try:
            while not stop.is_set():
                for one in images(keys):
                    remote.write(one)
                for one in remote.find(wanted(keys)):
                    data = read_one(remote, one, wanted(keys))
                    assert data in (None, payload_of(one.keys, PAGE_BYTES["kv"]))
                    if data is not None:
                        reads.append(number)
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            time.sleep(0.2)
            server.freeze()
            time.sleep(TIMEOUT_S + 0.1)
            server.thaw()
            time.sleep(0.2)
            server.kill()
            server.start()
        _wait_for(lambda: set(reads[-200:]) == set(range(4)))
    finally:
        stop.set()
        for thread in threads:
            thread.join(30.0)
    assert not wrong
    assert stats.total("checksum_failures") == stats.total("errors", reason="bad_chunk") == 0


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RECOVERY_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def _listener(*replies: bytes) -> Iterator[tuple[str, list[socket.socket]]]:
    """A peer that accepts, and answers what it gets with these; its URL and the connections so far."""
    connections: list[socket.socket] = []
    with socket.create_server((HOST, 0)) as listening:

        def serve(connection: socket.socket) -> None:
            try:
                for reply in replies:
                    if not connection.recv(65536):
                        return
                    connection.sendall(reply)
            except OSError:
                pass

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connections.append(connection)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"redis://{HOST}:{listening.getsockname()[1]}/0", connections
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10.0)
            for connection in connections:
                connection.close()


@contextmanager
def _relay(port: int) -> Iterator[tuple[int, threading.Event]]:
    """Passes on what goes to a port; while the event is set, what comes back only a byte at a time."""
    slow = threading.Event()
    ended = threading.Event()
    with socket.create_server((HOST, 0)) as listening:

        def pump(source: socket.socket, target: socket.socket, is_reply: bool) -> None:
            try:
                while data := source.recv(65536):
                    while is_reply and slow.is_set() and data and not ended.is_set():
                        target.sendall(data[:1])
                        data = data[1:]
                        time.sleep(0.02)
                    target.sendall(data)
            except OSError:
                pass
            for one in (source, target):
                one.close()

        def accept() -> None:
            while True:
                try:
                    near, _ = listening.accept()
                    far = socket.create_connection((HOST, port), timeout=10.0)
                except OSError:
                    return
                for ends in ((near, far, False), (far, near, True)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1], slow
        finally:
            ended.set()
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10.0)
