"""Loads and offloads that fail, are late or lose their request, on the real tree without a server."""

import threading

import pytest

pytest.importorskip("sglang")

from offline_tiers import LAYERS, TieredEngine, delays, failing, tokens
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from support import wait_until

from psrl_sglang.engine import linker

OUTPUT = [900, 901, 902]


@pytest.fixture
def make():
    made = []

    def engine(**options):
        made.append(TieredEngine(**options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def test_a_prompt_comes_back_from_dram(make):
    engine = make()
    asked = tokens(1, 61)
    assert engine.run(asked, output=OUTPUT) == 0
    engine.drop_device()
    assert engine.run(asked) == 60
    assert engine.run(asked) == 60  # of the device now
    engine.drop_device()
    assert engine.run([*asked, *OUTPUT]) == 60
    engine.check_quiet()


def looked_up(engine, asked):
    req = engine.request(asked)
    engine.match_while_waiting(req)
    assert req.host_hit_length == 60
    assert engine.dram.busy_chunks() > 0
    return req


@pytest.fixture
def warm(make):
    """An engine whose DRAM has a prompt that the device has not."""
    engine = make()
    asked = tokens(1, 61)
    engine.run(asked, output=OUTPUT)
    engine.drop_device()
    return engine, asked


def test_row_12_abort_of_a_request_that_waits(warm):
    engine, asked = warm
    engine.abort_waiting(engine.request(asked))
    engine.check_quiet()


def test_row_12_abort_after_the_look_up(warm):
    engine, asked = warm
    engine.abort_waiting(looked_up(engine, asked))
    engine.check_quiet()


def test_row_12_a_look_up_that_found_something_counts_no_more_after_one_that_did_not(warm):
    engine, asked = warm
    req = looked_up(engine, asked)
    engine.run(asked)  # another request brings it to the device meanwhile
    engine.match_while_waiting(req)
    assert (req.prefix_len, req.host_hit_length) == (60, 0)
    assert engine.admit(req)
    assert req.prefix_len == 60
    engine.abort(req)
    engine.check_quiet()


def test_row_12_abort_of_a_queued_load(warm):
    engine, asked = warm
    req = looked_up(engine, asked)
    pages = engine.allocator.alloc(60)
    transfers = [PoolTransfer(name=PoolName.KV, keys=engine.hashes(asked)[:15], device_indices=pages)]
    assert engine.linker.load(req.rid, transfers)
    assert engine.linker.cancel_queued_load(req.rid)
    assert not engine.linker.cancel_queued_load(req.rid)
    assert engine.linker.start_layer_wise_loading() == -1
    engine.allocator.free(pages)
    engine.abort_waiting(req)
    engine.check_quiet()


def test_row_12_abort_while_loading(warm):
    engine, asked = warm
    delays(engine, 0.01)
    req = engine.request(asked)
    assert engine.queue_load(req)
    with engine.forward([req]):
        assert engine.dram.busy_chunks() > 0
        engine.tree.release_aborted_request(req.cache_request_handle)  # comes too late for the load
    assert engine.failed == []
    engine.abort(req)
    assert engine.run(asked) == 60
    engine.check_quiet()


def test_row_12_abort_while_decoding_keeps_what_was_computed(warm):
    engine, asked = warm
    req = engine.request(asked)
    assert engine.admit(req)
    engine.generate(req, tokens(2, 12))
    engine.abort(req)
    engine.settle()
    assert engine.in_dram([*asked, *tokens(2, 12)]) == 72
    engine.check_quiet()


def test_row_12_abort_while_offloading(make, monkeypatch):
    engine = make()
    asked, gate, copier = tokens(1, 61), threading.Event(), engine.linker._copiers[1]
    to_arena = copier.to_arena
    monkeypatch.setattr(copier, "to_arena", lambda *args: gate.wait(10) and to_arena(*args))
    engine.run(asked, output=OUTPUT)
    running, waiting = engine.request(asked), engine.request(asked)
    assert engine.admit(running)
    engine.abort(running)
    engine.match_while_waiting(waiting)
    engine.abort_waiting(waiting)
    engine.evict(engine.allocator.size)
    assert engine.resident(asked) == 60  # what is being read is locked
    assert engine.in_dram(asked) == 0  # and not to be seen before it is whole
    gate.set()
    engine.settle()
    assert engine.in_dram(asked) == 60
    engine.check_quiet()


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_a_failed_load_ends_its_requests_only_and_leaves_nothing_behind(warm, layer):
    engine, asked = warm
    computed = engine.request(tokens(5, 30))
    loading = [engine.request([*asked, token]) for token in (1, 2)]
    engine.linker.before_layer = failing(layer)
    admitted = engine.prefill([loading[0], computed, loading[1]])
    assert (admitted, engine.failed) == ([loading[0], computed, loading[1]], loading)
    assert all(req.finished_reason.status_code == 503 for req in loading)
    assert engine.resident(asked) == 0
    engine.generate(computed, OUTPUT)
    engine.finish(computed)
    engine.linker.before_layer = None
    assert engine.run(asked) == 60
    assert engine.linker.store.stats.total("errors", direction="load") == 1
    engine.check_quiet()


def test_a_failed_offload_is_offered_again(make):
    engine = make()
    asked = tokens(1, 61)
    engine.linker.before_offload = failing()
    engine.run(asked, output=OUTPUT)
    engine.settle()
    assert engine.in_dram(asked) == 0
    engine.linker.before_offload = None
    engine.run(asked)
    engine.settle()
    assert engine.in_dram(asked) == 60
    engine.check_quiet()


def test_offloads_beyond_the_queue_are_not_waited_for_and_offered_again(make, monkeypatch):
    monkeypatch.setattr(linker, "_MOST_WAITING_OFFLOADS", 1)
    engine = make()
    gate = threading.Event()
    engine.linker.before_offload = lambda: gate.wait(10)
    prompts = [tokens(seed, 41) for seed in range(4)]
    for prompt in prompts:
        engine.run(prompt)
    gate.set()
    engine.settle()
    assert [engine.in_dram(prompt) for prompt in prompts] == [40, 0, 0, 0]
    for prompt in prompts:
        engine.run(prompt)
        engine.settle()
    assert [engine.in_dram(prompt) for prompt in prompts] == [40, 40, 40, 40]
    engine.check_quiet()


def test_two_equal_prompts_in_a_batch_are_loaded_twice_and_kept_once(warm):
    engine, asked = warm
    both = [engine.request(asked), engine.request(asked)]
    assert engine.prefill(both) == both
    assert [req.host_loaded_length for req in both] == [60, 60]
    for req in both:
        engine.generate(req, OUTPUT)
        engine.finish(req)
    engine.check_quiet()


def test_pages_that_are_gone_between_look_up_and_load_are_recomputed(warm, monkeypatch):
    engine, asked = warm
    monkeypatch.setattr(linker, "_LOOKED_UP_S", 0.0)
    load = engine.linker.load

    def late(rid, transfers):
        engine.dram._expire_leases()
        assert engine.dram.drop_tag(engine.tag) > 0
        return load(rid, transfers)

    monkeypatch.setattr(engine.linker, "load", late)
    assert engine.run(asked) == 0
    engine.check_quiet()


def test_what_was_looked_up_and_what_is_being_loaded_is_not_evicted(warm):
    engine, asked = warm
    req = engine.request(asked)
    assert engine.queue_load(req)
    gate = threading.Event()
    engine.linker.before_layer = lambda layer: gate.wait(10)
    with engine.forward([req]):
        assert engine.dram.drop_tag(engine.tag) == 0
        gate.set()
    engine.abort(req)
    engine.check_quiet()


def test_retracted_requests_come_back_from_dram_with_what_they_decoded(make):
    engine = make()
    req = engine.request(tokens(1, 41))
    assert engine.admit(req)
    engine.generate(req, tokens(2, 12))
    engine.retract([req])
    engine.drop_device()
    assert engine.admit(req)
    assert req.host_loaded_length == 52
    engine.generate(req, OUTPUT)
    engine.finish(req)
    engine.check_quiet()


def test_running_decodes_are_in_dram_every_so_many_tokens(make):
    engine = make(sglang={"decode_checkpoint_tokens": 8})
    asked, seen = tokens(1, 40), []
    req = engine.request(asked)
    assert engine.admit(req)
    for token in tokens(2, 26):
        engine.generate(req, [token])
        engine.tree.tiers.checkpoint_decodes(engine.running)
        engine.settle()
        seen.append(engine.in_dram([*asked, *tokens(2, 26)]))
    assert sorted(set(seen)) == [40, 48, 56, 64]
    assert seen == sorted(seen)
    engine.finish(req)
    engine.check_quiet()


def test_row_18_a_rank_whose_offloads_are_done_saves_no_more_than_one_whose_are_not(make):
    """What the ranks agreed on decides, not how far this one's threads are."""
    engine = make(sglang={"decode_checkpoint_tokens": 8})
    req = engine.request(tokens(1, 40))
    assert engine.admit(req)
    engine.generate(req, tokens(2, 9))
    engine.tree.tiers.checkpoint_decodes(engine.running)
    assert req.kv.cache_protected_len == 48
    assert engine.linker.settle_offloads(10)
    assert engine.linker.waiting_offloads == 0
    engine.generate(req, tokens(3, 9))
    engine.tree.tiers.checkpoint_decodes(engine.running)
    assert req.kv.cache_protected_len == 48
    assert engine.tree.has_pending_cache_operations()
    engine.settle()
    assert not engine.tree.has_pending_cache_operations()
    engine.tree.tiers.checkpoint_decodes(engine.running)
    assert req.kv.cache_protected_len == 56
    engine.finish(req)
    engine.check_quiet()


def test_without_save_decode_cache_generated_tokens_stay_until_they_are_a_prompt(make):
    engine = make(lmcache={"save_decode_cache": False})
    asked, said = tokens(1, 39), tokens(2, 14)
    engine.run(asked, output=said)
    engine.settle()
    assert engine.in_dram([*asked, *said]) == 36
    assert engine.resident([*asked, *said]) == 52
    engine.run([*asked, *said, 7])
    engine.settle()
    assert engine.in_dram([*asked, *said]) == 52
    engine.check_quiet()


def test_row_12_abort_of_a_request_at_the_gate(make, tmp_path, monkeypatch):
    disk = {"backend": "disk", "disk_path": str(tmp_path), "max_disk_size_gb": 0.1, "save_unfull_chunk": True}
    engine = make(lmcache=disk)
    store = engine.linker.store
    wait_until(lambda: store.disk.is_loaded, "the disk is read")
    asked = tokens(1, 61)
    engine.run(asked, output=OUTPUT)
    engine.drop_device()
    assert store.settle(20.0)
    store.dram.clear()
    gate, read = threading.Event(), store.disk.read
    monkeypatch.setattr(store.disk, "read", lambda *args: gate.wait(10) and read(*args))
    held, other = engine.request(asked), engine.request(tokens(2, 30))
    for req in (held, other):
        engine.arrive(req)
    assert not engine.is_open(held)
    wait_until(lambda: engine.is_open(other), "the other one, of which nothing is on disk, is admitted")
    assert engine.admit(other)
    engine.abort(other)
    engine.abort_waiting(held)
    gate.set()
    wait_until(lambda: not store.status()["queues"]["fetch"], "the reads have ended")
    engine.check_quiet()
    again = engine.request(asked)
    engine.arrive(again)
    wait_until(lambda: engine.is_open(again), "it is read")
    assert engine.admit(again)
    assert again.prefix_len == 60
    engine.abort(again)
    engine.check_quiet()
