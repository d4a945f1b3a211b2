"""A bounded lag, for those who accept it: reuse of KV up to L versions old, counted and reported, never older."""

import random

import pytest
from support import NAMED, Running, assert_books_hold, counters, prompt, resident, status

pytestmark = pytest.mark.engine
LAG_1 = {"psrl": {"sglang": {"max_version_lag": 1}}}


@pytest.fixture(scope="module")
def server(server_factory):
    return server_factory(args=(*NAMED, "--enable-metrics"), psrl_config=LAG_1)


def weights_of(models, version: int):
    return models[2 - version % 2]


def test_lag_1_reuses_the_version_before_and_nothing_older(server, models):
    asked = prompt(400)
    server.generate(asked, 4)
    assert server.update_weights(models[2], version="2").success
    one_behind = server.generate(asked, 4)
    assert one_behind.cached_tokens == 592
    assert one_behind.meta_info["psrl"] == {
        "installed_version": "2",
        "oldest_version": "1",
        "version_lag": 1,
        "crossed_versions": False,
    }
    assert server.update_weights(models[1], version="3").success
    two_behind = server.generate(asked, 4)
    assert two_behind.cached_tokens == 0
    assert two_behind.meta_info["psrl"]["version_lag"] == 0
    shown = counters(server)
    assert shown["stale_tokens"] == 592
    assert shown["stale_tokens_by_lag"] == {"1": 592}
    assert shown["oldest_lag_served"] == 1
    metrics = server.get("/metrics").text
    assert 'psrl:stale_tokens_total{lag="1"' in metrics


def test_row_8_a_namespace_is_named_after_the_oldest_version_in_it(server, models):
    """A crossing request keeps its namespace, so its new tokens count as old ones and go out with them."""
    assert server.update_weights(models[2], version="10").success
    asked = prompt(410)
    request = Running(server, asked, 150)
    request.wait_tokens(10)
    server.pause("in_place")
    assert server.update_weights(models[1], version="11").success
    server.resume()
    whole = asked + list(request.result().output_ids)
    turn = server.generate(whole, 4)
    assert turn.cached_tokens > len(asked)
    assert turn.meta_info["psrl"]["oldest_version"] == "10"
    assert server.update_weights(models[2], version="12").success
    assert server.generate(whole, 4).cached_tokens == 0


def test_the_flush_of_a_trainer_keeps_what_the_lag_is_there_to_reuse(server, models):
    assert server.update_weights(models[1], version="15").success
    asked = prompt(415)
    server.generate(asked, 1)
    flushed = server.post("/flush_cache")
    assert flushed.status_code == 200
    assert "lag window" in flushed.text
    assert server.update_weights(models[2], version="16").success
    assert server.generate(asked, 1).cached_tokens == 592
    for version in ("17", "18"):
        assert server.update_weights(models[1], version=version).success
    assert resident(server, asked, "15") == 592
    server.post("/flush_cache")
    assert resident(server, asked, "15") == 0


def test_the_longest_match_of_the_window_wins_and_the_newest_on_a_tie(server, models):
    assert server.update_weights(models[1], version="20").success
    long, short = prompt(420), prompt(420)[:304]
    server.generate(long, 1)
    assert server.update_weights(models[2], version="21").success
    fresh_part = server.generate(short + prompt(421, 20), 1)
    assert fresh_part.meta_info["psrl"]["oldest_version"] == "20"
    other = prompt(422)
    server.generate(other, 1)
    assert server.generate(other, 1).meta_info["psrl"]["oldest_version"] == "21"
    assert server.generate(long, 1).cached_tokens == 592


def test_going_back_does_not_resurrect_a_namespace_that_may_hold_newer_kv(server, models):
    asked = prompt(430)
    for version in ("30", "31", "32"):
        assert server.update_weights(models[1], version=version).success
        server.generate(asked, 1)
    assert server.update_weights(models[1], version="30").success
    assert resident(server, asked) in (0, 592)
    answer = server.generate(asked, 1)
    assert answer.meta_info["psrl"]["oldest_version"] == "32" or answer.cached_tokens == 0


def test_row_7_lag_is_bounded_over_random_changes(server, models):
    source = random.Random(7)
    installed = ["30"]
    asked = [prompt(440 + i, 200) for i in range(4)]
    for step in range(60):
        if source.random() < 0.4:
            version = f"r{step}"
            assert server.update_weights(weights_of(models, step), version=version).success
            installed.append(version)
        reply = server.generate(source.choice(asked), 1)
        window = {*installed[-2:]}
        oldest = reply.meta_info["psrl"]["oldest_version"].partition("#")[0]
        assert oldest in window, (step, oldest, installed[-3:])
    assert counters(server)["oldest_lag_served"] == 1
    assert status(server)["max_version_lag"] == 1


def test_a_strict_engine_has_no_use_for_lagging_namespaces(server):
    assert all(entry["tag"].endswith("~") for entry in status(server)["versions"])
    assert_books_hold(server)
