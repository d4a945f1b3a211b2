"""Who holds a prefix: in the engines' own pages, chunks and tags, by all ranks, soon after it was stored."""

import random
import time

import pytest
from controller_support import DRAM, FakeWorker, RunningController, status, wait_until

from psrl_sglang.controller.lookup import same_version
from psrl_sglang.namespace import Tag, compose_salt
from psrl_sglang.pagehash import chunk_key, page_digests
from psrl_sglang.transfer import messages as wire

TOKENS = [random.Random(1).randrange(1000) for _ in range(300)]


@pytest.fixture
def controller():
    with RunningController() as running:
        yield running


def chunk_keys(tokens, tag="7", page=16, chunk=64, *, salt=None, extra_key=None, pages=None):
    """The names of the chunks an engine would have of ``tokens``: whole ones, or ``pages`` long in turn."""
    digests = page_digests(tokens, page, extra_key=extra_key, cache_salt=compose_salt(tag, salt))
    ends = pages or range(chunk // page, len(digests) + 1, chunk // page)
    return [chunk_key(digests[end - 1]) for end in ends]


def layout(controller, tokens=TOKENS, **more):
    answer = controller.post("/lookup", tokens=tokens, **more)
    assert answer.status_code == 200, answer.text
    return {name: tuple(found) for name, found in answer.json()["layout_info"].items()}


def told(controller, expected, **more):
    wait_until(lambda: layout(controller, **more) == expected, f"{expected}, got {layout(controller, **more)}")


@pytest.mark.parametrize(
    ("page", "chunk", "tokens"), [(16, 64, 256), (1, 256, 256), (64, 64, 256), (32, 32, 288)]
)
def test_the_owner_is_named_in_the_chunks_it_has(controller, page, chunk, tokens):
    with FakeWorker(controller.ports, told=status(page_tokens=page, chunk_tokens=chunk)) as worker:
        worker.register()
        worker.admit(chunk_keys(TOKENS, page=page, chunk=chunk))
        start = time.monotonic()
        told(controller, {"A": (DRAM, tokens)})
        assert time.monotonic() - start < 1


def test_engines_with_different_chunks_are_both_found(controller):
    with (
        FakeWorker(controller.ports, "A") as small,
        FakeWorker(controller.ports, "B", told=status(page_tokens=32, chunk_tokens=128)) as large,
    ):
        small.register()
        large.register()
        small.admit(chunk_keys(TOKENS))
        large.admit(chunk_keys(TOKENS, page=32, chunk=128))
        told(controller, {"A": (DRAM, 256), "B": (DRAM, 256)})


def test_a_last_chunk_that_is_not_full_counts_to_its_last_page(controller):
    with FakeWorker(controller.ports) as worker:
        worker.register()
        worker.admit(chunk_keys(TOKENS, pages=[4, 8, 11]))
        told(controller, {"A": (DRAM, 176)})


def test_a_missing_chunk_ends_the_prefix(controller):
    with FakeWorker(controller.ports) as worker:
        worker.register()
        worker.admit(chunk_keys(TOKENS, pages=[4, 12, 16]))
        told(controller, {"A": (DRAM, 64)})


def test_only_what_all_ranks_have_counts(controller):
    ranks = [FakeWorker(controller.ports, "A", rank, told=status(rank=rank, ranks=2)) for rank in range(2)]
    for rank, worker in enumerate(ranks):
        worker.register()
        worker.admit(chunk_keys(TOKENS)[: 4 - 2 * rank])
    told(controller, {"A": (DRAM, 128)})
    ranks[1].push(wire.DeRegisterMsg("A", 1, "127.0.0.1", ranks[1].port))
    told(controller, {})
    for worker in ranks:
        worker.close()


def test_versions_and_salts_are_kept_apart(controller):
    with (
        FakeWorker(controller.ports, "A", told=status(tag="8", version="8", window=["8", "7"])) as both,
        FakeWorker(controller.ports, "B", told=status(tag="9", version="9", window=["9"])) as other,
    ):
        both.register()
        other.register()
        both.admit(chunk_keys(TOKENS, "7"), tag="7")
        both.admit(chunk_keys(TOKENS, "8")[:1], first_seq=100, tag="8")
        other.admit(chunk_keys(TOKENS, "6"), tag="6")
        other.admit(chunk_keys(TOKENS, "9", salt="user", extra_key="lora"), first_seq=100, tag="9")
        told(controller, {"A": (DRAM, 256)})
        held = controller.post("/lookup", tokens=TOKENS).json()["held"]
        assert [(one["tag"], one["num_tokens"]) for one in held] == [("7", 256), ("8", 64)]
        assert layout(controller, version="8") == {"A": (DRAM, 64)}
        assert layout(controller, version="5") == {}
        assert layout(controller, version="6") == {"B": (DRAM, 256)}
        assert layout(controller, cache_salt="user") == {}
        assert layout(controller, cache_salt="user", extra_key="lora") == {"B": (DRAM, 256)}


def test_an_exact_question_is_put_to_the_holders(controller):
    asked = []

    def answer(command):
        asked.append(command)
        return wire.LookupWorkerRetMsg(272)

    with FakeWorker(controller.ports, answer=answer) as worker, FakeWorker(controller.ports, "B") as dead:
        worker.register()
        dead.register()
        for one in (worker, dead):
            one.admit(chunk_keys(TOKENS))
        told(controller, {"A": (DRAM, 256), "B": (DRAM, 256)})
        found = controller.post("/lookup", tokens=TOKENS, exact=True).json()
        assert found["layout_info"] == {"A": [DRAM, 272], "B": [DRAM, 256]}
        assert "not scripted" in found["problems"]["B"]
        assert asked[0].request_configs[wire.VERSION_KEY] == "7"


def test_a_long_prompt_is_looked_up_without_holding_others_up(controller):
    tokens = [random.Random(2).randrange(1000) for _ in range(70_000)]
    with FakeWorker(controller.ports, told=status(chunk_tokens=256)) as worker:
        worker.register()
        worker.admit(chunk_keys(tokens, chunk=256))
        told(controller, {"A": (DRAM, 69_888)}, tokens=tokens)


def test_too_much_work_is_refused_with_what_to_leave_out(controller):
    window = [str(number) for number in range(20)]
    with FakeWorker(controller.ports, told=status(window=window)) as worker:
        worker.register()
        answer = controller.post("/lookup", tokens=[1] * 1_000_000)
        assert answer.status_code == 422
        assert "name a `version`" in answer.json()["detail"]
        assert layout(controller, tokens=[1] * 1_000_000, version="7") == {}


@pytest.mark.parametrize(
    ("tag", "version", "same"),
    [
        ("7", "7", True),
        ("7", "77", False),
        ("run:7", "7", True),
        ("run:7~", "7", True),
        ("7#e1-abc", "7", True),
        ("7#e1-abc", "7#e1-abc", True),
        ("7#e1-abc", "7#e2-abc", False),
        (str(Tag("run/7@step 12")), "run/7@step 12", True),
        (str(Tag("a:b#c~", namespace="n:m", lagging=True)), "a:b#c~", True),
        (str(Tag("x" * 200)), "x" * 200, True),
    ],
)
def test_tags_are_known_by_the_version_in_them(tag, version, same):
    assert same_version(tag, version) is same
    assert same_version(tag, tag)
