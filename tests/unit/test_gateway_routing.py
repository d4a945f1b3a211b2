"""Which worker gets a request, seen from outside: sessions, versions, the queue, and who is a worker."""

import asyncio

import pytest
from gateway_support import FakeEngine, ask, gateway_of, run, spread, until


@pytest.mark.parametrize(
    "name", ["x-smg-routing-key", "x-psrl-session", "x-request-id-psrl-session"], ids=lambda name: name
)
def test_the_session_is_taken_from_any_of_its_headers_and_told_the_engine(name):
    async def scenario():
        engine = FakeEngine()
        async with gateway_of(engine) as gateway:
            await gateway.request("POST", "/generate", ask([1]), **{name.replace("-", "_"): "s 1"})
            assert engine.seen[0].headers["x-smg-routing-key"] == "s 1"
            assert (await gateway.get("/status")).json["sessions"] == 1

    run(scenario())


def test_a_client_that_knows_the_source_is_believed_where_the_gateway_knows_none():
    async def scenario():
        engines = [FakeEngine(), FakeEngine()]
        async with gateway_of(*engines, method="round_robin") as gateway:
            name = "x-request-id-psrl-src"
            for _ in range(2):
                await gateway.generate([1], 1, x_psrl_session="s", x_request_id_psrl_src="http://else:1")
            await gateway.generate(
                [1], 1, x_psrl_session="s", x_is_sticky="1", x_request_id_psrl_src="http://else:1"
            )
            assert engines[0].seen[0].headers[name] == "http://else:1"
            assert engines[1].seen[0].headers[name] == engines[0].url
            assert name not in engines[1].seen[1].headers, "it has the KV itself"

    run(scenario())


def test_a_request_never_reaches_weights_that_are_older_than_its_tag():
    async def scenario():
        engines = [FakeEngine(version="3"), FakeEngine(version="3")]
        async with gateway_of(*engines, method="round_robin") as gateway:
            tasks = [
                asyncio.create_task(gateway.generate([at], 1, x_version_tag=str(3 + at % 3)))
                for at in range(30)
            ]
            await until(lambda: gateway.service.admission.queued == 20, "those for newer weights wait")
            for version in ("4", "5"):
                for engine in engines:
                    engine.version = version
                    await asyncio.sleep(0.25)
            assert [reply.status for reply in await asyncio.gather(*tasks)] == [200] * 30
            for engine in engines:
                for seen in engine.seen:
                    told = int(seen.headers["x-version-tag"])
                    assert told <= int(engine.version)

    run(scenario())


def test_a_restarted_engine_must_tell_its_version_before_it_gets_tagged_requests():
    async def scenario():
        engine = FakeEngine(version="7")
        async with gateway_of(engine, gateway={"queue_timeout_s": 0.6}) as gateway:
            assert (await gateway.generate([1], 1, x_version_tag="7")).status == 200
            await engine.stop()
            await until(lambda: not gateway.fleet.workers()[0].is_up, "it is seen to be gone")
            engine.version = "1"
            await engine.restart()
            reply = await gateway.generate([1], 1, x_version_tag="7")
            assert reply.status == 503
            assert "no worker has version 7 or a newer one; there is 1" in reply.json["detail"]
            assert reply.headers["Retry-After"] == "1"
            assert len(engine.seen) == 1
            await engine.stop()

    run(scenario())


def test_a_reply_tells_of_an_update_before_the_next_probe():
    async def scenario():
        engine = FakeEngine(version="7", tells_version=True)
        async with gateway_of(engine, gateway={"health_interval_s": 30.0}) as gateway:
            [worker] = gateway.fleet.workers()
            await until(lambda: worker.version == "7", "the first probe was answered")
            engine.version = "8"
            assert (await gateway.generate([1], 1)).status == 200
            assert worker.version == "8"
            assert (await gateway.generate([1], 1, x_version_tag="8")).status == 200
            engine.version = "6"  # of a reply from before an update: too late to count
            await gateway.generate([1], 1)
            assert worker.version == "8"
            assert engine.probes == 1

    run(scenario())


