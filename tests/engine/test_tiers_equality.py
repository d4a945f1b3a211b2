"""KV that went through DRAM, disk or Redis gives the answers that a device hit and a fresh engine give."""

import random
from pathlib import Path

import pytest
from redis_server import RedisServer
from support import Running, assert_books_hold, assert_same, prompt
from tier_support import (
    CHUNK,
    FEW_CHUNKS,
    NEW_TOKENS,
    PAGE,
    SMALLER_POOL,
    assert_hit,
    assert_nothing_held,
    cached_from,
    prompts,
    push_out,
    settle,
    start,
    stored,
    tier_status,
    tiers,
    whole_pages,
    with_disk,
    with_remote,
)

pytestmark = pytest.mark.engine
RUN = {"namespace": "run", "read_ahead_timeout_s": 30.0}
LENGTHS = (PAGE * 9 - 1, PAGE * 9, PAGE * 9 + 1, CHUNK * 2 - 1, CHUNK * 2, CHUNK * 2 + 1)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def dram(server_factory):
    return start(server_factory, tiers())


@pytest.fixture(scope="module", params=["disk", "remote"])
def lower(request, server_factory, redis, tmp_path_factory):
    """A server whose DRAM is small, before disk or Redis; chunks that are not full are stored too."""
    options = {"chunks": FEW_CHUNKS, "sglang": RUN, "save_unfull_chunk": True}
    if request.param == "disk":
        settings = with_disk(tmp_path_factory.mktemp("disk"), **options)
    else:
        settings = with_remote(redis.url, **options)
    server = start(server_factory, settings, *SMALLER_POOL)
    yield server
    server.stop(grace_s=0.0)


def test_a_host_hit_equals_a_device_hit_and_a_fresh_engine(dram, fresh):
    asked = prompt(1000)
    cold = stored(dram, asked)
    assert cold.cached_tokens == 0
    device = assert_hit(dram, asked, cold, "device")
    dram.overwrite_pool()
    host = assert_hit(dram, asked, device, "host")
    assert_same(host, fresh(1, asked, NEW_TOKENS))


def test_generated_tokens_are_reused_from_dram(dram, fresh):
    asked = prompt(1001, 200)
    whole = asked + list(stored(dram, asked, 72).output_ids)
    dram.overwrite_pool()
    again = dram.generate(whole, NEW_TOKENS)
    assert cached_from(again)["host"] == whole_pages(len(whole)) > len(asked)
    assert_same(again, fresh(1, whole, NEW_TOKENS))


def test_a_prompt_cut_anywhere_is_restored_from_dram_to_the_page(dram, fresh):
    source = random.Random(1002)
    asked = prompt(1002, 900)
    stored(dram, asked)
    for at in [source.randrange(1, 900) for _ in range(6)]:
        dram.overwrite_pool()
        turned = asked[:at] + [(token + 1) % 512 for token in asked[at : at + 40]]
        answer = dram.generate(turned, NEW_TOKENS)
        reusable = at // PAGE * PAGE
        assert cached_from(answer) == {"device": 0, "host": reusable, "storage": 0}, at
        assert_same(answer, fresh(1, turned, NEW_TOKENS))


def test_part_of_a_prefix_comes_from_the_device_and_the_rest_from_dram(dram, fresh):
    asked = prompt(1003, 1200)
    stored(dram, asked)
    dram.overwrite_pool()
    dram.generate(asked[:400], 1)
    answer = dram.generate(asked, NEW_TOKENS)
    assert cached_from(answer) == {"device": 400, "host": whole_pages(1200) - 400, "storage": 0}
    assert_same(answer, fresh(1, asked, NEW_TOKENS))


@pytest.mark.parametrize("length", LENGTHS)
def test_lmcache_8_lengths_around_pages_and_chunks_are_restored_from_dram(dram, fresh, length):
    asked = prompt(1100 + length, length)
    cold = stored(dram, asked)
    dram.overwrite_pool()
    assert_same(assert_hit(dram, asked, cold, "host"), fresh(1, asked, NEW_TOKENS))


def test_row_10_greedy_answers_to_200_prompts_survive_the_round_trip_through_dram(dram):
    source = random.Random(10)
    asked = [prompt(2000 + number, source.randrange(33, 130)) for number in range(200)]
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": asked, "sampling_params": sampling}

    def ask():
        reply = dram.post("/generate", body)
        assert reply.status_code == 200, reply.text[:500]
        return reply.json()

    first = ask()
    settle(dram)
    dram.overwrite_pool()
    second = ask()
    host = [answer["meta_info"]["cached_tokens_details"]["host"] for answer in second]
    assert host == [whole_pages(len(one)) for one in asked]
    assert [answer["output_ids"] for answer in second] == [answer["output_ids"] for answer in first]


