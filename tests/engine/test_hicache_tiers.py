"""HiCache with our store behind it: what left device and host comes back from it, under its version only."""

import random
from pathlib import Path

import pytest
from support import (
    NAMED,
    Running,
    assert_books_hold,
    assert_same,
    post_ok,
    prompt,
)
from tier_support import (
    CHUNK,
    NEW_TOKENS,
    PAGE,
    cached_from,
    chunk_files,
    settle,
    stored,
    tier_status,
    total,
    whole_pages,
    with_disk,
)

from psrl_sglang.lab.models import make_model

pytestmark = pytest.mark.engine
DEVICE_TOKENS = 1024
HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", "direct"),
    *("--hicache-storage-prefetch-policy", "wait_complete", "--max-total-tokens", str(DEVICE_TOKENS)),
)
LAYER_FIRST = (*HICACHE, "--hicache-mem-layout", "layer_first")
PAGE_FIRST = (*HICACHE, "--hicache-mem-layout", "page_first_direct")
BUFFER_ONLY = ("--hicache-host-memory-mode", "buffer_only")
FEW_CHUNKS = 16  # of DRAM: fewer than there are prompts in what fills the host pool
RUN = {"namespace": "run", "read_ahead_timeout_s": 30.0}
LEFT = {seed: prompt(seed) for seed in (400, 401, 402)}


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def settings(disk):
    return with_disk(disk, chunks=FEW_CHUNKS, sglang=RUN, save_unfull_chunk=True)


@pytest.fixture(scope="module")
def server(server_factory, settings):
    return server_factory(args=(*NAMED, *LAYER_FIRST, "--enable-metrics"), psrl_config=settings)


@pytest.fixture(scope="module")
def left(server):
    """Prompts, and their answers, that the server has computed and that only its disk has any more."""
    answers = {seed: stored(server, asked, 60 if seed == 400 else NEW_TOKENS) for seed, asked in LEFT.items()}
    assert all(answer.cached_tokens == 0 for answer in answers.values())
    push_out(server)
    return answers


def push_out(server):
    pushed = 0
    while pushed < 2.25 * DEVICE_TOKENS:
        pushed += server.overwrite_pool()
    settle(server)


def assert_from_storage(answer, tokens):
    assert cached_from(answer) == {"device": 0, "host": 0, "storage": tokens}


def test_what_left_device_and_host_comes_back_from_the_store_with_what_was_generated(server, left, fresh):
    whole = LEFT[400] + list(left[400].output_ids)
    read_before = total(server, "bytes", tier="disk", direction="load")
    again = server.generate(whole, NEW_TOKENS)
    assert_from_storage(again, whole_pages(len(whole)))
    assert_same(again, fresh(1, whole, NEW_TOKENS))
    assert total(server, "bytes", tier="disk", direction="load") > read_before
    assert_books_hold(server)


def test_a_prompt_that_turns_away_is_restored_to_the_page_and_computed_from_there(server, left, fresh):
    at = random.Random(401).randrange(272, 330)
    reusable = at // PAGE * PAGE
    turned = LEFT[401][:at] + [(token + 1) % 512 for token in LEFT[401][at:]]
    answer = stored(server, turned)
    assert_from_storage(answer, reusable)
    assert_same(answer, fresh(1, turned, NEW_TOKENS))
    rest = server.generate(LEFT[401], NEW_TOKENS)
    assert cached_from(rest) == {"device": reusable, "host": 0, "storage": whole_pages(600) - reusable}
    assert_same(rest, left[401])


def test_new_weights_find_nothing_of_the_old_ones_and_a_roll_back_finds_its_own(server, left, models, fresh):
    asked = LEFT[402]
    assert server.update_weights(models[2], version="2").success
    new = stored(server, asked)
    assert new.cached_tokens == 0
    assert_same(new, fresh(2, asked, NEW_TOKENS))
    assert server.update_weights(models[1], version="1").success
    back = server.generate(asked, NEW_TOKENS)
    assert_from_storage(back, whole_pages(600))
    assert_same(back, left[402])

    assert tier_status(server)["tiers"]["disk"]["pages_by_tag"]["run:2"] > 0
    assert post_ok(server, "/psrl/v1/retire", {"version": "2"})["host_tokens"] > 0
    tiers = tier_status(server)["tiers"]
    assert "run:2" not in tiers["dram"]["pages_by_tag"]
    assert "run:2" not in tiers["disk"]["pages_by_tag"]
    assert tiers["disk"]["pages_by_tag"]["run:1"] > 0
    assert_books_hold(server)


