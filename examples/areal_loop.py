"""The calls of AReaL's remote engine: no router, one server for each rid, and a loop around aborts.

    rollout:  POST /generate to the server of the rid (the next one in turn for a new rid); while the answer's
              finish reason is "abort", again with the tokens so far, to the same server
    update:   POST /pause_generation {}  ->  POST /update_weights_from_disk {abort_all_requests: true}
              ->  POST /continue_generation {}

AReaL names no version. The engine then makes one up that no other engine has: nothing stale is reused, and KV
does not move between engines from the first update on. It need not: a rid never changes its server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from trainer import Http, Report, Sample, make_samples, running, tokens_of

_MOST_RIDS = 128


class Areal:
    def __init__(self, http: Http, servers: Sequence[str]) -> None:
        self._http = http
        self._servers = servers
        self._next = 0
        self._of_rid: dict[str, str] = {}
        self._may_submit = asyncio.Event()
        self._may_submit.set()

    async def generate(self, sample: Sample) -> None:
        server = self._server(sample.session)
        finish = ""
        while finish not in ("stop", "length") and sample.wanted > 0:
            await self._may_submit.wait()
            finish = (await self._http.generate(sample, server, {"stream": False})).finish

    async def update(self, checkpoint: Path) -> None:
        http, servers = self._http, self._servers
        self._may_submit.clear()
        await http.on_every(servers, "/pause_generation", {})
        weights = {"model_path": str(checkpoint), "abort_all_requests": True}
        await http.on_every(servers, "/update_weights_from_disk", weights)
        await http.on_every(servers, "/continue_generation", {})
        self._may_submit.set()

    def _server(self, rid: str) -> str:
        if rid not in self._of_rid:
            if len(self._of_rid) >= _MOST_RIDS:
                del self._of_rid[next(iter(self._of_rid))]
            self._of_rid[rid] = self._servers[self._next]
            self._next = (self._next + 1) % len(self._servers)
        return self._of_rid[rid]


async def run(
    servers: Sequence[str],
    checkpoints: Sequence[Path],
    *,
    samples: int = 4,
    prompt_tokens: int = 300,
    new_tokens: int = 96,
) -> Report:
    """A turn of every sample with an update in its middle, for each checkpoint; two more turns at the end."""
    report, source = Report(), random.Random("areal")
    working = make_samples("areal", samples, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    async with Http(report) as http:
        areal = Areal(http, servers)
        for checkpoint in [*checkpoints, None, None]:
            async with running(*(areal.generate(sample) for sample in working)):
                if checkpoint is not None:
                    await http.wait_running(servers)
                    await areal.update(checkpoint)
            for sample in working:
                sample.observe(tokens_of(source, 40), new_tokens)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--server", action="append", required=True)
    parser.add_argument("--checkpoint", action="append", required=True, type=Path)
    given = parser.parse_args()
    report = asyncio.run(run(given.server, given.checkpoint))
    for one in report.attempts:
        print(f"{one.session} turn {one.turn}: {one.cached_tokens} of {len(one.prompt)} reused, {one.finish}")


if __name__ == "__main__":
    main()
