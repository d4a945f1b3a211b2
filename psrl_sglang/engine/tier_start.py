"""From settings to a store: SGLang's flags, the checks before anything starts, and the store of one rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psrl_sglang.config import PsrlConfig
from psrl_sglang.config_problem import LMCACHE
from psrl_sglang.engine.activation import refuse
from psrl_sglang.engine.resolved import Resolved
from psrl_sglang.keys import KVLayout
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.directory import ROOT, disk_bytes
from psrl_sglang.store.disk import DiskTier
from psrl_sglang.store.index import DeadRank
from psrl_sglang.store.limits import disk_room, memory_room, unwritable
from psrl_sglang.store.remote import RemoteTier
from psrl_sglang.store.remote_client import RemoteError, connect, masked
from psrl_sglang.store.stats import StoreStats
from psrl_sglang.store.store import KVStore, LowerTiers, slot_bytes_of

if TYPE_CHECKING:
    from psrl_sglang.namespace import VersionLedger

logger = logging.getLogger(__name__)

_GIB = 2**30
_LEAST_SLOTS = 2
_STOCK_LINKER_BACKEND = "mooncake"  # SGLang's default, so nobody may have asked for it


def select_route(server_args: Any) -> None:
    """Set SGLang's own flags for the tiers: the linker, or our storage behind HiCache where the user chose
    HiCache. Ends the process if the user chose another store as well."""
    others = {
        "enable_lmcache": "--enable-lmcache",
        "enable_unified_cache_external_linker": "--enable-unified-cache-external-linker",
        "unified_cache_external_linker_config": "--unified-cache-external-linker-config",
        "hicache_storage_backend": "--hicache-storage-backend",
    }
    taken = [flag for name, flag in others.items() if getattr(server_args, name, None)]
    backend = getattr(server_args, "unified_cache_external_linker_backend", None)
    if backend not in (None, _STOCK_LINKER_BACKEND, "dynamic"):
        taken.append(f"--unified-cache-external-linker-backend {backend}")
    if taken:
        refuse(
            f"{LMCACHE}.enable: true sets up its own store, and {', '.join(taken)} another one: drop the option, "
            f"or set {LMCACHE}.enable: false"
        )
    if server_args.enable_hierarchical_cache:
        server_args.hicache_storage_backend = "dynamic"
        server_args.hicache_storage_backend_extra_config = _with_our_storage(
            server_args.hicache_storage_backend_extra_config
        )
        return
    server_args.enable_unified_cache_external_linker = True
    server_args.unified_cache_external_linker_backend = "dynamic"
    server_args.unified_cache_external_linker_config = {
        "linker": "PsrlLinker",
        "linker_module_path": "psrl_sglang.engine.linker",
        "linker_extra_config": {},
    }


def _with_our_storage(extra_config: str | None) -> str:
    """What the user set for HiCache's storage (its thresholds and time-outs), with ours as the backend."""
    try:
        given = json.loads(extra_config or "{}")
    except ValueError:
        given = None
    if not isinstance(given, dict):
        refuse(
            f"--hicache-storage-backend-extra-config {extra_config}: with {LMCACHE}.enable: true it must be inline "
            "JSON, an object"
        )
    ours = {
        "backend_name": "psrl",
        "module_path": "psrl_sglang.engine.hicache_storage",
        "class_name": "PsrlHiCacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
    }
    return json.dumps({**given, **ours})


def check_before_start(config: PsrlConfig, server_args: Resolved) -> None:
    """End the process for everything about the tiers that can be seen to be wrong before a model is loaded."""
    wrong = [
        *_wrong_arguments(config, server_args),
        *_wrong_memory(config, server_args),
        *_wrong_disk(config),
        *_wrong_remote(config),
    ]
    if wrong:
        refuse("\n  ".join(["the tiers cannot be set up as asked:", *wrong]))


