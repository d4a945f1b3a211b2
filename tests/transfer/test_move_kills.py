"""Peers that die again and again leave no thread, descriptor or page behind at the one that lives."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from peer import PeerOptions
from peer_process import PeerProcess, eventually, is_settled, tokens_of

from psrl_sglang.transfer.client import MoveClient

PAGES = 12
TRANSPORTS = [("cma", ""), ("tcp", ""), ("nixl", ""), ("nixl", "tcp")]


def start(name: str, transport: tuple[str, str], **options: object) -> PeerProcess:
    if transport[0] == "nixl":
        pytest.importorskip("nixl_cu12")
    given = {"channel": transport[0], "slots": 8, "heartbeat_s": 0.1, "quarantine_s": 0.2, **options}
    return PeerProcess(PeerOptions(instance_id=name, **given), tls=transport[1])  # type: ignore[arg-type]


def kill_in_a_move(
    client: MoveClient, lost: PeerProcess, source: PeerProcess, destination: PeerProcess
) -> None:
    """After a whole move, so that a link and what a transport keeps for a peer are there."""
    tokens, more = tokens_of(PAGES, 1), tokens_of(PAGES, 2)
    source.ask("compute", tokens)
    source.ask("compute", more)
    assert client.transfer_direct(tokens, source.command, destination.data, "1").ok
    timer = threading.Timer(0.03, lost.kill)
    timer.start()
    client.transfer_direct(more, source.command, destination.data, "1", timeout_s=1.0)
    timer.join()


def check(kills: int, transport: tuple[str, str], kill_one: Callable[[MoveClient, PeerProcess], None]) -> None:
    with start("a", transport, pace_s=0.01) as living, MoveClient() as client:
        kill_one(client, living)
        kill_one(client, living)
        assert eventually(lambda: is_settled(living.state())), living.state()
        before = living.state()
        for _ in range(kills):
            kill_one(client, living)
        assert eventually(lambda: is_settled(living.state())), living.state()
        eventually(lambda: living.state()["descriptors"] <= before["descriptors"], seconds=2.0)
        after = living.state()
        assert after["wrong"] == []
        assert after["threads"] <= before["threads"] + 1
        assert after["descriptors"] <= before["descriptors"] + 2
        assert living.end() == 0


def destinations(transport: tuple[str, str]) -> Callable[[MoveClient, PeerProcess], None]:
    def one(client: MoveClient, living: PeerProcess) -> None:
        with start("b", transport, pace_s=0.01) as lost:
            kill_in_a_move(client, lost, living, lost)

    return one


def sources(transport: tuple[str, str]) -> Callable[[MoveClient, PeerProcess], None]:
    def one(client: MoveClient, living: PeerProcess) -> None:
        with start("b", transport, pace_s=0.01) as lost:
            kill_in_a_move(client, lost, lost, living)
        living.ask("forget_all")

    return one


@pytest.mark.parametrize(
    ("transport", "killed"), [(("tcp", ""), destinations), (("nixl", ""), destinations)], ids=["tcp", "nixl"]
)
def test_a_few_dead_peers_leave_nothing_behind(
    transport: tuple[str, str], killed: Callable[[tuple[str, str]], Callable[[MoveClient, PeerProcess], None]]
) -> None:
    check(5, transport, killed(transport))


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS, ids="-".join)
@pytest.mark.parametrize("killed", [destinations, sources])
def test_fifty_dead_peers_leave_nothing_behind(
    transport: tuple[str, str], killed: Callable[[tuple[str, str]], Callable[[MoveClient, PeerProcess], None]]
) -> None:
    check(50, transport, killed(transport))
