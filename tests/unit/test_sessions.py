"""The generator of agent sessions: deterministic, like the traces it was measured on, and prefix-preserving."""

import gzip
import json
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from psrl_sglang.lab.sessions import (
    CODING_AGENT,
    TOOL_CHAT,
    Limits,
    Profile,
    Session,
    Turn,
    generate_sessions,
    quantiles,
    replay_trace,
    summarize,
)

FIRST_TEN = Limits(turns=10)


def play(session: Session) -> list[tuple[list[int], list[int]]]:
    """Prompt and whole sequence of every turn, with answers made up from the turn's number."""
    turns: list[tuple[list[int], list[int]]] = []
    sequence: list[int] = []
    for number, turn in enumerate(session.turns):
        prompt = session.prompt(number, sequence)
        sequence = prompt + [500 + number % 10] * turn.output_tokens
        turns.append((prompt, sequence))
    return turns


@pytest.mark.parametrize("profile", [CODING_AGENT, TOOL_CHAT])
def test_the_same_seed_gives_the_same_sessions_and_tokens(profile: Profile):
    one = generate_sessions(profile, 6, seed=3)
    again = generate_sessions(profile, 6, seed=3)
    assert one == again
    assert [play(session) for session in one] == [play(session) for session in again]
    assert generate_sessions(profile, 6, seed=4) != one


def test_more_sessions_begin_with_the_same_ones():
    assert generate_sessions(CODING_AGENT, 9, seed=5)[:4] == generate_sessions(CODING_AGENT, 4, seed=5)


def test_generated_sessions_have_the_statistics_they_were_drawn_from():
    found = summarize(generate_sessions(CODING_AGENT, 1500, seed=7, scale=1.0, limits=FIRST_TEN))
    for name in ("opening", "added", "output", "think_s"):
        expected = getattr(CODING_AGENT, name)
        assert getattr(found, name) == pytest.approx(expected, rel=0.15, abs=3), name
    assert found.trim_share == pytest.approx(CODING_AGENT.trim_share, abs=0.01)
    assert found.compaction_share == pytest.approx(CODING_AGENT.compaction_share, abs=0.005)
    assert found.compaction_kept[3] == pytest.approx(CODING_AGENT.compaction_kept[3], abs=0.1)


def test_sessions_without_limits_are_as_long_as_measured():
    found = summarize(generate_sessions(CODING_AGENT, 1500, seed=7))
    assert found.turns == pytest.approx(CODING_AGENT.turns, rel=0.15, abs=2)


def test_one_scale_shrinks_every_token_count():
    large = summarize(generate_sessions(CODING_AGENT, 800, seed=8, scale=1.0, limits=FIRST_TEN))
    small = summarize(generate_sessions(CODING_AGENT, 800, seed=8, scale=1 / 32, limits=FIRST_TEN))
    for field in fields(Profile):
        if field.name in ("opening", "output", "head"):
            expected = [value / 32 for value in getattr(large, field.name)]
            assert getattr(small, field.name) == pytest.approx(expected, abs=1)
    assert small.turns == large.turns


def test_sessions_share_their_head_and_nothing_more():
    sessions = generate_sessions(CODING_AGENT, 5, seed=9)
    prompts = [session.prompt(0, []) for session in sessions]
    head = sessions[0].head_tokens
    assert {session.head_tokens for session in sessions} == {head}
    assert all(prompt[:head] == prompts[0][:head] for prompt in prompts)
    assert len({tuple(prompt[head : head + 16]) for prompt in prompts}) == len(prompts)


def test_a_prompt_starts_with_what_is_kept_of_the_sequence_before():
    kept_shares: set[bool] = set()
    for session in generate_sessions(CODING_AGENT, 40, seed=10, limits=Limits(turns=30)):
        turns = play(session)
        for number, ((_, before), (prompt, _)) in enumerate(pairwise(turns), start=1):
            turn = session.turns[number]
            assert prompt[: turn.kept_tokens] == before[: turn.kept_tokens]
            assert len(prompt) == turn.prompt_tokens
            assert prompt[turn.kept_tokens :] != before[turn.kept_tokens : turn.prompt_tokens]
            kept_shares.add(turn.kept_tokens == len(before))
    assert kept_shares == {True, False}  # both appending and rewriting turns were seen


def test_limits_cut_turns_and_sequences():
    sessions = generate_sessions(CODING_AGENT, 40, seed=11, limits=Limits(turns=8, sequence_tokens=900))
    for session in sessions:
        assert 1 <= len(session.turns) <= 8
        assert all(turn.prompt_tokens + turn.output_tokens <= 900 for turn in session.turns[1:])


def test_a_session_refuses_to_keep_more_than_there_is():
    session = Session("s", 2, (Turn(0, 4, 1, 0.0), Turn(9, 1, 1, 0.0)))
    with pytest.raises(ValueError, match="keeps 9 tokens of the previous one, got 5"):
        session.prompt(1, [1, 2, 3, 4, 5])


@pytest.mark.parametrize(("count", "scale"), [(0, 0.5), (1, 0.0), (1, 1.5)])
def test_nonsense_is_refused(count: int, scale: float):
    with pytest.raises(ValueError, match="count must be"):
        generate_sessions(CODING_AGENT, count, seed=1, scale=scale)


def test_quantiles_interpolate():
    assert quantiles([0, 1, 2, 3, 4]) == pytest.approx((0.2, 1.0, 2.0, 3.0, 3.8))
    assert quantiles([]) == (0, 0, 0, 0, 0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three sessions in the packed form: one that appends, trims and compacts, a resumed one, a short one."""
    columns = ["t", "in", "out", "lcp_prev", "lcp_any", "blocks", "think", "api", "stop", "thread"]

    def row(prompt: int, output: int, kept_blocks: int, think_s: float | None, thread: str = "0") -> list:
        return [0.0, prompt, output, kept_blocks, kept_blocks, prompt // 64, think_s, 1.0, "tool_use", thread]

    sessions = [
        [
            row(6400, 64, 0, 0.0),
            row(640, 64, 0, 1.0, "0.agent_001"),
            row(6720, 128, 100, 2.0),
            row(7040, 64, 104, 3.0),
            row(3200, 64, 10, None),
        ],
        [row(100_000, 64, 0, 0.0), row(100_100, 64, 1562, 1.0)],
        [row(640, 64, 0, 0.0)],
    ]
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for number, rows in enumerate(sessions):
            record = {"id": f"t{number}", "block": 64, "tool": 3200, "sys": 640, "cols": columns, "reqs": rows}
            file.write(json.dumps(record) + "\n")
    return path


def test_a_trace_is_replayed_main_thread_by_main_thread(trace: Path):
    first, last = replay_trace(trace, scale=1 / 64)
    assert (first.session_id, last.session_id) == ("t0", "t2")  # t1 was resumed: its beginning is missing
    assert first.head_tokens == 60
    assert first.turns == (
        Turn(0, 100, 1, 0.0),
        Turn(101, 4, 2, 2.0),  # appends: 6720 - 6400 - 64 = 256 new
        Turn(104, 6, 1, 3.0),  # one block of the previous prompt was rewritten
        Turn(10, 40, 1, 0.0),  # compacted
    )
    assert last.head_tokens == 10
    assert play(first)[1][0][:101] == play(first)[0][1][:101]


def test_a_replay_takes_as_many_sessions_and_turns_as_asked(trace: Path):
    (only,) = replay_trace(trace, 1, 1 / 64, limits=Limits(turns=2))
    assert len(only.turns) == 2
