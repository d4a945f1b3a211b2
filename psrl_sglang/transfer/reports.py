"""What a move worker tells the controller: that it lives, what its DRAM holds, which moves it made.

Whatever the controller misses it asks for again (``full_sync``), so nothing here waits for it, and an engine
runs as well without one. Tells of a chunk go out within ``_BATCH_S``.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from psrl_sglang.keys import KEY_BYTES
from psrl_sglang.pagehash import chunk_key
from psrl_sglang.store.index import Chunk
from psrl_sglang.store.store import KVStore
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.auth import NotAuthorized, Signer
from psrl_sglang.transfer.engine_side import EngineSide
from psrl_sglang.transfer.exchange import salted

logger = logging.getLogger(__name__)

_BATCH_S = 0.2
_ANSWER_S = 2.0
_CLOSE_S = 5.0
_MOST_WAITING = 1 << 18
_KEYS_A_BATCH = 8192
_LOCATION = "LocalCPUBackend"


@dataclass(frozen=True, slots=True)
class ControllerAddress:
    host: str
    pull_port: int
    reply_port: int


class Reports:
    """Owns a thread and its sockets. ``tidy`` is called on that thread with every heartbeat, also without a
    controller."""

    def __init__(
        self,
        controller: ControllerAddress | None,
        who: tuple[str, int],
        register: Callable[[], wire.RegisterMsg],
        heartbeat: Callable[[], wire.HeartbeatMsg],
        store: KVStore,
        engine: EngineSide,
        signer: Signer,
        *,
        heartbeat_s: float,
        tidy: Callable[[], None],
    ) -> None:
        self._controller = controller
        self._who = who
        self._register = register
        self._heartbeat = heartbeat
        self._store = store
        self._engine = engine
        self._signer = signer
        self._heartbeat_s = heartbeat_s
        self._tidy = tidy
        self._pool = store.layout.pools[0].name
        self._sequence = itertools.count(1)
        self._events: deque[tuple[wire.OpType, str, bytes, int]] = deque()
        self._moves: deque[wire.MoveRecord] = deque(maxlen=4096)
        self._changed = threading.Condition()
        self._is_closing = False
        self._must_sync = False
        self._is_registered = False
        self._answered_s = 0.0
        self._trouble = ""
        if controller is not None:
            store.dram.watch = self._watch
        self._thread = threading.Thread(target=self._run, name="psrl-move-report", daemon=True)
        self._thread.start()

    def moved(self, record: wire.MoveRecord) -> None:
        if self._controller is None:
            return
        with self._changed:
            self._moves.append(record)
            self._changed.notify()

    def status(self) -> dict[str, Any] | None:
        if self._controller is None:
            return None
        silent_s = time.monotonic() - self._answered_s if self._answered_s else None
        return {
            "address": f"{self._controller.host}:{self._controller.reply_port}",
            "registered": self._is_registered,
            "answered_s_ago": silent_s,
            "trouble": self._trouble,
        }

    def close(self) -> None:
        self._store.dram.watch = None
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def _watch(self, is_here: bool, chunk: Chunk) -> None:
        """Under the lock of DRAM, so it must be quick. Chunks of one size and place are what others look up."""
        if chunk.pool == self._pool and self._store.dram.is_full(chunk):
            if len(self._events) >= _MOST_WAITING:
                self._must_sync = True  # nobody takes them: tell all again later
                self._events.clear()
            kind = wire.OpType.ADMIT if is_here else wire.OpType.EVICT
            self._events.append((kind, chunk.tag, chunk.keys[-KEY_BYTES:], next(self._sequence)))

    def _run(self) -> None:
        context = zmq.Context(io_threads=1)
        link = None if self._controller is None else _Link(context, self._controller, self._signer)
        due_s = 0.0
        try:
            while not self._is_closing:
                is_due = time.monotonic() >= due_s
                if is_due:
                    due_s = time.monotonic() + self._heartbeat_s
                try:
                    self._step(link, is_due)
                except Exception:
                    logger.exception("psrl: a report to the controller failed")
                self._pause(due_s)
            if link is not None:
                self._leave(link)
        except zmq.ZMQError as error:
            logger.warning("psrl: reports to the controller have ended: %s", error)
        finally:
            if link is not None:
                link.close()
            context.term()

    def _step(self, link: _Link | None, is_due: bool) -> None:
        if is_due:
            self._tidy()
        if link is not None:
            try:
                if is_due:
                    self._greet(link)
                if self._is_registered:
                    self._tell(link)
            except (NotAuthorized, wire.BadMessage, zmq.ZMQError) as error:
                self._note_trouble(str(error))

    def _pause(self, due_s: float) -> None:
        # Chunk events do not notify: they come on the scheduler's threads, a batch at a time is early enough.
        left_s = max(0.0, due_s - time.monotonic())
        with self._changed:
            if not self._is_closing and not (self._moves and self._is_registered):
                self._changed.wait(min(left_s, _BATCH_S) if self._is_registered else left_s)

    def _greet(self, link: _Link) -> None:
        if not self._is_registered:
            answer = link.ask(self._register())
            is_welcome = isinstance(answer, wire.RegisterRetMsg)
            link.use_for_heartbeats(answer.extra_config.get("heartbeat_url") if is_welcome else None)
            self._must_sync = True
        else:
            self._is_registered = False  # until it answers: it may be a new one that knows nobody
            answer = link.ask(self._heartbeat(), is_heartbeat=True)
        if answer is None:
            self._note_trouble(f"no answer in {_ANSWER_S:.0f} s")
            return
        if isinstance(answer, wire.ErrorMsg):
            self._note_trouble(answer.error)
            return
        self._is_registered = True
        self._answered_s = time.monotonic()
        self._trouble = ""
        if isinstance(answer, wire.HeartbeatRetMsg) and answer.commands:
            self._must_sync = True

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            logger.warning("psrl: the controller at %s: %s", self._controller, trouble)
        self._trouble = trouble

    def _tell(self, link: _Link) -> None:
        who = self._who
        if self._must_sync:
            self._must_sync = not self._sync(link)
        events: dict[str, list[wire.KVOpEvent]] = defaultdict(list)
        for _ in range(len(self._events)):
            try:
                kind, tag, key, number = self._events.popleft()
            except IndexError:
                break  # cleared meanwhile, to be told all again
            events[tag].append(wire.KVOpEvent(kind, self._name(tag, key), number))
        for tag, operations in events.items():
            for batch in _batches(operations):
                self._push(link, wire.BatchedKVOperationMsg(*who, _LOCATION, batch, tag))
        moves = [self._moves.popleft() for _ in range(len(self._moves))]
        if moves:
            self._push(link, wire.MovedMsg(*who, moves))

    def _push(self, link: _Link, message: wire.Message) -> None:
        if not link.push(message):
            self._must_sync = True

    def _sync(self, link: _Link) -> bool:
        """Tell all that is here. What changes meanwhile has a later number, and is told afterwards."""
        dram, who = self._store.dram, self._who
        held: dict[str, list[bytes]] = defaultdict(list)
        with dram.lock:
            for chunk in dram.index.chunks():
                if chunk.pool == self._pool and chunk.keys and dram.is_full(chunk):
                    held[chunk.tag].append(chunk.keys[-KEY_BYTES:])
        batches = [(tag, batch) for tag, keys in held.items() for batch in _batches(keys)]
        total, sync_id = sum(map(len, held.values())), uuid.uuid4().hex
        start = wire.FullSyncStartMsg(*who, _LOCATION, sync_id, total, len(batches))
        answer = link.ask(start)
        if not (isinstance(answer, wire.FullSyncStartRetMsg) and answer.accepted):
            return False
        for number, (tag, keys) in enumerate(batches):
            names = [self._name(tag, key) for key in keys]
            if not link.push(wire.FullSyncBatchMsg(*who, _LOCATION, sync_id, number, names, tag)):
                return False
        return link.push(wire.FullSyncEndMsg(*who, _LOCATION, sync_id, total))

    def _name(self, tag: str, key: bytes) -> int:
        return chunk_key(salted(key, self._engine.salt(self._pool, tag)))

    def _leave(self, link: _Link) -> None:
        mine = self._heartbeat()
        link.push(wire.DeRegisterMsg(mine.instance_id, mine.worker_id, mine.ip, mine.port))


class _Link:
    """The sockets to one controller. Not thread-safe."""

    def __init__(self, context: zmq.Context, controller: ControllerAddress, signer: Signer) -> None:
        self._context = context
        self._signer = signer
        host = f"[{controller.host}]" if ":" in controller.host else controller.host
        self._ask_url = self._heartbeat_url = f"tcp://{host}:{controller.reply_port}"
        self._push_socket = self._connect(zmq.PUSH, f"tcp://{host}:{controller.pull_port}")
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def use_for_heartbeats(self, url: str | None) -> None:
        url = self._ask_url if url is None else f"tcp://{url.removeprefix('tcp://')}"
        if url != self._heartbeat_url and self._heartbeat_url in self._sockets:
            self._give_up(self._heartbeat_url)
        self._heartbeat_url = url

    def ask(self, message: wire.Message, *, is_heartbeat: bool = False) -> Any:
        """The answer; None if there was none in time."""
        url = self._heartbeat_url if is_heartbeat else self._ask_url
        socket = self._sockets.get(url)
        if socket is None:
            socket = self._sockets[url] = self._connect(zmq.DEALER, url)
        frames = self._signer.sign(wire.encode(message))
        try:
            socket.send_multipart([b"", *frames], flags=zmq.NOBLOCK)
        except zmq.Again:
            return self._give_up(url)
        if not socket.poll(int(_ANSWER_S * 1000)):
            return self._give_up(url)
        answer = socket.recv_multipart()
        payload = answer[1:] if len(answer) > 1 and not answer[0] else answer
        return wire.decode(self._signer.check(payload), wire.ControllerReply)

    def push(self, message: wire.Message) -> bool:
        """False where the controller takes nothing now."""
        try:
            self._push_socket.send_multipart(self._signer.sign(wire.encode(message)), flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        for socket in (self._push_socket, *self._sockets.values()):
            socket.close()

    def _give_up(self, url: str) -> None:
        # A late answer must not be taken for the next one's.
        self._sockets.pop(url).close()

    def _connect(self, kind: int, url: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200 if kind == zmq.PUSH else 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        socket.connect(url)
        return socket


def _batches(items: list[Any]) -> list[list[Any]]:
    return [items[at : at + _KEYS_A_BATCH] for at in range(0, len(items), _KEYS_A_BATCH)]
