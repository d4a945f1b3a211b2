"""Everything at once: engines die, abort, change weights; clients leave. What is answered is right."""

import asyncio
import random

import aiohttp
import pytest
from gateway_support import FakeEngine, ask, expected, gateway_of, run, until

from psrl_sglang.gateway.events import EventSplitter

RUN_S = 3.0
CLIENTS = 24


class Trouble:
    """Does something to one engine now and then."""

    def __init__(self, source: random.Random, engines: list[FakeEngine]) -> None:
        self._source = source
        self._engines = engines
        self.version = 1

    async def make(self) -> None:
        while True:
            engine = self._source.choice(self._engines)
            match self._source.randrange(5):
                case 0:
                    engine.aborts.extend(self._source.randrange(6) for _ in range(3))
                case 1:
                    engine.die.append(self._source.choice(["before", "stream", "body"]))
                case 2:
                    await engine.stop()
                    # As long as an engine would need at the least, to be seen to have gone.
                    await asyncio.sleep(0.1)
                    await engine.restart()
                case 3:
                    self.version += 1
                    for one in self._engines:
                        one.version = str(self.version)
                case 4:
                    engine.token_s = self._source.choice([0.0, 0.002, 0.01])
            await asyncio.sleep(self._source.random() * 0.1)


async def _client(gateway, source: random.Random, trouble: Trouble, end_s: float, seen: dict[str, int]) -> None:
    while asyncio.get_running_loop().time() < end_s:
        prompt = [source.randrange(50) for _ in range(3)]
        stream, tag = source.random() < 0.5, str(trouble.version)
        body = {**ask(prompt, 8, stream=stream), "return_logprob": True}
        headers = {"x_version_tag": tag, "x_psrl_session": str(source.randrange(20))}
        task = asyncio.create_task(gateway.request("POST", "/generate", body, **headers))
        if source.random() < 0.15:
            await asyncio.sleep(source.random() * 0.02)
            task.cancel()
            await asyncio.wait([task])
            continue
        try:
            reply = await task
        except aiohttp.ClientError:
            seen["broken"] = seen.get("broken", 0) + 1
            continue
        seen[str(reply.status)] = seen.get(str(reply.status), 0) + 1
        if reply.status == 200:
            _check(reply.events[-1] if stream else reply.json, prompt, int(tag))


def _check(last: dict, prompt: list[int], tag: int) -> None:
    ids, meta = last["output_ids"], last["meta_info"]
    assert ids == expected(prompt, len(ids))
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
    assert meta["completion_tokens"] == len(ids)
    assert meta["finish_reason"]["type"] == ("length" if len(ids) == 8 else "abort")
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
    assert all(int(span["version"]) >= tag for span in spans)


@pytest.mark.parametrize("seed", [1, 2])
def test_answers_are_whole_and_nothing_leaks_whatever_happens(seed):
    async def scenario():
        source = random.Random(seed)
        engines = [await FakeEngine().start() for _ in range(3)]
        trouble = Trouble(source, engines)
        seen: dict[str, int] = {}
        ours = {"queue_timeout_s": 2.0, "max_loopbacks": 200}
        async with gateway_of(
            *engines, gateway=ours, method="cache_aware", max_concurrent_seqs_per_instance=4
        ) as one:
            end_s = asyncio.get_running_loop().time() + RUN_S
            making = asyncio.create_task(trouble.make())
            await asyncio.gather(*(_client(one, source, trouble, end_s, seen) for _ in range(CLIENTS)))
            making.cancel()
            await asyncio.wait([making])
            for engine in engines:
                engine.aborts, engine.die = [], []
                await engine.stop()
                await engine.restart()
            await until(lambda: all(worker.is_up for worker in one.fleet.workers()), "all are back")
            await until(lambda: not any(worker.in_flight for worker in one.fleet.workers()), "no slot is held")
            assert all(worker.tokens == 0 for worker in one.fleet.workers())
            assert (await one.generate([1], 8)).json["output_ids"] == expected([1], 8)
        for engine in engines:
            await engine.stop()
        assert seen["200"] > 100
        assert set(seen) <= {"200", "502", "503", "broken"}, seen

    run(scenario())


def test_events_are_whole_however_the_stream_is_cut():
    source = random.Random(5)
    stream = b"".join(b"data: %d%s\n\n" % (at, b"x" * source.randrange(30)) for at in range(50)) + b"rest"
    for _ in range(200):
        splitter, got, at = EventSplitter(), b"", 0
        while at < len(stream):
            size = source.randrange(1, 40)
            whole = splitter.whole(stream[at : at + size])
            assert not whole or whole.endswith(b"\n\n")
            got += whole
            at += size
        assert got + splitter.rest == stream
        assert splitter.rest == b"rest"
