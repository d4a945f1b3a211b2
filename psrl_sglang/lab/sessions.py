"""Multi-turn agent sessions: drawn from the statistics of public traces, or replayed from one of them.

A session is a list of turns. The prompt of a turn is the first `kept_tokens` of the previous turn's whole
sequence (prompt and answer) followed by `new_tokens` fresh ones, so a perfect cache computes the fresh ones
only. All sessions of a run start with tokens of one shared head, the agent's tool and system prompt.

Sizes are those of real models; `scale` (1/32 for the demo) multiplies every token count alike and leaves the
turn structure, the sharing and the gaps as they are.
"""

import gzip
import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

DEFAULT_SCALE = 1 / 32
# Ids below are special tokens of the lab's tokenizer; the vocabulary ends at 512.
_TOKENS = range(3, 512)
_QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95)
_MAIN_THREAD = "0"
# A session of the trace that opens longer was resumed: its first turns are not in the trace.
_LONGEST_OPENING_TOKENS = 32768
# Below this share of the previous prompt the agent has compacted its history, above it trimmed the end.
_COMPACTION_SHARE = 0.9


@dataclass(frozen=True)
class Turn:
    """One request: what it keeps of the sequence before, what it adds, how much it generates.

    `think_s` is the time between the previous answer and this request (tools, or a person).
    """

    kept_tokens: int
    new_tokens: int
    output_tokens: int
    think_s: float

    @property
    def prompt_tokens(self) -> int:
        return self.kept_tokens + self.new_tokens


@dataclass(frozen=True)
class Session:
    """`head_tokens` is how much of the first prompt is the head that the sessions of a run share."""

    session_id: str
    head_tokens: int
    turns: tuple[Turn, ...]

    def prompt(self, turn: int, previous: Sequence[int]) -> list[int]:
        """The prompt of a turn after `previous`, the whole sequence of the turn before (empty for turn 0)."""
        step = self.turns[turn]
        if turn == 0:
            head = _tokens("head", self.head_tokens)
            return head + _tokens(f"{self.session_id}/0", step.new_tokens - self.head_tokens)
        if len(previous) < step.kept_tokens:
            raise ValueError(
                f"turn {turn} keeps {step.kept_tokens} tokens of the previous one, got {len(previous)}"
            )
        return list(previous[: step.kept_tokens]) + _tokens(f"{self.session_id}/{turn}", step.new_tokens)


