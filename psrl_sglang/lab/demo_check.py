"""Are the answers right? Every request that no update crossed, against an engine that never had other weights.

The reference is a stock server without a prefix cache, one per set of weights. It is given prompt and answer
as one prompt and computes it from nothing; the log-probabilities it finds for the answer's tokens are compared
with those the demo's engine reported while it generated them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from psrl_sglang.lab.demo_request import Leg
from psrl_sglang.lab.servers import Server, ServerError

# One unit in the last place of a log-probability near -6 is 4.8e-7; KV of other weights moves one by 0.03 and
# more.
TOLERANCE = 1e-5
_BATCH = 8


@dataclass(frozen=True)
class Comparison:
    """The requests of one column that could be compared, and the worst difference of a log-probability."""

    compared: int
    compared_after_sync: int
    worst: float
    beyond_tolerance: int


def compare(
    legs_by_column: Mapping[str, Sequence[Leg]],
    start_reference: Callable[[int], Server],
    *,
    weights: int,
    on_progress: Callable[[int, int], None],
) -> dict[str, Comparison]:
    """Compare all columns; `start_reference(n)` starts an engine with the weights of version n + 1.

    `weights` is how many sets of weights alternate. One reference runs at a time.
    """
    worst: dict[str, list[tuple[Leg, float]]] = {key: [] for key in legs_by_column}
    wanted = [
        (key, leg) for key, legs in legs_by_column.items() for leg in legs if not leg.crossed and leg.logprobs
    ]
    done = 0
    by_weights: dict[int, list[tuple[str, Leg]]] = defaultdict(list)
    for key, leg in wanted:
        by_weights[(leg.version - 1) % weights].append((key, leg))
    for number, group in sorted(by_weights.items()):
        with stopping(start_reference(number)) as server:
            for batch in _batches(group):
                answers = _reference_logprobs(server, [leg for _, leg in batch])
                for (key, leg), expected in zip(batch, answers, strict=True):
                    pairs = zip(leg.logprobs, expected, strict=True)
                    worst[key].append((leg, max(abs(a - b) for a, b in pairs)))
                done += len(batch)
                on_progress(done, len(wanted))
    return {key: _summary(found) for key, found in worst.items()}


@contextmanager
def stopping(server: Server) -> Iterator[Server]:
    """The server until the end of the block, then killed: a graceful end takes seconds and nothing needs it."""
    try:
        yield server
    finally:
        server.stop(grace_s=0.0)


def _summary(found: Sequence[tuple[Leg, float]]) -> Comparison:
    return Comparison(
        compared=len(found),
        compared_after_sync=sum(leg.resumes_session_after_sync for leg, _ in found),
        worst=max((difference for _, difference in found), default=0.0),
        beyond_tolerance=sum(difference > TOLERANCE for _, difference in found),
    )


def _reference_logprobs(server: Server, legs: Sequence[Leg]) -> list[list[float]]:
    body: dict[str, Any] = {
        "input_ids": [[*leg.prompt, *leg.output_ids] for leg in legs],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        # The first token of a range has no log-probability, so it starts one before the answer.
        "logprob_start_len": [len(leg.prompt) - 1 for leg in legs],
    }
    reply = server.post("/generate", body)
    if reply.status_code != 200:
        raise ServerError(f"the reference answered {reply.status_code}: {reply.text[:500]}")
    return [[entry[0] for entry in one["meta_info"]["input_token_logprobs"][1:]] for one in reply.json()]


def _batches(group: Sequence[tuple[str, Leg]]) -> Iterator[Sequence[tuple[str, Leg]]]:
    for start in range(0, len(group), _BATCH):
        yield group[start : start + _BATCH]
