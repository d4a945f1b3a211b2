"""Who is there and who holds what: leases, replacement, order of reports, full syncs."""

import pytest
from registry_support import DRAM, Clock, holders, operations, presence, sync, told

from psrl_sglang.controller.recent import Moves, Sessions
from psrl_sglang.controller.registry import Limits, Refused, Registry, UnknownWorker
from psrl_sglang.transfer import messages as wire


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(clock):
    return Registry(Limits(lease_s=15.0, foreign_lease_s=300.0, sync_s=60.0), clock)


def test_a_second_registration_replaces_the_address_at_once(registry):
    registry.register(presence(port=5000, psrl=told()))
    registry.register(presence(port=6000, psrl=told()))
    assert [worker.address for worker in registry.ranks("A")] == ["10.0.0.1:6000"]
    assert len(registry) == 1


def test_another_start_of_the_engine_drops_what_the_old_one_held(registry):
    registry.register(presence(psrl=told("start-1")))
    registry.apply(operations(("admit", 7, 0)))
    registry.register(presence(psrl=told("start-1")))
    assert holders(registry, 7) == [("A", 0)]
    registry.register(presence(psrl=told("start-2")))
    assert holders(registry, 7) == []
    assert len(registry.index) == 0


def test_a_worker_that_is_late_is_said_to_be_and_then_dropped_with_what_it_held(registry, clock):
    registry.register(presence(psrl=told()))
    registry.apply(operations(("admit", 7, 0)))
    assert registry.state(registry.ranks("A")[0]) == "live"
    clock.now_s += 8
    assert registry.state(registry.ranks("A")[0]) == "late"
    assert registry.expire() == []
    clock.now_s += 8
    assert [worker.key for worker in registry.expire()] == [("A", 0)]
    assert registry.ranks("A") == []
    assert holders(registry, 7) == []


def test_a_worker_that_is_not_ours_has_the_longer_lease(registry, clock):
    registry.register(presence())
    clock.now_s += 200
    assert registry.expire() == []
    clock.now_s += 101
    assert len(registry.expire()) == 1


def test_a_heartbeat_of_an_unknown_worker_registers_it_and_asks_for_everything(registry):
    commands = registry.heartbeat(presence(wire.HeartbeatMsg, psrl=told()))
    assert [command.reason for command in commands] == ["the controller did not know this worker"]
    assert registry.ranks("A")[0].address == "10.0.0.1:5000"
    sync(registry, [[1, 2], [3]])
    assert registry.heartbeat(presence(wire.HeartbeatMsg, psrl=told())) == []
    assert holders(registry, 3) == [("A", 0)]


def test_a_heartbeat_from_another_address_or_start_replaces_the_registration(registry):
    registry.register(presence(psrl=told()))
    registry.heartbeat(presence(wire.HeartbeatMsg, port=7000, psrl=told()))
    assert registry.ranks("A")[0].port == 7000
    registry.apply(operations(("admit", 7, 0)))
    assert registry.heartbeat(presence(wire.HeartbeatMsg, port=7000, psrl=told("start-2"))) != []
    assert holders(registry, 7) == []


def test_a_worker_that_left_late_does_not_take_its_successor_with_it(registry):
    registry.register(presence(port=5000, psrl=told()))
    registry.register(presence(port=6000, psrl=told("start-2")))
    assert not registry.deregister(wire.DeRegisterMsg("A", 0, "10.0.0.1", 5000))
    assert registry.ranks("A")
    assert registry.deregister(wire.DeRegisterMsg("A", 0, "10.0.0.1", 6000))
    assert registry.instance_ids == []
    assert registry.instance_at("10.0.0.1") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"instance_id": ""}, "no name for one instance"),
        ({"instance_id": "all"}, "no name for one instance"),
        ({"instance_id": "x" * 300}, "300 characters"),
        ({"worker_id": -1}, "worker_id is -1"),
        ({"port": 0}, "port is 0"),
        ({"port": 70000}, "port is 70000"),
        ({"ip": "a b"}, "no address"),
    ],
)
def test_a_registration_that_cannot_be_is_refused_with_the_reason(registry, change, said):
    with pytest.raises(Refused, match=said):
        registry.register(presence(**change))
    assert len(registry) == 0


def test_there_are_only_so_many_workers(clock):
    registry = Registry(Limits(max_workers=2), clock)
    registry.register(presence(worker_id=0))
    registry.register(presence(worker_id=1))
    registry.register(presence(worker_id=1))
    with pytest.raises(Refused, match="the most"):
        registry.register(presence(worker_id=2))


def test_reports_of_an_unknown_worker_are_not_taken(registry):
    with pytest.raises(UnknownWorker):
        registry.apply(operations(("admit", 1, 0)))
    assert len(registry.index) == 0


def test_a_late_admit_does_not_bring_back_what_was_evicted(registry):
    registry.register(presence(psrl=told()))
    registry.apply(operations(("admit", 7, 0), ("admit", 8, 1)))
    registry.apply(operations(("evict", 7, 3)))
    registry.apply(operations(("admit", 7, 2)))
    assert holders(registry, 7) == []
    assert holders(registry, 8) == [("A", 0)]


def test_reports_that_were_lost_call_for_a_full_sync(registry, clock):
    registry.register(presence(psrl=told()))
    sync(registry, [[]])
    registry.apply(operations(("admit", 1, 10)))
    registry.apply(operations(("admit", 2, 14)))
    registry.apply(operations(("admit", 3, 12), tag="2"))
    assert registry.heartbeat(presence(wire.HeartbeatMsg, psrl=told())) == []
    clock.now_s += 3
    [command] = registry.heartbeat(presence(wire.HeartbeatMsg, psrl=told()))
    assert command.reason == "2 reports from 11 to 13 were lost"


