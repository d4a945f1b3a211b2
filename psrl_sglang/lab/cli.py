"""The `psrl-sglang` commands around the package: `model make` and `demo`."""

from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from psrl_sglang.lab.models import PRESETS, ModelDirectoryError, make_model

# Where there is no terminal, the table decides how wide the output is.
_PLAIN_WIDTH = 112


def register(app: typer.Typer) -> None:
    """Add the commands of this package to `app`."""
    model = typer.Typer(help="Random-weight models for demos, benchmarks and tests.", no_args_is_help=True)
    model.command("make")(_make)
    # Without a callback typer turns a group of one command into that command.
    model.callback()(lambda: None)
    app.add_typer(model, name="model")
    app.command("demo")(_demo)
    app.command("demo-reroute")(_demo_reroute)


def _make(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the model.")],
    seed: Annotated[int, typer.Option(help="Seed of the weights: one seed, one weight version.")],
    preset: Annotated[str, typer.Option(help=f"Shape of the model: {', '.join(PRESETS)}.")] = "tiny",
) -> None:
    """Write a random-weight Qwen3 model with its tokenizer; a directory that already holds it is reused."""
    try:
        path = make_model(directory, seed=seed, preset=preset)
    except (ModelDirectoryError, OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(path)


def _demo(
    sessions: Annotated[int, typer.Option(min=1, help="Agent sessions to run.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of the generated sessions.")] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Replay a cc_weka_compact.jsonl.gz instead."),
    ] = None,
    scale: Annotated[str, typer.Option(help="Factor for all token counts, at most 1.")] = "1/32",
    preset: Annotated[str, typer.Option(help=f"Shape of the model: {', '.join(PRESETS)}.")] = "tiny",
    columns: Annotated[
        str, typer.Option(help="Which engines, separated by commas.")
    ] = "flush,keep,strict,lag1,bare,dram,disk",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures to a file.")] = None,
    keep_logs: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep the servers' logs here.")
    ] = None,
) -> None:
    """Agent sessions with weight updates under way: stock SGLang and psrl side by side, in minutes on a CPU.

    Exit status 1 if a strict engine served a stale token, failed an update, or answered unlike a fresh one.
    """
    from rich.console import Console

    from psrl_sglang.lab.demo import COLUMNS, DemoOptions, run_demo

    chosen = [name.strip() for name in columns.split(",")]
    if unknown := [name for name in chosen if name not in COLUMNS]:
        raise typer.BadParameter(f"unknown columns {unknown}; there are: {', '.join(COLUMNS)}")
    if preset not in PRESETS:
        raise typer.BadParameter(f"unknown preset {preset!r}; there are: {', '.join(PRESETS)}")
    options = DemoOptions(
        sessions=sessions,
        seed=seed,
        trace=trace,
        scale=_fraction(scale),
        preset=preset,
        columns=chosen,
        keep_logs=keep_logs,
        json_path=json_path,
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    if problems := run_demo(options, console):
        for problem in problems:
            typer.echo(problem, err=True)
        raise typer.Exit(1)


def _demo_reroute(
    ways: Annotated[
        str | None, typer.Option(help="Which ways, separated by commas; default: strict with each mode.")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Agent sessions to run.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of the generated sessions.")] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Replay a cc_weka_compact.jsonl.gz instead."),
    ] = None,
    scale: Annotated[str, typer.Option(help="Factor for all token counts, at most 1.")] = "1/32",
    preset: Annotated[str, typer.Option(help=f"Shape of the model: {', '.join(PRESETS)}.")] = "bench",
    kills: Annotated[bool, typer.Option(help="Kill an engine on the way; it comes back.")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures to a file.")] = None,
    keep_logs: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep the servers' logs here.")
    ] = None,
) -> None:
    """Two engines behind the gateway, every turn re-routed: without moves, and with each transfer mode.

    Exit status 1 if a strict way served a stale token, failed an update, moved nothing, or answered unlike a fresh
    engine.
    """
    from rich.console import Console

    from psrl_sglang.lab.reroute_demo import DEMO_WAYS, WAYS, RerouteOptions, run_reroute

    chosen = [name.strip() for name in ways.split(",")] if ways else list(DEMO_WAYS)
    if unknown := [name for name in chosen if name not in WAYS]:
        raise typer.BadParameter(f"unknown ways {unknown}; there are: {', '.join(WAYS)}")
    options = RerouteOptions(
        ways=chosen,
        sessions=sessions,
        seed=seed,
        trace=trace,
        scale=_fraction(scale),
        preset=preset,
        kills=kills,
        json_path=json_path,
        keep_logs=keep_logs,
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    if problems := run_reroute(options, console):
        for problem in problems:
            typer.echo(problem, err=True)
        raise typer.Exit(1)


def _fraction(text: str) -> float:
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError) as error:
        raise typer.BadParameter(f"{text!r} is not a number such as 1/32 or 0.05") from error
    if not 0 < value <= 1:
        raise typer.BadParameter(f"a scale is more than 0 and at most 1, got {text}")
    return value
