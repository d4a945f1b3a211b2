"""Connections that say nothing, half of something or the same again, and floods: the worker goes on."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from peer import Peer, PeerOptions
from peer_process import eventually, is_settled, tokens_of

from psrl_sglang.transfer import landing
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.auth import Signer
from psrl_sglang.transfer.client import MoveClient
from psrl_sglang.transfer.exchange import Offer, Run
from psrl_sglang.transfer.handshake import Challenge, Hello, Party, Use, Welcome, meet_destination
from psrl_sglang.transfer.link import Deadline, Link, TransferError

SECRET = "the secret of this fleet"
PAGES = 12


@pytest.fixture
def pair() -> Iterator[tuple[Peer, Peer, MoveClient]]:
    """A source and the destination that is attacked, which know a secret."""
    with (
        Peer(PeerOptions(secret=SECRET)) as a,
        Peer(PeerOptions(instance_id="b", secret=SECRET)) as b,
        MoveClient(SECRET.encode()) as client,
    ):
        yield a, b, client


def assert_still_works(a: Peer, b: Peer, client: MoveClient) -> None:
    tokens = tokens_of(PAGES, seed=time.monotonic_ns())
    a.compute(tokens)
    result = client.transfer_direct(tokens, a.command, b.data, "1", timeout_s=5.0)
    assert result.ok, result.reason
    assert b.verified(tokens) == PAGES
    for peer in (a, b):
        assert eventually(lambda peer=peer: is_settled(peer.state())), peer.state()
        assert peer.store.check_integrity() == []


def connect(peer: Peer) -> socket.socket:
    host, _, port = peer.data.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.settimeout(10.0)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Having read what came before."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def links(peer: Peer) -> int:
    return peer.worker.status()["moves"]["links_in"]


def test_connections_that_say_nothing_end_after_the_greeting_time(
    pair: tuple[Peer, Peer, MoveClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "GREETING_S", 0.5)
    a, b, client = pair
    silent = [connect(b) for _ in range(20)]
    assert eventually(lambda: links(b) == 20)
    assert_still_works(a, b, client)
    assert all(is_closed(sock) for sock in silent)
    assert eventually(lambda: links(b) <= 1)


def test_one_byte_now_and_then_does_not_prolong_the_greeting(
    pair: tuple[Peer, Peer, MoveClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "GREETING_S", 0.5)
    _, b, _ = pair
    slow = connect(b)
    slow.sendall((1000).to_bytes(4, "big"))
    assert eventually(lambda: links(b))
    end_s = time.monotonic() + 5.0
    while links(b):
        assert time.monotonic() < end_s
        with contextlib.suppress(ConnectionError):
            slow.sendall(b"x")
        time.sleep(0.05)
    assert is_closed(slow)


def test_more_links_than_the_limit_are_turned_away(
    pair: tuple[Peer, Peer, MoveClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "MOST_LINKS", 8)
    a, b, client = pair
    threads = threading.active_count()
    flood = [connect(b) for _ in range(40)]
    assert eventually(lambda: links(b) == 8)
    assert threading.active_count() <= threads + 8
    for sock in flood:
        sock.close()
    assert eventually(lambda: not links(b))
    assert_still_works(a, b, client)


def test_half_open_connections_end(
    pair: tuple[Peer, Peer, MoveClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "GREETING_S", 0.5)
    a, b, client = pair
    half = connect(b)
    half.shutdown(socket.SHUT_WR)
    assert is_closed(half)
    gone = connect(b)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    gone.close()  # a reset, not an end
    assert eventually(lambda: not links(b))
    assert_still_works(a, b, client)


def test_large_sizes_are_not_waited_for_before_the_secret_is_shown(
    pair: tuple[Peer, Peer, MoveClient],
) -> None:
    a, b, client = pair
    sock = connect(b)
    sock.sendall((64 << 20).to_bytes(4, "big"))
    assert is_closed(sock)
    assert_still_works(a, b, client)


@pytest.mark.parametrize("data", [os.urandom(1000), b"\0\0\0\0" * 50, b"GET / HTTP/1.1\r\n\r\n"])
def test_garbage_ends_the_link(pair: tuple[Peer, Peer, MoveClient], data: bytes) -> None:
    a, b, client = pair
    sock = connect(b)
    sock.sendall(data)
    with contextlib.suppress(OSError):  # it may have hung up already
        sock.shutdown(socket.SHUT_WR)
    assert is_closed(sock)
    assert_still_works(a, b, client)


# ---- the handshake ----


def dial(peer: Peer) -> Link:
    return Link.dial(peer.data, Deadline(5.0))


def greet(peer: Peer, party: Party, secret: str = SECRET) -> Link:
    """As a source that knows the secret."""
    link = dial(peer)
    offers = {"tcp": b""}
    meet_destination(link, party, offers, Signer(secret.encode()), Deadline(5.0))
    link.send(Use("tcp"), Deadline(5.0))
    return link


def party_of(peer: Peer, incarnation: str = "x") -> Party:
    return Party("x", incarnation, peer.layout.text, "")


def test_a_hello_that_was_overheard_opens_no_other_link(pair: tuple[Peer, Peer, MoveClient]) -> None:
    """The destination's challenge is new each time, so the proof of yesterday answers another question."""
    a, b, client = pair
    heard: list[Hello] = []
    link = dial(b)
    send = link.send
    link.send = lambda message, deadline: (heard.append(message), send(message, deadline))  # type: ignore[assignment, method-assign]
    meet_destination(link, party_of(b), {"tcp": b""}, Signer(SECRET.encode()), Deadline(5.0))
    link.close()

    again = dial(b)
    again.receive(Challenge, Deadline(5.0))
    again.send(heard[0], Deadline(5.0))
    with pytest.raises(TransferError, match="does not know the secret"):
        again.receive(Welcome, Deadline(5.0))
    again.close()
    assert_still_works(a, b, client)


