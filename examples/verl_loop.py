"""The calls of verl's asynchronous rollout: its balancer picks the server, its client resends what was aborted.

    rollout:    POST /generate with a fresh rid to the sticky server of the request_id, else to the least loaded;
                an answer that ends in "abort" is resent as prompt and tokens
    update:     POST /pause_generation {mode: abort}  ->  the weights in buckets  ->  GET /flush_cache
                ->  POST /continue_generation
    rebalance:  forget who is sticky  ->  abort everywhere  ->  wait for the balancer's counts  ->  continue: each
                request goes on at the least loaded server, and there all of it is prefilled again

Two lines differ from verl: the update names its version (verl counts `global_steps` beside the engine, which
does not hear of it), and a request that changes its server takes its KV along, by `AsyncMoveClient`.
(verl calls its engine in process; these are the HTTP routes of the same calls.)
"""

from __future__ import annotations

import argparse
import asyncio
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import Http, Report, Sample, make_samples, running, tokens_of, until
from weights import read_checkpoint, send_as_tensors

from psrl_sglang.transfer.client import AsyncMoveClient, MoveResult

_MOVE_S = 20.0
_DRAIN_S = 3.0  # verl's is 30
_RESEND_S = 1.0  # as verl waits; meanwhile the balancer's counts go to nothing


@dataclass(slots=True)
class VerlReport(Report):
    moves: list[MoveResult] = field(default_factory=list)


class Balancer:
    """As verl's: sticky for a request_id, else fewest in flight."""

    def __init__(self, servers: Sequence[str]) -> None:
        self.in_flight = dict.fromkeys(servers, 0)
        self.sticky: dict[str, str] = {}

    def acquire(self, request_id: str) -> str:
        server = self.sticky.get(request_id) or min(self.in_flight, key=self.in_flight.__getitem__)
        self.sticky[request_id] = server
        self.in_flight[server] += 1
        return server

    def release(self, server: str) -> None:
        self.in_flight[server] -= 1


class Verl:
    def __init__(self, http: Http, servers: Sequence[str], moves: AsyncMoveClient, report: VerlReport) -> None:
        self._http = http
        self._servers = servers
        self._moves = moves
        self._report = report
        self.balancer = Balancer(servers)
        self._last: dict[str, str] = {}  # request_id -> the server that has its KV

    async def generate(self, sample: Sample) -> None:
        finish = "abort"
        while finish == "abort" and sample.wanted > 0:
            server = self.balancer.acquire(sample.session)
            try:
                last = self._last.get(sample.session, server)
                if last != server:
                    self._report.moves.append(await self._take_along(sample, last, server))
                attempt = await self._http.generate(sample, server, {"rid": uuid.uuid4().hex})
                finish, self._last[sample.session] = attempt.finish, server
            finally:
                self.balancer.release(server)
            if finish == "abort":
                await asyncio.sleep(_RESEND_S)

    async def update(self, weights: Mapping[str, Any], step: int) -> None:
        http, servers = self._http, self._servers
        await http.on_every(servers, "/pause_generation", {"mode": "abort"})
        await http.on_every(servers, "/begin_weight_update", {})
        await send_as_tensors(http, servers, weights, flush_cache=True)
        await http.on_every(servers, "/end_weight_update", {})
        await http.on_every(
            servers, "/update_weight_version", {"new_version": str(step), "abort_all_requests": False}
        )
        await http.flush_every(servers)
        await http.on_every(servers, "/continue_generation", {})

    async def rebalance(self) -> None:
        self.balancer.sticky.clear()
        await self._http.on_every(self._servers, "/pause_generation", {"mode": "abort"})
        try:
            await until(self._in_flight, lambda count: not count, _DRAIN_S)
        except TimeoutError:
            pass  # what was sent after the pause waits in the engine until it goes on
        await self._http.on_every(self._servers, "/continue_generation", {})

    async def _in_flight(self) -> int:
        return sum(self.balancer.in_flight.values())

    async def _take_along(self, sample: Sample, source: str, destination: str) -> MoveResult:
        there, here = await self._workers(source), await self._workers(destination)
        return await self._moves.transfer_direct(
            sample.tokens,
            src=[rank["command_address"] for rank in there["ranks"]],
            dst=[rank["data_address"] for rank in here["ranks"]],
            version=here["version"],
            timeout_s=_MOVE_S,
        )

    async def _workers(self, server: str) -> dict[str, Any]:
        """Where the move workers of a server are; they stay there until it ends."""
        return (await self._http.call("GET", f"{server}/psrl/v1/moves")).json()


async def run(
    servers: Sequence[str],
    checkpoints: Sequence[Path],
    *,
    first_version: int = 2,
    secret: bytes = b"",
    samples: int = 4,
    prompt_tokens: int = 300,
    new_tokens: int = 96,
) -> VerlReport:
    """A turn of every sample with an update in its middle, for each checkpoint; then one with a rebalance in its
    middle, when a server has been added, and one more."""
    report, source = VerlReport(), random.Random("verl")
    working = make_samples("verl", samples, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    async with Http(report) as http, AsyncMoveClient(secret) as moves:
        verl = Verl(http, servers, moves, report)
        for number, weights in enumerate(map(read_checkpoint, checkpoints)):
            async with running(*(verl.generate(sample) for sample in working)):
                await http.wait_running(servers)
                await verl.update(weights, first_version + number)
            _observe(working, source, new_tokens)
        # As after a server was added: everything is on one, until the balancer forgets it.
        for sample in working:
            verl.balancer.sticky[sample.session] = servers[0]
        async with running(*(verl.generate(sample) for sample in working)):
            await http.wait_running(servers[:1])
            await verl.rebalance()
        _observe(working, source, new_tokens)
        await asyncio.gather(*(verl.generate(sample) for sample in working))
    return report


def _observe(samples: Sequence[Sample], source: random.Random, new_tokens: int) -> None:
    for sample in samples:
        sample.observe(tokens_of(source, 40), new_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--server", action="append", required=True)
    parser.add_argument("--checkpoint", action="append", required=True, type=Path)
    given = parser.parse_args()
    report = asyncio.run(run(given.server, given.checkpoint))
    for one in report.attempts:
        print(f"{one.session} turn {one.turn}: {one.cached_tokens} of {len(one.prompt)} reused, {one.finish}")
    for move in report.moves:
        print(f"moved {move.num_tokens} tokens in {move.seconds:.3f} s {move.reason}")


if __name__ == "__main__":
    main()
