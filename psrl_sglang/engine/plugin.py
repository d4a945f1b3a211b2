"""The entry point SGLang calls in every one of its processes (``sglang.srt.plugins: psrl``)."""

from __future__ import annotations

import sys
import traceback


def register() -> None:
    """Register what this process needs: the option in a launcher, the hooks in a process of an enabled engine,
    nothing else in a stock engine. Applies the CPU platform's mends wherever that platform is selected."""
    from psrl_sglang import platforms

    if platforms.selected():
        platforms.install_cpu_mends()

    from psrl_sglang.engine import activation

    config = None
    try:
        config = activation.exported_settings()
        if config is not None:
            _join_engine(config)
    except Exception:  # noqa: BLE001 - SGLang logs what a plugin raises and serves on; an enabled one must not
        activation.refuse(f"the plugin failed to load:\n{traceback.format_exc()}")
    if config is None:
        from psrl_sglang.engine import launcher

        launcher.install()


def _join_engine(config: object) -> None:
    from psrl_sglang.engine import command_types

    command_types.register_wire_types()
    # run_scheduler_process lives in this module, so a scheduler has imported it; the detokenizer and the
    # data-parallel controller only pass commands on.
    if "sglang.srt.managers.scheduler" in sys.modules:
        from psrl_sglang.engine import worker

        worker.install(config)  # type: ignore[arg-type]