def test_very_many_lost_reports_are_noticed_without_being_listed(registry):
    registry.register(presence(psrl=told()))
    sync(registry, [[]])
    registry.apply(operations(("admit", 1, 10), ("admit", 2, 1 << 60)))
    [command] = registry.heartbeat(presence(wire.HeartbeatMsg, psrl=told()))
    assert "were lost" in command.reason


def test_reports_of_one_tag_may_come_after_later_ones_of_another(registry, clock):
    """A worker sends what has gathered tag by tag."""
    registry.register(presence(psrl=told()))
    sync(registry, [[]])
    registry.apply(operations(("admit", 1, 1), ("admit", 3, 3), ("evict", 1, 5), tag="1"))
    registry.apply(operations(("admit", 2, 2), ("admit", 4, 4), tag="2"))
    assert [bool(holders(registry, key)) for key in (1, 2, 3, 4)] == [False, True, True, True]
    clock.now_s += 3
    assert registry.heartbeat(presence(wire.HeartbeatMsg, psrl=told())) == []


def test_a_full_sync_replaces_the_set_at_once_and_not_before_its_end(registry):
    registry.register(presence(psrl=told()))
    registry.apply(operations(("admit", 1, 0), ("admit", 2, 1)))
    registry.start_sync(wire.FullSyncStartMsg("A", 0, DRAM, "s", 2, 2))
    registry.sync_batch(wire.FullSyncBatchMsg("A", 0, DRAM, "s", 1, [9], "1"))
    registry.end_sync(wire.FullSyncEndMsg("A", 0, DRAM, "s", 2))
    assert [bool(holders(registry, key)) for key in (1, 2, 9)] == [True, True, False]
    state = registry.sync_status(wire.FullSyncStatusMsg("A", 0, "s"))
    assert (state.is_complete, state.missing_batches, state.global_progress) == (False, [0], 0.5)
    registry.sync_batch(wire.FullSyncBatchMsg("A", 0, DRAM, "s", 0, [2], "1"))
    assert [bool(holders(registry, key)) for key in (1, 2, 9)] == [False, True, True]
    state = registry.sync_status(wire.FullSyncStatusMsg("A", 0, "s"))
    assert (state.is_complete, state.can_exit_freeze) == (True, True)


def test_a_full_sync_that_stops_is_given_up_and_asked_for_again(registry, clock):
    registry.register(presence(psrl=told()))
    sync(registry, [[1]])
    registry.start_sync(wire.FullSyncStartMsg("A", 0, DRAM, "t", 2, 2))
    registry.sync_batch(wire.FullSyncBatchMsg("A", 0, DRAM, "t", 0, [5], "1"))
    for _ in range(10):
        clock.now_s += 7
        assert registry.heartbeat(presence(wire.HeartbeatMsg, psrl=told())) == []
        if clock.now_s < 1060:
            assert registry.expire() == []
    registry.expire()
    [command] = registry.heartbeat(presence(wire.HeartbeatMsg, psrl=told()))
    assert command.reason == "a full sync was not finished"
    assert (holders(registry, 1), holders(registry, 5)) == ([("A", 0)], [])
    assert registry.sync_status(wire.FullSyncStatusMsg("A", 0, "t")).can_exit_freeze
    assert len(registry.index) == 1


@pytest.mark.parametrize(("total", "batches"), [(-1, 1), (1 << 40, 1), (1, -1), (1, 1 << 40)])
def test_a_full_sync_of_impossible_size_is_not_accepted(registry, total, batches):
    registry.register(presence(psrl=told()))
    answer = registry.start_sync(wire.FullSyncStartMsg("A", 0, DRAM, "s", total, batches))
    assert not answer.accepted
    assert "at most" in answer.error_msg


def test_the_index_takes_no_more_than_its_limit(clock):
    registry = Registry(Limits(max_chunks=10), clock)
    registry.register(presence(psrl=told()))
    sync(registry, [[]])
    registry.apply(operations(*(("admit", key, key) for key in range(20))))
    assert len(registry.index) == 10
    assert "full" in registry.heartbeat(presence(wire.HeartbeatMsg, psrl=told()))[0].reason


def test_chunks_are_counted_by_tag(registry):
    registry.register(presence(psrl=told()))
    registry.apply(operations(("admit", 1, 0), ("admit", 1, 1), ("admit", 2, 2), tag="1"))
    registry.apply(operations(("admit", 3, 3), tag="2"))
    registry.apply(operations(("evict", 2, 4), ("evict", 9, 5), tag="1"))
    assert registry.ranks("A")[0].places[DRAM].tags.chunks == {"1": 1, "2": 1}


def test_the_last_to_serve_a_session_is_its_holder_and_old_ones_are_forgotten():
    sessions = Sessions(most=2)
    sessions.serve("A", wire.SessionHeld("s", 10, "1"))
    sessions.serve("B", wire.SessionHeld("s", 30, "1"))
    assert (sessions.holder("s").instance_id, sessions.holder("s").tokens) == ("B", 30)
    sessions.serve("A", wire.SessionHeld("t", 1, "1"))
    sessions.serve("A", wire.SessionHeld("s", 40, "1"))
    sessions.serve("A", wire.SessionHeld("u", 1, "1"))
    assert [name for name, _ in sessions.latest(9)] == ["u", "s"]


def test_only_the_last_moves_are_kept_and_all_are_counted():
    moves = Moves(most=3)
    for number in range(5):
        moves.add("A", 0, "moved", wire.MoveRecord("a", "b", "1", number, 0, 0, 0.0))
    assert [move.record.num_tokens for move in moves.latest(10)] == [4, 3, 2]
    assert moves.number == 5
