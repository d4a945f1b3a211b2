"""What the tests of moves share: engines that may send KV to each other, and how one is asked to."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from typing import Any

from support import status, wait_until
from tier_support import tiers

from psrl_sglang.lab.servers import Server
from psrl_sglang.transfer.client import MoveClient, MoveResult

MOVE_S = 20.0


def movable(*, lmcache: dict[str, Any] | None = None, sglang: dict[str, Any] | None = None) -> dict[str, Any]:
    """Settings of an engine that moves KV, with DRAM for many prompts."""
    ours = {"move_policy": "always", **(sglang or {})}
    settings = tiers(sglang=ours, **{"enable_p2p": True, "p2p_transfer_channel": "auto", **(lmcache or {})})
    settings["psrl"]["rollout_coordination"] = {
        "routing_strategy": {"kv_transfer": {"transfer_timeout_ms": int(MOVE_S * 1000)}}
    }
    return settings


def moves(server: Server) -> dict[str, Any]:
    return status(server)["moves"]


def move(
    tokens: list[int],
    source: Server,
    destination: Server,
    version: str = "1",
    *,
    timeout_s: float = MOVE_S,
    **options: Any,
) -> MoveResult:
    """Between the first ranks, as a router without a controller would."""
    return MoveClient().transfer_direct(
        tokens,
        moves(source)["command_address"],
        moves(destination)["data_address"],
        version,
        timeout_s=timeout_s,
        **options,
    )


def assert_no_move_left(*servers: Server) -> None:
    for server in servers:
        wait_until(lambda server=server: not _moving(server), "all moves have ended")
        assert not moves(server)["pins"]["held"]


def _moving(server: Server) -> dict[str, int]:
    counts = moves(server)["moves"]
    names = ("running_out", "waiting_out", "running_in", "quarantined", "held_after_failure")
    return {name: counts[name] for name in names if counts[name]}


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free now."""
    for first in range(random.randrange(20000, 30000), 32000, count):
        try:
            with ExitStack() as held:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")


def rank_addresses(first_port: int, ranks: int) -> tuple[list[str], list[str]]:
    """Where the ranks of an engine with ``move_port`` take commands, and where they take KV."""
    ports = range(first_port, first_port + 2 * ranks, 2)
    return [f"127.0.0.1:{port}" for port in ports], [f"127.0.0.1:{port + 1}" for port in ports]
