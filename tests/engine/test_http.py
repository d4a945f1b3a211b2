"""The routes of the plugin in SGLang's HTTP process: bodies, authorization, pins and their leases."""

import time

import pytest
from support import NAMED, STRICT, assert_books_hold, post_ok, prompt, resident, status, wait_until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(server_factory):
    settings = {"psrl": {"sglang": {"pin_budget_tokens": 1300, "pin_lease_s": 60}}}
    return server_factory(args=NAMED, psrl_config=settings)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("lookup", {}, "input_ids"),
        ("lookup", {"input_ids": []}, "input_ids"),
        ("lookup", {"input_ids": [1, -2]}, "input_ids"),
        ("lookup", {"input_ids": ["one"]}, "input_ids"),
        ("lookup", {"input_ids": [2**63]}, "input_ids"),
        ("pin", {"input_ids": [2**31], "owner": "me"}, "input_ids"),
        ("lookup", {"input_ids": [1], "verison": "1"}, "verison"),
        ("pin", {"input_ids": [1]}, "owner"),
        ("pin", {"input_ids": [1], "owner": ""}, "owner"),
        ("pin", {"input_ids": [1], "owner": "me", "lease_s": -1}, "lease_s"),
        ("pin", {"input_ids": [1], "owner": "me", "lease_s": "long"}, "lease_s"),
        ("unpin", {}, "pin_id"),
        ("unpin", {"pin_id": "a", "owner": "b"}, "pin_id"),
        ("retire", {"version": 3}, "version"),
        ("retire", {}, "version"),
    ],
)
def test_a_bad_body_is_refused_with_its_field_and_the_server_goes_on(server, path, body, field):
    reply = server.post(f"/psrl/v1/{path}", body)
    assert 400 <= reply.status_code < 500
    assert field in reply.text
    assert len(reply.text) < 500  # and not the prompt, once more
    assert server.get("/psrl/v1/check").json()["ok"]


@pytest.mark.parametrize("text", ["", "{", "[1,2]", "null", '"x"'])
def test_a_body_that_is_no_object_is_refused(server, text):
    headers = {"content-type": "application/json"}
    reply = server.post("/psrl/v1/lookup", content=text, headers=headers)
    assert 400 <= reply.status_code < 500


def test_unknown_versions_and_pins_are_404_and_say_what_is_known(server):
    unknown = server.post("/psrl/v1/retire", {"version": "nine"})
    assert unknown.status_code == 404
    assert "'nine'" in unknown.text
    assert "'1'" in unknown.text
    assert server.post("/psrl/v1/unpin", {"pin_id": "nine"}).status_code == 404


def test_a_prefix_that_is_not_on_the_device_is_not_pinned(server):
    assert post_ok(server, "/psrl/v1/pin", {"input_ids": prompt(500), "owner": "me"})["pin_id"] is None


def test_a_pinned_prefix_survives_pressure_and_is_gone_after(server):
    asked = prompt(501)
    server.generate(asked, 1)
    pin = post_ok(server, "/psrl/v1/pin", {"input_ids": asked, "owner": "me"})
    assert pin["tokens"] == 592
    server.overwrite_pool()
    assert resident(server, asked) == 592
    assert status(server)["pins"]["held"] == [
        {"pin_id": pin["pin_id"], "owner": "me", "tag": "1", "tokens": 592},
    ]
    assert "1 pin(s)" in server.post("/flush_cache").text
    assert resident(server, asked) == 592
    assert post_ok(server, "/psrl/v1/unpin", {"pin_id": pin["pin_id"]})["tokens"] == 592
    server.overwrite_pool()
    assert resident(server, asked) < 592


def test_a_pin_ends_with_its_lease(server):
    asked = prompt(502)
    server.generate(asked, 1)
    post_ok(server, "/psrl/v1/pin", {"input_ids": asked, "owner": "me", "pin_id": "short", "lease_s": 0.5})
    assert status(server)["pins"]["tokens"] == 592
    wait_until(lambda: status(server)["pins"]["tokens"] == 0, "the lease ends", timeout_s=10)
    assert server.post("/psrl/v1/unpin", {"pin_id": "short"}).status_code == 404


