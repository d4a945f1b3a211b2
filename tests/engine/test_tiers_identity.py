"""Whose KV it is: a restart finds its own again, and nothing of other weights, layouts or runs is ever served."""

import json
import shutil
from pathlib import Path

import pytest
from redis_server import RedisServer
from support import (
    Running,
    assert_books_hold,
    assert_same,
    counters,
    difference,
    post_ok,
    prompt,
    status,
    wait_until,
)
from tier_support import (
    NEW_TOKENS,
    assert_hit,
    cached_from,
    chunk_files,
    in_schedulers,
    prompts,
    settle,
    start,
    stored,
    tier_status,
    tiers,
    total,
    whole_pages,
    with_disk,
    with_remote,
)

pytestmark = pytest.mark.engine
LOWER = {"save_unfull_chunk": True, "chunks": 80}
PATIENT = {"read_ahead_timeout_s": 30.0, "remote_timeout_s": 10.0}
RUN = {"namespace": "run", **PATIENT}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def lower_settings(kind: str, redis: RedisServer, path: Path, **sglang) -> dict:
    options = {**LOWER, "sglang": {**PATIENT, **sglang}}
    return with_disk(path, **options) if kind == "disk" else with_remote(redis.url, **options)


def stop(server) -> None:
    settle(server)
    server.stop(grace_s=0.0)


@pytest.mark.parametrize("kind", ["disk", "remote"])
def test_row_5_with_a_namespace_a_restart_finds_every_version_again_by_its_name(
    server_factory, models, fresh, redis, tmp_path, kind
):
    settings = lower_settings(kind, redis, tmp_path, namespace=f"named-{kind}")
    asked = prompt(3000)
    server = start(server_factory, settings)
    first = stored(server, asked)
    assert server.update_weights(models[2], version="2").success
    second = stored(server, asked)
    assert cached_from(second) == {"device": 0, "host": 0, "storage": 0}
    assert difference(first, second) > 0.01
    stop(server)

    server = start(server_factory, settings)
    assert_same(assert_hit(server, asked, first, "storage"), fresh(1, asked, NEW_TOKENS))
    assert server.update_weights(models[2], version="3").success
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
    assert server.update_weights(models[2], version="2").success
    assert_same(assert_hit(server, asked, second, "storage"), fresh(2, asked, NEW_TOKENS))
    stop(server)


def test_row_5_without_a_namespace_a_restart_finds_only_the_weights_it_starts_with(
    server_factory, models, redis, tmp_path
):
    settings = with_disk(tmp_path / "kv", remote_url=redis.url, **LOWER, sglang=PATIENT)
    asked = prompt(3010)
    server = start(server_factory, settings)
    first = stored(server, asked)
    assert server.update_weights(models[2], version="2").success
    stored(server, asked)
    assert server.update_weights(models[2]).success  # nobody says which
    stored(server, asked)
    stop(server)

    server = start(server_factory, settings)
    assert "psrl.sglang.namespace is not set" in server.log_path.read_text()
    assert_hit(server, asked, first, "storage")
    assert server.update_weights(models[2], version="2").success
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
    stop(server)

    # Two checkpoints that both call themselves "1".
    server = start(server_factory, settings, model=models[2])
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
    stop(server)


def test_a_start_whose_weights_nobody_can_tell_leaves_nothing_for_others(server_factory, tmp_path, fresh):
    settings = with_disk(tmp_path, **LOWER, sglang=PATIENT)
    asked = prompt(3190)
    server = start(server_factory, settings, "--load-format", "dummy")
    of_dummy = stored(server, asked)
    assert chunk_files(tmp_path)
    stop(server)
    server = start(server_factory, settings)
    wait_until(lambda: tier_status(server)["tiers"]["disk"]["index_loaded"], "the index is loaded")
    again = server.generate(asked, NEW_TOKENS)
    assert again.cached_tokens == 0
    assert_same(again, fresh(1, asked, NEW_TOKENS))
    assert difference(again, of_dummy) > 1e-3
    stop(server)


