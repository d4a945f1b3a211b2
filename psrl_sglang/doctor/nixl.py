"""NIXL: which wheel, and which of its backends can be made here, each tried in another process.

The list of plugins that NIXL gives is of files. What works is known by trying, and trying may crash or hang.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path

from psrl_sglang.doctor.processes import Ended, run_module
from psrl_sglang.doctor.result import CheckResult, fail, ok, skip, warn

PACKAGES = ("nixl-cu12", "nixl-cu13")
_OURS = "UCX"
_TRY_S = 25.0
_ALL_S = 60.0
_MOST_RESTARTS = 4


def installed() -> str:
    """Name and version of the wheel that an engine would take, or nothing."""
    for package in PACKAGES:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def check_nixl(channel: str, *, is_deep: bool = False) -> list[CheckResult]:
    """``is_deep``: the backends that engines do not use as well."""
    name, bad = "nixl", fail if channel == "nixl" else warn
    wheel = installed()
    if not wheel:
        if channel in ("cma", "tcp"):
            return [skip(name, "not installed, and not asked for")]
        text = "no nixl-cu12 or nixl-cu13: moves between hosts go by TCP"
        return [warn(name, text, "pip install --no-deps nixl-cu12, of one version on all hosts")]
    results = [check_environment(os.environ)]
    ended = run_module("psrl_sglang.doctor.nixl", "transport", limit_s=_TRY_S)
    said = ended.lines[-1] if ended.lines else ""
    if ended.exit_code == 0 and said == "made":
        results.append(ok(name, f"{wheel}: {_OURS} was made"))
    else:
        results.append(bad(name, f"{wheel}: {_OURS}: {said or _why(ended)}", _remedy(said + ended.error)))
    return results + (_backends(wheel) if is_deep else [])


def check_environment(environ: Mapping[str, str]) -> CheckResult:
    name, home = "nixl environment", environ.get("HOME", "")
    if (
        not environ.get("NIXL_CONFIG_FILE")
        and home
        and Path(home).exists()
        and not os.access(home, os.R_OK | os.X_OK)
    ):
        return fail(
            name, f"HOME is {home}, which user {os.geteuid()} cannot read", "set HOME or NIXL_CONFIG_FILE"
        )
    said = ", ".join(f"{key}={environ[key]}" for key in sorted(environ) if key.startswith(("UCX_", "NIXL_")))
    transports = {one.lstrip("\\") for one in environ.get("UCX_TLS", "all").split(",")}
    over_network = {"all", "tcp", "rc", "rc_x", "rc_v", "dc", "dc_x", "ud", "ud_x", "ud_v", "ib", "srd"}
    is_list_of_what_not = environ.get("UCX_TLS", "").startswith("^")
    if not is_list_of_what_not and not transports & over_network:
        text = f"UCX_TLS={environ['UCX_TLS']} has no transport that notices a dead peer: UCX will not start"
        return fail(name, text, "add tcp to UCX_TLS, or unset it")
    if transports == {"tcp"}:
        return warn(name, f"{said}: no RDMA, and no shared memory", "unset UCX_TLS unless this is meant")
    return ok(name, said or "no UCX_ or NIXL_ variable is set")


def _why(ended: Ended) -> str:
    return f"{ended.how}; {ended.error}" if ended.error else ended.how


def _remedy(said: str) -> str:
    if "Permission denied" in said or "filesystem error" in said:
        return "NIXL reads $HOME/.nixl.cfg: set HOME to a directory of this user, or NIXL_CONFIG_FILE"
    return "a network interface that is up (lo counts), and tcp or an RDMA transport in UCX_TLS"


def _backends(wheel: str) -> list[CheckResult]:
    """One line on each backend; after a crash the next process goes on behind the one that crashed."""
    made: dict[str, str] = {}
    for _ in range(_MOST_RESTARTS):
        ended = run_module("psrl_sglang.doctor.nixl", "backends", json.dumps(list(made)), limit_s=_ALL_S)
        trying = ""
        for line in ended.lines:
            kind, _, rest = line.partition(" ")
            if kind == "trying":
                trying = rest
            elif kind == "tried":
                backend, _, result = rest.partition(" ")
                made[backend], trying = result, ""
        if not trying:
            break
        made[trying] = _why(ended)
    usable = [backend for backend, result in made.items() if result == "made"]
    others = "; ".join(f"{backend}: {result}" for backend, result in made.items() if result != "made")
    return [ok("nixl backends", f"{wheel}: {', '.join(usable) or 'none'} can be made. {others}".strip())]


def _try_transport() -> None:
    from psrl_sglang.store.arena import Arena
    from psrl_sglang.transfer.nixl import NixlTransport
    from psrl_sglang.transfer.transport import TransportUnusable

    try:
        transport = NixlTransport(Arena(1, 1 << 20))
    except TransportUnusable as why:
        _say(" ".join(str(why).split()))
    else:
        _say("made")
        transport.close()


def _try_backends(done: list[str]) -> None:
    from importlib import import_module

    package = installed().partition(" ")[0].replace("-", "_")
    api = import_module(f"{package}._api")
    kinds = (getattr(api.nixlBind, name) for name in dir(api.nixlBind) if name.endswith("Error"))
    errors = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))
    agent = api.nixl_agent("doctor", api.nixl_agent_config(backends=[]))
    for backend in sorted(set(agent.get_plugin_list()) - set(done)):
        _say(f"trying {backend}")
        try:
            agent.create_backend(backend)
        except (*errors, RuntimeError) as error:
            _say(f"tried {backend} {type(error).__name__}")
        else:
            _say(f"tried {backend} made")


def _say(line: str) -> None:
    # Unbuffered: what was said before a crash counts.
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    import sys

    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    if sys.argv[1] == "transport":
        _try_transport()
    else:
        _try_backends(json.loads(sys.argv[2]))
    os._exit(0)  # libraries that end badly have been heard already
