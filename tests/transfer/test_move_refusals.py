"""Engines that cannot use each other's KV say so, and nothing lands; damaged bytes and full arenas."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from peer import Peer, PeerOptions
from peer_process import eventually, is_settled, tokens_of

from psrl_sglang.transfer.client import MoveClient, MoveResult

SECRET = "the secret of this fleet"
PAGES = 23
TRANSPORTS = ["cma", "tcp", "nixl"]


@pytest.fixture
def client() -> Iterator[MoveClient]:
    with MoveClient() as client:
        yield client


@pytest.fixture(params=TRANSPORTS)
def channel(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu12")
    return request.param


def move(client: MoveClient, a: Peer, b: Peer, tokens: list[int], **options: object) -> MoveResult:
    return client.transfer_direct(tokens, a.command, b.data, "1", timeout_s=4.0, **options)  # type: ignore[arg-type]


def free_ports() -> int:
    """The first of two that follow each other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return port


def assert_clean(*peers: Peer) -> None:
    for peer in peers:
        assert eventually(lambda peer=peer: is_settled(peer.state())), peer.state()
        assert peer.store.check_integrity() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (PeerOptions(instance_id="b", model="other"), "model=m there, model=other here"),
        (PeerOptions(instance_id="b", page_bytes=32 << 10), "KV of another kind"),
        (PeerOptions(instance_id="b", page_tokens=32), "page=16 there, page=32 here"),
        (PeerOptions(instance_id="b", rank=1, ranks=2), "rank=tp0/1 there"),
        (PeerOptions(instance_id="b", windows=(("swa", 4),)), "pools="),
        (PeerOptions(instance_id="b", namespace="other"), "of namespace '', the destination of 'other'"),
        (PeerOptions(instance_id="b", window=("psrl:7",)), "not among the versions in use"),
        (PeerOptions(instance_id="b", least_tokens=1000), "computed faster than moved"),
        (PeerOptions(instance_id="b", secret=SECRET), "does not know the secret"),
    ],
    ids=["model", "page-bytes", "page-size", "rank", "pools", "namespace", "version", "short", "secret"],
)
def test_kv_that_cannot_be_used_is_refused_with_the_reason(
    client: MoveClient, options: PeerOptions, said: str
) -> None:
    tokens = tokens_of(PAGES)
    with Peer(PeerOptions()) as a, Peer(options) as b, Peer(PeerOptions(instance_id="c")) as c:
        a.compute(tokens)
        result = move(client, a, b, tokens)
        assert not result.ok
        assert said in result.reason
        assert len(b.store.dram.index) == 0
        assert move(client, a, c, tokens).present_tokens == len(tokens)
        assert c.verified(tokens) == PAGES
        assert_clean(a, b, c)


def test_a_source_with_a_secret_does_not_speak_to_a_destination_without() -> None:
    tokens = tokens_of(PAGES)
    with (
        Peer(PeerOptions(secret=SECRET)) as a,
        Peer(PeerOptions(instance_id="b")) as b,
        Peer(PeerOptions(instance_id="c", secret=SECRET)) as c,
        MoveClient(SECRET.encode()) as client,
    ):
        a.compute(tokens)
        assert "does not know the secret" in move(client, a, b, tokens).reason
        assert move(client, a, c, tokens).ok
        assert c.verified(tokens) == PAGES
        assert_clean(a, b, c)


def test_other_weights_under_the_same_tag_are_refused(client: MoveClient) -> None:
    tokens = tokens_of(PAGES)
    with Peer(PeerOptions(fingerprint="x")) as a, Peer(PeerOptions(instance_id="b", fingerprint="y")) as b:
        a.compute(tokens)
        assert "other weights" in move(client, a, b, tokens).reason
        assert_clean(a, b)


def test_an_engine_does_not_send_to_itself(client: MoveClient) -> None:
    tokens = tokens_of(PAGES)
    with Peer(PeerOptions()) as a:
        a.compute(tokens)
        assert "same engine" in move(client, a, a, tokens).reason
        assert_clean(a)


def test_a_refusal_costs_no_new_link(client: MoveClient) -> None:
    with Peer(PeerOptions()) as a, Peer(PeerOptions(instance_id="b", least_tokens=1000)) as b:
        tokens = tokens_of(PAGES)
        a.compute(tokens)
        for _ in range(3):
            assert not move(client, a, b, tokens).ok
        assert b.worker.status()["moves"]["links_in"] == 1
        assert_clean(a, b)


