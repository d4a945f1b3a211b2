"""Whatever happens to disk or Redis: HTTP 200, the right answer, a counter, and recovery without a restart."""

import os
import random
import shutil
from pathlib import Path

import pytest
from redis_server import RedisServer
from support import Running, assert_books_hold, assert_same, prompt, wait_until
from tier_support import (
    CHUNK,
    FEW_CHUNKS,
    NEW_TOKENS,
    SMALLER_POOL,
    assert_hit,
    assert_nothing_held,
    cached_from,
    can_mount,
    chunk_files,
    disk_bytes,
    gib,
    prompts,
    push_out,
    read_only,
    settle,
    small_file_system,
    start,
    stored,
    tier_status,
    total,
    with_disk,
    with_remote,
)

pytestmark = pytest.mark.engine
needs_mount = pytest.mark.skipif(not can_mount(), reason="needs the right to mount file systems")
RUN = {"namespace": "run", "read_ahead_timeout_s": 30.0}
SMALL = {"chunks": FEW_CHUNKS, "save_unfull_chunk": True, "sglang": RUN}
LENGTH = 2 * CHUNK + 90


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def server(server_factory, path):
    return start(server_factory, with_disk(path, **SMALL), *SMALLER_POOL)


def stored_files(server, path, asked):
    """Compute a prompt, wait until it is on disk, and empty the memory; returns the answer and its files."""
    before = set(chunk_files(path))
    answer = stored(server, asked)
    files = sorted(set(chunk_files(path)) - before, key=lambda file: file.stat().st_mtime_ns)
    assert len(files) == 3
    push_out(server)
    return answer, files


def assert_recomputed(server, asked, expected, *, most=0):
    answer = server.generate(asked, len(expected.output_ids))
    assert cached_from(answer)["storage"] <= most
    assert cached_from(answer)["host"] == cached_from(answer)["device"] == 0
    assert_same(answer, expected)


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 0x40]))


def damage_payload(files):
    flip(files[0], -9000)


def damage_header(files):
    flip(files[0], 40)


def truncate(files):
    os.truncate(files[0], files[0].stat().st_size - 4096)


def empty(files):
    os.truncate(files[0], 0)


def swap(files):
    """A whole, valid chunk, but of other pages."""
    shutil.copy(files[1], files[0])


def foreign(files):
    files[0].write_bytes(b"\x89PNG\r\n" * 100_000)


@pytest.mark.parametrize("damage", [damage_payload, damage_header, truncate, empty, swap, foreign])
def test_lmcache_5_a_damaged_file_is_a_counted_miss_and_is_stored_anew(server, path, damage):
    asked = prompt(5000 + len(damage.__name__), LENGTH)
    expected, files = stored_files(server, path, asked)
    before = total(server, "checksum_failures", tier="disk") + total(server, "bad_files", tier="disk")
    damage(files)
    assert_recomputed(server, asked, expected)
    assert total(server, "checksum_failures", tier="disk") + total(server, "bad_files", tier="disk") > before
    settle(server)
    push_out(server)
    assert_hit(server, asked, expected, "storage")
    assert_nothing_held(server)


def test_damage_in_the_middle_leaves_the_head(server, path):
    asked = prompt(5100, LENGTH)
    expected, files = stored_files(server, path, asked)
    flip(files[1], -9000)
    assert_recomputed(server, asked, expected, most=CHUNK)


def test_row_19_and_lmcache_9_files_that_somebody_deletes_are_late_misses_and_no_longer_counted(server, path):
    asked = prompts(5110, 2, LENGTH)
    expected = [stored_files(server, path, one)[0] for one in asked]
    late = total(server, "misses_late", tier="disk")
    for file in chunk_files(path):
        file.unlink()
    for one, answer in zip(asked, expected, strict=True):
        assert_recomputed(server, one, answer)
    assert total(server, "misses_late", tier="disk") >= late + 2
    # A file is found to be gone when it is asked for, or when its turn to be evicted comes.
    server.post("/psrl/v1/retire", {"version": "1"})
    assert tier_status(server)["tiers"]["disk"]["pages"] == 0
    assert tier_status(server)["tiers"]["disk"]["used_bytes"] <= disk_bytes(path)
    again = stored(server, asked[0])
    push_out(server)
    assert_hit(server, asked[0], again, "storage")
    assert_books_hold(server)


