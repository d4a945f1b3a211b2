"""The calls of slime, miles, verl and AReaL on real engines: all succeed at the first try, none gets stale KV, and
turns that are sent to another engine find theirs there."""

import asyncio
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from move_support import TOKEN, Controller, assert_no_move_left, pulling
from support import NOISE, assert_books_hold, status, wait_until
from tier_support import PAGE, assert_nothing_held, start

pytestmark = pytest.mark.engine

EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    one = Controller(tmp_path_factory.mktemp("controller"))
    yield one
    one.stop()


@pytest.fixture(scope="module")
def pair(server_factory, controller):
    env = {"PSRL_CONTROLLER_TOKEN": TOKEN}
    engines = [start(server_factory, controller.engine(name, pulling), env=env) for name in ("a", "b")]
    wait_until(lambda: controller.workers("a") and controller.workers("b"), "both are registered")
    return engines


@pytest.fixture
def engines(pair):
    yield pair
    assert_no_move_left(*pair)
    for server in pair:
        assert_nothing_held(server)
        assert_books_hold(server)


@pytest.fixture(scope="module")
def run():
    """The ``run`` of an example, to its end."""
    sys.path.insert(0, EXAMPLES)
    yield lambda name, *args, **options: asyncio.run(importlib.import_module(name).run(*args, **options))
    sys.path.remove(EXAMPLES)


def alternating(urls):
    """A router that sends every turn elsewhere, without a word."""
    return lambda session, turn: urls[(int(session.rpartition("-")[2]) + turn) % len(urls)]


def assert_calls_succeeded_at_once(report, *, engines, paths, updates):
    assert all(call.status == 200 for call in report.calls)
    made = [call.path for call in report.calls]
    for path in paths:
        assert made.count(path) == len(engines) * updates, path


def assert_nothing_stale(report, engines):
    """Every answer of the weights that are in force now is what these give without any cache, and none says that
    it used KV of others."""
    by_url = {server.url: server for server in engines}
    current = {server.url: status(server)["version"] for server in engines}
    last = [
        one
        for one in report.attempts
        if one.answer and not one.crossed and one.oldest_version == current[one.engine]
    ]
    assert last
    with ThreadPoolExecutor(len(last)) as pool:
        alone = list(pool.map(lambda one: _without_cache(by_url[one.engine], one), last))
    for attempt, other in zip(last, alone, strict=True):
        assert other.cached_tokens == 0
        pairs = list(zip(attempt.answer, other.output_ids, strict=True))
        # Where two tokens are equally likely, noise decides, and what follows is another text.
        same = next((number for number, (one, two) in enumerate(pairs) if one != two), len(pairs))
        compared = list(zip(attempt.logprobs, other.logprobs, strict=True))[: same + 1]
        assert max(abs(one - two) for one, two in compared) <= NOISE, attempt


def _without_cache(server, attempt):
    salt = f"fresh-{attempt.session}-{len(attempt.prompt)}"
    return server.generate(attempt.prompt, len(attempt.answer), cache_salt=salt)


def follow_ups(report):
    """Attempts with the one of the same session before them, where both are of one version."""
    last, found = {}, []
    for attempt in report.attempts:
        before, last[attempt.session] = last.get(attempt.session), attempt
        of_one_version = before and before.oldest_version == attempt.oldest_version
        if of_one_version and before.answer and not before.crossed and not attempt.crossed:
            found.append((before, attempt))
    return found


def assert_all_reused(pairs):
    """All but the last token of what was before, in whole pages."""
    for before, attempt in pairs:
        assert attempt.cached_tokens >= (len(before.prompt) + len(before.answer) - 1) // PAGE * PAGE, attempt


def test_slime_pauses_flushes_and_goes_on_while_its_requests_run(engines, run, models):
    urls = [server.url for server in engines]
    report = run("slime_loop", urls, alternating(urls), [models[2], models[1]], first_version=10)
    paths = ("/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation")
    assert_calls_succeeded_at_once(report, engines=engines, paths=paths, updates=2)
    assert {one.finish for one in report.attempts} == {"abort", "length"}
    assert_nothing_stale(report, engines)
    again = follow_ups(report)
    assert any(before.engine != attempt.engine for before, attempt in again)
    assert_all_reused(again)


def test_miles_freezes_its_requests_and_broadcasts_the_weights(engines, run, models):
    urls = [server.url for server in engines]
    report = run("miles_loop", urls, alternating(urls), [models[2], models[1]], first_version=20)
    paths = ("/begin_weight_update", "/update_weight_version", "/end_weight_update", "/continue_generation")
    assert_calls_succeeded_at_once(report, engines=engines, paths=paths, updates=2)
    assert {one.finish for one in report.attempts} == {"length"}
    assert any(one.crossed and len(one.versions) == 2 for one in report.attempts)
    assert_nothing_stale(report, engines)
    again = follow_ups(report)
    assert any(before.engine != attempt.engine for before, attempt in again)
    assert_all_reused(again)


def test_miles_flushes_under_its_frozen_requests_when_it_sends_tensors(engines, run, models):
    urls = [server.url for server in engines]
    options = {"first_version": 30, "is_distributed": False}
    report = run("miles_loop", urls, alternating(urls), [models[2]], **options)
    assert_calls_succeeded_at_once(report, engines=engines, paths=("/flush_cache",), updates=1)
    assert any(one.crossed for one in report.attempts)
    assert_nothing_stale(report, engines)
    assert_all_reused(follow_ups(report))


def test_verl_rebalances_and_takes_the_kv_along(engines, run, models, controller):
    urls = [server.url for server in engines]
    secret = controller.secret.read_bytes()
    report = run("verl_loop", urls, [models[1]], first_version=40, secret=secret)
    paths = ("/begin_weight_update", "/end_weight_update", "/flush_cache")
    assert_calls_succeeded_at_once(report, engines=engines, paths=paths, updates=1)
    assert {one.finish for one in report.attempts} == {"abort", "length"}
    assert_nothing_stale(report, engines)
    assert report.moves
    assert all(move.ok and move.num_tokens > 0 for move in report.moves)
    assert_all_reused(follow_ups(report))


def test_areal_resends_to_the_same_server_and_names_no_version(engines, run, models):
    urls = [server.url for server in engines]
    report = run("areal_loop", urls, [models[2], models[1]])
    paths = ("/pause_generation", "/update_weights_from_disk", "/continue_generation")
    assert_calls_succeeded_at_once(report, engines=engines, paths=paths, updates=2)
    assert "abort" in {one.finish for one in report.attempts}
    assert len({(one.session, one.engine) for one in report.attempts}) == len(
        {one.session for one in report.attempts}
    )
    assert_nothing_stale(report, engines)
    assert_all_reused(follow_ups(report))
