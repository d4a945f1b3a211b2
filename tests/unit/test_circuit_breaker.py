"""The circuit breaker, on a clock that stands still until it is moved."""

import threading
from contextlib import suppress

import pytest

from psrl_sglang.store.breaker import CircuitBreaker, CircuitOpen
from psrl_sglang.store.remote_client import Reason, RemoteError


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(failures=3, open_s=1.0, max_open_s=5.0, clock=clock)


def fail(breaker: CircuitBreaker, times: int = 1, reason: Reason = "timeout") -> None:
    for _ in range(times):
        with pytest.raises(RemoteError, match="no answer"), breaker.attempt():
            raise RemoteError("no answer", reason=reason)


def succeed(breaker: CircuitBreaker) -> None:
    with breaker.attempt():
        pass


def is_rejected(breaker: CircuitBreaker) -> bool:
    try:
        succeed(breaker)
    except CircuitOpen:
        return True
    return False


def test_it_opens_after_so_many_failures_in_a_row(breaker: CircuitBreaker):
    fail(breaker, 2)
    succeed(breaker)
    fail(breaker, 2)
    assert not breaker.is_open
    fail(breaker)
    assert breaker.is_open
    assert is_rejected(breaker)


def test_a_refusal_or_another_error_is_an_answer(breaker: CircuitBreaker):
    fail(breaker, 10, reason="refused")
    fail(breaker, 2)
    with pytest.raises(KeyError), breaker.attempt():
        raise KeyError
    fail(breaker, 2)
    assert not breaker.is_open


def test_it_stays_open_twice_as_long_each_time_up_to_a_limit(breaker: CircuitBreaker, clock: Clock):
    fail(breaker, 3)
    for open_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        clock.now_s += open_s - 0.01
        assert is_rejected(breaker)
        clock.now_s += 0.02
        assert breaker.is_open
        fail(breaker)
    clock.now_s += 5.0
    succeed(breaker)
    assert not breaker.is_open
    fail(breaker, 3)
    clock.now_s += 1.0
    assert not is_rejected(breaker)


def test_one_call_at_a_time_tries(breaker: CircuitBreaker, clock: Clock):
    fail(breaker, 3)
    clock.now_s += 1.0
    with breaker.attempt():
        assert is_rejected(breaker)
    assert not is_rejected(breaker)


def test_calls_from_before_the_opening_change_nothing(breaker: CircuitBreaker, clock: Clock):
    began, may_end = threading.Event(), threading.Event()

    def slow() -> None:
        with suppress(RemoteError), breaker.attempt():
            began.set()
            may_end.wait(30.0)
            raise RemoteError("late", reason="timeout")

    thread = threading.Thread(target=slow)
    thread.start()
    assert began.wait(30.0)
    fail(breaker, 3)
    clock.now_s += 0.5
    may_end.set()
    thread.join(30.0)
    clock.now_s += 0.5
    assert not is_rejected(breaker)
