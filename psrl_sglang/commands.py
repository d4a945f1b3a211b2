"""What commands have in common: how they refuse; of those that serve, who may ask, where they listen, their end."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import resource
import signal
from enum import StrEnum
from pathlib import Path
from typing import NoReturn, Protocol

import typer

logger = logging.getLogger(__name__)

BAD_INPUT = 2
_LEAST_TOKEN_CHARACTERS = 16
_OPEN_FILES = 65536


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class NotAllowed(ValueError):
    """It would let anyone on the network use or command the engines; the text says what to give."""


class Service(Protocol):
    def stop(self) -> None: ...

    async def run(self) -> None: ...


def refuse(text: str) -> NoReturn:
    """End the command: bad input."""
    typer.echo(text, err=True)
    raise typer.Exit(BAD_INPUT)


def read_token(path: Path | None, variable: str) -> str:
    """The token of ``--token-file``, else of the environment, else empty. Refuses one that is unfit."""
    if path is None:
        token, where = os.environ.get(variable, "").strip(), variable
        if not token:
            return ""
    else:
        where = str(path)
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            refuse(f"--token-file: cannot read {path}: {error}")
    if len(token) < _LEAST_TOKEN_CHARACTERS or not re.fullmatch(r"[!-~]+", token):
        refuse(
            f"{where}: a token is {_LEAST_TOKEN_CHARACTERS} or more printable ASCII characters without spaces"
        )
    return token


def start_logging(level: LogLevel) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


async def run_until_signal(service: Service) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop)
    await service.run()


def shown_host(host: str) -> str:
    """As it is written in a URL."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as it may: a worker or a request has two to four here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < _OPEN_FILES:
        logger.info("psrl: at most %d open files: raise `ulimit -n` for large fleets", wanted)
