"""The life of one request: a slot, its KV, a reply; again where there was none, and on where it broke off."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from multidict import CIMultiDict

from psrl_sglang.gateway.admission import Admission, NoWorker
from psrl_sglang.gateway.answers import ClientAborts, GenerateAnswer, LoopLimits, Outcome, pass_on
from psrl_sglang.gateway.call import GENERATE, Call
from psrl_sglang.gateway.fleet import Fleet, Worker
from psrl_sglang.gateway.holders import Holders
from psrl_sglang.gateway.metrics import Metrics
from psrl_sglang.gateway.moves import Brought, Mover
from psrl_sglang.gateway.reply import ClientGone, ClientReply, head_of, refusal
from psrl_sglang.gateway.upstream import NoReply, Upstream, WorkerUnreachable

logger = logging.getLogger(__name__)

_RETRY_AFTER = {"retry-after": "1"}
_VERSION = "x-psrl-weight-version"
_NO_PROGRESS_PAUSE_S = 0.05

Lookup = Callable[[Call], Awaitable[None]]
"""Asks the controller what is where, before a worker is chosen."""


@dataclass(frozen=True, slots=True)
class Parts:
    fleet: Fleet
    holders: Holders
    admission: Admission
    mover: Mover
    upstream: Upstream
    metrics: Metrics
    aborts: ClientAborts
    lookup: Lookup | None


class Proxy:
    def __init__(self, parts: Parts, *, limits: LoopLimits, retries: int, queue_timeout_s: float) -> None:
        self._parts = parts
        self._limits = limits
        self._retries = retries
        self._queue_timeout_s = queue_timeout_s

    async def serve(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        """Never raises but for cancellation, which is what a client that went away comes to."""
        out = ClientReply(request)
        outcome = "client_gone"
        try:
            outcome = await self._serve(call, out)
        except ClientGone:
            out.cut()
        finally:
            self._parts.metrics.requests.labels(outcome).inc()
        assert out.response is not None
        return out.response

    async def _serve(self, call: Call, out: ClientReply) -> str:
        parts = self._parts
        answer = GenerateAnswer(call, out, self._limits, parts.aborts) if call.path == GENERATE else None
        failures = 0
        while True:
            if parts.lookup is not None:
                await parts.lookup(call)
            try:
                worker = await parts.admission.acquire(call)
            except NoWorker as error:
                return await self._end(out, answer, 503, str(error), "no_worker")
            try:
                outcome = await self._attempt(call, worker, out, answer)
            except (WorkerUnreachable, NoReply) as error:
                parts.fleet.fail(worker, str(error), is_gone=isinstance(error, WorkerUnreachable))
                call.tried.add(worker.url)
                failures += isinstance(error, NoReply)
                if failures > self._retries:
                    text = f"{worker.url} took the request and gave no reply: {error}"
                    return await self._end(out, answer, 502, text, "no_reply")
                parts.metrics.retries.labels(type(error).__name__).inc()
                continue
            finally:
                parts.admission.release(call, worker)
            if answer is not None and answer.not_continued:
                parts.metrics.not_continued.labels(answer.not_continued).inc()
                answer.not_continued = ""
            if outcome is not Outcome.GOES_ON:
                return outcome.value
            assert answer is not None
            if answer.last_version is not None:
                parts.fleet.saw(worker, answer.last_version)
            parts.metrics.loopbacks.inc()
            failures = 0
            await self._go_on(call, worker, answer)

    async def _attempt(
        self, call: Call, worker: Worker, out: ClientReply, answer: GenerateAnswer | None
    ) -> Outcome:
        parts = self._parts
        generation = worker.generation
        source = parts.holders.holder(call.session) or call.preferred
        brought = await parts.mover.bring(call, source, worker)
        if worker.generation != generation or not worker.is_up:
            # Lost while the KV was under way: it may be back with other weights.
            raise WorkerUnreachable("it went away before the request was sent")
        hint = brought.hint if source is not None else call.source_hint
        reply = await parts.upstream.send("POST", worker.url, call.target, call.head(hint), call.body)
        try:
            if reply.status < 400:
                parts.holders.served(call.session, worker, call.cost_tokens)
                # Sooner than the next probe: until then KV of the new weights would not be moved.
                if version := next((value for name, value in reply.headers if name.lower() == _VERSION), ""):
                    parts.fleet.saw(worker, version)
            head = self._head(reply.headers, worker, brought, call)
            if answer is not None:
                return await answer.deliver(reply, head)
            return await pass_on(reply, out, head)
        finally:
            # One that was read to its end is back in the pool; any other ends here, and with it the generation.
            reply.close()

    async def _go_on(self, call: Call, worker: Worker, answer: GenerateAnswer) -> None:
        call.replace_body(answer.next_body())
        call.preferred = worker
        call.tried.clear()
        call.queue_deadline_s = min(time.monotonic() + self._queue_timeout_s, answer.deadline_s)
        if not answer.progressed:
            # An engine that is being paused aborts what comes until it is.
            await asyncio.sleep(_NO_PROGRESS_PAUSE_S)

    async def _end(
        self, out: ClientReply, answer: GenerateAnswer | None, status: int, text: str, outcome: str
    ) -> str:
        logger.warning("%d: %s", status, text)
        if answer is not None and answer.is_continued:
            await answer.give_up(head_of([("content-type", "application/json")]))
        else:
            out.response = refusal(status, text, _RETRY_AFTER if status == 503 else None)
        return outcome

    @staticmethod
    def _head(headers: list[tuple[str, str]], worker: Worker, brought: Brought, call: Call) -> CIMultiDict[str]:
        kv = "" if brought.outcome == "none" else brought.text
        return head_of(headers, x_psrl_worker=worker.url, x_psrl_kv=kv)
