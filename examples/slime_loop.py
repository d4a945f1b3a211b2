"""The calls of slime's rollout: sessions by routing key, partial rollouts, and a pause around every update.

    rollout:  POST /generate with X-SMG-Routing-Key, through the router
    stop:     POST /abort_request {abort_all} on each engine until /v1/loads says that it is idle
    update:   POST /pause_generation {}  ->  GET /flush_cache until 200  ->  POST /update_weights_from_disk with
              weight_version  ->  POST /continue_generation {}

A sample that was cut off goes back to the buffer, and on in the next rollout with what it has: prompt and answer.

    python examples/slime_loop.py --router http://127.0.0.1:30000 --engine http://127.0.0.1:30001 \\
        --engine http://127.0.0.1:30002 --checkpoint step-1 --checkpoint step-2
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer import Http, Report, Sample, make_samples, running, tokens_of, until

Route = Callable[[str, int], str]
"""Stands for the router: where turn so and so of a session goes."""


class Slime:
    def __init__(self, http: Http, engines: Sequence[str], route: Route) -> None:
        self._http = http
        self._engines = engines
        self._route = route

    async def generate(self, sample: Sample) -> None:
        await self._http.generate(
            sample,
            self._route(sample.session, sample.turn),
            {},
            headers={"X-SMG-Routing-Key": sample.session},
        )

    async def stop(self) -> None:
        """Abort until idle; who generates gets what there is."""
        await self._http.on_every(self._engines, "/abort_request", {"abort_all": True})
        for engine in self._engines:
            await until(lambda engine=engine: self._http.requests_on(engine), lambda load: not sum(load))

    async def update(self, checkpoint: Path, version: str) -> None:
        http, engines = self._http, self._engines
        await http.on_every(engines, "/pause_generation", {})
        await http.flush_every(engines)
        weights = {"model_path": str(checkpoint), "weight_version": version}
        await http.on_every(engines, "/update_weights_from_disk", weights)
        await http.on_every(engines, "/continue_generation", {})


async def run(
    engines: Sequence[str],
    route: Route,
    checkpoints: Sequence[Path],
    *,
    first_version: int = 2,
    samples: int = 4,
    prompt_tokens: int = 300,
    new_tokens: int = 96,
) -> Report:
    """For each checkpoint: a turn of every sample, stopped or overtaken by the update, and the rest of it
    after. A last turn runs under the last weights."""
    report, source = Report(), random.Random("slime")
    buffer = make_samples("slime", samples, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    async with Http(report) as http:
        slime = Slime(http, engines, route)
        for number, checkpoint in enumerate(checkpoints):
            async with running(*(slime.generate(sample) for sample in buffer)):
                await http.wait_running(engines)
                if number % 2:
                    await slime.stop()
                await slime.update(checkpoint, str(first_version + number))
            await _finish(slime, buffer)
            for sample in buffer:
                sample.observe(tokens_of(source, 40), new_tokens)
        await _finish(slime, buffer)
        for sample in buffer:  # one more turn, so that there is one with nothing before it but its own version
            sample.observe(tokens_of(source, 40), new_tokens)
        await _finish(slime, buffer)
    return report


async def _finish(slime: Slime, buffer: Sequence[Sample]) -> None:
    while partial := [sample for sample in buffer if sample.wanted > 0]:
        await asyncio.gather(*(slime.generate(sample) for sample in partial))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--router", required=True)
    parser.add_argument("--engine", action="append", required=True)
    parser.add_argument("--checkpoint", action="append", required=True, type=Path)
    given = parser.parse_args()
    report = asyncio.run(run(given.engine, lambda session, turn: given.router, given.checkpoint))
    for one in report.attempts:
        print(f"{one.session} turn {one.turn}: {one.cached_tokens} of {len(one.prompt)} reused, {one.finish}")


if __name__ == "__main__":
    main()
