"""The `psrl-sglang doctor` command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psrl_sglang.commands import BAD_INPUT, refuse

if TYPE_CHECKING:
    from psrl_sglang.doctor.result import CheckResult

_SOMETHING_FAILS = 1


def register(app: typer.Typer) -> None:
    """Add the command of this package to `app`."""
    app.command("doctor")(_doctor)


def _doctor(
    config: Annotated[
        str | None, typer.Option(help="The settings file that the engines get.", metavar="FILE")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="KV port of a move worker elsewhere; may be given again."),
    ] = None,
    controller: Annotated[
        str | None,
        typer.Option(metavar="URL", help="HTTP address of a controller; default: the one of the settings."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, max=1024, help="Ranks of an engine here: two ports for each.")] = 1,
    nixl_backends: Annotated[
        bool, typer.Option("--nixl-backends", help="Try every backend of NIXL, not only UCX.")
    ] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Try the copies between a device and DRAM instead, on that device.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="The device of --gpu: cuda:N, or cpu; default: cuda:0.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What this host would use to move KV to others, and why nothing better; changes nothing.

    Exit status 0, 1 if something fails or is wrong, 2 for bad input or no such device. The controller's token is
    PSRL_CONTROLLER_TOKEN.
    """
    if gpu:
        if config or peer or controller or nixl_backends:
            refuse("--gpu: it looks at a device alone; drop the options other than --device and --json")
        _try_gpu(device or "cuda:0", as_json)
        return
    if device is not None:
        refuse("--device: it is the one that --gpu tries; add --gpu")
    from urllib.parse import urlsplit

    from psrl_sglang.doctor.plan import plan, read_settings
    from psrl_sglang.doctor.runner import run_all
    from psrl_sglang.transfer.link import TransferError

    if controller is not None and (
        urlsplit(controller).scheme not in ("http", "https") or not urlsplit(controller).hostname
    ):
        refuse(f"--controller: {controller!r} is no URL such as http://10.0.0.1:9000")
    if config is not None and not config.lstrip().startswith("{") and not Path(config).is_file():
        refuse(f"--config: there is no file {config}")
    settings, about_settings = read_settings(config)
    try:
        checks = plan(settings, ranks=tp, peers=peer or [], controller=controller, is_deep=nixl_backends)
    except TransferError as error:
        refuse(f"--peer: {error}")
    _tell([about_settings, *run_all(checks)], as_json)


def _try_gpu(name: str, as_json: bool) -> None:
    from psrl_sglang.doctor.gpu import NoSuchDeviceError, find_device, try_device

    try:
        device = find_device(name)
    except NoSuchDeviceError as error:
        _tell([error.result], as_json, failed=BAD_INPUT)
        return
    _tell(try_device(device), as_json)


def _tell(results: Sequence[CheckResult], as_json: bool, *, failed: int = _SOMETHING_FAILS) -> None:
    """Print the results, and exit with ``failed`` if any is bad."""
    from psrl_sglang.doctor.report import as_json as to_json
    from psrl_sglang.doctor.report import show
    from psrl_sglang.doctor.result import any_failed

    if as_json:
        typer.echo(to_json(results))
    else:
        show(results)
    if any_failed(results):
        raise typer.Exit(failed)
