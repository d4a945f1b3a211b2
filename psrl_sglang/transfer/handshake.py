"""How two move workers meet: both show that they know the secret and that their KV is of one kind.

    destination                        source
    Challenge(nonce)             ->
                                 <-    Hello(nonce, proof, who, offers)
    Welcome(proof, who, offers)  ->
                                 <-    Use(transport)

A `Refused` may come in place of each and ends the connection. What a link agreed on holds until it ends, so one
link serves many moves. An incarnation is one start of one engine: addresses are used again, incarnations never.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass

import msgspec

from psrl_sglang.transfer.auth import Signer
from psrl_sglang.transfer.link import MAX_MESSAGE_BYTES, Deadline, Link, PeerRefused, Refused, TransferError

PROTOCOL = 1
_NONCE_BYTES = 16


class Party(msgspec.Struct, frozen=True):
    """One rank of one start of an engine. Engines can use each other's KV if ``layout`` (`KVLayout.text`) and
    ``namespace`` are equal."""

    instance: str
    incarnation: str
    layout: str
    namespace: str


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    protocol: int
    nonce: bytes


class Hello(msgspec.Struct, tag="hello", frozen=True):
    protocol: int
    nonce: bytes
    proof: bytes
    party: Party
    offers: dict[str, bytes]


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    proof: bytes
    party: Party
    offers: dict[str, bytes]


class Use(msgspec.Struct, tag="use", frozen=True):
    transport: str


@dataclass(frozen=True, slots=True)
class Met:
    """The other side of a link, and what it offers for each transport that both have."""

    party: Party
    offers: dict[str, bytes]


def meet_destination(
    link: Link, party: Party, offers: dict[str, bytes], signer: Signer, deadline: Deadline
) -> Met:
    """The source's part, up to its `Use`. Raises `TransferError`."""
    challenge = link.receive(Challenge, deadline)
    _require_protocol(challenge.protocol)
    nonce = os.urandom(_NONCE_BYTES)
    said = msgspec.msgpack.encode([party, sorted(offers.items())])
    proof = signer.proof("source", challenge.nonce, nonce, said)
    link.send(Hello(PROTOCOL, nonce, proof, party, offers), deadline)
    welcome = link.receive(Welcome, deadline)
    said = msgspec.msgpack.encode([welcome.party, sorted(welcome.offers.items())])
    if not hmac.compare_digest(welcome.proof, signer.proof("destination", nonce, challenge.nonce, said)):
        raise PeerRefused(f"{link.peer} does not know the secret of this fleet")
    link.most_bytes = MAX_MESSAGE_BYTES
    return Met(welcome.party, welcome.offers)


class Greeting:
    """The destination's part. ``hear`` gives what the source offers; ``answer`` lets it in."""

    def __init__(self, link: Link, party: Party, signer: Signer) -> None:
        self._link = link
        self._party = party
        self._signer = signer
        self._nonce = os.urandom(_NONCE_BYTES)
        self._their_nonce = b""

    def hear(self, deadline: Deadline) -> Met:
        """Raises `TransferError`, having told the source."""
        self._link.send(Challenge(PROTOCOL, self._nonce), deadline)
        hello = self._link.receive(Hello, deadline)
        said = msgspec.msgpack.encode([hello.party, sorted(hello.offers.items())])
        self._their_nonce = hello.nonce
        try:
            _require_protocol(hello.protocol)
            if not hmac.compare_digest(
                hello.proof, self._signer.proof("source", self._nonce, hello.nonce, said)
            ):
                raise PeerRefused("the source does not know the secret of this fleet")
            require_same_kind(hello.party, self._party)
        except PeerRefused as refusal:
            self._link.send(Refused.because(refusal), deadline)
            raise
        self._link.most_bytes = MAX_MESSAGE_BYTES
        return Met(hello.party, hello.offers)

    def answer(self, offers: dict[str, bytes], deadline: Deadline) -> str:
        """Send what is offered here; the transport that the source chose."""
        said = msgspec.msgpack.encode([self._party, sorted(offers.items())])
        proof = self._signer.proof("destination", self._their_nonce, self._nonce, said)
        self._link.send(Welcome(proof, self._party, offers), deadline)
        chosen = self._link.receive(Use, deadline).transport
        if chosen not in offers:
            raise TransferError(f"{self._link.peer} chose {chosen!r}, which was not offered")
        return chosen


def require_same_kind(theirs: Party, mine: Party) -> None:
    """Raises `PeerRefused` with what differs."""
    if theirs.incarnation == mine.incarnation:
        raise PeerRefused("source and destination are the same engine")
    if theirs.namespace != mine.namespace:
        raise PeerRefused(
            f"the source is of namespace {theirs.namespace!r}, the destination of {mine.namespace!r} "
            "(psrl.sglang.namespace)"
        )
    if theirs.layout != mine.layout:
        pairs = zip(theirs.layout.split(" "), mine.layout.split(" "), strict=False)
        differ = "; ".join(f"{a} there, {b} here" for a, b in pairs if a != b) or "different fields"
        raise PeerRefused(f"KV of another kind: {differ}")


def _require_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise PeerRefused(f"one side speaks version {protocol} of the move protocol, the other {PROTOCOL}")
