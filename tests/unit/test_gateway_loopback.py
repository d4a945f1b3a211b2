"""An answer that engines broke off is one answer: all tokens and log-probabilities, in order, once."""

import asyncio
import json

import pytest
from gateway_support import FakeEngine, ask, expected, gateway_of, logprob, run, spread, until

from psrl_sglang.gateway.loopback import Continuation, NotContinued, is_abort


def assert_whole(reply: dict, prompt: list[int], count: int) -> None:
    ids = expected(prompt, count)
    meta = reply["meta_info"]
    assert reply["output_ids"] == ids
    assert [entry[:2] for entry in meta["output_token_logprobs"]] == [[logprob(one), one] for one in ids]
    assert meta["output_token_logprobs_length"] == count
    assert reply["text"] == "".join(f"<{one}>" for one in ids)
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), count)
    assert meta["cached_tokens"] == 3
    assert meta["finish_reason"]["type"] == "length"
    assert meta["finish_reason"]["length"] == count


@pytest.mark.parametrize("aborts", [[3], [0], [0, 0, 4, 1], [2, 2, 2], [9], [10]])
def test_an_aborted_answer_is_continued_and_comes_as_one(aborts):
    async def scenario():
        engine = FakeEngine(aborts=list(aborts))
        async with gateway_of(engine, FakeEngine()) as gateway:
            body = {**ask([5, 6, 7], 10), "return_logprob": True, "unknown": [1], "logprob_start_len": 0}
            reply = await gateway.request("POST", "/generate", body)
            assert_whole(reply.json, [5, 6, 7], 10)
            assert reply.json["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 10}]
            last = engine.seen[-1].body
            assert last["return_logprob"] is True
            assert last["unknown"] == [1]
            assert last["sampling_params"]["temperature"] == 0
            if len(engine.seen) > 1 and sum(aborts):
                assert last["logprob_start_len"] == -1
                assert last["sampling_params"]["max_new_tokens"] == 10 - sum(aborts[: len(engine.seen) - 1])
            if aborts == [10]:
                assert len(engine.seen) == 1  # all was said

    run(scenario())


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
@pytest.mark.parametrize("aborts", [[4], [0, 3, 3], [2, 0, 5], [10]])
def test_an_aborted_stream_is_continued_in_the_same_stream(aborts, incremental):
    async def scenario():
        engine = FakeEngine(aborts=list(aborts), incremental=incremental)
        async with gateway_of(engine) as gateway:
            body = {**ask([5, 6, 7], 10, stream=True), "return_logprob": True}
            reply = await gateway.request("POST", "/generate", body)
            events = reply.events
            assert reply.raw.endswith(b"data: [DONE]\n\n")
            assert reply.raw.count(b"[DONE]") == 1
            assert sum(event["meta_info"]["finish_reason"] is not None for event in events) == 1
            counts = [event["meta_info"]["completion_tokens"] for event in events]
            assert counts == sorted(counts)
            last = events[-1]
            if incremental:
                joined = [
                    entry for one in events for entry in one["meta_info"].get("output_token_logprobs", ())
                ]
                last["meta_info"]["output_token_logprobs"] = joined
                last["meta_info"]["output_token_logprobs_length"] = len(joined)
                last["output_ids"] = [token for one in events for token in one["output_ids"]]
                last["text"] = "".join(one["text"] for one in events)
            else:
                for event in events:
                    assert event["output_ids"] == expected([5, 6, 7], len(event["output_ids"]))
            assert_whole(last, [5, 6, 7], 10)

    run(scenario())


def test_the_same_worker_is_preferred_and_another_taken_if_it_is_gone():
    async def scenario():
        engines = [FakeEngine(aborts=[3]), FakeEngine()]
        async with gateway_of(*engines, method="round_robin") as gateway:
            assert (await gateway.generate([1], 8)).json["output_ids"] == expected([1], 8)
            assert spread(engines) == [2, 0]
            engines[0].aborts, engines[0].die = [3], ["", "before"]
            engines[1].aborts = [2]
            gateway.service.fleet.drain(gateway.fleet.workers()[1])
            task = asyncio.create_task(gateway.generate([2], 8))
            await until(lambda: len(engines[0].seen) >= 4, "the rest was asked for")
            gateway.service.fleet.resume(gateway.fleet.workers()[1])
            assert (await task).json["output_ids"] == expected([2], 8)

    run(scenario())


def test_a_continued_answer_never_goes_to_older_weights_and_says_which_made_what():
    async def scenario():
        engines = [FakeEngine(version="5", aborts=[3], token_s=0.05), FakeEngine(version="4")]
        async with gateway_of(*engines) as gateway:
            task = asyncio.create_task(gateway.generate([1], 8))
            await until(lambda: len(engines[0].seen) == 2, "the rest runs")
            # Only one with older weights is left, until the first one is back with newer ones.
            await engines[0].stop()
            engines[0].version = "6"
            await asyncio.sleep(0.3)
            assert spread(engines)[1] == 0
            await engines[0].restart()
            reply = await task
            spans = reply.json["meta_info"]["weight_versions"]
            assert [(span["version"], span["start"], span["end"]) for span in spans] == [
                ("5", 0, 3),
                ("6", 3, 8),
            ]
            assert reply.json["meta_info"]["weight_version"] == "6"
            assert reply.json["meta_info"]["psrl"]["oldest_version"] == "5"
            assert spread(engines)[1] == 0
            await engines[0].stop()

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_it_ends_somewhen_and_the_client_gets_what_there_is(stream):
    async def scenario():
        engine = FakeEngine(aborts=[2] * 99)
        async with gateway_of(engine, gateway={"max_loopbacks": 2}) as gateway:
            reply = await gateway.request("POST", "/generate", ask([1], 99, stream=stream))
            last = reply.events[-1] if stream else reply.json
            assert last["output_ids"] == expected([1], 6)
            assert last["meta_info"]["finish_reason"]["type"] == "abort"
            assert len(engine.seen) == 3
            assert await gateway.metric('psrl_gateway_aborts_total{reason="limit"}') == 1

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_rest_nobody_takes_is_given_as_aborted(stream):
    async def scenario():
        engine = FakeEngine(aborts=[4], die=["", *["before"] * 9])
        async with gateway_of(engine, gateway={"retries": 1}) as gateway:
            reply = await gateway.request("POST", "/generate", ask([1], 9, stream=stream))
            last = reply.events[-1] if stream else reply.json
            assert reply.status == 200
            assert last["output_ids"] == expected([1], 4)
            assert last["meta_info"]["finish_reason"]["type"] == "abort"

    run(scenario())


def test_what_a_client_aborts_is_not_continued():
    async def scenario():
        engine = FakeEngine(token_s=0.1, aborts=[3, 3])
        async with gateway_of(engine) as gateway:
            for body in ({"rid": "r1"}, {"abort_all": True}):
                task = asyncio.create_task(gateway.request("POST", "/generate", ask([1], 9, rid="r1")))
                await until(lambda: engine.running == 1, "it runs")
                assert (await gateway.request("POST", "/abort_request", body)).status == 200
                assert (await task).json["meta_info"]["finish_reason"]["type"] == "abort"
            assert [seen.path for seen in engine.seen].count("/abort_request") == 2
            assert (await gateway.request("POST", "/generate", ask([1], 4, rid="r1"))).status == 200

    run(scenario())


def test_an_abort_that_is_the_requests_own_fault_is_passed_on():
    async def scenario():
        fault = {"type": "abort", "message": "too long", "status_code": 400}
        engine = FakeEngine(aborts=[1], abort_message=fault)
        async with gateway_of(engine) as gateway:
            reply = await gateway.request("POST", "/generate", ask([1], 9, stream=True))
            assert reply.events[-1]["meta_info"]["finish_reason"] == fault
            assert len(engine.seen) == 1

    run(scenario())


def test_it_can_be_switched_off():
    async def scenario():
        engine = FakeEngine(aborts=[2])
        async with gateway_of(engine, partial=False) as gateway:
            assert (await gateway.generate([1], 9)).json["output_ids"] == expected([1], 2)

    run(scenario())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_ids": [[1], [2]]}, "batch"),
        ({"input_ids": None, "text": "hello"}, "not_tokens"),
        ({"image_data": ["x"]}, "not_tokens"),
        ({"sampling_params": {"n": 2}}, "several_answers"),
        ({"sampling_params": {"regex": "a+"}}, "grammar"),
        ({"return_hidden_states": True}, "hidden_states"),
        ({"sampling_params": {"max_new_tokens": "9"}}, "malformed"),
    ],
)
def test_requests_whose_answer_cannot_be_taken_up_are_known(change, reason):
    with pytest.raises(NotContinued, match=reason):
        Continuation(json.dumps({**ask([1]), **change}).encode())


