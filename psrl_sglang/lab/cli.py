"""The `psrl-sglang` commands around the package: `model make`."""

from pathlib import Path
from typing import Annotated

import typer

from psrl_sglang.lab.models import PRESETS, ModelDirectoryError, make_model


def register(app: typer.Typer) -> None:
    """Add the commands of this package to `app`."""
    model = typer.Typer(help="Random-weight models for demos, benchmarks and tests.", no_args_is_help=True)
    model.command("make")(_make)
    # Without a callback typer turns a group of one command into that command.
    model.callback()(lambda: None)
    app.add_typer(model, name="model")


def _make(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the model.")],
    seed: Annotated[int, typer.Option(help="Seed of the weights: one seed, one weight version.")],
    preset: Annotated[str, typer.Option(help=f"Shape of the model: {', '.join(PRESETS)}.")] = "tiny",
) -> None:
    """Write a random-weight Qwen3 model with its tokenizer; a directory that already holds it is reused."""
    try:
        path = make_model(directory, seed=seed, preset=preset)
    except (ModelDirectoryError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(path)
