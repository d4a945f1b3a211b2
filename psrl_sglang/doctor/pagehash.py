"""What SGLang compiles its page hash with, when the first page is hashed: a compiler, ninja, OpenSSL's headers."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from psrl_sglang.config import PsrlConfig
from psrl_sglang.doctor.processes import run_command
from psrl_sglang.doctor.result import CheckResult, fail, ok, skip, warn

_NAME = "page hash"
_COMPILE_S = 30.0
_SOURCE = "#include <Python.h>\n#include <openssl/sha.h>\n#include <string>\n"


def check_page_hash(config: PsrlConfig) -> list[CheckResult]:
    if not config.lmcache.enable:
        return [skip(_NAME, "lmcache.enable is false: no page is hashed")]
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or ""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    missing = []
    if not compiler:
        missing.append("a C++ compiler")
    if shutil.which("ninja", path=path) is None:
        missing.append("ninja")
    if missing:
        text = f"{' and '.join(missing)} missing; an engine with tiers does not start"
        return [fail(_NAME, text, "apt-get install g++ ninja-build libssl-dev")]
    import sysconfig

    headers = f"-I{sysconfig.get_paths()['include']}"
    tried = run_command(
        [compiler, "-x", "c++", headers, "-fsyntax-only", "-"], limit_s=_COMPILE_S, text=_SOURCE
    )
    if tried.exit_code is None:
        return [warn(_NAME, f"{compiler} was not done in {_COMPILE_S:.0f} s")]
    if tried.exit_code != 0:
        wanted = "libssl-dev" if "openssl" in tried.error else "python3-dev"
        return [
            fail(
                _NAME,
                f"{compiler}: {(tried.error.splitlines() or [tried.how])[0]}",
                f"apt-get install {wanted}",
            )
        ]
    return [ok(_NAME, f"{compiler}, ninja, and the headers of Python and OpenSSL")]
