"""The HTTP side as one ASGI application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from psrl_sglang import __version__
from psrl_sglang.controller.commands import add_command_routes
from psrl_sglang.controller.core import Core
from psrl_sglang.controller.guard import Guard
from psrl_sglang.controller.orders import Refusal
from psrl_sglang.controller.page import add_page
from psrl_sglang.controller.watch import add_view_routes

_MOST_PROBLEMS = 5


def create_app(core: Core, token: str) -> Any:
    """With an empty token everybody may ask."""
    app = FastAPI(title="psrl-sglang controller", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_exception_handler(Refusal, _refused)
    add_command_routes(app, core)
    add_view_routes(app, core)
    add_page(app)
    return Guard(app, token, core.metrics)


async def _bad_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    details = error.errors()
    problems = [_problem(detail) for detail in details[:_MOST_PROBLEMS]]
    if len(details) > _MOST_PROBLEMS:
        problems.append(f"and {len(details) - _MOST_PROBLEMS} more")
    return JSONResponse({"detail": "; ".join(problems)}, status_code=422)


def _problem(detail: dict[str, Any]) -> str:
    path = [str(part) for part in detail["loc"] if part != "body"]
    if detail["type"] == "json_invalid":
        return "the body is not JSON"
    if detail["type"] == "missing":
        return f"{'.'.join(path) or 'the body'}: it is missing, and needed"
    return f"{'.'.join(path) or 'the body'}: {detail['msg'].lower()}"


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    ranks = [rank_view(rank) for rank in error.ranks]
    return JSONResponse({"detail": str(error), **({"ranks": ranks} if ranks else {})}, error.status)


def rank_view(rank: Any) -> dict[str, Any]:
    return {name: getattr(rank, name) for name in rank.__slots__}