def test_every_call_is_told_whose_pages_it_is_about_and_metrics_show_the_tiers(server):
    settle(server)
    assert total(server, "untold_pages") == 0
    assert total(server, "errors") == 0
    metrics = server.get("/metrics").text
    assert 'psrl:tier_bytes_total{direction="load"' in metrics
    assert "sglang:prefetch_bandwidth" in metrics


def test_another_start_with_or_without_hicache_finds_the_files_whatever_the_host_layout(
    server, server_factory, settings, fresh, disk
):
    asked, other = prompt(410), prompt(411)
    first, lost = stored(server, asked), stored(server, other)
    server.stop(grace_s=15.0)

    linker = server_factory(args=(*NAMED, "--max-total-tokens", str(DEVICE_TOKENS)), psrl_config=settings)
    warm = linker.generate(asked, NEW_TOKENS)
    assert cached_from(warm)["storage"] == whole_pages(600)
    assert_same(warm, first)
    third = prompt(412)
    by_linker = stored(linker, third)
    layout = tier_status(linker)["layout"]
    linker.stop(grace_s=15.0)

    second = server_factory(args=(*NAMED, *PAGE_FIRST, *BUFFER_ONLY), psrl_config=settings)
    assert tier_status(second)["layout"] == layout
    for one, expected in ((asked, first), (third, by_linker)):
        warm = second.generate(one, NEW_TOKENS)
        assert_from_storage(warm, whole_pages(600))
        assert_same(warm, expected)

    for path in chunk_files(disk):
        spoil(path)
    again = second.generate(other, NEW_TOKENS)
    assert again.cached_tokens == 0
    assert_same(again, lost)
    assert total(second, "checksum_failures", tier="disk") > 0
    assert_books_hold(second)
    second.stop(grace_s=0.0)


def spoil(path: Path):
    written = bytearray(path.read_bytes())
    written[-1] ^= 1
    path.write_bytes(written)


def test_sliding_windows_come_back_with_what_they_belong_to(server_factory, tmp_path):
    model = make_model(tmp_path / "swa", seed=1, preset="swa")
    settings = with_disk(tmp_path / "disk", chunks=FEW_CHUNKS, sglang=RUN, save_unfull_chunk=True)
    server = server_factory(model, args=(*NAMED, *LAYER_FIRST), psrl_config=settings)
    asked = prompt(430)
    stored(server, asked)
    device = server.generate(asked, NEW_TOKENS)
    assert cached_from(device)["device"] == whole_pages(600)
    push_out(server)
    again = server.generate(asked, NEW_TOKENS)
    assert_from_storage(again, whole_pages(600))
    assert_same(again, device)
    assert total(server, "untold_pages") == 0
    assert_books_hold(server)
    server.stop(grace_s=0.0)


def test_clear_on_weight_update_leaves_no_file_while_a_request_runs(server_factory, models, fresh, tmp_path):
    settings = with_disk(
        tmp_path, chunks=FEW_CHUNKS, sglang=RUN, multi_version_kv=False, clear_on_weight_update=True
    )
    server = server_factory(args=(*NAMED, *PAGE_FIRST), psrl_config=settings)
    asked = prompt(420)
    stored(server, asked)
    assert len(chunk_files(tmp_path)) == 600 // CHUNK
    running = Running(server, prompt(421, 200), 100)
    running.wait_tokens(2)
    server.overwrite_pool()  # whose pages are still being written
    server.pause("in_place")
    assert server.update_weights(models[2], version="2").success
    assert chunk_files(tmp_path) == []
    assert tier_status(server)["tiers"]["dram"]["pages_by_tag"] == {}
    server.resume()
    assert len(running.result().output_ids) == 100
    new = stored(server, asked)
    assert new.cached_tokens == 0
    assert_same(new, fresh(2, asked, NEW_TOKENS))
    tiers = tier_status(server)["tiers"]
    assert [*tiers["dram"]["pages_by_tag"], *tiers["disk"]["pages_by_tag"]] == ["run:2", "run:2"]
    assert server.update_weights(models[1], version="1").success
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
    assert_books_hold(server)
    server.stop(grace_s=0.0)