def test_lmcache_6_interleaved_sessions_paged_to_disk_do_not_mix(server, fresh):
    source = random.Random(5120)
    sessions = [prompt(5120 + number, 260) for number in range(6)]
    for _ in range(2):
        source.shuffle(sessions)
        requests = [Running(server, session, NEW_TOKENS) for session in sessions]
        answers = [request.result() for request in requests]
        for session, answer in zip(sessions, answers, strict=True):
            assert_same(answer, fresh(1, session, NEW_TOKENS))
            session += list(answer.output_ids) + prompt(source.randrange(1 << 20), 40)
        settle(server)
        push_out(server)
    assert total(server, "bytes", tier="disk", direction="load") > 0


@needs_mount
def test_a_directory_that_becomes_read_only_is_still_read_and_written_again_afterwards(server, path):
    asked = prompt(5130, LENGTH)
    expected, _ = stored_files(server, path, asked)
    with read_only(path):
        assert_hit(server, asked, expected, "storage")
        other = stored(server, prompt(5131, LENGTH))
        wait_until(lambda: total(server, "errors", tier="disk", direction="write") > 0, "a write has failed")
        assert tier_status(server)["tiers"]["disk"]["writes_paused"]
        assert_same(server.generate(prompt(5131, LENGTH), NEW_TOKENS), other)
    wait_until(lambda: not tier_status(server)["tiers"]["disk"]["writes_paused"], "writes resume")
    new = prompt(5132, LENGTH)
    answer, _ = stored_files(server, path, new)
    assert_hit(server, new, answer, "storage")
    assert_books_hold(server)


@needs_mount
def test_row_16_a_full_file_system_degrades_to_misses_and_recovers(server_factory, tmp_path):
    with small_file_system(tmp_path / "small", 24 << 20) as path:
        server = start(server_factory, with_disk(path, disk_gb=gib(40), **SMALL), *SMALLER_POOL)
        asked = prompt(5200, LENGTH)
        expected = stored(server, asked)
        with (path / "of-somebody-else").open("wb") as other:
            while True:
                try:
                    other.write(b"x" * (1 << 16))
                    other.flush()
                except OSError:
                    break
            wait_until(lambda: _fails_to_write(server), "a write finds the file system full")
            assert total(server, "errors", tier="disk", reason="ENOSPC") > 0
            assert not list(path.rglob("*.tmp-*"))
            push_out(server)
            again = server.generate(asked, NEW_TOKENS)
            assert_same(again, expected)
        (path / "of-somebody-else").unlink()
        wait_until(lambda: not tier_status(server)["tiers"]["disk"]["writes_paused"], "writes resume")
        new = prompt(5201, LENGTH)
        answer = stored(server, new)
        push_out(server)
        assert_hit(server, new, answer, "storage")
        assert_books_hold(server)
        server.stop(grace_s=0.0)


def _fails_to_write(server) -> bool:
    stored(server, prompt(random.randrange(1 << 30), LENGTH), 1)
    return total(server, "errors", tier="disk", direction="write") > 0


def test_lmcache_7_killed_while_it_stores_and_started_again_over_the_same_directory(
    server_factory, fresh, tmp_path
):
    source = random.Random(5300)
    settings = with_disk(tmp_path, **SMALL)
    asked = prompts(5300, 8, LENGTH)
    server = start(server_factory, settings, *SMALLER_POOL)
    for one in asked[:4]:
        stored(server, one, 1)
    requests = [Running(server, one, 1) for one in [*asked[4:], *prompts(5310, 8, LENGTH)]]
    requests[2].result()
    server.kill()
    server.stop(grace_s=0.0)
    # As if the kernel had lost the end of what was written last, too.
    newest = max(chunk_files(tmp_path), key=lambda file: file.stat().st_mtime_ns)
    os.truncate(newest, source.randrange(newest.stat().st_size))
    server = start(server_factory, settings, *SMALLER_POOL)
    wait_until(lambda: tier_status(server)["tiers"]["disk"]["index_loaded"], "the files are found")
    hits = 0
    for one in asked:
        answer = server.generate(one, NEW_TOKENS)
        hits += cached_from(answer)["storage"] > 0
        assert_same(answer, fresh(1, one, NEW_TOKENS))
    assert hits >= 3
    assert not list(tmp_path.rglob("*.tmp-*"))
    assert_books_hold(server)
    server.stop(grace_s=0.0)


