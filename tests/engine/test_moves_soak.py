"""A hundred sessions that go back and forth between two engines under load, their KV always moved after them."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from move_support import assert_no_move_left, movable, move, moves
from support import assert_books_hold, difference, prompt
from tier_support import assert_nothing_held, start, total

pytestmark = pytest.mark.engine
CLIENTS = 4
NEW_TOKENS = 24
TURNS = 6  # before a session ends and another one takes its place
CHECKED_SHARE = 0.04
GIVEN_UP_SHARE = 0.05
RSS_SLACK = 64 << 20


class Session:
    """One trajectory: each turn goes to the other engine, behind a move."""

    def __init__(self, number: int) -> None:
        self.tokens = prompt(9000 + number, 200 + number % 160)
        self.turn = 0

    def play(self, engines, source: random.Random) -> float | None:
        """One turn; the worst difference to computing it from nothing, where that was checked."""
        here, there = engines[self.turn % 2], engines[1 - self.turn % 2]
        if self.turn:
            limit_s = 0.002 if source.random() < GIVEN_UP_SHARE else 20.0
            move(self.tokens, there, here, timeout_s=limit_s)
        answer = here.generate(self.tokens, NEW_TOKENS)
        worst = None
        if source.random() < CHECKED_SHARE:
            fresh = here.generate(self.tokens, NEW_TOKENS, cache_salt=f"fresh-{source.random()}")
            assert fresh.cached_tokens == 0
            assert fresh.output_ids == answer.output_ids
            worst = difference(fresh, answer)
        self.tokens += [*answer.output_ids, *prompt(source.randrange(10**6), 40)]
        self.turn += 1
        return worst


def resident_bytes(group: int) -> int:
    total_bytes = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if os.getpgid(int(process.name)) == group:
                    total_bytes += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            except OSError:
                continue
    return total_bytes


def open_files(group: int) -> int:
    count = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if os.getpgid(int(process.name)) == group:
                    count += len(list((process / "fd").iterdir()))
            except OSError:
                continue
    return count


@pytest.mark.parametrize(
    ("sessions", "seconds"),
    [(16, 12.0), pytest.param(100, 600.0, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])],
)
def test_lmcache_c8_sessions_that_go_to_and_fro_are_always_answered_right_and_leave_nothing(
    server_factory, sessions, seconds
):
    args = ("--max-total-tokens", "8192", "--max-running-requests", "8")
    engines = [start(server_factory, movable(), *args) for _ in range(2)]
    end_s = time.monotonic() + seconds
    played: list[float | None] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        source = random.Random(number)
        mine = [Session(one) for one in range(number, sessions, CLIENTS)]
        following = sessions
        while time.monotonic() < end_s:
            index = source.randrange(len(mine))
            worst = mine[index].play(engines, source)
            if mine[index].turn >= TURNS:
                following += CLIENTS
                mine[index] = Session(number + following)
            with lock:
                played.append(worst)

    with ThreadPoolExecutor(CLIENTS) as threads:
        half = [threads.submit(client, number) for number in range(CLIENTS)]
        time.sleep(seconds / 2)
        before = [(resident_bytes(engine.pid), open_files(engine.pid)) for engine in engines]
        for one in half:
            one.result()
    checked = [worst for worst in played if worst is not None]
    assert len(checked) > 3
    assert max(checked) <= 1e-5
    assert_no_move_left(*engines)
    for engine, (resident, files) in zip(engines, before, strict=True):
        assert total(engine, "moves", direction="out", outcome="moved") > len(played) / 4
        assert total(engine, "checksum_failures") == 0
        assert_nothing_held(engine)
        assert_books_hold(engine)
        assert resident_bytes(engine.pid) <= resident + RSS_SLACK
        assert open_files(engine.pid) <= files + 8
        print(moves(engine)["moves"], len(played), "turns", len(checked), "checked")
        engine.stop(grace_s=5.0)
