"""A server whose tiers are slow, fail or lose their request: answers stay right, nothing leaks, nothing crashes."""

import random
import threading

import httpx
import pytest
from fault_plugin import Faults
from support import (
    NAMED,
    Running,
    assert_books_hold,
    assert_same,
    idle,
    post_ok,
    prompt,
    status,
    wait_until,
)
from tier_support import (
    NEW_TOKENS,
    assert_hit,
    assert_nothing_held,
    cached_from,
    settle,
    stored,
    tier_status,
    total,
    whole_pages,
    with_disk,
)

pytestmark = pytest.mark.engine
RUN = {"namespace": "run", "read_ahead_timeout_s": 30.0, "decode_checkpoint_tokens": 32}
POOL_TOKENS = 1024
CHUNK = 256  # of a prefill


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def faulty(server_factory, faults, tmp_path_factory):
    settings = with_disk(tmp_path_factory.mktemp("disk"), chunks=128, save_unfull_chunk=True, sglang=RUN)
    # A small pool: a few requests fill it, and it is overwritten quickly.
    args = (*(*NAMED, "--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", str(CHUNK)),)
    return server_factory(args=args, psrl_config=settings, env=faults.env)


@pytest.fixture
def server(faulty, faults):
    """The server, without faults before and after, and with nothing held at the end."""
    yield faulty
    faults.set()
    assert_nothing_held(faulty)
    assert_books_hold(faulty)


def in_dram_only(server, seed, length=601):
    """A prompt whose KV the device has lost, and its answer."""
    asked = prompt(seed, length)
    answer = stored(server, asked)
    server.overwrite_pool()
    return asked, answer


def abort(server, rid):
    server.post("/abort_request", {"rid": rid}).raise_for_status()


def test_a_failed_load_is_a_503_for_its_request_and_the_next_one_is_answered(server, faults):
    asked, answer = in_dram_only(server, 4000)
    for layer in (0, 3):
        faults.set(fail_layer=layer)
        other = Running(server, prompt(4001 + layer, 40), 30)
        reply = server.post("/generate", {"input_ids": asked, "sampling_params": {"max_new_tokens": 4}})
        assert reply.status_code == 503
        assert "External KV cache load failed" in reply.text
        assert len(other.result().output_ids) == 30
    faults.set()
    assert_hit(server, asked, answer, "host")


def test_a_failed_offload_is_offered_again(server, faults):
    asked = prompt(4010, 201)
    faults.set(fail_offload=True)
    answer = stored(server, asked)
    faults.set()
    assert_hit(server, asked, answer, "device")
    settle(server)
    server.overwrite_pool()
    assert_hit(server, asked, answer, "host")


def test_a_long_prompt_is_loaded_in_part_and_computed_in_chunks(server, faults, fresh):
    asked, _ = in_dram_only(server, 4020, 401)
    faults.set(layer_s=0.05)
    longer = asked + prompt(4021, 400)
    answer = server.generate(longer, NEW_TOKENS)
    assert cached_from(answer)["host"] == 400
    assert_same(answer, fresh(1, longer, NEW_TOKENS))


