"""What is wrong in the store, by damage or by somebody else's hand, is never read: it is a miss, and then gone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from redis_server import RedisServer
from remote_support import (
    CHUNK_PAGES,
    LAYOUT,
    PAGE_BYTES,
    image,
    images,
    payload_of,
    read_all,
    read_one,
    sequence,
    tier,
    wanted,
)

from psrl_sglang.store.chunk import BLOCK_BYTES
from psrl_sglang.store.remote import RemoteTier
from psrl_sglang.store.stats import StoreStats

OTHER = replace(LAYOUT, dtype="float8_e4m3fn")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def side(server: RedisServer) -> Iterator[redis.Redis]:
    """The server, empty, from the side."""
    with server.client as client:
        client.flushall()
        yield client


@pytest.fixture
def stats() -> StoreStats:
    return StoreStats()


@pytest.fixture(params=["none", "zstd"])
def remote(
    request: pytest.FixtureRequest, server: RedisServer, side: Any, stats: StoreStats
) -> Iterator[RemoteTier]:
    made = tier(server.url, stats=stats, compress=request.param)
    yield made
    made.close()


def write(remote: RemoteTier, keys: bytes, **options: Any) -> None:
    for one in images(keys, **options):
        assert remote.write(one)


def chunk_names(side: redis.Redis) -> list[bytes]:
    return sorted(side.keys("psrl:*:c:*"))


def pointer_names(side: redis.Redis) -> list[bytes]:
    return sorted(side.keys("psrl:*:p:*"))


def test_the_same_names_under_another_layout_are_not_read(
    remote: RemoteTier, server: RedisServer, side: redis.Redis
):
    keys = sequence(4)
    write(remote, keys)
    for name in side.keys("psrl:*"):
        side.rename(name, name.replace(LAYOUT.digest.hex().encode(), OTHER.digest.hex().encode()))
    other = tier(server.url, layout=OTHER)
    (found,) = other.find(wanted(keys))
    assert read_one(other, found, wanted(keys)) is None


def test_a_chunk_of_another_tag_under_our_name_is_not_read(
    remote: RemoteTier, side: redis.Redis, stats: StoreStats
):
    keys = sequence(4)
    assert remote.write(image(keys, 0, 4, tag="2"))
    ((theirs,), pointers) = chunk_names(side), pointer_names(side)
    write(remote, keys)
    (ours,) = set(chunk_names(side)) - {theirs}
    side.rename(theirs, ours)
    (found,) = remote.find(wanted(keys))
    assert read_one(remote, found, wanted(keys)) is None
    assert len(pointers) == 4
    assert stats.total("errors", reason="bad_chunk") == 1


def test_a_flipped_bit_anywhere_in_the_value_is_a_miss_and_ends_the_chunk(
    remote: RemoteTier, side: redis.Redis, stats: StoreStats
):
    want = wanted(sequence(CHUNK_PAGES))
    bad = 0
    for where in (0, 9, 30, 200, BLOCK_BYTES + 8, BLOCK_BYTES + 300, -1):
        write(remote, want.keys)
        (name,) = chunk_names(side)
        at = where % side.strlen(name)
        byte = side.getrange(name, at, at)[0]
        side.setrange(name, at, bytes([byte ^ 0x10]))
        (found,) = remote.find(want)
        read = read_one(remote, found, want)
        bad += read is None
        # Only what is not part of the header nor of the pages, zeros in between, may differ.
        assert read in (None, payload_of(want.keys, PAGE_BYTES["kv"]))
        if read is None:
            assert chunk_names(side) == pointer_names(side) == []
            assert remote.find(want) == []
    assert bad >= 6
    assert stats.total("errors", reason="bad_chunk") == bad
    assert stats.total("misses_late") == 0


def test_a_wrong_page_is_counted_as_a_checksum_failure(
    server: RedisServer, side: redis.Redis, stats: StoreStats
):
    remote = tier(server.url, stats=stats)
    keys = sequence(CHUNK_PAGES)
    write(remote, keys)
    (name,) = chunk_names(side)
    side.setrange(name, BLOCK_BYTES + 2 * PAGE_BYTES["kv"], b"\0\0\0\0")
    # The pages before it are as good as they were.
    (beginning,) = remote.find(wanted(keys, 0, 2))
    assert read_one(remote, beginning, wanted(keys, 0, 2)) is not None
    (found,) = remote.find(wanted(keys))
    assert read_one(remote, found, wanted(keys)) is None
    assert stats.total("checksum_failures", tier="remote") == 1
    assert stats.total("transfers", direction="load") == 1
    assert "checksum" in remote.last_error


@pytest.mark.parametrize("left_bytes", [0, 1, 8, 100, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 60, -1])
def test_a_value_cut_short_is_a_miss(remote: RemoteTier, side: redis.Redis, stats: StoreStats, left_bytes: int):
    want = wanted(sequence(CHUNK_PAGES))
    write(remote, want.keys)
    (name,) = chunk_names(side)
    side.set(name, side.get(name)[:left_bytes])
    (found,) = remote.find(want)
    assert read_one(remote, found, want) is None
    assert stats.total("errors", reason="bad_chunk") + stats.total("misses_late") == 1
    assert chunk_names(side) == []


@pytest.mark.parametrize("foreign", [b"x", b"PSRLKV01", b"PSRLKV01\xff\xff\xff\xff", b"PSRLZS01", b"k" * 9000])
def test_a_foreign_value_under_our_names_is_a_miss(
    remote: RemoteTier, side: redis.Redis, stats: StoreStats, foreign: bytes
):
    want = wanted(sequence(CHUNK_PAGES))
    write(remote, want.keys)
    (name,) = chunk_names(side)
    side.set(name, foreign)
    (found,) = remote.find(want)
    assert read_one(remote, found, want) is None
    assert stats.total("errors", reason="bad_chunk") == 1
    for pointer in pointer_names(side):
        side.set(pointer, foreign)
    assert remote.find(want) == []


def test_a_value_of_another_type_is_an_error_of_that_call_only(
    remote: RemoteTier, side: redis.Redis, stats: StoreStats
):
    want = wanted(sequence(CHUNK_PAGES))
    write(remote, want.keys)
    (name,) = chunk_names(side)
    side.delete(name)
    side.rpush(name, "a list")
    for _ in range(5):
        (found,) = remote.find(want)
        assert read_one(remote, found, want) is None
    assert stats.total("errors", reason="refused") == 5
    assert not remote.is_open


def test_a_pointer_to_nothing_is_one_late_miss_and_then_gone(
    remote: RemoteTier, side: redis.Redis, stats: StoreStats
):
    want = wanted(sequence(CHUNK_PAGES))
    write(remote, want.keys)
    pointers = {name: side.get(name) for name in pointer_names(side)}
    side.delete(*chunk_names(side))
    (found,) = remote.find(want)
    assert read_one(remote, found, want) is None
    assert stats.total("misses_late", tier="remote") == 1
    assert pointer_names(side) == []
    # Nor is it believed when somebody sets the pointers again.
    side.mset(pointers)
    assert remote.find(want) == []
    # But it can be written anew at once.
    write(remote, want.keys)
    assert read_all(remote, want) == CHUNK_PAGES


def test_a_compressed_page_that_claims_to_be_huge_is_a_miss(
    server: RedisServer, side: redis.Redis, stats: StoreStats
):
    remote = tier(server.url, stats=stats, compress="zstd")
    want = wanted(sequence(CHUNK_PAGES))
    write(remote, want.keys)
    (name,) = chunk_names(side)
    side.setrange(name, 8 + BLOCK_BYTES, b"\xff" * 4)
    (found,) = remote.find(want)
    assert read_one(remote, found, want) is None
    assert stats.total("errors", reason="bad_chunk") == 1
    assert "page of 4294967295 bytes" in remote.last_error
    assert chunk_names(side) == []
