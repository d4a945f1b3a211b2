"""Two mends of SGLang's torch-native attention backend.

Stock, `extend` recomputes attention for the whole prefix, which hides most of what a cache hit saves, and
both `extend` and `decode` read the pool of a sliding-window layer at slots of the full pool, which answers
wrongly as soon as the two differ. Here only the new queries are computed, keys outside a window are never
read, and slots are translated after they were narrowed to the rows in use.

Shapes: query, output [tokens, heads, dim]; caches [slots, kv heads, dim]; req_to_token [requests, context].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

# Bounds the mask to BLOCK x (prefix + new) elements: 16 MiB in float32 for 8k tokens.
QUERY_BLOCK = 512


def extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """AROUND hook of `_run_sdpa_forward_extend`: causal attention of the new queries over all keys."""
    if encoder_lens is not None or not causal:
        return original(
            *(backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
            *(extend_prefix_lens, extend_seq_lens, encoder_lens, scaling, enable_gqa, causal),
            *(is_cross_attn, sliding_window_size),
        )
    start = 0
    rows = zip(req_pool_indices.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    for row, prefix, new in rows:
        first = _first_key(prefix, sliding_window_size)
        slots = req_to_token[row, first : prefix + new]
        key, value = _gather(backend, k_cache, v_cache, slots, sliding_window_size)
        _attend(
            query[start : start + new],
            output[start : start + new],
            key.to(query.dtype),
            value.to(query.dtype),
            prefix - first,
            window=sliding_window_size if _is_window(sliding_window_size) else None,
            scaling=scaling,
            enable_gqa=enable_gqa,
        )
        start += new
    return output


def decode(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """AROUND hook of `_run_sdpa_forward_decode`: stock, but a sliding window reads only its window."""
    if encoder_lens is not None or not _is_window(sliding_window_size):
        return original(
            *(backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
            *(encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size),
        )
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        first = _first_key(length - 1, sliding_window_size)
        slots = req_to_token[row, first:length]
        key, value = _gather(backend, k_cache, v_cache, slots, sliding_window_size)
        output[i : i + 1] = _sdpa(
            query[i : i + 1],
            key.to(query.dtype),
            value.to(query.dtype),
            scale=scaling,
            enable_gqa=enable_gqa,
        )
    return output


def _is_window(sliding_window_size: int | None) -> bool:
    return sliding_window_size is not None and sliding_window_size > -1


def _first_key(position: int, sliding_window_size: int | None) -> int:
    """The first key that a query at `position` sees: a window is itself and `size` keys before it."""
    if sliding_window_size is None or sliding_window_size < 0:
        return 0
    return max(0, position - sliding_window_size)


def _gather(
    backend: Any,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    sliding_window_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend.use_sliding_window_kv_pool and _is_window(sliding_window_size):
        slots = backend.token_to_kv_pool.translate_loc_from_full_to_swa(slots.to(torch.int64))
    return k_cache[slots], v_cache[slots]


def _attend(
    query: torch.Tensor,
    output: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offset: int,
    *,
    window: int | None,
    scaling: float | None,
    enable_gqa: bool,
) -> None:
    """Write causal attention of `query` into `output`; query i stands at `offset + i` among the keys."""
    new, total = query.shape[0], key.shape[0]
    if offset == 0 and (window is None or window >= total):
        output[:] = _sdpa(query, key, value, scale=scaling, enable_gqa=enable_gqa, is_causal=True)
        return
    for begin in range(0, new, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, new)
        low = _first_key(offset + begin, window)
        high = offset + end
        position = torch.arange(offset + begin, high, device=query.device)[:, None]
        keys = torch.arange(low, high, device=query.device)[None]
        mask = keys <= position
        if window is not None:
            mask &= keys >= position - window
        output[begin:end] = _sdpa(
            query[begin:end],
            key[low:high],
            value[low:high],
            scale=scaling,
            enable_gqa=enable_gqa,
            attn_mask=mask,
        )


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    q, k, v = (t.movedim(0, 1)[None] for t in (query, key, value))
    return scaled_dot_product_attention(q, k, v, **options)[0].movedim(0, 1)
