"""The connections to the engines: replies in every framing, however they are cut, and nothing of one in another."""

import asyncio
import random

import pytest
from gateway_support import run, until

from psrl_sglang.gateway.framing import BadReply, Chunks, read_head
from psrl_sglang.gateway.upstream import NoReply, ReplyBroken, Upstream, WorkerUnreachable

HELLO = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=1\r\nhello\r\n6\r\n world\r\n0\r\nt: 1\r\n\r\n"
)


class Server:
    """Answers the n-th request with the n-th script: pieces, a pause for a number, the end for None."""

    def __init__(self, *scripts: list) -> None:
        self.scripts = list(scripts)
        self.connections = 0
        self.requests: list[bytes] = []
        self.closed = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.split(b"\r\n")
                        if line.startswith(b"content-length")
                    ),
                    0,
                )
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.scripts.pop(0):
                    if piece is None:
                        return
                    if isinstance(piece, float):
                        await asyncio.sleep(piece)
                        continue
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()


def upstream(silence_s: float = 5.0) -> Upstream:
    return Upstream(connect_timeout_s=2.0, reply_timeout_s=silence_s)


async def fetch(up: Upstream, server: Server, body: bytes = b"x") -> tuple[int, bytes]:
    reply = await up.send("POST", server.url, "/p?q=1", [("a", "b")], body)
    try:
        return reply.status, await reply.read_all()
    finally:
        reply.close()


def test_a_connection_is_used_again_and_the_request_is_as_it_should_be():
    async def scenario():
        async with Server([HELLO], [CHUNKED], [HELLO]) as server:
            up = upstream()
            assert await fetch(up, server) == (200, b"hello")
            assert await fetch(up, server, b"y" * 200_000) == (200, b"hello world")
            assert await fetch(up, server, b"") == (200, b"hello")
            assert server.connections == 1
            name = server.url.removeprefix("http://").encode()
            assert (
                server.requests[0]
                == b"POST /p?q=1 HTTP/1.1\r\nhost: " + name + b"\r\na: b\r\ncontent-length: 1\r\n\r\nx"
            )
            await up.close()
            await until(lambda: server.closed == 1, "it is closed with the pool")

    run(scenario())


@pytest.mark.parametrize(
    ("reply", "body", "stays"),
    [
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + HELLO], b"hello", True),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b"", True),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], b"", True),
        ([HELLO.replace(b"content-type", b"connection: close\r\ncontent-type")], b"hello", False),
        ([HELLO.replace(b"1.1", b"1.0")], b"hello", False),
        ([HELLO + b"more", 1.0], b"hello", False),
        ([CHUNKED + b"more", 1.0], b"hello world", False),
        ([b"HTTP/1.1 200 OK\r\n\r\nuntil the ", b"end", None], b"until the end", False),
    ],
    ids=["continue", "no-content", "empty", "close", "1.0", "more", "more-chunks", "until-closed"],
)
def test_every_way_a_reply_may_end(reply, body, stays):
    async def scenario():
        async with Server(reply, [HELLO]) as server:
            up = upstream()
            assert (await fetch(up, server))[1] == body
            await asyncio.sleep(0.02)
            assert await fetch(up, server) == (200, b"hello")
            assert server.connections == (1 if stays else 2)
            await up.close()

    run(scenario())


def test_a_reply_is_the_same_however_it_is_cut():
    source = random.Random(1)
    for whole, body in ((HELLO, b"hello"), (CHUNKED, b"hello world")):
        for _ in range(300):
            buffer, chunks, got, at = b"", Chunks(), b"", 0
            head = None
            while at < len(whole):
                size = source.randrange(1, 30)
                data, at = whole[at : at + size], at + size
                if head is None:
                    found = read_head(buffer + data)
                    if found is None:
                        buffer += data
                        continue
                    head, data = found
                got += chunks.take(data) if head.is_chunked else data
            assert got == body
            assert head is not None
            assert chunks.is_complete == head.is_chunked


