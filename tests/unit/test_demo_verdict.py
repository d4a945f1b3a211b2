"""The demo fails exactly when the strict column breaks a promise."""

from types import SimpleNamespace
from typing import Any

import pytest

from psrl_sglang.lab.demo import COLUMNS, verdict
from psrl_sglang.lab.demo_check import Comparison
from psrl_sglang.lab.demo_run import Outcome, Workload
from psrl_sglang.lab.sessions import Session, Turn

RIGHT = Comparison(compared=10, compared_after_sync=3, worst=5e-7, beyond_tolerance=0)
WRONG = Comparison(compared=10, compared_after_sync=3, worst=0.5, beyond_tolerance=2)
NOTHING = Comparison(compared=0, compared_after_sync=0, worst=0.0, beyond_tolerance=0)


def run(
    key: str = "strict", *, client_stale: int = 0, by_lag: dict[str, int] | None = None, failed: int = 0
) -> Any:
    counters = {"stale_tokens_by_lag": by_lag or {}}
    outcome = Outcome(COLUMNS[key], client_stale_tokens=client_stale, counters=counters)
    return SimpleNamespace(
        outcome=outcome, trainer=SimpleNamespace(failed_flushes=failed, failed_updates=failed)
    )


def test_a_right_strict_column_passes_whatever_the_others_do():
    bad = run("keep", client_stale=99, failed=3)
    assert verdict([bad, run()], {"keep": WRONG, "strict": RIGHT}) == []


@pytest.mark.parametrize(
    ("broken", "checked", "expected"),
    [
        (run(client_stale=16), RIGHT, ["16 stale tokens served, expected 0"]),
        (run(by_lag={"1": 32}), RIGHT, ["32 stale tokens served, expected 0"]),
        (run(failed=1), RIGHT, ["2 failed updates, expected 0"]),
        (run(), WRONG, ["worst logprob difference 5.00e-01, expected at most 1e-05"]),
        (run(), NOTHING, ["no answer could be compared with a fresh engine"]),
    ],
)
def test_each_broken_promise_is_named(broken: Any, checked: Comparison, expected: list[str]):
    assert verdict([broken], {"strict": checked}) == expected


def test_sync_points_depend_on_turns_only_and_leave_room_after_the_last():
    session = Session("s", 1, tuple(Turn(0, 1, 1, 0.0) for _ in range(10)))
    workload = Workload((session,) * 3, concurrency=4, turns_per_sync=12)
    assert workload.sync_points() == [12]
    assert Workload((session,) * 12, 4, 12).sync_points() == [12, 24, 36, 48, 60, 72, 84, 96, 108]
