"""The plugin installed but not switched on: SGLang's routes, metrics, replies and keys are its own."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from support import prompt

pytestmark = pytest.mark.engine

# What a launcher process looks like after it has loaded its plugins and made its parser.
SURVEY = """
import argparse, json, os
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES
from sglang.srt.managers import io_struct, tokenizer_control_mixin
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.utils import _EVICTION_POLICY_FACTORIES
from sglang.srt.entrypoints.http_server import app
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
options = sorted({o for action in parser._actions for o in action.option_strings} - {"--psrl-config"})
print("SURVEY" + json.dumps({
    "routes": sorted(f"{getattr(r, 'path', '')} {sorted(getattr(r, 'methods', None) or [])}"
                     for r in app.router.routes),
    "options": options,
    "hooked": sorted(t for t in HookRegistry._patched if "ServerArgs" not in t and "smg" not in t),
    "policies": list(RADIX_EVICTION_POLICY_CHOICES),
    "strategies": sorted(_EVICTION_POLICY_FACTORIES),
    "messages": sorted(t.__name__ for t in io_struct._all_types),
    "channels": [spec[0] for spec in tokenizer_control_mixin._COMMUNICATOR_SPECS],
    "customized": SchedulerOutputStreamer.has_additional_customized_info,
    "environment": sorted(name for name in os.environ if name.startswith("PSRL_")),
}))
"""


def survey(**env: str) -> dict:
    """A process without the CPU platform, whose mends are hooks of their own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PSRL_", "SGLANG_"))} | env
    run = subprocess.run(
        [sys.executable, "-c", SURVEY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.rpartition("SURVEY")[2])


def test_a_launcher_without_the_flag_is_the_stock_one_but_for_the_option():
    others = [plugin.name for plugin in entry_points(group="sglang.srt.plugins") if plugin.name != "psrl"]
    ours, stock = survey(), survey(SGLANG_PLUGINS=",".join(others) or "none")
    assert ours == stock
    assert not any("psrl" in route for route in ours["routes"])


def test_a_server_without_the_flag_serves_stock_routes_metrics_and_replies(server_factory, models):
    server = server_factory(args=("--enable-metrics",))
    paths = server.get("/openapi.json").json()["paths"]
    assert not any("psrl" in path for path in paths)
    asked = prompt(700)
    reply = server.generate(asked, 4)
    assert "psrl" not in reply.meta_info
    assert "psrl" not in server.get("/metrics").text
    assert server.get("/psrl/v1/status").status_code == 404
    assert "Cache flushed.\nPlease check backend logs" in server.post("/flush_cache").text
    # Its keys are untouched: stock keeps the KV of old weights, which is what the plugin is for.
    server.generate(asked, 4)
    assert server.update_weights(models[2], version="2", flush_cache=False).success
    assert server.generate(asked, 4).cached_tokens == 592
    assert "psrl: " not in server.log_path.read_text()
    server.stop(grace_s=0.0)
