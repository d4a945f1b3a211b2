"""Little room: tiers that hold a part of what is asked for lose the right part, stay within it and never stall."""

import json
import random

import pytest
from redis_server import RedisServer
from support import Running, assert_books_hold, assert_same, post_ok, prompt, status
from tier_support import (
    CHUNK,
    NEW_TOKENS,
    PAGE,
    POOL_TOKENS,
    assert_hit,
    assert_nothing_held,
    cached_from,
    chunk_files,
    disk_bytes,
    gib,
    prompts,
    settle,
    start,
    stored,
    tier_status,
    tiers,
    total,
    with_disk,
    with_remote,
)

from psrl_sglang.lab.servers import ServerError

pytestmark = pytest.mark.engine
QUARTER = POOL_TOKENS // 4 // CHUNK
LEAST = 2


@pytest.fixture(scope="module")
def quarter(server_factory):
    """DRAM for a quarter of the device pool."""
    return start(server_factory, tiers(chunks=QUARTER), "--chunked-prefill-size", "512")


def dram(server):
    return tier_status(server)["tiers"]["dram"]


def pages_of(server, version):
    return sum(pages for tag, pages in dram(server)["pages_by_tag"].items() if tag == version)


def test_dram_of_a_quarter_of_the_pool_serves_what_it_holds_and_nothing_wrong(quarter, fresh):
    source = random.Random(4000)
    asked = prompts(4000, 12, 700)
    for step in range(30):
        one = source.choice(asked)
        turn = one[: source.randrange(100, 700)] + prompt(step, 20)
        answer = quarter.generate(turn, NEW_TOKENS)
        if step % 3 == 0:
            assert_same(answer, fresh(1, turn, NEW_TOKENS))
            quarter.post("/flush_cache")
    settle(quarter)
    used = dram(quarter)
    assert 0 < used["used_bytes"] <= used["budget_bytes"]
    assert total(quarter, "evicted_pages", tier="dram", reason="full") > 0
    assert total(quarter, "hit_tokens", tier="host") + total(quarter, "hit_tokens", tier="dram") > 0
    assert_nothing_held(quarter)
    assert_books_hold(quarter)


def test_what_dram_lost_while_the_device_kept_it_is_offloaded_again(quarter):
    asked = prompt(4100)
    first = stored(quarter, asked)
    for other in prompts(4101, 4, 700):
        stored(quarter, other)
    device = assert_hit(quarter, asked, first, "device")
    settle(quarter)
    quarter.post("/flush_cache")
    assert_hit(quarter, asked, device, "host")


def test_a_device_hit_counts_as_a_use_in_dram(quarter):
    """DRAM holds eight chunks: two prompts of three. The third pushes out the one that was not asked for again."""
    kept, lost, third = prompts(4110, 3, 3 * CHUNK)
    for one in (kept, lost):
        stored(quarter, one, 1)
    assert cached_from(quarter.generate(kept, 1))["device"] > 0
    stored(quarter, third, 1)
    quarter.post("/flush_cache")
    assert cached_from(quarter.generate(kept, 1))["host"] == 3 * CHUNK - PAGE
    assert cached_from(quarter.generate(lost, 1))["host"] < 3 * CHUNK - PAGE


def test_tails_go_before_heads(quarter):
    """What is left of a prompt that was partly evicted is its beginning, which others may share."""
    asked = prompt(4120, 6 * CHUNK)
    stored(quarter, asked, 1)
    stored(quarter, prompt(4121, 4 * CHUNK), 1)
    quarter.post("/flush_cache")
    left = cached_from(quarter.generate(asked, 1))["host"]
    assert CHUNK <= left < 6 * CHUNK - PAGE


def test_row_9_dead_versions_leave_dram_before_older_live_ones(quarter, models):
    post_ok(quarter, "/psrl/v1/retire", {"version": "1"})
    assert dram(quarter)["pages"] == 0
    assert quarter.update_weights(models[2], version="2").success
    live = prompt(4130)
    first = stored(quarter, live)
    assert quarter.update_weights(models[1], version="1").success
    dead = prompt(4131)
    stored(quarter, dead)
    assert pages_of(quarter, "1") >= 37
    assert quarter.update_weights(models[2], version="2").success
    for other in prompts(4140, 2, 500):
        stored(quarter, other, 1)
    assert pages_of(quarter, "1") < 37
    quarter.post("/flush_cache")
    assert_hit(quarter, live, first, "host")
    assert total(quarter, "evicted_pages", tier="dram", reason="dead") > 0
    assert quarter.update_weights(models[1], version="1").success


def test_lmcache_18_dram_smaller_than_one_request_makes_progress_and_answers_right(server_factory, fresh):
    server = start(server_factory, tiers(chunks=LEAST), "--chunked-prefill-size", "512")
    longest = prompt(4200, 2000)
    asked = [longest, *prompts(4201, 5, 700), longest]
    requests = [Running(server, one, NEW_TOKENS) for one in asked]
    for request, one in zip(requests, asked, strict=True):
        assert_same(request.result(), fresh(1, one, NEW_TOKENS))
    settle(server)
    server.overwrite_pool()
    again = server.generate(longest, NEW_TOKENS)
    assert again.cached_tokens <= LEAST * CHUNK
    assert_same(again, fresh(1, longest, NEW_TOKENS))
    assert total(server, "rejected", tier="dram", reason="full") > 0
    assert dram(server)["used_bytes"] <= dram(server)["budget_bytes"]
    assert_nothing_held(server)
    assert_books_hold(server)
    server.stop(grace_s=0.0)


