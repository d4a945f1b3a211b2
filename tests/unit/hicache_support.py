"""SGLang's own host pools, and storages over them, for the tests of HiCache with our store behind it."""

import hashlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402

from psrl_sglang.engine.hicache_pages import host_layout, host_pools  # noqa: E402
from psrl_sglang.engine.hicache_storage import PsrlHiCacheStorage  # noqa: E402
from psrl_sglang.store.arena import Arena  # noqa: E402
from psrl_sglang.store.disk import DiskTier  # noqa: E402
from psrl_sglang.store.stats import StoreStats  # noqa: E402
from psrl_sglang.store.store import KVStore, LowerTiers, slot_bytes_of  # noqa: E402

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8
SLOTS = 256
CHUNK_PAGES = 4
MODEL = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"model_type": "tiny"}))
DTYPE = torch.bfloat16


def device_pool(kind, layers=LAYERS):
    common = {"size": SLOTS, "page_size": PAGE, "dtype": DTYPE, "device": "cpu", "enable_memory_saver": False}
    if kind == "mla":
        return MLATokenToKVPool(kv_lora_rank=HEADS * DIM - 4, qk_rope_head_dim=4, layer_num=layers, **common)
    v_dim = {"v_head_dim": DIM // 2} if kind == "asymmetric" else {}
    return MHATokenToKVPool(head_num=HEADS, head_dim=DIM, layer_num=layers, **v_dim, **common)


def entry(kind="mha", layout="layer_first", name=PoolName.KV, layers=LAYERS):
    """One of a ``HostPoolGroup``: a device pool and HiCache's host pool for it, both of whole pages."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE, device="cpu"))
    with host_memory_budget_scope(1 << 30):
        return _entry(kind, layout, name, layers)


def _entry(kind, layout, name, layers):
    device = device_pool(kind, layers)
    options = {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": SLOTS,
        "start_layer": 0,
        "end_layer": layers,
    }
    if kind == "mla":
        host = MLATokenToKVPoolHost(device._mla_buffer_info(), target_layer_num=layers, **options)
    else:
        info = device._mha_buffer_info()
        host = get_mha_host_pool_cls(info)(info, **options)
    return SimpleNamespace(name=name, host_pool=host, device_pool=device)


def storage_config(**changes):
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "tiny",
        "extra_config": {"interface_v1": 1},
    }
    return HiCacheStorageConfig(**(fields | changes))


class Opened:
    """A storage over host pools of its own. Pages of the sequence ``s`` have the hashes ``hashes(s)``."""

    def __init__(self, *entries, slots=64, disk_path=None):
        self.entries = entries or (entry(),)
        self.pools = host_pools(self.entries)
        self.storage = PsrlHiCacheStorage(storage_config())
        layout = host_layout(self.pools, self.entries, self.storage.config, replicated=False, model=MODEL)
        stats = StoreStats()
        disk = None
        if disk_path is not None:
            disk = DiskTier(disk_path, layout, budget_bytes=1 << 24, policy="LRU", dead_rank=_live, stats=stats)
        arena = Arena(slots, slot_bytes_of(layout, CHUNK_PAGES * PAGE))
        self.store = KVStore(
            layout,
            arena,
            LowerTiers(disk=disk, save_unfull_chunk=True),
            policy="LRU",
            dead_rank=_live,
            stats=stats,
        )
        if self.store._indexing is not None:
            self.store._indexing.join()
        self.storage.open(self.store, self.pools, lambda tag: tag, wait_s=5.0)

    def fill(self, page, name=PoolName.KV):
        """Random bytes in a host page; returns them."""
        host = next(one.host_pool for one in self.entries if one.name == name)
        flat = torch.randn(host.get_dummy_flat_data_page().numel()).to(DTYPE)
        host.set_from_flat_data_page(page * PAGE, flat)
        return flat

    def read(self, page, name=PoolName.KV):
        host = next(one.host_pool for one in self.entries if one.name == name)
        return host.get_data_page(page * PAGE, flat=True).clone()

    def fill_many(self, pages, name=PoolName.KV):
        return [self.fill(page, name) for page in pages]

    def assert_reads(self, pages, expected, name=PoolName.KV):
        for page, flat in zip(pages, expected, strict=True):
            assert torch.equal(self.read(page, name), flat), page


def _live(tag):
    return None


def hashes(sequence, first, last):
    return [hashlib.sha256(f"{sequence} {page}".encode()).hexdigest() for page in range(first, last)]


def after(sequence, pages):
    return HiCacheStorageExtraInfo(prefix_keys=hashes(sequence, 0, pages))


def slots_of(pages):
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def window(name, sequence, first, last, pages):
    return PoolTransfer(
        name=name,
        host_indices=slots_of(pages),
        keys=hashes(sequence, first, last),
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )
