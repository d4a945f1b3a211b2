"""Moves between engines of two ranks: each rank sends its part to the same rank of the other engine."""

import httpx
import pytest
from fault_plugin import Faults
from move_support import MOVE_S, assert_no_move_left, free_ports, movable, rank_addresses
from router_support import Conversations, gateway, share
from support import NAMED, assert_books_hold, prompt, status, wait_until
from tier_support import NEW_TOKENS, assert_hit, assert_nothing_held, cached_from, settle, start

from psrl_sglang.transfer.client import MoveClient

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def pair(server_factory, faults):
    """Two engines of two ranks each, and where their ranks listen: (server, commands, data)."""
    made = []
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1", **faults.env}
    for name in ("a", "b"):
        port = free_ports(4)
        settings = movable(sglang={"instance_id": name, "move_port": port})
        args = (*NAMED, "--tp-size", "2", "--max-total-tokens", "4096")
        server = server_factory(args=args, psrl_config=settings, env=env)
        made.append((server, *rank_addresses(port, 2)))
    return made


@pytest.fixture
def engines(pair, faults):
    yield pair
    faults.set()
    for server, _, _ in pair:
        wait_until(lambda server=server: status(server)["device"]["locked_tokens"] == 0, "nothing is locked")
        assert_no_move_left(server)
        assert_nothing_held(server)
        assert_books_hold(server)


def move(tokens, source, destination, **options):
    return MoveClient().transfer_direct(tokens, source[1], destination[2], "1", timeout_s=MOVE_S, **options)


def test_both_ranks_move_and_the_other_engine_serves_it(engines):
    a, b = engines
    asked = prompt(1, 601)
    answer = a[0].generate(asked, NEW_TOKENS * 4)
    whole = [*asked, *answer.output_ids]
    local = a[0].generate(whole, NEW_TOKENS)
    result = move(whole, a, b)
    assert result.present_tokens >= 624, result.reason
    assert_hit(b[0], whole, local, "host")


def test_kv_that_only_the_device_has_is_moved_by_both_ranks(engines):
    a, b = engines
    asked = prompt(2, 401)
    a[0].generate(asked, NEW_TOKENS)
    local = a[0].generate(asked, NEW_TOKENS)
    settle(a[0])
    assert MoveClient().clear(a[1]).num_tokens > 0
    result = move(asked, a, b)
    assert result.present_tokens == 400, result.reason
    assert_hit(b[0], asked, local, "host")


def test_what_arrived_at_one_rank_only_is_computed_by_both(engines):
    a, b = engines
    asked = prompt(3, 401)
    a[0].generate(asked, NEW_TOKENS)
    local = a[0].generate(asked, NEW_TOKENS)
    one = MoveClient().transfer_direct(asked, a[1][1], b[2][1], "1", timeout_s=MOVE_S)
    assert one.present_tokens == 400, one.reason
    again = b[0].generate(asked, NEW_TOKENS)
    assert cached_from(again)["host"] == 0
    assert again.output_ids == local.output_ids


def test_the_gateway_has_all_ranks_move_a_session_that_goes_to_the_other_engine(engines):
    urls = [server.url for server, _, _ in engines]
    kv = {"enable": True, "transfer_mode": "sync", "transfer_timeout_ms": int(MOVE_S * 1000)}
    with gateway(*urls, kv_transfer=kv) as url:

        def workers():
            return httpx.get(f"{url}/workers", trust_env=False).json()["workers"]

        wait_until(lambda: all(one["version"] and one["moves_kv"] for one in workers()), "all is known")
        talk = Conversations(url, "ranks", count=3)
        assert share(talk.turns(3)) >= 0.90
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    assert 'psrl_gateway_kv_moves_total{result="ok"}' in metrics
    moved = next(line for line in metrics.splitlines() if line.startswith("psrl_gateway_kv_moved_tokens_total"))
    assert float(moved.split()[1]) > 0


def test_a_rank_refuses_the_part_of_another(engines):
    a, b = engines
    asked = prompt(4, 201)
    a[0].generate(asked, NEW_TOKENS)
    result = MoveClient().transfer_direct(asked, a[1][0], b[2][1], "1", timeout_s=MOVE_S)
    assert not result.ok
    assert "KV of another kind: rank=tp0/2 there, rank=tp1/2 here" in result.reason


def test_lmcache_15_an_engine_of_one_rank_refuses_the_parts_of_two(engines, server_factory):
    a, _ = engines
    port = free_ports(2)
    whole = start(server_factory, movable(sglang={"move_port": port}))
    asked = prompt(5, 201)
    a[0].generate(asked, NEW_TOKENS)
    result = MoveClient().transfer_direct(asked, a[1], [f"127.0.0.1:{port + 1}"] * 2, "1", timeout_s=MOVE_S)
    assert not result.ok
    assert "KV of another kind" in result.reason
    whole.stop(grace_s=5.0)
