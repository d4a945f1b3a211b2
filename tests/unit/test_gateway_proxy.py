"""Bytes through the gateway: untouched, bounded, and never sent twice once the client has one of them."""

import asyncio
import json
import os

import aiohttp
import pytest
from gateway_support import FakeEngine, ask, expected, gateway_of, run, spread, until


def test_json_goes_through_byte_for_byte_both_ways():
    async def scenario():
        engine = FakeEngine(raw_reply=b'{ "odd" :  1e3,"\\u00e9":[1 ,2]}\n')
        async with gateway_of(engine) as gateway:
            body = b' {"input_ids" : [1,2,3 ], "x":1.50, "unknown_field": {"a" :null}}'
            reply = await gateway.request("POST", "/generate?a=1", body, x_custom="kept", x_request_id="7")
            assert reply.status == 200
            assert reply.raw == engine.raw_reply
            assert engine.bodies == [body]
            assert engine.seen[0].path == "/generate?a=1"
            assert engine.seen[0].headers["x-custom"] == "kept"
            assert engine.seen[0].headers["x-request-id"] == "7"
            assert reply.worker == engine.url

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_openai_paths_are_forwarded(path):
    async def scenario():
        async with gateway_of(FakeEngine()) as gateway:
            reply = await gateway.request("POST", path, {"messages": [], "model": "m"})
            assert reply.json["choices"][0]["message"]["content"] == "hello"

    run(scenario())


def test_questions_about_the_model_are_answered_by_a_worker():
    async def scenario():
        async with gateway_of(FakeEngine(version="9")) as gateway:
            assert (await gateway.get("/model_info")).json["weight_version"] == "9"
            assert (await gateway.get("/v1/models")).json["data"][0]["id"] == "m"
            assert (await gateway.get("/health")).status == 200
            assert (await gateway.get("/nothing")).status == 404
            assert (await gateway.get("/generate")).status == 405

    run(scenario())


def test_events_come_one_by_one_and_as_they_were():
    async def scenario():
        engine = FakeEngine(token_s=0.01)
        async with gateway_of(engine, FakeEngine()) as gateway:
            direct = aiohttp.ClientSession()
            async with direct, direct.post(f"{engine.url}/generate", json=ask([1], 5, stream=True)) as reply:
                plain = await reply.read()
            arrivals = []
            async with gateway.http.post(f"{gateway.url}/generate", json=ask([1], 5, stream=True)) as reply:
                assert reply.headers["content-type"] == "text/event-stream"
                got = b""
                async for piece in reply.content.iter_any():
                    arrivals.append(piece)
                    got += piece
            assert got == plain
            assert len(arrivals) > 2

    run(scenario())


def test_malformed_json_reaches_the_engine_which_says_so():
    async def scenario():
        engine = FakeEngine()
        async with gateway_of(engine, kv={"transfer_mode": "sync"}) as gateway:
            reply = await gateway.request("POST", "/generate", b'{"input_ids": [1,', x_psrl_session="s")
            assert reply.status == 400
            assert reply.json == {"error": "not JSON"}
            assert engine.bodies == [b'{"input_ids": [1,']

    run(scenario())


def test_bodies_of_megabytes_go_through_and_too_large_ones_are_refused():
    async def scenario():
        engine = FakeEngine()
        async with gateway_of(engine, gateway={"max_body_bytes": 2 << 20}) as gateway:
            large = json.dumps({**ask([1, 2], 1), "note": "x" * (1 << 20)}).encode()
            assert (await gateway.request("POST", "/generate", large)).status == 200
            assert engine.bodies == [large]
            assert (await gateway.request("POST", "/generate", b"x" * (3 << 20))).status == 413

            async def pieces():
                for _ in range(48):
                    yield b"x" * (64 << 10)

            async with gateway.http.post(f"{gateway.url}/generate", data=pieces()) as reply:
                assert reply.status == 413
            assert len(engine.seen) == 1

    run(scenario())


