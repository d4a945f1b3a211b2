"""Pools of SGLang's own to try a device with, filled with bytes that tell every page from every other."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from psrl_sglang.engine.geometry import PoolGeometry, build_pool_group, pool_geometry

_NO_DRAFTS = SimpleNamespace(sidecar_draft_device_pools=(), mtp_draft_device_pools=())


@dataclass(frozen=True, slots=True)
class PoolKind:
    """``form``: nhd, hnd or mla. ``heads`` of 128 for the first two; MLA's rows are of 576."""

    form: str
    dtype: torch.dtype
    page_tokens: int = 16
    heads: int = 2
    layers: int = 4

    @property
    def name(self) -> str:
        return f"{self.form} {str(self.dtype).removeprefix('torch.')} pages of {self.page_tokens}"


_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32)
KINDS: tuple[PoolKind, ...] = (
    *(PoolKind(form, dtype) for form in ("nhd", "hnd", "mla") for dtype in _DTYPES),
    PoolKind("nhd", torch.bfloat16, page_tokens=1),
    PoolKind("nhd", torch.bfloat16, page_tokens=64),
)


class TriedPool:
    """A pool of ``pages`` pages on a device. Owns its memory."""

    def __init__(self, kind: PoolKind, pages: int, device: torch.device) -> None:
        self.kind = kind
        self.pages = pages
        self.device = device
        size = {
            "size": pages * kind.page_tokens,
            "page_size": kind.page_tokens,
            "dtype": kind.dtype,
            "layer_num": kind.layers,
            "device": str(device),
            "enable_memory_saver": False,
        }
        with envs.SGLANG_USE_HND_KVCACHE.override(kind.form == "hnd"):
            if kind.form == "mla":
                self._kvcache: object = MLATokenToKVPool(**size, kv_lora_rank=512, qk_rope_head_dim=64)
            else:
                self._kvcache = MHATokenToKVPool(**size, head_num=kind.heads, head_dim=128)
        group = build_pool_group(self._kvcache, _NO_DRAFTS, kind.page_tokens, {ComponentType.FULL})
        self.geometry: PoolGeometry = pool_geometry(group.entries[0], group.num_layers)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All of its memory, uint8, a page a row: K and V, or MLA's, of each layer."""
        return [part.buffer for parts in self.geometry.layers for part in parts]

    def fill(self, seed: int) -> None:
        random = torch.Generator(device=self.device).manual_seed(seed)
        for buffer in self.buffers:
            buffer.copy_(
                torch.randint(0, 256, buffer.shape, dtype=torch.uint8, device=self.device, generator=random)
            )

    def rows(self, pages: torch.Tensor) -> torch.Tensor:
        """As the linker gets them: from slots of tokens on the device."""
        span = self.kind.page_tokens
        slots = (pages[:, None] * span + torch.arange(span)).flatten()
        return self.geometry.page_rows(slots.to(self.device))
