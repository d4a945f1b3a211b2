"""What the four loops share: HTTP calls that are written down, samples of an agent, and ways to send weights.

The loops make the calls of a trainer, not its training: prompts are random tokens, the environment answers with
random tokens, and new weights are a directory. What stays is what an engine sees.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

CALL_S = 120.0  # of one call; a generation of a long answer is the longest
IDLE_S = 60.0
POLL_S = 0.02
VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    url: str
    status: int
    seconds: float

    @property
    def path(self) -> str:
        return httpx.URL(self.url).path


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request that generated, whole or cut off. ``versions`` are the weights that sampled its tokens,
    ``oldest_version`` the oldest that its KV is from; ``crossed``: it held KV while the weights changed."""

    session: str
    turn: int
    engine: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    moved_tokens: int
    kv_source: str
    oldest_version: str
    crossed: bool
    versions: tuple[str, ...]
    finish: str


@dataclass(slots=True)
class Sample:
    """One trajectory: ``tokens`` is the prompt and all that followed, ``wanted`` what this turn still lacks."""

    session: str
    tokens: list[int]
    turn: int = 0
    wanted: int = 0

    def observe(self, observation: Sequence[int], new_tokens: int) -> None:
        """The environment has answered; the next turn begins."""
        self.tokens.extend(observation)
        self.turn += 1
        self.wanted = new_tokens


@dataclass(slots=True)
class Report:
    """What happened, in order."""

    calls: list[Call] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)


class Http:
    """Every call is made once, with a deadline, and raises unless the answer is 200."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._client = httpx.AsyncClient(timeout=CALL_S, trust_env=False, limits=httpx.Limits())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def call(
        self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        began_s = time.monotonic()
        reply = await self._client.request(method, url, json=body, headers=headers)
        self.report.calls.append(Call(method, url, reply.status_code, time.monotonic() - began_s))
        reply.raise_for_status()
        return reply

    async def post(self, url: str, body: Any) -> Any:
        """What a control call says; some say nothing. A refusal in the body is an error too."""
        reply = await self.call("POST", url, body)
        said = reply.json() if "json" in reply.headers.get("content-type", "") else {}
        if isinstance(said, dict) and said.get("success") is False:
            raise RuntimeError(f"{url}: {said}")
        return said

    async def on_every(self, engines: Sequence[str], path: str, body: Any) -> list[Any]:
        return list(await asyncio.gather(*(self.post(f"{engine}{path}", body) for engine in engines)))

    async def flush_every(self, engines: Sequence[str]) -> None:
        """slime and miles ask up to 60 times, a second apart, for a 200; here the first one must do."""
        await asyncio.gather(*(self.call("GET", f"{engine}/flush_cache") for engine in engines))

    async def generate(
        self, sample: Sample, base_url: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Attempt:
        """One `/generate` for the sample, whose tokens grow by the answer."""
        prompt = tuple(sample.tokens)
        sampling = {"temperature": 0.0, "max_new_tokens": sample.wanted, "ignore_eos": True}
        whole = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, **body}
        reply = await self.call("POST", f"{base_url}/generate", whole, headers)
        meta, told = reply.json()["meta_info"], reply.headers
        output = meta.get("output_token_logprobs") or ()  # none when it was aborted before its prefill
        attempt = Attempt(
            session=sample.session,
            turn=sample.turn,
            engine=told.get("x-smg-routed-worker-id", base_url),
            prompt=prompt,
            answer=tuple(entry[1] for entry in output),
            logprobs=tuple(entry[0] for entry in output),
            cached_tokens=meta.get("cached_tokens", 0),
            moved_tokens=int(told.get("x-psrl-kv-moved-tokens", 0)),
            kv_source=told.get("x-psrl-kv-source", ""),
            oldest_version=meta.get("psrl", {}).get("oldest_version", ""),
            crossed=meta.get("psrl", {}).get("crossed_versions", False),
            versions=tuple(span["version"] for span in meta.get("weight_versions") or ()),
            finish=(meta.get("finish_reason") or {}).get("type", ""),
        )
        sample.tokens.extend(attempt.answer)
        sample.wanted -= len(attempt.answer)
        self.report.attempts.append(attempt)
        return attempt

    async def requests_on(self, engine: str) -> tuple[int, int]:
        """Running and waiting, by the endpoint that slime asks too."""
        reply = await self.call("GET", f"{engine}/v1/loads?include=core")
        loads = reply.json()["loads"]
        return sum(one["num_running_reqs"] for one in loads), sum(one["num_waiting_reqs"] for one in loads)

    async def wait_running(self, engines: Sequence[str]) -> None:
        """Until a request runs on any of the engines."""
        await until(lambda: self._running(engines), lambda count: count > 0)

    async def _running(self, engines: Sequence[str]) -> int:
        return sum([(await self.requests_on(engine))[0] for engine in engines])


async def until(
    ask: Callable[[], Awaitable[Any]], is_right: Callable[[Any], bool], timeout_s: float = IDLE_S
) -> Any:
    """Ask until the answer is right. Raises ``TimeoutError``."""
    async with asyncio.timeout(timeout_s):
        while not is_right(answer := await ask()):
            await asyncio.sleep(POLL_S)
        return answer


def make_samples(
    prefix: str, count: int, *, prompt_tokens: int, new_tokens: int, seed: int = 0
) -> list[Sample]:
    source = random.Random(f"{prefix}{seed}")
    return [
        Sample(f"{prefix}-{number}", tokens_of(source, prompt_tokens + 16 * number), wanted=new_tokens)
        for number in range(count)
    ]


def tokens_of(source: random.Random, count: int) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(count)]


@asynccontextmanager
async def running(*work: Awaitable[Any]) -> AsyncIterator[None]:
    """Meanwhile the work goes on; afterwards it has ended, by its end or, after an error, cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
