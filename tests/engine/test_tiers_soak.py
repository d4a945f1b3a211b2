"""Agent sessions by the thousand over a small pool, little DRAM and a bounded disk: nothing decays, nothing grows.

Every block of turns has the same sessions, only with other tokens, so the hit rates of two blocks can be compared.
The short form runs in CI; ``-m slow`` runs 10,000 turns.
"""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support import assert_books_hold, assert_same, counters, prompt
from tier_support import (
    assert_nothing_held,
    cached_from,
    disk_bytes,
    gib,
    settle,
    start,
    tier_status,
    total,
    with_disk,
)

from psrl_sglang.lab.sessions import CODING_AGENT, Limits, Session, generate_sessions

pytestmark = pytest.mark.engine
CLIENTS = 8
SESSIONS_AT_A_TIME = 3  # of each client, turn by turn: together more than the device holds
DISK_CHUNKS = 192
CHECKED_SHARE = 0.03
GIVEN_UP_SHARE = 0.03
RSS_SLACK = 64 << 20
LIMITS = Limits(turns=20, sequence_tokens=1400)
# Little that all sessions share, and short answers: what is tried here is the cache.
PROFILE = replace(CODING_AGENT, head=(3000,) * 5, output=(32, 64, 96, 160, 320))
SCALE = 1 / 16


class Block:
    """So many turns of sessions that only differ from those of other blocks in their tokens."""

    def __init__(self, server, number: int, sessions: tuple[Session, ...]) -> None:
        self.prompt_tokens = 0
        self.cached = dict.fromkeys(("device", "host", "storage"), 0)
        self.turns = 0
        self.checks = []
        self._server = server
        self._lock = threading.Lock()
        mine = [replace(session, session_id=f"{number}/{session.session_id}") for session in sessions]
        with ThreadPoolExecutor(CLIENTS) as clients:
            jobs = [clients.submit(self._play, mine[client::CLIENTS], client) for client in range(CLIENTS)]
            for job in jobs:
                job.result()

    @property
    def hit_rate(self) -> float:
        return sum(self.cached.values()) / self.prompt_tokens

    def _play(self, sessions: list[Session], seed: int) -> None:
        source = random.Random(seed)
        waiting = [(session, 0, []) for session in sessions]
        playing = [waiting.pop() for _ in range(min(SESSIONS_AT_A_TIME, len(waiting)))]
        while playing:
            session, turn, history = playing.pop(0)
            asked = session.prompt(turn, history)
            if source.random() < GIVEN_UP_SHARE:
                self._give_up(asked + [source.randrange(512) for _ in range(100)])
            answer = self._server.generate(asked, session.turns[turn].output_tokens)
            with self._lock:
                self.turns += 1
                self.prompt_tokens += len(asked)
                for tier, tokens in cached_from(answer).items():
                    self.cached[tier] += tokens
                if source.random() < CHECKED_SHARE:
                    self.checks.append((asked, answer))
            if turn + 1 < len(session.turns):
                playing.append((session, turn + 1, asked + list(answer.output_ids)))
            elif waiting:
                playing.append(waiting.pop())

    def _give_up(self, asked: list[int]) -> None:
        """A client that hangs up, anywhere between its arrival and its last token."""
        body = {"input_ids": asked, "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
        try:
            httpx.post(f"{self._server.url}/generate", json=body, timeout=0.08, trust_env=False)
        except httpx.TimeoutException:
            pass


def sessions_of(turns: int) -> tuple[Session, ...]:
    """Sessions that have together so many turns."""
    sessions: list[Session] = []
    left = turns
    for session in generate_sessions(PROFILE, turns, seed=14, scale=SCALE, limits=LIMITS):
        sessions.append(replace(session, turns=session.turns[:left]))
        left -= len(sessions[-1].turns)
        if not left:
            return tuple(sessions)
    raise AssertionError("too few sessions")


def resident_bytes(group: int) -> int:
    """What all processes of a server hold in memory."""
    size = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                size += int((entry / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # it has ended
            pass
    return size


@pytest.mark.parametrize(
    ("blocks", "turns", "noise"),
    [(2, 100, 0.05), pytest.param(10, 1000, 0.01, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_rows_13_14_17_thousands_of_turns_decay_nothing_and_leak_nothing(
    server_factory, models, fresh, tmp_path, blocks, turns, noise
):
    sglang = {"namespace": "soak", "read_ahead_timeout_s": 30.0, "decode_checkpoint_tokens": 16}
    options = {"chunks": 20, "save_unfull_chunk": True, "sglang": sglang}
    settings = with_disk(tmp_path, disk_gb=gib(DISK_CHUNKS), **options)
    server = start(server_factory, settings, "--max-running-requests", "8", "--max-total-tokens", "5120")
    played, resident = [], []
    for number in range(blocks):
        block = Block(server, number, sessions_of(turns))
        assert block.turns == turns
        for asked, answer in block.checks:
            assert_same(answer, fresh(1, asked, len(answer.output_ids)))
        played.append(block)
        settle(server)
        assert disk_bytes(tmp_path) <= gib(DISK_CHUNKS) * 2**30
        assert_nothing_held(server)
        assert_books_hold(server)
        resident.append(resident_bytes(server.pid))
        print(
            f"\nblock {number}: hit rate {block.hit_rate:.4f} ({block.cached}), checked {len(block.checks)}, "
            f"resident {resident[-1] / 2**20:.0f} MiB, disk {disk_bytes(tmp_path) / 2**20:.0f} MiB",
            flush=True,
        )
        # The same weights under a new name: what the tiers are full of now is dead.
        assert server.update_weights(models[1], version=f"block-{number}").success
    first, last = played[0], played[-1]
    assert first.cached["storage"] > 0
    assert last.cached["host"] + last.cached["storage"] > 0
    assert last.hit_rate >= first.hit_rate - noise
    assert resident[-1] - resident[min(1, blocks - 2)] < RSS_SLACK
    shown = counters(server)
    assert shown["stale_tokens"] == 0
    assert total(server, "errors") == total(server, "checksum_failures") == 0
    assert (
        tier_status(server)["tiers"]["disk"]["used_bytes"]
        <= tier_status(server)["tiers"]["disk"]["budget_bytes"]
    )
    assert_same(server.generate(prompt(14), 8), fresh(1, prompt(14), 8))
