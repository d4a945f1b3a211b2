"""The `config` and `size` commands, and that the command line needs no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from psrl_sglang.cli import app
from psrl_sglang.config import SECTIONS

ROOT = Path(__file__).parents[2]
GQA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def run():
    runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1"})
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GQA))
    return tmp_path


class TestConfigCheck:
    @pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name)
    def test_shipped_file_is_valid(self, run, file):
        result = run("config", "check", file)
        assert result.exit_code == 0
        assert "valid" in result.stdout

    def test_only_what_differs_is_listed_unless_all_is_asked_for(self, run):
        few = run("config", "check", ROOT / "configs/lag1.yaml")
        assert "max_version_lag" in few.stdout
        assert "chunk_size" not in few.stdout
        everything = run("config", "check", ROOT / "configs/lag1.yaml", "--all")
        for path, schema in SECTIONS.items():
            assert path in everything.stdout
            assert all(name in everything.stdout for name in schema.model_fields)

    def test_every_problem_goes_to_standard_error_with_status_2(self, run, tmp_path):
        file = tmp_path / "bad.yaml"
        file.write_text("psrl: {lmcache: {chunk_siz: 1, enable: 'yes', offload_size_gb: -1}}")
        result = run("config", "check", file)
        assert result.exit_code == 2
        assert result.stdout == ""
        for said in ("3 problems", "chunk_siz", "`chunk_size`", "psrl.lmcache.enable", "offload_size_gb"):
            assert said in result.stderr

    def test_credentials_are_masked(self, run):
        source = json.dumps({"psrl": {"lmcache": {"remote_url": "redis://user:p@secret@[::1]:6379"}}})
        result = run("config", "check", source)
        assert result.exit_code == 0
        assert "secret" not in result.output
        assert "redis://***@[::1]:6379" in result.stdout


class TestSize:
    ARGUMENTS = ("--sequences", 64, "--mean-tokens", 4096)

    def test_json_has_both_figures_per_rank_and_in_total(self, run, model):
        result = run("size", model, *self.ARGUMENTS, "--tp", 4, "--json")
        assert result.exit_code == 0
        figures = json.loads(result.stdout)
        assert figures["bytes_per_token_per_rank"] == 32 * 2 * 256 * 2
        assert figures["reference_total_gb"] == pytest.approx(137.438953472)
        assert figures["reference_per_rank_gb"] == pytest.approx(137.438953472 / 4)
        assert figures["exact_total_gb"] == pytest.approx(137.438953472 / 4)
        assert figures["exact_per_rank_gb"] == pytest.approx(137.438953472 / 16)
        assert figures["offload_size_gb"] == 32.0

    def test_table_has_both_figures(self, run, model):
        result = run("size", model / "config.json", *self.ARGUMENTS)
        assert result.exit_code == 0
        for said in ("exact", "PSRL's rule", "34.36 GB (32.00 GiB)", "137.44 GB (128.00 GiB)", "8 KV heads"):
            assert said in result.stdout

    def test_kv_dtype_halves_the_exact_figure(self, run, model):
        result = run("size", model, *self.ARGUMENTS, "--kv-dtype", "fp8_e5m2", "--json")
        assert json.loads(result.stdout)["offload_size_gb"] == 16.0

    @pytest.mark.parametrize(
        ("extra", "said"),
        [(("--tp", 3), "tp_size is 3"), (("--tp", 0), "tp_size is 0"), (("--kv-dtype", "int3"), "int3")],
    )
    def test_bad_input_is_told_with_status_2(self, run, model, extra, said):
        result = run("size", model, *self.ARGUMENTS, *extra)
        assert result.exit_code == 2
        assert said in result.stderr

    def test_missing_model_is_told_with_status_2(self, run, tmp_path):
        result = run("size", tmp_path, *self.ARGUMENTS)
        assert result.exit_code == 2
        assert "cannot be read" in result.stderr


@pytest.mark.parametrize("module", ["psrl_sglang.cli", "psrl_sglang.config", "psrl_sglang.sizing"])
def test_no_engine_is_imported(module):
    code = f"import sys, {module}; print(sorted({{'sglang', 'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
