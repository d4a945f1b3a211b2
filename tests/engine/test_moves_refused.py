"""What an engine that is to move KV cannot do is said before it serves, with the setting and what to change."""

import socket

import pytest
from move_support import movable
from test_fail_closed import refusal  # noqa: F401 - a fixture

pytestmark = pytest.mark.engine


def test_a_port_that_is_taken_is_named(refusal):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrote = refusal(psrl_config=movable(sglang={"move_port": port}))
    assert f"move_port {port}" in wrote
    assert "free ports" in wrote


def test_a_secret_that_cannot_be_read_or_is_too_short_is_named(refusal, tmp_path):  # noqa: F811
    wrote = refusal(psrl_config=movable(sglang={"secret_file": str(tmp_path / "none")}))
    assert "psrl.sglang.secret_file" in wrote
    (tmp_path / "short").write_text("abc")
    wrote = refusal(psrl_config=movable(sglang={"secret_file": str(tmp_path / "short")}))
    assert "3 bytes" in wrote
    assert "abc" not in wrote


def test_moves_with_hicache_are_refused(refusal):  # noqa: F811
    wrote = refusal("--enable-hierarchical-cache", "--hicache-ratio", "2", psrl_config=movable())
    assert "psrl.lmcache.enable_p2p" in wrote
    assert "--enable-hierarchical-cache" in wrote
