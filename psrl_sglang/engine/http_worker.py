"""The app of one HTTP worker when SGLang runs several (``--tokenizer-worker-num``).

Such a worker imports SGLang's app by name and never loads plugins, so it is given this module instead:
``SGLANG_HTTP_SERVER_APP_PATH=psrl_sglang.engine.http_worker:app``.
"""

from __future__ import annotations

import os
from typing import Any

from psrl_sglang.config import PsrlConfig, load_config

_SETTINGS = "PSRL_SGLANG_HTTP_SETTINGS"


def export(config: PsrlConfig) -> None:
    """Make the HTTP workers this process starts use this module."""
    os.environ[_SETTINGS] = config.to_json()
    os.environ["SGLANG_HTTP_SERVER_APP_PATH"] = f"{__name__}:app"


def _make_app() -> Any:
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from psrl_sglang.engine import command_types, pull, reporting, routes

    command_types.register_wire_types()
    routes.add_communicator()
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        reporting.around_update_meta_info,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request",
        pull.around_tokenize,
        HookType.AROUND,
    )
    HookRegistry.apply_hooks()
    routes.mount(app, load_config(os.environ[_SETTINGS]))
    return app


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = app = _make_app()
    return app
