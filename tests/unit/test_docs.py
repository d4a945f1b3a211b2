"""What README and docs show is so: settings load, commands exist and take those options, snippets run, links lead
somewhere."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from controller_support import SECRET, FakeWorker

from psrl_sglang.cli import app
from psrl_sglang.config import load_config
from psrl_sglang.controller.service import Ports
from psrl_sglang.lab.models import make_model
from psrl_sglang.transfer import messages as wire

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = ("psrl-sglang", "python", "make", "sh")
NOBODY = Ports(1, 1, 1)
IN_A_LOOP = """
import asyncio
from psrl_sglang.transfer.client import AsyncMoveClient

async def ask():
    async with AsyncMoveClient() as client:
        {call}
        return result

result = asyncio.run(ask())
"""
ADDRESS = re.compile(r'"\d+\.\d+\.\d+\.\d+:\d+"')


@dataclass(frozen=True)
class Block:
    page: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0][:60]}"


def blocks() -> Iterator[Block]:
    """Runs of indented lines that begin behind an empty one, as Markdown has it, outside of lists."""
    for page in PAGES:
        for paragraph in re.finditer(r"(?:\A|\n\n)((?:    .*\n|\n(?=    ))+)", page.read_text() + "\n"):
            lines = [line[4:] for line in paragraph[1].splitlines()]
            yield Block(page.name, "\n".join(lines).strip())


def commands() -> Iterator[Block]:
    for block in blocks():
        whole = block.text.replace("\\\n", " ")
        for line in whole.splitlines():
            words = line.split("#")[0].strip()
            if words.split(" ")[0] in COMMANDS and '"from ' not in words:
                yield Block(block.page, words)


SETTINGS = [block for block in blocks() if block.text.startswith("psrl:")]
PYTHON = [block for block in blocks() if block.text.startswith(("from ", "import ", "result = "))]
SHOWN = list(commands())
COMPUTING = [one for one in SHOWN if one.text.startswith(("psrl-sglang size", "psrl-sglang config"))]
OURS = [one for one in SHOWN if one.text.startswith("psrl-sglang ")]


def each(found: list[Block]) -> Any:
    return pytest.mark.parametrize("block", found, ids=[one.id for one in found])


def test_all_kinds_of_examples_are_found():
    assert len(SETTINGS) >= 2
    assert len(PYTHON) >= 3
    assert len(OURS) >= 10
    assert {one.text.split()[0] for one in SHOWN} == set(COMMANDS)


@each(SETTINGS)
def test_settings_that_are_shown_load(block):
    load_config(yaml.safe_load(block.text))


@each(OURS)
def test_a_command_that_is_shown_exists_and_takes_these_options(block):
    words = shlex.split(block.text)[1:]
    command: Any = typer.main.get_command(app)
    context = command.make_context("psrl-sglang", [], resilient_parsing=True)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


@each([one for one in SHOWN if one.text.startswith(("python benchmarks", "make", "sh ", "python -m sglang"))])
def test_a_script_or_target_that_is_shown_exists_and_takes_these_options(block):
    words = shlex.split(block.text)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "sh":
        assert re.search(rf"\b{words[2]}\)|\"{words[2]}\"", (ROOT / words[1]).read_text())
    elif words[1] == "-m":
        for word in words:
            assert not word.startswith("configs/") or load_config(str(ROOT / word))
    else:
        script = (ROOT / words[1]).read_text()
        assert all(f'"{word}"' in script for word in words[2:] if word.startswith("--"))


@each(PYTHON)
def test_a_snippet_that_is_shown_runs_against_a_worker(block):
    moved = wire.MoveWorkerRetMsg(64, 96, 1000, 0.01, "cma", outcome="moved")
    secret = SECRET if "secret" in block.text else b""
    with FakeWorker(NOBODY, answer=lambda command: moved, secret=secret) as worker:
        code = ADDRESS.sub(f'"{worker.address}"', block.text).replace("…", f'"{worker.address}"')
        if code.startswith("result = await "):
            code = IN_A_LOOP.format(call=code.split("#")[0].strip())
        names: dict[str, Any] = {"tokens": list(range(96)), "secret": secret}
        exec(code, names)
        assert names["result"].outcome == "moved"
        assert worker.commands[0].tokens == list(range(96))


@pytest.fixture(scope="module")
def shown_size(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("size") / "model", seed=1)


@each(COMPUTING)
def test_a_command_that_only_computes_is_run_as_it_is_shown(block, shown_size):
    words = block.text.replace("MODEL_DIR", str(shown_size)).replace(" --tp 4", "").replace(" --tp 8", "")
    code = "from psrl_sglang.cli import main; main()"
    command = [sys.executable, "-c", code, *shlex.split(words)[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_named_in_code_style_is_there(page):
    for path in re.findall(r"`((?:configs|benchmarks|tests|examples|psrl_sglang)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name}: {path}"
