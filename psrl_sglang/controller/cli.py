"""The `psrl-sglang` commands around the controller: `controller` runs one, `move` asks one for a move."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psrl_sglang.commands import (
    BAD_INPUT,
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
    from psrl_sglang.controller.service import ControllerService, Options

_NOTHING_MOVED = 1
_ANSWER_MARGIN_S = 5.0
_SETTINGS = {"--http-port": "base", "--pull-port": "pull", "--reply-port": "reply"}

TokenFile = Annotated[
    Path | None, typer.Option(help=f"File with the HTTP token; {CONTROLLER_TOKEN_VARIABLE} does as well.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this package to `app`."""
    app.command("controller")(_controller)
    app.command("move")(_move)


def _controller(
    config: Annotated[
        str | None, typer.Option(help="A settings file: ports and secret default to what it says.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="HTTP; 0 takes a free one.  [default: 9000]")
    ] = None,
    pull_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Reports of workers.  [default: 8300]")
    ] = None,
    reply_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Requests of workers.  [default: 8400]")
    ] = None,
    advertise: Annotated[
        str, typer.Option(help="Address for heartbeats that workers are told; default: found for each.")
    ] = "",
    token_file: TokenFile = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="File with the secret of the workers; PSRL_SECRET does as well.")
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option("--allow-unauthenticated", help="Listen beyond this machine without token and secret."),
    ] = False,
    lease_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds a worker is kept without a heartbeat: three beats.")
    ] = 15.0,
    log_level: Annotated[LogLevel, typer.Option(help="The least that is logged.")] = LogLevel.INFO,
    json_ready: Annotated[
        bool, typer.Option("--json-ready", help="Say what it listens on as one line of JSON.")
    ] = False,
) -> None:
    """Run a controller: who is there, who holds what, moves on request, and a page that shows it.

    Ends with SIGTERM or SIGINT, exit status 0; 2 for bad options or a port that is taken.
    """
    import asyncio

    from psrl_sglang.config import ConfigError, PsrlConfig, load_config
    from psrl_sglang.controller.registry import Limits
    from psrl_sglang.controller.service import Options
    from psrl_sglang.controller.sockets import PortInUse
    from psrl_sglang.transfer.auth import read_secret

    try:
        settings = PsrlConfig() if config is None else load_config(config)
    except ConfigError as error:
        refuse(str(error))
    lmcache = settings.lmcache
    secret_path = str(secret_file) if secret_file is not None else settings.sglang.secret_file
    try:
        secret = read_secret(secret_path)
    except ValueError as error:
        refuse(f"the secret {secret_path or ''}: {error}")
    options = Options(
        host=host,
        http_port=lmcache.controller_base_port if http_port is None else http_port,
        pull_port=lmcache.controller_pull_port if pull_port is None else pull_port,
        reply_port=lmcache.controller_reply_port if reply_port is None else reply_port,
        advertise=advertise,
        token=read_token(token_file, CONTROLLER_TOKEN_VARIABLE),
        secret=secret,
        allow_unauthenticated=allow_unauthenticated,
        limits=Limits(lease_s=lease_s),
    )
    start_logging(log_level)
    allow_many_connections()
    try:
        asyncio.run(_serve(options, json_ready))
    except NotAllowed as error:
        refuse(str(error))
    except PortInUse as error:
        setting = _SETTINGS.get(error.option)
        where = f" or psrl.lmcache.controller_{setting}_port" if setting is not None else ""
        refuse(f"{error}; stop what has it, or choose another with {error.option}{where}")


async def _serve(options: Options, json_ready: bool) -> None:
    from psrl_sglang.controller.service import ControllerService

    service = ControllerService(options)
    typer.echo(_ready(options, service, json_ready))
    await run_until_signal(service)


