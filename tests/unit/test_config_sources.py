"""Settings: where they are read from, which names count, and what cannot be read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

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

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))

PSRL_FILE = """
defaults:
  - _self_
actor_rollout_ref: ${train_actor_rollout_ref}
broken: ${nothing.here} and ${ not closed
trainer: {project_name: demo, default_local_dir: "checkpoints/${trainer.project_name}", day: 2026-01-02}
psrl:
  colocate: False
  ps_manager_ip: 10.0.0.7
  reward_service_ip: ${psrl.ps_manager_ip}
  staleness: 0
  rollout_n: 1
  gen_mode: batch
  ps_mode: nixl_cpu
  tms: {enable: False}
  nixl: {server_ip: "${psrl.ps_manager_ip}", server_port: 23456}
  agentic_rl: {batch_agg_mode: trajectory, turn_output: {dir: ""}}
  deployment: {n_rollout_instances: "${oc.env:SURELY_NOT_SET_ANYWHERE}"}
  server_rollout: {enable: True}
  rollout_gateway: {trajectory_id_strategy: auto}
  status_collection: {enable: True}
  routing_strategy: {method: request_num_balance}
  lmcache:
    enable: False
    backend: cpu
    offload_size_gb: 80
    chunk_size: 128
    config_file: null
    clear_on_weight_update: False
    multi_version_kv: True
    cache_policy: fifo
    enable_async_loading: False
    controller_host: ${psrl.ps_manager_ip}
  rollout_coordination:
    partial_rollout: {enable: True}
    redundant_rollout: {enable: False}
    session_strategy: {thunder_agent: {enable: False}}
    sync_and_mig_strategy: {mig: {enable: False}}
    proactive_filter_strategy: {enable: False}
    routing_strategy:
      method: cache_aware_v1
      cache_aware_policy: {cache_threshold: 0.0}
      kv_transfer: {enable: False, transfer_mode: pin_sync, stats_log_interval_s: 0}
      enable_trajectory_sticky: False
"""


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


class TestSources:
    def test_nothing_set_means_every_default(self):
        expected = PsrlConfig(
            lmcache=LMCacheSettings(), kv_transfer=KVTransferSettings(), sglang=SGLangSettings()
        )
        assert load_config({}) == load_config("{}") == load_config({"psrl": None}) == expected

    def test_psrl_file_loads_unchanged_and_foreign_keys_are_ignored(self, tmp_path):
        file = tmp_path / "psrl.yaml"
        file.write_text(PSRL_FILE)
        config = load_config(str(file))
        assert config.lmcache.controller_host == "10.0.0.7"
        assert (config.lmcache.offload_size_gb, config.lmcache.chunk_size) == (80.0, 128)
        assert config.lmcache.cache_policy == "FIFO"
        assert config.kv_transfer.transfer_mode == "pin_sync"
        assert config.kv_transfer.stats_log_interval_s == 0

    @pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
    def test_shipped_file_loads(self, file):
        load_config(file)

    def test_shipped_files_do_what_their_names_say(self):
        assert load_config(ROOT / "configs/rollout.yaml") == load_config({})
        assert load_config(ROOT / "configs/lag1.yaml").sglang.max_version_lag == 1
        cleared = load_config(ROOT / "configs/clear.yaml").lmcache
        assert cleared.clear_on_weight_update
        assert not cleared.multi_version_kv

    def test_rollout_file_lists_every_setting_with_a_comment(self):
        lines = (ROOT / "configs/rollout.yaml").read_text().splitlines()
        listed = [i for i, line in enumerate(lines) if re.match(r"\s+\w+: \S", line)]
        assert all(lines[i - 1].lstrip().startswith("#") for i in listed)
        names = [lines[i].split(":")[0].strip() for i in listed]
        assert sorted(names) == sorted(name for schema in SECTIONS.values() for name in schema.model_fields)

    def test_documentation_lists_every_setting_with_its_default(self):
        rows = re.findall(
            r"^\| `(\w+)` \| `([^`]*)` \|.*\| ([^|]+) \|$", (ROOT / "docs/settings.md").read_text(), re.M
        )
        documented = [(name, yaml.safe_load(default)) for name, default, _ in rows]
        defined = [(n, f.default) for schema in SECTIONS.values() for n, f in schema.model_fields.items()]
        assert documented == defined

    def test_file_may_start_with_the_content(self, tmp_path):
        file = tmp_path / "content.yaml"
        file.write_text("ip: a\nlmcache: {controller_host: '${psrl.ip}', disk_path: '${ip}'}")
        config = load_config(file)
        assert config.lmcache.controller_host == config.lmcache.disk_path == "a"

    def test_json_file_and_inline_json_agree(self, tmp_path):
        text = json.dumps(settings(SGLANG, max_version_lag=2), indent="\t")
        file = tmp_path / "settings.json"
        file.write_text(text)
        assert load_config(file) == load_config(text) == load_config("  " + text)

    def test_omegaconf_object_is_a_mapping(self):
        source = OmegaConf.create({"ip": "h", **settings(controller_host="${ip}")})
        assert load_config(source).lmcache.controller_host == "h"

    def test_section_may_be_an_interpolation(self):
        assert (
            load_config({"shared": {"chunk_size": 64}, "psrl": {"lmcache": "${shared}"}}).lmcache.chunk_size
            == 64
        )

    def test_resolved_environment_value_is_used(self, monkeypatch):
        monkeypatch.setenv("CONTROLLER", "node-3")
        config = load_config(settings(controller_host="${oc.env:CONTROLLER}"))
        assert config.lmcache.controller_host == "node-3"

    def test_numbers_and_booleans_read_as_hydra_reads_them(self, tmp_path):
        file = tmp_path / "hydra.yaml"
        file.write_text("psrl: {lmcache: {offload_size_gb: 1e2, save_unfull_chunk: yes}}")
        config = load_config(file)
        assert config.lmcache.offload_size_gb == 100.0
        assert config.lmcache.save_unfull_chunk is True

    def test_merge_key_that_is_overridden_is_no_duplicate(self, tmp_path):
        file = tmp_path / "merge.yaml"
        file.write_text("base: &b {chunk_size: 1}\npsrl: {lmcache: {<<: *b, chunk_size: 2}}")
        assert load_config(file).lmcache.chunk_size == 2


class TestUnreadableSources:
    def test_missing_file(self, tmp_path):
        problem = only_problem(str(tmp_path / "absent.yaml"))
        assert "cannot be read" in problem.message
        assert "absent.yaml" in str(problem.value)

    def test_directory(self, tmp_path):
        assert "cannot be read" in only_problem(tmp_path).message

    def test_file_that_is_not_text(self, tmp_path):
        file = tmp_path / "binary.yaml"
        file.write_bytes(b"\xff\xfe\x00\x81")
        assert "cannot be read" in only_problem(file).message

    @pytest.mark.parametrize(
        "text",
        [
            "psrl: [",
            "psrl: !!python/object:os.system {}",
            "a: 1\n---\na: 2",
            "a: &x {b: *x}",
            "[" * 5000,
            "a: " + "1" * 5000,
        ],
        ids=["syntax", "object tag", "two documents", "endless alias", "deep", "endless number"],
    )
    def test_bad_yaml(self, tmp_path, text):
        file = tmp_path / "bad.yaml"
        file.write_text(text)
        assert only_problem(file).message.startswith("is not YAML")

    def test_aliases_that_explode(self, tmp_path):
        lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
        lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
        file = tmp_path / "bomb.yaml"
        file.write_text("\n".join(lines))
        assert "nodes once aliases are expanded" in only_problem(file).message

    def test_bad_json(self):
        assert only_problem('{"psrl": ').message.startswith("is not JSON")

    @pytest.mark.parametrize("text", ["", "just words", "- a list", "# only comments"])
    def test_file_that_is_not_a_mapping(self, tmp_path, text):
        file = tmp_path / "flat.yaml"
        file.write_text(text)
        assert "not a mapping" in only_problem(file).message

    def test_file_without_any_section_of_ours(self):
        problem = only_problem({"trainer": {}, "data": {}})
        assert problem.field == "psrl"
        assert "no `psrl:` section" in problem.message

    def test_hydra_file_that_was_not_composed(self):
        assert "composed" in only_problem({"defaults": ["psrl@psrl: psrl"], "trainer": {}}).remedy

    def test_all_duplicate_keys_are_reported_with_other_problems(self, tmp_path):
        file = tmp_path / "twice.yaml"
        file.write_text(
            "x:\n- {y: 1, y: 2}\npsrl:\n  lmcache:\n    chunk_size: 0\n    enable: false\n    enable: false\n"
        )
        found = problems_of(file)
        assert [problem.field for problem in found] == [
            "x[0].y",
            "psrl.lmcache.enable",
            "psrl.lmcache.chunk_size",
        ]
        assert "lines 6 and 7" in found[1].message

    def test_duplicate_key_in_json(self):
        problem = only_problem('{"psrl": {"lmcache": {"chunk_size": 1, "chunk_size": 2}}}')
        assert (problem.field, problem.value) == ("psrl.lmcache.chunk_size", 2)


class TestNames:
    @pytest.mark.parametrize(
        ("source", "field", "known"),
        [
            ({"psrl": {"lmcahe": {}}}, "psrl.lmcahe", LMCACHE),
            ({"psrl": {"LMCache": {}}}, "psrl.LMCache", LMCACHE),
            ({"psrl": {"sglnag": None}}, "psrl.sglnag", SGLANG),
            ({"prsl": {}}, "prsl", "psrl"),
            ({"lmcahe": {}}, "lmcahe", LMCACHE),
            ({"lmcache": {}, "sglnag": {}}, "psrl.sglnag", SGLANG),
            ({"lmcache": {}, "psrll": {}}, "psrll", "psrl"),
            ({"psrl": {"rollout_cordination": {}}}, "psrl.rollout_cordination", "psrl.rollout_coordination"),
            (
                {"psrl": {"rollout_coordination": {"routing_stategy": {}}}},
                "psrl.rollout_coordination.routing_stategy",
                "psrl.rollout_coordination.routing_strategy",
            ),
            (
                {"psrl": {"rollout_coordination": {"routing_strategy": {"kv_tranfer": {}}}}},
                "psrl.rollout_coordination.routing_strategy.kv_tranfer",
                KV_TRANSFER,
            ),
            (
                {"psrl": {"rollout_coordination": {"routing_strategy": {"kv-transfer": {}}}}},
                "psrl.rollout_coordination.routing_strategy.kv-transfer",
                KV_TRANSFER,
            ),
        ],
    )
    def test_near_miss_of_a_section_names_the_known_one(self, source, field, known):
        problem = only_problem(source)
        assert problem.field == field
        assert f"{known} is" in problem.message

    @pytest.mark.parametrize(
        ("source", "field", "place"),
        [
            ({"psrl": {}, "lmcache": {}}, "lmcache", LMCACHE),
            ({"psrl": {"kv_transfer": {}}}, "psrl.kv_transfer", KV_TRANSFER),
            (
                {"psrl": {"routing_strategy": {"kv_transfer": {}}}},
                "psrl.routing_strategy.kv_transfer",
                KV_TRANSFER,
            ),
            ({"psrl": {"rollout_coordination": {"sglang": {}}}}, "psrl.rollout_coordination.sglang", SGLANG),
            ({"psrl": {"max_version_lag": 1}}, "psrl.max_version_lag", f"{SGLANG}.max_version_lag"),
        ],
    )
    def test_name_out_of_its_place_is_not_ignored(self, source, field, place):
        problem = only_problem(source)
        assert problem.field == field
        assert f"its place is {place}" in problem.message

    def test_unknown_setting_names_the_nearest(self):
        assert "`chunk_size`" in only_problem(settings(chunksize=256)).remedy

    def test_unknown_setting_of_another_section_names_that_section(self):
        assert only_problem(settings(max_version_lag=1)).remedy == f"move it to {SGLANG}"

    def test_unknown_setting_without_a_near_one_lists_all(self):
        assert "max_version_lag" in only_problem(settings(SGLANG, zzz=1)).remedy

    def test_key_that_is_no_string_is_unknown(self):
        fields = [problem.field for problem in problems_of({"psrl": {"sglang": {7: 1, None: 2}}, None: 3})]
        assert fields == ["psrl.sglang.7", "psrl.sglang.None"]

    def test_misspelt_switch_does_not_raise_a_rule_as_well(self):
        found = problems_of(settings(multi_version_k=False, clear_on_weight_update=True))
        assert [problem.field for problem in found] == ["psrl.lmcache.multi_version_k"]

    @pytest.mark.parametrize("value", [3, "text", [1], True])
    @pytest.mark.parametrize("path", ["psrl", LMCACHE, KV_TRANSFER, SGLANG])
    def test_section_that_is_not_a_mapping(self, path, value):
        parent, _, key = path.rpartition(".")
        source = settings(parent, **{key: value}) if parent else {key: value}
        problem = only_problem(source)
        assert problem.field == path
        assert "not a mapping" in problem.message


class TestInterpolations:
    @pytest.mark.parametrize(
        "text",
        [
            "${psrl.absent}",
            "${oc.env:SURELY_NOT_SET_ANYWHERE}",
            "${now:%Y}",
            "${ open",
            "${.controller_host}",
            "???",
        ],
    )
    def test_failure_in_a_setting_of_ours_is_a_problem(self, text):
        problem = only_problem(settings(controller_host=text))
        assert problem.field == "psrl.lmcache.controller_host"
        assert problem.value == text

    def test_failure_of_a_whole_section_is_a_problem(self):
        assert only_problem({"psrl": {"lmcache": "${absent}"}}).field == LMCACHE
        assert only_problem({"psrl": {"lmcache": "${ open"}}).field == LMCACHE
        assert only_problem({"psrl": "${absent}"}).field == "psrl"

    def test_text_that_still_holds_an_interpolation_is_refused(self):
        assert only_problem(settings(SGLANG, namespace="\\${x}")).field == "psrl.sglang.namespace"

    def test_unresolved_switch_does_not_raise_a_rule_as_well(self):
        found = problems_of(settings(multi_version_kv="${absent}", clear_on_weight_update=True))
        assert [problem.field for problem in found] == ["psrl.lmcache.multi_version_kv"]

    def test_failure_in_an_old_foreign_section_does_not_matter(self):
        load_config({"psrl": {"routing_strategy": "${absent}", "tms": "${absent}"}})
