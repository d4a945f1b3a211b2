"""What makes HiCache's host and file tiers work on a CPU: no pinning, copies in torch, a small reserve.

On a CPU "device" and "host" are the same memory, so pinning has no meaning (and there is no CUDA runtime to
ask for it), and the three copy operations that SGLang takes from its CUDA kernels are indexed assignments.
Layouts: a device buffer is [slots, heads, dim] per layer; a page-first host buffer is
[pages, layers, page_size, heads, dim].
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch

HOST_RESERVE_BYTES = 1 << 30
_RESERVE = ("sglang.srt.mem_cache.pool_host.base", "HICACHE_HOST_MEMORY_RESERVE_BYTES")
_POOL_MODULES = (
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.mem_cache.pool_host.mla",
    "sglang.srt.mem_cache.memory_pool_host",
)


def without_pinning(*args: Any, **kwargs: Any) -> tuple[tuple, dict]:
    """BEFORE hook of `HostKVCache.__init__`: every host pool, buffer and staging page is ordinary memory."""
    return args, {**kwargs, "pin_memory": False}


def bind_copies() -> None:
    """Give SGLang's host pools the copies below and a reserve that leaves room on a small machine.

    Without CUDA the names are unbound there, so nothing can be hooked; raises AttributeError if one is bound.
    """
    for name in _POOL_MODULES:
        module = importlib.import_module(name)
        for copy in _COPIES:
            bound = getattr(module, copy.__name__, copy)
            if bound is not copy:
                raise AttributeError(f"{name}.{copy.__name__} is already bound to {bound!r}")
            setattr(module, copy.__name__, copy)
    module_name, reserve = _RESERVE
    base = importlib.import_module(module_name)
    if not hasattr(base, reserve):
        raise AttributeError(f"{module_name}.{reserve} is not there")
    setattr(base, reserve, HOST_RESERVE_BYTES)


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy slots between two layer-first buffers, in either direction."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of whole pages from page-first host buffers to device buffers."""
    pages = _pages(src_indices, page_size)
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[pages, layer_id].reshape(-1, *src.shape[3:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy all layers of whole pages from device buffers to page-first host buffers.

    `src_ptrs` lists the layers of the first host buffer (K), then those of the second (V).
    """
    pages = _pages(dst_indices, page_size)
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, dst in enumerate(dst_ptrs):
        for layer, src in enumerate(src_ptrs[i * layers : (i + 1) * layers]):
            dst[pages, layer] = src[src_indices].view(-1, page_size, *dst.shape[3:])


def _pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    return slots.view(-1, page_size)[:, 0] // page_size


_COPIES = (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf)
