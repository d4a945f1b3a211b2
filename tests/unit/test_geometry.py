"""Pages of SGLang's own pools go to the arena and back, byte for byte, whatever their kind; the rest is refused."""

import hashlib
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")
os.environ.setdefault("SGLANG_PLATFORM", "psrl_cpu")  # read when SGLang is imported

import numpy as np
import torch
from device_support import CudaLikeQueue, FakeRuntime
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from psrl_sglang.engine import copier, device_copiers
from psrl_sglang.engine.geometry import build_pool_group, kv_layout, pool_geometry
from psrl_sglang.keys import KEY_BYTES, page_keys, pool_salt
from psrl_sglang.platforms.device import HostQueue
from psrl_sglang.store.arena import Arena

PAGE = 16
PAGES = 24  # of the pool, without the one for padding
MOVED = 7
FULL = {ComponentType.FULL}
SWA = {ComponentType.FULL, ComponentType.SWA}
PARAMS = SimpleNamespace(sidecar_draft_device_pools=(), mtp_draft_device_pools=())


@pytest.fixture(autouse=True)
def _server_args(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_HND_KVCACHE", raising=False)
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE, device="cpu"))


def mha(pool=MHATokenToKVPool, *, dtype=torch.float32, page=PAGE, layers=3, head_dim=32, **options):
    size = {"size": PAGES * page, "page_size": page, "dtype": dtype, "head_num": 2, "head_dim": head_dim}
    return pool(**size, layer_num=layers, device="cpu", enable_memory_saver=False, **options)


def mla(pool=MLATokenToKVPool, *, dtype=torch.float32):
    size = {"size": PAGES * PAGE, "page_size": PAGE, "dtype": dtype, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    return pool(**size, layer_num=3, device="cpu", enable_memory_saver=False)


def swa(*, dtype=torch.float32, **options):
    layers = {"swa_attention_layer_ids": [0, 1, 3], "full_attention_layer_ids": [2, 4]}
    size = {"size": PAGES * PAGE, "size_swa": PAGES // 2 * PAGE, "page_size": PAGE, "dtype": dtype}
    return SWAKVPool(**size, **layers, head_num=2, head_dim=32, device="cpu", **options)


def hnd(make, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_HND_KVCACHE", "1")
        return make(**options)


POOLS = {
    "mha": (mha, FULL),
    "mha-bf16": (lambda: mha(dtype=torch.bfloat16), FULL),
    "mha-hnd": (lambda: hnd(mha), FULL),
    "mha-e4m3": (lambda: mha(dtype=torch.float8_e4m3fn), FULL),
    "mha-e5m2": (lambda: mha(dtype=torch.float8_e5m2), FULL),
    "mha-hnd-e4m3": (lambda: hnd(mha, dtype=torch.float8_e4m3fn), FULL),
    "mha-uint8": (lambda: mha(dtype=torch.uint8), FULL),
    "mha-k-wider-than-v": (lambda: mha(v_head_dim=16), FULL),
    "mha-hnd-k-wider-than-v": (lambda: hnd(mha, v_head_dim=16), FULL),
    "mha-page-1": (lambda: mha(page=1), FULL),
    "mla": (mla, FULL),
    "mla-e4m3": (lambda: mla(dtype=torch.float8_e4m3fn), FULL),
    "swa": (swa, SWA),
    "swa-hnd": (lambda: hnd(swa), SWA),
    "swa-e4m3": (lambda: swa(dtype=torch.float8_e4m3fn), SWA),
    "swa-other-heads": (lambda: swa(swa_head_num=1, swa_head_dim=16), SWA),
}


class Pool:
    """One pool as the linker sees it, next to the buffers themselves."""

    def __init__(self, name):
        make, components = POOLS[name]
        self.kvcache = make()
        self.page = self.kvcache.page_size
        self.group = build_pool_group(self.kvcache, PARAMS, self.page, components)
        self.parts = [pool_geometry(entry, self.group.num_layers) for entry in self.group.entries]

    def layout(self, *, rank=0, ranks=1, config="a"):
        model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"model": config}))
        pools = {geometry.name: geometry for geometry in self.parts}
        return kv_layout(self.group, pools, model_config=model, rank=rank, ranks=ranks)

    def slots(self, pages):
        return (torch.tensor(pages)[:, None] * self.page + torch.arange(self.page)).flatten()