@dataclass(frozen=True)
class Profile:
    """Measured statistics of one kind of agent: tuples are the 5, 25, 50, 75 and 95 % quantiles, in tokens.

    `added` is what a turn brings beyond the sequence before it. A turn keeps that sequence whole, except that
    with `trim_share` the end of the previous prompt (`trimmed`) and the answer are sent anew, and with
    `compaction_share` the history shrinks to `compaction_kept` (a share) of the previous prompt, followed by
    `compaction_new`.
    """

    turns: tuple[float, ...]
    head: tuple[float, ...]
    opening: tuple[float, ...]
    added: tuple[float, ...]
    output: tuple[float, ...]
    think_s: tuple[float, ...]
    trim_share: float = 0.0
    trimmed: tuple[float, ...] = (0, 0, 0, 0, 0)
    compaction_share: float = 0.0
    compaction_kept: tuple[float, ...] = (0, 0, 0, 0, 0)
    compaction_new: tuple[float, ...] = (0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Limits:
    """Where a session is cut: at most so many turns, and no sequence longer than `sequence_tokens`."""

    turns: int | None = None
    sequence_tokens: int | None = None

    def allow(self, taken: Sequence[Turn], turn: Turn) -> bool:
        if self.turns is not None and len(taken) >= self.turns:
            return False
        length = turn.prompt_tokens + turn.output_tokens
        return self.sequence_tokens is None or length <= self.sequence_tokens


NO_LIMITS = Limits()


def generate_sessions(
    profile: Profile, count: int, *, seed: int, scale: float = DEFAULT_SCALE, limits: Limits = NO_LIMITS
) -> tuple[Session, ...]:
    """`count` sessions of a profile, the same for the same arguments; one head for all of them.

    Each quantity is drawn independently, by linear interpolation between its quantiles' logarithms.
    """
    if count < 1 or not 0 < scale <= 1:
        raise ValueError(f"count must be >= 1 and 0 < scale <= 1, got {count} and {scale}")
    source = random.Random(f"sessions-{seed}")
    head = _scaled(_draw(profile.head, source), scale)
    return tuple(
        _generate(f"{seed}-{number}", profile, head, scale, limits, random.Random(f"session-{seed}-{number}"))
        for number in range(count)
    )


def replay_trace(
    path: str | os.PathLike[str],
    sessions: int | None = None,
    scale: float = DEFAULT_SCALE,
    *,
    limits: Limits = NO_LIMITS,
) -> tuple[Session, ...]:
    """The first `sessions` complete ones of `cc_weka_compact.jsonl.gz`: main threads that open the session.

    The trace says how much of the previous *prompt* a request repeats, in blocks. Where that is all of it, the
    previous answer counts as kept too, since rollout frameworks append what was generated token by token.
    """
    found: list[Session] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if sessions is not None and len(found) == sessions:
                break
            record = json.loads(line)
            rows = [_Row(record, row) for row in record["reqs"]]
            main = [row for row in rows if row.thread == _MAIN_THREAD]
            if main and main[0].prompt <= _LONGEST_OPENING_TOKENS:
                found.append(_replay(record, main, scale, limits))
    return tuple(found)


def _generate(
    session_id: str, profile: Profile, head: int, scale: float, limits: Limits, source: random.Random
) -> Session:
    turns: list[Turn] = []
    opening = head + _scaled(_draw(profile.opening, source), scale)
    turn = Turn(0, opening, _scaled(_draw(profile.output, source), scale), 0.0)
    for _ in range(max(round(_draw(profile.turns, source)), 1)):
        if turns and not limits.allow(turns, turn):
            break
        turns.append(turn)
        turn = _next(profile, turn, head, scale, source)
    return Session(session_id, head, tuple(turns))


def _next(profile: Profile, before: Turn, head: int, scale: float, source: random.Random) -> Turn:
    output = _scaled(_draw(profile.output, source), scale)
    think_s = _draw(profile.think_s, source)
    added = _scaled(_draw(profile.added, source), scale)
    kind = source.random()
    if kind < profile.compaction_share:
        kept = round(before.prompt_tokens * _draw(profile.compaction_kept, source))
        return Turn(max(kept, 0), _scaled(_draw(profile.compaction_new, source), scale), output, think_s)
    if kind < profile.compaction_share + profile.trim_share:
        trimmed = _scaled(_draw(profile.trimmed, source), scale)
        kept = max(before.prompt_tokens - trimmed, min(head, before.prompt_tokens))
        again = before.prompt_tokens - kept + before.output_tokens
        return Turn(kept, again + added, output, think_s)
    return Turn(before.prompt_tokens + before.output_tokens, added, output, think_s)


class _Row:
    """One request of the trace."""

    def __init__(self, record: dict[str, Any], row: list[Any]) -> None:
        named = dict(zip(record["cols"], row, strict=True))
        self.prompt: int = named["in"]
        self.output: int = named["out"]
        self.kept: int = min(named["lcp_prev"] * record["block"], self.prompt)
        self.think_s: float = named["think"] or 0.0
        self.thread: str = named["thread"]


def _replay(record: dict[str, Any], rows: list[_Row], scale: float, limits: Limits) -> Session:
    block = record["block"]
    head = _scaled(min(record["tool"] + record["sys"], rows[0].prompt), scale)
    first = rows[0]
    turns = [
        Turn(0, max(_scaled(first.prompt, scale), head), _scaled(first.output, scale), first.think_s),
    ]
    for before, row in pairwise(rows):
        last = turns[-1]
        if row.kept >= before.prompt // block * block:
            kept = last.prompt_tokens + last.output_tokens
            new = _scaled(max(row.prompt - before.prompt - before.output, 0), scale)
        else:
            kept = min(round(row.kept * scale), last.prompt_tokens)
            new = _scaled(row.prompt - row.kept, scale)
        turn = Turn(kept, new, _scaled(row.output, scale), row.think_s)
        if not limits.allow(turns, turn):
            break
        turns.append(turn)
    return Session(record["id"], head, tuple(turns))


def summarize(sessions: Sequence[Session]) -> Profile:
    """The statistics of sessions: how CODING_AGENT was measured, and how what is generated is checked."""
    whole, trims, compactions = _by_kind(sessions)
    later = len(whole) + len(trims) + len(compactions)
    every = [turn for session in sessions for turn in session.turns]
    return Profile(
        turns=quantiles([len(session.turns) for session in sessions]),
        head=quantiles([session.head_tokens for session in sessions]),
        opening=quantiles([session.turns[0].new_tokens - session.head_tokens for session in sessions]),
        added=quantiles([turn.new_tokens for _, turn in whole]),
        output=quantiles([turn.output_tokens for turn in every]),
        think_s=quantiles([turn.think_s for session in sessions for turn in session.turns[1:]]),
        trim_share=len(trims) / later if later else 0.0,
        trimmed=quantiles([before.prompt_tokens - turn.kept_tokens for before, turn in trims]),
        compaction_share=len(compactions) / later if later else 0.0,
        compaction_kept=quantiles([turn.kept_tokens / before.prompt_tokens for before, turn in compactions]),
        compaction_new=quantiles([turn.new_tokens for _, turn in compactions]),
    )


# github callanjfox/kv-cache-tester@94f6046, Apache-2.0, the packed Claude Code traces: main threads of the 385
# sessions of 710 that open with at most 32,768 tokens. `turns` and `head` are of whole sessions, the rest of
# their first ten turns.
CODING_AGENT = Profile(
    turns=(7, 29, 68, 120, 245),
    head=(9185, 14731, 15189, 15543, 17505),
    opening=(434, 2608, 3752, 5060, 9526),
    added=(1, 24, 306, 2724, 15282),
    output=(86, 137, 239, 426, 1693),
    think_s=(3, 5, 8, 17, 309),
    trim_share=0.047,
    trimmed=(64, 65, 68, 140, 679),
    compaction_share=0.016,
    compaction_kept=(0.0, 0.0, 0.31, 0.54, 0.75),
    compaction_new=(5931, 12446, 20516, 39569, 90505),
)

# github sierra-research/tau-bench@59a200c, MIT, 40 airline trajectories; a token is taken as four characters.
# History is append-only there, and the trajectories carry no times.
TOOL_CHAT = Profile(
    turns=(6, 11, 14, 17, 28),
    head=(1539, 1539, 1539, 1539, 1539),
    opening=(13, 18, 21, 27, 41),
    added=(1, 15, 29, 157, 236),
    output=(31, 40, 56, 94, 156),
    think_s=(0, 0, 0, 0, 0),
)

_Steps = list[tuple[Turn, Turn]]


def _by_kind(sessions: Sequence[Session]) -> tuple[_Steps, _Steps, _Steps]:
    whole: _Steps = []
    trims: _Steps = []
    compactions: _Steps = []
    for before, turn in _steps(sessions):
        if turn.kept_tokens == before.prompt_tokens + before.output_tokens:
            whole.append((before, turn))
        elif turn.kept_tokens >= _COMPACTION_SHARE * before.prompt_tokens:
            trims.append((before, turn))
        else:
            compactions.append((before, turn))
    return whole, trims, compactions


def _steps(sessions: Sequence[Session]) -> Iterator[tuple[Turn, Turn]]:
    for session in sessions:
        yield from pairwise(session.turns)


def quantiles(values: Sequence[float]) -> tuple[float, ...]:
    """The 5, 25, 50, 75 and 95 % quantiles, by linear interpolation; zeros for no values."""
    if not values:
        return (0.0,) * len(_QUANTILES)
    ordered = sorted(values)
    return tuple(quantile(ordered, share) for share in _QUANTILES)


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of values in ascending order."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _draw(points: Sequence[float], source: random.Random) -> float:
    # The tails beyond the outer quantiles are cut: a run of a few sessions cannot show them anyway.
    share = min(max(source.random(), _QUANTILES[0]), _QUANTILES[-1])
    for low, high, left, right in zip(_QUANTILES, _QUANTILES[1:], points, points[1:], strict=False):
        if share <= high:
            inside = (share - low) / (high - low)
            return math.expm1(math.log1p(left) + (math.log1p(right) - math.log1p(left)) * inside)
    raise AssertionError("shares end at the last quantile")


def _scaled(tokens: float, scale: float) -> int:
    return max(round(tokens * scale), 1)


def _tokens(stream: str, count: int) -> list[int]:
    # A stream's tokens do not depend on how many are taken, so a shorter head is a prefix of a longer one.
    source = random.Random(stream)
    return [source.choice(_TOKENS) for _ in range(count)]
