"""What a move takes along: odd chunks, pools of windows, copies that are given up, pins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from peer import Peer, PeerOptions
from peer_process import eventually, is_settled, tokens_of

from psrl_sglang.keys import count, key_at
from psrl_sglang.transfer.client import MoveClient
from psrl_sglang.transfer.exchange import salted

PAGES = 23


@pytest.fixture
def client() -> Iterator[MoveClient]:
    with MoveClient() as client:
        yield client


@pytest.fixture(params=["cma", "tcp", "nixl"])
def channel(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu12")
    return request.param


def assert_clean(*peers: Peer) -> None:
    for peer in peers:
        assert eventually(lambda peer=peer: is_settled(peer.state())), peer.state()
        assert peer.store.check_integrity() == []


def test_a_prompt_that_was_computed_in_odd_steps_arrives_whole(client: MoveClient, channel: str) -> None:
    tokens = tokens_of(PAGES)
    with (
        Peer(PeerOptions(channel=channel, chunk_pages=5)) as a,
        Peer(PeerOptions(instance_id="b", channel=channel, chunk_pages=3)) as b,
    ):
        for pages in (1, 2, 7, 8, 13, 22, PAGES):
            a.compute(tokens[: pages * 16])
        result = client.transfer_direct(tokens, a.command, b.data, "1")
        assert result.num_tokens == result.present_tokens == PAGES * 16
        assert b.verified(tokens) == PAGES
        assert_clean(a, b)


def test_only_what_is_missing_is_sent(client: MoveClient, channel: str) -> None:
    tokens = tokens_of(PAGES)
    with Peer(PeerOptions(channel=channel)) as a, Peer(PeerOptions(instance_id="b", channel=channel)) as b:
        a.compute(tokens)
        b.compute(tokens[: 6 * 16])
        result = client.transfer_direct([*tokens, 1, 2, 3], a.command, b.data, "1")
        assert result.num_tokens == (PAGES - 6) * 16
        assert result.present_tokens == PAGES * 16
        assert b.verified(tokens) == PAGES
        assert_clean(a, b)


def test_a_branch_of_a_prompt_continues_the_part_in_common(client: MoveClient, channel: str) -> None:
    one = tokens_of(PAGES)
    other = one[: 9 * 16] + tokens_of(8, seed=5)
    with Peer(PeerOptions(channel=channel)) as a, Peer(PeerOptions(instance_id="b", channel=channel)) as b:
        a.compute(one)
        a.compute(other)
        assert client.transfer_direct(one, a.command, b.data, "1").ok
        assert client.transfer_direct(other, a.command, b.data, "1").num_tokens == 8 * 16
        assert b.verified(one) == PAGES
        assert b.verified(other) == 17
        assert_clean(a, b)


def test_pools_of_windows_go_along(client: MoveClient, channel: str) -> None:
    tokens = tokens_of(PAGES)
    options: dict[str, Any] = {"channel": channel, "windows": (("swa", 4),)}
    with Peer(PeerOptions(**options)) as a, Peer(PeerOptions(instance_id="b", **options)) as b:
        a.compute(tokens)
        drop_window(a, tokens, first=5, pages=6)
        assert client.transfer_direct(tokens, a.command, b.data, "1").present_tokens == PAGES * 16
        assert b.verified(tokens) == PAGES
        assert window_pages(b, tokens) == window_pages(a, tokens)
        assert 4 < len(window_pages(a, tokens)) < PAGES
        assert_clean(a, b)


def test_windows_behind_the_end_of_the_prefix_stay(client: MoveClient) -> None:
    tokens = tokens_of(PAGES)
    options: dict[str, Any] = {"windows": (("swa", 4),)}
    with Peer(PeerOptions(**options)) as a, Peer(PeerOptions(instance_id="b", **options)) as b:
        a.compute(tokens)
        dram = a.store.dram
        tails = [chunk for chunk in dram.index.of_tag("psrl:1") if chunk.pool == "kv" and chunk.start >= 12]
        dram.drop(tails, "full")
        assert client.transfer_direct(tokens, a.command, b.data, "1").present_tokens == 12 * 16
        assert window_pages(b, tokens) == set(range(12))
        assert_clean(a, b)


def keys_of(peer: Peer, tokens: list[int], pool: str) -> list[bytes]:
    digests = peer.engine.digests(peer.prefix(tokens), "psrl:1")
    keys = salted(digests, peer.engine.salt(pool, "psrl:1"))
    return [key_at(keys, page) for page in range(count(keys))]


def window_pages(peer: Peer, tokens: list[int]) -> set[int]:
    return {page for page, key in enumerate(keys_of(peer, tokens, "swa")) if key in peer.store.dram.index}


def drop_window(peer: Peer, tokens: list[int], first: int, pages: int) -> None:
    """A hole, as windows that slid on leave."""
    dram = peer.store.dram
    with dram.lock:
        for key in keys_of(peer, tokens, "swa")[first : first + pages]:
            chunk = dram.index.chunk_of(key)
            if chunk is not None:
                dram.index.remove(chunk)
                dram.arena.give(chunk.place)


def test_a_copy_that_is_given_up_is_gone_at_the_source_only(client: MoveClient, channel: str) -> None:
    tokens = tokens_of(PAGES)
    with Peer(PeerOptions(channel=channel)) as a, Peer(PeerOptions(instance_id="b", channel=channel)) as b:
        a.compute(tokens)
        assert client.transfer_direct(tokens, a.command, b.data, "1", copy=False).num_tokens == PAGES * 16
        assert a.verified(tokens) == 0
        assert b.verified(tokens) == PAGES
        assert_clean(a, b)


def test_a_copy_stays_where_the_destination_did_not_take_all(client: MoveClient) -> None:
    tokens = tokens_of(PAGES)
    with Peer(PeerOptions()) as a, Peer(PeerOptions(instance_id="b", slots=3)) as b:
        a.compute(tokens)
        result = client.transfer_direct(tokens, a.command, b.data, "1", copy=False)
        assert 0 < result.present_tokens < len(tokens)
        assert "keeps its copy" in result.reason
        assert a.verified(tokens) == PAGES
        assert_clean(a, b)


def test_what_others_use_stays_when_a_copy_is_given_up(client: MoveClient) -> None:
    tokens = tokens_of(PAGES)
    longer = tokens + tokens_of(5, seed=3)
    with Peer(PeerOptions()) as a, Peer(PeerOptions(instance_id="b")) as b:
        a.compute(longer)
        assert client.transfer_direct(tokens, a.command, b.data, "1", copy=False).ok
        assert a.verified(longer) == PAGES + 5
        assert_clean(a, b)


# ---- pins ----


def test_pinned_pages_outlive_eviction_until_they_are_unpinned(client: MoveClient) -> None:
    tokens = tokens_of(8)
    with Peer(PeerOptions(slots=6)) as a:
        a.compute(tokens)
        assert client.pin(tokens, a.command, "1").num_tokens == 8 * 16
        for seed in range(10):
            a.compute(tokens_of(4, seed=seed + 1))
        assert a.verified(tokens) == 8
        assert client.unpin(tokens, a.command, "1").num_tokens == 8 * 16
        assert client.unpin(tokens, a.command, "1").num_tokens == 0
        for seed in range(10):
            a.compute(tokens_of(4, seed=seed + 20))
        assert a.verified(tokens) == 0
        assert_clean(a)


def test_pinned_windows_outlive_eviction_too(client: MoveClient) -> None:
    tokens = tokens_of(8)
    with Peer(PeerOptions(slots=10, windows=(("swa", 2),), move_s=0.2)) as a:
        a.compute(tokens)
        held = window_pages(a, tokens)
        assert client.pin(tokens, a.command, "1").num_tokens == 8 * 16
        time.sleep(0.4)
        for seed in range(10):
            a.compute(tokens_of(4, seed=seed + 1))
        assert window_pages(a, tokens) == held
        assert client.unpin(tokens, a.command, "1").ok
        assert_clean(a)


def test_pins_end_by_themselves_and_are_renewed(client: MoveClient) -> None:
    tokens = tokens_of(8)
    with Peer(PeerOptions(pin_s=0.8, heartbeat_s=0.05)) as a:
        a.compute(tokens)
        assert client.pin(tokens, a.command, "1").ok
        time.sleep(0.5)
        assert client.pin(tokens, a.command, "1").ok
        time.sleep(0.5)
        assert a.state()["pins"] == 1
        assert a.held() == 2
        assert eventually(lambda: not a.state()["pins"])
        assert_clean(a)


def test_pins_over_the_budget_are_refused_and_change_nothing(client: MoveClient) -> None:
    first, second = tokens_of(8, 1), tokens_of(8, 2)
    with Peer(PeerOptions(slots=6)) as a:
        a.compute(first)
        a.compute(second)
        assert client.pin(first, a.command, "1").ok
        refused = client.pin(second, a.command, "1")
        assert not refused.ok
        assert "pinned" in refused.reason
        assert a.held() == 2
        assert client.pin(first, a.command, "1").ok
        assert client.unpin(first, a.command, "1").ok
        assert_clean(a)


def test_nothing_is_pinned_of_what_is_not_there(client: MoveClient) -> None:
    with Peer(PeerOptions()) as a:
        assert client.pin(tokens_of(3), a.command, "1").num_tokens == 0
        assert client.pin([1, 2], a.command, "1").num_tokens == 0
        assert_clean(a)


# ---- a transport that is stuck; a controller that is trouble ----


def test_a_write_of_nixl_that_hangs_sends_the_next_move_another_way(client: MoveClient) -> None:
    pytest.importorskip("nixl_cu12")
    tokens = tokens_of(PAGES)
    nixl = {"channel": "nixl", "heartbeat_s": 0.1}
    with (
        Peer(PeerOptions(**nixl)) as a,  # type: ignore[arg-type]
        Peer(PeerOptions(instance_id="b", quarantine_s=0.3, **nixl)) as b,  # type: ignore[arg-type]
    ):
        a.compute(tokens)
        agent = a.worker._transports.usable["nixl"]._agent  # type: ignore[attr-defined]
        real = agent.transfer, agent.check_xfer_state
        agent.transfer = lambda handle: (real[0](handle), "PROC")[1]
        agent.check_xfer_state = lambda handle: "PROC"
        hung = client.transfer_direct(tokens, a.command, b.data, "1", timeout_s=1.0)
        assert "late" in hung.reason
        assert a.state()["moves"]["held_after_failure"] == 1
        result = client.transfer_direct(tokens, a.command, b.data, "1")
        assert (result.ok, result.transport) == (True, "cma")
        agent.transfer, agent.check_xfer_state = real
        assert eventually(lambda: not a.state()["moves"]["held_after_failure"])
        a.worker._sender._close_idle(b.worker._landing._party.incarnation)
        b.forget_all()
        assert client.transfer_direct(tokens, a.command, b.data, "1").transport == "nixl"
        assert b.verified(tokens) == PAGES
        assert_clean(a, b)


@pytest.mark.parametrize("trouble", ["absent", "silent", "garbage"])
def test_a_controller_in_trouble_disturbs_no_move(client: MoveClient, trouble: str) -> None:
    tokens = tokens_of(PAGES)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as ask, context.socket(zmq.PULL) as pull:
        ask.setsockopt(zmq.LINGER, 0)
        ports = ask.bind_to_random_port("tcp://127.0.0.1"), pull.bind_to_random_port("tcp://127.0.0.1")
        if trouble == "absent":
            ask.close()
            pull.close()
        options = PeerOptions(controller=("127.0.0.1", ports[1], ports[0]), heartbeat_s=0.1)
        with Peer(options) as a, Peer(PeerOptions(instance_id="b")) as b:
            a.compute(tokens)
            for seed in range(5):
                if trouble == "garbage" and ask.poll(200):
                    ask.send_multipart([ask.recv_multipart()[0], b"", b"\xc1garbage"])
                more = tokens_of(4, seed + 1)
                a.compute(more)
                assert client.transfer_direct(more, a.command, b.data, "1", timeout_s=3.0).ok
            assert client.transfer_direct(tokens, a.command, b.data, "1").ok
            assert b.verified(tokens) == PAGES
            assert a.worker._reports._thread.is_alive()
            assert_clean(a, b)


def test_a_worker_without_a_controller_rests_after_a_move(client: MoveClient) -> None:
    tokens = tokens_of(4)
    with Peer(PeerOptions()) as a, Peer(PeerOptions(instance_id="b")) as b:
        a.compute(tokens)
        assert client.transfer_direct(tokens, a.command, b.data, "1").ok
        before_s = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before_s < 0.5