def test_min_tokens_shrink_and_an_unlimited_answer_stays_so():
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": None, "min_new_tokens": 5}}
    answer = Continuation(json.dumps(body).encode())
    answer.take({"output_ids": [7, 8], "text": "", "meta_info": {"finish_reason": {"type": "abort"}}})
    rest = json.loads(answer.next_body())
    assert rest["input_ids"] == [1, 7, 8]
    assert rest["sampling_params"] == {"max_new_tokens": None, "min_new_tokens": 3}
    assert not answer.is_complete


def test_only_an_abort_of_the_engines_own_counts():
    assert is_abort({"meta_info": {"finish_reason": {"type": "abort", "status_code": None}}})
    assert not is_abort({"meta_info": {"finish_reason": {"type": "abort", "status_code": 503}}})
    assert not is_abort({"meta_info": {"finish_reason": {"type": "stop"}}})
    assert not is_abort({"meta_info": {"finish_reason": None}})
    assert not is_abort([1])


def test_a_token_that_the_queue_repeats_is_told_once():
    from psrl_sglang.gateway.events import AnswerEvents, encoded

    body = json.dumps(ask([1], 9)).encode()
    events = AnswerEvents(lambda answer: answer or Continuation(body))

    def event(ids, count, finish=None):
        logprobs = [[-1.0, token, None] for token in ids]
        meta = {"finish_reason": finish, "completion_tokens": count, "output_token_logprobs": logprobs}
        return encoded({"text": "", "output_ids": ids, "meta_info": meta})

    for at, token in enumerate((7, 8, 9)):
        events.take(event([token], at + 1))
    assert events.take(event([9], 3, {"type": "abort"})) == b""
    assert events.answer is not None
    assert events.answer.output_ids == [7, 8, 9]
    assert (
        len(events.answer.joined({"meta_info": {}, "output_ids": []})["meta_info"]["output_token_logprobs"])
        == 3
    )
