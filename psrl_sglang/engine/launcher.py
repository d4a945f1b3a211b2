"""The launcher side: ``--psrl-config`` on the command line and on ``Engine``, and what it switches on.

Without the flag nothing here touches the engine: only the option itself exists.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from psrl_sglang.config import ConfigError, PsrlConfig, load_config
from psrl_sglang.engine import activation, seams
from psrl_sglang.engine.activation import EXIT_REFUSED, attach_settings, refuse, settings_of
from psrl_sglang.engine.checkpoint import checkpoint_fingerprint
from psrl_sglang.engine.resolved import Resolved

_ENGINE_MODULE = "sglang.srt.entrypoints.engine"
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_STOCK_EVICTION_POLICY = "lru"


def install() -> None:
    """Add the option. Everything else is hooked only once it is given."""
    HookRegistry.register(f"{_SERVER_ARGS}.add_cli_args", _after_add_cli_args, HookType.AFTER)
    HookRegistry.register(f"{_SERVER_ARGS}.from_cli_args", _after_from_cli_args, HookType.AFTER)
    engine_module = sys.modules.get(_ENGINE_MODULE)
    if engine_module is not None:
        _accept_keyword(engine_module.Engine)


def _accept_keyword(engine_class: Any) -> None:
    """``Engine(psrl_config=...)``: its constructor loads plugins, then makes its ServerArgs with this factory."""
    stock = engine_class.server_args_class

    def make_server_args(*, psrl_config: Any = None, **kwargs: Any) -> Any:
        server_args = stock(**kwargs)
        if psrl_config is not None:
            enable(server_args, load_config(psrl_config))
        return server_args

    engine_class.server_args_class = staticmethod(make_server_args)


def _after_add_cli_args(result: Any, parser: argparse.ArgumentParser) -> Any:
    parser.add_argument(
        "--psrl-config",
        metavar="FILE|JSON",
        default=None,
        help="Switch on psrl_sglang with these settings: a YAML or JSON file, or inline JSON.",
    )
    return result


def _after_from_cli_args(server_args: Any, cls: Any, args: argparse.Namespace) -> Any:
    source = getattr(args, "psrl_config", None)
    if source is not None:
        try:
            config = load_config(source)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(EXIT_REFUSED) from error
        enable(server_args, config)
    return server_args


def enable(server_args: Any, config: PsrlConfig) -> None:
    """Switch the plugin on for one engine. Ends the process if SGLang or the arguments do not allow it."""
    _refuse_arguments(server_args)
    seams.verify(seams.load_seams())
    if server_args.radix_eviction_policy == _STOCK_EVICTION_POLICY:
        server_args.radix_eviction_policy = "psrl" if config.sglang.tree_core == "python" else "priority"
    if config.lmcache.enable:
        from psrl_sglang.engine import tier_start

        tier_start.select_route(server_args)
    attach_settings(server_args, config)
    _hook_launch()


def _refuse_arguments(server_args: Any) -> None:
    """Modes in which versions are not kept, or were never tried: better no start than a silent gap."""
    reasons = {
        "disable_radix_cache": "--disable-radix-cache leaves no cache to version; drop it or drop --psrl-config",
        "radix_cache_backend": "--radix-cache-backend replaces the tree that carries the versions; drop it",
        "enable_flexkv": "--enable-flexkv replaces the tree that carries the versions; drop it",
        "smg_grpc_mode": "--smg-grpc-mode has no hook for the plugin; use the HTTP server",
        "grpc_mode": "--grpc-mode has no hook for the plugin; use the HTTP server",
        "use_ray": "--use-ray starts schedulers without the plugin's settings; use the default launcher",
        "encoder_only": "--encoder-only has no KV cache; drop --psrl-config there",
        "enable_unified_memory": "--enable-unified-memory is not supported; drop it",
    }
    wrong = [text for name, text in reasons.items() if getattr(server_args, name, None)]
    if getattr(server_args, "disaggregation_mode", "null") not in (None, "null"):
        wrong.append(
            f"--disaggregation-mode {server_args.disaggregation_mode}: prefill and decode engines do not agree "
            "on versions yet; use mode null"
        )
    if getattr(server_args, "dp_size", 1) > 1:
        wrong.append(
            f"--dp-size {server_args.dp_size}: replicas behind one launcher do not report to it that they are "
            "versioned; start one engine per replica"
        )
    if wrong:
        refuse("\n  ".join(["these arguments and --psrl-config exclude each other:", *wrong]))


def _hook_launch() -> None:
    from psrl_sglang.engine import command_types, pull, reporting, routes

    if f"{_ENGINE_MODULE}.Engine._launch_subprocesses" in HookRegistry._patched:
        return
    command_types.register_wire_types()
    routes.add_communicator()
    HookRegistry.register(f"{_ENGINE_MODULE}.Engine._launch_subprocesses", _around_launch, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        routes.before_serving,
        HookType.BEFORE,
    )
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        reporting.around_update_meta_info,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request",
        pull.around_tokenize,
        HookType.AROUND,
    )
    HookRegistry.apply_hooks()
    mine = [seam for seam in seams.load_seams() if seam.side in ("launcher", "http")]
    seams.verify(mine, patched=frozenset(HookRegistry._patched))


def _around_launch(original: Callable[..., Any], cls: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    config = settings_of(server_args)
    if config is None:
        return original(cls, server_args, *args, **kwargs)
    resolved = Resolved(server_args)
    _refuse_arguments(resolved)  # SGLang may have chosen what the user did not
    _refuse_model(server_args)
    if config.lmcache.enable:
        from psrl_sglang.engine import tier_start

        tier_start.check_before_start(config, resolved)
    with activation.exporting(config, checkpoint_fingerprint(resolved)), _ended_by_refusal():
        launched = original(cls, server_args, *args, **kwargs)
    _require_versioned_schedulers(launched[3].scheduler_infos)
    return launched


@contextmanager
def _ended_by_refusal() -> Iterator[None]:
    """A scheduler that refuses to start has said why; SGLang adds a traceback about its end and another code."""
    try:
        yield
    except RuntimeError as error:
        if f"(exit code: {EXIT_REFUSED})" in str(error):
            raise SystemExit(EXIT_REFUSED) from None
        raise


def _refuse_model(server_args: Any) -> None:
    """A recurrent state is taken past the boundary cap and cannot be cut back, so it cannot be versioned."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    if uses_ssm_state(ModelConfig.from_server_args(server_args)):
        refuse(
            f"model {server_args.model_path}: its pool holds recurrent state (Mamba, linear attention), which "
            "cannot be cut at a version boundary; start this model without --psrl-config"
        )


def _require_versioned_schedulers(scheduler_infos: list[dict[str, Any]]) -> None:
    from psrl_sglang.engine.worker import INIT_INFO_KEY

    bare = [index for index, info in enumerate(scheduler_infos) if INIT_INFO_KEY not in info]
    if bare:
        refuse(f"scheduler(s) {bare} came up without the plugin; is it left out of SGLANG_PLUGINS there?")
