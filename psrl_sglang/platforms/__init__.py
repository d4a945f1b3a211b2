"""The reference CPU platform: run SGLang, and everything in this package, without an accelerator.

`SGLANG_PLATFORM=psrl_cpu` selects it. Importing this package imports neither SGLang nor torch, so the entry
point is free for processes that run on another platform. What copies ask of a device, CUDA's included, is in
`device`, which needs torch alone.
"""

import os

NAME = "psrl_cpu"


def activate() -> str | None:
    """Answer SGLang's platform discovery: our class's path when it was asked for by name, else None."""
    return "psrl_sglang.platforms.cpu.PsrlCpuPlatform" if selected() else None


def selected() -> bool:
    """Whether this process was started with `SGLANG_PLATFORM=psrl_cpu`."""
    return os.environ.get("SGLANG_PLATFORM") == NAME


def install_cpu_mends() -> None:
    """Register the hooks that the CPU platform needs; call once per process, before SGLang applies hooks.

    Raises SystemExit when SGLang is not the one the hooks were written for: SGLang logs an Exception from a
    plugin and goes on, and a server that goes on unmended answers wrongly for sliding-window models.
    """
    from psrl_sglang.platforms import hooks

    hooks.install()
