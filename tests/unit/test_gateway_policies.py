"""Which worker is chosen: policies, stickiness and versions, without anything that sends."""

import json
from collections import Counter

import pytest
from gateway_support import Bench

from psrl_sglang.gateway.cost_model import CostModel
from psrl_sglang.gateway.holders import BoundedMap
from psrl_sglang.gateway.policies import ThroughputOptimal
from psrl_sglang.gateway.prefixes import BLOCK_BYTES, PrefixIndex, prompt_blocks
from psrl_sglang.gateway.versions import VersionOrder

COST = {
    "TP1_PP1": {
        "attn_latency_b": 0.001,
        "attn_latency_k": 1e-6,
        "other_latency_b": 0.0,
        "other_latency_k": 0.001,
        "other_threshold": 0.01,
    }
}


def test_random_reaches_everybody():
    bench = Bench(0, 9, 0, method="random")
    assert set(Counter(bench.pick() for _ in range(100))) == {0, 1, 2}


def test_round_robin_goes_round_and_skips_who_is_out():
    bench = Bench(5, 0, 0, method="round_robin")
    assert [bench.pick() for _ in range(5)] == [0, 1, 2, 0, 1]
    bench.fleet.fail(bench.workers[2], "down", is_gone=True)
    assert [bench.pick() for _ in range(3)] == [0, 1, 0]


def test_request_num_balance_takes_the_fewest_and_the_first_of_equals():
    assert Bench(3, 1, 1).pick() == 1
    assert Bench(0, 0).pick() == 0


def test_a_worker_that_failed_a_request_is_the_last_to_get_it_again():
    bench = Bench(0, 5, 9)
    call = bench.call()
    for failed, chosen in ((None, 0), (0, 1), (1, 2), (2, 0)):
        if failed is not None:
            call.tried.add(bench.workers[failed].url)
        worker = bench.selector.pick(call)
        assert worker is not None
        assert worker.index == chosen


def test_cache_aware_stays_with_the_prefix_until_load_is_uneven():
    bench = Bench(0, 0, 0, method="cache_aware_v1")
    prompts = [json.dumps({"input_ids": [seed * 1000 + at for at in range(600)]}).encode() for seed in range(3)]
    first = []
    for prompt in prompts:
        first.append(bench.pick(prompt))
        bench.workers[first[-1]].in_flight += 1
    assert first == [0, 1, 2]
    longer = [prompt[:-2] + b", 5, 6, 7]}" for prompt in prompts]
    assert [bench.pick(prompt) for prompt in longer] == first
    turned = {"sampling_params": {"n": 1}, "input_ids": json.loads(longer[2])["input_ids"]}
    assert bench.pick(json.dumps(turned).encode()) == 2, "wherever the prompt is in the body"
    bench.workers[2].in_flight = 28
    bench.workers[0].in_flight = bench.workers[1].in_flight = 15
    assert bench.pick(longer[2]) == 2, "28 is not uneven beside 15"
    bench.workers[0].in_flight = bench.workers[1].in_flight = 11
    assert bench.pick(longer[2]) in (0, 1)


def test_cache_aware_goes_by_the_session_first():
    bench = Bench(0, 0, method="cache_aware")
    assert bench.pick(x_psrl_session="a") == 0
    bench.workers[0].in_flight = 3
    assert bench.pick(x_psrl_session="b") == 1
    assert bench.pick(x_psrl_session="a") == 0


def test_what_is_off_the_device_counts_by_its_weight():
    for weight, expected in ((0.0, 0), (1.0, 1)):
        bench = Bench(0, 1, method="cache_aware_v1", cache_aware_policy={"lmcache_overlap_weight": weight})
        call = bench.call(json.dumps({"input_ids": list(range(300))}).encode())
        call.off_device = {"http://w1": 256}
        worker = bench.selector.pick(call)
        assert worker is not None
        assert worker.index == expected


def test_a_lost_worker_is_not_known_to_hold_anything():
    bench = Bench(0, 0, method="cache_aware_v1")
    prompt = json.dumps({"input_ids": list(range(600))}).encode()
    assert bench.pick(prompt) == 0
    bench.workers[0].in_flight = 1
    assert bench.pick(prompt) == 0
    bench.fleet.fail(bench.workers[0], "down", is_gone=True)
    bench.fleet.restore(bench.workers[0], "1")
    assert bench.pick(prompt) == 1


