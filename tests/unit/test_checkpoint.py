"""Which weights a server starts with, and whose KV that makes."""

import os
from types import SimpleNamespace

import pytest

from psrl_sglang.engine.checkpoint import checkpoint_fingerprint
from psrl_sglang.engine.identity import RunIdentity

STAMP_NS = 1_700_000_000_000_000_000


def arguments(path, **more):
    given = {
        "model_path": str(path),
        "revision": None,
        "load_format": "auto",
        "model_loader_extra_config": "{}",
        "quantization": None,
        "quantization_param_path": None,
        "json_model_override_args": "{}",
        "modelopt_quant": None,
        "rl_quant_profile": None,
        "custom_weight_loader": None,
    }
    return SimpleNamespace(**{**given, **more})


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write(directory, bytes(1 << 20))
    return directory


def write(directory, content):
    file = directory / "model.safetensors"
    file.write_bytes(content)
    os.utime(file, ns=(STAMP_NS, STAMP_NS))


def test_the_same_files_read_the_same_way_have_the_same_name(model):
    first = checkpoint_fingerprint(arguments(model))
    assert first
    assert first == checkpoint_fingerprint(arguments(model))
    linked = model.parent / "latest"
    linked.symlink_to(model)
    assert first == checkpoint_fingerprint(arguments(linked))


def test_other_weights_of_the_same_size_and_time_have_another_name(model):
    first = checkpoint_fingerprint(arguments(model))
    write(model, os.urandom(1 << 20))
    assert checkpoint_fingerprint(arguments(model)) != first


@pytest.mark.parametrize("more", [{"quantization": "fp8"}, {"json_model_override_args": '{"rope_theta": 1}'}])
def test_what_makes_other_weights_of_the_same_files_is_in_the_name(model, more):
    assert checkpoint_fingerprint(arguments(model, **more)) != checkpoint_fingerprint(arguments(model))


@pytest.mark.parametrize("load_format", ["dummy", "remote", "remote_instance", "flash_rl", "something-new"])
def test_loaders_that_do_not_read_these_files_have_no_name(model, load_format):
    assert checkpoint_fingerprint(arguments(model, load_format=load_format)) == ""


def test_a_model_that_is_not_here_has_no_name(tmp_path):
    assert checkpoint_fingerprint(arguments("nobody/has-this-model")) == ""
    assert checkpoint_fingerprint(arguments(tmp_path / "gone")) == ""


def identity(namespace="", fingerprint="f", instance="i"):
    return RunIdentity(namespace, "psrl-start", fingerprint, instance)


def test_only_the_start_is_shared_in_a_store_without_a_namespace():
    assert identity().of("psrl-start") == identity(instance="j").of("psrl-start")
    assert identity().of("psrl-start") != identity(fingerprint="g").of("psrl-start")
    assert identity().of("7") != identity(instance="j").of("7")
    assert identity("run").of("run:7") == identity("run", instance="j").of("run:7")


def test_a_start_whose_weights_cannot_be_told_is_its_own():
    mine, other = identity(fingerprint=""), identity(fingerprint="", instance="j")
    assert mine.of("psrl-start") != other.of("psrl-start")
    assert mine.origin("psrl-start", ()) != other.origin("psrl-start", ())


def test_what_an_engine_with_a_lag_caches_is_its_own_in_a_store():
    assert identity("run").of("run:7~") != identity("run", instance="j").of("run:7~")


def test_moves_are_between_engines_of_one_checkpoint_or_one_namespace():
    assert identity().origin("7", ("7",)) == identity(instance="j").origin("7", ("7",))
    assert identity().origin("7", ("7",)) != identity(fingerprint="g").origin("7", ("7",))
    named, started_later = identity("run"), identity("run", fingerprint="g")
    assert named.origin("run:7", ("run:7",)) == started_later.origin("run:7", ("run:7",))


def test_with_a_lag_moves_are_between_engines_that_had_the_same_versions():
    assert identity("run").origin("17~", ("17~", "16~")) != identity("run").origin("17~", ("18~", "17~"))
    assert identity("run").origin("7~", ("8~", "7~")) != identity("run").origin("7~", ("8~", "5~"))