@pytest.mark.parametrize(
    "head",
    [
        b"SSH-2.0-x\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
    ],
)
def test_what_is_no_reply_is_refused(head):
    with pytest.raises(BadReply):
        read_head(head)

    async def scenario():
        async with Server([head], [HELLO]) as server:
            up = upstream()
            with pytest.raises(NoReply):
                await fetch(up, server)
            assert await fetch(up, server) == (200, b"hello")
            await up.close()

    run(scenario())


@pytest.mark.parametrize("data", [b"x\r\n", b"-1\r\n", b"1_0\r\n", b"9" * 9000, b"\r\n"])
def test_chunks_that_are_none_are_refused(data):
    with pytest.raises(BadReply):
        Chunks().take(data)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([None], NoReply),
        ([b"HTTP/1.1 200", None], NoReply),
        ([HELLO[:-2], None], ReplyBroken),
        ([CHUNKED[:-4], None], ReplyBroken),
        ([CHUNKED.replace(b"6\r\n", b"zz\r\n")], ReplyBroken),
        ([5.0], NoReply),
        ([HELLO[:-2], 5.0], ReplyBroken),
    ],
    ids=["at-once", "in-head", "in-body", "in-chunk", "bad-chunk", "silent", "silent-in-body"],
)
def test_a_connection_that_ends_too_early_is_told_by_when(script, error):
    async def scenario():
        async with Server(script, [HELLO]) as server:
            up = upstream(0.2)
            with pytest.raises(error):
                await fetch(up, server)
            assert await fetch(up, server) == (200, b"hello")
            assert server.connections == 2
            await up.close()

    run(scenario())


def test_nobody_there_is_not_the_same_as_no_reply():
    async def scenario():
        up = upstream()
        for url in ("http://127.0.0.1:9", "http://no-such-host.invalid:1"):
            with pytest.raises(WorkerUnreachable):
                await up.send("POST", url, "/", [], b"")
        await up.close()

    run(scenario())


def test_an_idle_connection_that_the_engine_closed_is_not_used():
    async def scenario():
        async with Server([HELLO, None], [HELLO, b"HTTP/1.1 408 Late\r\n\r\n", 1.0], [HELLO]) as server:
            up = upstream()
            for connections in (1, 2, 3):
                assert await fetch(up, server) == (200, b"hello")
                await asyncio.sleep(0.05)
                assert server.connections == connections
            await up.close()

    run(scenario())


def test_a_reader_that_is_slow_holds_the_engine_back():
    async def scenario():
        piece = b"x" * 65536
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (400 * len(piece))
        async with Server([head, *[piece] * 400]) as server:
            up = upstream(0.3)
            reply = await up.send("POST", server.url, "/", [], b"")
            await asyncio.sleep(0.5)  # longer than the engine may be silent: it is we who do not read
            assert reply._connection._size < 1 << 20
            assert len(await reply.read_all()) == 400 * len(piece)
            reply.close()
            assert server.closed == 0
            await up.close()

    run(scenario())


def test_a_reply_that_is_closed_before_its_end_ends_its_connection():
    async def scenario():
        async with Server([HELLO[:-2], 5.0], [HELLO]) as server:
            up = upstream()
            reply = await up.send("POST", server.url, "/", [], b"")
            reply.close()
            waiting = asyncio.create_task(up.send("POST", server.url, "/", [], b""))
            await asyncio.sleep(0.05)
            assert (await waiting).status == 200
            assert server.connections == 2
            await up.close()

    run(scenario())


def test_a_path_in_the_address_is_kept():
    async def scenario():
        async with Server([HELLO]) as server:
            up = upstream()
            reply = await up.send("POST", server.url + "/prefix", "/generate", [], b"")
            reply.close()
            assert server.requests[0].startswith(b"POST /prefix/generate HTTP/1.1\r\n")
            await up.close()

    run(scenario())
