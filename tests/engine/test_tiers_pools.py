"""Models whose KV is not K and V of every layer: latent attention, and sliding windows in a pool of their own."""

import pytest
from fault_plugin import Faults
from support import NAMED, assert_books_hold, assert_same, post_ok, prompt
from tier_support import (
    NEW_TOKENS,
    assert_hit,
    assert_nothing_held,
    cached_from,
    settle,
    stored,
    tier_status,
    with_disk,
)

from psrl_sglang.lab.models import make_model

pytestmark = pytest.mark.engine
RUN = {"namespace": "run", "read_ahead_timeout_s": 30.0}
CHUNK = 256


@pytest.fixture(scope="module")
def pooled_models(tmp_path_factory):
    """Two weight versions of a preset."""
    directory = tmp_path_factory.mktemp("pooled")

    def make(preset, seed):
        return make_model(directory / f"{preset}-{seed}", seed=seed, preset=preset)

    return make


@pytest.fixture(scope="module", params=["mla", "swa"])
def pooled(request, server_factory, pooled_models, tmp_path_factory):
    """A server of one kind of pool, how to start another one on its disk, and its faults."""
    disk = tmp_path_factory.mktemp("disk")
    settings = with_disk(disk, save_unfull_chunk=True, sglang=RUN)
    # A small pool is overwritten quickly.
    args = (*NAMED, "--max-total-tokens", "2048", "--chunked-prefill-size", str(CHUNK))

    faults = Faults(tmp_path_factory.mktemp("faults"))

    def start():
        return server_factory(pooled_models(request.param, 1), args=args, psrl_config=settings, env=faults.env)

    server = start()
    yield request.param, server, start, faults
    server.stop(grace_s=0.0)


def test_a_host_hit_equals_a_device_hit(pooled):
    preset, server, _, _ = pooled
    asked = prompt(2000, 701)
    stored(server, asked)
    assert tier_status(server)["layout"].split("pools=")[1].count(",") == (preset == "swa")
    # The first answer is none to compare with: torch-native attention computes it otherwise for MLA.
    device = assert_hit(server, asked, server.generate(asked, NEW_TOKENS), "device")
    server.overwrite_pool()
    assert_hit(server, asked, device, "host")
    assert_nothing_held(server)


def test_generated_tokens_are_reused_from_dram(pooled):
    _, server, _, _ = pooled
    asked = prompt(2001, 200)
    whole = asked + list(stored(server, asked, 72).output_ids)
    device = server.generate(whole, NEW_TOKENS)
    assert cached_from(device)["device"] == 256
    settle(server)
    server.overwrite_pool()
    assert_hit(server, whole, device, "host", 256)


def test_a_shared_prefix_is_restored_where_its_last_window_was_stored(pooled):
    """KV of a window is stored at the end of a chunk, a prompt or an answer, and nowhere else."""
    preset, server, _, _ = pooled
    asked = prompt(2002, 701)
    stored(server, asked)
    for at, end in ((600, 2 * CHUNK), (352, CHUNK)):
        other = [*asked[:at], *prompt(2003 + at, 200)]
        server.overwrite_pool()
        hit = server.generate(other, NEW_TOKENS)
        assert cached_from(hit)["host"] == (end if preset == "swa" else at // 16 * 16)
        assert_same(server.generate(other, NEW_TOKENS), hit)


def test_what_dram_has_lost_of_one_pool_is_offloaded_again_from_the_device(pooled):
    preset, server, _, faults = pooled
    asked = prompt(2005, 701)
    stored(server, asked)
    device = server.generate(asked, NEW_TOKENS)
    settle(server)
    faults.set(forget_from=0, forget_pool="swa" if preset == "swa" else "kv", fail_read=True)
    longer = server.generate([*asked, *prompt(2006, 40)], NEW_TOKENS)
    assert cached_from(longer)["device"] >= 688
    faults.set(fail_read=True)  # else the rest would come from disk
    settle(server)
    server.overwrite_pool()
    assert_hit(server, asked, device, "host")
    faults.set()


def test_versions_are_kept_apart(pooled, pooled_models):
    preset, server, _, _ = pooled
    asked = prompt(2010, 701)
    old = stored(server, asked)
    old = server.generate(asked, NEW_TOKENS)
    assert server.update_weights(pooled_models(preset, 2), version="2").success
    new = stored(server, asked)
    assert new.cached_tokens == 0
    assert new.logprobs != old.logprobs
    assert server.update_weights(pooled_models(preset, 1), version="1").success
    server.overwrite_pool()
    assert_hit(server, asked, old, "host")
    assert post_ok(server, "/psrl/v1/retire", {"version": "2"})["host_tokens"] >= 700
    assert_books_hold(server)


def test_disk_is_warm_after_a_restart(pooled):
    _, server, start, _ = pooled
    asked = prompt(2020, 701)
    stored(server, asked)
    device = server.generate(asked, NEW_TOKENS)
    settle(server)
    server.stop(grace_s=15.0)
    second = start()
    assert_hit(second, asked, device, "storage")
    assert_hit(second, asked, device, "device")
    assert_nothing_held(second)
    assert_books_hold(second)
    second.stop(grace_s=0.0)
