"""Where moves arrive: a listening socket, and a thread for each source that keeps a link here."""

from __future__ import annotations

import logging
import socket
import threading
import time

from psrl_sglang.store.store import KVStore
from psrl_sglang.transfer.arrival import LATE_S, Arrivals, Channel, LandingRules
from psrl_sglang.transfer.auth import Signer
from psrl_sglang.transfer.exchange import Offer, salted
from psrl_sglang.transfer.handshake import Greeting, Party
from psrl_sglang.transfer.link import (
    Deadline,
    DeadlinePassed,
    Link,
    PeerLost,
    PeerRefused,
    Refused,
    TransferError,
    shutdown,
)
from psrl_sglang.transfer.quarantine import Quarantine
from psrl_sglang.transfer.transport import Transports

__all__ = ["Landing", "LandingRules", "salted"]

logger = logging.getLogger(__name__)

GREETING_S = 5.0
MOST_LINKS = 256
_LONGEST_MOVE_S = 600.0
_IDLE_S = 300.0  # a link nobody uses; sources close theirs earlier
_CLOSE_S = 5.0
_FAREWELL_S = 0.5
_PAUSE_S = 0.05


class Landing:
    """Owns ``sock``, on which it listens, its links and their threads."""

    def __init__(
        self,
        sock: socket.socket,
        store: KVStore,
        transports: Transports,
        rules: LandingRules,
        party: Party,
        signer: Signer,
    ) -> None:
        self._transports = transports
        self._rules = rules
        self._party = party
        self._signer = signer
        self._socket = sock
        self._quarantine = Quarantine()
        self._arrivals = Arrivals(store, rules, self._quarantine)
        self._links: dict[Link, threading.Thread] = {}
        self._running = 0
        self._lock = threading.Lock()
        self._is_closing = False
        self._accepting = threading.Thread(target=self._accept, name="psrl-move-accept", daemon=True)
        self._accepting.start()

    @property
    def links(self) -> int:
        return len(self._links)

    @property
    def running(self) -> int:
        """Moves that are coming in now."""
        return self._running

    @property
    def quarantined(self) -> int:
        self.release_quarantined()
        return len(self._quarantine)

    def release_quarantined(self) -> None:
        self._quarantine.release()

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            links = dict(self._links)
        shutdown(self._socket)
        self._accepting.join(_CLOSE_S)
        self._socket.close()
        for link in links:
            link.shutdown()
        end = Deadline(_CLOSE_S)
        for thread in links.values():
            thread.join(max(0.0, end.left_s))
        self._quarantine.close()

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                if not self._is_closing:
                    logger.warning("psrl: cannot accept a link for moves: %s", error)
                    time.sleep(_PAUSE_S)  # out of descriptors: others may give some back
                continue
            try:
                self._welcome(sock, f"{address[0]}:{address[1]}")
            except (OSError, RuntimeError) as error:  # gone already, or no more threads
                logger.warning("psrl: cannot serve a link for moves: %s", error)
                sock.close()

    def _welcome(self, sock: socket.socket, peer: str) -> None:
        link = Link(sock, peer)
        thread = threading.Thread(target=self._serve, args=(link,), name=f"psrl-move-in-{peer}", daemon=True)
        with self._lock:
            is_welcome = not self._is_closing and len(self._links) < MOST_LINKS
            if is_welcome:
                self._links[link] = thread
        if not is_welcome:
            link.close()
            return
        try:
            thread.start()
        except RuntimeError:
            self._forget(link)
            raise

    def _serve(self, link: Link) -> None:
        try:
            self._converse(link)
        except PeerLost:
            pass  # how links end
        except DeadlinePassed as error:
            logger.info("psrl: a link for moves is closed: %s", error)
        except TransferError as error:
            logger.warning("psrl: a link for moves is closed: %s", error)
            self._bid_farewell(link, error)
        except Exception as error:
            logger.exception("psrl: a link for moves failed")
            self._bid_farewell(link, error)
        finally:
            self._forget(link)
            link.close()

    def _converse(self, link: Link) -> None:
        greeting = Greeting(link, self._party, self._signer)
        deadline = Deadline(GREETING_S)
        met = greeting.hear(deadline)
        chosen = greeting.answer(self._transports.accepted(met.offers), deadline)
        channel = Channel(link, self._transports.usable[chosen], met.offers[chosen])
        while True:
            self._land(channel, link.receive(Offer, Deadline(_IDLE_S)))

    def _land(self, channel: Channel, offer: Offer) -> None:
        limit_s = min(offer.limit_s, _LONGEST_MOVE_S) if offer.limit_s > 0 else 0.0  # also if it is no number
        deadline = Deadline(limit_s + LATE_S)
        self._quarantine.release()
        with self._lock:
            self._running += 1
        outcome = "failed"
        try:
            self._arrivals.take(channel, offer, deadline)
            outcome = "landed"
        except PeerRefused as refusal:
            outcome = "refused"
            channel.link.send(Refused.because(refusal), deadline)
        finally:
            with self._lock:
                self._running -= 1
            if outcome != "landed":
                self._rules.landed(0, 0.0, channel.transport.name, outcome)

    def _bid_farewell(self, link: Link, error: Exception) -> None:
        try:
            link.send(Refused.because(error), Deadline(_FAREWELL_S))
        except TransferError:
            pass  # it does not listen

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._links.pop(link, None)
