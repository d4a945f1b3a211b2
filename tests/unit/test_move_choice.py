"""Move or recompute: the destination takes what is cheaper to take, once it knows."""

import pytest

pytest.importorskip("sglang")

from psrl_sglang.engine.estimates import LoadOrRecompute
from psrl_sglang.engine.moves import MoveChoice
from psrl_sglang.transfer.link import PeerRefused

BYTES_PER_TOKEN = 1000


def choice(policy="auto", *, prefill_s=1e-3, move_s=(0.01, 1e-8), load_s=1e-10, known=10):
    """Prefill takes ``prefill_s`` a token; a move a fixed part and so much a byte."""
    both = LoadOrRecompute("auto", BYTES_PER_TOKEN)
    moves = MoveChoice(policy, both)
    for number in range(1, known + 1):
        size = number * 100 * BYTES_PER_TOKEN
        both.observe_prefill(number * 100, number * 100 * prefill_s)
        both.observe_load(size, size * load_s)
        moves.observe("tcp", size, move_s[0] + size * move_s[1])
    return moves


def is_taken(moves, tokens, transport="tcp"):
    try:
        moves.require_worth(tokens, tokens * BYTES_PER_TOKEN, transport)
    except PeerRefused:
        return False
    return True


def test_below_the_crossover_nothing_is_moved_and_the_reason_has_both_costs():
    moves = choice()
    assert [tokens for tokens in (1, 5, 9, 12, 20, 500) if is_taken(moves, tokens)] == [12, 20, 500]
    with pytest.raises(
        PeerRefused, match=r"5 tokens are computed in 5\.0 ms there, moved and loaded in 10\.1 ms"
    ):
        moves.require_worth(5, 5 * BYTES_PER_TOKEN, "tcp")


def test_a_slow_way_is_never_worth_it_and_another_transport_is_judged_by_its_own_speed():
    moves = choice(move_s=(0.0, 2e-6))
    assert not any(is_taken(moves, tokens) for tokens in (10, 1000, 100_000))
    for number in range(1, 11):
        moves.observe("cma", number * 10**6, number * 1e-4)
    assert is_taken(moves, 1000, "cma")


def test_everything_is_taken_until_the_costs_are_known():
    assert is_taken(choice(known=2), 1)
    assert is_taken(choice(), 1, "nixl")


@pytest.mark.parametrize(("policy", "taken"), [("always", [1, 64, 500]), ("never", []), (64, [64, 500])])
def test_a_policy_that_is_set_is_what_happens(policy, taken):
    moves = choice(policy)
    assert [tokens for tokens in (1, 64, 500) if is_taken(moves, tokens)] == taken
    assert moves.status()["policy"] == policy
