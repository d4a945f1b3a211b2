"""The CPU platform on real servers: a hit answers as a miss does, from the device and every HiCache tier."""

import random

import pytest

pytestmark = pytest.mark.engine

# One unit in the last place of a log-probability near -6 is 4.8e-7; KV of other weights differs by over 0.1.
NOISE = 2e-6
PROMPT_TOKENS = 600
NEW_TOKENS = 16


def prompt(seed, length=PROMPT_TOKENS):
    source = random.Random(seed)
    return [source.randrange(512) for _ in range(length)]


def assert_same(one, other):
    assert one.output_ids == other.output_ids
    assert max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)) < NOISE


def cached_from(generation, source):
    return generation.meta_info["cached_tokens_details"][source]


@pytest.fixture(scope="module")
def server(server_factory):
    return server_factory()


def test_hit_answers_as_a_miss(server):
    miss = server.generate(prompt(1), NEW_TOKENS)
    hit = server.generate(prompt(1), NEW_TOKENS)
    assert server.flush_cache()
    assert server.overwrite_pool() >= 8192
    again = server.generate(prompt(1), NEW_TOKENS)
    assert (miss.cached_tokens, hit.cached_tokens, again.cached_tokens) == (0, 592, 0)
    assert_same(hit, miss)
    assert_same(again, miss)


def test_hit_of_part_of_a_prompt_and_of_generated_tokens_answers_as_a_miss(server):
    turn = prompt(2)
    first = server.generate(turn, NEW_TOKENS)
    turn += [*first.output_ids, *prompt(3, 900)]
    hit = server.generate(turn, NEW_TOKENS)
    server.flush_cache()
    miss = server.generate(turn, NEW_TOKENS)
    assert (hit.cached_tokens, miss.cached_tokens) == (608, 0)
    assert_same(hit, miss)


def test_batch_of_hits_and_misses_answers_as_each_alone(server):
    server.flush_cache()
    prompts = [prompt(seed, length) for seed, length in ((10, 40), (11, 700), (12, 1), (13, 333))]
    alone = [server.generate(p, NEW_TOKENS) for p in prompts]
    server.flush_cache()
    server.generate(prompts[1], 1)
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    replies = server.post("/generate", body).raise_for_status().json()
    for one, reply in zip(alone, replies, strict=True):
        logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        assert tuple(reply["output_ids"]) == one.output_ids
        assert max(abs(a - b) for a, b in zip(one.logprobs, logprobs, strict=True)) < NOISE


def test_prompt_logprobs_do_not_depend_on_the_cache(server):
    server.flush_cache()
    whole = server.prompt_logprobs(prompt(4))
    tail = server.prompt_logprobs(prompt(4), start=400)
    assert len(whole) == PROMPT_TOKENS
    assert max(abs(a - b) for a, b in zip(whole[401:], tail[1:], strict=True)) < NOISE


def test_weights_of_another_seed_answer_otherwise(server, models):
    old = server.generate(prompt(5), NEW_TOKENS)
    assert server.update_weights(models[2], version="2").success
    new = server.generate(prompt(5), NEW_TOKENS)
    assert new.cached_tokens == 0
    assert abs(new.logprobs[0] - old.logprobs[0]) > 0.01
    assert server.update_weights(models[1], version="1").success
    assert_same(server.generate(prompt(5), NEW_TOKENS), old)


def test_refused_weights_are_an_answer(server, tmp_path):
    update = server.update_weights(tmp_path / "nowhere")
    assert not update.success
    assert update.message


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_hicache_serves_from_host_memory_what_the_device_lost(server_factory, layout):
    server = server_factory(
        args=(
            *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-io-backend", "direct"),
            *("--hicache-mem-layout", layout),
        )
    )
    miss = server.generate(prompt(1), NEW_TOKENS)
    # A node goes to the host when it is hit again, at the latest.
    server.generate(prompt(1), 1)
    server.overwrite_pool()
    hit = server.generate(prompt(1), NEW_TOKENS)
    assert cached_from(hit, "host") == 592
    assert_same(hit, miss)
    server.stop(grace_s=0.0)


def test_hicache_serves_from_files_after_a_restart(server_factory, tmp_path):
    options = {
        "args": (
            *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", "direct"),
            *("--hicache-mem-layout", "page_first_direct", "--hicache-storage-backend", "file"),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
        ),
        "env": {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)},
    }
    first = server_factory(**options)
    miss = first.generate(prompt(1), NEW_TOKENS)
    first.generate(prompt(1), 1)
    # Enough traffic that the prompt has left device and host, and its files are written.
    for _ in range(3):
        first.overwrite_pool()
    evicted = first.generate(prompt(1), NEW_TOKENS)
    assert cached_from(evicted, "storage") == 592
    assert_same(evicted, miss)
    first.stop(grace_s=0.0)

    second = server_factory(**options)
    hit = second.generate(prompt(1), NEW_TOKENS)
    assert cached_from(hit, "storage") == 592
    assert_same(hit, miss)
