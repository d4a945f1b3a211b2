"""Imports go one way, and only the engine knows SGLang."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import psrl_sglang

ROOT = Path(psrl_sglang.__file__).parent
NAMES = sorted({path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")})

# What each part may import of the others. `config_*` are one part.
MAY_IMPORT = {
    "__init__": set(),
    "keys": set(),
    "namespace": set(),
    "pagehash": set(),
    "commands": set(),
    "sizing": set(),
    "config": set(),
    "platforms": set(),
    "store": {"commands", "keys"},
    "transfer": {"keys", "pagehash", "store"},
    "engine": {"config", "keys", "namespace", "platforms", "store", "transfer"},
    "controller": {"config", "namespace", "pagehash", "commands", "transfer"},
    "gateway": {"config", "commands", "transfer"},
    "doctor": {"config", "engine", "platforms", "commands", "store", "transfer"},
    "lab": {"sizing"},
    "cli": {"commands", "config", "controller", "doctor", "gateway", "lab", "sizing", "store"},
}
KNOW_SGLANG = {"engine", "platforms"}


def part_of(name: str) -> str:
    return "config" if name.startswith("config") else name


def imported(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            yield node.module or ""
            if node.module == "psrl_sglang":
                yield from (f"psrl_sglang.{alias.name}" for alias in node.names)


def files_of(part: str) -> list[Path]:
    return [p for p in ROOT.rglob("*.py") if part_of(p.relative_to(ROOT).parts[0].removesuffix(".py")) == part]


@pytest.mark.parametrize("part", sorted({part_of(name) for name in NAMES}))
def test_a_part_imports_only_what_is_below_it(part):
    found = {
        part_of(module.split(".")[1])
        for path in files_of(part)
        for module in imported(path)
        if module.startswith("psrl_sglang.") and module.split(".")[1] in NAMES
    }
    assert found - {part} <= MAY_IMPORT[part]


def test_no_two_parts_import_each_other():
    def below(part: str, seen: frozenset[str] = frozenset()) -> set[str]:
        assert part not in seen, f"{part} is below itself"
        return set().union(*(below(one, seen | {part}) | {one} for one in MAY_IMPORT[part]))

    for part in MAY_IMPORT:
        below(part)


def test_only_the_engine_and_its_platform_import_sglang():
    knowing = {
        part_of(path.relative_to(ROOT).parts[0].removesuffix(".py"))
        for path in ROOT.rglob("*.py")
        if any(module.split(".")[0] == "sglang" for module in imported(path))
    }
    assert knowing == KNOW_SGLANG
