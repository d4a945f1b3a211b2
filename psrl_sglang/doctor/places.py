"""Where this host listens: ports that are free or taken, and the address that others are told."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

import psutil

from psrl_sglang.commands import is_loopback
from psrl_sglang.config import PsrlConfig
from psrl_sglang.doctor.result import CheckResult, fail, ok, skip, warn


def is_of_this_machine(host: str) -> bool:
    """Whether a socket can be bound to it. Raises ``OSError`` for a name that is not known."""
    family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return False
            raise
    return True


def check_ports(config: PsrlConfig, ranks: int) -> list[CheckResult]:
    lmcache, ours = config.lmcache, config.sglang
    wanted = []
    if lmcache.controller_host is None or _is_ours(lmcache.controller_host):
        for name in ("controller_base_port", "controller_pull_port", "controller_reply_port"):
            wanted.append((name, "", getattr(lmcache, name)))
    if not lmcache.enable_p2p:
        return [_port(name, host, port) for name, host, port in wanted]
    if not ours.move_port:
        return [*(_port(*one) for one in wanted), ok("port move_port", "0: any free ones are taken")]
    for port in range(ours.move_port, ours.move_port + 2 * ranks):
        wanted.append((f"move_port +{port - ours.move_port}", ours.move_host, port))
    return [_port(name, host, port) for name, host, port in wanted]


def check_move_host(config: PsrlConfig, *, has_remote_peers: bool) -> list[CheckResult]:
    name, host = "move_host", config.sglang.move_host
    if not config.lmcache.enable_p2p:
        return [skip(name, "enable_p2p is false: this engine moves no KV")]
    try:
        mine = is_of_this_machine(host)
    except OSError as error:
        return [
            fail(name, f"{host}: {error.strerror or error}", "psrl.sglang.move_host: an address of this host")
        ]
    if not mine:
        return [fail(name, f"{host} is of no interface here", f"psrl.sglang.move_host: {_some_addresses()}")]
    if is_loopback(host):
        if has_remote_peers:
            text = f"{host} is loopback: engines of other hosts cannot dial it"
            return [fail(name, text, f"psrl.sglang.move_host: {_some_addresses()}, and a secret_file")]
        return [ok(name, f"{host}: engines of this host alone can reach it")]
    return [ok(name, f"{host} is of this host")]


def _port(name: str, host: str, port: int) -> CheckResult:
    name = f"port {name}"
    # Without a host both are tried: a listener on one address alone is in the way of a listener on all.
    for place in [host] if host else ["127.0.0.1", "0.0.0.0"]:
        family = socket.AF_INET6 if ":" in place else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((place, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    text = f"{port} is taken by {_who(port)}"
                    return warn(
                        name, text, "right if it is what shall listen there; else stop it or change the port"
                    )
                return fail(name, f"{place}:{port}: {error.strerror}")
    return ok(name, f"{port} is free")


def _who(port: int) -> str:
    try:
        for one in psutil.net_connections("tcp"):
            if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN and one.pid:
                command = psutil.Process(one.pid).cmdline()
                return f"process {one.pid} ({' '.join(command)[:80]})"
    except (psutil.Error, OSError):
        pass  # whose it is may only its owner see
    return "a process that this user cannot see"


def _is_ours(host: str) -> bool:
    try:
        return is_of_this_machine(host)
    except OSError:
        return False


def _some_addresses() -> str:
    found: Sequence[str] = [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not is_loopback(one.address)
    ]
    return " or ".join(found[:4]) or "this host has no address but loopback"
