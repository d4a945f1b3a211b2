"""Messages of workers made up for a registry without sockets."""

from psrl_sglang.transfer import messages as wire

DRAM = "LocalCPUBackend"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def told(incarnation="start-1", **changes):
    values = {"version": "1", "tag": "1", "window": ["1"], "layout": "l", "page_tokens": 16}
    return wire.WorkerStatus(incarnation=incarnation, chunk_tokens=64, rank=0, ranks=1, **{**values, **changes})


def presence(kind=wire.RegisterMsg, instance_id="A", worker_id=0, port=5000, psrl=None, ip="10.0.0.1"):
    return kind(instance_id, worker_id, ip, port, f"{ip}:{port + 1}", psrl)


def operations(*entries, instance_id="A", tag="1"):
    """Entries are ("admit" or "evict", key, seq)."""
    made = [wire.KVOpEvent(wire.OpType(kind), key, seq) for kind, key, seq in entries]
    return wire.BatchedKVOperationMsg(instance_id, 0, DRAM, made, tag)


def holders(registry, key):
    return sorted(place.worker for place in registry.holders(key))


def sync(registry, batches, instance_id="A", sync_id="s"):
    total = sum(map(len, batches))
    answer = registry.start_sync(wire.FullSyncStartMsg(instance_id, 0, DRAM, sync_id, total, len(batches)))
    assert answer.accepted, answer.error_msg
    for batch_id, keys in enumerate(batches):
        registry.sync_batch(wire.FullSyncBatchMsg(instance_id, 0, DRAM, sync_id, batch_id, keys, "1"))
    registry.end_sync(wire.FullSyncEndMsg(instance_id, 0, DRAM, sync_id, total))
