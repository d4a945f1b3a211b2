"""Dialling the KV port of a move worker, as a source would, up to the first word that it says."""

from __future__ import annotations

import time

from psrl_sglang.commands import is_loopback
from psrl_sglang.doctor.result import CheckResult, fail, ok
from psrl_sglang.transfer.handshake import PROTOCOL, Challenge
from psrl_sglang.transfer.link import (
    Deadline,
    DeadlinePassed,
    Link,
    PeerLost,
    TransferError,
    parse_address,
)

DIAL_S = 5.0


def check_peer(address: str, limit_s: float = DIAL_S) -> list[CheckResult]:
    name, deadline = f"peer {address}", Deadline(limit_s)
    began_s = time.monotonic()
    try:
        link = Link.dial(address, deadline)
    except DeadlinePassed as error:
        return [fail(name, str(error), "a firewall drops it, or the host is down")]
    except TransferError as error:
        return [
            fail(name, str(error), "is the engine up, with enable_p2p, and its move_host an address of it?")
        ]
    connected_ms = (time.monotonic() - began_s) * 1000
    try:
        challenge = link.receive(Challenge, deadline)
    except DeadlinePassed:
        return [
            fail(
                name, "it took the connection and says nothing", "the KV port of a worker is its move_port + 1"
            )
        ]
    except PeerLost as error:
        return [fail(name, f"it ended the connection: {error}", "is this the KV port of a move worker?")]
    except TransferError as error:
        return [fail(name, f"no move worker: {error}", "the KV port of a worker is its move_port + 1")]
    finally:
        link.close()
    if challenge.protocol != PROTOCOL:
        text = f"it speaks version {challenge.protocol} of the move protocol, this host {PROTOCOL}"
        return [fail(name, text, "one release of psrl-sglang on all hosts")]
    return [ok(name, f"a move worker, {connected_ms:.1f} ms away")]


def is_remote(address: str) -> bool:
    """Whether it is on another host, as far as its name tells. Raises `TransferError` for what is no address."""
    return not is_loopback(parse_address(address)[0])