def _ready(options: Options, service: ControllerService, as_json: bool) -> str:
    ports = service.ports
    if as_json:
        told = {"host": options.host, "http_port": ports.http, "pull_port": ports.pull}
        return json.dumps({"ready": True, **told, "reply_port": ports.reply, "pid": os.getpid()})
    host = shown_host(options.host)
    access = "with a token" if options.token else "open to all who reach it"
    lines = [
        f"page and HTTP: http://{host}:{ports.http}/ ({access})",
        f"workers: reports to {host}:{ports.pull}, requests to {host}:{ports.reply} "
        f"({'signed' if options.secret else 'unsigned'})",
    ]
    return "\n".join(lines)


def _move(
    controller: Annotated[str, typer.Option(metavar="URL", help="The controller's HTTP address.")],
    destination: Annotated[str, typer.Option("--to", metavar="INSTANCE", help="Where the KV is to go.")],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="INSTANCE", help="Where it is; default: with --session's holder."),
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Version of the weights; default: the one both are on.")
    ] = None,
    input_ids_file: Annotated[
        Path | None, typer.Option(help="The prompt's token ids: a JSON list, or numbers.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(metavar="1,2,3", help="The prompt's token ids.")] = None,
    session: Annotated[str | None, typer.Option(help="The session that the prompt is of.")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="The requests' own cache_salt.")] = None,
    extra_key: Annotated[str | None, typer.Option(help="The requests' extra_key.")] = None,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="The source gives its copy up afterwards.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0.05, max=600.0, help="Deadline of the move.")] = 5.0,
    token_file: TokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the controller's answer as JSON.")] = False,
) -> None:
    """Move the KV of a prompt from one instance to another.

    Exit status 0 if the destination has some of it now, 1 if nothing was moved, 2 for bad input or a controller
    that cannot be reached.
    """
    import httpx

    body = {
        "old_position": None if source is None else [source, "LocalCPUBackend"],
        "new_position": [destination, "LocalCPUBackend"],
        "tokens": _token_ids(input_ids_file, tokens),
        "should_copy": not give_up,
        "version": version,
        "session": session,
        "cache_salt": cache_salt,
        "extra_key": extra_key,
        "timeout_s": timeout_s,
    }
    token = read_token(token_file, CONTROLLER_TOKEN_VARIABLE)
    try:
        response = httpx.post(
            f"{controller.rstrip('/')}/move",
            json=body,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=timeout_s + _ANSWER_MARGIN_S,
            trust_env=False,
        )
        answer: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        refuse(f"cannot reach the controller at {controller}: {error or type(error).__name__}")
    except ValueError:
        refuse(f"{controller} answers {response.status_code} and no JSON; is it a controller?")
    if as_json:
        typer.echo(json.dumps(answer))
    if response.status_code != 200:
        if not as_json:
            typer.echo(f"not moved: {answer.get('detail', answer)}", err=True)
        raise typer.Exit(_NOTHING_MOVED if response.status_code in (409, 502, 503, 504) else BAD_INPUT)
    moved, present = answer["num_tokens"], answer["present_tokens"]
    if not as_json:
        reason = f": {answer['reason']}" if answer["reason"] else ""
        typer.echo(
            f"{moved} tokens moved ({answer['size_bytes']} bytes in {answer['seconds']:.3f} s); "
            f"{destination} has the first {present}{reason}"
        )
    if not moved and not present:
        raise typer.Exit(_NOTHING_MOVED)


def _token_ids(path: Path | None, text: str | None) -> list[int]:
    if (path is None) == (text is None):
        refuse("give the prompt with one of --input-ids-file and --tokens")
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            refuse(f"--input-ids-file: cannot read {path}: {error}")
    parts = re.split(r"[\s,]+", (text or "").strip().strip("[]").strip(" ,\n"))
    if not all(re.fullmatch(r"\d+", part) for part in parts):
        wrong = next(part for part in parts if not re.fullmatch(r"\d+", part))
        refuse(f"{'--tokens' if path is None else path}: {wrong!r} is no token id")
    return [int(part) for part in parts]