def test_another_layout_in_the_same_directory_and_redis_is_never_read_and_said_once(
    server_factory, models, fresh, redis, tmp_path
):
    """Another page size, number of layers or tensor-parallel layout; the names and tokens are all the same."""
    path = tmp_path / "kv"
    settings = with_disk(path, remote_url=redis.url, **LOWER, sglang={**RUN, "namespace": "layouts"})
    asked = prompt(3020)
    server = start(server_factory, settings)
    first = stored(server, asked)
    stop(server)
    (first_kv,) = [entry for entry in (path / "psrl-kv").iterdir() if entry.is_dir()]

    deeper = tmp_path / "two-layers"
    shutil.copytree(models[1], deeper)
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    for model, args, env, said in (
        (models[1], ("--page-size", "32"), {}, "page=16"),
        (deeper, (), {}, "layers=0+4"),
        (models[1], ("--tp-size", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, "rank=tp0/1"),
    ):
        server = start(server_factory, settings, *args, model=model, env=env)
        cold = server.generate(asked, NEW_TOKENS)
        assert cold.cached_tokens == 0, args
        assert server.generate(asked, 1).cached_tokens > 0
        lines = server.log_path.read_text().splitlines()
        (line,) = [line for line in lines if "another layout" in line and first_kv.name in line]
        assert said in line.partition(" there")[0]
        assert total(server, "misses_late") == total(server, "bad_files") == 0
        stop(server)

    server = start(server_factory, settings)
    assert_same(assert_hit(server, asked, first, "storage"), fresh(1, asked, NEW_TOKENS))
    stop(server)


@pytest.fixture(scope="module")
def all_tiers(server_factory, redis, tmp_path_factory):
    """DRAM, disk and Redis behind one server."""
    path = tmp_path_factory.mktemp("all")
    options = {**LOWER, "chunks": 512, "sglang": {**RUN, "namespace": "all"}}
    settings = with_disk(path, remote_url=redis.url, **options)
    return start(server_factory, settings)


def test_rows_4_and_6_after_an_update_no_tier_serves_kv_of_the_old_weights(all_tiers, models, fresh):
    server = all_tiers
    asked = prompts(3100, 3, 500)
    first = [stored(server, one) for one in asked]
    server.overwrite_pool()
    assert server.update_weights(models[2], version="2").success
    for one, old in zip(asked, first, strict=True):
        new = server.generate(one, NEW_TOKENS)
        assert new.cached_tokens == 0
        assert_same(new, fresh(2, one, NEW_TOKENS))
        assert difference(new, old) > 0.01
    settle(server)
    server.overwrite_pool()
    for one in asked:
        again = server.generate(one, NEW_TOKENS)
        assert cached_from(again)["host"] == whole_pages(500)
        assert_same(again, fresh(2, one, NEW_TOKENS))
    assert counters(server)["stale_tokens"] == 0
    assert server.update_weights(models[1], version="1").success


def test_going_back_to_an_old_version_hits_its_kv_in_dram(all_tiers, models, fresh):
    server = all_tiers
    asked = prompt(3110)
    first = stored(server, asked)
    server.overwrite_pool()
    assert server.update_weights(models[2], version="2").success
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
    assert server.update_weights(models[1], version="1").success
    server.overwrite_pool()
    assert_same(assert_hit(server, asked, first, "host"), fresh(1, asked, NEW_TOKENS))


def test_what_a_crossing_request_computes_enters_the_tiers_under_the_old_version_only(all_tiers, models, fresh):
    server = all_tiers
    asked = prompt(3120, 300)
    request = Running(server, asked, 120)
    request.wait_tokens(20)
    server.pause("in_place")
    assert server.update_weights(models[2], version="2").success
    server.resume()
    whole = asked + list(request.result().output_ids)
    settle(server)
    server.overwrite_pool()
    new = server.generate(whole, NEW_TOKENS)
    assert new.cached_tokens == 0
    assert_same(new, fresh(2, whole, NEW_TOKENS))
    assert server.update_weights(models[1], version="1").success
    old = server.generate(whole, NEW_TOKENS)
    assert whole_pages(300) <= cached_from(old)["host"] < len(whole) - 64
    assert_same(old, fresh(1, whole, NEW_TOKENS))


@pytest.mark.parametrize("update", ["unnamed", "failed"])
def test_weights_without_a_name_find_nothing_in_any_tier(all_tiers, models, tmp_path, update):
    server = all_tiers
    asked = prompt(3130 + (update == "failed"), 400)
    stored(server, asked)
    server.overwrite_pool()
    if update == "unnamed":
        assert server.update_weights(models[1]).success
    else:
        assert not server.update_weights(tmp_path / "missing", version="1").success
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
    assert server.update_weights(models[1], version="1").success
    assert cached_from(server.generate(asked, NEW_TOKENS))["host"] > 0


def test_the_users_own_salt_separates_in_the_tiers_too(all_tiers):
    server = all_tiers
    asked = prompt(3140, 400)
    server.generate(asked, 1, cache_salt="tenant-a")
    settle(server)
    server.overwrite_pool()
    assert server.generate(asked, 1).cached_tokens == 0
    assert server.generate(asked, 1, cache_salt="tenant-b").cached_tokens == 0
    assert server.generate(asked, 1, extra_key="tenant-a").cached_tokens == 0
    settle(server)
    server.overwrite_pool()
    assert cached_from(server.generate(asked, 1, cache_salt="tenant-a"))["host"] == whole_pages(400)


def test_retire_drops_a_version_from_dram_and_disk_and_leaves_the_others(all_tiers, models):
    server = all_tiers
    asked = prompt(3150)
    stored(server, asked)
    assert server.update_weights(models[2], version="kept").success
    stored(server, asked)

    def pages(tier, version):
        by_tag = tier_status(server)["tiers"][tier]["pages_by_tag"]
        return sum(count for tag, count in by_tag.items() if tag.split(":")[-1] == version)

    assert min(pages(tier, version) for tier in ("dram", "disk") for version in ("1", "kept")) >= 37
    retired = post_ok(server, "/psrl/v1/retire", {"version": "1"})
    assert retired["host_tokens"] >= 592
    assert [pages("dram", "1"), pages("disk", "1")] == [0, 0]
    server.overwrite_pool()
    assert cached_from(server.generate(asked, 1))["host"] == 592
    assert server.update_weights(models[1], version="1").success
    assert_books_hold(server)


def test_row_3_a_flush_empties_the_device_keeps_the_tiers_and_says_so(all_tiers, fresh):
    server = all_tiers
    asked = prompt(3160)
    cold = stored(server, asked)
    said = server.post("/flush_cache")
    assert said.status_code == 200
    assert "DRAM, disk and remote keep" in said.text
    assert status(server)["device"]["evictable_tokens"] == 0
    server.overwrite_pool()
    assert_same(assert_hit(server, asked, cold, "host"), fresh(1, asked, NEW_TOKENS))


def test_lag_1_reuses_the_version_before_from_dram_and_counts_it_as_stale(server_factory, models):
    server = start(server_factory, tiers(sglang={"max_version_lag": 1}))
    asked = prompt(3200)
    stored(server, asked)
    server.overwrite_pool()
    assert server.update_weights(models[2], version="2").success
    one_behind = server.generate(asked, NEW_TOKENS)
    assert cached_from(one_behind)["host"] == 592
    assert one_behind.meta_info["psrl"]["version_lag"] == 1
    shown = counters(server)
    assert shown["stale_tokens"] == 592
    assert shown["oldest_lag_served"] == 1
    assert server.update_weights(models[1], version="3").success
    server.overwrite_pool()
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
    assert_books_hold(server)
    server.stop(grace_s=0.0)


# As on a machine whose memory is busy: what is offloaded takes its time.
SLOW_OFFLOADS = """
import time
from psrl_sglang.engine.linker import PsrlLinker
offload = PsrlLinker._run_offload

def slowly(linker, job):
    time.sleep(0.1)
    return offload(linker, job)

PsrlLinker._run_offload = slowly
"""


def test_clear_on_weight_update_leaves_no_file_and_no_key_while_requests_run(
    server_factory, models, fresh, tmp_path
):
    with RedisServer(tmp_path) as redis:
        settings = with_disk(
            tmp_path / "kv",
            remote_url=redis.url,
            **LOWER,
            sglang=RUN,
            multi_version_kv=False,
            clear_on_weight_update=True,
        )
        redis.client.set("of-somebody-else", b"kept")
        server = start(server_factory, settings, env=in_schedulers(tmp_path / "plugin", SLOW_OFFLOADS))
        asked = prompt(3300)
        stored(server, asked)
        assert chunk_files(tmp_path / "kv")
        assert redis.client.dbsize() > 1
        running = [Running(server, prompt(3310 + number, 300), 120) for number in range(4)]
        for request in running:
            request.wait_tokens(2)
        server.pause("in_place")
        assert server.update_weights(models[2], version="2").success
        assert chunk_files(tmp_path / "kv") == []
        assert redis.client.keys() == [b"of-somebody-else"]
        server.resume()
        assert all(len(request.result().output_ids) == 120 for request in running)
        # What crossed the change is of both weights, and stays out of every tier.
        settle(server)
        assert chunk_files(tmp_path / "kv") == []
        new = stored(server, asked)
        assert new.cached_tokens == 0
        assert_same(new, fresh(2, asked, NEW_TOKENS))
        wait_until(lambda: len(chunk_files(tmp_path / "kv")) > 0, "new KV is stored")
        assert server.update_weights(models[1], version="1").success
        assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
        for number in range(4):
            requests = [Running(server, prompt(3400 + 10 * number + n, 600), 12) for n in range(6)]
            requests[0].wait_tokens(1)
            assert server.update_weights(models[2 - number % 2], version=f"under-load-{number}").success
            now = status(server)["tag"]
            for request in requests:
                request.result()
            settle(server)
            assert set(tier_status(server)["tiers"]["disk"]["pages_by_tag"]) <= {now}
            assert len({key.split(b":")[3] for key in redis.client.keys("psrl:*")}) <= 1
        assert_books_hold(server)
        server.stop(grace_s=0.0)