def test_prefix_blocks_are_found_wherever_the_prompt_is_and_bounded():
    prompt = json.dumps(list(range(3000)))
    one = prompt_blocks(f'{{"input_ids": {prompt}, "x": 1}}'.encode())
    other = prompt_blocks(f'{{"x": 12345, "input_ids": {prompt}}}'.encode())
    assert one[:-1] == other[: len(one) - 1]
    assert len(one) >= len(prompt) // BLOCK_BYTES - 1
    assert prompt_blocks(b"{}") == ()
    assert len(prompt_blocks(b'{"input_ids": [' + b"1," * 1_000_000)) == 256
    index = PrefixIndex(most_blocks=10)
    index.add(tuple(range(100)), (0, 0))
    assert len(index) == 10


def test_throughput_optimal_takes_the_largest_gain_and_stops_at_the_threshold(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(COST))
    bench = Bench(2, 0, 5, method="throughput_optimal", cost_model_path=str(path))
    model = CostModel.read(str(path)).of(1)
    assert model.throughput(0, 0) == 0
    assert model.step_s(20, 1000) == pytest.approx(0.001 + 0.001 + 0.02)
    assert bench.pick() == 1
    # Beyond 10 requests each costs as much time as it brings tokens: no gain.
    for worker in bench.workers:
        worker.in_flight = 200
    assert bench.pick() is None
    assert "throughput" in bench.selector.why_not(bench.call())
    bench.workers[2].in_flight = 0
    assert bench.pick() == 2
    budgeted = ThroughputOptimal(CostModel.read(str(path)), 0.5, 1024)
    assert budgeted.choose(bench.call(), bench.workers) is bench.workers[2]


def test_sessions_stick_where_they_are_asked_to():
    for header, settings in (({"x_is_sticky": "1"}, {}), ({}, {"enable_trajectory_sticky": True})):
        bench = Bench(0, 0, 0, method="round_robin", **settings)
        assert bench.pick(x_smg_routing_key="s", **header) == 0
        assert [bench.pick(x_smg_routing_key="s", **header) for _ in range(3)] == [0, 0, 0]
        bench.fleet.drain(bench.workers[0])
        assert bench.pick(x_smg_routing_key="s", **header) != 0, "its worker is going, so it is free"
    bench = Bench(0, 0, method="round_robin")
    assert [bench.pick(x_smg_routing_key="s") for _ in range(2)] == [0, 1]


def test_a_group_keeps_its_first_worker():
    bench = Bench(0, 0, 0, method="round_robin", enable_group_sticky=True)
    assert [bench.pick(x_prompt_id="7") for _ in range(3)] == [0, 0, 0]
    assert bench.pick(x_prompt_id="8") == 1
    assert bench.pick(x_prompt_id="7") == 0


def test_a_tied_request_waits_for_its_own_worker():
    bench = Bench(1, 0, max_concurrent_seqs_per_instance=1)
    bench.holders.served("s", bench.workers[0], 1)
    assert bench.pick(x_psrl_session="s", x_is_sticky="true") is None
    assert bench.pick(x_psrl_session="s") == 1


def test_what_is_remembered_is_bounded_and_the_oldest_goes():
    book: BoundedMap[int] = BoundedMap(3)
    for at in range(5):
        book.set(str(at), at)
        book.get("0")
    assert [name for name, _ in book.items()] == ["4", "0", "3"] or len(book) == 3
    assert book.get("1") is None


def test_versions_that_are_numbers_compare_as_such_and_others_as_they_were_seen():
    order = VersionOrder()
    for version in ("default", "step-a", "9", "step-b", "10"):
        order.see(version)
    assert order.is_at_least("10", "9")
    assert not order.is_at_least("9", "10")
    assert order.is_at_least("step-b", "step-a")
    assert not order.is_at_least("step-a", "step-b")
    assert not order.is_at_least("step-b", "never-seen")
    assert order.is_at_least("never-seen", "never-seen")
    assert order.ordered(["9", "10"], newest_first=True) == ["10", "9"]


def test_new_requests_prefer_the_newest_version_and_tagged_ones_the_oldest_that_will_do():
    bench = Bench(0, 5, 9, versions=("3", "4", "5"))
    assert bench.pick() == 2
    assert bench.pick(x_version_tag="-1") == 2
    assert bench.pick(x_version_tag="3") == 0
    assert bench.pick(x_version_tag="4") == 1
    assert bench.pick(x_version_tag="6") is None
    assert "version 6" in bench.selector.why_not(bench.call(x_version_tag="6"))
    assert Bench(0, 0, versions=(None, "3")).pick(x_version_tag="3") == 1
    assert Bench(0, versions=(None,)).pick(x_version_tag="3") is None
    assert Bench(9, 5, versions=("5", "4"), candidate_sort_indicator="reserve_capability").pick() == 1
