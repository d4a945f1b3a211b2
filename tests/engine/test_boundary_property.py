"""No look-up hands out KV of weights it must not use, whatever the order of requests and weight changes."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytest.importorskip("sglang")

from offline_tree import CORES, OfflineEngine

from psrl_sglang.engine.pins import PinRefused

SALTS = st.sampled_from([None, None, None, "user"])
VERSIONS = st.sampled_from(["1", "2", "3", "4"])
TOKENS = st.integers(0, 2)
PICK = st.integers(0, 99)
MOST_TOKENS = 40


class Boundary(RuleBasedStateMachine):
    """An engine of 128 slots and 6 rows, and three tokens: prompts share prefixes and the pool runs full."""

    core = "python"
    lag = 0

    @initialize(page_size=st.sampled_from([1, 4]), stem=st.lists(TOKENS, min_size=9, max_size=18))
    def start(self, page_size, stem):
        self.engine = OfflineEngine(core=self.core, page_size=page_size, lag=self.lag, slots=128)
        self.texts = [stem]
        self.in_flight = set()
        self.pins = 0

    # requests: a forward is launched in one step and its result taken in a later one

    @rule(pick=PICK, cut=st.integers(1, MOST_TOKENS), tail=st.lists(TOKENS, max_size=6), salt=SALTS, chunk=PICK)
    def arrive(self, pick, cut, tail, salt, chunk):
        if len(self.engine.waiting) < 4:
            text = self._text(pick)[:cut] + tail
            self._admit(self.engine.request(text[:MOST_TOKENS], salt), chunk)

    @precondition(lambda self: self.engine.waiting)
    @rule(pick=PICK, chunk=PICK)
    def admit_a_waiting_one(self, pick, chunk):
        self._admit(self._of(self.engine.waiting, pick), chunk)

    @precondition(lambda self: self.engine.running)
    @rule(pick=PICK, token=TOKENS, chunk=PICK, steps=st.integers(1, 6))
    def step(self, pick, token, chunk, steps):
        req = self._of(self.engine.running, pick)
        for _ in range(steps):
            if not self._step(req, token, chunk):
                break

    @precondition(lambda self: any(self._may_finish(req) for req in self.engine.running))
    @rule(pick=PICK)
    def finish(self, pick):
        req = self._of([req for req in self.engine.running if self._may_finish(req)], pick)
        self.texts.append([*req.origin_input_ids, *req.output_ids])
        self.engine.finish(req)

    @precondition(lambda self: self.engine.running)
    @rule(pick=PICK)
    def abort(self, pick):
        req = self._of(self.engine.running, pick)
        self.engine.abort(req)
        self.in_flight.discard(req)

    @precondition(lambda self: self.engine.running)
    @rule(token=TOKENS)
    def pause_and_retract(self, token):
        for req in self.engine.running:
            if req in self.in_flight and self.engine.prefilled(req):
                self.engine.take_result(req, token)
        self.in_flight.clear()
        self.engine.retract(self.engine.running)

    # weights

    @precondition(lambda self: not self.engine.trainer.in_session)
    @rule(version=VERSIONS, name_only=st.booleans(), work=PICK, token=TOKENS)
    def name_new_weights(self, version, name_only, work, token):
        if name_only:
            self.engine.trainer.name(version)
        else:
            self.engine.trainer.update(version)
        self._work(work, token)

    @precondition(lambda self: not self.engine.trainer.in_session)
    @rule(version=st.none() | VERSIONS)
    def update_without_a_name(self, version):
        self.engine.trainer.update(version, success=version is None)

    @precondition(lambda self: not self.engine.trainer.in_session)
    @rule(rdma=st.booleans())
    def begin_session(self, rdma):
        self.engine.trainer.begin(rdma=rdma)

    @rule(version=st.none() | VERSIONS, success=st.sampled_from([True, True, False]), work=PICK, token=TOKENS)
    def write_a_piece(self, version, success, work, token):
        if not self.engine.trainer.in_session:
            self.engine.trainer.begin()
        self.engine.trainer.piece(version, success=success)
        self._work(work, token)

    @precondition(lambda self: self.engine.trainer.in_session)
    @rule()
    def end_session(self):
        self.engine.trainer.end()

    # pressure

    @rule(tokens=st.integers(1, 128))
    def evict(self, tokens):
        self.engine.evict(tokens)

    @rule(pick=PICK, cut=st.integers(1, MOST_TOKENS), salt=SALTS)
    def pin(self, pick, cut, salt):
        self.pins += 1
        for tag in self.engine.ledger.window():
            key = self.engine.key(self._text(pick)[:cut], tag, salt)
            try:
                self.engine.tree.pins.pin(f"{self.pins}@{tag}", "owner", key)
            except PinRefused:
                pass

    @precondition(lambda self: len(self.engine.tree.pins))
    @rule(pick=PICK)
    def unpin(self, pick):
        held = self.engine.tree.pins.list()
        self.engine.tree.pins.unpin(held[pick % len(held)]["pin_id"])

    @rule(version=st.none() | VERSIONS)
    def retire(self, version):
        if version is None:
            self.engine.tree.retire_dead()
            return
        for tag in self.engine.ledger.tags_of_version(version):
            self.engine.tree.retire(tag)

    @rule(pick=PICK, salt=SALTS)
    def probe(self, pick, salt):
        for tag in self.engine.ledger.window():
            self.engine.probe(self._text(pick), tag, salt)

    @invariant()
    def every_slot_is_in_one_place(self):
        if hasattr(self, "engine"):
            self.engine.check_books()

    def teardown(self):
        """Whatever entered the tree is asked for once more, under every version."""
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for req in list(engine.running):
            while req in self.in_flight and self._step(req, 0, 99):
                pass
            if req in engine.running:
                self.texts.append([*req.origin_input_ids, *req.output_ids])
                engine.finish(req)
        if engine.trainer.in_session:
            engine.trainer.end()
        self._probe_everything()
        for version in ("1", "2", "3", "4"):
            engine.trainer.update(version)
            self._probe_everything()
        for pin in engine.tree.pins.list():
            engine.tree.pins.unpin(pin["pin_id"])
        engine.check_books()

    def _probe_everything(self):
        for text in self.texts:
            for tag in self.engine.ledger.window():
                self.engine.probe(text, tag)

    def _admit(self, req, chunk):
        if self.engine.admit(req, chunk=chunk % 24 or None):
            self.in_flight.add(req)

    def _step(self, req, token, chunk):
        engine = self.engine
        if req not in self.in_flight:
            done = req.seqlen < 2 * MOST_TOKENS and engine.decode(req)
            if done:
                self.in_flight.add(req)
        elif engine.prefilled(req):
            engine.take_result(req, token)
            self.in_flight.discard(req)
            return True
        else:
            done = engine.next_chunk(req, chunk=chunk % 24 or None)
        if not done:
            engine.retract([req], pause=False)
            self.in_flight.discard(req)
        return done

    def _work(self, pick, token):
        """Most changes of the weights find a request at work, and it goes on."""
        if self.engine.running:
            self.step(pick, token, pick, 4)

    def _may_finish(self, req):
        return req not in self.in_flight and bool(req.output_ids)

    def _text(self, pick):
        return self._of(self.texts, pick)

    @staticmethod
    def _of(items, pick):
        return items[pick % len(items)]


def explore(core, lag, *, examples, steps):
    machine = type(f"Boundary_{core}_{lag}", (Boundary,), {"core": core, "lag": lag})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_lookups_stay_inside_the_window_and_the_books_hold(core, lag):
    explore(core, lag, examples=250, steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_lookups_stay_inside_the_window_and_the_books_hold_over_a_long_run(core, lag):
    explore(core, lag, examples=1500, steps=60)
