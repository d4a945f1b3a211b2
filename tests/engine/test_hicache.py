"""Versions through HiCache: host memory and files separate weights as the device does, also after a restart."""

import json
from pathlib import Path

import msgspec
import pytest
import zmq
from support import NAMED, STRICT, Running, assert_books_hold, assert_same, post_ok, prompt, status, wait_until

from psrl_sglang.lab.servers import free_port

pytestmark = pytest.mark.engine
NEW_TOKENS = 16
HICACHE = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-io-backend", "direct")
FILES = (
    *HICACHE,
    *("--hicache-mem-layout", "page_first_direct", "--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete", "--served-model-name", "rollout"),
)


def cached_from(generation, tier):
    return (generation.meta_info["cached_tokens_details"] or {}).get(tier, 0)


def files_of(directory: Path) -> int:
    return sum(1 for _ in directory.rglob("*.bin"))


def store(server, asked):
    """Compute a prompt and hit it again, which sends it to the host at the latest."""
    answer = server.generate(asked, NEW_TOKENS)
    server.generate(asked, 1)
    return answer


def test_host_memory_never_serves_kv_of_other_weights(server_factory, models, fresh):
    server = server_factory(args=(*NAMED, *HICACHE, "--hicache-mem-layout", "layer_first"), psrl_config=STRICT)
    asked = prompt(300)
    first = store(server, asked)
    server.overwrite_pool()
    assert cached_from(server.generate(asked, NEW_TOKENS), "host") == 592

    assert server.update_weights(models[2], version="2").success
    new = store(server, asked)
    assert new.cached_tokens == 0
    assert_same(new, fresh(2, asked, NEW_TOKENS))

    assert server.update_weights(models[1], version="1").success
    server.overwrite_pool()
    back = server.generate(asked, NEW_TOKENS)
    assert cached_from(back, "host") == 592
    assert_same(back, first)

    retired = post_ok(server, "/psrl/v1/retire", {"version": "2"})
    assert retired["host_tokens"] >= 592
    assert all(entry["host_tokens"] == 0 for entry in status(server)["versions"] if entry["version"] == "2")
    assert_books_hold(server)


def test_row_5_files_of_old_weights_are_never_served_not_even_after_a_restart(
    server_factory, models, fresh, tmp_path
):
    options = {
        "psrl_config": STRICT,
        "env": {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)},
    }
    server = server_factory(args=(*NAMED, *FILES), **options)
    asked = prompt(310)
    first = store(server, asked)
    for _ in range(3):
        server.overwrite_pool()
    assert cached_from(server.generate(asked, NEW_TOKENS), "storage") == 592
    assert server.update_weights(models[2], version="2").success
    new = store(server, asked)
    assert new.cached_tokens == 0
    assert_same(new, fresh(2, asked, NEW_TOKENS))
    for _ in range(3):
        server.overwrite_pool()
    server.stop(grace_s=10.0)

    second = server_factory(models[2], args=("--weight-version", "2", *FILES), **options)
    warm = second.generate(asked, NEW_TOKENS)
    assert cached_from(warm, "storage") == 592
    assert_same(warm, new)
    assert second.update_weights(models[1], version="3").success
    assert second.generate(asked, NEW_TOKENS).cached_tokens == 0
    assert second.update_weights(models[1], version="1").success
    back = second.generate(asked, NEW_TOKENS)
    assert cached_from(back, "storage") == 592
    assert_same(back, first)
    second.stop(grace_s=10.0)

    # A start that does not say what its weights are called takes their name from the checkpoint.
    third = server_factory(models[2], args=FILES, **options)
    assert third.generate(asked, NEW_TOKENS).cached_tokens == 0
    third.stop(grace_s=0.0)


def test_clear_on_weight_update_empties_every_tier_while_requests_run(server_factory, models, fresh, tmp_path):
    settings = {"psrl": {"lmcache": {"multi_version_kv": False, "clear_on_weight_update": True}}}
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    server = server_factory(args=(*NAMED, *FILES), psrl_config=settings, env=env)
    asked = prompt(320)
    store(server, asked)
    server.overwrite_pool()
    wait_until(lambda: files_of(tmp_path) >= 37, "the prompt is written to files")
    running = Running(server, prompt(321, 200), 150)
    running.wait_tokens(2)
    server.overwrite_pool()
    server.overwrite_pool()  # their pages are still being written to files
    server.pause("in_place")
    assert server.update_weights(models[2], version="2").success
    assert files_of(tmp_path) == 0
    by_version = {entry["version"]: entry for entry in status(server)["versions"]}
    assert by_version.get("1", {"evictable_tokens": 0})["evictable_tokens"] == 0
    server.resume()
    assert len(running.result().output_ids) == 150
    new = server.generate(asked, NEW_TOKENS)
    assert new.cached_tokens == 0
    assert_same(new, fresh(2, asked, NEW_TOKENS))
    assert server.update_weights(models[1], version="1").success
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
    assert_books_hold(server)
    server.stop(grace_s=0.0)


def test_kv_events_carry_the_version(server_factory, models):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    events = json.dumps({"publisher": "zmq", "endpoint": endpoint, "bind": True})
    server = server_factory(args=(*NAMED, "--kv-events-config", events), psrl_config=STRICT)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.subscribe(b"")
        subscriber.connect(endpoint)
        hashes = {}
        for seed, version in ((1, "1"), (2, "2")):
            assert server.update_weights(models[seed], version=version).success
            stored = []
            for attempt in range(20):  # a subscription takes a moment to be heard
                server.generate(prompt(330 + attempt, 64), 1)
                stored += _stored(subscriber, wait_ms=300)
                if stored:
                    break
            assert stored
            assert {event["cache_salt"] for event in stored} == {f"psrl:{version}"}
            hashes[version] = {block for event in stored for block in event["hashes"]}
        assert not hashes["1"] & hashes["2"]
    server.stop(grace_s=0.0)


def _stored(subscriber, *, wait_ms):
    """BlockStored events that arrive within the time: their salt and block hashes."""
    found = []
    while subscriber.poll(wait_ms):
        payload = subscriber.recv_multipart()[-1]
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                found.append({"hashes": event["block_hashes"], "cache_salt": event["cache_salt"]})
    return found