def by_page(buffer, entry):
    """A buffer as SGLang's own word on its layout says it: a page a row, or a token a row."""
    span = 1 if getattr(entry.device_pool, "kv_cache_layout", "") == "hnd" else entry.page_size
    return buffer.view(torch.uint8).view(buffer.shape[0] // span, -1).numpy()


def make_copier(kind, arena, geometries):
    if kind == "direct":
        return copier.DirectCopier(arena, geometries)
    if kind == "staged":
        return device_copiers.StagedCopier(arena, HostQueue(torch.device("cpu")))
    return device_copiers.PinnedCopier(arena, geometries, CudaLikeQueue(FakeRuntime()))


KINDS = ["direct", "staged", "pinned"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POOLS)
def test_pages_come_back_byte_for_byte_and_layer_by_layer(name, kind, monkeypatch):
    # Several steps; less than a row, or a page, in the larger pools.
    monkeypatch.setattr(device_copiers, "_STAGING_BYTES", 5000)
    monkeypatch.setattr(device_copiers, "_DEVICE_BUFFER_BYTES", 5000)
    pool, random = Pool(name), np.random.default_rng(len(name))
    for geometry in pool.parts:
        entry = geometry.entry
        buffers = [by_page(buffer, entry) for buffer in entry.kv_buffer]
        for buffer in buffers:
            buffer[:] = random.integers(0, 256, buffer.shape, dtype=np.uint8)
        expected = [buffer.copy() for buffer in buffers]
        arena = Arena(MOVED + 2, geometry.page_bytes)
        slots = random.permutation(MOVED + 2)
        offsets = slots[:MOVED].astype(np.int64) * geometry.page_bytes
        chosen = 1 + random.permutation(len(buffers[0]) - 1)
        source, target = [*chosen[: MOVED - 2], *chosen[:2]], chosen[-MOVED:].tolist()
        copies = make_copier(kind, arena, [geometry])

        copies.to_arena(geometry, geometry.page_rows(pool.slots(source)), offsets)
        assert all((buffer == old).all() for buffer, old in zip(buffers, expected, strict=True))
        assert not arena.memory.reshape(MOVED + 2, -1)[slots[MOVED:]].any()

        for layer in range(pool.group.num_layers):
            mapped = entry.layer_mapping.get(layer, ())
            for number in (mapped,) if isinstance(mapped, int) else mapped:
                expected[number][target] = expected[number][source]
            copies.to_device(geometry, layer, geometry.page_rows(pool.slots(target)), offsets)
            assert all((buffer == new).all() for buffer, new in zip(buffers, expected, strict=True))
        everywhere = {number for mapped in entry.layer_mapping.values() for number in np.atleast_1d(mapped)}
        assert everywhere == set(range(len(buffers)))


@pytest.mark.parametrize("name", ["mha", "mha-hnd", "mla", "swa"])
@pytest.mark.parametrize(
    "slots",
    {
        "half a page": range(PAGE // 2),
        "not aligned": range(PAGE + 1, 2 * PAGE + 1),
        "not in order": [*range(PAGE, 2 * PAGE - 2), 2 * PAGE - 1, 2 * PAGE - 2],
        "of two pages": [*range(PAGE, PAGE + 8), *range(2 * PAGE + 8, 3 * PAGE)],
        "behind the pool": range((PAGES + 1) * PAGE, (PAGES + 2) * PAGE),
        "before the pool": range(-PAGE, 0),
    }.values(),
    ids=lambda slots: f"{slots[0]}..{slots[-1]}",
)
def test_slots_that_are_no_pages_of_the_pool_are_an_error(name, slots):
    for geometry in Pool(name).parts:
        with pytest.raises(ValueError, match="Pool"):
            geometry.page_rows(torch.tensor(list(slots)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_outside_is_an_error_before_a_byte_is_copied(kind):
    (geometry,) = Pool("mha").parts
    arena = Arena(2, geometry.page_bytes)
    copies = make_copier(kind, arena, [geometry])
    geometry.entry.kv_buffer[0].fill_(1.0)
    for row, offset in ((PAGES + 1, 0), (1, arena.memory.size), (1, -1), (1, arena.memory.size - 1)):
        with pytest.raises(IndexError):
            copies.to_arena(geometry, torch.tensor([row]), np.array([offset]))
        with pytest.raises(IndexError):
            copies.to_device(geometry, 0, torch.tensor([row]), np.array([offset]))
    assert not arena.memory.any()


def test_pages_of_another_form_share_no_key():
    layouts = [Pool(name).layout() for name in POOLS]
    mha_like, replicated = Pool("mha"), Pool("mla")
    layouts += [mha_like.layout(rank=rank, ranks=2) for rank in (0, 1)]
    layouts += [mha_like.layout(rank=0, ranks=4), mha_like.layout(config="b")]
    hashes = [hashlib.sha256(bytes([number])).hexdigest() for number in range(40)]
    keys = [page_keys(hashes, pool_salt(layout, "kv", "run")) for layout in layouts]
    every = [run[at : at + KEY_BYTES] for run in keys for at in range(0, len(run), KEY_BYTES)]
    assert len(set(every)) == len(layouts) * len(hashes)
    # One rank's pages are every rank's where the model keeps the same KV on all.
    assert replicated.layout(rank=0, ranks=2) == replicated.layout(rank=1, ranks=2)


def test_the_same_pool_in_another_process_has_the_same_keys():
    one, other = Pool("swa").layout(), Pool("swa").layout()
    assert one is not other
    assert one.digest == other.digest
    assert pool_salt(one, "kv", "run") != pool_salt(one, "swa", "run") != pool_salt(one, "swa", "other run")


class ForeignPool(MHATokenToKVPool):
    """A pool that SGLang may have one day."""


def scaled():
    pool = mha()
    pool.k_scale_buffer = [torch.zeros(1)]
    return pool


def of_unknown_layout():
    pool = mha()
    pool.kv_cache_layout = "page_major"
    return pool


REFUSED = {
    "fp4": (lambda: mha(MHATokenToKVPoolFP4, dtype=torch.uint8), FULL, "MHATokenToKVPoolFP4"),
    "mxfp8": (lambda: mha(MHATokenToKVPoolMXFP8, dtype=torch.float8_e4m3fn), FULL, "MHATokenToKVPoolMXFP8"),
    "mla-fp4": (lambda: mla(MLATokenToKVPoolFP4, dtype=torch.uint8), FULL, "MLATokenToKVPoolFP4"),
    "scales": (scaled, FULL, "kept with scales"),
    "layout": (of_unknown_layout, FULL, "page_major"),
    "subclass": (lambda: mha(ForeignPool), FULL, "ForeignPool"),
    "not a pool": (lambda: SimpleNamespace(), FULL, "SimpleNamespace"),
    "swa of foreign pools": (lambda: swa(token_to_kv_pool_class=ForeignPool), SWA, "made of ForeignPool"),
    "other components": (mha, {ComponentType.FULL, ComponentType.MAMBA}, "FULL, MAMBA"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pool_that_is_not_understood_is_refused_with_the_reason(name, capsys):
    make, components, reason = REFUSED[name]
    with pytest.raises(SystemExit) as ended:
        build_pool_group(make(), PARAMS, PAGE, components)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert reason in said
    assert "psrl.lmcache.enable: false" in said


@pytest.mark.parametrize("name", ["mha", "mla", "swa"])
def test_kv_of_a_draft_model_or_of_wider_pages_is_refused(name, capsys):
    make, components = POOLS[name]
    drafted = SimpleNamespace(**{**vars(PARAMS), "sidecar_draft_device_pools": (mha(),)})
    for params, page, reason in ((drafted, PAGE, "draft model"), (PARAMS, 2 * PAGE, "the tree's of 32")):
        with pytest.raises(SystemExit):
            build_pool_group(make(), params, page, components)
        assert reason in capsys.readouterr().err
