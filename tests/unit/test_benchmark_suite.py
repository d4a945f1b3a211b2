"""The suite of benchmarks, with stand-ins: what it leaves behind, and what it says of those that fail."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import struct
import sys
import threading
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bump_stall  # noqa: E402
import growth  # noqa: E402
import growth_controller  # noqa: E402
import growth_gateway  # noqa: E402
import growth_store  # noqa: E402
import moves  # noqa: E402
import overhead  # noqa: E402
import reroute  # noqa: E402
import suite  # noqa: E402
import suite_list  # noqa: E402
import tiers  # noqa: E402
from results import (  # noqa: E402
    COLUMNS,
    ResultsError,
    Row,
    at_least,
    at_most,
    not_run,
    read_rows,
    write_rows,
)
from suite_report import number  # noqa: E402
from suite_run import Benchmark, Place  # noqa: E402

GOOD = """
from results import Row, at_most, at_least, not_run, write_rows
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--json", type=pathlib.Path)
parser.add_argument("--folder")
options = parser.parse_args()
print("measured in", options.folder)
time = dict(benchmark="good", x_name="tokens", metric="time", unit="ms", target=at_most(5000))
times = [
    Row(case=case, x=x, value=x * k, **time)
    for case, k in (("ours", 1.5), ("theirs, | piped", 2.25)) for x in (16, 256, 4096)
]
plain = Row(benchmark="good", case="", metric="ratio", value=0.1 + 0.2, unit="", target=at_least(0.25))
write_rows(options.json, [*times, plain, not_run("good", "peer", "it is not here")])
"""
FAILING = "print('about to fail')\nraise SystemExit('the server did not start')\n"
GARBAGE = "import sys, pathlib\npathlib.Path(sys.argv[-1]).write_text('{\"rows\": nonsense')\n"
ENDLESS = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"
OVERHEAD = {"prompt_tokens": 512, "kind": "hit", "stock_ms": 41.0, "psrl_ms": 42.0}
OVERHEAD |= {"ratio": 1.02, "ratio_p5": 0.94, "ratio_p95": 1.07}
BUMP_STALL = {
    "requests running / waiting": "48 / 16",
    "changes": 20,
    "scheduler time per change, longest ms": 0.16,
    "requests crossing per change": 48.0,
    "ratio of gaps": 1.1,
    "flush_cache while running, p99 ms": 101.0,
}
TIERS = [
    {"server": "psrl", "prompt_tokens": 4096, "recompute_ms": 712.0, "device_hit_ms": 13.0, "host_hit_ms": 20.0}
    | {"recompute_over_host": 35.6, "host_minus_device_ms": 7.0},
    {"overlap": "4096+1024", "load_ms": 20.0, "prefill_ms": 300.0, "both_ms": 310.0, "both_over_longer": 1.03},
    {"miss_over_stock": 1.019},
    {"dram_store_gb_per_s": 4.0, "dram_load_gb_per_s": 5.0},
    {"lmcache_store_gb_per_s": 0.2, "lmcache_load_gb_per_s": 0.1},
    {"store_over_lmcache": 23.0, "load_over_lmcache": 49.0},
]
MOVE = {"transport": "cma", "MB": 1.0, "recompute_ms": 9.0, "move_ms": 3.0, "request_after_move_ms": 4.0}
MOVE |= {"local_host_hit_ms": 4.0, "over_local": 1.2, "GB_per_s": 2.0}
MOVES = [
    {"tokens": 32, **MOVE, "recompute_over_move": 0.9},
    {"tokens": 4096, **MOVE, "recompute_over_move": 36.7},
    {"crossover_tokens": 4096},
    {"auto_tokens": 17, "decision": "left: computing is cheaper"},
    {"auto_tokens": 513, "decision": "moved"},
]


@pytest.fixture
def script(tmp_path):
    def make(name: str, text: str, **options) -> Benchmark:
        path = tmp_path / f"{name}.py"
        path.write_text(f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\n{text}")
        return Benchmark(name, path, expected_s=1.0, **options)

    return make


def run(chosen: list[Benchmark], directory: Path) -> tuple[int, str]:
    said = io.StringIO()
    status = suite.run_suite(chosen, directory, Console(file=said, width=200), is_quick=True)
    return status, said.getvalue()


def results(directory: Path) -> dict:
    return json.loads((directory / "results.json").read_text())


def test_results_of_good_failing_and_garbled_benchmarks_are_complete(tmp_path, script):
    out = tmp_path / "out"
    good = script("good", GOOD, arguments=("--folder", Place(tmp_path / "secret", "DIR")))
    chosen = [
        script("failing", FAILING),
        good,
        script("garbage", GARBAGE),
        script("absent", GOOD, skipped="no folder was named"),
    ]
    status, said = run(chosen, out)
    assert status == 1
    assert "failed: failing, garbage" in said
    found = results(out)
    assert {run["benchmark"]: run["status"] for run in found["runs"]} == {
        "failing": "failed",
        "good": "done",
        "garbage": "failed",
        "absent": "not run",
    }
    whys = {run["benchmark"]: run["why"] for run in found["runs"]}
    assert "exit status 1" in whys["failing"]
    assert "the server did not start" in whys["failing"]
    assert "garbage.json does not hold rows" in whys["garbage"]
    notes = {row["benchmark"]: row["note"] for row in found["rows"] if row["value"] is None}
    assert notes["failing"].startswith("failed: exit status 1")
    assert notes["garbage"].startswith("failed: garbage.json")
    assert notes["good"] == "not run: it is not here"
    assert notes["absent"] == "not run: no folder was named"
    assert sum(row["benchmark"] == "good" for row in found["rows"]) == 8
    assert {"cores", "memory_gib", "load", "versions", "commit"} <= found["machine"].keys()
    assert (out / "failing.log").read_text().endswith("about to fail\nthe server did not start\n")
    assert f"measured in {tmp_path / 'secret'}" in (out / "good.log").read_text()


def test_csv_has_the_rows_of_the_json(tmp_path, script):
    run([script("good", GOOD), script("failing", FAILING)], tmp_path / "out")
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        listed = list(reader)
    assert tuple(reader.fieldnames or ()) == COLUMNS
    rows = results(tmp_path / "out")["rows"]
    assert len(listed) == len(rows) == 9
    for cells, row in zip(listed, rows, strict=True):
        for name in ("benchmark", "case", "metric", "unit", "x_name", "note"):
            assert cells[name] == row[name]
        for name in ("x", "value"):
            assert (float(cells[name]) if cells[name] else None) == row[name]
        target = row["target"]
        assert cells["target"] == ("" if target is None else f"{target['direction']} {target['limit']:g}")
    met = [cells["is_met"] for cells in listed if cells["metric"] == "time"]
    assert met == ["true", "true", "false", "true", "true", "false"]


def test_each_measured_benchmark_has_a_picture(tmp_path, script):
    run([script("good", GOOD), script("failing", FAILING)], tmp_path / "out")
    picture = (tmp_path / "out" / "good.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert min(width, height) >= 300
    assert picture.rstrip(b"\0").endswith(b"IEND\xaeB`\x82")
    assert not (tmp_path / "out" / "failing.png").exists()


def test_markdown_has_a_table_with_the_command_and_no_path_of_this_machine(tmp_path, script):
    good = script("good", GOOD, arguments=("--folder", Place(tmp_path / "secret", "DIR")))
    run([good, script("failing", FAILING)], tmp_path / "out")
    text = (tmp_path / "out" / "results.md").read_text()
    assert f"`python {tmp_path.name}/good.py --folder DIR`" in text
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    lines = text.splitlines()
    assert "|  | by tokens: | 16 | 256 | 4,096 | target |" in lines
    assert "| ours | time, ms | 24 | 384 | **6,144** (missed) | at most 5000 |" in lines
    assert any(line.startswith("| theirs, \\| piped | time, ms |") for line in lines)
    assert "* peer: not run: it is not here" in lines
    assert "**failed**" in text
    assert "sglang 0.5" in text


def test_cases_of_which_the_same_was_measured_stand_side_by_side(tmp_path, script):
    rows = """