def test_an_old_lease_does_not_end_a_newer_pin_of_the_same_id(server):
    asked = prompt(512)
    server.generate(asked, 1)
    body = {"input_ids": asked, "owner": "me", "pin_id": "again"}
    assert server.post("/psrl/v1/pin", {**body, "version": "nine", "lease_s": 0.5}).status_code == 404
    post_ok(server, "/psrl/v1/pin", {**body, "lease_s": 0.7})
    post_ok(server, "/psrl/v1/unpin", {"pin_id": "again"})
    post_ok(server, "/psrl/v1/pin", {**body, "lease_s": 60})
    time.sleep(1.5)
    assert status(server)["pins"]["tokens"] == 592
    post_ok(server, "/psrl/v1/unpin", {"pin_id": "again"})


def test_a_refused_pin_does_not_cancel_the_lease_of_a_granted_one_with_its_id(server):
    asked = prompt(513)
    server.generate(asked, 1)
    post_ok(server, "/psrl/v1/pin", {"input_ids": asked, "owner": "me", "pin_id": "same", "lease_s": 0.7})
    refused = server.post("/psrl/v1/pin", {"input_ids": asked, "owner": "me", "pin_id": "same"})
    assert refused.status_code == 409
    absent = post_ok(server, "/psrl/v1/pin", {"input_ids": prompt(514), "owner": "me", "pin_id": "absent"})
    assert absent["pin_id"] is None
    wait_until(lambda: status(server)["pins"]["tokens"] == 0, "the lease ends", timeout_s=10)


def test_over_the_budget_the_oldest_pin_gives_way_and_a_prefix_over_all_of_it_is_refused(server):
    for seed in (503, 504, 505):
        server.generate(prompt(seed), 1)
    for seed in (503, 504):
        post_ok(server, "/psrl/v1/pin", {"input_ids": prompt(seed), "owner": "me", "pin_id": f"p{seed}"})
    third = post_ok(server, "/psrl/v1/pin", {"input_ids": prompt(505), "owner": "you", "pin_id": "p505"})
    assert third["dropped"] == ["p503"]
    again = server.post("/psrl/v1/pin", {"input_ids": prompt(505), "owner": "you", "pin_id": "p505"})
    assert again.status_code == 409
    long = prompt(506, 1400)
    server.generate(long, 1)
    refused = server.post("/psrl/v1/pin", {"input_ids": long, "owner": "me"})
    assert refused.status_code == 409
    assert "1300" in refused.text
    assert post_ok(server, "/psrl/v1/unpin", {"owner": "you"})["unpinned"] == ["p505"]
    assert post_ok(server, "/psrl/v1/unpin", {"owner": "me"})["unpinned"] == ["p504"]
    assert_books_hold(server)


def test_a_retired_version_keeps_what_is_pinned(server, models):
    asked = prompt(507)
    server.generate(asked, 1)
    post_ok(server, "/psrl/v1/pin", {"input_ids": asked, "owner": "me", "pin_id": "kept"})
    assert server.update_weights(models[2], version="2").success
    retired = post_ok(server, "/psrl/v1/retire", {"version": "1"})
    assert retired["kept_tokens"] >= 592
    assert resident(server, asked, "1") == 592
    post_ok(server, "/psrl/v1/unpin", {"pin_id": "kept"})
    assert post_ok(server, "/psrl/v1/retire", {"version": "1"})["kept_tokens"] == 0


def test_routes_are_guarded_like_sglangs_admin_routes(server_factory):
    server = server_factory(args=(*NAMED, "--admin-api-key", "secret"), psrl_config=STRICT)
    for path in ("/psrl/v1/status", "/psrl/v1/check"):
        assert server.get(path).status_code == 401
        assert server.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert server.post("/flush_cache").status_code == 401
    server.stop(grace_s=0.0)


def test_several_http_workers_serve_the_same_routes(server_factory, models):
    server = server_factory(args=(*NAMED, "--tokenizer-worker-num", "2"), psrl_config=STRICT)
    asked = prompt(510)
    first = server.generate(asked, 4)
    assert first.meta_info["psrl"]["oldest_version"] == "1"
    for _ in range(8):
        assert status(server)["version"] == "1"
        assert resident(server, asked) == 592
    post_ok(server, "/psrl/v1/pin", {"input_ids": asked, "owner": "me", "pin_id": "w", "lease_s": 1.0})
    assert status(server)["pins"]["tokens"] == 592
    time.sleep(1.5)
    wait_until(lambda: status(server)["pins"]["tokens"] == 0, "the lease ends", timeout_s=10)
    assert "Nothing stayed" in server.post("/flush_cache").text
    server.stop(grace_s=0.0)