def test_a_client_that_asks_whether_to_go_on_is_told_to():
    async def scenario():
        async with gateway_of(FakeEngine()) as gateway:
            body = json.dumps(ask([1], 2)).encode()
            async with gateway.http.post(f"{gateway.url}/generate", data=body, expect100=True) as reply:
                assert (await reply.json())["output_ids"] == expected([1], 2)

    run(scenario())


def test_a_worker_that_is_not_there_costs_a_retry_and_is_out_until_it_answers_again():
    async def scenario():
        engines = [await FakeEngine().start(), await FakeEngine().start()]
        async with gateway_of(*engines, method="round_robin", gateway={"health_interval_s": 30.0}) as gateway:
            await engines[0].stop()
            replies = [await gateway.generate([at], 2) for at in range(4)]
            assert [reply.status for reply in replies] == [200] * 4
            assert {reply.worker for reply in replies} == {engines[1].url}
            views = (await gateway.get("/workers")).json["workers"]
            assert [view["state"] for view in views] == ["out", "up"]
            assert await gateway.metric('psrl_gateway_retries_total{reason="WorkerUnreachable"}') == 1
            await engines[0].restart()
            await until(lambda: gateway.fleet.workers()[0].is_up, "the worker is back")
            assert {(await gateway.generate([at], 2)).worker for at in range(4)} == {one.url for one in engines}
        for engine in engines:
            await engine.stop()

    run(scenario())


def test_a_connection_that_ends_before_the_reply_is_tried_elsewhere():
    async def scenario():
        engines = [FakeEngine(die=["before"]), FakeEngine()]
        async with gateway_of(*engines) as gateway:
            reply = await gateway.generate([1], 3)
            assert reply.json["output_ids"] == expected([1], 3)
            assert reply.worker == engines[1].url
            assert spread(engines) == [1, 1]
            await until(lambda: gateway.fleet.workers()[0].is_up, "it answers, so it is back")

    run(scenario())


def test_a_request_that_no_worker_survives_is_not_sent_for_ever():
    async def scenario():
        engines = [FakeEngine(die=["before"] * 9), FakeEngine(die=["before"] * 9)]
        async with gateway_of(*engines, gateway={"retries": 2}) as gateway:
            reply = await gateway.generate([1], 3)
            assert reply.status == 502
            assert sum(spread(engines)) == 3

    run(scenario())


def test_after_the_first_byte_nobody_else_is_asked():
    async def scenario():
        engines = [FakeEngine(die=["stream", "body"]), FakeEngine()]
        async with gateway_of(*engines) as gateway:
            with pytest.raises(aiohttp.ClientPayloadError):
                await gateway.request("POST", "/generate", ask([1], 9, stream=True))
            assert (await gateway.generate([2], 9)).status == 502
            assert spread(engines) == [2, 0]

    run(scenario())


def test_a_client_that_goes_away_ends_its_generation():
    async def scenario():
        engine = FakeEngine(token_s=0.05)
        async with gateway_of(engine) as gateway:
            for stream in (True, False):
                task = asyncio.create_task(gateway.request("POST", "/generate", ask([1], 400, stream=stream)))
                await until(lambda: engine.running == 1, "it runs")
                task.cancel()
                await until(lambda: engine.running == 0, "it was ended")
            assert all(seen.gone for seen in engine.seen)
            assert gateway.fleet.workers()[0].is_up
            assert await gateway.metric('psrl_gateway_requests_total{outcome="client_gone"}') == 2

    run(scenario())


def test_a_client_that_goes_away_in_the_queue_leaves_nothing():
    async def scenario():
        engine = FakeEngine()
        engine.hold = asyncio.Event()
        async with gateway_of(engine, max_concurrent_seqs_per_instance=1) as gateway:
            first = asyncio.create_task(gateway.generate([1]))
            await until(lambda: engine.running == 1, "it runs")
            second = asyncio.create_task(gateway.generate([2]))
            await until(lambda: gateway.service.admission.queued == 1, "it waits")
            second.cancel()
            await until(lambda: gateway.service.admission.queued == 0, "it waits no more")
            engine.hold.set()
            assert (await first).status == 200
            assert len(engine.seen) == 1

    run(scenario())


