"""Which checks are run, for what was asked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from psrl_sglang.commands import is_loopback
from psrl_sglang.config import ConfigError, PsrlConfig, load_config
from psrl_sglang.doctor.cma import check_cma
from psrl_sglang.doctor.controller import ControllerPorts, check_controller
from psrl_sglang.doctor.memory import check_memory
from psrl_sglang.doctor.nixl import check_nixl
from psrl_sglang.doctor.pagehash import check_page_hash
from psrl_sglang.doctor.peers import check_peer, is_remote
from psrl_sglang.doctor.places import check_move_host, check_ports
from psrl_sglang.doctor.result import CheckResult, fail, ok, skip
from psrl_sglang.doctor.runner import Check
from psrl_sglang.doctor.secrets import check_secret
from psrl_sglang.transfer.auth import CONTROLLER_TOKEN_VARIABLE

_PROCESS_S = 45.0
_EVERY_BACKEND_S = 240.0
_CONTROLLER_S = 120.0


def read_settings(source: str | None) -> tuple[PsrlConfig, CheckResult]:
    """The settings to check against; the defaults where there are none, or none that are valid."""
    name = "settings"
    if source is None:
        return PsrlConfig(), skip(
            name, "none given (--config): defaults, with which nothing is offloaded or moved"
        )
    try:
        config = load_config(source)
        where = "inline JSON" if source.lstrip().startswith("{") else source
        return config, ok(name, f"{where} is valid")
    except ConfigError as error:
        return PsrlConfig(), fail(name, str(error), "`psrl-sglang config check` shows each line")


def plan(
    config: PsrlConfig, *, ranks: int, peers: Sequence[str], controller: str | None, is_deep: bool
) -> list[Check]:
    """``controller`` None: the one of the settings, if they name one. Raises `TransferError` for a bad peer."""
    lmcache = config.lmcache
    channel = lmcache.p2p_transfer_channel
    controller_is_remote = lmcache.controller_host is not None and not is_loopback(lmcache.controller_host)
    has_remote_peers = any(is_remote(peer) for peer in peers) or controller_is_remote
    checks = [
        Check("ports", partial(check_ports, config, ranks)),
        Check("move_host", partial(check_move_host, config, has_remote_peers=has_remote_peers)),
        Check("memory", partial(check_memory, config)),
        Check("page hash", partial(check_page_hash, config), _PROCESS_S),
        Check("secret", partial(check_secret, config)),
        Check("cma", partial(check_cma, channel), _PROCESS_S),
        Check(
            "nixl", partial(check_nixl, channel, is_deep=is_deep), _EVERY_BACKEND_S if is_deep else _PROCESS_S
        ),
    ]
    ports = ControllerPorts(None, None)
    if controller is None and lmcache.controller_host is not None:
        host = lmcache.controller_host
        controller = f"http://{f'[{host}]' if ':' in host else host}:{lmcache.controller_base_port}"
        ports = ControllerPorts(lmcache.controller_pull_port, lmcache.controller_reply_port)
    if controller is None:
        checks.append(Check("controller", _no_controller))
    else:
        token = os.environ.get(CONTROLLER_TOKEN_VARIABLE, "").strip()
        checks.append(Check("controller", partial(check_controller, controller, token, ports), _CONTROLLER_S))
    return checks + [Check(f"peer {peer}", partial(check_peer, peer)) for peer in peers]


def _no_controller() -> list[CheckResult]:
    return [skip("controller", "none is named (--controller, or controller_host in the settings)")]