def _wrong_arguments(config: PsrlConfig, server_args: Resolved) -> list[str]:
    wrong = []
    page, chunk = server_args.page_size, config.lmcache.chunk_size
    if chunk % page:
        near = page * max(1, chunk // page)
        wrong.append(f"{LMCACHE}.chunk_size {chunk} is no multiple of --page-size {page}: choose {near}")
    if server_args.pp_size > 1 and not server_args.enable_hierarchical_cache:
        wrong.append(
            f"--pp-size {server_args.pp_size}: SGLang's linker does not agree between pipeline stages; add "
            f"--enable-hierarchical-cache, or set {LMCACHE}.enable: false"
        )
    if server_args.lora_paths:
        wrong.append(
            "--lora-paths: an adapter of the command line has one name for whatever is in its files, so that KV of "
            "an earlier content would be found; load adapters with /load_lora_adapter, or set "
            f"{LMCACHE}.enable: false"
        )
    if config.lmcache.enable_p2p and server_args.enable_hierarchical_cache:
        wrong.append(
            f"{LMCACHE}.enable_p2p: true with --enable-hierarchical-cache: KV in HiCache's host pool cannot "
            "be moved yet; drop the option, or set `enable_p2p: false`"
        )
    return wrong


def _local_ranks(server_args: Resolved) -> int:
    return max(1, server_args.tp_size // max(1, server_args.nnodes))


def _wrong_memory(config: PsrlConfig, server_args: Resolved) -> list[str]:
    room = memory_room()
    share = config.lmcache.offload_size_gb * _local_ranks(server_args) / server_args.tp_size
    kept = config.lmcache.reserve_local_cpu_size
    if (share + kept) * _GIB <= room.free_bytes:
        return []
    reserve = f" and {LMCACHE}.reserve_local_cpu_size {kept:g} GiB" if kept else ""
    return [f"{LMCACHE}.offload_size_gb asks for {share:g} GiB on this host{reserve}, but {room}: ask for less"]


def _wrong_disk(config: PsrlConfig) -> list[str]:
    if config.lmcache.disk_path is None:
        return []
    path = Path(config.lmcache.disk_path)
    reason = unwritable(path)
    if reason is not None:
        return [f"{LMCACHE}.disk_path {path} cannot be written: {reason}; choose a directory of this user"]
    room = disk_room(path)
    held = disk_bytes(path / ROOT)
    asked = config.lmcache.max_disk_size_gb
    if asked * _GIB <= room.free_bytes + held:
        return []
    return [
        f"{LMCACHE}.max_disk_size_gb asks for {asked:g} GiB, but {room}, and KV there holds {held / _GIB:.2f} GiB: "
        "ask for less"
    ]


def _wrong_remote(config: PsrlConfig) -> list[str]:
    url = config.lmcache.remote_url
    if url is None:
        return []
    try:
        client = connect(url, timeout_s=config.sglang.remote_timeout_s, ttl_s=config.sglang.remote_ttl_s)
        try:
            client.ping()
        finally:
            client.close()
    except (RemoteError, ValueError) as error:
        return [
            f"{LMCACHE}.remote_url {masked(url)} cannot be used: {error}; start the store, or correct the URL"
        ]
    return []


def require_page_hash() -> None:
    """SGLang hashes pages with an extension that it compiles at the first use: have that now, and not under the
    first request. Ends the process where it cannot be had, which would end it then."""
    from sglang.srt.mem_cache.utils import get_hash_str

    try:
        get_hash_str([0], page_size=1)
    except RuntimeError as error:
        refuse(
            f"{LMCACHE}.enable: true needs SGLang's page hash, which cannot be built here: "
            f"{error.__cause__ or error}. Install a C++ compiler, ninja and the headers of OpenSSL"
        )


def open_store(
    config: PsrlConfig,
    layout: KVLayout,
    *,
    ledger: VersionLedger,
    rank: int,
    ranks: int,
    wait_for_ranks: Callable[[], object],
) -> KVStore:
    """The store of one rank. Ends the process if it cannot be made."""
    stats = StoreStats()
    dead_rank = dead_rank_of(ledger)
    lmcache = config.lmcache
    slot_bytes = slot_bytes_of(layout, lmcache.chunk_size)
    slots = int(lmcache.offload_size_gb * _GIB / ranks) // slot_bytes
    if slots < _LEAST_SLOTS:
        refuse(
            f"{LMCACHE}.offload_size_gb is {lmcache.offload_size_gb:g} GiB for {ranks} rank(s), which holds "
            f"{slots} chunk(s) of {slot_bytes} bytes: give at least {_LEAST_SLOTS * slot_bytes * ranks / _GIB:.3f}"
        )
    try:
        arena = Arena(slots, slot_bytes)
        lower = LowerTiers(
            disk=_open_disk(config, layout, ranks, dead_rank, stats),
            remote=_open_remote(config, layout, stats),
            writes_remote=rank == 0 or layout.rank != "replicated",
            save_unfull_chunk=lmcache.save_unfull_chunk,
            landing_s=config.kv_transfer.transfer_timeout_ms / 1000 if lmcache.enable_p2p else 0.0,
        )
    except (OSError, MemoryError, ValueError) as error:
        refuse(f"the store of rank {rank} cannot be opened: {error}")
    wait_for_ranks()  # else one could take the directory that another has not locked yet for an idle one
    store = KVStore(layout, arena, lower, policy=lmcache.cache_policy, dead_rank=dead_rank, stats=stats)
    logger.info("psrl: %d chunks of %d bytes in DRAM; pages are %s", slots, slot_bytes, layout.text)
    if store.has_lower_tiers and not config.sglang.namespace:
        logger.warning(
            "psrl: psrl.sglang.namespace is not set, so KV of versions that are installed by an update is found "
            "again neither after a restart nor by other engines; set it to the name of the run"
        )
    return store


def dead_rank_of(ledger: VersionLedger) -> DeadRank:
    def dead_rank(tag: str) -> int | None:
        # 0 for tags of other runs and forgotten ones: they go first.
        return None if ledger.lag_of(tag) is not None else ledger.order_of(tag)

    return dead_rank


def _open_disk(
    config: PsrlConfig, layout: KVLayout, ranks: int, dead_rank: DeadRank, stats: StoreStats
) -> DiskTier | None:
    if config.lmcache.disk_path is None:
        return None
    budget_bytes = int(config.lmcache.max_disk_size_gb * _GIB / ranks)
    path = Path(config.lmcache.disk_path)
    tier = DiskTier(
        path,
        layout,
        budget_bytes=budget_bytes,
        policy=config.lmcache.cache_policy,
        dead_rank=dead_rank,
        stats=stats,
    )
    if layout.rank in ("replicated", f"tp0/{ranks}"):
        _log_other_layouts(path, layout)
    return tier


def _log_other_layouts(path: Path, layout: KVLayout) -> None:
    """What engines of another shape left is a miss here; who expected hits learns why."""
    mine = _fields(layout.text)
    for file in sorted((path / ROOT).glob("*/LAYOUT")):
        theirs = _fields(file.read_text())
        differ = {name: theirs.get(name) for name in mine if theirs.get(name) != mine[name]}
        if set(differ) == {"rank"} and theirs["rank"].partition("/")[2] == mine["rank"].partition("/")[2]:
            continue  # another rank of this engine
        if differ:
            there = " ".join(f"{name}={value}" for name, value in differ.items())
            here = " ".join(f"{name}={mine[name]}" for name in differ)
            logger.warning(
                "psrl: %s holds KV of another layout, which is not used: %s there, %s here",
                file.parent,
                there,
                here,
            )


def _fields(layout: str) -> dict[str, str]:
    return {name: value for name, _, value in (field.partition("=") for field in layout.split())}


def _open_remote(config: PsrlConfig, layout: KVLayout, stats: StoreStats) -> RemoteTier | None:
    if config.lmcache.remote_url is None:
        return None
    client = connect(
        config.lmcache.remote_url,
        timeout_s=config.sglang.remote_timeout_s,
        ttl_s=config.sglang.remote_ttl_s,
    )
    return RemoteTier(
        client, layout=layout, chunk_pages=config.lmcache.chunk_size // layout.page_tokens, stats=stats
    )
