"""The remote tier on a real Redis: what is found, to the page, and that nothing wrong is ever read."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import RedisServer
from remote_support import (
    CHUNK_PAGES,
    LAYOUT,
    PAGE_BYTES,
    check_contiguous,
    image,
    images,
    page_of,
    read_all,
    sequence,
    tier,
    wanted,
)

from psrl_sglang.keys import KEY_BYTES, KVLayout, count, key_at
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


@pytest.mark.parametrize("pool", ["kv", "swa"])
def test_what_was_written_is_found_to_the_page_wherever_the_wanted_run_is_cut(remote: RemoteTier, pool: str):
    keys = sequence(3 * CHUNK_PAGES + 2, pool=pool)
    write(remote, keys, pool=pool)
    for start in range(count(keys)):
        for end in range(start, count(keys) + 1):
            assert read_all(remote, wanted(keys, start, end, pool=pool)) == end - start


@pytest.mark.parametrize("common", range(2 * CHUNK_PAGES + 2))
def test_a_sequence_that_goes_another_way_is_found_up_to_the_fork(remote: RemoteTier, common: int):
    write(remote, sequence(2 * CHUNK_PAGES + 1))
    fork = sequence([*range(min(common, 2 * CHUNK_PAGES + 1)), *(f"new {page}" for page in range(5))])
    assert read_all(remote, wanted(fork)) == min(common, 2 * CHUNK_PAGES + 1)


def test_each_found_chunk_says_where_in_it_the_pages_are(remote: RemoteTier):
    keys = sequence(10)
    write(remote, keys)
    found = remote.find(wanted(keys, 2, 9))
    assert [(one.first, one.pages) for one in found] == [(2, 2), (0, 4), (0, 1)]
    assert [one.name for one in found] == [key_at(keys, 3), key_at(keys, 7), key_at(keys, 9)]


def test_an_absent_first_page_hides_everything_behind_it(remote: RemoteTier):
    keys = sequence(8)
    assert remote.write(image(keys, 4, 8))
    assert remote.find(wanted(keys)) == []
    assert read_all(remote, wanted(keys, 4, 8)) == 4


def test_the_pages_of_a_read_need_not_lie_together(remote: RemoteTier):
    keys = sequence(CHUNK_PAGES)
    write(remote, keys)
    want = wanted(keys)
    (found,) = remote.find(want)
    into = [memoryview(bytearray(PAGE_BYTES["kv"])) for _ in range(CHUNK_PAGES)]
    assert remote.read(found, want, into)
    assert [bytes(page) for page in into] == [
        page_of(key_at(keys, n), PAGE_BYTES["kv"]) for n in range(CHUNK_PAGES)
    ]


def test_nothing_wanted_asks_nothing(remote: RemoteTier, server: RedisServer):
    server.freeze()
    try:
        assert remote.find(wanted(b"")) == []
    finally:
        server.thaw()


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (OTHER, {}),
        (LAYOUT, {"tag": "2"}),
        (LAYOUT, {"pool": "swa"}),
        (LAYOUT, {"run": "other"}),
    ],
    ids=["layout", "tag", "pool", "run"],
)
def test_what_differs_in_one_part_of_its_identity_is_not_found(
    remote: RemoteTier, server: RedisServer, layout: KVLayout, options: dict[str, str]
):
    write(remote, sequence(6))
    pool, tag, run = options.get("pool", "kv"), options.get("tag", "1"), options.get("run", "run")
    theirs = sequence(6, layout=layout, pool=pool, run=run)
    assert tier(server.url, layout=layout).find(wanted(theirs, pool=pool, tag=tag)) == []


def test_engines_with_other_chunk_sizes_use_each_others_pages(remote: RemoteTier, server: RedisServer):
    keys = sequence(12)
    write(remote, keys)
    assert read_all(tier(server.url, chunk_pages=2), wanted(keys)) == 12
    assert read_all(tier(server.url, chunk_pages=6), wanted(keys)) == 12
    assert read_all(tier(server.url, chunk_pages=6), wanted(keys, 4, 8)) == 4


def test_compressed_and_plain_engines_read_each_other(remote: RemoteTier, server: RedisServer):
    write(remote, sequence(7))
    for compress in ("none", "zstd"):
        assert read_all(tier(server.url, compress=compress), wanted(sequence(7))) == 7


def test_compression_makes_the_value_smaller(server: RedisServer, side: redis.Redis):
    keys = sequence(CHUNK_PAGES)
    plain = image(keys, 0, CHUNK_PAGES)
    zeros = replace(plain, payload=memoryview(bytes(len(plain.payload))))
    assert tier(server.url, compress="zstd").write(zeros)
    (name,) = chunk_names(side)
    assert side.strlen(name) < BLOCK_BYTES + len(plain.payload) / 2


def test_chunk_sizes_may_differ_by_pool(server: RedisServer, side: redis.Redis):
    made = tier(server.url, chunk_pages={"kv": 4, "swa": 8})
    keys = sequence(8, pool="swa")
    assert made.write(image(keys, 0, 8, pool="swa"))
    assert [one.pages for one in made.find(wanted(keys, pool="swa"))] == [8]


def test_a_longer_chunk_takes_the_place_of_a_shorter_one(remote: RemoteTier, side: redis.Redis):
    keys = sequence(CHUNK_PAGES)
    for end in range(1, CHUNK_PAGES + 1):
        assert remote.write(image(keys, 0, end))
        assert len(chunk_names(side)) == 1
        assert read_all(remote, wanted(keys)) == end


def test_a_chunk_that_shares_its_first_pages_with_another_leaves_it_alone(
    remote: RemoteTier, side: redis.Redis
):
    one, two = sequence(["a", "b", "c"]), sequence(["a", "b", "d", "e"])
    assert remote.write(image(one, 0, 3))
    assert remote.write(image(two, 0, 4))
    assert len(chunk_names(side)) == 2
    assert read_all(remote, wanted(one)) == 3
    assert read_all(remote, wanted(two)) == 4


def test_a_sequence_that_branches_in_the_middle_of_a_chunk_is_found_in_both_its_chunks(remote: RemoteTier):
    one, two = sequence(["a", "b", "c"]), sequence(["a", "b", *range(9)])
    assert remote.write(image(one, 0, 3))
    for start, end in ((2, 4), (4, 8), (8, 11)):
        assert remote.write(image(two, start, end))
    assert [(found.first, found.pages) for found in remote.find(wanted(two))] == [
        (0, 2),
        (0, 2),
        (0, 4),
        (0, 3),
    ]
    assert read_all(remote, wanted(two)) == 11


def test_what_the_store_has_already_is_not_sent_again(
    remote: RemoteTier, server: RedisServer, stats: StoreStats
):
    keys = sequence(CHUNK_PAGES)
    assert tier(server.url).write(image(keys, 0, CHUNK_PAGES))
    assert remote.write(image(keys, 0, CHUNK_PAGES))
    assert remote.write(image(keys, 0, 2))
    assert stats.total("duplicates", tier="remote") == 2
    assert stats.total("transfers", direction="store") == 0
    assert read_all(remote, wanted(keys)) == CHUNK_PAGES


def test_transfers_are_counted_by_their_bytes(remote: RemoteTier, stats: StoreStats):
    keys = sequence(6)
    write(remote, keys)
    assert read_all(remote, wanted(keys, 1, 6)) == 5
    assert stats.total("bytes", tier="remote", direction="store") == 6 * PAGE_BYTES["kv"]
    assert stats.total("bytes", tier="remote", direction="load") == 5 * PAGE_BYTES["kv"]
    assert stats.total("errors") == 0


def test_clear_leaves_nothing_of_this_layout_and_everything_else(
    remote: RemoteTier, server: RedisServer, side: redis.Redis
):
    other = tier(server.url, layout=OTHER)
    theirs = sequence(5, layout=OTHER)
    write(other, theirs, layout=OTHER)
    side.set("a key of somebody", "value")
    before = side.dbsize()
    for number in range(700):
        assert remote.write(image(sequence([number]), 0, 1, tag=str(number % 3)))
    assert remote.clear() == 700
    assert side.dbsize() == before
    assert read_all(other, wanted(theirs)) == 5
    assert remote.clear() == 0


def test_drop_tag_takes_that_tag_only(remote: RemoteTier, side: redis.Redis):
    keys = sequence(6)
    for tag in ("1", "10", "*", "1~"):
        write(remote, keys, tag=tag)
    assert remote.drop_tag("1") == 2
    assert [read_all(remote, wanted(keys, tag=tag)) for tag in ("1", "10", "*", "1~")] == [0, 6, 6, 6]
    assert remote.drop_tag("*") == 2
    assert remote.drop_tag("never seen") == 0
    assert len(chunk_names(side)) == 4


def test_values_expire(server: RedisServer, side: redis.Redis):
    write(tier(server.url, ttl_s=3600.0), sequence(3))
    assert all(3_500_000 < side.pttl(name) <= 3_600_000 for name in side.scan_iter())
    side.flushall()
    write(tier(server.url), sequence(3))
    assert {side.pttl(name) for name in side.scan_iter()} == {-1}


def test_a_chunk_of_megabytes_comes_back_whole(server: RedisServer, side: redis.Redis):
    page_bytes = 1 << 20
    layout = replace(LAYOUT, pools=(replace(LAYOUT.pools[0], page_bytes=page_bytes),))
    keys = sequence(4, layout=layout)
    payload = memoryview(os.urandom(4 * page_bytes))
    made = tier(server.url, layout=layout)
    assert made.write(replace(image(keys, 0, 4, layout=layout), page_bytes=page_bytes, payload=payload))
    slot = memoryview(bytearray(4 * page_bytes))
    (found,) = made.find(wanted(keys))
    assert made.read(found, wanted(keys), [slot[n * page_bytes : (n + 1) * page_bytes] for n in range(4)])
    assert slot == payload


def test_a_server_out_of_memory_refuses_writes_and_still_answers_reads(tmp_path: Path, stats: StoreStats):
    with RedisServer(tmp_path, "--maxmemory-policy", "noeviction") as server, server.client as side:
        remote = tier(server.url, stats=stats)
        write(remote, sequence(4))
        side.config_set("maxmemory", "1")
        for number in range(5):
            assert not remote.write(image(sequence([f"new {number}"]), 0, 1))
        assert "OOM" in remote.last_error
        assert stats.total("errors", reason="refused") == 5
        assert read_all(remote, wanted(sequence(4))) == 4


_OTHER_PROCESS = """
import sys
from remote_support import image, read_all, sequence, tier, wanted
remote = tier(sys.argv[1])
if sys.argv[2] == "write":
    assert all(remote.write(image(sequence(6), at, min(at + 4, 6))) for at in (0, 4))
