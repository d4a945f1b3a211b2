"""Which device pools hold a model's KV, and how a page of each lies in memory.

SGLang's own assembler covers the hybrid pools; plain MHA/GQA, MLA and sliding-window pools are built here from
the same parts. A pool whose bytes this release does not fully understand is refused: half a page would be
restored without anyone noticing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _swa_layer_mappings
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from psrl_sglang.engine.activation import refuse
from psrl_sglang.keys import KVLayout, PoolLayout

_PAGES_PER_ROW = ("hnd", "vectorized_5d")  # layouts in which a row of the buffer is a page
_TOKENS_PER_ROW = ("nhd",)


def build_pool_group(
    kvcache: Any, params: Any, page_tokens: int, components: set[ComponentType]
) -> DevicePoolGroup:
    """The physical pools behind the tree's components. Ends the process for a pool that is not supported."""
    try:
        group = _own_group(kvcache, page_tokens, components)
        if group is None:
            return resolve_hybrid_device_pool_group(
                kvcache=kvcache, page_size=page_tokens, params=params, components=components
            )
        if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
            raise ValueError("it comes with the KV of a draft model, which would not be restored with it")
        if kvcache.page_size != page_tokens:  # decode context parallelism: a rank has a part of each page
            raise ValueError(f"its pages are of {kvcache.page_size} tokens, the tree's of {page_tokens}")
        return group
    except (ValueError, NotImplementedError, AssertionError) as error:  # SGLang asserts that it knows the pool
        names = ", ".join(sorted(component.name for component in components))
        refuse(
            f"psrl.lmcache.enable: a {type(kvcache).__name__} pool with the components {names} cannot be offloaded "
            f"through the linker: {error}. Start with psrl.lmcache.enable: false, or with "
            "--enable-hierarchical-cache, whose host pools cover more models"
        )


def _own_group(kvcache: Any, page_tokens: int, components: set[ComponentType]) -> DevicePoolGroup | None:
    """For the plain pools, which SGLang's assembler leaves out; None for any other."""
    if components == {ComponentType.FULL} and type(kvcache) is MHATokenToKVPool:
        layers = kvcache.layer_num
        entry = _mha_entry(PoolName.KV, kvcache, {layer: layer for layer in range(layers)}, page_tokens)
        return DevicePoolGroup([entry], layers, page_tokens)
    if components == {ComponentType.FULL} and type(kvcache) is MLATokenToKVPool:
        return _mla_group(kvcache, page_tokens)
    if components == {ComponentType.FULL, ComponentType.SWA} and isinstance(kvcache, BaseSWAKVPool):
        return _swa_group(kvcache, page_tokens)
    return None


def _mha_entry(name: PoolName, pool: Any, layer_mapping: dict[int, int], page_tokens: int) -> DevicePoolEntry:
    if pool.k_scale_buffer is not None or pool.native_k_scale_buffer is not None:
        raise ValueError("its KV is kept with scales, which are not offloaded")
    if pool.kv_cache_layout not in (*_PAGES_PER_ROW, *_TOKENS_PER_ROW):
        raise ValueError(f"its layout {pool.kv_cache_layout} is not known")
    layers = len(pool.k_buffer)
    return DevicePoolEntry(
        name=name,
        indices_from_pool=name,
        device_pool=pool,
        components=[[*pool.k_buffer, *pool.v_buffer]],
        layer_mapping={layer: (index, layers + index) for layer, index in layer_mapping.items()},
        page_size=page_tokens,
        rows_are_pages=pool.kv_cache_layout in _PAGES_PER_ROW,
    )


def _mla_group(kvcache: Any, page_tokens: int) -> DevicePoolGroup:
    layers = kvcache.layer_num
    entry = DevicePoolEntry(
        name=PoolName.KV,
        indices_from_pool=PoolName.KV,
        device_pool=kvcache,
        components=[kvcache.kv_buffer],
        layer_mapping={layer: layer for layer in range(layers)},
        page_size=page_tokens,
        rows_are_pages=False,
    )
    return DevicePoolGroup([entry], layers, page_tokens, rank_replicated=True)