def test_a_client_that_closes_its_side_only_is_taken_to_have_gone():
    async def scenario():
        engine = FakeEngine(token_s=0.05)
        async with gateway_of(engine) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.service.port)
            body = json.dumps(ask([1], 400, stream=True)).encode()
            head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            writer.write(head + body)
            await until(lambda: engine.running == 1, "it runs")
            writer.write_eof()
            await until(lambda: engine.running == 0, "it was ended")
            await reader.read()
            writer.close()

    run(scenario())


def test_requests_on_one_connection_come_in_order():
    async def scenario():
        engine = FakeEngine()
        async with gateway_of(engine) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.service.port)
            body = json.dumps(ask([1], 2)).encode()
            head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            writer.write((head + body) * 3)
            got = b""
            while got.count(b"output_ids") < 3:
                got += await asyncio.wait_for(reader.read(65536), 5)
            writer.close()
            assert len(engine.seen) == 3

    run(scenario())


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_slow_client_holds_the_engine_back_and_not_the_gateways_memory():
    async def scenario():
        engine = FakeEngine(stream_bytes=1 << 20)
        async with gateway_of(engine) as gateway:
            connector = aiohttp.TCPConnector(force_close=True)
            async with (
                aiohttp.ClientSession(connector=connector, read_bufsize=1 << 12) as slow,
                slow.post(f"{gateway.url}/generate", json=ask([1], 200, stream=True)) as reply,
            ):
                await reply.content.readany()
                before = _resident_bytes()
                await asyncio.sleep(0.5)
                assert _resident_bytes() - before < 32 << 20
                assert engine.running == 1  # 200 MB would be through otherwise
                assert (await gateway.generate([2], 1)).status == 200
            await until(lambda: engine.running == 0, "it was ended")

    run(scenario())


def test_two_thousand_streams_at_once_in_bounded_memory():
    async def scenario():
        engines = [FakeEngine(token_s=0.3), FakeEngine(token_s=0.3)]
        async with gateway_of(*engines) as gateway:
            before = _resident_bytes()

            async def one(at: int) -> bool:
                reply = await gateway.request("POST", "/generate", ask([at], 3, stream=True))
                return reply.events[-1]["output_ids"] == expected([at], 3)

            tasks = [asyncio.create_task(one(at)) for at in range(2000)]
            await until(lambda: sum(spread(engines)) == 2000, "all are under way", 50)
            used = _resident_bytes() - before
            assert all(await asyncio.gather(*tasks))
            # Client, gateway and engines together: six ends of connections for each.
            assert used < 700 << 20, f"{used >> 20} MiB"
            assert abs(spread(engines)[0] - 1000) < 50

    run(scenario(), 110)


def test_what_runs_may_end_after_the_stop_and_nothing_new_begins():
    async def scenario():
        engine = FakeEngine(token_s=0.05)
        async with gateway_of(engine) as gateway:
            task = asyncio.create_task(gateway.request("POST", "/generate", ask([1], 8, stream=True)))
            await until(lambda: engine.running == 1, "it runs")
            gateway.service.stop()
            await asyncio.sleep(0.1)
            with pytest.raises(aiohttp.ClientConnectorError):
                await gateway.generate([2])
            assert (await task).events[-1]["output_ids"] == expected([1], 8)

    run(scenario())


def test_what_does_not_end_in_time_is_cut():
    async def scenario():
        engine = FakeEngine(token_s=0.05)
        async with gateway_of(engine, gateway={"drain_timeout_s": 0.2}) as gateway:
            task = asyncio.create_task(gateway.request("POST", "/generate", ask([1], 400, stream=True)))
            await until(lambda: engine.running == 1, "it runs")
            gateway.service.stop()
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await task
            await until(lambda: engine.running == 0, "the engine was told")

    run(scenario())
