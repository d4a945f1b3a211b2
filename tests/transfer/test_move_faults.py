"""A move whose other side is killed or stopped before, while or after the bytes go, on every transport."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from peer import PeerOptions
from peer_process import PeerProcess, eventually, is_settled, tokens_of

from psrl_sglang.transfer.client import MoveClient, MoveResult

SLACK_S = 1.5
PAGES = 40
PACE_S = 0.04
TIMEOUT_S = 0.8
TRANSPORTS = [("cma", ""), ("tcp", ""), ("nixl", ""), pytest.param(("nixl", "tcp"), marks=pytest.mark.slow)]
SELDOM = pytest.mark.slow  # what another transport, or another moment, tests as well in the shorter run
seeds = itertools.count(1)


@pytest.fixture(scope="module", params=TRANSPORTS, ids=lambda one: "-over-".join(filter(None, one)))
def transport(request: pytest.FixtureRequest) -> tuple[str, str]:
    if request.param[0] == "nixl":
        pytest.importorskip("nixl_cu12")
    return request.param


@pytest.fixture(scope="module")
def client() -> Iterator[MoveClient]:
    with MoveClient() as client:
        yield client


def peer(name: str, transport: tuple[str, str], **options: object) -> PeerProcess:
    given = PeerOptions(instance_id=name, channel=transport[0], slots=64, heartbeat_s=0.1, quarantine_s=0.4)
    given = given.__class__(**{**{f: getattr(given, f) for f in given.__dataclass_fields__}, **options})  # type: ignore[arg-type]
    return PeerProcess(given, tls=transport[1])


@pytest.fixture(scope="module")
def survivors(transport: tuple[str, str]) -> Iterator[tuple[PeerProcess, PeerProcess]]:
    """A source and a destination that stay."""
    with peer("a", transport, pace_s=PACE_S) as source, peer("z", transport) as other:
        yield source, other


class Moving:
    """A move under way, and how long its caller waits."""

    def __init__(self, client: MoveClient, tokens: list[int], source: PeerProcess, destination: PeerProcess):
        self._pool = ThreadPoolExecutor(1)
        self._began_s = time.monotonic()
        self._future: Future[MoveResult] = self._pool.submit(
            client.transfer_direct, tokens, source.command, destination.data, "1", timeout_s=TIMEOUT_S
        )

    def result(self) -> tuple[MoveResult, float]:
        result = self._future.result(TIMEOUT_S + 10)
        self._pool.shutdown()
        return result, time.monotonic() - self._began_s


def moved_whole(client: MoveClient, tokens: list[int], source: PeerProcess, destination: PeerProcess) -> None:
    result = client.transfer_direct(tokens, source.command, destination.data, "1", timeout_s=10.0)
    assert result.ok, result.reason
    assert result.present_tokens == len(tokens)
    assert destination.ask("verified", tokens) == PAGES


@pytest.mark.parametrize(
    "moment", ["while", pytest.param("before", marks=SELDOM), pytest.param("after", marks=SELDOM)]
)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_lost_destination_costs_one_move_and_nothing_else(
    transport: tuple[str, str],
    survivors: tuple[PeerProcess, PeerProcess],
    client: MoveClient,
    fault: str,
    moment: str,
) -> None:
    source, other = survivors
    tokens = tokens_of(PAGES, next(seeds))
    source.ask("compute", tokens)
    source.ask("set_pace", PACE_S if moment == "while" else 0.0)
    slow = {"while": {"pace_s": PACE_S}, "after": {"commit_pause_s": 1.5}, "before": {}}[moment]
    with peer("b", transport, **slow) as destination:
        lose = destination.kill if fault == "kill" else destination.stop
        if moment == "before":
            lose()
        move = Moving(client, tokens, source, destination)
        if moment != "before":
            assert eventually(lambda: destination.state()["moves"]["running_in"])
            time.sleep(3 * PACE_S)
            lose()
        result, seconds = move.result()
        assert not result.ok
        assert result.reason
        assert seconds < TIMEOUT_S + SLACK_S

        source.ask("set_pace", 0.0)
        moved_whole(client, tokens, source, other)
        if fault == "stop":
            destination.go_on()
            assert eventually(lambda: is_settled(destination.state())), destination.state()
            assert destination.state()["wrong"] == []
            moved_whole(client, tokens, source, destination)
    assert eventually(lambda: is_settled(source.state())), source.state()
    assert source.state()["wrong"] == []


@pytest.mark.parametrize("moment", ["while", pytest.param("after", marks=SELDOM)])
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_lost_source_leaves_nothing_at_the_destination(
    transport: tuple[str, str],
    survivors: tuple[PeerProcess, PeerProcess],
    client: MoveClient,
    fault: str,
    moment: str,
) -> None:
    another, _ = survivors
    another.ask("set_pace", 0.0)
    tokens = tokens_of(PAGES, next(seeds))
    another.ask("compute", tokens)
    slow = {"while": {"pace_s": PACE_S}, "after": {"commit_pause_s": 0.4}}[moment]
    with ExitStack() as running:
        destination = running.enter_context(peer("b", transport, **slow))
        source = running.enter_context(peer("c", transport, **slow))
        source.ask("compute", tokens)
        move = Moving(client, tokens, source, destination)
        assert eventually(lambda: destination.state()["moves"]["running_in"])
        time.sleep(3 * PACE_S)
        (source.kill if fault == "kill" else source.stop)()
        assert eventually(lambda: not destination.state()["moves"]["running_in"])
        destination.ask("set_pace", 0.0)
        moved_whole(client, tokens, another, destination)  # also before a quarantine is over
        assert eventually(lambda: is_settled(destination.state())), destination.state()
        assert destination.state()["wrong"] == []
        source.go_on() if fault == "stop" else None
        move.result()
        if fault == "stop":
            assert eventually(lambda: is_settled(source.state())), source.state()
            moved_whole(client, tokens, source, destination)
