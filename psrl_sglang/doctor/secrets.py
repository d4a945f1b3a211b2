"""The fleet's secret: there, long enough, and nobody else's to read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from psrl_sglang.commands import is_loopback
from psrl_sglang.config import PsrlConfig
from psrl_sglang.doctor.result import CheckResult, fail, ok, skip, warn
from psrl_sglang.transfer.auth import SECRET_VARIABLE, read_secret

_NAME = "secret"
_MAKE = "head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE; on every host psrl.sglang.secret_file: FILE"


def check_secret(config: PsrlConfig) -> list[CheckResult]:
    path = config.sglang.secret_file
    try:
        secret = read_secret(path)
    except ValueError as error:
        return [fail(_NAME, f"{path or SECRET_VARIABLE}: {error}", _MAKE)]
    if not secret:
        if not config.lmcache.enable_p2p and config.lmcache.controller_host is None:
            return [skip(_NAME, "none, and nothing that would want one")]
        if is_loopback(config.sglang.move_host):
            return [warn(_NAME, "none: every process of this host can move KV in and out", _MAKE)]
        text = (
            f"none, and workers listen on {config.sglang.move_host}: whoever reaches it can move KV in and out"
        )
        return [fail(_NAME, text, _MAKE)]
    where = path or SECRET_VARIABLE
    if path is not None:
        mode = stat.S_IMODE(os.stat(Path(path)).st_mode)
        if mode & 0o077:
            return [warn(_NAME, f"{path} has mode {mode:04o}: others can read it", f"chmod 600 {path}")]
    return [ok(_NAME, f"{len(secret)} bytes from {where}")]
