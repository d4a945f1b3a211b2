"""The calls of miles' rollout with `--pause-generation-mode in_place`: requests freeze, and go on with their KV.

    rollout:  POST /generate with X-SMG-Routing-Key, through the router
    update:   POST /pause_generation {mode: in_place}, no flush  ->  POST /begin_weight_update  ->  the weights,
              broadcast in pieces (update_weights_from_distributed)  ->  POST /update_weight_version
              ->  POST /end_weight_update  ->  POST /continue_generation

With its other transport (update_weights_from_tensor) miles flushes in every mode, while the frozen requests hold
their KV; ``flush`` does that too.

A request that was frozen ends with KV of two versions. Only what the old weights computed is published, under
their name; its next turn under the new weights computes it anew.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import Http, Report, Sample, make_samples, running, tokens_of
from weights import UpdateGroup, read_checkpoint, send_as_tensors

Route = Callable[[str, int], str]
_ALL = {"selector": "all"}


class Miles:
    def __init__(self, http: Http, engines: Sequence[str], route: Route, group: UpdateGroup | None) -> None:
        self._http = http
        self._engines = engines
        self._route = route
        self._group = group

    async def generate(self, sample: Sample) -> None:
        await self._http.generate(
            sample,
            self._route(sample.session, sample.turn),
            {},
            headers={"X-SMG-Routing-Key": sample.session},
        )

    async def update(self, weights: Mapping[str, Any], version: str) -> None:
        http, engines = self._http, self._engines
        await http.on_every(engines, "/pause_generation", {"mode": "in_place"})
        if self._group is None:
            await http.flush_every(engines)
        await http.on_every(engines, "/begin_weight_update", _ALL)
        if self._group is None:
            await send_as_tensors(http, engines, weights, flush_cache=False, weight_version=version, **_ALL)
        else:
            await self._group.send(weights, **_ALL)
        named = {"new_version": version, "abort_all_requests": False}
        await http.on_every(engines, "/update_weight_version", named)
        await http.on_every(engines, "/end_weight_update", {})
        await http.on_every(engines, "/continue_generation", {})


async def run(
    engines: Sequence[str],
    route: Route,
    checkpoints: Sequence[Path],
    *,
    first_version: int = 2,
    is_distributed: bool = True,
    samples: int = 4,
    prompt_tokens: int = 300,
    new_tokens: int = 96,
) -> Report:
    """A turn of every sample with an update in its middle, for each checkpoint; two more turns at the end."""
    report, source = Report(), random.Random("miles")
    working = make_samples(
        f"miles-{first_version}", samples, prompt_tokens=prompt_tokens, new_tokens=new_tokens
    )
    async with Http(report) as http:
        group = UpdateGroup(http, engines, f"miles-{first_version}") if is_distributed else None
        if group is not None:
            await group.join()
        miles = Miles(http, engines, route, group)
        for number, weights in enumerate([*map(read_checkpoint, checkpoints), None, None]):
            async with running(*(miles.generate(sample) for sample in working)):
                if weights is not None:
                    await http.wait_running(engines)
                    await miles.update(weights, str(first_version + number))
            for sample in working:
                sample.observe(tokens_of(source, 40), new_tokens)
        if group is not None:
            await group.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--router", required=True)
    parser.add_argument("--engine", action="append", required=True)
    parser.add_argument("--checkpoint", action="append", required=True, type=Path)
    given = parser.parse_args()
    report = asyncio.run(run(given.engine, lambda session, turn: given.router, given.checkpoint))
    for one in report.attempts:
        print(f"{one.session} turn {one.turn}: {one.cached_tokens} of {len(one.prompt)} reused, {one.versions}")


if __name__ == "__main__":
    main()
