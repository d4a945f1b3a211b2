"""Whatever bytes come, every decoder of the move layer ends with an error of its own: no crash, no hang."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer import Peer, PeerOptions
from peer_process import tokens_of

from psrl_sglang.store.arena import Arena
from psrl_sglang.store.sums import cut
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.arrival import Arrivals, Channel
from psrl_sglang.transfer.auth import NotAuthorized, Signer
from psrl_sglang.transfer.cma import Addresses, CmaTransport
from psrl_sglang.transfer.exchange import Commit, Done, Grant, Granted, Offer, Run
from psrl_sglang.transfer.handshake import Challenge, Greeting, Hello, Party, Use, Welcome, meet_destination
from psrl_sglang.transfer.link import Deadline, Link, PeerLost, TransferError, parse_address
from psrl_sglang.transfer.nixl import NixlOffer, NixlTransport, Written
from psrl_sglang.transfer.quarantine import Quarantine
from psrl_sglang.transfer.tcp import TcpTransport
from psrl_sglang.transfer.transport import TransportUnusable

QUICKLY = settings(max_examples=150, deadline=None)
KINDS = [Challenge, Hello, Welcome, Use, Offer, Grant, Commit, Done, Addresses, Written]
numbers = st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-3, 300))
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=20), st.binary(max_size=40)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=10), inner, max_size=5)
    ),
    max_leaves=20,
)


@contextmanager
def linked() -> Iterator[tuple[Link, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        link = Link(server.accept()[0], "peer")
    try:
        yield link, far
    finally:
        far.close()
        link.close()


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def receive_all(link: Link, kind: Any) -> None:
    while True:
        link.receive(kind, Deadline(2.0))


def fields_of(kind: Any, values: Any) -> Any:
    """A map with the tag and the fields of ``kind``, some of them wrong or missing."""
    names = [field.name for field in msgspec.structs.fields(kind)]
    return st.fixed_dictionaries(
        {"type": st.just(kind.__struct_config__.tag)}, optional=dict.fromkeys(names, values)
    )


@QUICKLY
@given(st.binary(max_size=200), st.sampled_from(KINDS))
def test_any_bytes_on_a_link_are_a_message_or_an_error(data: bytes, kind: Any) -> None:
    with linked() as (link, far):
        far.sendall(data)
        far.close()
        with pytest.raises(TransferError):
            receive_all(link, kind)


@QUICKLY
@given(st.data(), st.sampled_from(KINDS))
def test_any_fields_of_a_message_are_a_message_or_an_error(data: Any, kind: Any) -> None:
    body = msgspec.msgpack.encode(data.draw(st.one_of(plain, fields_of(kind, plain))))
    with linked() as (link, far):
        far.sendall(framed(body))
        far.close()
        try:
            assert isinstance(link.receive(kind, Deadline(2.0)), kind)
        except TransferError:
            pass


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1a"])
def test_deep_nesting_is_an_error(nested: bytes) -> None:
    with linked() as (link, far):
        far.sendall(framed(nested * 100_000 + b"\xc0"))
        with pytest.raises(TransferError):
            link.receive(Offer, Deadline(2.0))


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1a"])
def test_deep_nesting_of_what_others_offer_or_sign_is_an_error(nested: bytes) -> None:
    deep = nested * 100_000 + b"\xc0"
    with pytest.raises(TransportUnusable):
        CmaTransport(ARENA).accept(b"\x81\xa1x" + deep)
    with pytest.raises(NotAuthorized):
        Signer(b"the secret of this fleet").check([b"x", deep])
    with pytest.raises(wire.BadMessage):
        wire.decode(deep, wire.Command)


def test_more_tokens_than_any_prompt_has_are_no_command() -> None:
    command = {"type": "LookupWorkerMsg", "worker_event_id": "x", "tokens": [1] * ((1 << 22) + 1)}
    with pytest.raises(wire.BadMessage, match="4194304"):
        wire.decode(msgspec.msgpack.encode(command), wire.Command)


def test_an_announced_size_over_the_limit_is_an_error_before_a_byte_of_it() -> None:
    with linked() as (link, far):
        far.sendall(((1 << 20) + 1).to_bytes(4, "big"))
        with pytest.raises(TransferError, match="at most 1048576"):
            link.receive(Hello, Deadline(2.0))


def test_a_message_cut_short_ends_with_the_deadline_or_the_connection() -> None:
    with linked() as (link, far):
        far.sendall(framed(b"x" * 100)[:50])
        with pytest.raises(TransferError, match="silent"):
            link.receive(Use, Deadline(0.1))
        far.close()
        with pytest.raises(PeerLost):
            link.receive(Use, Deadline(1.0))


@QUICKLY
@given(st.data())
def test_any_hello_is_refused_without_the_secret(data: Any) -> None:
    signer = Signer(b"the secret of this fleet")
    party = Party("b", "2", "layout", "")
    body = msgspec.msgpack.encode(data.draw(st.one_of(plain, fields_of(Hello, plain))))
    with linked() as (link, far):
        far.sendall(framed(body))
        with pytest.raises(TransferError):
            Greeting(link, party, signer).hear(Deadline(1.0))


@QUICKLY
@given(st.data())
def test_any_welcome_is_refused_without_the_secret(data: Any) -> None:
    signer = Signer(b"the secret of this fleet")
    party = Party("b", "2", "layout", "")
    welcome = data.draw(st.one_of(plain, fields_of(Welcome, plain)))
    with linked() as (link, far):
        far.sendall(framed(msgspec.msgpack.encode(Challenge(1, b"n" * 16))))
        far.sendall(framed(msgspec.msgpack.encode(welcome)))
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(TransferError):
            meet_destination(link, party, {}, signer, Deadline(1.0))


# ---- what is well formed and absurd ----


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer(PeerOptions(channel="tcp", windows=(("swa", 2),))) as peer:
        yield peer


digests = st.lists(st.sampled_from([bytes([n]) * 16 for n in range(6)]), max_size=6).map(b"".join)
runs = st.builds(
    Run,
    pool=st.sampled_from(["kv", "swa", "", "x"]),
    start=st.one_of(st.integers(0, 8), st.integers(0, (1 << 48) - 1)),
    before=st.one_of(
        st.just(b""), st.sampled_from([bytes([n]) * 16 for n in range(6)]), st.binary(max_size=17)
    ),
    digests=st.one_of(digests, st.binary(max_size=40)),
)
offers = st.builds(
    Offer,
    tag=st.sampled_from(["psrl:1", "", "psrl:2"]),
    fingerprint=st.just(""),
    limit_s=st.floats(),
    runs=st.lists(runs, max_size=5),
)


@settings(max_examples=400, deadline=None)
@given(offers)
def test_any_offer_leaves_the_store_in_order(peer: Peer, offer: Offer) -> None:
    with linked() as (link, far):
        far.shutdown(socket.SHUT_WR)
        arrivals = Arrivals(peer.store, peer.engine, Quarantine())
        transport = TcpTransport(peer.store.dram.arena)
        with pytest.raises(TransferError):
            arrivals.take(Channel(link, transport, b""), offer, Deadline(1.0))
    assert peer.store.check_integrity() == []
    assert peer.held() == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(runs, min_size=1, max_size=4), st.binary(max_size=64))
def test_any_offer_with_any_bytes_leaves_the_store_in_order(
    peer: Peer, given_runs: list[Run], tail: bytes
) -> None:
    prefix = b"".join(random.Random(n).randbytes(16) for n in range(6))
    whole = [Run("kv", 0, b"", prefix), *given_runs]
    with linked() as (link, far):
        far.sendall(bytes(6 * peer.options.page_bytes) + tail)
        far.shutdown(socket.SHUT_WR)
        arrivals = Arrivals(peer.store, peer.engine, Quarantine())
        transport = TcpTransport(peer.store.dram.arena)
        with pytest.raises(TransferError):
            arrivals.take(Channel(link, transport, b""), Offer("psrl:1", "", 1.0, whole), Deadline(1.0))
    assert peer.store.check_integrity() == []
    assert peer.held() == 0


@QUICKLY
@given(st.lists(st.builds(Granted, run=numbers, first=numbers, pages=numbers, place=numbers), max_size=6))
def test_any_grant_is_pieces_of_the_cargo_or_an_error(peer: Peer, granted: list[Granted]) -> None:
    tokens = tokens_of(8)
    peer.compute(tokens)
    tag = peer.engine.tag_of("1")
    prefix = peer.prefix(tokens)
    cargo = peer.worker._cargo(prefix, tag, Deadline(1.0))
    sizes = [run.pages * peer.store.dram.page_bytes[run.pool] for run in cargo.runs]
    try:
        pieces, places, sums = peer.worker._sender._pieces(cargo, granted, "peer")
        assert len(pieces) == len(places) == len(sums)
        assert sum(map(len, pieces)) <= sum(sizes)
    except TransferError:
        pass
    finally:
        cargo.release()


@QUICKLY
@given(st.one_of(st.binary(max_size=80), plain.map(msgspec.msgpack.encode), st.data()))
def test_any_offer_of_cma_is_usable_or_not(given_offer: Any) -> None:
    transport = CmaTransport(ARENA)
    if not isinstance(given_offer, bytes):
        real = msgspec.msgpack.decode(transport.offer())
        name = given_offer.draw(st.sampled_from(sorted(real)))
        given_offer = msgspec.msgpack.encode(real | {name: given_offer.draw(plain)})
    try:
        transport.accept(given_offer)
        transport.connect("peer", given_offer)
    except TransportUnusable:
        pass


@QUICKLY
@given(st.binary(max_size=64), st.integers(1, 4))
def test_any_addresses_of_cma_are_read_or_an_error(addresses: bytes, pieces: int) -> None:
    transport = CmaTransport(ARENA)
    with linked() as (link, far):
        far.sendall(framed(msgspec.msgpack.encode(Addresses(addresses))))
        wanted = list(cut(memoryview(bytearray(pieces * (2 << 20)))))
        with pytest.raises(TransferError):
            transport.receive(link, transport.offer(), wanted, print, Deadline(1.0))


@pytest.fixture(scope="module")
def nixl() -> Iterator[NixlTransport]:
    pytest.importorskip("nixl_cu12")
    transport = NixlTransport(ARENA)
    yield transport
    transport.close()


@QUICKLY
@given(st.one_of(st.binary(max_size=80), plain.map(msgspec.msgpack.encode), st.data()))
def test_any_offer_of_nixl_is_usable_or_not(nixl: NixlTransport, given_offer: Any) -> None:
    if not isinstance(given_offer, bytes):
        real = msgspec.msgpack.decode(nixl.offer())
        name = given_offer.draw(st.sampled_from(["version", "address", "size_bytes"]))
        given_offer = msgspec.msgpack.encode(real | {name: given_offer.draw(plain)})
    try:
        nixl.accept(given_offer)
    except TransportUnusable:
        pass


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_metadata_of_nixl_is_usable_or_not(nixl: NixlTransport, data: Any) -> None:
    real = msgspec.msgpack.decode(nixl.offer(), type=NixlOffer)
    cut_at = data.draw(st.integers(0, len(real.metadata) - 1))
    garbled = real.metadata[:cut_at] + data.draw(st.binary(max_size=20))
    offer = msgspec.msgpack.encode(msgspec.structs.replace(real, metadata=garbled))
    try:
        nixl.connect("peer", offer)
    except TransportUnusable:
        pass
    nixl.forget("peer")


@QUICKLY
@given(numbers.filter(lambda number: number != 3))
def test_any_count_of_written_pieces_is_right_or_an_error(nixl: NixlTransport, pieces: int) -> None:
    with linked() as (link, far):
        far.sendall(framed(msgspec.msgpack.encode(Written(pieces))))
        far.close()
        with pytest.raises(TransferError):
            nixl.receive(link, nixl.offer(), [memoryview(b"")] * 3, print, Deadline(1.0))


@QUICKLY
@given(numbers)
def test_nixl_writes_nowhere_outside_of_the_other_arena(nixl: NixlTransport, place: int) -> None:
    class Way:
        peer, agent, address, size_bytes = "", "", 1 << 40, 100

    with linked() as (link, _), pytest.raises(TransferError, match="outside"):
        nixl.send(link, Way(), [memoryview(bytes(101))], [place], print, Deadline(1.0))  # type: ignore[arg-type]


@QUICKLY
@given(st.text(max_size=300))
def test_any_address_is_one_or_an_error(address: str) -> None:
    try:
        host, port = parse_address(address)
        assert host
        assert 0 < port < 1 << 16
    except TransferError:
        pass


@QUICKLY
@given(st.lists(st.binary(max_size=100), max_size=4))
def test_any_frames_are_signed_or_not_authorized(frames: list[bytes]) -> None:
    with pytest.raises(NotAuthorized):
        Signer(b"the secret of this fleet").check(frames)


@QUICKLY
@given(st.one_of(st.binary(max_size=100), plain.map(msgspec.msgpack.encode)))
def test_any_frame_is_a_command_or_a_bad_message(frame: bytes) -> None:
    for kind in (wire.Command, wire.CommandReply, wire.WorkerRequest, wire.WorkerEvent, wire.ControllerReply):
        with pytest.raises(wire.BadMessage):
            wire.decode(frame, kind)


ARENA = Arena(2, 1 << 20)
