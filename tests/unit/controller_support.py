"""A controller on free ports in a thread of its own, and workers that are nothing but sockets."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import msgspec
import zmq

from psrl_sglang.controller.service import ControllerService, Options, Ports
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.auth import Signer

SECRET = b"a secret of the whole fleet"
DRAM = "LocalCPUBackend"
PAGE, CHUNK = 16, 64

Handler = Callable[[Any], wire.Message | None]


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.01)


def options(**changes: Any) -> Options:
    return Options(**{"http_port": 0, "pull_port": 0, "reply_port": 0, **changes})


class RunningController:
    """`ControllerService` in a thread; HTTP through `http`."""

    def __init__(self, chosen: Options | None = None) -> None:
        self._options = chosen or options()
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        if self._problem is not None:
            raise self._problem
        self.ports: Ports = self.service.ports
        self.url = f"http://127.0.0.1:{self.ports.http}"
        headers = {"authorization": f"Bearer {self._options.token}"} if self._options.token else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=20.0, trust_env=False)

    def _serve(self) -> None:
        async def main() -> None:
            try:
                self.service = ControllerService(self._options)
                self._loop = asyncio.get_running_loop()
            finally:
                self._ready.set()
            await self.service.run()

        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - whatever it was, the test must see it
            self._problem = error
            self._ready.set()

    @property
    def core(self):
        return self.service.core

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics").raise_for_status().text
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + " "))

    def stop(self) -> None:
        if self._thread.is_alive():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.service.stop)
            self._thread.join(10)
            self.http.close()
        assert not self._thread.is_alive(), "the controller did not end"
        if self._problem is not None:
            raise self._problem

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def status(**changes: Any) -> wire.WorkerStatus:
    values = {
        "incarnation": "start-1",
        "version": "7",
        "tag": "7",
        "window": ["7"],
        "layout": "tiny/float32",
        "page_tokens": PAGE,
        "chunk_tokens": CHUNK,
        "rank": 0,
        "ranks": 1,
        "transports": ["tcp"],
    }
    return wire.WorkerStatus(**{**values, **changes})


class FakeWorker:
    """A worker's sockets. ``answer`` makes the reply to a command; None leaves it unanswered."""

    def __init__(
        self,
        ports: Ports,
        instance_id: str = "A",
        worker_id: int = 0,
        *,
        answer: Handler | None = None,
        told: wire.WorkerStatus | None = None,
        foreign: bool = False,
        secret: bytes = b"",
        peer: str | None = "127.0.0.1:1",
    ) -> None:
        self.instance_id, self.worker_id, self.peer = instance_id, worker_id, peer
        self.status = None if foreign else told or status(rank=worker_id)
        self.commands: list[Any] = []
        self._answer = answer or (lambda command: wire.ErrorMsg("not scripted"))
        self._signer = Signer(secret)
        self._ports = ports
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.REP)
        self.port = self._commands.bind_to_random_port("tcp://127.0.0.1")
        self._push = self._context.socket(zmq.PUSH)
        self._push.connect(f"tcp://127.0.0.1:{ports.pull}")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def place(self) -> dict[str, Any]:
        return {"instance_id": self.instance_id, "worker_id": self.worker_id}

    def ask(self, message: wire.Message, *, kind: int = zmq.DEALER) -> Any:
        """The controller's answer."""
        return self.ask_raw(self._signer.sign(wire.encode(message)), kind=kind)

    def ask_raw(self, frames: list[bytes], *, kind: int = zmq.DEALER) -> Any:
        with self._context.socket(kind) as socket:
            socket.linger, socket.rcvtimeo = 0, 5000
            socket.connect(f"tcp://127.0.0.1:{self._ports.reply}")
            socket.send_multipart([b"", *frames] if kind == zmq.DEALER else frames)
            answer = socket.recv_multipart()
        return wire.decode(
            self._signer.check(answer[1:] if kind == zmq.DEALER else answer), wire.ControllerReply
        )

    def register(self, **options: Any) -> Any:
        return self.ask(self._presence(wire.RegisterMsg), **options)

    def heartbeat(self) -> Any:
        return self.ask(self._presence(wire.HeartbeatMsg))

    def _presence(self, kind: Any) -> Any:
        return kind(**self.place, ip="127.0.0.1", port=self.port, peer_init_url=self.peer, psrl=self.status)

    def push(self, *messages: wire.Message) -> None:
        for message in messages:
            self.push_raw(self._signer.sign(wire.encode(message)))

    def push_raw(self, frames: list[bytes]) -> None:
        self._push.send_multipart(frames)

    def admit(self, keys: list[int], first_seq: int = 0, tag: str = "7", location: str = DRAM) -> None:
        operations = [wire.KVOpEvent(wire.OpType.ADMIT, key, first_seq + at) for at, key in enumerate(keys)]
        self.push(wire.BatchedKVOperationMsg(**self.place, location=location, operations=operations, tag=tag))

    def full_sync(self, batches: list[list[int]], sync_id: str = "sync-1", tag: str = "7") -> Any:
        """Start, batches and end; returns the answer to the start."""
        place = {**self.place, "location": DRAM, "sync_id": sync_id}
        total = sum(map(len, batches))
        accepted = self.ask(wire.FullSyncStartMsg(**place, total_keys=total, batch_count=len(batches)))
        for batch_id, keys in enumerate(batches):
            self.push(wire.FullSyncBatchMsg(**place, batch_id=batch_id, keys=keys, tag=tag))
        self.push(wire.FullSyncEndMsg(**place, actual_total_keys=total))
        return accepted

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(5)
        self._context.destroy(linger=0)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if not self._commands.poll(50):
                continue
            payload = self._signer.check(self._commands.recv_multipart())
            command = wire.decode(payload, wire.Command)
            self.commands.append(command)
            reply = self._answer(command)
            if reply is None:
                # A REP that never answers hears nothing more; that is how a wedged worker looks.
                self._stopping.wait()
                return
            raw = reply if isinstance(reply, bytes) else wire.encode(reply)
            self._commands.send_multipart(self._signer.sign(raw))


def raw(message: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(message)