def test_a_destination_that_gives_the_proof_back_is_not_believed(pair: tuple[Peer, Peer, MoveClient]) -> None:
    a, _, client = pair
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reflect() -> None:
            link = Link(server.accept()[0], "source")
            link.send(Challenge(1, b"n" * 16), Deadline(5.0))
            hello = link.receive(Hello, Deadline(5.0))
            link.send(Welcome(hello.proof, hello.party, hello.offers), Deadline(5.0))
            link.close()

        thread = threading.Thread(target=reflect)
        thread.start()
        tokens = tokens_of(PAGES)
        a.compute(tokens)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        result = client.transfer_direct(tokens, a.command, address, "1", timeout_s=3.0)
        thread.join()
    assert "does not know the secret" in result.reason
    assert eventually(lambda: is_settled(a.state()))


def test_a_source_cannot_have_its_challenge_answered_by_the_one_it_attacks(
    pair: tuple[Peer, Peer, MoveClient],
) -> None:
    """Proofs say which side they are of: one that the other engine gives as a source is no use against it."""
    _, b, _ = pair
    link = dial(b)
    challenge = link.receive(Challenge, Deadline(5.0))
    party, offers = party_of(b), {"tcp": b""}
    said = msgspec.msgpack.encode([party, sorted(offers.items())])
    proof = Signer(SECRET.encode()).proof("destination", challenge.nonce, b"m" * 16, said)
    link.send(Hello(1, b"m" * 16, proof, party, offers), Deadline(5.0))
    with pytest.raises(TransferError, match="does not know the secret"):
        link.receive(Welcome, Deadline(5.0))


def test_other_offers_under_a_proof_are_not_believed(pair: tuple[Peer, Peer, MoveClient]) -> None:
    _, b, _ = pair
    link = dial(b)
    challenge = link.receive(Challenge, Deadline(5.0))
    party = party_of(b)
    said = msgspec.msgpack.encode([party, []])
    proof = Signer(SECRET.encode()).proof("source", challenge.nonce, b"m" * 16, said)
    link.send(Hello(1, b"m" * 16, proof, party, {"tcp": b"other"}), Deadline(5.0))
    with pytest.raises(TransferError, match="does not know the secret"):
        link.receive(Welcome, Deadline(5.0))


def test_an_absurd_offer_is_refused_and_the_link_goes_on(pair: tuple[Peer, Peer, MoveClient]) -> None:
    a, b, client = pair
    link = greet(b, party_of(b))
    same = bytes(16)
    absurd = [
        Offer("psrl:1", "", float("nan"), []),
        Offer("psrl:1", "", float("inf"), [Run("kv", 0, b"", same * 2)]),
        Offer("psrl:1", "", -1.0, [Run("kv", 1, same, b"x" * 16)]),
        Offer("psrl:1", "", 1.0, [Run("kv", 0, b"", same), Run("kv", 1, same, same)]),
        Offer("psrl:1", "", 1.0, [Run("kv", 0, b"", same), Run("kv", 7, same, b"x" * 16)]),
        Offer("psrl:9", "", 1.0, [Run("kv", 0, b"", same)]),
        Offer("psrl:1", "", 1.0, [Run("kv", 0, b"", b"x")]),
        Offer("psrl:1", "", 1.0, [Run("kv", 0, b"", os.urandom(16 << 20) + os.urandom(16))]),
    ]
    for offer in absurd:
        link.send(offer, Deadline(5.0))
        with pytest.raises(TransferError):
            link.receive(Use, Deadline(5.0))
        assert links(b) == 1, offer.runs[:1]
    link.close()
    assert_still_works(a, b, client)


