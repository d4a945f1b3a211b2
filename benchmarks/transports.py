"""What a move costs over what its bytes cost: each transport, end to end, against the bare way it uses.

    python benchmarks/transports.py [cma|tcp|nixl|idle ...] [--turns 7] [--idle-s 10] [--json FILE]

End to end is one move between two processes by way of their move workers: lease, handshake, reservation, bytes,
checksums at both ends, publication. The bare ways are, for CMA, a copy of the same bytes in one thread; for TCP,
sendall and recv_into of them over loopback; for NIXL, one agent writing them to another. Each is the best of
several turns, which alternate, since other work on the machine hits one or the other. Idle is what a worker without
work takes of a core.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "transfer"))

from peer import PeerOptions
from peer_process import PeerProcess, tokens_of
from results import Row, at_least, not_run, write_rows

from psrl_sglang.store.arena import Arena
from psrl_sglang.transfer.client import MoveClient

MIB = 1 << 20
SIZE_BYTES = 256 * MIB
TURNS = 7
IDLE_S = 10.0
TARGETS = {"cma": 0.60, "tcp": 0.80, "nixl": 0.85}
PAGES = 128
SEND_BYTES = 2 * MIB  # faster than all at once
PAGE_BYTES = SIZE_BYTES // PAGES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["cma", "tcp", "nixl", "idle"])
    parser.add_argument("--turns", type=int, default=TURNS, help="moves of which the best counts")
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="how long an idle worker is watched")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--nixl-target", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.nixl_target:
        nixl_target()
        return
    go_first()
    print(
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {SIZE_BYTES >> 20} MiB; best of {given.turns}"
    )
    bare = {"cma": memcpy, "tcp": loopback, "nixl": nixl_write}
    rows: list[Row] = []
    if not has_nixl():
        print("nixl: not installed, not run")
        rows.append(not_run("transports", "nixl", "neither nixl-cu12 nor nixl-cu13 is installed"))
        del bare["nixl"]
    for name in given.what:
        if name == "idle":
            rows += [report_idle(channel, given.idle_s) for channel in bare]
        elif name in bare:
            with bare[name]() as bare_once:
                for chunk_bytes in (32 * MIB, 4 * MIB):
                    rows += report(name, chunk_bytes, bare_once, given.turns)
    if given.json is not None:
        write_rows(given.json, rows)


def has_nixl() -> bool:
    for package in ("nixl-cu12", "nixl-cu13"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        return True
    return False


def go_first() -> None:
    """Where it is allowed: else what else runs on the machine is measured too, and more of it with two processes
    than with one."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        print("not allowed to go before other processes: the ratios are those of a busy machine")


def report(name: str, chunk_bytes: int, bare_once: Callable[[], float], turns: int) -> list[Row]:
    with moves(name, chunk_bytes) as move_once:
        pairs = [(bare_once(), move_once()) for _ in range(turns)]
    bare_s, move_s = (min(one) for one in zip(*pairs, strict=True))
    ratio, target = bare_s / move_s, TARGETS[name]
    print(
        f"{name}, chunks of {chunk_bytes // MIB} MiB: {SIZE_BYTES / move_s / 1e9:.2f} GB/s end to end, "
        f"{SIZE_BYTES / bare_s / 1e9:.2f} bare, ratio {ratio:.2f} (target {target:.2f})"
        f"{'' if ratio >= target else '  BELOW'}"
    )
    case = f"{name}, chunks of {chunk_bytes // MIB} MiB"
    rates = {"end to end": SIZE_BYTES / move_s / 1e9, "the bare way": SIZE_BYTES / bare_s / 1e9}
    rows = [
        Row(benchmark="transports", case=case, metric=metric, value=rate, unit="GB/s")
        for metric, rate in rates.items()
    ]
    rows.append(
        Row(
            benchmark="transports",
            case=case,
            metric="end to end / the bare way",
            value=ratio,
            unit="ratio",
            target=at_least(target),
        )
    )
    return rows


def report_idle(channel: str, seconds: float) -> Row:
    share = idle_share(channel, seconds)
    print(f"idle {channel}: {share:.2%} of a core")
    return Row(
        benchmark="transports",
        case=channel,
        metric="an idle worker's CPU",
        value=share * 100,
        unit="% of a core",
    )