def _swa_group(kvcache: Any, page_tokens: int) -> DevicePoolGroup:
    pools = (kvcache.full_kv_pool, kvcache.swa_kv_pool)
    if any(type(pool) is not MHATokenToKVPool for pool in pools):
        raise ValueError(f"it is made of {', '.join(type(pool).__name__ for pool in pools)}")
    full, window = _swa_layer_mappings(kvcache)
    entries = [
        _mha_entry(PoolName.KV, pools[0], full, page_tokens),
        _mha_entry(PoolName.SWA, pools[1], window, page_tokens),
    ]
    layers = max(layer for entry in entries for layer in entry.layer_mapping) + 1
    return DevicePoolGroup(entries, layers, page_tokens)


@dataclass(frozen=True, slots=True)
class Part:
    """A page's bytes in one device buffer: ``buffer`` is uint8 with a page a row, ``row_bytes`` long; they take
    the bytes from ``offset_bytes`` on of the page's image in the arena."""

    buffer: torch.Tensor
    row_bytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """One pool: for each transfer layer the parts that must have landed before the layer may run."""

    name: str
    entry: DevicePoolEntry
    page_bytes: int
    layers: tuple[tuple[Part, ...], ...]

    def page_rows(self, device_indices: torch.Tensor) -> torch.Tensor:
        """The row of each page in buffers that are viewed with a page a row; raises ``ValueError`` for slots
        that are no aligned, contiguous pages of the pool. Waits for the device."""
        rows = torch.tensor(self.entry.prepare_locations(device_indices), dtype=torch.int64)
        return rows // self.entry._row_span


def pool_geometry(entry: DevicePoolEntry, num_layers: int) -> PoolGeometry:
    offset = 0
    layers: list[tuple[Part, ...]] = []
    for layer in range(num_layers):
        mapped = entry.layer_mapping.get(layer)
        indices = [] if mapped is None else [mapped] if isinstance(mapped, int) else list(mapped)
        parts = []
        for index in indices:
            for component in entry.components:
                part = Part(*_by_page(component[index], entry), offset)
                parts.append(part)
                offset += part.row_bytes
        layers.append(tuple(parts))
    return PoolGeometry(str(entry.name), entry, offset, tuple(layers))


def _by_page(buffer: torch.Tensor, entry: DevicePoolEntry) -> tuple[torch.Tensor, int]:
    """The buffer as bytes, a page a row. What is behind its last whole page is never used."""
    span = entry._row_span
    row_bytes = buffer[0].numel() * buffer.element_size()
    if not buffer[0].is_contiguous() or (span > 1 and buffer.stride(0) * buffer.element_size() != row_bytes):
        raise ValueError("the bytes of a page are not next to each other")
    pages = buffer.shape[0] // span
    view = torch.as_strided(
        buffer.view(torch.uint8),
        (pages, span * row_bytes),
        (span * buffer.stride(0) * buffer.element_size(), 1),
    )
    return view, span * row_bytes


def kv_layout(
    group: DevicePoolGroup, pools: dict[str, PoolGeometry], *, model_config: Any, rank: int, ranks: int
) -> KVLayout:
    """The identity of this rank's pages, but for the tag."""
    kvcache = group.entries[0].device_pool
    forms = sorted({getattr(entry.device_pool, "kv_cache_layout", "rows") for entry in group.entries})
    return KVLayout(
        model=architecture_digest(model_config),
        dtype=str(getattr(kvcache, "dtype", "")).removeprefix("torch."),
        page_tokens=group.page_size,
        layers=f"{getattr(kvcache, 'start_layer', 0)}+{group.num_layers}",
        rank="replicated" if group.rank_replicated else f"tp{rank}/{ranks}",
        pools=tuple(PoolLayout(pool.name, pool.page_bytes) for pool in pools.values()),
        form="page-first/" + "+".join(forms),
    )


def architecture_digest(model_config: Any) -> str:
    """A digest of the model's configuration, without where it lies and what wrote it."""
    config = model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        config.pop(name, None)
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
