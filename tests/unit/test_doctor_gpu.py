"""`psrl-sglang doctor --gpu`, on the CPU: what it says of a device that copies right, of one that does not, and of
one that is not there."""

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("sglang")

import torch

from psrl_sglang.cli import app
from psrl_sglang.doctor import gpu
from psrl_sglang.doctor.result import State, ok
from psrl_sglang.doctor.runner import Check, run_in_order

PATHS = ("direct", "page-locked", "staged")
NAMES = [
    "device",
    "sglang",
    "page-locked memory",
    *(f"round trip, {path}" for path in PATHS),
    *(f"layer order, {path}" for path in PATHS),
    "overlap",
    *(f"bandwidth, {path}" for path in PATHS),
]
CPU = torch.device("cpu")


def doctor(*options):
    return CliRunner().invoke(app, ["doctor", "--gpu", *options])


def checks(run):
    return {one["name"]: one for one in json.loads(run.output)["checks"]}


@pytest.fixture(scope="module")
def on_cpu():
    return doctor("--device", "cpu", "--json")


def test_a_device_that_copies_right_is_ok_in_every_check_that_applies(on_cpu):
    assert on_cpu.exit_code == 0
    assert json.loads(on_cpu.output)["ok"] is True
    states = {name: one["state"] for name, one in checks(on_cpu).items()}
    assert list(states) == NAMES
    not_of_a_cpu = ("page-locked memory", "overlap", "bandwidth, page-locked", "bandwidth, staged")
    assert states == {name: "skip" if name in not_of_a_cpu else "ok" for name in NAMES}
    assert all("not applicable" in checks(on_cpu)[name]["found"] for name in not_of_a_cpu)


def test_every_way_of_copying_is_tried_over_all_kinds_of_pool(on_cpu):
    for path in PATHS:
        found = checks(on_cpu)[f"round trip, {path}"]["found"]
        for word in ("MHA", "MLA", "NHD", "HND", "float16", "bfloat16", "fp8", "float32"):
            assert word in found


@pytest.fixture
def few_kinds(monkeypatch):
    from psrl_sglang.engine import selftest

    monkeypatch.setattr(gpu, "_bandwidth", lambda device: [ok("bandwidth", "")])
    monkeypatch.setattr(selftest.round_trip, "__defaults__", (selftest.KINDS[:5:4],))
    return selftest


def test_bytes_that_come_back_wrong_are_told_with_their_place_and_fail(few_kinds, monkeypatch):
    load = few_kinds.DirectCopier.to_device

    def corrupt(self, pool, layer, rows, offsets):
        load(self, pool, layer, rows, offsets)
        if layer == 2:
            pool.layers[2][0].buffer[int(rows[1]), 7] ^= 1

    monkeypatch.setattr(few_kinds.DirectCopier, "to_device", corrupt)
    run = doctor("--device", "cpu", "--json")
    assert run.exit_code == 1
    bad = checks(run)["round trip, direct"]
    assert bad["state"] == "wrong"
    assert "layer 2: 1 pages" in bad["found"]
    assert bad["remedy"]
    assert checks(run)["round trip, staged"]["state"] == "ok"


def test_a_write_outside_of_the_pages_is_wrong_too(few_kinds, monkeypatch):
    store = few_kinds.StagedCopier.to_arena

    def corrupt(self, pool, rows, offsets):
        store(self, pool, rows, offsets)
        pool.layers[0][0].buffer[0, 0] ^= 1

    monkeypatch.setattr(few_kinds.StagedCopier, "to_arena", corrupt)
    (direct, _, staged) = gpu._round_trip(CPU)
    assert (direct.state, staged.state) == (State.OK, State.WRONG)


def test_a_reader_that_does_not_wait_for_its_layer_is_wrong(few_kinds, monkeypatch):
    monkeypatch.setattr(few_kinds, "_PAUSES_S", (0.3,))
    monkeypatch.setattr(few_kinds.LoadCounter, "wait_until", lambda self, layer: None)
    found = gpu._layer_order(CPU)
    assert {one.state for one in found} == {State.WRONG}


def test_a_reader_that_came_too_late_to_show_anything_is_given_more_time(few_kinds, monkeypatch):
    tried = []

    def order(device, path, pause_s):
        tried.append(pause_s)
        return few_kinds.LayerOrder(len(tried) == 2, 6, ())

    monkeypatch.setattr(few_kinds, "_layer_order", order)
    assert few_kinds.layer_order(CPU, "direct").is_shown
    assert tried == sorted(tried)
    assert len(tried) == 2