@contextmanager
def moves(channel: str, chunk_bytes: int) -> Iterator[Callable[[], float]]:
    chunk_pages = chunk_bytes // PAGE_BYTES
    slots = SIZE_BYTES // chunk_bytes

    def options(name: str) -> PeerOptions:
        return PeerOptions(
            instance_id=name, channel=channel, page_bytes=PAGE_BYTES, chunk_pages=chunk_pages, slots=slots
        )

    tokens = tokens_of(PAGES)
    with PeerProcess(options("a")) as a, PeerProcess(options("b")) as b, MoveClient() as client:
        a.ask("compute", tokens)

        def once() -> float:
            b.ask("forget_all")
            result = client.transfer_direct(tokens, a.command, b.data, "1", timeout_s=30.0)
            assert result.size_bytes == SIZE_BYTES, result
            assert result.transport == channel, result
            return result.seconds

        once()
        assert b.ask("verified", tokens) == PAGES
        yield once


@contextmanager
def memcpy() -> Iterator[Callable[[], float]]:
    source, destination = Arena(1, SIZE_BYTES), Arena(1, SIZE_BYTES)

    def once() -> float:
        began_s = time.perf_counter()
        np.copyto(destination.memory, source.memory)
        return time.perf_counter() - began_s

    yield once


@contextmanager
def loopback() -> Iterator[Callable[[], float]]:
    """To a child process, which answers with a byte when it has all."""
    source = Arena(1, SIZE_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if not child:
            receive_all(server.getsockname()[1])
        with server.accept()[0] as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def once() -> float:
                began_s = time.perf_counter()
                for at in range(0, SIZE_BYTES, SEND_BYTES):
                    sock.sendall(source.memory[at : at + SEND_BYTES])
                sock.recv(1)
                return time.perf_counter() - began_s

            yield once
    os.waitpid(child, 0)


def receive_all(port: int) -> None:
    view = memoryview(Arena(1, SIZE_BYTES).memory)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while True:
            at = 0
            while at < SIZE_BYTES:
                got = sock.recv_into(view[at : at + SEND_BYTES])
                if not got:
                    os._exit(0)
                at += got
            sock.sendall(b"1")


@contextmanager
def nixl_write() -> Iterator[Callable[[], float]]:
    """As few and large requests as NIXL does well with."""
    from psrl_sglang.transfer.nixl import NixlTransport

    source = Arena(1, SIZE_BYTES)
    transport = NixlTransport(source)
    agent, step = transport._agent, 64 * MIB
    target = subprocess.Popen(
        [sys.executable, __file__, "--nixl-target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with target:
        assert target.stdout is not None
        way = transport.connect("target", bytes.fromhex(target.stdout.readline().decode()))

        def once() -> float:
            began_s = time.perf_counter()
            for at in range(0, SIZE_BYTES, step):
                local = agent.get_xfer_descs([(source.address + at, step, 0)], "DRAM")
                remote = agent.get_xfer_descs([(way.address + at, step, 0)], "DRAM")
                handle = agent.initialize_xfer("WRITE", local, remote, way.agent)
                state = agent.transfer(handle)
                while state == "PROC":
                    state = agent.check_xfer_state(handle)
                assert state == "DONE"
                agent.release_xfer_handle(handle)
            return time.perf_counter() - began_s

        yield once
        transport.close()


def nixl_target() -> None:
    from psrl_sglang.transfer.nixl import NixlTransport

    transport = NixlTransport(Arena(1, SIZE_BYTES))
    print(transport.offer().hex(), flush=True)
    sys.stdin.read()
    transport.close()


def idle_share(channel: str, seconds: float) -> float:
    """Of a core, by a worker that has moved something, over so many seconds."""
    tokens = tokens_of(8)
    with ExitStack() as running:
        a, b = (
            running.enter_context(PeerProcess(PeerOptions(instance_id=name, channel=channel, heartbeat_s=5.0)))
            for name in "ab"
        )
        client = running.enter_context(MoveClient())
        a.ask("compute", tokens)
        assert client.transfer_direct(tokens, a.command, b.data, "1").ok
        time.sleep(1.0)
        before_s = [peer.cpu_s() for peer in (a, b)]
        time.sleep(seconds)
        return max(peer.cpu_s() - was_s for peer, was_s in zip((a, b), before_s, strict=True)) / seconds


if __name__ == "__main__":
    main()
