"""``/psrl/v1/*`` in SGLang's own HTTP process, at the authorization level of SGLang's admin routes.

The HTTP worker that grants a pin keeps its time limit: it asks every rank to drop the pin at one step. It dies
with the server, and the pins with it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, TypeVar, cast
from uuid import uuid4

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from sglang.srt.managers import tokenizer_control_mixin
from sglang.srt.utils.auth import AuthLevel, auth_level

from psrl_sglang.config import PsrlConfig
from psrl_sglang.engine import http_worker, pull
from psrl_sglang.engine.activation import refuse, settings_of
from psrl_sglang.engine.command_types import PsrlCommand, PsrlReply

_COMMUNICATOR = "psrl"
_FLUSH_PATH = "/flush_cache"

TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


_MOST_PROBLEMS = 5


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PrefixBody(_Body):
    """A prefix as ``/generate`` would name it; ``version`` None means what a request would use now."""

    input_ids: list[TokenId] = Field(min_length=1)
    extra_key: str | None = None
    cache_salt: str | None = None
    version: str | None = None


class PinBody(PrefixBody):
    owner: str = Field(min_length=1, max_length=128)
    pin_id: str | None = Field(default=None, min_length=1, max_length=128)
    lease_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class UnpinBody(_Body):
    pin_id: str | None = Field(default=None, min_length=1)
    owner: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_of_both(self) -> UnpinBody:
        if (self.pin_id is None) == (self.owner is None):
            raise ValueError("give either pin_id or owner")
        return self


class RetireBody(_Body):
    version: str = Field(min_length=1)


_Kind = TypeVar("_Kind", bound=_Body)


def add_communicator() -> None:
    """Give the tokenizer manager made next a fan-out channel for our commands."""
    spec = (_COMMUNICATOR, PsrlReply)
    if spec not in tokenizer_control_mixin._COMMUNICATOR_SPECS:
        tokenizer_control_mixin._COMMUNICATOR_SPECS.append(spec)


def before_serving(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``_setup_and_run_http_server``: mount the routes, in this process or in its HTTP workers."""
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.runtime_context import get_serving

    config = settings_of(server_args)
    if config is None:
        return
    if get_serving().tokenizer_worker_num > 1:
        http_worker.export(config)
    else:
        mount(app, config)


def mount(app: Any, config: PsrlConfig) -> None:
    """Add the routes to SGLang's app and let ``/flush_cache`` say what stayed."""
    from sglang.srt.entrypoints import http_server

    caller = Caller(lambda: cast(Any, http_server._global_state).tokenizer_manager, config)
    _replace_flush(app, caller)
    _add_routes(app, caller)
    if config.kv_transfer.enable:
        pull.install(app, config, caller.moves)


class CommandTimeout(TimeoutError):
    """The scheduler did not answer within ``psrl.sglang.command_timeout_s``."""


@dataclass
class Caller:
    """Sends commands of one HTTP worker to the schedulers and ends the leases it granted."""

    tokenizer_manager: Callable[[], Any]
    config: PsrlConfig

    def __post_init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def send(self, command: PsrlCommand) -> tuple[int, dict[str, Any]]:
        """(status, body) of the scheduler's answer. Raises ``CommandTimeout``."""
        manager = self.tokenizer_manager()
        manager.auto_create_handle_loop()
        # Shielded: a caller that gives up must not leave the channel's books open for the next one.
        answer = asyncio.ensure_future(getattr(manager, f"{_COMMUNICATOR}_communicator")(command))
        limit_s = self.config.sglang.command_timeout_s
        try:
            replies = await asyncio.wait_for(asyncio.shield(answer), limit_s)
        except TimeoutError:
            raise CommandTimeout(f"the scheduler did not answer {command.operation!r} in {limit_s} s") from None
        return replies[0].status, json.loads(replies[0].body)

    async def moves(self) -> dict[str, Any]:
        """`EngineMoves.shown` of the first rank. Raises ``CommandTimeout``, ``KeyError`` where there are none."""
        status, body = await self.send(PsrlCommand(operation="moves"))
        if status != HTTPStatus.OK:
            raise KeyError(body.get("error", status))
        return body

    async def respond(self, command: PsrlCommand) -> JSONResponse:
        try:
            status, body = await self.send(command)
        except CommandTimeout as late:
            return JSONResponse({"error": str(late)}, HTTPStatus.GATEWAY_TIMEOUT)
        return JSONResponse(body, status)

    def lease_s(self, asked_s: float | None) -> float:
        settings = self.config.sglang
        return min(asked_s or settings.pin_lease_s, settings.pin_max_lease_s)

    def start_lease(self, pin_id: str, grant: str, lease_s: float) -> asyncio.TimerHandle:
        """The pin of this grant ends after ``lease_s``; of a pin that is gone or granted anew nothing ends."""
        return asyncio.get_running_loop().call_later(lease_s, self._expire, pin_id, grant)

    def _expire(self, pin_id: str, grant: str) -> None:
        task = asyncio.ensure_future(self._unpin(pin_id, grant))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unpin(self, pin_id: str, grant: str) -> None:
        try:
            await self.send(PsrlCommand(operation="unpin", pin_id=pin_id, grant=grant))
        except CommandTimeout:
            self.start_lease(pin_id, grant, self.config.sglang.command_timeout_s)  # a stalled engine: try again


