"""Weight versions on a real server, nothing running while they change: no flush, no stale hit, in any order."""

import pytest
from support import (
    NAMED,
    STRICT,
    assert_books_hold,
    assert_same,
    counters,
    difference,
    post_ok,
    prompt,
    read_weights,
    resident,
    send_piece,
    send_weights,
    status,
)

pytestmark = pytest.mark.engine
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def server(server_factory):
    return server_factory(args=NAMED, psrl_config=STRICT)


@pytest.fixture(autouse=True)
def start_at_version_1(server, models):
    """Every test begins with the weights of seed 1, named "1", and an empty pool: dead versions give way first
    when it is full."""
    assert server.update_weights(models[1], version="1").success
    assert server.flush_cache()


def test_row_4_after_an_update_answers_equal_a_fresh_engine_of_the_new_weights(server, models, fresh):
    asked = prompt(40)
    cold = server.generate(asked, NEW_TOKENS)
    repeat = server.generate(asked, NEW_TOKENS)
    assert (cold.cached_tokens, repeat.cached_tokens) == (0, 592)
    assert_same(repeat, cold)
    assert_same(cold, fresh(1, asked, NEW_TOKENS))

    assert server.update_weights(models[2], version="2").success
    server.overwrite_pool()
    new = server.generate(asked, NEW_TOKENS)
    assert new.cached_tokens == 0
    assert new.meta_info["weight_version"] == "2"
    assert_same(new, fresh(2, asked, NEW_TOKENS))
    assert difference(new, cold) > 0.01  # the two seeds do differ, so the comparison can fail

    hit = server.generate(asked, NEW_TOKENS)
    assert hit.cached_tokens == 592
    assert_same(hit, new)


def test_going_back_to_an_old_version_hits_its_kv_again(server, models):
    asked = prompt(41)
    first = server.generate(asked, NEW_TOKENS)
    assert server.update_weights(models[2], version="2").success
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
    assert server.update_weights(models[1], version="1").success
    back = server.generate(asked, NEW_TOKENS)
    assert back.cached_tokens == 592
    assert_same(back, first)


@pytest.mark.parametrize("flush", [True, False])
def test_update_without_a_version_never_hits_what_was_there(server, models, fresh, flush):
    asked = prompt(42)
    server.generate(asked, NEW_TOKENS)
    assert server.update_weights(models[2], flush_cache=flush).success
    new = server.generate(asked, NEW_TOKENS)
    assert new.cached_tokens == 0
    assert_same(new, fresh(2, asked, NEW_TOKENS))
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 592


def test_failed_update_never_hits_what_was_there(server, tmp_path):
    asked = prompt(43)
    server.generate(asked, NEW_TOKENS)
    before = status(server)["tag"]
    failed = server.update_weights(tmp_path / "missing", version="2")
    assert not failed.success
    assert status(server)["tag"] != before
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0


def test_the_same_version_twice_means_the_same_weights(server, models):
    asked = prompt(44)
    server.generate(asked, NEW_TOKENS)
    changes = counters(server)["changes"]
    assert server.update_weights(models[1], version="1").success
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 592
    assert counters(server)["changes"] == changes


@pytest.mark.parametrize("pieces", [1, 5])
def test_update_from_tensors_names_the_result_at_the_end(server, models, fresh, pieces):
    asked = prompt(45 + pieces)
    old = server.generate(asked, NEW_TOKENS)
    send_weights(server, models[2], pieces=pieces, weight_version="2", flush_cache=True)
    assert status(server)["version"] == "2"
    new = server.generate(asked, NEW_TOKENS)
    assert new.cached_tokens == 0
    assert_same(new, fresh(2, asked, NEW_TOKENS))
    assert server.update_weights(models[1], version="1").success
    assert_same(server.generate(asked, NEW_TOKENS), old)


def test_update_from_tensors_without_a_version_gets_an_epoch(server, models, fresh):
    asked = prompt(52)
    server.generate(asked, NEW_TOKENS)
    send_weights(server, models[2], pieces=2, flush_cache=False)
    assert "#" in status(server)["version"]
    new = server.generate(asked, NEW_TOKENS)
    assert new.cached_tokens == 0
    assert_same(new, fresh(2, asked, NEW_TOKENS))


def test_kv_of_half_written_weights_is_never_matched_later(server, models, fresh):
    asked = prompt(53)
    weights = list(read_weights(models[2]).items())
    half = len(weights) // 2
    post_ok(server, "/begin_weight_update", {})
    send_piece(server, dict(weights[:half]), weight_version="2")
    torn = server.generate(asked, NEW_TOKENS)
    assert status(server)["updating"]
    send_piece(server, dict(weights[half:]), weight_version="2")
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
    post_ok(server, "/end_weight_update", {})
    whole = server.generate(asked, NEW_TOKENS)
    assert whole.cached_tokens == 0
    assert_same(whole, fresh(2, asked, NEW_TOKENS))
    assert difference(torn, whole) > 0.01


def test_weights_written_behind_sglangs_back_get_an_epoch_and_then_the_name_they_are_given(server):
    asked = prompt(54)
    server.generate(asked, NEW_TOKENS)
    post_ok(server, "/begin_weight_update", {})
    post_ok(server, "/end_weight_update", {})
    assert "#" in status(server)["version"]
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0
    post_ok(server, "/update_weight_version", {"new_version": "rdma-1", "abort_all_requests": False})
    assert status(server)["version"] == "rdma-1"
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0


