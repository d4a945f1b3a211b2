"""The remote tier on a real Mooncake master, with the memory in a process of its own, over TCP.

Needs `mooncake-transfer-engine-non-cuda` (or the CUDA one) and the system's libibverbs1.
"""

import importlib.util
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from remote_support import (
    CHUNK_PAGES,
    LAYOUT,
    image,
    images,
    quick_breaker,
    read_all,
    read_one,
    sequence,
    tier,
    wanted,
)

from psrl_sglang.keys import KEY_BYTES
from psrl_sglang.store.remote import RemoteTier
from psrl_sglang.store.remote_client import RemoteError, connect
from psrl_sglang.store.stats import StoreStats

pytestmark = pytest.mark.mooncake

HOST = "127.0.0.1"
START_S = 60.0
TIMEOUT_S = 10.0
RECOVERY_S = 60.0


class MooncakeStore:
    """A master, and a process that has the memory. Starts both; `stop` ends them."""

    def __init__(self, directory: Path) -> None:
        self.port = _free_port()
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start_master()
        self._run(
            "mooncake_client",
            f"--host={HOST}",
            f"--port={_free_port()}",
            "--global_segment_size=256 MB",
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={HOST}:{self.port}",
        )

    @property
    def url(self) -> str:
        return f"mooncake://{HOST}:{self.port}?host={HOST}&buffer_gb=0.05"

    def start_master(self) -> None:
        self._run(
            "mooncake_master",
            f"--rpc_port={self.port}",
            f"--metrics_port={_free_port()}",
            f"--rpc_address={HOST}",
        )

    def kill_master(self) -> None:
        process = self._processes.pop("mooncake_master")
        process.kill()
        process.wait(timeout=START_S)

    def freeze_master(self) -> None:
        self._processes["mooncake_master"].send_signal(signal.SIGSTOP)

    def thaw_master(self) -> None:
        self._processes["mooncake_master"].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(timeout=START_S)

    def _run(self, name: str, *args: str) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None, "no mooncake: pip install mooncake-transfer-engine-non-cuda"
        binary = Path(next(iter(spec.submodule_search_locations or []))) / name
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [binary, *args],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextmanager
def _process_goes_on() -> Iterator[None]:
    """Other threads are never kept from running for long meanwhile."""
    ended = threading.Event()
    gaps_s = [0.0]

    def run() -> None:
        before_s = time.monotonic()
        while not ended.wait(0.01):
            now_s = time.monotonic()
            gaps_s.append(now_s - before_s)
            before_s = now_s

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(START_S)
    assert max(gaps_s) < 2.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MooncakeStore]:
    running = MooncakeStore(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def made(store: MooncakeStore, closing: ExitStack, **options: object) -> RemoteTier:
    """A tier that the store has answered once."""
    remote = tier(store.url, **{"timeout_s": TIMEOUT_S, "breaker": quick_breaker(), **options})
    closing.callback(remote.close)
    return remote


def write_soon(remote: RemoteTier, keys: bytes, **options: str) -> None:
    """The memory joins the store some time after its master has started."""
    deadline = time.monotonic() + RECOVERY_S
    while not all(remote.write(one) for one in images(keys, **options)):
        assert time.monotonic() < deadline, remote.last_error
        time.sleep(0.1)


def test_chunks_come_back_to_the_page_in_another_client(store: MooncakeStore, closing: ExitStack):
    keys = sequence(3 * CHUNK_PAGES + 2)
    writer = made(store, closing)
    write_soon(writer, keys)
    for compress in ("none", "zstd"):
        reader = made(store, closing, compress=compress)
        for start, end in ((0, 14), (0, 4), (1, 9), (3, 5), (5, 6), (12, 14), (2, 13)):
            assert read_all(reader, wanted(keys, start, end)) == end - start
        fork = sequence([*range(6), "new", "new"])
        assert read_all(reader, wanted(fork)) == 6
        more = sequence(["more", compress])
        assert reader.write(image(more, 0, 2))
        assert read_all(writer, wanted(more)) == 2
        assert reader.find(wanted(keys, tag="2")) == []


def test_megabytes_come_back_whole(store: MooncakeStore, closing: ExitStack):
    page_bytes = 1 << 20
    layout = replace(LAYOUT, pools=(replace(LAYOUT.pools[0], page_bytes=page_bytes),))
    keys = sequence(4, layout=layout)
    payload = memoryview(os.urandom(4 * page_bytes))
    remote = made(store, closing, layout=layout)
    chunk = replace(image(keys, 0, 4, layout=layout), page_bytes=page_bytes, payload=payload)
    deadline = time.monotonic() + RECOVERY_S
    while not remote.write(chunk):
        assert time.monotonic() < deadline, remote.last_error
    slot = memoryview(bytearray(4 * page_bytes))
    (found,) = remote.find(wanted(keys))
    assert remote.read(found, wanted(keys), [slot[n * page_bytes : (n + 1) * page_bytes] for n in range(4)])
    assert slot == payload


def test_a_longer_chunk_replaces_a_shorter_one_and_is_not_sent_twice(store: MooncakeStore, closing: ExitStack):
    stats = StoreStats()
    keys = sequence(CHUNK_PAGES)
    remote = made(store, closing, stats=stats)
    write_soon(remote, sequence(["first"]))
    for end in (2, 4, 4, 3):
        assert remote.write(image(keys, 0, end))
    assert stats.total("duplicates") == 2
    assert read_all(remote, wanted(keys)) == CHUNK_PAGES
    assert remote.clear() == 2


def test_a_lost_or_foreign_value_is_a_miss_and_is_forgotten(store: MooncakeStore, closing: ExitStack):
    stats = StoreStats()
    remote = made(store, closing, stats=stats)
    client = connect(store.url, timeout_s=TIMEOUT_S)
    closing.callback(client.close)
    for number, foreign in enumerate((b"", b"x", b"PSRLKV01" * 600)):
        keys = sequence([number, "a", "b"])
        want = wanted(keys)
        write_soon(remote, keys)
        name = remote._chunk("1", keys[-KEY_BYTES:])
        client.delete([name])
        if foreign:
            client.put([(name, [foreign])])
        (found,) = remote.find(want)
        assert read_one(remote, found, want) is None
        assert remote.find(want) == []
        assert client.read(name, 0, 9) is None
    assert stats.total("misses_late") == 1
    assert stats.total("errors", reason="bad_chunk") == 2


def test_clear_and_drop_tag_take_what_is_theirs(store: MooncakeStore, closing: ExitStack):
    other_layout = replace(LAYOUT, dtype="other")
    other = made(store, closing, layout=other_layout)
    theirs = sequence(3, layout=other_layout)
    write_soon(other, theirs, layout=other_layout)
    remote = made(store, closing)
    keys = sequence(6)
    for tag in ("1", "2", "3"):
        write_soon(remote, keys, tag=tag)
    assert read_all(remote, wanted(keys)) == 6  # which a lease protects from a mere eviction
    assert remote.drop_tag("1") == 2
    assert [read_all(remote, wanted(keys, tag=tag)) for tag in ("1", "2", "3")] == [0, 6, 6]
    assert remote.clear() == 4
    assert read_all(remote, wanted(keys, tag="2")) == 0
    assert read_all(other, wanted(theirs)) == 3


def test_client_calls(store: MooncakeStore, closing: ExitStack):
    write_soon(made(store, closing), sequence(1))
    client = connect(store.url, timeout_s=TIMEOUT_S)
    closing.callback(client.close)
    client.ping()
    client.put([("a", [b"12", memoryview(b"345")]), ("b", [b"x" * 100]), ("c", [b"x"])])
    client.put([("c", [b"changed"])])
    assert client.get_small(["c", "none", "a", "b"]) == [b"changed", None, b"12345", None]
    assert [client.read("a", 1, 3), client.read("a", 3, 99), client.read("none", 0, 9)] == [b"234", b"45", None]
    into = [memoryview(bytearray(2)), memoryview(bytearray(1))]
    assert client.read_into("a", 2, into)
    assert [bytes(view) for view in into] == [b"34", b"5"]
    assert not client.read_into("a", 3, into)
    assert not client.read_into("none", 0, into)
    client.delete(["a", "none"])
    assert client.delete_matching("b") == 1
    assert client.get_small(["a", "b", "c"]) == [None, None, b"changed"]


def test_a_frozen_master_costs_the_time_out_and_is_used_again(store: MooncakeStore, closing: ExitStack):
    write_soon(made(store, closing), sequence(1))
    stats = StoreStats()
    remote = made(store, closing, timeout_s=1.0, stats=stats)
    keys = sequence(4)
    write_soon(remote, keys)
    store.freeze_master()
    began_s = time.monotonic()
    while not remote.is_open:
        assert remote.find(wanted(keys)) == []
        assert not remote.write(image(sequence(["new"]), 0, 1))
    assert time.monotonic() - began_s < 10.0
    assert stats.total("errors", reason="timeout") == 3
    store.thaw_master()
    write_soon(remote, sequence(["again"]))
    assert read_all(remote, wanted(keys)) == 4


def test_a_master_that_restarts_is_used_again_by_the_same_client(store: MooncakeStore, closing: ExitStack):
    remote = made(store, closing)
    keys = sequence(4)
    write_soon(remote, keys)
    store.kill_master()
    assert remote.find(wanted(keys)) == []
    assert not remote.write(image(sequence(["new"]), 0, 1))
    store.start_master()
    write_soon(remote, sequence(["again", "again"]))
    assert read_all(remote, wanted(sequence(["again", "again"]))) == 2


def test_a_master_that_is_not_there_is_bounded_and_used_once_it_is(store: MooncakeStore, closing: ExitStack):
    store.kill_master()
    remote = made(store, closing, timeout_s=0.5)
    with _process_goes_on():
        while not remote.is_open:
            assert remote.find(wanted(sequence(4))) == []
    store.start_master()
    write_soon(remote, sequence(4))
    assert read_all(remote, wanted(sequence(4))) == 4


def test_a_master_that_is_frozen_at_the_start_is_bounded_and_used_once_it_answers(
    store: MooncakeStore, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
):
    write_soon(made(store, closing), sequence(1))
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "500")
    store.freeze_master()
    remote = made(store, closing, timeout_s=0.5)
    began_s = time.monotonic()
    while not remote.is_open:
        assert remote.find(wanted(sequence(4))) == []
    assert time.monotonic() - began_s < 20.0
    store.thaw_master()
    write_soon(remote, sequence(4))
    assert read_all(remote, wanted(sequence(4))) == 4


def test_a_store_without_memory_refuses(tmp_path: Path, closing: ExitStack, store: MooncakeStore):
    write_soon(made(store, closing), sequence(1))
    store._processes.pop("mooncake_client").kill()
    stats = StoreStats()
    remote = made(store, closing, stats=stats)
    deadline = time.monotonic() + RECOVERY_S
    number = 0
    while "segment_gb" not in remote.last_error:
        assert time.monotonic() < deadline, remote.last_error
        remote.write(image(sequence(["new", number]), 0, 1))
        number += 1
        time.sleep(0.2)
    assert stats.total("errors", reason="refused") >= 1


@pytest.mark.parametrize(
    "url", ["mooncake://host", "mooncake://host:1?segmentgb=4", "mooncake://host:1?buffer_gb=x"]
)
def test_a_url_that_cannot_be_used_is_refused_at_once(url: str):
    with pytest.raises(ValueError, match="remote store 'mooncake://host"):
        connect(url, timeout_s=1.0)


def test_a_host_without_a_way_to_it_is_an_error_of_the_call():
    client = connect("mooncake://no-such-host.invalid:1", timeout_s=30.0)
    with pytest.raises(RemoteError, match=r"no-such-host\.invalid:1: "):
        client.ping()