# ---- Redis ----


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def remote(server_factory, redis):
    sglang = {"namespace": "run", "remote_timeout_s": 1.0, "read_ahead_timeout_s": 3.0}
    return start(server_factory, with_remote(redis.url, **{**SMALL, "sglang": sglang}), *SMALLER_POOL)


def answers_again(server):
    """Until the breaker has let a call through: it tries when something is asked or stored."""

    def closed() -> bool:
        stored(server, prompt(random.randrange(1 << 30), CHUNK), 1)
        return not tier_status(server)["tiers"]["remote"]["is_open"]

    wait_until(closed, "Redis is used again", timeout_s=120.0)


def stored_remotely(server, seed):
    asked = prompt(seed, LENGTH)
    answers_again(server)
    answer = stored(server, asked)
    push_out(server)
    return asked, answer


def test_lmcache_2_a_dead_redis_costs_misses_and_is_used_again_when_it_is_back(remote, redis):
    asked, expected = stored_remotely(remote, 5400)
    redis.kill()
    for _ in range(3):
        assert_recomputed(remote, asked, expected)
        remote.overwrite_pool()
        push_out(remote)
    assert total(remote, "errors", tier="remote") > 0
    assert tier_status(remote)["tiers"]["remote"]["is_open"]
    assert str(redis.port) in tier_status(remote)["tiers"]["remote"]["last_error"]
    redis.start()  # empty
    asked, expected = stored_remotely(remote, 5401)
    assert_hit(remote, asked, expected, "storage")
    assert_books_hold(remote)


def test_lmcache_4_a_frozen_redis_holds_nobody_beyond_the_deadline(remote, redis):
    asked, expected = stored_remotely(remote, 5410)
    late = total(remote, "gate_requests", outcome="late") + total(remote, "errors", tier="remote")
    redis.freeze()
    try:
        assert_recomputed(remote, asked, expected)  # while it is still frozen
        for _ in range(3):
            remote.overwrite_pool()
            assert_same(remote.generate(asked, NEW_TOKENS), expected)
        assert total(remote, "gate_requests", outcome="late") + total(remote, "errors", tier="remote") > late
        assert total(remote, "gate_seconds") < 60
    finally:
        redis.thaw()
    asked, expected = stored_remotely(remote, 5411)
    assert_hit(remote, asked, expected, "storage")
    assert_nothing_held(remote)
    assert_books_hold(remote)


def test_lmcache_5_bytes_that_changed_in_redis_are_a_counted_miss(remote, redis):
    asked, expected = stored_remotely(remote, 5420)
    before = total(remote, "checksum_failures", tier="remote")
    for key in redis.client.keys("psrl:*:c:*"):
        redis.client.setrange(key, redis.client.strlen(key) - 9000, b"other bytes")
    assert_recomputed(remote, asked, expected)
    assert total(remote, "checksum_failures", tier="remote") > before


def test_row_19_what_redis_evicted_is_a_late_miss_once(remote, redis):
    asked, expected = stored_remotely(remote, 5430)
    for key in redis.client.keys("psrl:*:c:*"):
        redis.client.delete(key)
    late = total(remote, "misses_late", tier="remote")
    assert_recomputed(remote, asked, expected)
    assert total(remote, "misses_late", tier="remote") > late
    settle(remote)
    push_out(remote)
    late = total(remote, "misses_late", tier="remote")
    assert_hit(remote, asked, expected, "storage")
    assert total(remote, "misses_late", tier="remote") == late
    assert_nothing_held(remote)
