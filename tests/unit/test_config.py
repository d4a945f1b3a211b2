"""Settings: values, rules, what is not built, and that everything wrong is said at once."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from psrl_sglang.config import (
    KV_TRANSFER,
    LMCACHE,
    SECTIONS,
    SGLANG,
    ConfigError,
    KVTransferSettings,
    LMCacheSettings,
    Problem,
    PsrlConfig,
    SGLangSettings,
    load_config,
)


def settings(path: str = LMCACHE, /, **values: Any) -> dict[str, Any]:
    """A mapping in PSRL's layout with `values` in one section."""
    nested: dict[str, Any] = values
    for part in reversed(path.split(".")):
        nested = {part: nested}
    return nested


def problems_of(source: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return list(caught.value.problems)


def only_problem(source: Any) -> Problem:
    (problem,) = problems_of(source)
    return problem


WRONG_VALUES: dict[tuple[str, str], list[object]] = {
    (LMCACHE, "backend"): ["gpu", "CPU", 1, None],
    (LMCACHE, "offload_size_gb"): [0, -1.0, float("nan"), float("inf"), "100", True, None, 10**400],
    (LMCACHE, "chunk_size"): [0, -256, 256.0, "256", True, [256], {"a": 1}],
    (LMCACHE, "cache_policy"): ["MRU", 1],
    (LMCACHE, "reserve_local_cpu_size"): [-0.1, float("inf")],
    (LMCACHE, "config_file"): [3, ""],
    (LMCACHE, "disk_path"): ["", 3],
    (LMCACHE, "max_disk_size_gb"): [0],
    (LMCACHE, "remote_url"): ["", "host:6379", 6379],
    (LMCACHE, "p2p_transfer_channel"): ["rdma"],
    (LMCACHE, "controller_host"): ["", 10],
    (LMCACHE, "controller_base_port"): [0, 65536, "9000"],
    (LMCACHE, "controller_pull_port"): [0, 65536],
    (LMCACHE, "controller_reply_port"): [0, 65536],
    (LMCACHE, "controller_health_timeout_s"): [0],
    (LMCACHE, "gpu_pin_block_budget"): [-1, 0.5],
    (KV_TRANSFER, "transfer_mode"): ["lazy"],
    (KV_TRANSFER, "transfer_timeout_ms"): [0, 0.5],
    (KV_TRANSFER, "stats_log_interval_s"): [-1],
    (SGLANG, "max_version_lag"): [-1, 0.5, "1", float("inf")],
    (SGLANG, "tree_core"): ["c++"],
    (SGLANG, "load_policy"): ["sometimes", 0, -5, True, 1.5, "512"],
    (SGLANG, "decode_checkpoint_tokens"): [-1],
    (SGLANG, "pin_lease_s"): [0, float("nan")],
    (SGLANG, "pin_max_lease_s"): [0],
    (SGLANG, "pin_budget_tokens"): [-1],
    (SGLANG, "namespace"): ["a|b", 1, None],
    (SGLANG, "command_timeout_s"): [0],
    (SGLANG, "read_ahead_timeout_s"): [0, -1.0, "2"],
    (SGLANG, "remote_timeout_s"): [0, None],
    (SGLANG, "remote_ttl_s"): [-1.0, float("inf")],
    (SGLANG, "instance_id"): ["a b", "a@b", 1],
    (SGLANG, "move_host"): ["", None],
    (SGLANG, "move_port"): [-1, 65536, "0"],
    (SGLANG, "moves_at_once"): [0, 65],
    (SGLANG, "move_policy"): ["sometimes", 0, "512"],
    (SGLANG, "unversioned_moves"): ["any", None],
    (SGLANG, "secret_file"): ["", 3],
    (SGLANG, "heartbeat_s"): [0],
}
SWITCHES = [
    (path, name)
    for path, schema in SECTIONS.items()
    for name, f in schema.model_fields.items()
    if f.annotation is bool
]


class TestValues:
    def test_every_setting_has_wrong_values_here(self):
        every = {(path, name) for path, schema in SECTIONS.items() for name in schema.model_fields}
        assert every == set(WRONG_VALUES) | set(SWITCHES)

    @pytest.mark.parametrize(
        ("path", "name", "value"),
        [
            pytest.param(*key, value, id=f"{key[1]}={str(value)[:8]}")
            for key, values in WRONG_VALUES.items()
            for value in values
        ],
    )
    def test_wrong_value_is_refused_alone_and_by_name(self, path, name, value):
        problem = only_problem(settings(path, **{name: value}))
        assert problem.field == f"{path}.{name}"
        assert problem.message.startswith("must be ")
        assert problem.remedy

    @pytest.mark.parametrize(("path", "name"), SWITCHES)
    @pytest.mark.parametrize("value", ["yes", "true", 1, None])
    def test_switch_takes_booleans_only(self, path, name, value):
        problem = only_problem(settings(path, **{name: value}))
        assert problem.field == f"{path}.{name}"
        if isinstance(value, str):
            assert "without quotes" in problem.remedy

    def test_quoted_number_is_told_to_lose_its_quotes(self):
        assert "`chunk_size: 256`" in only_problem(settings(chunk_size="256")).remedy

    @pytest.mark.parametrize("value", ["auto", "always", "never", 1, 4096])
    def test_load_policy_takes_a_word_or_tokens(self, value):
        assert load_config(settings(SGLANG, load_policy=value)).sglang.load_policy == value

    def test_switched_off_section_is_checked_but_has_no_further_rules(self):
        assert load_config(settings(backend="disk")).lmcache.disk_path is None
        assert only_problem(settings(enable=False, chunk_size=-1)).field == "psrl.lmcache.chunk_size"


class TestRules:
    @pytest.mark.parametrize("value", [True, False])
    def test_exactly_one_answer_to_a_weight_change(self, value):
        problem = only_problem(settings(multi_version_kv=value, clear_on_weight_update=value))
        assert "psrl.lmcache.multi_version_kv" in problem.message
        assert "psrl.lmcache.clear_on_weight_update" in problem.message

    def test_p2p_requires_lmcache(self):
        problem = only_problem(settings(enable_p2p=True))
        assert (problem.field, "psrl.lmcache.enable: true" in problem.message) == (
            "psrl.lmcache.enable_p2p",
            True,
        )

    def test_p2p_requires_versions_and_excludes_clearing(self):
        source = settings(enable=True, enable_p2p=True, multi_version_kv=False, clear_on_weight_update=True)
        problem = only_problem(source)
        assert problem.field == "psrl.lmcache.enable_p2p"
        assert "multi_version_kv: true" in problem.message
        assert "clear_on_weight_update: false" in problem.message

    @pytest.mark.parametrize(("backend", "needs"), [("disk", "disk_path"), ("remote", "remote_url")])
    def test_backend_requires_its_address_when_enabled(self, backend, needs):
        assert only_problem(settings(enable=True, backend=backend)).field == f"psrl.lmcache.{needs}"
        address = {"disk_path": "kv", "remote_url": "redis://h:1"}[needs]
        load_config(settings(enable=True, backend=backend, **{needs: address}))

    def test_kv_transfer_requires_lmcache_and_p2p(self):
        messages = [problem.message for problem in problems_of(settings(KV_TRANSFER, enable=True))]
        assert messages == ["requires psrl.lmcache.enable: true", "requires psrl.lmcache.enable_p2p: true"]

    def test_lag_requires_versions(self):
        source = {
            "lmcache": {"multi_version_kv": False, "clear_on_weight_update": True},
            "sglang": {"max_version_lag": 1},
        }
        assert only_problem(source).field == "psrl.sglang.max_version_lag"

    def test_ports_are_distinct(self):
        assert only_problem(settings(controller_reply_port=9000)).field == "psrl.lmcache.controller_reply_port"
        same = settings(controller_base_port=1, controller_pull_port=1, controller_reply_port=1)
        assert len(problems_of(same)) == 2

    def test_longest_lease_covers_the_usual(self):
        assert only_problem(settings(SGLANG, pin_lease_s=4000)).field == "psrl.sglang.pin_max_lease_s"
        load_config(settings(SGLANG, pin_lease_s=4000, pin_max_lease_s=4000))

    def test_lmcache_file_is_refused(self):
        problem = only_problem(settings(config_file="lmcache.yaml"))
        assert "write the fields" in problem.remedy

    def test_rules_hold_for_objects_made_in_code(self):
        with pytest.raises(ValidationError, match="multi_version_kv"):
            PsrlConfig(lmcache=LMCacheSettings(multi_version_kv=False))


class TestReport:
    def test_every_problem_is_reported_at_once(self):
        source = {
            "psrl": {
                "lmcahe": {},
                "lmcache": {
                    "enable": "yes",
                    "chunk_size": 0,
                    "controller_host": "${absent}",
                },
                "sglang": {"lag": 1, "pin_lease_s": 9999.0},
            }
        }
        fields = [problem.field for problem in problems_of(source)]
        assert sorted(fields) == sorted(
            [
                "psrl.lmcahe",
                "psrl.lmcache.enable",
                "psrl.lmcache.chunk_size",
                "psrl.lmcache.controller_host",
                "psrl.sglang.lag",
                "psrl.sglang.pin_max_lease_s",
            ]
        )

    def test_text_has_field_value_fault_and_remedy_of_each(self):
        with pytest.raises(ConfigError) as caught:
            load_config(settings(chunk_size="256", enable="no"))
        text = str(caught.value)
        assert text.startswith("2 problems in the settings:")
        for problem in caught.value.problems:
            for part in (problem.field, json.dumps(problem.value), problem.message, problem.remedy):
                assert part in text

    def test_credentials_in_a_url_are_masked(self):
        with pytest.raises(ConfigError) as caught:
            load_config(settings(remote_url="redis://user:secret@host with space"))
        assert "secret" not in str(caught.value)
        assert "***@host" in str(caught.value)

    def test_long_value_is_cut(self):
        with pytest.raises(ConfigError) as caught:
            load_config(settings(backend="x" * 10_000))
        assert max(map(len, re.findall(r"value: .*", str(caught.value)))) < 140

    def test_settings_cannot_be_changed(self):
        with pytest.raises(ValidationError):
            load_config({}).lmcache.chunk_size = 1  # pyright: ignore[reportAttributeAccessIssue]


def number(low: float, *, open_low: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, 1e12, exclude_min=open_low, allow_nan=False)


words = st.text(st.characters(codec="utf-8", exclude_characters="|$"), max_size=20)
ports = st.lists(st.integers(1, 65535), min_size=3, max_size=3, unique=True)


@st.composite
def configs(draw) -> PsrlConfig:
    base, pull, reply = draw(ports)
    versions, lmcache_on = draw(st.booleans()), draw(st.booleans())
    p2p = draw(st.booleans()) and lmcache_on and versions
    lease_s = draw(number(0, open_low=True))
    return PsrlConfig(
        lmcache=LMCacheSettings(
            enable=lmcache_on,
            backend=draw(st.sampled_from(["cpu", "disk", "remote"])),
            offload_size_gb=draw(number(0, open_low=True)),
            chunk_size=draw(st.integers(1)),
            clear_on_weight_update=not versions,
            multi_version_kv=versions,
            cache_policy=draw(st.sampled_from(["LRU", "FIFO"])),
            disk_path=draw(words.filter(bool)),
            remote_url="redis://user:word@host:6379",
            enable_p2p=p2p,
            p2p_transfer_channel=draw(st.sampled_from(["auto", "nixl", "tcp", "cma"])),
            controller_host=draw(st.none() | words.filter(bool)),
            controller_base_port=base,
            controller_pull_port=pull,
            controller_reply_port=reply,
        ),
        kv_transfer=KVTransferSettings(
            enable=draw(st.booleans()) and p2p, stats_log_interval_s=draw(number(0))
        ),
        sglang=SGLangSettings(
            max_version_lag=draw(st.integers(0, 9)) if versions else 0,
            load_policy=draw(st.sampled_from(["auto", "always", "never"]) | st.integers(1)),
            pin_lease_s=lease_s,
            pin_max_lease_s=lease_s * draw(st.floats(1, 10)),
            namespace=draw(words),
        ),
    )


@given(configs())
def test_json_round_trip_gives_equal_settings(config):
    assert load_config(config.to_json()) == config


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_any_content_loads_or_is_reported_as_a_config_error(junk):
    for source in (
        {"psrl": {"tms": junk}},
        settings(chunk_size=junk),
        {"psrl": junk},
        {"psrl": {"lmcache": junk}},
    ):
        with contextlib.suppress(ConfigError):
            load_config(source)
