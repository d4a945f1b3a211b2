"""What the engine's own routing side costs a request for which nothing moves, in its HTTP process.

    python benchmarks/middleware.py [--requests 20000] [--tokens 8192] [--json FILE]

The ASGI layer and the step between tokenizing and sending, around an application that does nothing, against that
application alone: microseconds a request, for a session that is known here and for a prompt without a session.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from results import Row, at_most, write_rows

from psrl_sglang.config import load_config
from psrl_sglang.engine.middleware import NoteMiddleware
from psrl_sglang.engine.pull import Puller

TARGET = at_most(100)  # microseconds
CONFIG = {
    "psrl": {
        "lmcache": {"enable": True, "enable_p2p": True},
        "rollout_coordination": {
            "routing_strategy": {"kv_transfer": {"enable": True, "transfer_mode": "sync"}}
        },
    }
}


class NoSources:
    """The engine behind it, where nobody leaves and nothing is reported."""

    async def left(self) -> Any:
        await asyncio.Event().wait()

    def serves(self, name: str, tokens: int) -> None:
        pass

    async def find(self, *_: Any) -> Any:
        raise AssertionError("nothing is to be fetched")

    async def close(self) -> None:
        pass


async def measure(requests: int, tokens: int) -> list[Row]:
    puller = Puller(load_config(CONFIG), NoSources())  # type: ignore[arg-type]
    ids = list(range(tokens))

    async def bare(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ours(scope: Any, receive: Any, send: Any) -> None:
        await puller.before_send(SimpleNamespace(), SimpleNamespace(input_ids=ids, routing_key=None))
        await bare(scope, receive, send)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        pass

    async def seconds(app: Any, headers: list[tuple[bytes, bytes]]) -> float:
        scope = {"type": "http", "path": "/generate", "headers": headers}
        began_s = time.perf_counter()
        for _ in range(requests):
            await app(scope, receive, send)
        return (time.perf_counter() - began_s) / requests

    others = [(b"content-type", b"application/json"), (b"user-agent", b"trainer")]
    session = [*others, (b"x-smg-routing-key", b"session-1")]
    rows: list[Row] = []
    puller._know("session-1")
    puller._know(puller._name_of(ids))
    for name, headers in (("a known session", session), (f"no session, {tokens} tokens", others)):
        pairs = [(await seconds(bare, headers), await seconds(NoteMiddleware(ours), headers)) for _ in range(5)]
        extra_us = statistics.median(with_it - without for without, with_it in pairs) * 1e6
        print(f"{name}: {extra_us:.1f} us a request (target {TARGET.limit:g})")
        rows.append(
            Row(
                benchmark="middleware",
                case=name,
                metric="added to a request",
                value=extra_us,
                unit="us",
                target=TARGET,
            )
        )
    await puller.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows = asyncio.run(measure(options.requests, options.tokens))
    if options.json is not None:
        write_rows(options.json, rows)


if __name__ == "__main__":
    main()