def test_loading_before_the_forward_gives_the_same_as_loading_under_it(server_factory, fresh):
    server = start(server_factory, tiers(enable_async_loading=False))
    asked = prompt(1010)
    cold = stored(server, asked)
    server.overwrite_pool()
    assert_same(assert_hit(server, asked, cold, "host"), fresh(1, asked, NEW_TOKENS))
    server.stop(grace_s=0.0)


def test_hits_of_several_tiers_in_one_batch_do_not_mix(dram, fresh):
    asked = prompts(1020, 6, 300)
    for one in asked:
        dram.generate(one, 1)
    settle(dram)
    dram.overwrite_pool()
    for one in asked[:2]:
        dram.generate(one[:200], 1)
    requests = [Running(dram, one, NEW_TOKENS) for one in [*asked, prompt(1030, 300), asked[3]]]
    for request, one in zip(requests, [*asked, prompt(1030, 300), asked[3]], strict=True):
        assert_same(request.result(), fresh(1, one, NEW_TOKENS))
    assert_nothing_held(dram)
    assert_books_hold(dram)


def test_a_hit_below_dram_equals_a_device_hit_and_a_fresh_engine(lower, fresh):
    asked = prompt(1200)
    cold = stored(lower, asked)
    assert cold.cached_tokens == 0
    device = assert_hit(lower, asked, cold, "device")
    push_out(lower)
    storage = assert_hit(lower, asked, device, "storage")
    assert_same(storage, fresh(1, asked, NEW_TOKENS))


def test_generated_tokens_are_reused_from_below_dram(lower, fresh):
    asked = prompt(1201, 200)
    whole = asked + list(stored(lower, asked, 72).output_ids)
    push_out(lower)
    again = lower.generate(whole, NEW_TOKENS)
    assert cached_from(again)["storage"] == whole_pages(len(whole)) > len(asked)
    assert_same(again, fresh(1, whole, NEW_TOKENS))


def test_a_prompt_cut_anywhere_is_restored_from_below_dram_to_the_page(lower, fresh):
    source = random.Random(1202)
    asked = prompt(1202, 900)
    stored(lower, asked)
    for at in [source.randrange(1, 900) for _ in range(4)]:
        push_out(lower)
        turned = asked[:at] + [(token + 1) % 512 for token in asked[at : at + 40]]
        answer = lower.generate(turned, NEW_TOKENS)
        reusable = at // PAGE * PAGE
        assert cached_from(answer) == {"device": 0, "host": 0, "storage": reusable}, at
        assert_same(answer, fresh(1, turned, NEW_TOKENS))


def test_lmcache_8_lengths_around_pages_and_chunks_are_restored_from_below_dram(lower, fresh):
    asked = [prompt(1300 + length, length) for length in LENGTHS]
    cold = [stored(lower, one) for one in asked]
    push_out(lower)
    for one, expected in zip(asked, cold, strict=True):
        assert_same(assert_hit(lower, one, expected, "storage"), fresh(1, one, NEW_TOKENS))
    assert_nothing_held(lower)
    assert_books_hold(lower)


def test_without_unfull_chunks_disk_holds_whole_ones_and_restores_exactly_those(
    server_factory, fresh, tmp_path: Path
):
    server = start(server_factory, with_disk(tmp_path, chunks=FEW_CHUNKS, sglang=RUN), *SMALLER_POOL)
    asked = prompt(1210, 2 * CHUNK + 90)
    cold = stored(server, asked)
    assert tier_status(server)["tiers"]["disk"]["pages"] == 2 * CHUNK // PAGE
    push_out(server)
    assert_same(assert_hit(server, asked, cold, "storage", 2 * CHUNK), fresh(1, asked, NEW_TOKENS))
    push_out(server)
    turned = [*asked[: CHUNK + 40], 7, 8, 9, *asked[CHUNK + 43 :]]
    answer = server.generate(turned, NEW_TOKENS)
    assert cached_from(answer) == {"device": 0, "host": 0, "storage": CHUNK + 32}
    assert_same(answer, fresh(1, turned, NEW_TOKENS))
    server.stop(grace_s=0.0)