from results import Row, at_least, write_rows
import pathlib
write_rows(pathlib.Path(sys.argv[-1]), [
    Row(benchmark="b", case=case, metric=metric, value=value, unit="GB/s", target=limit and at_least(limit))
    for case, most in (("cma", 0.5), ("tcp", 0.75))
    for metric, value, limit in (("rate", 2, None), ("share", 0.6, most))
] + [Row(benchmark="b", case="alone", metric="other", value=1, unit="")])
"""
    run([script("b", rows)], tmp_path / "out")
    lines = (tmp_path / "out" / "results.md").read_text().splitlines()
    at = lines.index("|  | cma | tcp | target |")
    assert lines[at + 2 : at + 4] == [
        "| rate, GB/s | 2 | 2 |  |",
        "| share, GB/s | 0.6, at least 0.5 | **0.6** (missed), at least 0.75 |  |",
    ]
    assert "| alone | other | 1 |  |" in lines


def test_a_suite_without_failures_ends_with_0(tmp_path, script):
    status, said = run([script("good", GOOD)], tmp_path / "out")
    assert status == 0
    assert "2 figures miss their target" in said


def test_a_benchmark_that_does_not_end_is_stopped(tmp_path, script):
    status, _ = run([script("endless", ENDLESS, limit_s=1.0), script("good", GOOD)], tmp_path / "out")
    assert status == 1
    ended = {run["benchmark"]: run for run in results(tmp_path / "out")["runs"]}
    assert ended["endless"]["why"] == "it was stopped after 1 s"
    assert ended["good"]["status"] == "done"


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path, script):
    out = tmp_path / "out"

    def interrupt() -> None:
        log = out / "endless.log"
        while not (log.exists() and "here" in log.read_text()):
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    # Python leaves it ignored where the tests are run in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        status, _ = run([script("good", GOOD), script("endless", ENDLESS), script("later", GOOD)], out)
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 1
    assert [run["status"] for run in results(out)["runs"]] == ["done", "not run", "not run"]
    assert len([row for row in results(out)["rows"] if row["value"] is not None]) == 7


def test_unknown_names_and_missing_folders_are_refused(tmp_path, capsys):
    assert suite.main(["--only", "nonesuch", "--out", str(tmp_path)]) == 2
    assert suite.main(["--lmcache", str(tmp_path / "no"), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "nonesuch" in said
    assert "--lmcache" in said
    assert list(tmp_path.iterdir()) == []


def test_every_benchmark_of_the_suite_is_there_and_what_is_missing_is_said():
    for is_quick in (False, True):
        listed = suite_list.benchmarks(suite_list.Peers(), is_quick=is_quick)
        assert all(one.script.is_file() for one in listed)
        assert len({one.name for one in listed}) == len(listed)
    by_name = {one.name: one for one in listed}
    assert "--lmcache" in dict(by_name["tiers"].absent)["lmcache"]
    assert "--routers" in dict(by_name["gateway"].absent)["smg, sglang-router"]
    assert "--trace" in by_name["reroute_trace"].skipped


def test_every_benchmark_script_is_in_the_suite():
    listed = {one.script.name for one in suite_list.benchmarks(suite_list.Peers(), is_quick=False)}
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert scripts - listed == {"suite.py"}


def test_rows_survive_writing_and_reading(tmp_path):
    rows = [
        Row(benchmark="a", case="c", metric="m", value=1e-9, unit="s", x_name="n", x=3, target=at_most(2)),
        Row(benchmark="a", case="", metric="m", value=1 / 3, unit="", target=at_least(0.5), note="ä | \n"),
        not_run("a", "c", "why"),
    ]
    write_rows(tmp_path / "rows.json", rows)
    assert read_rows(tmp_path / "rows.json") == rows
    assert [row.is_met for row in rows] == [True, False, None]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[{}]",
        '[{"benchmark": "a", "case": "", "metric": "m", "value": null, "unit": "s"}]',
        '[{"benchmark": "a", "case": "", "metric": "m", "value": "fast", "unit": "s"}]',
        '[{"benchmark": "a", "case": "", "metric": "m", "value": NaN, "unit": "s"}]',
        '[{"benchmark": "a", "case": "", "metric": "m", "value": 1, "unit": "s", "x": 2}]',
    ],
)
def test_what_are_no_rows_is_refused(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ResultsError, match=r"rows\.json does not hold rows"):
        read_rows(tmp_path / "rows.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="value is"):
        Row(benchmark="a", case="c", metric="m", value=value, unit="s")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3, "3"),
        (0.12345, "0.1235"),
        (12345.6, "12,346"),
        (0.00001234, "1.23e-05"),
        (1000000, "1,000,000"),
    ],
)
def test_numbers_are_shown_with_the_digits_that_count(value, text):
    assert number(value) == text


def test_figures_of_the_benchmarks_become_rows():
    """Names of figures are spelt twice in each script: where they are measured, and where they become rows."""
    [hit] = [row for row in overhead.tidy([OVERHEAD]) if row.metric == "TTFT psrl / stock"]
    assert (hit.case, hit.x, hit.value) == ("hit", 512, 1.02)
    options = Namespace(requests=64, running=48)
    stalls = {row.metric: row for row in bump_stall.tidy(BUMP_STALL, options)}
    assert stalls["scheduler time per change, longest"].is_met is True
    assert stalls["flush_cache while running, p99"].is_met is False
    assert {row.unit for row in stalls.values()} == {"ms", "ratio", "requests"}
    loads = tiers.tidy(TIERS)
    assert len(loads) == 5 + 4 + 1 + 2 * 3
    assert {row.x for row in loads if row.x_name} == {4096}
    moved = moves.tidy(MOVES)
    by_length = {row.x: row.is_met for row in moved if row.metric.startswith("(move + request")}
    assert by_length == {32: None, 4096: True}
    assert [row.note for row in moved if row.case == "move_policy: auto"] == ["left: computing is cheaper", ""]
    assert [row.value for row in moved if row.metric == "crossover, at most"] == [4096]
    assert moves.tidy([{"crossover_tokens": None}]) == []


def test_strict_ways_may_not_be_stale_nor_fail():
    figures = dict.fromkeys(reroute._FIGURES, 7) | {"prompt_tokens": 70}
    rows = reroute.tidy("reroute", {"keep": figures, "strict-sync": figures})
    ruled = {(row.case, row.metric) for row in rows if row.is_met is False}
    assert ruled == {
        ("strict, sync", "stale tokens served"),
        ("strict, sync", "updates that failed"),
        ("strict, sync", "answers off by more than 1e-5"),
    }
    assert all(row.case == "strict, sync" for row in rows if row.target is not None)


@pytest.mark.parametrize(
    ("exponent", "said"), [(0, "flat"), (0.5, "less than linear"), (1, "linear"), (2, "more than linear")]
)
def test_a_slope_is_the_exponent(exponent, said):
    points = [(float(n), 3.0 * n**exponent) for n in (10, 100, 1000)]
    assert growth.log_slope(points) == pytest.approx(exponent)
    assert growth.meaning(growth.log_slope(points)) == said


def test_a_curve_states_its_slope_and_what_the_last_tenfold_does():
    rows = [
        Row(benchmark="growth", case="c", x_name="pages", x=x, metric="m", value=value, unit="ms")
        for x, value in ((100, 1000), (1, 10), (10, 10))
    ]
    [curve] = growth.curves(rows)
    assert [row.x for row in curve.rows] == [1, 10, 100]
    assert curve.last_tenfold == pytest.approx(100)
    [slope] = growth.slopes([curve])
    assert (slope.case, slope.metric) == ("c: m, by pages", "slope")
    assert slope.value == pytest.approx(1.0)
    assert slope.note == "linear; the last tenfold takes 1e+02 times as much"
    none = Row(benchmark="growth", case="c", x_name="pages", x=1, metric="m", value=0, unit="ms")
    assert growth.slopes(growth.curves([none])) == []


@pytest.mark.parametrize(
    ("measure", "x"),
    [
        (growth_store.by_pages, 8192),
        (partial(growth_store.by_versions, pages=8192, life="dead"), 3),
        (growth_store.retired_pages, 8192),
        (growth_controller.by_engines, 5),
        (growth_controller.by_versions, 4),
        (growth_controller.by_sessions, 50),
        (growth_gateway.by_engines, 5),
        (partial(growth_gateway.by_versions, engines=6), 3),
        (partial(growth_gateway.by_sessions, engines=6), 50),
    ],
)
def test_each_point_of_growth_finds_what_it_looks_for(measure, x):
    rows = measure(x)
    assert rows
    assert all(row.x == x for row in rows)
    # The memory of a page is what the process grew by, which in a process as old as this one may be nothing.
    assert all(row.value is not None and row.value >= 0 for row in rows if row.metric != "memory of a page")
