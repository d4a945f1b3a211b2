"""From a worker's reply to the client's: bytes as they come, and for `/generate` the answer that goes on elsewhere.

Each delivery ends in one of two ways: the client has its reply, or the request is to be sent once more with what is
left of it (`Outcome`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

import msgspec
from multidict import CIMultiDict

from psrl_sglang.gateway.call import Call
from psrl_sglang.gateway.events import ABORT_MARK, DONE, AnswerEvents, EventSplitter, each_event, encoded
from psrl_sglang.gateway.loopback import Continuation, NotContinued, is_abort
from psrl_sglang.gateway.reply import ClientReply, refusal
from psrl_sglang.gateway.upstream import ReplyBroken, WorkerReply

_EVENT_STREAM = "text/event-stream"
_JSON = "application/json"
_WHOLE_BYTES = 256 << 10  # up to here a reply is sent with its head at once


class Outcome(Enum):
    DONE = "done"
    GOES_ON = "goes on"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class LoopLimits:
    is_on: bool
    most: int
    timeout_s: float


class ClientAborts:
    """Requests that a client aborted through this gateway, which are not continued."""

    _KEPT_S = 600.0
    _MOST = 100_000

    def __init__(self) -> None:
        self._rids: dict[str, float] = {}
        self._all_s = 0.0

    def add(self, rid: str) -> None:
        now_s = time.monotonic()
        self._rids.pop(rid, None)
        self._rids[rid] = now_s
        while self._rids:
            oldest = next(iter(self._rids))
            if len(self._rids) <= self._MOST and self._rids[oldest] > now_s - self._KEPT_S:
                break
            del self._rids[oldest]

    def add_all(self) -> None:
        """Whatever has arrived up to now."""
        self._all_s = time.monotonic()

    def covers(self, call: Call, rid: str | None) -> bool:
        if call.arrived_s <= self._all_s:
            return True
        aborted_s = self._rids.get(rid) if rid is not None else None
        return aborted_s is not None and aborted_s >= call.arrived_s


async def pass_on(reply: WorkerReply, out: ClientReply, head: CIMultiDict[str]) -> Outcome:
    """The reply as it is."""
    length = reply.content_length
    try:
        if length is not None and length <= _WHOLE_BYTES:
            out.whole(reply.status, head, await reply.read_all())
            return Outcome.DONE
        await out.begin(reply.status, head, length)
        while piece := await reply.read_some():
            await out.write(piece)
        await out.end()
    except ReplyBroken as error:
        return broken(out, error)
    return Outcome.DONE


def broken(out: ClientReply, error: Exception) -> Outcome:
    """The worker began to reply, and ended before its end: nobody else may be asked now."""
    if out.has_begun:
        out.cut()
    else:
        out.response = refusal(502, f"the worker's reply broke off: {error}")
    return Outcome.BROKEN


class GenerateAnswer:
    """The answer to one `/generate`, which may take several replies. ``not_continued`` says why one that was broken
    off is not taken up, as a word for a counter."""

    def __init__(self, call: Call, out: ClientReply, limits: LoopLimits, aborts: ClientAborts) -> None:
        self._call = call
        self._out = out
        self._limits = limits
        self._aborts = aborts
        self._events = AnswerEvents(self._open)
        self._answer: Continuation | None = None
        self.not_continued = ""

    @property
    def is_continued(self) -> bool:
        return self._answer is not None

    @property
    def last_version(self) -> str | None:
        return self._answer.last_version if self._answer is not None else None

    @property
    def deadline_s(self) -> float:
        return self._call.arrived_s + self._limits.timeout_s

    @property
    def progressed(self) -> bool:
        return self._answer is not None and self._answer.progressed

    def next_body(self) -> bytes:
        assert self._answer is not None
        return self._answer.next_body()

    async def deliver(self, reply: WorkerReply, head: CIMultiDict[str]) -> Outcome:
        """Raises `ClientGone`."""
        kind = reply.content_type
        if self.is_continued and reply.status != 200:
            await self.give_up(head)
            return Outcome.DONE
        if reply.status == 200 and kind.startswith(_EVENT_STREAM):
            return await self._deliver_events(reply, head)
        if reply.status == 200 and kind.startswith(_JSON):
            return await self._deliver_whole(reply, head)
        return await pass_on(reply, self._out, head)

    async def give_up(self, head: CIMultiDict[str]) -> None:
        """The client gets what there is."""
        assert self._answer is not None
        await self._finish(self._answer, head)

    async def _finish(self, answer: Continuation, head: CIMultiDict[str]) -> None:
        if self._out.has_begun:
            await self._out.write(encoded(answer.end(as_delta=self._events.tells_new_only)) + DONE)
            await self._out.end()
        else:
            self._out.whole(200, head, msgspec.json.encode(answer.end(as_delta=False)))

    async def _deliver_whole(self, reply: WorkerReply, head: CIMultiDict[str]) -> Outcome:
        try:
            body = await reply.read_all()
        except ReplyBroken as error:
            return broken(self._out, error)
        if self._answer is None and ABORT_MARK not in body:
            self._out.whole(200, head, body)
            return Outcome.DONE
        try:
            data = msgspec.json.decode(body)
        except msgspec.MsgspecError:
            data = None
        if isinstance(data, dict) and is_abort(data):
            try:
                opened = self._open(self._answer)
                opened.take(data)
                self._answer = opened
            except NotContinued as reason:
                self.not_continued = str(reason)
            else:
                return await self._go_on(opened, head)
        if self._answer is not None and isinstance(data, dict) and isinstance(data.get("meta_info"), dict):
            body = msgspec.json.encode(self._answer.joined(data))
        self._out.whole(200, head, body)
        return Outcome.DONE

    async def _go_on(self, answer: Continuation, head: CIMultiDict[str]) -> Outcome:
        version = answer.last_version
        if self._call.tag is None and version is not None:
            self._call.tag = version
        if answer.is_complete:
            await self._finish(answer, head)
            return Outcome.DONE
        return Outcome.GOES_ON

    async def _deliver_events(self, reply: WorkerReply, head: CIMultiDict[str]) -> Outcome:
        out, events, splitter = self._out, self._events, EventSplitter()
        events.next_reply()
        try:
            if not out.has_begun:
                await out.begin(200, head)
            while piece := await reply.read_some():
                whole = splitter.whole(piece)
                if not whole:
                    continue
                said = whole if events.passes_unread(whole) else b"".join(map(events.take, each_event(whole)))
                if said:
                    await out.write(said)
        except ReplyBroken as error:
            return broken(out, error)
        self.not_continued = events.not_continued
        if events.is_broken_off:
            assert events.answer is not None
            self._answer = events.answer
            return await self._go_on(events.answer, head)
        if splitter.rest:
            await out.write(splitter.rest)
        await out.end()
        return Outcome.DONE

    def _open(self, answer: Continuation | None) -> Continuation:
        """The answer so far, if it may go on. Raises `NotContinued`."""
        limits, call = self._limits, self._call
        if not limits.is_on:
            raise NotContinued("off")
        opened = answer or Continuation(call.body)
        if opened.legs >= limits.most:
            raise NotContinued("limit")
        if time.monotonic() >= self.deadline_s:
            raise NotContinued("deadline")
        if self._aborts.covers(call, opened.rid):
            raise NotContinued("client")
        return opened
