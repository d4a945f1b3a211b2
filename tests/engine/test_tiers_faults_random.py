"""Thousands of loads with random delays, without a server: every byte that a forward reads is checked, on the real
tree and in every kind of pool."""

import hashlib
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import numpy as np
import torch
from offline_tiers import LAYERS, TieredEngine, delays, failing, tokens
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from psrl_sglang.engine.estimates import LoadOrRecompute
from psrl_sglang.engine.geometry import kv_layout
from psrl_sglang.engine.linker import Place, PsrlLinker
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.stats import StoreStats
from psrl_sglang.store.store import KVStore, LowerTiers, slot_bytes_of

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


@pytest.mark.parametrize(
    ("loads", "longest_s"), [(1000, 0.001), pytest.param(1000, 0.05, marks=pytest.mark.slow)], ids=str
)
def test_row_11_no_layer_is_read_before_it_landed_and_nothing_else_is_written(make, loads, longest_s):
    engine, source = make(slots=512), random.Random(3)
    prompts = [tokens(seed, source.randrange(20, 110)) for seed in range(10)]
    for prompt in prompts:
        engine.run(prompt, output=OUTPUT)
    delays(engine, longest_s)
    done = 0
    while done < loads:
        engine.evict(engine.allocator.size)  # all that no offload under way has locked
        engine.scramble()
        chosen = source.sample(prompts, source.choice([1, 1, 2]))
        cut = [prompt[: source.randrange(1, len(prompt) + 1)] for prompt in chosen]
        reqs = [engine.request([*prompt, *tokens(source.random(), source.randrange(1, 8))]) for prompt in cut]
        for req in engine.prefill(reqs):
            done += req.host_loaded_length > 0
            engine.generate(req, tokens(source.random(), source.randrange(1, 6)))
            engine.finish(req)
        engine.waiting.clear()
    assert engine.failed == []
    engine.check_quiet()


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(1, 3000), *[pytest.param(s, 10_000, marks=pytest.mark.slow) for s in (2, 3, 4)]],
    ids=str,
)
def test_rows_11_to_13_random_steps_under_slow_and_failing_loads(make, seed, steps):
    engine, source = make(slots=512, chunks=40), random.Random(seed)
    texts = [tokens(number, 90) for number in range(8)]
    delays(engine, 0.001, seed)
    slow_layer, slow_offload = engine.linker.before_layer, engine.linker.before_offload

    def arrive():
        if len(engine.waiting) < 4:
            engine.request([*source.choice(texts)[: source.randrange(1, 90)], source.randrange(800)])

    def admit():
        engine.linker.before_layer = failing(source.randrange(LAYERS)) if source.random() < 0.1 else slow_layer
        engine.prefill(source.sample(engine.waiting, min(len(engine.waiting), source.choice([1, 2]))))
        for req in engine.running:
            if req.kv.kv_committed_len == req.extend_end and not req.output_ids:
                engine.take_result(req, source.randrange(800))

    def decode():
        for req in engine.running:
            if engine._has_room(8) and req.output_ids and len(req.output_ids) < 30:
                engine.generate(req, [source.randrange(800)])

    def end():
        if engine.running:
            source.choice([engine.finish, engine.abort])(source.choice(engine.running))

    def give_up():
        if engine.waiting:
            engine.abort_waiting(source.choice(engine.waiting))

    def look_up():
        if engine.waiting:
            engine.match_while_waiting(source.choice(engine.waiting))

    def retract():
        engine.retract(source.sample(engine.running, min(len(engine.running), 1)))

    def evict():
        failed = source.random() < 0.2
        engine.linker.before_offload = failing() if failed else slow_offload
        engine.evict(engine.allocator.size)
        engine.scramble()

    def update():
        if source.random() < 0.1:
            engine.trainer.update(source.choice("12"))

    ends = [
        arrive,
        arrive,
        admit,
        admit,
        decode,
        decode,
        decode,
        end,
        give_up,
        look_up,
        retract,
        evict,
        evict,
        update,
    ]
    for step in range(steps):
        source.choice(ends)()
        if step % 50 == 0:
            engine.settle()
            engine.check_books()
    for req in list(engine.running):
        engine.finish(req)
    for req in list(engine.waiting):
        engine.abort_waiting(req)
    assert engine.linker.choice.loaded > steps / 50
    engine.check_quiet()


PAGE = 16
PAGES = 32
WINDOW = 3


def mha_pool():
    size = {"size": PAGES * PAGE, "page_size": PAGE, "dtype": torch.float32, "head_num": 2, "head_dim": 8}
    return MHATokenToKVPool(**size, layer_num=4, device="cpu", enable_memory_saver=False)


def mla_pool():
    size = {"size": PAGES * PAGE, "page_size": PAGE, "dtype": torch.float32, "kv_lora_rank": 8}
    return MLATokenToKVPool(**size, qk_rope_head_dim=4, layer_num=4, device="cpu", enable_memory_saver=False)


