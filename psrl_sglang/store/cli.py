"""The `psrl-sglang` commands around the store: `store ls`, `store verify`, `store gc` and `bench store`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psrl_sglang.commands import refuse

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from psrl_sglang.store.bench import Figure
    from psrl_sglang.store.survey import BadFile, EngineDirectory, StoredChunk, TagUse

_PROBLEMS = 1
_HOUR_S = 3600.0
_PLAIN_WIDTH = 112  # where there is no terminal, the table decides how wide the output is

DiskPath = Annotated[Path, typer.Argument(metavar="DISK_PATH", help="What psrl.lmcache.disk_path names.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this package to `app`."""
    store = typer.Typer(help="KV on disk: what is there, is it sound, and what may go.", no_args_is_help=True)
    store.command("ls")(_ls)
    store.command("verify")(_verify)
    store.command("gc")(_gc)
    app.add_typer(store, name="store")
    bench = typer.Typer(help="How fast this machine is at what the store does.", no_args_is_help=True)
    bench.command("store")(_bench)
    # Without a callback typer turns a group of one command into that command.
    bench.callback()(lambda: None)
    app.add_typer(bench, name="bench")


def _ls(
    disk_path: DiskPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the KV on disk: by layout, engine directory and tag.

    Reads headers only. Exit status 0, or 2 for a path that cannot be listed.
    """
    from psrl_sglang.store.survey import SurveyError, by_tag, directories, survey, total_bytes

    listed: list[tuple[EngineDirectory, list[TagUse], int]] = []
    try:
        for directory in directories(disk_path):
            chunks, bad = survey(directory)
            listed.append((directory, by_tag(chunks), len(bad)))
        size_bytes = total_bytes(disk_path)
    except SurveyError as error:
        refuse(str(error))
    if as_json:
        shown = [_directory_figures(*entry) for entry in listed]
        typer.echo(json.dumps({"disk_path": str(disk_path), "bytes": size_bytes, "directories": shown}))
        return
    console = _console()
    for directory, tags, bad_files in listed:
        console.print(_tag_table(directory, tags))
        if bad_files:
            typer.echo(
                f"{bad_files} files are no whole chunks: psrl-sglang store verify {disk_path} lists them"
            )
    typer.echo(f"{_size(size_bytes)} in {len(listed)} engine directories")


def _verify(
    disk_path: DiskPath,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete bad files, but not of a running engine, which does itself.")
    ] = False,
) -> None:
    """Read all KV on disk and check every byte against its checksum; bad files are listed.

    Exit status 0 if all is sound, 1 if anything is not, deleted or not, and 2 for a path that cannot be listed.
    """
    from psrl_sglang.store.survey import SurveyError, directories, survey, verify

    try:
        surveyed = [(directory, *survey(directory)) for directory in directories(disk_path)]
    except SurveyError as error:
        refuse(str(error))
    chunks = [chunk for _, found, _ in surveyed for chunk in found]
    size_bytes = sum(chunk.size_bytes for chunk in chunks)
    bad_files = 0
    with _Progress(size_bytes) as progress:
        for directory, found, bad in surveyed:
            for chunk in found:
                if (wrong := verify(chunk)) is not None:
                    bad.append(wrong)
                progress.advance(chunk.size_bytes)
            bad_files += len(bad)
            for file, outcome in _outcomes(directory, bad, delete):
                typer.echo(f"{file.path}: {file.reason}{outcome}", err=True)
    typer.echo(f"{len(chunks)} chunks read, {_size(size_bytes)}; {bad_files} bad files")
    if bad_files:
        raise typer.Exit(_PROBLEMS)


def _outcomes(directory: EngineDirectory, bad: list[BadFile], delete: bool) -> list[tuple[BadFile, str]]:
    """What has become of each bad file."""
    from psrl_sglang.store.survey import delete as delete_files

    if not delete or not bad:
        return [(file, "") for file in bad]
    is_idle, failed = delete_files(directory, [file.path for file in bad if file.is_readable])
    if not is_idle:
        return [(file, "; kept: a running engine has the directory and deletes it itself") for file in bad]
    reasons = {file.path: file.reason for file in failed}
    outcomes: list[tuple[BadFile, str]] = []
    for file in bad:
        kept = reasons.get(file.path, "" if file.is_readable else "its bytes are not known to be bad")
        outcomes.append((file, f"; kept: {kept}" if kept else "; deleted"))
    return outcomes


def _gc(
    disk_path: DiskPath,
    keep_tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Delete all other tags. May be given repeatedly.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="HOURS", min=0, help="Delete what was not used for so long.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="Delete of this layout only; its first digits will do.")
    ] = None,
    to_size_gb: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, help="Delete the longest unused until N GiB are left in all."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, say what would be deleted.")] = False,
) -> None:
    """Delete KV on disk that fits every option given; at least one is needed. Engines at work keep theirs.

    Exit status 0, 1 if something could not be deleted or N GiB not be reached, 2 for bad options or paths.
    """
    from psrl_sglang.store.survey import GIB, SurveyError, by_tag, delete, directories, total_bytes

    if not keep_tag and older_than is None and layout is None and to_size_gb is None:
        raise typer.BadParameter("say what to delete: --keep-tag, --older-than, --layout or --to-size-gb")
    try:
        found = directories(disk_path, layout)
        excess = None if to_size_gb is None else total_bytes(disk_path) - int(to_size_gb * GIB)
    except SurveyError as error:
        refuse(str(error))
    before_s = None if older_than is None else time.time() - older_than * _HOUR_S
    chosen = _choose([directory for directory in found if not directory.in_use], keep_tag, before_s, excess)
    console = _console()
    problems: list[str] = []
    for directory in found:
        chunks = chosen.get(directory, [])
        if directory.in_use:
            typer.echo(f"{directory.name}: a running engine has it; left alone")
        elif chunks:
            console.print(_tag_table(directory, by_tag(chunks)))
        if chunks and yes:
            is_idle, failed = delete(directory, [chunk.path for chunk in chunks])
            problems += [f"{file.path}: {file.reason}" for file in failed]
            if not is_idle:
                chosen[directory] = []
                problems.append(f"{directory.name}: an engine has taken it meanwhile; left alone")
    freed = sum(chunk.size_bytes for chunks in chosen.values() for chunk in chunks)
    if excess is not None and freed < excess:
        problems.append(f"{_size(excess - freed)} too much are left: in use, or kept by the other options")
    count = sum(map(len, chosen.values()))
    if yes:
        typer.echo(f"{count} chunks deleted, {_size(freed)}")
    else:
        typer.echo(f"{count} chunks, {_size(freed)}, would be deleted; --yes deletes them")
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(_PROBLEMS)


def _choose(
    idle: Sequence[EngineDirectory], keep_tags: list[str] | None, before_s: float | None, excess: int | None
) -> dict[EngineDirectory, list[StoredChunk]]:
    """What to delete of each directory: tails before heads, and the longest unused first until `excess` bytes
    are gone."""
    from psrl_sglang.store.survey import last_uses, survey

    fitting: list[tuple[float, int, EngineDirectory, StoredChunk]] = []
    for directory in idle:
        chunks, _ = survey(directory)
        for chunk, used_s in zip(chunks, last_uses(chunks), strict=True):
            if keep_tags and chunk.header.tag in keep_tags:
                continue
            if before_s is None or used_s < before_s:
                fitting.append((used_s, -chunk.header.start, directory, chunk))
    fitting.sort(key=lambda entry: entry[:2])
    chosen: dict[EngineDirectory, list[StoredChunk]] = {}
    freed = 0
    for _, _, directory, chunk in fitting:
        if excess is not None and freed >= excess:
            break
        chosen.setdefault(directory, []).append(chunk)
        freed += chunk.size_bytes
    return chosen


def _bench(
    path: Annotated[
        Path | None, typer.Option(file_okay=False, help="Where to write files; default: for temporary files.")
    ] = None,
    size_gb: Annotated[float, typer.Option(min=0.01, help="GiB to move in each measurement.")] = 1.0,
    chunk_mb: Annotated[float, typer.Option(min=0.25, help="MiB of a chunk.")] = 16.0,
    threads: Annotated[int, typer.Option(min=1, help="Threads that read from disk.")] = 4,
    remote_url: Annotated[str | None, typer.Option(help="Measure this remote store too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Speed of every tier, beside the plainest way to move the same bytes: gather and memcpy, fio, a bare client.

    Needs twice --size-gb of memory and of room on disk. What it writes, it deletes. Exit status 0, or 2 if it
    cannot be measured; a figure that misses its target is only marked.
    """
    import tempfile

    from psrl_sglang.store.bench import MIB, BenchError, BenchOptions, run_bench

    options = BenchOptions(
        path=path or Path(tempfile.gettempdir()),
        size_bytes=int(size_gb * 1024 * MIB),
        chunk_bytes=int(chunk_mb * MIB),
        threads=threads,
        remote_url=remote_url,
    )
    figures: list[Figure] = []
    try:
        for figure in run_bench(options):
            figures.append(figure)
            if not as_json:
                typer.echo(f"{figure.name}: {figure.value:.2f} {figure.unit}", err=True)
    except BenchError as error:
        refuse(str(error))
    if as_json:
        typer.echo(json.dumps({"options": options.as_dict(), "figures": [one.as_dict() for one in figures]}))
    else:
        _console().print(_figure_table(figures, options.path))


def _directory_figures(directory: EngineDirectory, tags: list[TagUse], bad_files: int) -> dict[str, Any]:
    return {
        "path": str(directory.path),
        "layout": directory.layout,
        "digest": directory.digest,
        "number": int(directory.path.name),
        "in_use": directory.in_use,
        "bad_files": bad_files,
        "tags": [
            {
                "tag": use.tag,
                "chunks": use.chunks,
                "pages": use.pages,
                "bytes": use.size_bytes,
                "oldest_use_s": use.oldest_s,
                "newest_use_s": use.newest_s,
            }
            for use in tags
        ],
    }


def _tag_table(directory: EngineDirectory, tags: list[TagUse]) -> Table:
    from rich.table import Table
    from rich.text import Text

    state = "in use" if directory.in_use else "idle"
    title = f"{directory.name}, {state}\n{directory.layout or 'layout unknown: it has no LAYOUT file'}"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("tag", overflow="fold")
    for heading in ("chunks", "pages", "size", "oldest use", "newest use"):
        table.add_column(heading, justify="right", no_wrap=True)
    for use in tags:
        numbers = (f"{use.chunks:,}", f"{use.pages:,}", _size(use.size_bytes))
        table.add_row(Text(use.tag), *numbers, _time(use.oldest_s), _time(use.newest_s))
    return table


def _figure_table(figures: list[Figure], path: Path) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"disk: {path}"), title_justify="left")
    table.add_column("figure")
    for heading in ("ours", "plain", "ratio", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plain way")
    for one in figures:
        plain = "" if one.baseline is None else f"{one.baseline:.2f} {one.unit}"
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        target = f"{'<=' if one.ratio is None else '>='} {one.target:g}{'' if one.is_met else ' missed'}"
        table.add_row(one.name, f"{one.value:.2f} {one.unit}", plain, ratio, target, one.baseline_name)
    return table


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


class _Progress:
    """A bar on standard error while bytes are read, if that is a terminal."""

    def __init__(self, size_bytes: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        console = Console(stderr=True)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("reading", total=size_bytes)

    def advance(self, size_bytes: int) -> None:
        self._progress.advance(self._task, size_bytes)

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
