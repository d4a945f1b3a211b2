"""The demo fails exactly when a strict column breaks a promise, and its columns are what their titles say."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from psrl_sglang.config import load_config
from psrl_sglang.lab.demo import COLUMNS, TIERS, VERSIONS, verdict
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
    assert verdict([broken], {"strict": checked}) == [f"psrl, strict: {problem}" for problem in expected]


def test_the_columns_with_tiers_are_strict_too():
    runs = [run(), run("dram", client_stale=16), run("disk")]
    comparisons = {"strict": RIGHT, "dram": RIGHT, "disk": WRONG}
    assert [problem.partition(":")[0] for problem in verdict(runs, comparisons)] == [
        "strict, DRAM",
        "strict, disk",
    ]


def test_settings_of_the_columns_are_valid_and_only_those_with_tiers_have_some():
    tiers = {}
    for key, column in COLUMNS.items():
        settings = column.psrl_config(bytes_per_token=2048, disk_path=Path("/somewhere"))
        assert (settings is None) == key.startswith(("flush", "keep"))
        if settings is not None:
            lmcache = load_config(settings).lmcache
            tiers[key] = (lmcache.enable, lmcache.backend)
    assert tiers == {
        **dict.fromkeys(("strict", "lag1", "bare"), (False, "cpu")),
        "dram": (True, "cpu"),
        "disk": (True, "disk"),
    }


def test_only_what_accepts_old_weights_reuses_their_kv():
    assert {key for key, column in COLUMNS.items() if column.reuses_old_kv} == {"keep", "lag1"}


def test_sync_points_depend_on_turns_only_and_leave_room_after_the_last():
    session = Session("s", 1, tuple(Turn(0, 1, 1, 0.0) for _ in range(10)))
    assert Workload((session,) * 3).sync_points(VERSIONS) == [12]
    assert Workload((session,) * 12).sync_points(VERSIONS) == [12, 24, 36, 48, 60, 72, 84, 96, 108]
    assert Workload((session,) * 12).sync_points(TIERS) == [36, 72]
