"""The `psrl-sglang gateway` command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psrl_sglang.commands import (
    LogLevel,
    NotAllowed,
    allow_many_connections,
    read_token,
    refuse,
    run_until_signal,
    shown_host,
    start_logging,
)
from psrl_sglang.transfer.auth import CONTROLLER_TOKEN_VARIABLE

if TYPE_CHECKING:
    from psrl_sglang.gateway.service import Options

TOKEN_VARIABLE = "PSRL_GATEWAY_TOKEN"
WORKER_KEY_VARIABLE = "PSRL_WORKER_API_KEY"


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
    log_level: Annotated[LogLevel, typer.Option(help="The least that is logged.")] = LogLevel.INFO,
    json_ready: Annotated[
        bool, typer.Option("--json-ready", help="Say what it listens on as one line of JSON.")
    ] = False,
) -> None:
    """Run a gateway: requests go to the engine that fits them, and their KV goes there with them.

    Ends with SIGTERM or SIGINT once what runs has ended, exit status 0; 2 for bad options or a port that is taken.
    """
    import uvloop

    from psrl_sglang.config_problem import ConfigError
    from psrl_sglang.gateway.service import Options, PortInUse
    from psrl_sglang.gateway.settings import Settings, clean_url
    from psrl_sglang.gateway.settings_file import load_settings
    from psrl_sglang.transfer.auth import read_secret

    try:
        settings = Settings() if config is None else load_settings(config)
    except ConfigError as error:
        refuse(str(error))
    changes: dict[str, object] = {}
    for option, given in (("--worker", worker or []), ("--controller", [controller] if controller else [])):
        for url in given:
            try:
                clean_url(url)
            except ValueError as error:
                refuse(f"{option} {url!r} {error}")
    if worker:
        changes["workers"] = list(dict.fromkeys(map(clean_url, worker)))
    if controller:
        changes["controller"] = clean_url(controller)
    settings = settings.model_copy(update={"gateway": settings.gateway.model_copy(update=changes)})
    try:
        secret = read_secret(settings.sglang.secret_file)
    except ValueError as error:
        refuse(f"the secret {settings.sglang.secret_file or ''}: {error}")
    options = Options(
        settings=settings,
        host=host,
        port=port,
        token=read_token(token_file, TOKEN_VARIABLE),
        worker_key=os.environ.get(WORKER_KEY_VARIABLE, "").strip(),
        controller_token=os.environ.get(CONTROLLER_TOKEN_VARIABLE, "").strip(),
        secret=secret,
        allow_unauthenticated=allow_unauthenticated,
    )
    start_logging(log_level)
    allow_many_connections()
    try:
        uvloop.run(_serve(options, json_ready))
    except NotAllowed as error:
        refuse(str(error))
    except PortInUse as error:
        refuse(f"{error}; stop what has it, or choose another with --port")


async def _serve(options: Options, json_ready: bool) -> None:
    from psrl_sglang.gateway.service import GatewayService

    service = GatewayService(options)
    typer.echo(_ready(options, service.port, json_ready))
    await run_until_signal(service)


def _ready(options: Options, port: int, as_json: bool) -> str:
    if as_json:
        return json.dumps({"ready": True, "host": options.host, "port": port, "pid": os.getpid()})
    host = shown_host(options.host)
    access = "with a token" if options.token else "open to all who reach it"
    method, ours = options.settings.routing.method, options.settings.gateway
    more = f" and those of the controller at {ours.controller}" if ours.controller else ""
    return f"gateway: http://{host}:{port} ({access}), {method}, {len(ours.workers)} workers{more}"
