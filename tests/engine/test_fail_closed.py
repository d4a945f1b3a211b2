"""An enabled plugin that cannot keep its promise does not serve: exit code 2, a message, before weights load."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from psrl_sglang.lab.servers import ServerError

pytestmark = pytest.mark.engine


@pytest.fixture
def refusal(server_factory):
    """Start a server that is expected to refuse; returns what it wrote. It must exit with code 2 unless told."""

    def start(*args, psrl_config, model=None, env=None, code=2):
        with pytest.raises(ServerError) as refused:
            server_factory(model, args=args, psrl_config=psrl_config, env=env)
        said = str(refused.value)
        assert re.search(f"exited with code {code}\\b", said), said
        return said

    return start


def other_plugin(directory: Path, body: str) -> dict[str, str]:
    """An environment in which SGLang also loads another plugin, run before ours is enabled."""
    (directory / "rival.py").write_text(textwrap.dedent(body))
    info = directory / "rival-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nrival = rival:register\n")
    return {"PYTHONPATH": str(directory)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"psrl": {"sglang": {"max_version_lag": -1}}}, ["psrl.sglang.max_version_lag", "-1"]),
        ({"psrl": {"lmcache": {"chunk_sise": 3}}}, ["chunk_sise", "chunk_size"]),
        ({"psrl": {"lmcache": {"enable_p2p": True}}}, ["psrl.lmcache.enable_p2p"]),
        ("/does/not/exist.yaml", ["/does/not/exist.yaml"]),
    ],
)
def test_bad_settings_are_refused_with_field_and_value(refusal, settings, said):
    wrote = refusal(psrl_config=settings)
    for text in said:
        assert text in wrote
    assert "Traceback" not in wrote
    assert "Load weight" not in wrote


def test_a_genuine_launch_refuses_with_exit_code_2(models):
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(models[1]), "--device", "cpu"]
    env = {**os.environ, "SGLANG_PLATFORM": "psrl_cpu"}
    bad = '{"psrl": {"sglang": {"max_version_lag": -1}}}'
    refused = subprocess.run(
        [*command, "--psrl-config", bad], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert refused.returncode == 2
    assert "psrl.sglang.max_version_lag" in refused.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--disable-radix-cache"], "--disable-radix-cache"),
        (["--disaggregation-mode", "prefill"], "--disaggregation-mode prefill"),
        (["--dp-size", "2"], "--dp-size 2"),
    ],
)
def test_arguments_that_leave_no_versioned_tree_are_refused(refusal, args, said):
    assert said in refusal(*args, psrl_config={})


def test_a_model_with_recurrent_state_is_refused_before_weights_load(refusal, models, tmp_path):
    config = json.loads((models[1] / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }
    for file in models[1].iterdir():
        if file.name != "config.json" and file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ("--mamba-radix-cache-strategy", "no_buffer", "--page-size", "1", "--disable-overlap-schedule")
    assert "recurrent state" in refusal(*args, psrl_config={}, model=tmp_path)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (
            """
            def register():
                from sglang.srt.managers.scheduler import Scheduler
                del Scheduler.record_weight_version_change
            """,
            "found missing",
        ),
        (
            """
            def register():
                from sglang.srt.managers.scheduler import Scheduler
                Scheduler.record_weight_version_change = lambda self, new_version, reason=None: None
            """,
            "found (self, new_version, reason=None)",
        ),
    ],
)
def test_a_missing_or_changed_seam_is_named_with_expected_and_found(refusal, tmp_path, body, found):
    wrote = refusal(psrl_config={}, env=other_plugin(tmp_path, body))
    assert "version-funnel" in wrote
    assert "expected (self, new_version)" in wrote
    assert found in wrote
    assert "0.5.23" in wrote


def test_a_scheduler_that_came_up_without_the_hooks_is_not_served(refusal, tmp_path):
    """The launcher is whole, only its schedulers were not told: the engine must still not come up."""
    body = """
    import os

    def register():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def untell(*args, **kwargs):
            os.environ.pop("PSRL_SGLANG_SETTINGS", None)

        target = "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"
        HookRegistry.register(target, untell, HookType.BEFORE)
    """
    # On the Rust core nothing else stops it: SGLang's own Python core would not know the policy "psrl".
    settings = {"psrl": {"sglang": {"tree_core": "rust"}}}
    assert "without the plugin" in refusal(psrl_config=settings, env=other_plugin(tmp_path, body))


def test_a_plugin_that_cannot_load_in_a_scheduler_ends_it(refusal, tmp_path):
    body = """
    import sys

    def register():
        if "PSRL_SGLANG_SETTINGS" in __import__("os").environ:
            sys.modules["psrl_sglang.engine.worker"] = None

    register()
    """
    # 2 is the scheduler's; SGLang's launcher says 1 when it notices the end of its child first.
    wrote = refusal(psrl_config={}, env=other_plugin(tmp_path, body), code="[12]")
    assert "the plugin failed to load" in wrote


def test_the_option_does_not_exist_when_the_plugin_is_left_out(refusal):
    wrote = refusal(psrl_config={}, env={"SGLANG_PLUGINS": "nothing"})
    assert "unrecognized arguments: --psrl-config" in wrote
