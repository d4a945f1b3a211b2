"""What the tests of moves share: engines that may send KV to each other, and how one is asked to."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from support import status, wait_until
from tier_support import tiers

from psrl_sglang.lab.servers import Server
from psrl_sglang.transfer.client import MoveClient, MoveResult

MOVE_S = 20.0
TOKEN = "a-token-of-the-trainer"
SECRET = "a secret of the whole fleet"


def movable(*, lmcache: dict[str, Any] | None = None, sglang: dict[str, Any] | None = None) -> dict[str, Any]:
    """Settings of an engine that moves KV, with DRAM for many prompts."""
    ours = {"move_policy": "always", **(sglang or {})}
    settings = tiers(sglang=ours, **{"enable_p2p": True, "p2p_transfer_channel": "auto", **(lmcache or {})})
    settings["psrl"]["rollout_coordination"] = {
        "routing_strategy": {"kv_transfer": {"transfer_timeout_ms": int(MOVE_S * 1000)}}
    }
    return settings


def pulling(mode: str = "sync", *, timeout_ms: int = 20_000, **sections: Any) -> dict[str, Any]:
    """Settings of an engine that fetches KV for the requests it gets."""
    settings = movable(**sections)
    kv_transfer = settings["psrl"]["rollout_coordination"]["routing_strategy"]["kv_transfer"]
    kv_transfer.update(enable=True, transfer_mode=mode, transfer_timeout_ms=timeout_ms)
    return settings


def ask(server: Server, tokens: list[int], new_tokens: int = 8, **headers: str) -> tuple[dict[str, Any], Any]:
    """A reply of /generate and its headers."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    reply = server.post("/generate", body, headers=named)
    assert reply.status_code == 200, reply.text
    return reply.json(), reply.headers


def reused(reply: dict[str, Any]) -> dict[str, int]:
    details = reply["meta_info"]["cached_tokens_details"] or {}
    return {tier: details.get(tier, 0) for tier in ("device", "host")}


def moves(server: Server) -> dict[str, Any]:
    return status(server)["moves"]


def move(
    tokens: list[int],
    source: Server,
    destination: Server,
    version: str = "1",
    *,
    timeout_s: float = MOVE_S,
    **options: Any,
) -> MoveResult:
    """Between the first ranks, as a router without a controller would."""
    return MoveClient().transfer_direct(
        tokens,
        moves(source)["command_address"],
        moves(destination)["data_address"],
        version,
        timeout_s=timeout_s,
        **options,
    )


def assert_no_move_left(*servers: Server) -> None:
    for server in servers:
        wait_until(lambda server=server: not _moving(server), "all moves have ended")
        assert not moves(server)["pins"]["held"]


def _moving(server: Server) -> dict[str, int]:
    counts = moves(server)["moves"]
    names = ("running_out", "waiting_out", "running_in", "quarantined", "held_after_failure")
    return {name: counts[name] for name in names if counts[name]}


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free now."""
    for first in range(random.randrange(20000, 30000), 32000, count):
        try:
            with ExitStack() as held:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")


def rank_addresses(first_port: int, ranks: int) -> tuple[list[str], list[str]]:
    """Where the ranks of an engine with ``move_port`` take commands, and where they take KV."""
    ports = range(first_port, first_port + 2 * ranks, 2)
    return [f"127.0.0.1:{port}" for port in ports], [f"127.0.0.1:{port + 1}" for port in ports]


class Controller:
    """``psrl-sglang controller`` as a process, always on the same ports."""

    def __init__(self, directory):
        first = free_ports(3)
        self.http, self.pull, self.reply = range(first, first + 3)
        self._token, self.secret = directory / "token", directory / "secret"
        self._token.write_text(TOKEN)
        self.secret.write_text(SECRET)
        self.start()

    def start(self):
        command = [str(Path(sys.executable).with_name("psrl-sglang")), "controller", "--json-ready"]
        command += [
            "--http-port",
            str(self.http),
            "--pull-port",
            str(self.pull),
            "--reply-port",
            str(self.reply),
        ]
        command += ["--token-file", str(self._token), "--secret-file", str(self.secret), "--lease-s", "5"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        json.loads(self._process.stdout.readline())

    def stop(self):
        self._process.terminate()
        self._process.wait(20)

    def engine(self, name, settings):
        """Settings of an engine that reports here, by ``movable`` or what is like it."""
        host = {
            "controller_host": "127.0.0.1",
            "controller_base_port": self.http,
            "controller_pull_port": self.pull,
            "controller_reply_port": self.reply,
        }
        ours = {"instance_id": name, "secret_file": str(self.secret), "heartbeat_s": 0.5}
        return settings(lmcache=host, sglang=ours)

    def post(self, path, **body):
        headers = {"authorization": f"Bearer {TOKEN}"}
        url = f"http://127.0.0.1:{self.http}{path}"
        return httpx.post(url, json=body, headers=headers, timeout=30, trust_env=False)

    def knows(self, session):
        headers = {"authorization": f"Bearer {TOKEN}"}
        url = f"http://127.0.0.1:{self.http}/sessions/{session}"
        return httpx.get(url, headers=headers, timeout=30, trust_env=False).status_code == 200

    def holders(self, tokens):
        return self.post("/lookup", tokens=tokens).raise_for_status().json()["layout_info"]

    def workers(self, name):
        found = self.post("/query_worker_info", instance_id=name)
        return found.json()["worker_infos"] if found.status_code == 200 else []

    def move(self, tokens, source, destination, **options):
        places = {"old_position": [source, "LocalCPUBackend"], "new_position": [destination, "LocalCPUBackend"]}
        return self.post("/move", tokens=tokens, should_copy=True, **places, **options)
