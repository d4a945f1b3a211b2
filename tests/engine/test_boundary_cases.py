"""What becomes of KV when the weights change under it, case by case, on both tree cores of SGLang."""

import pytest

pytest.importorskip("sglang")

from offline_tree import CORES, OfflineEngine, Session

PROMPT = list(range(20))
OUTPUT = [100, 101, 102, 103, 104, 105]


@pytest.fixture(params=[(core, page) for core in CORES for page in (1, 4)], ids=str)
def make(request):
    """Engines of each tree core and page size; their books are checked at the end."""
    core, page_size = request.param
    made = []

    def engine(**options):
        made.append(OfflineEngine(core=core, page_size=page_size, **options))
        return made[-1]

    yield engine
    for each in made:
        each.check_books()


def started(engine, output, prompt=PROMPT):
    req = engine.request(prompt)
    assert engine.admit(req)
    engine.generate(req, output)
    return req


def test_request_that_crosses_a_change_publishes_only_what_the_old_weights_computed(make):
    engine = make()
    req = started(engine, OUTPUT[:3])
    engine.trainer.update("2")
    engine.generate(req, OUTPUT[3:])
    assert (engine.run(PROMPT), engine.tag_of(req)) == (0, "1")
    engine.finish(req)
    # [0, 22): the prompt and the first two output tokens; the third had no forward yet.
    assert engine.resident(PROMPT + OUTPUT, "1") == 22 // engine.page_size * engine.page_size
    assert engine.probe(PROMPT + OUTPUT) == 20


def test_roll_back_while_a_request_holds_kv_of_both_versions_keeps_its_cap(make):
    engine = make()
    req = started(engine, OUTPUT[:2])
    engine.trainer.update("2")
    engine.generate(req, OUTPUT[2:4])
    engine.trainer.update("1")
    engine.generate(req, OUTPUT[4:])
    engine.finish(req)
    assert engine.probe(PROMPT + OUTPUT) == 21 // engine.page_size * engine.page_size


def test_forward_in_flight_at_a_change_belongs_to_the_old_weights(make):
    engine = make()
    req = started(engine, OUTPUT[:4])
    assert engine.decode(req)
    engine.trainer.update("2")
    engine.take_result(req, OUTPUT[4])
    engine.finish(req)
    assert engine.resident(PROMPT + OUTPUT, "1") == 24


def test_roll_back_finds_the_old_versions_kv_again(make):
    engine = make()
    assert engine.run(PROMPT, output=OUTPUT) == 0
    for version in "23":
        engine.trainer.update(version)
        assert engine.run(PROMPT) == 0
    engine.trainer.update("1")
    assert engine.run(PROMPT + OUTPUT) == 25 // engine.page_size * engine.page_size


def test_retracted_request_saves_what_it_decoded_and_starts_over_under_the_new_version(make):
    engine = make()
    req = started(engine, OUTPUT)
    engine.retract([req])
    assert engine.resident(PROMPT + OUTPUT, "1") == 25 // engine.page_size * engine.page_size
    engine.trainer.update("2")
    assert engine.admit(req)
    assert (req.prefix_len, engine.tag_of(req)) == (0, "2")
    engine.generate(req, [7])
    engine.finish(req)
    assert engine.probe([*PROMPT, *OUTPUT, 7]) == 26 // engine.page_size * engine.page_size


def test_chunked_prompt_that_crosses_publishes_the_chunks_of_the_old_weights(make):
    engine = make()
    req = engine.request(PROMPT)
    assert engine.admit(req, chunk=8)
    engine.trainer.update("2")
    assert engine.next_chunk(req)
    engine.generate(req, OUTPUT)
    engine.finish(req)
    assert (engine.resident(PROMPT, "1"), engine.probe(PROMPT)) == (8, 0)


def test_lag_counts_installations_and_takes_the_longest_match(make):
    engine = make(lag=1)
    engine.run(PROMPT)
    engine.trainer.update("2")
    req = engine.request([*PROMPT, 1])
    assert engine.admit(req)
    assert (req.prefix_len, engine.tag_of(req)) == (20, "1~")
    engine.generate(req, OUTPUT)
    engine.finish(req)
    engine.trainer.update("3")
    assert engine.run([*PROMPT, 1]) == 0  # named after the oldest KV in it, which is out of the window now


def test_roll_back_does_not_serve_what_crossed_to_versions_outside_the_window(make):
    engine = make(lag=1)
    req = started(engine, OUTPUT[:2])
    for version in "234":
        engine.trainer.update(version)
        engine.generate(req, OUTPUT[2:4])
    engine.finish(req)
    engine.trainer.update("1")
    assert engine.run(PROMPT + OUTPUT[:2] + OUTPUT[2:4] * 3) == 0


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("named", ["2", "1", None])
def test_kv_of_half_written_weights_is_gone_after_the_next_piece(make, lag, named):
    engine = make(lag=lag)
    req = started(engine, OUTPUT[:2])
    engine.trainer.begin()
    engine.trainer.piece()
    engine.generate(req, OUTPUT[2:])
    assert engine.run(PROMPT) == 0
    assert engine.run(PROMPT) > 0  # the weights have not moved in between
    engine.trainer.piece(named)
    assert engine.run(PROMPT) == 0
    engine.trainer.end()
    engine.finish(req)
    whole = engine.probe(PROMPT + OUTPUT, "1~" if lag else "1") if lag or named == "1" else 0
    assert whole <= 21
    engine.run(PROMPT + OUTPUT)


@pytest.mark.parametrize("lag", [0, 2])
def test_kv_computed_while_rdma_writes_the_weights_is_never_served_as_the_old_version(make, lag):
    engine = make(lag=lag)
    engine.trainer.begin(rdma=True)
    engine.run(PROMPT)
    engine.trainer.end()
    assert engine.run(PROMPT) == 0
    engine.trainer.update("1")
    engine.run(PROMPT)


def test_streaming_session_drops_kv_that_crossed_a_change(make):
    engine, session = make(), Session(1000, "session", streaming=True)
    for tokens, expected in (PROMPT, 0), ([1, 2], 25):
        req = engine.turn(session, tokens)
        assert engine.admit(req)
        assert req.prefix_len == expected
        engine.generate(req, OUTPUT)
        engine.finish(req)
    engine.trainer.update("2")
    req = engine.turn(session, [3])
    assert engine.admit(req)
    assert req.prefix_len == 0
    engine.generate(req, OUTPUT[:1])
    engine.trainer.update("3")
    engine.generate(req, OUTPUT[1:])
    engine.finish(req)
    req = engine.turn(session, [4])
    assert engine.admit(req)
    assert req.prefix_len == 0
    engine.abort(req)


def test_streaming_turn_that_waits_across_a_change_does_not_keep_its_sessions_old_kv(make):
    engine, session = make(), Session(1000, "session", streaming=True)
    req = engine.turn(session, PROMPT)
    assert engine.admit(req)
    engine.generate(req, OUTPUT)
    engine.finish(req)
    req = engine.turn(session, [1])
    engine.match_while_waiting(req)
    engine.trainer.update("2")
    assert engine.admit(req)
    assert (req.prefix_len, engine.tag_of(req)) == (0, "2")
    engine.abort(req)