def test_an_order_that_was_not_put_to_the_test_is_no_pass(few_kinds, monkeypatch):
    monkeypatch.setattr(few_kinds, "layer_order", lambda *_: few_kinds.LayerOrder(False, 6, ()))
    assert {one.state for one in gpu._layer_order(CPU)} == {State.FAIL}


def test_a_load_that_fails_is_a_failed_check_and_the_others_are_run(few_kinds, monkeypatch):
    def fail(*_):
        raise OSError("injected")

    monkeypatch.setattr(few_kinds.PinnedCopier, "to_device", fail)
    run = doctor("--device", "cpu", "--json")
    assert run.exit_code == 1
    assert checks(run)["round trip"]["state"] == "fail"
    assert "injected" in checks(run)["round trip"]["found"]
    assert "overlap" in checks(run)


def test_a_slow_device_is_said_to_be_slow_and_passes(few_kinds, monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(few_kinds, "page_lock_error", lambda *_: None)
    monkeypatch.setattr(few_kinds, "overlap", lambda *_: few_kinds.Overlap(1.0, 1.0, 1.9))
    (found,) = gpu._overlap(cuda)
    assert found.state is State.SLOW
    assert "1.90" in found.found
    monkeypatch.setattr(few_kinds, "overlap", lambda *_: few_kinds.Overlap(1.0, 1.0, 1.1))
    assert gpu._overlap(cuda)[0].state is State.OK


def test_memory_that_cannot_be_locked_is_slow_with_the_remedy_and_its_way_is_not_tried(few_kinds, monkeypatch):
    error = few_kinds.PageLockError("cudaHostRegister: out of memory (2)", "ulimit -l unlimited")
    monkeypatch.setattr(few_kinds, "page_lock_error", lambda *_: error)
    cuda = torch.device("cuda", 0)
    (found,) = gpu._page_lock(cuda)
    assert found.state is State.SLOW
    assert "out of memory" in found.found
    assert found.remedy == "ulimit -l unlimited"
    assert dict(gpu._paths(cuda)) == {"page-locked": error.why, "staged": ""}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a device")
def test_a_device_that_is_not_there_ends_with_2_and_says_what_was_looked_for():
    for options in ([], ["--device", "cuda:1"]):
        run = doctor(*options, "--json")
        assert run.exit_code == 2
        (one,) = checks(run).values()
        assert one["state"] == "fail"
        assert f"looked for {options[-1] if options else 'cuda:0'}" in one["found"]
        assert "nvidia-smi" in one["remedy"]
    assert doctor().exit_code == 2


@pytest.mark.parametrize("name", ["xpu", "graphics card", "cuda:x"])
def test_a_name_of_no_device_that_is_known_ends_with_2(name):
    assert doctor("--device", name).exit_code == 2


def test_a_number_that_no_device_has_names_those_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    with pytest.raises(gpu.NoSuchDeviceError, match=r"cuda:5.*cuda:0 \(card 0\), cuda:1 \(card 1\)"):
        gpu.find_device("cuda:5")
    assert gpu.find_device("cuda:1") == torch.device("cuda", 1)


def test_the_device_test_is_not_mixed_with_the_others():
    assert doctor("--peer", "127.0.0.1:1").exit_code == 2
    assert CliRunner().invoke(app, ["doctor", "--device", "cpu"]).exit_code == 2


def test_without_sglang_it_says_so_and_tries_nothing(monkeypatch):
    from importlib import metadata

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    run = doctor("--device", "cpu", "--json")
    assert run.exit_code == 1
    assert list(checks(run)) == ["device", "sglang"]
    assert "not installed" in checks(run)["sglang"]["found"]


def test_checks_in_order_end_behind_one_that_hangs():
    import threading

    ended = threading.Event()
    hangs = Check("hangs", lambda: ended.wait(20) and [], 0.1)
    results = run_in_order(
        [Check("first", lambda: [ok("first", "")]), hangs, Check("last", lambda: [ok("", "")])]
    )
    ended.set()
    assert [(one.name, one.state) for one in results] == [
        ("first", State.OK),
        ("hangs", State.FAIL),
        ("last", State.FAIL),
    ]
    assert "hangs" in results[2].found
