"""Run with LMCache's packages on the path, which no other test has: its structs, or one of its workers.

structs              JSON list of hex frames on standard input; what LMCache reads in them, and its own frames
worker PULL REPLY PORT   LMCache's own worker on an engine that is none, until standard input ends
"""

import json
import sys
import threading
from types import SimpleNamespace

import msgspec
from lmcache.v1.cache_controller import message as theirs

_KEYS = [11, -12, 2**62]


def structs() -> None:
    read = []
    for frame in json.load(sys.stdin):
        decoded = msgspec.msgpack.decode(bytes.fromhex(frame), type=theirs.Msg)
        read.append({"type": type(decoded).__name__, **msgspec.to_builtins(decoded)})
    place = ("inst", 1)
    operations = [theirs.KVOpEvent(theirs.OpType.ADMIT, -5, 1), theirs.KVOpEvent(theirs.OpType.EVICT, 2**62, 2)]
    own = [
        theirs.RegisterMsg(*place, "10.0.0.1", 5000, "10.0.0.1:5001"),
        theirs.RegisterMsg(*place, "10.0.0.1", 5000, None),
        theirs.HeartbeatMsg(*place, "10.0.0.1", 5000, None),
        theirs.DeRegisterMsg(*place, "10.0.0.1", 5000),
        theirs.BatchedP2PLookupMsg([1, -2], *place),
        theirs.BatchedKVOperationMsg(*place, "LocalCPUBackend", operations),
        theirs.FullSyncStartMsg(*place, "LocalCPUBackend", "s", 3, 1),
        theirs.FullSyncBatchMsg(*place, "LocalCPUBackend", "s", 0, [1, -2, 3]),
        theirs.FullSyncEndMsg(*place, "LocalCPUBackend", "s", 3),
        theirs.FullSyncStatusMsg(*place, "s"),
        theirs.RegisterRetMsg(extra_config={"heartbeat_url": "h:1"}),
        theirs.HeartbeatRetMsg(commands=[theirs.FullSyncCommand(reason="r")]),
        theirs.BatchedP2PLookupRetMsg([("a", "LocalCPUBackend", 2, "h:1")]),
        theirs.FullSyncStartRetMsg("s", True),
        theirs.FullSyncStatusRetMsg("s", False, 0.5, False, [1]),
        theirs.ErrorMsg("e"),
        theirs.MoveWorkerMsg("e", "LocalCPUBackend", ("h:1", "LocalCPUBackend"), [1, 2, 3], True),
        theirs.PinWorkerMsg("e", "LocalCPUBackend", [1]),
        theirs.ClearWorkerMsg("e", "LocalCPUBackend"),
        theirs.HealthWorkerMsg("e"),
        theirs.CompressWorkerMsg("e", "m", "LocalCPUBackend", [1]),
        theirs.DecompressWorkerMsg("e", "m", "LocalCPUBackend", [1]),
        theirs.CheckFinishWorkerMsg("e"),
        theirs.MoveWorkerRetMsg(256),
        theirs.PinWorkerRetMsg(256),
        theirs.ClearWorkerRetMsg(256),
        theirs.HealthWorkerRetMsg(0),
    ]
    frames = [(type(one).__name__, msgspec.msgpack.encode(one).hex(), msgspec.to_builtins(one)) for one in own]
    json.dump({"read": read, "own": frames}, sys.stdout)


class Engine:
    """What LMCache's worker calls of its engine."""

    def __init__(self) -> None:
        backend = type("LocalCPUBackend", (), {"__str__": lambda self: "LocalCPUBackend"})()
        backend.get_keys = lambda: [SimpleNamespace(chunk_hash=key) for key in _KEYS]
        self.storage_manager = SimpleNamespace(local_cpu_backend=backend)

    def move(self, tokens, old_position, new_position, event_id, do_copy):
        if tokens == [666]:
            raise ValueError("no such tokens")
        return len(tokens)

    def lookup(self, tokens, search_range, lookup_id, pin):
        return len(tokens)

    def clear(self, locations):
        return len(_KEYS)

    def health(self):
        return 0

    def freeze(self, frozen):
        pass


def worker(pull: str, reply: str, port: str) -> None:
    import torch
    from lmcache.v1.cache_controller.worker import LMCacheWorker
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    config = LMCacheEngineConfig.from_defaults(
        enable_controller=True,
        lmcache_instance_id="lmcache-0",
        controller_pull_url=f"127.0.0.1:{pull}",
        controller_reply_url=f"127.0.0.1:{reply}",
        lmcache_worker_ports=[int(port)],
        lmcache_worker_heartbeat_time=1,
        lmcache_worker_heartbeat_delay_time=0,
        extra_config={"full_sync_startup_delay_s": 0.0, "full_sync_status_poll_interval_s": 0.2},
    )
    metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.float32, (1, 2, 16, 1, 8))
    running = LMCacheWorker(config, metadata, Engine())
    operations = [theirs.KVOpEvent(theirs.OpType.ADMIT, key, at) for at, key in enumerate(_KEYS[:2])]
    running.put_msg(theirs.BatchedKVOperationMsg("lmcache-0", 0, "LocalCPUBackend", operations))
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    stop.wait(120)
    running.deregister()
    threading.Event().wait(0.5)


if __name__ == "__main__":
    {"structs": structs, "worker": worker}[sys.argv[1]](*sys.argv[2:])