def test_more_than_the_workers_take_waits_here_in_order():
    async def scenario():
        engine = FakeEngine(reply_delay_s=0.03)
        async with gateway_of(engine, max_concurrent_seqs_per_instance=2) as gateway:
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, engine.running)
                    await asyncio.sleep(0.002)

            watching = asyncio.create_task(watch())
            tasks = []
            for at in range(12):
                tasks.append(asyncio.create_task(gateway.generate([at], 1)))
                await asyncio.sleep(0.004)
            replies = await asyncio.gather(*tasks)
            watching.cancel()
            assert [reply.status for reply in replies] == [200] * 12
            assert most == 2
            order = [seen.body["input_ids"][0] for seen in engine.seen]
            assert order == sorted(order)

    run(scenario())


def test_a_full_queue_and_a_wait_without_end_are_refused_with_the_reason():
    async def scenario():
        engine = FakeEngine()
        engine.hold = asyncio.Event()
        ours = {"max_queued_requests": 1, "queue_timeout_s": 0.3}
        async with gateway_of(engine, max_concurrent_seqs_per_instance=1, gateway=ours) as gateway:
            first = asyncio.create_task(gateway.generate([1], 1))
            await until(lambda: engine.running == 1, "it runs")
            second = asyncio.create_task(gateway.generate([2], 1))
            await until(lambda: gateway.service.admission.queued == 1, "it waits")
            third = await gateway.generate([3], 1)
            assert third.status == 503
            assert "wait already" in third.json["detail"]
            late = await second
            assert late.status == 503
            assert "each of 1 workers has 1 requests under way" in late.json["detail"]
            assert late.headers["Retry-After"]
            engine.hold.set()
            assert (await first).status == 200
            assert await gateway.metric('psrl_gateway_requests_total{outcome="no_worker"}') == 2

    run(scenario())


def test_a_request_that_cannot_be_served_yet_does_not_hold_others_back():
    async def scenario():
        engine = FakeEngine()
        async with gateway_of(engine, gateway={"queue_timeout_s": 1.0}) as gateway:
            waiting = asyncio.create_task(gateway.generate([1], 1, x_version_tag="99"))
            await until(lambda: gateway.service.admission.queued == 1, "it waits")
            assert (await gateway.generate([2], 1)).status == 200
            assert (await waiting).status == 503

    run(scenario())


def test_workers_join_and_leave_as_with_smg():
    async def scenario():
        engines = [FakeEngine(), await FakeEngine().start()]
        async with gateway_of(engines[0], method="round_robin") as gateway:
            reply = await gateway.request("POST", "/workers", {"url": engines[1].url + "/"})
            assert reply.status == 202
            name = reply.json["worker_id"]
            assert (await gateway.request("POST", "/workers", {"url": engines[1].url})).status == 409
            assert (await gateway.request("POST", "/workers", {"url": "nonsense"})).status == 400
            assert (await gateway.request("POST", "/workers", b"[")).status == 400
            await until(lambda: gateway.fleet.get(engines[1].url).version, "it was asked")
            assert (await gateway.get(f"/workers/{name}")).json["url"] == engines[1].url
            assert (await gateway.get("/workers")).json["total"] == 2
            for at in range(4):
                await gateway.generate([at], 1)
            assert spread(engines) == [2, 2]
            engines[1].hold = asyncio.Event()
            last = [asyncio.create_task(gateway.generate([at], 1)) for at in range(2)]
            await until(lambda: engines[1].running == 1, "it has one")
            assert (await gateway.request("DELETE", f"/workers/{name}")).status == 202
            assert (await gateway.get("/workers")).json["total"] == 2, "it ends what it has"
            for at in range(4):
                assert (await gateway.generate([at], 1)).worker == engines[0].url
            engines[1].hold.set()
            assert [reply.status for reply in await asyncio.gather(*last)] == [200, 200]
            assert (await gateway.get("/workers")).json["total"] == 1
            assert (await gateway.get(f"/workers/{name}")).status == 404
        await engines[1].stop()

    run(scenario())


def test_a_draining_worker_ends_what_it_has_and_stays_known():
    async def scenario():
        engines = [FakeEngine(), FakeEngine()]
        async with gateway_of(*engines, method="round_robin") as gateway:
            name = gateway.fleet.workers()[0].id
            assert (await gateway.request("POST", f"/workers/{name}/drain")).json["state"] == "draining"
            for at in range(3):
                await gateway.generate([at], 1)
            assert spread(engines) == [0, 3]
            assert (await gateway.request("POST", "/workers", {"url": engines[0].url})).status == 202
            for at in range(2):
                await gateway.generate([at], 1)
            assert spread(engines) == [1, 4]

    run(scenario())
