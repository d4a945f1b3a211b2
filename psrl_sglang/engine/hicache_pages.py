"""How a page of KV lies in HiCache's host pools, and the copies between them and the arena.

Where a host pool keeps the K and V of its layers apart, an image of a page is put together layer by layer. It is
the same from every host layout, and, for a model with one KV pool, the same as the linker's: such engines share
what they store. Any other pool is stored as SGLang's own flat page, under a form that names class and layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from psrl_sglang.engine.geometry import architecture_digest
from psrl_sglang.keys import KVLayout, PoolLayout
from psrl_sglang.store.copies import PageCopier

_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


@dataclass(frozen=True, slots=True)
class HostPool:
    """One of HiCache's host pools. ``parts`` as `PageCopier` takes them, none for a pool of flat pages."""

    name: str
    host: Any
    page_bytes: int
    form: str
    parts: tuple[tuple[np.ndarray, int], ...]

    @property
    def page_slots(self) -> int:
        return self.host.page_size

    def pages(self, host_indices: torch.Tensor | None, count: int) -> np.ndarray | None:
        """Which ``count`` pages these slots are; None if they are not that many whole, aligned pages."""
        if host_indices is None or host_indices.numel() != count * self.page_slots:
            return None
        slots = host_indices.to(torch.int64).cpu().numpy().reshape(count, self.page_slots)
        first = slots[:, 0]
        if (first % self.page_slots).any() or (slots != first[:, None] + np.arange(self.page_slots)).any():
            return None
        return first // self.page_slots


class HostCopier:
    """Moves pages of one host pool to and from the arena. For many threads, unless they copy to one place."""

    def __init__(self, memory: np.ndarray, pool: HostPool) -> None:
        self._memory = memory
        self._pool = pool
        self._copier = PageCopier(memory, pool.parts) if pool.parts else None

    def to_arena(self, pages: np.ndarray, offsets: np.ndarray) -> None:
        """``pages`` are pages of the pool, ``offsets`` where the image of each begins, in bytes."""
        if self._copier is not None:
            self._copier.store(pages, offsets)
            return
        for page, image in self._images(pages, offsets):
            flat = self._pool.host.get_data_page(page, flat=True)
            image[:] = flat.contiguous().view(torch.uint8).numpy()

    def to_host(self, pages: np.ndarray, offsets: np.ndarray) -> None:
        if self._copier is not None:
            self._copier.load(pages, offsets)
            return
        dtype = self._pool.host.get_dummy_flat_data_page().dtype
        for page, image in self._images(pages, offsets):
            self._pool.host.set_from_flat_data_page(page, torch.from_numpy(image).view(dtype))

    def _images(self, pages: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        size = self._pool.page_bytes
        for page, offset in zip(pages.tolist(), offsets.tolist(), strict=True):
            yield page * self._pool.page_slots, self._memory[offset : offset + size]


def host_pools(entries: Sequence[Any]) -> list[HostPool]:
    """Of a ``HostPoolGroup``, the KV pool first. Raises ``ValueError`` for a pool that has no pages to store."""
    pools = [_host_pool(entry) for entry in entries]
    return sorted(pools, key=lambda pool: pool.name != str(PoolName.KV))


def host_layout(
    pools: Sequence[HostPool],
    entries: Sequence[Any],
    config: HiCacheStorageConfig,
    *,
    replicated: bool,
    model: Any,
) -> KVLayout:
    """The identity of this rank's pages, but for the tag. ``replicated``: every rank has the same."""
    kv = next(entry for entry in entries if str(entry.name) == pools[0].name)
    rank = "replicated" if replicated else f"tp{config.tp_rank}/{config.tp_size}"
    if config.attn_cp_size > 1:
        rank += f" cp{config.attn_cp_rank}/{config.attn_cp_size}"
    forms = ",".join(f"{pool.name}:{pool.form}" for pool in pools)
    return KVLayout(
        model=architecture_digest(model),
        dtype=str(getattr(kv.device_pool, "dtype", "")).removeprefix("torch."),
        page_tokens=pools[0].page_slots,
        layers=f"{kv.host_pool.start_layer}+{kv.host_pool.layer_num}",
        rank=rank,
        pools=tuple(PoolLayout(pool.name, pool.page_bytes) for pool in pools),
        form=_linker_form(kv, pools) or f"hicache/{forms}",
    )


def _linker_form(kv: Any, pools: Sequence[HostPool]) -> str | None:
    """The form of `geometry.kv_layout`, where the images are the linker's byte for byte."""
    rows = getattr(kv.device_pool, "kv_cache_layout", "rows")
    plain = type(kv.device_pool) in (MHATokenToKVPool, MLATokenToKVPool) and rows in ("nhd", "rows")
    return f"page-first/{rows}" if plain and len(pools) == 1 and pools[0].parts else None


def _host_pool(entry: Any) -> HostPool:
    name, host = str(entry.name), entry.host_pool
    parts = tuple(_parts(host))
    if parts:
        rows = getattr(entry.device_pool, "kv_cache_layout", "rows")
        page_bytes = max(offset + buffer.shape[1] for buffer, offset in parts)
        return HostPool(name, host, page_bytes, f"layers/{rows}", parts)
    try:
        flat = host.get_dummy_flat_data_page()
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise ValueError(f"the host pool {name} ({type(host).__name__}) has no flat pages: {error}") from error
    if not flat.numel():
        raise ValueError(f"the host pool {name} ({type(host).__name__}) has no pages of its own")
    form = f"{type(host).__name__}/{host.layout}"
    if getattr(host, "storage_format_tag", None):
        form += f"/{host.storage_format_tag}"
    return HostPool(name, host, flat.numel() * flat.element_size(), form, ())


def _buffers(host: Any) -> list[torch.Tensor]:
    """K and V, or the one of MLA; none if this pool's bytes are not known well enough to be taken apart."""
    if host.layout not in _LAYOUTS or host.kv_buffer is None:
        return []
    if type(host) in (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost):
        has_scales = any(info.scales is not None for info in host._buffer_infos)
        return [] if has_scales else [host.k_buffer, host.v_buffer]
    if type(host) is MLATokenToKVPoolHost and host._native_buffers is None and host.dcp_size == 1:
        return [host.kv_buffer]
    return []


def _parts(host: Any) -> Iterator[tuple[np.ndarray, int]]:
    """Layer by layer, K before V."""
    flats = [buffer.view(torch.uint8).view(-1).numpy() for buffer in _buffers(host)]
    layers, page, pages = host.layer_num, host.page_size, host.page_num
    image = 0
    for layer in range(layers):
        for flat in flats:
            token_bytes = len(flat) // (layers * pages * page)
            row_bytes = page * token_bytes
            if host.layout == "layer_first":
                yield _rows(flat, layer * pages * row_bytes, pages, row_bytes, row_bytes), image
            elif host.layout == "page_first_direct":
                yield _rows(flat, layer * row_bytes, pages, layers * row_bytes, row_bytes), image
            else:
                for token in range(page):
                    rows = _rows(
                        flat, (token * layers + layer) * token_bytes, pages, layers * row_bytes, token_bytes
                    )
                    yield rows, image + token * token_bytes
            image += row_bytes


def _rows(flat: np.ndarray, begin: int, pages: int, stride: int, row_bytes: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(flat[begin:], (pages, row_bytes), (stride, 1))
