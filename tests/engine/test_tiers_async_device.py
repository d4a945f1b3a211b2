"""Loads on a device that has been told what to copy long before it does: what waits for it, and what may not change
until then. The device is a thread; pools, linker, tree and store are the real ones."""

import queue
import threading
import time
from functools import partial

import pytest

pytest.importorskip("sglang")

from offline_tiers import LAYERS, TieredEngine, failing, tokens
from support import wait_until

from psrl_sglang.engine.layers import LoadCounter

_LIMIT_S = 20.0


class Fence:
    def __init__(self):
        self._reached = threading.Event()

    def reach(self):
        self._reached.set()

    def synchronize(self):
        assert self._reached.wait(_LIMIT_S)

    wait = synchronize  # the stream of this device's forward is the host


class LateCopier:
    """Does what it is told in order, on a thread, and nothing while ``go`` is not set."""

    def __init__(self, copier, pause_s=0.0):
        self.go = threading.Event()
        self.go.set()
        self.settling = threading.Event()
        self._copier = copier
        self._pause_s = pause_s
        self._jobs = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            job = self._jobs.get()
            assert self.go.wait(_LIMIT_S)
            time.sleep(self._pause_s)
            job()

    def to_device(self, *args):
        self._jobs.put(partial(self._copier.to_device, *args))

    def fence(self):
        fence = Fence()
        self._jobs.put(fence.reach)
        return fence

    def settle(self):
        self.settling.set()
        self.fence().synchronize()


@pytest.fixture
def warm():
    """An engine with a late device, whose DRAM has a prompt that the device has not."""
    engine = TieredEngine()
    asked = tokens(1, 61)
    engine.run(asked, output=[900, 901])
    engine.drop_device()
    engine.linker._copiers[0] = LateCopier(engine.linker._copiers[0])
    yield engine, asked
    engine.linker._copiers[0].go.set()
    engine.close()


def check_quiet(engine):
    # The thread of the load lets go of the pages behind the last word of the device.
    wait_until(lambda: engine.dram.busy_chunks() == 0, "the pages are let go")
    engine.check_quiet()


def test_a_layer_is_read_when_its_bytes_have_landed(warm):
    engine, asked = warm
    engine.linker._copiers[0]._pause_s = 0.01
    assert engine.run(asked) == 60
    check_quiet(engine)


def test_the_forward_goes_on_when_copies_are_started_and_their_pages_stay_until_they_land(warm):
    engine, asked = warm
    late, counter = engine.linker._copiers[0], engine.linker.layer_done_counter
    req = engine.request(asked)
    assert engine.queue_load(req)
    late.go.clear()
    with engine.forward([req]):
        (futures,) = counter.futures.values()
        for future in futures:
            future.result(_LIMIT_S)  # all is started, and nothing has landed
        assert engine.dram.busy_chunks() > 0
        assert engine.dram.drop_tag(engine.tag) == 0
        late.go.set()
    assert engine.failed == []
    engine.abort(req)
    check_quiet(engine)


def test_a_failure_is_told_only_when_the_device_writes_no_more(warm):
    engine, asked = warm
    late, counter = engine.linker._copiers[0], engine.linker.layer_done_counter
    engine.linker.before_layer = failing(LAYERS - 1)
    req = engine.request(asked)
    assert engine.queue_load(req)
    late.go.clear()
    with engine.forward([req]):
        assert late.settling.wait(_LIMIT_S)
        (futures,) = counter.futures.values()
        assert [future.done() for future in futures] == [True] * (LAYERS - 1) + [False]
        assert engine.dram.busy_chunks() > 0
        late.go.set()
    assert engine.failed == [req]
    check_quiet(engine)


class Told:
    def __init__(self):
        self.calls = []

    def wait(self):
        self.calls.append("wait")

    def synchronize(self):
        self.calls.append("synchronize")


def test_a_layer_waits_for_its_own_fence_and_the_end_of_a_batch_for_the_last():
    counter, fences = LoadCounter(3), [Told(), Told(), Told()]
    index = counter.update_producer()
    for layer, fence in enumerate(fences):
        counter.complete(index, layer, fence)
    counter.set_consumer(index)
    counter.wait_until(1)
    assert [fence.calls for fence in fences] == [[], ["wait"], []]
    assert counter.finish(index)
    assert [fence.calls for fence in fences] == [[], ["wait"], ["synchronize"]]


def test_a_batch_that_failed_has_no_fences_to_wait_for():
    counter, fence = LoadCounter(2), Told()
    index = counter.update_producer()
    counter.complete(index, 0, fence)
    counter.fail(index, OSError("injected"))
    counter.set_consumer(index)
    counter.wait_until(1)
    assert not counter.finish(index)
    assert fence.calls == []