def test_nixl_of_another_version_is_not_used(client: MoveClient) -> None:
    pytest.importorskip("nixl_cu12")
    tokens = tokens_of(PAGES)
    options = PeerOptions(instance_id="b", channel="nixl", nixl_version="0.10.1")
    with Peer(PeerOptions(channel="nixl")) as a, Peer(options) as b:
        a.compute(tokens)
        result = move(client, a, b, tokens)
        assert result.ok
        assert result.transport == "cma"
        assert b.verified(tokens) == PAGES
        assert_clean(a, b)


def test_without_a_transport_in_common_the_reason_says_so(client: MoveClient) -> None:
    tokens = tokens_of(PAGES)
    with Peer(PeerOptions(channel="tcp")) as a, Peer(PeerOptions(instance_id="b", channel="cma")) as b:
        b.worker._transports.usable.pop("tcp")
        a.compute(tokens)
        assert "no transport in common" in move(client, a, b, tokens).reason
        assert_clean(a, b)


@pytest.mark.parametrize("where", ["at-the-source", "on-arrival"])
def test_damaged_bytes_are_never_published(client: MoveClient, channel: str, where: str) -> None:
    if channel == "nixl" and where == "at-the-source":
        pytest.skip("NIXL sends registered memory only")
    tokens = tokens_of(PAGES)
    source = PeerOptions(channel=channel, damage=where == "at-the-source")
    destination = PeerOptions(instance_id="b", channel=channel, land_damage=where == "on-arrival")
    with Peer(source) as a, Peer(destination) as b:
        a.compute(tokens)
        result = move(client, a, b, tokens)
        assert result.transport == channel
        assert "damaged" in result.reason
        assert result.present_tokens < len(tokens)
        assert result.num_tokens == result.present_tokens == b.verified(tokens) * 16
        assert_clean(a, b)


def test_a_full_destination_takes_the_head(client: MoveClient, channel: str) -> None:
    tokens = tokens_of(PAGES)
    full = PeerOptions(instance_id="b", channel=channel, slots=4)
    with Peer(PeerOptions(channel=channel)) as a, Peer(full) as b:
        a.compute(tokens)
        held = tokens_of(4, seed=9)
        b.compute(held)
        keys = b.store.dram.index.of_tag("psrl:1")[0].keys
        with b.store.dram.lease(keys):
            result = move(client, a, b, tokens)
            assert result.ok
            assert result.present_tokens == 12 * 16
            assert "no room for 11 pages" in result.reason
            assert b.verified(tokens) == 12
        assert_clean(a, b)


def test_a_destination_without_any_room_says_so(client: MoveClient, channel: str) -> None:
    tokens = tokens_of(PAGES)
    with (
        Peer(PeerOptions(channel=channel)) as a,
        Peer(PeerOptions(instance_id="b", channel=channel, slots=1)) as b,
    ):
        a.compute(tokens)
        b.compute(tokens_of(4, seed=9))
        with b.store.dram.lease(b.store.dram.index.of_tag("psrl:1")[0].keys):
            result = move(client, a, b, tokens)
        assert not result.ok
        assert "no room for 23 pages" in result.reason
        assert_clean(a, b)


def test_a_move_evicts_what_nobody_uses(client: MoveClient, channel: str) -> None:
    tokens = tokens_of(PAGES)
    with (
        Peer(PeerOptions(channel=channel)) as a,
        Peer(PeerOptions(instance_id="b", channel=channel, slots=6)) as b,
    ):
        a.compute(tokens)
        for seed in range(1, 5):
            b.compute(tokens_of(8, seed))
        assert move(client, a, b, tokens).present_tokens == len(tokens)
        assert b.verified(tokens) == PAGES
        assert_clean(a, b)


def test_a_peer_that_was_restarted_at_its_address_is_met_anew(client: MoveClient, channel: str) -> None:
    tokens = tokens_of(PAGES)
    with Peer(PeerOptions(channel=channel)) as a:
        a.compute(tokens)
        again = PeerOptions(instance_id="b", channel=channel, port=free_ports())
        for _ in range(3):
            with Peer(again) as b:
                assert move(client, a, b, tokens).num_tokens == len(tokens)
                assert b.verified(tokens) == PAGES
        assert_clean(a)
        assert a.worker._sender.links == 1 or eventually(lambda: not a.worker._sender.links)