def _add_routes(app: Any, caller: Caller) -> None:
    # On the app itself: SGLang's authorization finds a route's level only there, not in an included router.

    @app.get("/psrl/v1/status")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def status() -> JSONResponse:
        """Per version: tokens on the device, pinned, evictable; window, lag, crossing requests, counters."""
        return await caller.respond(PsrlCommand(operation="status"))

    @app.get("/psrl/v1/moves")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def moves() -> JSONResponse:
        """Where the move workers of all ranks are, what they do, and which version is served."""
        return await caller.respond(PsrlCommand(operation="moves"))

    @app.post("/psrl/v1/lookup")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def lookup(request: Request) -> JSONResponse:
        """How much of a prefix is on the device, and of which version. Changes nothing."""
        return await caller.respond(_command("lookup", await _read(request, PrefixBody)))

    @app.post("/psrl/v1/pin")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def pin(request: Request) -> JSONResponse:
        """Keep a prefix on the device until unpinned or ``lease_s`` has passed."""
        body = await _read(request, PinBody)
        pin_id, grant, lease_s = body.pin_id or uuid4().hex, uuid4().hex, caller.lease_s(body.lease_s)
        # The lease starts first: an answer that comes after the deadline must not leave a pin nobody ends.
        lease = caller.start_lease(pin_id, grant, lease_s)
        response = await caller.respond(_command("pin", body, pin_id=pin_id, owner=body.owner, grant=grant))
        answer = json.loads(bytes(response.body))
        if response.status_code != HTTPStatus.GATEWAY_TIMEOUT and not answer.get("tokens"):
            lease.cancel()
        if response.status_code == HTTPStatus.OK:
            answer["lease_s"] = lease_s
        return JSONResponse(answer, response.status_code)

    @app.post("/psrl/v1/unpin")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def unpin(request: Request) -> JSONResponse:
        """Release one pin, or all of an owner."""
        body = await _read(request, UnpinBody)
        return await caller.respond(
            PsrlCommand(operation="unpin", pin_id=body.pin_id or "", owner=body.owner or "")
        )

    @app.post("/psrl/v1/retire")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def retire(request: Request) -> JSONResponse:
        """Evict all of a version that no request and no pin holds."""
        body = await _read(request, RetireBody)
        return await caller.respond(PsrlCommand(operation="retire", version=body.version))

    @app.get("/psrl/v1/check")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def check() -> JSONResponse:
        """Check the books: per-version totals against the tree's, and SGLang's own tree check when idle."""
        return await caller.respond(PsrlCommand(operation="check"))


async def _read(request: Request, kind: type[_Kind]) -> _Kind:
    """SGLang's own answer to a body that does not fit repeats all of it, several times."""
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)
        told = [f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in wrong[:_MOST_PROBLEMS]]
        raise HTTPException(HTTPStatus.BAD_REQUEST, "; ".join(told)) from error


def _command(operation: str, body: PrefixBody, **more: str) -> PsrlCommand:
    return PsrlCommand(
        operation=operation,
        tokens=body.input_ids,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        version=body.version,
        **more,
    )


def _replace_flush(app: Any, caller: Caller) -> None:
    stock = [route for route in app.router.routes if getattr(route, "path", None) == _FLUSH_PATH]
    if len(stock) != 1:
        refuse(f"SGLang has {len(stock)} {_FLUSH_PATH} routes, expected 1; this SGLang is not supported")
    app.router.routes.remove(stock[0])

    @app.api_route(_FLUSH_PATH, methods=["GET", "POST"])
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def flush_cache(timeout: float = 0.0) -> Response:
        """Drop what nobody holds, at once, and say what stayed. ``timeout`` is accepted and not needed."""
        result = await caller.tokenizer_manager().flush_cache(timeout_s=timeout)
        status = HTTPStatus.OK if result.success else HTTPStatus.BAD_REQUEST
        return Response(f"{result.message}\n", status, media_type="text/plain")