# ---- the desk ----


def exchange(peer: Peer, *messages: list[bytes], wait_s: float = 1.0) -> list[list[bytes]]:
    """What the desk answers to raw frames."""
    answers: list[list[bytes]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 1000)
        sock.connect(f"tcp://{peer.command}")
        for frames in messages:
            sock.send_multipart(frames)
        while sock.poll(int(wait_s * 1000)):
            answers.append(sock.recv_multipart())
            if len(answers) == len(messages):
                break
    return answers


def error_of(frames: list[bytes]) -> str:
    answer = wire.decode(frames[0], wire.CommandReply)
    assert isinstance(answer, wire.ErrorMsg), answer
    return answer.error


def health() -> bytes:
    return wire.encode(wire.HealthWorkerMsg("h"))


def test_frames_that_nobody_signed_are_refused(pair: tuple[Peer, Peer, MoveClient]) -> None:
    a, b, client = pair
    other = Signer(b"another secret, of others")
    unsigned = [[health()], [b"\xff" * 100], [b""], [health(), b"x"], other.sign(health()), [b"a"] * 20]
    answers = exchange(a, *unsigned)
    assert len(answers) == len(unsigned)
    assert all(error_of(answer) for answer in answers)
    assert_still_works(a, b, client)


def test_a_command_that_was_overheard_is_not_done_again(pair: tuple[Peer, Peer, MoveClient]) -> None:
    a, _, _ = pair
    frames = Signer(SECRET.encode()).sign(health())
    first, second = exchange(a, frames, frames)
    assert isinstance(wire.decode(first[0], wire.CommandReply), wire.HealthWorkerRetMsg)
    assert "heard before" in error_of(second)


def test_a_frame_over_the_limit_ends_its_sender_only() -> None:
    with Peer(PeerOptions()) as a, Peer(PeerOptions(instance_id="b")) as b, MoveClient() as client:
        assert exchange(a, [bytes(65 << 20)]) == []
        assert_still_works(a, b, client)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": None},
        {"tokens": []},
        {"tokens": [-1]},
        {"tokens": [1 << 40]},
        {"new_position": ["nowhere", "x"]},
        {"new_position": ["x" * 100_000 + ":1", "x"]},
        {"new_position": ["127.0.0.1:²", "x"]},
        {"new_position": ["a\0b:80", "x"]},
        {"new_position": ["é" * 80 + ":80", "x"]},
        {"request_configs": None},
        {"request_configs": {wire.VERSION_KEY: "x" * 100_000}},
        {"request_configs": {wire.VERSION_KEY: "1", wire.TIMEOUT_KEY: float("nan")}},
        {"request_configs": {wire.VERSION_KEY: "1", wire.TIMEOUT_KEY: "x" * 100_000}},
        {"request_configs": {wire.VERSION_KEY: "1", wire.SALT_KEY: ["x"] * 1000}},
    ],
)
def test_an_absurd_command_is_answered_with_a_short_reason(change: dict[str, object]) -> None:
    tokens = tokens_of(4)
    with Peer(PeerOptions()) as a:
        a.compute(tokens)
        good = {
            "type": "MoveWorkerMsg",
            "worker_event_id": "x",
            "old_position": "x",
            "new_position": ["127.0.0.1:1", "x"],
            "tokens": tokens,
            "copy": True,
            "request_configs": {wire.VERSION_KEY: "1", wire.TIMEOUT_KEY: 1.0},
        }
        frame = msgspec.msgpack.encode(good | change)
        (answer,) = exchange(a, [frame], wait_s=5.0)
        assert len(answer[0]) < 5000
        said = wire.decode(answer[0], wire.CommandReply)
        assert said.error if isinstance(said, wire.ErrorMsg) else said.reason and not said.num_tokens
        assert eventually(lambda: is_settled(a.state())), a.state()
