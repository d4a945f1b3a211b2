"""The Redis client and the URLs that lead to one, on a real server."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis_server import RedisServer
from remote_support import image, images, read_all, sequence, tier, wanted

from psrl_sglang.store.remote_client import RemoteError, connect


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def side(server: RedisServer) -> Iterator[redis.Redis]:
    """The server, empty, from the side."""
    with server.client as client:
        client.flushall()
        yield client


@pytest.mark.parametrize("prefix", ["a*", "a?", "a[b]", "a\\", "a^"])
def test_a_prefix_is_not_a_pattern(server: RedisServer, side: redis.Redis, prefix: str):
    client = connect(server.url, timeout_s=5.0)
    side.mset({f"{prefix}1": "x", "ab1": "x", "axyz": "x"})
    assert client.delete_matching(prefix) == 1
    assert side.dbsize() == 2


def test_unix_sockets_and_valkey_urls_lead_to_the_same_store(server: RedisServer, side: redis.Redis):
    assert all(tier(server.url).write(one) for one in images(sequence(5)))
    assert read_all(tier(f"unix://{server.socket_path}"), wanted(sequence(5))) == 5
    assert read_all(tier(server.url.replace("redis://", "valkey://")), wanted(sequence(5))) == 5
    assert read_all(tier(f"{server.url}?protocol=3"), wanted(sequence(5))) == 5


def test_a_password_is_used_and_never_shown(tmp_path: Path):
    with RedisServer(tmp_path, password="s3cret") as server:
        good = tier(server.url)
        assert good.write(image(sequence(2), 0, 2))
        assert good.url == f"redis://:***@127.0.0.1:{server.port}/0"
        assert "s3cret" not in str(good.status())
        bad = tier(server.url.replace("s3cret", "wr0ng"))
        assert not bad.write(image(sequence(2), 0, 2))
        assert bad.last_error
        assert "wr0ng" not in str(bad.status())
        query = f"redis://127.0.0.1:{server.port}/0?password=s3cret"
        assert read_all(tier(query), wanted(sequence(2))) == 2
        assert tier(query).url == f"redis://127.0.0.1:{server.port}/0?password=***"


@pytest.mark.parametrize("url", ["memcached://host:1", "host:6379", "", "redis://user:s3cret@host:port/0"])
def test_a_url_that_cannot_be_used_is_refused_at_once(url: str):
    with pytest.raises(ValueError, match="remote store") as caught:
        connect(url, timeout_s=1.0)
    assert "s3cret" not in str(caught.value)


def test_an_unknown_store_is_told_what_is_known():
    with pytest.raises(ValueError, match=r"'memcached://host:1'.*redis://.*valkey://.*mooncake://"):
        connect("memcached://host:1", timeout_s=1.0)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "psrl_sglang.store.redis_client", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ValueError, match=r"pip install 'psrl-sglang\[redis\]'"):
        connect("redis://host:1", timeout_s=1.0)


def test_client_calls_raise_what_went_wrong(server: RedisServer, side: redis.Redis):
    client = connect(server.url, timeout_s=5.0)
    client.ping()
    client.put([("a", [b"12", memoryview(b"345")]), ("b", [b"x"])])
    assert client.get_small(["b", "none", "a"]) == [b"x", None, b"12345"]
    assert [client.read("a", 1, 3), client.read("a", 3, 99), client.read("none", 0, 9)] == [b"234", b"45", None]
    into = [memoryview(bytearray(2)), memoryview(bytearray(1))]
    assert client.read_into("a", 2, into)
    assert [bytes(view) for view in into] == [b"34", b"5"]
    assert not client.read_into("a", 3, into)
    assert not client.read_into("none", 0, into)
    side.rpush("list", "x")
    with pytest.raises(RemoteError, match="WRONGTYPE") as caught:
        client.read("list", 0, 1)
    assert caught.value.reason == "refused"
    client.delete(["a", "none"])
    assert client.get_small(["a", "b"]) == [None, b"x"]