def test_lmcache_10_disk_never_takes_more_than_its_budget(server_factory, tmp_path):
    budget_gb = gib(12)
    sglang = {"read_ahead_timeout_s": 30.0}
    settings = with_disk(tmp_path, disk_gb=budget_gb, chunks=6, save_unfull_chunk=True, sglang=sglang)
    server = start(server_factory, settings)
    most = 0
    for one in prompts(4300, 24, 600):
        last = stored(server, one)
        most = max(most, disk_bytes(tmp_path))
        shown = tier_status(server)["tiers"]["disk"]
        assert shown["used_bytes"] <= shown["budget_bytes"] == int(budget_gb * 2**30)
    assert 0.5 * budget_gb * 2**30 < most <= budget_gb * 2**30
    assert total(server, "evicted_pages", tier="disk", reason="full") > 0
    server.overwrite_pool()
    settle(server)
    assert disk_bytes(tmp_path) <= budget_gb * 2**30
    assert_same(server.generate(one, NEW_TOKENS), last)
    # Dropping by hand gives all of it back.
    server.post("/psrl/v1/retire", {"version": "1"})
    assert chunk_files(tmp_path) == []
    assert_books_hold(server)
    server.stop(grace_s=0.0)


def test_decodes_are_offloaded_while_they_run_only_if_asked(server_factory):
    server = start(server_factory, tiers(sglang={"decode_checkpoint_tokens": 32}))
    request = Running(server, prompt(4400, 100), 300)
    request.wait_tokens(120)
    assert dram(server)["pages"] >= (100 + 64) // PAGE
    assert status(server)["requests"]["running"] == 1
    request.result()
    settle(server)
    assert dram(server)["pages"] == (100 + 300 - 1) // PAGE
    assert_books_hold(server)
    server.stop(grace_s=0.0)


def test_without_save_decode_cache_only_prompts_are_offloaded(server_factory):
    server = start(server_factory, tiers(save_decode_cache=False))
    asked = prompt(4410, 200)
    stored(server, asked, 100)
    assert dram(server)["pages"] == 200 // PAGE
    assert_books_hold(server)
    server.stop(grace_s=0.0)


# ---- row 17: what cannot work is refused before a model is loaded ----


@pytest.fixture
def refusal(server_factory):
    """Start a server that is expected to refuse; returns what it wrote."""

    def start_refused(settings, *args):
        with pytest.raises(ServerError) as refused:
            server_factory(args=args, psrl_config=settings)
        said = str(refused.value)
        assert "exited with code 2" in said, said
        assert "Traceback" not in said
        assert "Load weight" not in said
        return said

    return start_refused


def test_row_17_sizes_over_what_there_is_are_refused_all_at_once_with_both_numbers(refusal, tmp_path):
    settings = with_disk(tmp_path, disk_gb=1e6, chunk_size=250, offload_size_gb=1e5)
    said = refusal(settings, "--pp-size", "2")
    for text in (
        "psrl.lmcache.offload_size_gb asks for 100000 GiB",
        "GiB are free of",
        "psrl.lmcache.max_disk_size_gb asks for 1e+06 GiB",
        f"file system of {tmp_path}",
        "psrl.lmcache.chunk_size 250 is no multiple of --page-size 16: choose 240",
        "--pp-size 2",
        "--enable-hierarchical-cache",
        "ask for less",
    ):
        assert text in said, text


def test_row_17_dram_for_less_than_two_chunks_is_refused_with_what_is_needed(server_factory):
    """Only the scheduler knows how large a chunk is, so this takes until the model is loaded."""
    with pytest.raises(ServerError) as refused:
        start(server_factory, tiers(chunks=1))
    said = str(refused.value)
    assert "exited with code 2" in said
    assert "Traceback" not in said
    assert f"psrl.lmcache.offload_size_gb is {gib(1):g} GiB" in said
    assert "give at least 0.001" in said


def test_a_disk_path_that_cannot_be_written_is_refused(refusal, tmp_path):
    (tmp_path / "file").write_text("in the way")
    said = refusal(with_disk(tmp_path / "file" / "kv"))
    assert f"psrl.lmcache.disk_path {tmp_path / 'file' / 'kv'} cannot be written" in said
    assert "choose a directory" in said


@pytest.mark.parametrize(
    ("url", "texts"),
    [
        ("redis://:secret@127.0.0.1:1/0", ["redis://:***@127.0.0.1:1/0", "cannot be used", "start the store"]),
        ("s3://bucket", ["s3://bucket", "unknown remote store", "redis://", "mooncake://"]),
    ],
)
def test_a_remote_store_that_does_not_answer_or_is_unknown_is_refused(refusal, url, texts):
    said = refusal(with_remote(url))
    for text in ("psrl.lmcache.remote_url", *texts):
        assert text in said
    assert "secret" not in said


def test_a_remote_store_that_wants_another_password_is_refused(refusal, tmp_path):
    with RedisServer(tmp_path, password="right") as redis:
        said = refusal(with_remote(f"redis://:wrong@127.0.0.1:{redis.port}/0"))
    assert "psrl.lmcache.remote_url" in said
    assert "wrong" not in said.replace("WRONGPASS", "")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--enable-lmcache",), "--enable-lmcache"),
        (
            ("--unified-cache-external-linker-backend", "mori"),
            "--unified-cache-external-linker-backend mori",
        ),
        (
            ("--unified-cache-external-linker-config", json.dumps({"linker": "L", "linker_module_path": "m"})),
            "--unified-cache-external-linker-config",
        ),
    ],
)
def test_another_store_beside_ours_is_refused(refusal, args, text):
    said = refusal(tiers(), *args)
    assert text in said
    assert "psrl.lmcache.enable: false" in said


def test_the_rust_core_is_refused_with_the_tiers(refusal):
    said = refusal(tiers(sglang={"tree_core": "rust"}))
    assert "psrl.sglang.tree_core" in said
    assert "tree_core: python" in said
