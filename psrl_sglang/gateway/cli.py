"""The `psrl-sglang gateway` command."""

from __future__ import annotations

import json
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from psrl_sglang.gateway.service import Options

TOKEN_VARIABLE = "PSRL_GATEWAY_TOKEN"
CONTROLLER_TOKEN_VARIABLE = "PSRL_CONTROLLER_TOKEN"
WORKER_KEY_VARIABLE = "PSRL_WORKER_API_KEY"

_BAD_INPUT = 2
_LEAST_TOKEN_CHARACTERS = 16


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def register(app: typer.Typer) -> None:
    """Add the command of this package to `app`."""
    app.command("gateway")(_gateway)


def _gateway(
    config: Annotated[str | None, typer.Option(help="A settings file, PSRL's own too.")] = None,
    worker: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An engine; may be given several times.")
    ] = None,
    controller: Annotated[
        str | None, typer.Option(metavar="URL", help="The controller, which knows who is there.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token of clients; {TOKEN_VARIABLE} does as well.")
    ] = None,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Listen beyond this machine without a token.")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option()] = LogLevel.INFO,
    json_ready: Annotated[
        bool, typer.Option("--json-ready", help="Say what it listens on as one line of JSON.")
    ] = False,
) -> None:
    """Run a gateway: requests go to the engine that fits them, and their KV goes there with them.

    Ends with SIGTERM or SIGINT once what runs has ended, exit status 0; 2 for bad options or a port that is taken.
    """
    import logging

    import uvloop

    from psrl_sglang.config_problem import ConfigError
    from psrl_sglang.gateway.service import NotAllowed, Options, PortInUse
    from psrl_sglang.gateway.settings import Settings, clean_url
    from psrl_sglang.gateway.settings_file import load_settings
    from psrl_sglang.transfer.auth import read_secret

    try:
        settings = Settings() if config is None else load_settings(config)
    except ConfigError as error:
        _refuse(str(error))
    changes: dict[str, object] = {}
    for option, given in (("--worker", worker or []), ("--controller", [controller] if controller else [])):
        for url in given:
            try:
                clean_url(url)
            except ValueError as error:
                _refuse(f"{option} {url!r} {error}")
    if worker:
        changes["workers"] = list(dict.fromkeys(map(clean_url, worker)))
    if controller:
        changes["controller"] = clean_url(controller)
    settings = settings.model_copy(update={"gateway": settings.gateway.model_copy(update=changes)})
    try:
        secret = read_secret(settings.sglang.secret_file)
    except ValueError as error:
        _refuse(f"the secret {settings.sglang.secret_file or ''}: {error}")
    options = Options(
        settings=settings,
        host=host,
        port=port,
        token=_read_token(token_file),
        worker_key=os.environ.get(WORKER_KEY_VARIABLE, "").strip(),
        controller_token=os.environ.get(CONTROLLER_TOKEN_VARIABLE, "").strip(),
        secret=secret,
        allow_unauthenticated=allow_unauthenticated,
    )
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        uvloop.run(_serve(options, json_ready))
    except NotAllowed as error:
        _refuse(str(error))
    except PortInUse as error:
        _refuse(f"{error}; stop what has it, or choose another with --port")


async def _serve(options: Options, json_ready: bool) -> None:
    import asyncio
    import signal

    from psrl_sglang.gateway.service import GatewayService, allow_many_connections

    allow_many_connections()
    service = GatewayService(options)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop)
    typer.echo(_ready(options, service.port, json_ready))
    await service.run()


def _ready(options: Options, port: int, as_json: bool) -> str:
    if as_json:
        return json.dumps({"ready": True, "host": options.host, "port": port, "pid": os.getpid()})
    host = f"[{options.host}]" if ":" in options.host else options.host
    access = "with a token" if options.token else "open to all who reach it"
    method = options.settings.routing.method
    return (
        f"gateway: http://{host}:{port} ({access}), {method}, {len(options.settings.gateway.workers)} workers"
    )


def _read_token(path: Path | None) -> str:
    if path is None:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
        if not token:
            return ""
    else:
        where = str(path)
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            _refuse(f"--token-file: cannot read {path}: {error}")
    if len(token) < _LEAST_TOKEN_CHARACTERS or not re.fullmatch(r"[!-~]+", token):
        _refuse(
            f"{where}: a token is {_LEAST_TOKEN_CHARACTERS} or more printable ASCII characters without spaces"
        )
    return token


def _refuse(text: str) -> NoReturn:
    typer.echo(text, err=True)
    raise typer.Exit(_BAD_INPUT)