def test_weights_reset_by_the_checker_get_an_epoch(server):
    asked = prompt(55)
    server.generate(asked, NEW_TOKENS)
    assert server.post("/weights_checker", {"action": "snapshot"}).status_code == 200
    assert server.generate(asked, 1).cached_tokens == 592
    server.post("/weights_checker", {"action": "reset_tensors"})
    assert server.generate(asked, NEW_TOKENS).cached_tokens == 0


def test_a_disk_update_inside_a_session_leaves_its_end_without_a_name(server, models, fresh):
    asked = prompt(56)
    post_ok(server, "/begin_weight_update", {})
    send_piece(server, read_weights(models[1]), weight_version="named")
    assert server.update_weights(models[2]).success
    post_ok(server, "/end_weight_update", {})
    assert "named" not in status(server)["version"]
    new = server.generate(asked, NEW_TOKENS)
    assert_same(new, fresh(2, asked, NEW_TOKENS))


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_the_users_own_keys_keep_separating(server, models, field):
    asked = prompt(60 if field == "extra_key" else 61)
    plain = server.generate(asked, NEW_TOKENS)
    one = server.generate(asked, NEW_TOKENS, **{field: "tenant-a"})
    again = server.generate(asked, NEW_TOKENS, **{field: "tenant-a"})
    other = server.generate(asked, NEW_TOKENS, **{field: "tenant-b"})
    assert [g.cached_tokens for g in (plain, one, again, other)] == [0, 0, 592, 0]
    assert server.update_weights(models[2], version="2").success
    assert server.generate(asked, NEW_TOKENS, **{field: "tenant-a"}).cached_tokens == 0
    assert server.update_weights(models[1], version="1").success
    assert server.generate(asked, NEW_TOKENS, **{field: "tenant-a"}).cached_tokens == 592


def test_a_salt_that_looks_like_a_version_does_not_reach_that_version(server, models):
    asked = prompt(62)
    server.generate(asked, NEW_TOKENS)
    assert server.update_weights(models[2], version="2").success
    assert server.generate(asked, NEW_TOKENS, cache_salt="psrl:1").cached_tokens == 0
    assert server.generate(asked, NEW_TOKENS, cache_salt="psrl:2").cached_tokens == 0
    assert server.generate(asked, NEW_TOKENS, cache_salt="psrl:2|x").cached_tokens == 0


def test_chat_requests_are_versioned_too(server, models):
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "tell me about pages " * 20}],
        "max_tokens": 4,
    }

    def cached():
        usage = post_ok(server, "/v1/chat/completions", body)["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0), usage["prompt_tokens"]

    cached()
    hits = counters(server)["hit_requests"]
    cached()
    assert counters(server)["hit_requests"] == hits + 1
    assert server.update_weights(models[2], version="2").success
    misses = counters(server)["miss_requests"]
    cached()
    assert counters(server)["miss_requests"] == misses + 1


def test_replies_name_the_oldest_version_behind_them(server, models):
    asked = prompt(63)
    assert server.generate(asked, 4).meta_info["psrl"] == {
        "installed_version": "1",
        "oldest_version": "1",
        "version_lag": 0,
        "crossed_versions": False,
    }
    assert server.update_weights(models[2], version="step/2~x|y").success
    assert server.generate(asked, 4).meta_info["psrl"]["oldest_version"] == "step/2~x|y"


def test_status_shows_what_each_version_occupies(server, models):
    asked = prompt(64)
    server.generate(asked, 1)
    assert server.update_weights(models[2], version="2").success
    shown = status(server)
    assert shown["version"] == "2"
    assert shown["window"] == ["2"]
    by_version = {entry["version"]: entry for entry in shown["versions"]}
    assert by_version["1"]["lag"] is None
    assert by_version["1"]["device_tokens"] >= 592
    assert by_version["1"]["evictable_tokens"] == by_version["1"]["device_tokens"]
    assert resident(server, asked) == 0
    assert resident(server, asked, "1") == 592


def test_retire_evicts_a_version_and_nothing_else(server, models):
    asked = prompt(65)
    server.generate(asked, 1)
    assert server.update_weights(models[2], version="2").success
    server.generate(asked, 1)
    retired = post_ok(server, "/psrl/v1/retire", {"version": "1"})
    assert retired["device_tokens"] >= 592
    assert retired["kept_tokens"] == 0
    assert resident(server, asked, "1") == 0
    assert resident(server, asked, "2") == 592


def test_row_9_dead_versions_are_evicted_first(server, models):
    assert server.flush_cache()
    old, kept = prompt(66, 1600), prompt(67, 1600)
    assert server.update_weights(models[2], version="dead").success
    server.generate(old, 1)
    assert server.update_weights(models[1], version="live").success
    server.generate(kept, 1)
    for seed in range(3):
        server.generate(prompt(70 + seed, 1600), 1)
        assert resident(server, old, "dead") in (0, 1600)
    server.generate(prompt(80, 1600), 1)
    assert resident(server, old, "dead") < 1600
    assert resident(server, kept) == 1600


def test_the_books_hold_after_all_of_this(server):
    assert_books_hold(server)
    shown = counters(server)
    assert shown["stale_tokens"] == 0
    assert shown["longest_change_s"] < 1.0
