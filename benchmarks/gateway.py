"""What the gateway costs: latency and CPU of a request through it, through smg, and without either.

    python benchmarks/gateway.py [--smg COMMAND] [--sglang-router PYTHON] [--routers DIR] [--requests 400]

A fast upstream answers everything with the same bytes, so what is measured is the proxy. Requests of the three ways
are interleaved, one at a time; CPU is that of the proxy's process, over the whole run. Without `--smg` and
`--sglang-router` only the gateway is measured:

    python -m venv /tmp/smg && /tmp/smg/bin/pip install smg==1.13.0 sglang-router==0.3.2
    python benchmarks/gateway.py --smg /tmp/smg/bin/smg --sglang-router /tmp/smg/bin/python

`--routers` names the folder that tests/routers/install.sh filled, and stands for both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import uvloop
from results import Row, write_rows

_REPLY = json.dumps(
    {"text": "", "output_ids": [1], "meta_info": {"id": "1", "finish_reason": {"type": "length"}}}
)
_INFO = json.dumps({"model_path": "m", "weight_version": "1", "served_model_name": "m", "is_generation": True})
_WARM_UP = 20
_BODIES = {
    "69 B": b'{"input_ids":[1,2,3,4],"sampling_params":{"max_new_tokens":1}}      ',
    "232 kB": json.dumps(
        {"input_ids": [100000 + at % 30000 for at in range(29000)], "sampling_params": {"max_new_tokens": 1}}
    ).encode(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smg", default="", help="The smg command to compare with.")
    parser.add_argument("--sglang-router", default="", help="A Python that has it.")
    parser.add_argument("--routers", type=Path, help="The folder tests/routers/install.sh filled.")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--upstream", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upstream:
        uvloop.run(_upstream(options.upstream))
        return
    if options.routers is not None:
        here = str(options.routers.resolve())
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))
        options.smg = options.smg or f"{here}/bin/smg"
        options.sglang_router = options.sglang_router or sys.executable
    rows: list[Row] = []
    with ExitStack() as owned:
        upstream = f"http://127.0.0.1:{_free_port()}"
        _start(owned, [sys.executable, __file__, "--upstream", upstream.rsplit(":", 1)[1]], upstream)
        ways, pids = {"direct": upstream}, {}
        here = Path(sys.executable).parent
        port = _free_port()
        ways["gateway"] = f"http://127.0.0.1:{port}"
        command = [str(here / "psrl-sglang"), "gateway", "--worker", upstream, "--port", str(port)]
        pids["gateway"] = _start(owned, command, ways["gateway"])
        if options.smg:
            port = _free_port()
            ways["smg"] = f"http://127.0.0.1:{port}"
            command = [options.smg, "launch", "--worker-urls", upstream, "--policy", "round_robin"]
            command += ["--port", str(port), "--prometheus-port", str(_free_port()), "--log-level", "error"]
            pids["smg"] = _start(owned, command, ways["smg"])
        if options.sglang_router:
            port = _free_port()
            ways["sglang-router"] = f"http://127.0.0.1:{port}"
            command = [options.sglang_router, "-m", "sglang_router.launch_router", "--worker-urls", upstream]
            command += ["--policy", "round_robin", "--port", str(port), "--log-level", "error"]
            command += ["--prometheus-port", str(_free_port())]
            pids["sglang-router"] = _start(owned, command, ways["sglang-router"])
        for name, body in _BODIES.items():
            count = options.requests if len(body) < 1000 else max(50, options.requests // 3)
            rows += _compare(name, body, count, ways, pids)
    if options.json is not None:
        write_rows(options.json, rows)


def _compare(name: str, body: bytes, count: int, ways: dict[str, str], pids: dict[str, int]) -> list[Row]:
    taken: dict[str, list[float]] = {way: [] for way in ways}
    before_s: dict[str, float] = {}
    with httpx.Client(timeout=30, trust_env=False) as client:
        for round_number in range(count + _WARM_UP):
            for way, url in ways.items():
                start_s = time.perf_counter()
                reply = client.post(
                    f"{url}/generate", content=body, headers={"content-type": "application/json"}
                )
                took_s = time.perf_counter() - start_s
                assert reply.status_code == 200, (way, reply.status_code, reply.text[:200])
                if round_number >= _WARM_UP:
                    taken[way].append(took_s)
            if round_number == _WARM_UP - 1:
                before_s = {way: _cpu_s(pid) for way, pid in pids.items()}
        cpu_s = {way: _cpu_s(pid) - before_s[way] for way, pid in pids.items()}
    print(f"{name} bodies, {count} requests each, one at a time")
    for way, times in taken.items():
        ordered = sorted(times)
        cpu = f", CPU {1e3 * cpu_s[way] / count:.2f} ms" if way in pids else ""
        print(
            f"  {way:13} median {1e3 * statistics.median(ordered):6.2f} ms  p10 {1e3 * ordered[count // 10]:6.2f}  "
            f"min {1e3 * ordered[0]:6.2f}{cpu}"
        )
    for way in cpu_s.keys() - {"gateway"}:
        latency = statistics.median(taken["gateway"]) / statistics.median(taken[way])
        print(f"  gateway / {way}: latency {latency:.2f}, CPU {cpu_s['gateway'] / cpu_s[way]:.2f}")
    return _tidy(len(body), count, taken, cpu_s)


def _tidy(size_bytes: int, count: int, taken: dict[str, list[float]], cpu_s: dict[str, float]) -> list[Row]:
    def row(case: str, metric: str, value: float, unit: str) -> Row:
        return Row(
            benchmark="gateway",
            case=case,
            x_name="bytes of the body",
            x=size_bytes,
            metric=metric,
            value=value,
            unit=unit,
        )

    medians_s = {way: statistics.median(times) for way, times in taken.items()}
    rows = [row(way, "latency, median", 1e3 * median_s, "ms") for way, median_s in medians_s.items()]
    rows += [row(way, "latency, p10", 1e3 * sorted(times)[count // 10], "ms") for way, times in taken.items()]
    rows += [row(way, "CPU a request", 1e3 * seconds / count, "ms") for way, seconds in cpu_s.items()]
    for way in (way for way in medians_s if way != "gateway"):
        rows.append(
            row(f"gateway / {way}", "ratio of latencies", medians_s["gateway"] / medians_s[way], "ratio")
        )
    for way in (way for way in cpu_s if way != "gateway"):
        rows.append(row(f"gateway / {way}", "ratio of CPU", cpu_s["gateway"] / cpu_s[way], "ratio"))
    return rows


def _cpu_s(pid: int) -> float:
    """Of all threads, to the nanosecond; `/proc/<pid>/stat` has ticks of 10 ms."""
    total_ns = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            total_ns += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
        except OSError:
            continue
    return total_ns / 1e9


def _start(owned: ExitStack, command: list[str], url: str) -> int:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    owned.callback(process.wait)
    owned.callback(process.send_signal, signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while True:
        try:
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
            if httpx.post(f"{url}/generate", json=body, timeout=2, trust_env=False).status_code == 200:
                return process.pid
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise SystemExit(f"{command[0]} did not start")
        time.sleep(0.2)


async def _upstream(port: int) -> None:
    class Protocol(asyncio.Protocol):
        def connection_made(self, transport) -> None:
            self._transport, self._data = transport, b""

        def data_received(self, data: bytes) -> None:
            self._data += data
            while (end := self._data.find(b"\r\n\r\n")) >= 0:
                head = self._data[:end].lower()
                at = head.find(b"content-length:")
                length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
                if len(self._data) < end + 4 + length:
                    return
                self._data = self._data[end + 4 + length :]
                text = _REPLY if head.startswith(b"post") else _INFO
                start = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                self._transport.write(f"{start}content-length: {len(text)}\r\n\r\n{text}".encode())

    server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", port)
    await server.serve_forever()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
