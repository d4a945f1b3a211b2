"""The mends of the CPU platform refuse an SGLang that they do not fit."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("sglang")

from psrl_sglang import platforms


@pytest.fixture
def hooks(monkeypatch):
    monkeypatch.setenv("SGLANG_PLATFORM", platforms.NAME)
    from psrl_sglang.platforms import hooks

    return hooks


@pytest.fixture
def registry(hooks):
    before = {target: list(entries) for target, entries in hooks.HookRegistry._hooks.items()}
    yield hooks.HookRegistry
    assert {target: list(entries) for target, entries in hooks.HookRegistry._hooks.items()} == before


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("json.dumps", r"json\.dumps takes .*'obj'.* expected \('other',\)"),
        ("json.gone", r"json\.gone is not there"),
        ("no_such_module.f", r"no_such_module\.f is not there"),
    ],
)
def test_function_that_is_not_as_expected_ends_the_process(hooks, registry, monkeypatch, target, reason):
    mend = hooks.Mend(target, ("other",), json.dumps, hooks.HookType.AFTER)
    monkeypatch.setattr(hooks, "MENDS", (mend,))
    # SystemExit, because SGLang logs any Exception of a plugin and serves without it.
    with pytest.raises(SystemExit, match=reason):
        platforms.install_cpu_mends()


def test_unmended_process_is_refused(hooks, registry):
    with pytest.raises(SystemExit, match=r"not applied: .*_run_sdpa_forward_extend"):
        hooks.require_applied()


def test_platform_answers_only_to_its_name(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert platforms.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    assert platforms.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "psrl_cpu")
    assert platforms.activate() == "psrl_sglang.platforms.cpu.PsrlCpuPlatform"


def test_entry_point_imports_neither_sglang_nor_torch():
    code = "import sys, psrl_sglang.platforms; sys.exit(bool({'sglang', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
