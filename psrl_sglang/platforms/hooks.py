"""Registers the CPU mends with SGLang's hook registry, and refuses to run when they do not fit."""

import inspect
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from psrl_sglang.platforms import NAME, hicache, torch_native

EXPECTED_SGLANG = "0.5.23"


class Mend(NamedTuple):
    """One hook: the function of SGLang it changes, the parameters that function must have, and the change."""

    target: str
    parameters: tuple[str, ...]
    hook: Callable
    type: HookType


_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_SDPA_TAIL = ("encoder_lens", "scaling", "enable_gqa", "causal", "is_cross_attn", "sliding_window_size")
_SDPA_HEAD = ("self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens")

MENDS = (
    Mend(
        f"{_BACKEND}._run_sdpa_forward_extend",
        (*_SDPA_HEAD, "extend_prefix_lens", "extend_seq_lens", *_SDPA_TAIL),
        torch_native.extend,
        HookType.AROUND,
    ),
    Mend(
        f"{_BACKEND}._run_sdpa_forward_decode",
        (*_SDPA_HEAD, *_SDPA_TAIL),
        torch_native.decode,
        HookType.AROUND,
    ),
    Mend(
        "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__",
        (
            "self",
            *("dtype", "device_capacity_tokens", "size_per_token", "start_layer", "end_layer"),
            *("host_to_device_ratio", "host_size", "page_size", "layout", "pin_memory", "device"),
            *("allocator_type", "dcp_size", "dcp_rank", "pool_label", "is_dummy", "host_token_capacity"),
        ),
        hicache.without_pinning,
        HookType.BEFORE,
    ),
)


def install() -> None:
    """Register every mend; raises SystemExit, naming the function, when SGLang is not as expected."""
    for mend in MENDS:
        _require_signature(mend)
    for mend in MENDS:
        HookRegistry.register(mend.target, mend.hook, mend.type)
    try:
        hicache.bind_copies()
    except AttributeError as error:
        raise _refusal(str(error)) from error


def require_applied() -> None:
    """Raise SystemExit unless this process runs with every mend in place."""
    missing = [mend.target for mend in MENDS if not _is_applied(mend)]
    if missing:
        raise SystemExit(
            f"SGLANG_PLATFORM={NAME}: not applied: {', '.join(missing)}. The general plugin of psrl_sglang "
            "must be loaded with its platform: does SGLANG_PLUGINS leave it out, or the log say why not?"
        )


def _is_applied(mend: Mend) -> bool:
    # HookRegistry wraps with functools.wraps, so a hooked function is one with a __wrapped__.
    registered = any(hook is mend.hook for _, hook, _ in HookRegistry._hooks.get(mend.target, ()))
    return registered and hasattr(pkgutil.resolve_name(mend.target), "__wrapped__")


def _require_signature(mend: Mend) -> None:
    try:
        found = tuple(inspect.signature(pkgutil.resolve_name(mend.target)).parameters)
    except (ImportError, AttributeError) as error:
        raise _refusal(f"{mend.target} is not there ({error})") from error
    if found != mend.parameters:
        raise _refusal(f"{mend.target} takes {found}, expected {mend.parameters}")


def _refusal(reason: str) -> SystemExit:
    from importlib.metadata import version

    return SystemExit(
        f"SGLANG_PLATFORM={NAME} cannot run on SGLang {version('sglang')}: {reason}. "
        f"The CPU platform was written for SGLang {EXPECTED_SGLANG}."
    )