else:
    assert read_all(remote, wanted(sequence(6))) == 6
"""


def test_processes_with_other_hash_seeds_see_each_others_chunks(server: RedisServer, side: redis.Redis):
    tests = Path(__file__).parents[1]
    for seed, what in (("1", "write"), ("2", "read"), ("random", "read")):
        subprocess.run(
            [sys.executable, "-c", _OTHER_PROCESS, server.url, what],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(tests)},
            timeout=120,
            check=True,
        )


SEQUENCES = [
    [*range(common), *(f"{name} {page}" for page in range(11 - common))]
    for name, common in (("a", 0), ("b", 3), ("c", 4), ("d", 9))
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(range(4)), st.sampled_from(["1", "2"]), st.integers(0, 11), st.integers(0, 11)
        ),
        max_size=25,
    )
)
def test_any_writes_and_look_ups_agree_with_a_dictionary(
    server: RedisServer, side: redis.Redis, steps: list[tuple[int, str, int, int]]
):
    side.flushall()
    remote = tier(server.url)
    model: set[tuple[str, bytes]] = set()
    for which, tag, first, last in steps:
        keys = sequence(SEQUENCES[which])
        if first <= last:
            # A look-up, of any run of pages.
            want = wanted(keys, first, last, tag=tag)
            expected = 0
            while expected < last - first and (tag, key_at(want.keys, expected)) in model:
                expected += 1
            found = remote.find(want)
            check_contiguous(found, want)
            assert read_all(remote, want) == expected
        else:
            # The chunk that page `last` is in, up to page `first` at most.
            start = last - last % CHUNK_PAGES
            end = min(start + CHUNK_PAGES, first)
            assert remote.write(image(keys, start, end, tag=tag))
            model |= {(tag, keys[n * KEY_BYTES : (n + 1) * KEY_BYTES]) for n in range(start, end)}
    remote.close()
