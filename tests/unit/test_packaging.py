"""What `pip install` gets: a wheel by way of the sdist, used without this source tree."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer

from psrl_sglang.cli import app

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "psrl_sglang"
CALL = "from psrl_sglang.cli import main; main()"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [sdist], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel in it; what it depends on is this environment's."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*command, str(built[1])], check=True, timeout=300)
    return target


def run(installed: Path, *words: str, code: str = CALL, stdin: str = "") -> subprocess.CompletedProcess[str]:
    where = f"import psrl_sglang; assert psrl_sglang.__file__.startswith({str(installed)!r})\n"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, "-c", where + code, *words],
        cwd=installed,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    tracked = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = zipfile.ZipFile(built[1]).namelist()
    assert {name for name in names if ".dist-info/" not in name} == tracked


def test_the_sdist_has_what_the_readme_speaks_of(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in (
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "configs/rollout.yaml",
        "docs/operating.md",
        "benchmarks/tiers.py",
        "examples/slime_loop.py",
        "tests/conftest.py",
        "psrl_sglang/controller/page.html",
    ):
        assert wanted in names


def test_sglang_finds_the_plugin_and_the_platform(built):
    wheel = zipfile.ZipFile(built[1])
    [name] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "[sglang.srt.plugins]" in text
    assert "psrl = psrl_sglang.engine.plugin:register" in text
    assert "psrl_cpu = psrl_sglang.platforms:activate" in text


def test_an_installed_wheel_checks_settings_and_refuses_wrong_ones(installed):
    good = run(installed, "config", "check", str(ROOT / "configs" / "rollout.yaml"))
    assert good.returncode == 0, good.stderr
    bad = run(installed, "config", "check", '{"psrl": {"lmcache": {"chunk_size": -1}}}')
    assert bad.returncode == 2
    assert "chunk_size" in bad.stdout + bad.stderr


def commands(command: Any, words: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        return [one for name, sub in command.commands.items() for one in commands(sub, (*words, name))]
    return [(words, command)]


ALL = commands(typer.main.get_command(app))


@pytest.mark.parametrize(("words", "command"), ALL, ids=[" ".join(words) for words, _ in ALL])
def test_help_says_what_a_command_does_and_what_each_option_is(words, command):
    assert command.help, words
    without = [
        param.name
        for param in command.params
        if param.param_type_name == "option" and param.name != "help" and not param.help and not param.hidden
    ]
    assert without == []


def test_help_of_every_installed_command_works(installed):
    code = """
import sys
from typer.testing import CliRunner
from psrl_sglang.cli import app
for line in sys.stdin:
    done = CliRunner().invoke(app, [*line.split(), "--help"])
    assert done.exit_code == 0, (line, done.output)
    assert line.split()[-1] in done.output, line
"""
    lines = "\n".join(" ".join(words) for words, _ in ALL)
    run(installed, code=code, stdin=lines).check_returncode()
