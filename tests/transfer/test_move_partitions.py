"""A network that is cut without a word, between two hosts made of network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import pytest
from peer import PeerOptions
from peer_process import SLACK_S, PeerProcess, eventually, is_settled, tokens_of

from psrl_sglang.transfer.client import MoveClient

PAGES = 40
PACE_S = 0.04
TIMEOUT_S = 1.0
TRANSPORTS = [("tcp", ""), ("nixl", ""), ("cma", "")]
IN_CI = [("tcp", "while"), ("nixl", "while")]
CASES = [
    pytest.param(transport, moment, marks=() if (transport[0], moment) in IN_CI else pytest.mark.slow)
    for transport in TRANSPORTS
    for moment in ("before", "while", "after")
]
networks = count()


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@dataclass(frozen=True)
class Network:
    """This host at ``here``, another at ``there``, which processes started ``inside`` live on."""

    name: str
    device: str
    here: str
    there: str

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        run("ip", "link", "set", self.device, "down")

    def mend(self) -> None:
        run("ip", "link", "set", self.device, "up")


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2")
    number = (os.getpid() + 16 * next(networks)) % 250
    name, device = f"psrl-{os.getpid()}-{number}", f"psrl{number}"
    network = Network(name, device, f"10.213.{number}.1", f"10.213.{number}.2")
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")
    try:
        run("ip", "link", "add", device, "type", "veth", "peer", "name", "there", "netns", name)
        run("ip", "addr", "add", f"{network.here}/30", "dev", device)
        run("ip", "link", "set", device, "up")
        run(*network.inside, "ip", "addr", "add", f"{network.there}/30", "dev", "there")
        run(*network.inside, "ip", "link", "set", "there", "up")
        run(*network.inside, "ip", "link", "set", "lo", "up")
        yield network
    finally:
        run("ip", "netns", "del", name)


@pytest.mark.parametrize(
    ("transport", "moment"), CASES, ids=lambda one: one if isinstance(one, str) else one[0]
)
def test_a_cut_network_costs_one_move_and_heals(
    network: Network, transport: tuple[str, str], moment: str
) -> None:
    channel, tls = transport
    if channel == "nixl":
        pytest.importorskip("nixl_cu12")
    slow = {"before": {}, "while": {"pace_s": PACE_S}, "after": {"commit_pause_s": 0.4}}[moment]
    common = {"channel": channel, "slots": 64, "heartbeat_s": 0.1, "quarantine_s": 0.4, **slow}
    tokens, before = tokens_of(PAGES, 1), tokens_of(4, 2)
    with (
        PeerProcess(PeerOptions(instance_id="a", host=network.here, **common), tls=tls) as a,  # type: ignore[arg-type]
        PeerProcess(
            PeerOptions(instance_id="b", host=network.there, **common),  # type: ignore[arg-type]
            tls=tls,
            inside=network.inside,
        ) as b,
        PeerProcess(PeerOptions(instance_id="c", host=network.here, **common), tls=tls) as c,  # type: ignore[arg-type]
        MoveClient() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        for given in (tokens, before):
            a.ask("compute", given)
        assert client.transfer_direct(before, a.command, b.data, "1").ok
        if moment == "before":
            network.cut()
        began_s = time.monotonic()
        moving = pool.submit(client.transfer_direct, tokens, a.command, b.data, "1", timeout_s=TIMEOUT_S)
        if moment != "before":
            assert eventually(lambda: b.state()["moves"]["running_in"])
            time.sleep(3 * PACE_S)
            network.cut()
        result = moving.result()
        assert time.monotonic() - began_s < TIMEOUT_S + SLACK_S
        assert not result.ok
        assert result.reason

        if moment == "while":
            for peer in (a, b, c):
                peer.ask("set_pace", 0.0)
        assert client.transfer_direct(tokens, a.command, c.data, "1").ok
        assert c.ask("verified", tokens) == PAGES
        network.mend()
        assert eventually(
            lambda: client.transfer_direct(tokens, a.command, b.data, "1", timeout_s=4.0).ok, seconds=20.0
        )
        assert b.ask("verified", tokens) == PAGES
        for peer in (a, b, c):
            assert eventually(lambda peer=peer: is_settled(peer.state()), seconds=20.0), peer.state()
            assert peer.state()["wrong"] == []
