"""How settings travel from the process that was given ``--psrl-config`` to the processes it starts.

The launcher keeps them on its ``ServerArgs`` record and exports them to the environment only while it starts
the engine's processes, so a second engine of the same launcher is not switched on by accident. A process that
finds them in its environment belongs to an enabled engine and must not serve without the plugin.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from uuid import uuid4

from psrl_sglang.config import PsrlConfig, load_config

_SETTINGS = "PSRL_SGLANG_SETTINGS"
_INSTANCE = "PSRL_SGLANG_INSTANCE"
_FINGERPRINT = "PSRL_SGLANG_FINGERPRINT"
_RECORD_ATTRIBUTE = "_psrl_settings"
EXIT_REFUSED = 2


def exported_settings() -> PsrlConfig | None:
    """The settings this engine process was started with; None in a launcher and in a stock engine."""
    text = os.environ.get(_SETTINGS)
    return None if text is None else load_config(text)


def exported_instance() -> str:
    """A short id of this engine, new at every start; every process of the engine sees the same one."""
    return os.environ[_INSTANCE]


def exported_fingerprint() -> str:
    """Of the checkpoint, as it was before any process of this engine read it."""
    return os.environ[_FINGERPRINT]


def settings_of(server_args: Any) -> PsrlConfig | None:
    """The settings attached to a ``ServerArgs`` record, if the plugin is switched on for it."""
    text = getattr(server_args, _RECORD_ATTRIBUTE, None)
    return None if text is None else load_config(text)


def attach_settings(server_args: Any, config: PsrlConfig) -> None:
    # An underscore name is bookkeeping to ServerArgs: it survives the write seal and pickling.
    setattr(server_args, _RECORD_ATTRIBUTE, config.to_json())


@contextmanager
def exporting(config: PsrlConfig, fingerprint: str) -> Iterator[None]:
    """Child processes started inside the block find ``config``, the checkpoint's fingerprint and one fresh instance
    id."""
    os.environ[_SETTINGS] = config.to_json()
    os.environ[_INSTANCE] = uuid4().hex[:12]
    os.environ[_FINGERPRINT] = fingerprint
    try:
        yield
    finally:
        os.environ.pop(_SETTINGS, None)
        os.environ.pop(_INSTANCE, None)
        os.environ.pop(_FINGERPRINT, None)


def refuse(message: str) -> NoReturn:
    """End this process before it serves. ``load_plugins`` logs and swallows every Exception, so only an exit
    keeps an enabled plugin from running half loaded."""
    sys.stderr.write(f"psrl_sglang: refusing to start: {message}\n")
    sys.stderr.flush()
    raise SystemExit(EXIT_REFUSED)