def test_two_equal_prompts_in_one_batch(server, faults):
    asked, answer = in_dram_only(server, 4030, 401)
    faults.set(layer_s=0.05)
    body = {"input_ids": [asked, asked], "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS}}
    body["sampling_params"]["ignore_eos"] = True
    for reply in post_ok(server, "/generate", body):
        assert tuple(reply["output_ids"]) == answer.output_ids
        assert reply["meta_info"]["cached_tokens"] == 400


def test_row_12_abort_of_a_request_that_waits(server):
    asked, answer = in_dram_only(server, 4040)
    blocker = Running(server, prompt(4041, 500), 400, rid="blocker")  # the pool has no room for both
    blocker.wait_tokens(5)
    request = Running(server, asked, NEW_TOKENS, rid="waits")
    wait_until(lambda: status(server)["requests"]["waiting"] == 1, "it waits")
    abort(server, "waits")
    request.result()
    assert tier_status(server)["tiers"]["dram"]["busy_chunks"] == 0
    abort(server, "blocker")
    blocker.result()
    server.overwrite_pool()
    assert_hit(server, asked, answer, "host")


def test_row_12_abort_of_a_request_at_the_gate(server, faults):
    asked, answer = in_dram_only(server, 4050)
    faults.set(forget_from=0, read_s=2.0)
    request = Running(server, asked, NEW_TOKENS, rid="gated")
    wait_until(lambda: tier_status(server)["queues"]["gate"] == 1, "it is held")
    assert len(server.generate(prompt(4051, 40), 4).output_ids) == 4  # another one passes
    abort(server, "gated")
    request.result()
    assert tier_status(server)["queues"]["gate"] == 0
    faults.set()
    settle(server)
    again = server.generate(asked, NEW_TOKENS)
    assert again.cached_tokens == whole_pages(len(asked))
    assert_same(again, answer)


def test_row_12_abort_while_loading(server, faults):
    asked, answer = in_dram_only(server, 4060)
    faults.set(layer_s=0.3)
    before = faults.seen("layers")
    request = Running(server, asked, 200, rid="loads")
    wait_until(lambda: faults.seen("layers") > before, "the load has begun")
    abort(server, "loads")
    assert len(request.result().output_ids) < 200
    faults.set()
    server.overwrite_pool()
    assert_hit(server, asked, answer, "host")


def test_row_12_abort_while_offloading_and_decoding(server, faults):
    asked = prompt(4070, 301)
    faults.set(offload_s=0.3)
    request = Running(server, asked, 100, rid="offloads")
    request.wait_tokens(40)
    abort(server, "offloads")
    said = list(request.result().output_ids)
    assert 40 <= len(said) < 100
    faults.set()
    settle(server)
    whole = asked + said
    device = server.generate(whole, NEW_TOKENS)
    settle(server)
    server.overwrite_pool()
    # Everything that was computed, but for the last token, which no forward has seen.
    assert_hit(server, whole, device, "host", whole_pages(len(whole)))


def test_running_decodes_are_in_dram_before_they_end(server):
    pages = tier_status(server)["tiers"]["dram"]["pages"]
    request = Running(server, prompt(4080, 33), 100)
    request.wait_tokens(70)
    server.pause("in_place")
    settle(server)
    assert tier_status(server)["tiers"]["dram"]["pages"] - pages >= (33 + 64) // 16
    assert not idle(server)
    server.resume()
    assert len(request.result().output_ids) == 100


def test_a_paused_and_retracted_request_goes_on_from_dram(server, faults):
    asked = prompt(4090, 301)
    whole = server.generate(asked, 60)
    server.overwrite_pool()
    faults.set(offload_s=0.02)
    # With log-probabilities SGLang computes everything behind the prompt anew.
    request = Running(server, asked, 60, return_logprob=False)
    request.wait_tokens(40)
    server.pause("retract")
    loaded = total(server, "hit_tokens", tier="dram")
    assert server.flush_cache()
    assert status(server)["device"]["evictable_tokens"] == 0
    server.resume()
    assert request.result().output_ids == whole.output_ids
    assert total(server, "hit_tokens", tier="dram") - loaded >= 301 + 40 - 16


def test_rows_11_to_13_stress_of_64_requests_with_random_aborts(server, faults, fresh):
    source = random.Random(4200)
    prefixes = [prompt(4200 + number, 120) for number in range(4)]
    asked = [
        [*source.choice(prefixes), *prompt(4210 + number, source.randrange(1, 40))] for number in range(16)
    ]
    expected = [fresh(1, each, NEW_TOKENS) for each in asked]
    for prefix in prefixes:
        stored(server, prefix, 1)
    server.overwrite_pool()
    faults.set(layer_s=0.02, offload_s=0.02, read_s=0.02)
    answered = [0]
    lock = threading.Lock()

    def ask(number):
        rid = f"stress-{number}"
        which = number % len(asked)
        is_aborted = number % 4 == 3
        request = Running(server, asked[which], NEW_TOKENS, rid=rid)
        if is_aborted:
            abort(server, rid)
        answer = request.result()
        if len(answer.output_ids) == NEW_TOKENS:
            assert_same(answer, expected[which])
            with lock:
                answered[0] += 1

    errors = run_all([lambda number=number: ask(number) for number in range(64)])
    assert errors == []
    assert answered[0] >= 48


def run_all(calls):
    """Run calls in threads; returns what they raised."""
    errors = []

    def run(call):
        try:
            call()
        except (AssertionError, httpx.HTTPError) as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
