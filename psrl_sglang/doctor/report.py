"""What is printed: a table, or one JSON object."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from psrl_sglang.doctor.result import CheckResult, State, any_failed

_STYLES = {
    State.OK: "green",
    State.WARN: "yellow",
    State.FAIL: "bold red",
    State.SKIP: "dim",
    State.SLOW: "yellow",
    State.WRONG: "bold red",
}
_PLAIN_WIDTH = 140  # where there is no terminal


def as_json(results: Sequence[CheckResult]) -> str:
    """States are their names; ``ok`` is the exit status in words."""
    return json.dumps({"ok": not any_failed(results), "checks": [asdict(result) for result in results]})


def show(results: Sequence[CheckResult]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("check", overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do about it", overflow="fold")
    for result in results:
        style = _STYLES[result.state]
        found = Text(result.found, style="dim" if result.state is State.SKIP else "")
        if result.remedy:
            found.append(f"\n-> {result.remedy}", style="cyan")
        table.add_row(Text(result.name), Text(result.state.value, style=style), found)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    console.print(table)
    counts = Counter(result.state for result in results)
    console.print(", ".join(f"{counts[state]} {state.value}" for state in State if counts[state]))
