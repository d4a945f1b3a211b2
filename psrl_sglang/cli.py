"""The `psrl-sglang` command. Each command imports what it needs, so that `--help` is instant."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from psrl_sglang.commands import refuse
from psrl_sglang.controller.cli import register as register_controller
from psrl_sglang.doctor.cli import register as register_doctor
from psrl_sglang.gateway.cli import register as register_gateway
from psrl_sglang.lab.cli import register
from psrl_sglang.store.cli import register as register_store

if TYPE_CHECKING:
    from psrl_sglang.config import PsrlConfig
    from psrl_sglang.sizing import ModelShape, OffloadSize


app = typer.Typer(
    name="psrl-sglang",
    help="Weight-versioned KV cache for agentic RL on SGLang.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Settings files.", no_args_is_help=True)
app.add_typer(config_app, name="config")


@app.callback()
def _root() -> None:
    """Weight-versioned KV cache for agentic RL on SGLang."""


@config_app.callback()
def _config() -> None:
    """Settings files."""


@config_app.command("check")
def check(
    file: Annotated[str, typer.Argument(help="A YAML or JSON file, or an inline JSON object.")],
    show_all: Annotated[bool, typer.Option("--all", help="List defaults too, not only what differs.")] = False,
) -> None:
    """Check a settings file: list the resolved settings, or every problem at once (exit status 2)."""
    from psrl_sglang.config import ConfigError, load_config

    try:
        config = load_config(file)
    except ConfigError as error:
        refuse(str(error))
    _show_settings(config, show_all)


def _show_settings(config: PsrlConfig, show_all: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from psrl_sglang.config import SECTIONS
    from psrl_sglang.config_problem import shown

    parts = (config.lmcache, config.kv_transfer, config.sglang)
    kept = 0
    for (path, schema), part in zip(SECTIONS.items(), parts, strict=True):
        table = Table(title=path, title_justify="left")
        table.add_column("setting", no_wrap=True)
        for heading in ("value", "default", "meaning"):
            table.add_column(heading, overflow="fold")
        for name, field in schema.model_fields.items():
            value = getattr(part, name)
            if value == field.default and not show_all:
                kept += 1
                continue
            table.add_row(*map(Text, (name, shown(value), shown(field.default), field.description or "")))
        if table.row_count:
            Console().print(table)
    typer.echo(f"valid; {kept} settings have their defaults (--all lists them)" if kept else "valid")


@app.command("size")
def size(
    model: Annotated[str, typer.Argument(help="A model directory, or the path of its config.json.")],
    sequences: Annotated[int, typer.Option(help="Sequences whose KV is kept at a time.")],
    mean_tokens: Annotated[int, typer.Option(help="Mean length of a sequence, in tokens.")],
    tp: Annotated[int, typer.Option(help="Tensor parallel size.")] = 1,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Type KV is kept in, for example fp8_e4m3; default: the model's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How large `psrl.lmcache.offload_size_gb` must be: the exact figure, and PSRL's rule beside it."""
    from psrl_sglang.sizing import ModelShape, exact_offload_gb, reference_offload_gb

    try:
        shape = ModelShape.from_config_json(model)
        exact = exact_offload_gb(shape, sequences, mean_tokens, tp, kv_dtype)
        reference_gb = reference_offload_gb(shape.num_layers, shape.hidden_size, sequences, mean_tokens)
    except ValueError as error:
        refuse(str(error))
    if as_json:
        typer.echo(json.dumps(_size_figures(exact, reference_gb, tp)))
    else:
        _show_size(shape, exact, reference_gb, tp)


def _size_figures(exact: OffloadSize, reference_gb: float, tp: int) -> dict[str, float | int]:
    return {
        "tp_size": tp,
        "bytes_per_token_per_rank": exact.bytes_per_token_per_rank,
        "exact_per_rank_gb": exact.per_rank_gb,
        "exact_total_gb": exact.total_gb,
        "reference_per_rank_gb": reference_gb / tp,
        "reference_total_gb": reference_gb,
        "offload_size_gb": exact.offload_size_gb,
    }


def _show_size(shape: ModelShape, exact: OffloadSize, reference_gb: float, tp: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from psrl_sglang.sizing import GB, GIB

    table = Table("figure", "per TP rank", "total")
    rows = (
        ("exact", exact.per_rank_gb, exact.total_gb),
        ("PSRL's rule", reference_gb / tp, reference_gb),
    )
    for name, per_rank_gb, total_gb in rows:
        cells = (f"{gb:,.2f} GB ({gb * GB / GIB:,.2f} GiB)" for gb in (per_rank_gb, total_gb))
        table.add_row(name, *cells)
    Console().print(table)
    kind = "MLA, whole on every rank" if shape.is_mla else f"{shape.kv_heads} KV heads"
    typer.echo(f"{exact.bytes_per_token_per_rank:,} bytes per token and rank ({kind}, TP {tp})")
    typer.echo(f"offload_size_gb (GiB, all ranks) must be at least {exact.offload_size_gb:,.2f}")


def main() -> None:
    """Entry point of the console script."""
    app()


# The commands of the model lab (`model`, `demo`) and of the store live beside what they run.
register(app)
register_store(app)
register_controller(app)
register_gateway(app)
register_doctor(app)