def swa_pool():
    size = {"size": PAGES * PAGE, "size_swa": PAGES * PAGE, "page_size": PAGE, "dtype": torch.float32}
    layers = {"swa_attention_layer_ids": [0, 2, 3], "full_attention_layer_ids": [1, 4]}
    return SWAKVPool(**size, **layers, head_num=2, head_dim=8, device="cpu")


class PoolLinker:
    """A linker over one pool and a store, driven by hand: the pages of a prompt are its number's and page's."""

    def __init__(self, pool, components):
        self.pool = pool
        allocator = SimpleNamespace(get_kvcache=lambda: pool)
        drafts = {"mtp_draft_device_pools": (), "sidecar_draft_device_pools": ()}
        params = SimpleNamespace(page_size=PAGE, token_to_kv_pool_allocator=allocator, **drafts)
        self.linker = PsrlLinker(None, params, components=components, extra_config={})
        model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=dict))
        layout = kv_layout(self.linker.group, self.linker.geometry, model_config=model, rank=0, ranks=1)
        arena = Arena(64, slot_bytes_of(layout, 4 * PAGE))
        store = KVStore(
            layout, arena, LowerTiers(), policy="LRU", dead_rank=lambda tag: None, stats=StoreStats()
        )
        self.linker.open(store, str, LoadOrRecompute("always", 1), is_async=True, pin_arena=True)
        self.linker.place = Place("1", 0, None, 1 << 30)
        pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        self.buffers = [buffer for entry in self.linker.group.entries for buffer in entry.kv_buffer]

    def transfers(self, prompt, pages, first_of_window):
        """``pages``: the device's, by pool. A window pool has the last ones of the prompt only."""
        keys = [hashlib.sha256(f"{prompt} {page}".encode()).hexdigest() for page in range(len(pages[0]))]
        made = []
        for name, rows in zip((PoolName.KV, PoolName.SWA), pages, strict=False):
            slots = (torch.tensor(rows)[:, None] * PAGE + torch.arange(PAGE)).flatten()
            if name == PoolName.SWA:
                policy = {"hit_policy": PoolHitPolicy.TRAILING_PAGES}
                made.append(
                    PoolTransfer(name=name, keys=keys[first_of_window:], device_indices=slots, **policy)
                )
            else:
                made.append(PoolTransfer(name=name, keys=keys, device_indices=slots))
        return made

    def rows(self, entry, pages):
        slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        return [buffer[slots].clone() for buffer in entry.kv_buffer]

    def scramble(self):
        for buffer in self.buffers:
            buffer.copy_(torch.rand_like(buffer))


@pytest.mark.parametrize("kind", ["mha", "mla", "swa"])
def test_row_11_every_kind_of_pool_hands_out_a_layer_when_it_is_there(kind):
    """Through the pools' own accessors, as attention reads them."""
    source = random.Random(kind)
    make = {"mha": mha_pool, "mla": mla_pool, "swa": swa_pool}[kind]
    components = {ComponentType.FULL} | ({ComponentType.SWA} if kind == "swa" else set())
    driven = PoolLinker(make(), components)
    linker, entries = driven.linker, driven.linker.group.entries
    stored = {}
    for prompt in range(5):
        driven.scramble()
        length = source.randrange(WINDOW, 10)
        pages = [source.sample(range(1, PAGES), length), source.sample(range(1, PAGES), WINDOW)][: len(entries)]
        assert linker.offload(driven.transfers(prompt, pages, length - WINDOW))
        assert linker.settle_offloads(10)
        assert linker.pop_completed_offload()
        stored[prompt] = length, [driven.rows(entry, own) for entry, own in zip(entries, pages, strict=True)]
    delays(SimpleNamespace(linker=linker), 0.002)
    for number in range(60):
        driven.scramble()
        prompt = source.choice(list(stored))
        length, wanted = stored[prompt]
        pages = [source.sample(range(1, PAGES), length), source.sample(range(1, PAGES), WINDOW)][: len(entries)]
        transfers = driven.transfers(prompt, pages, length - WINDOW)
        found = linker.lookup(f"r{number}", [replace(one, device_indices=None) for one in transfers])
        assert found[-1] == length
        assert linker.load(f"r{number}", transfers)
        linker.layer_done_counter.set_consumer(linker.start_layer_wise_loading())
        for layer in range(linker.group.num_layers):
            key, value = driven.pool.get_key_buffer(layer), driven.pool.get_value_buffer(layer)
            for entry, own, rows in zip(entries, pages, wanted, strict=True):
                for buffer in np.atleast_1d(entry.layer_mapping.get(layer, ())):
                    assert any(same_memory(entry.kv_buffer[int(buffer)], read) for read in (key, value))
                    assert torch.equal(driven.rows(entry, own)[int(buffer)], rows[int(buffer)])
        assert linker.finish_layer_wise_loading(linker.layer_done_counter.consumer_index)
    assert linker.store.dram.busy_chunks() == 0
    linker.close()


def same_memory(buffer, read):
    return buffer.untyped_storage().data_ptr() == read.untyped_storage().data_ptr()
