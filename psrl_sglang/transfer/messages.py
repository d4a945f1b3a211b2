"""The control protocol of move workers and the controller.

Wire-compatible with LMCache 0.5.6: MessagePack maps whose ``type`` is the class name, so its controller can
drive our workers and our controller its workers. What it does not have are optional fields at the end, which
it ignores: ``request_configs`` (as PSRL's patch names it, with the version), and what the replies say beyond a
count. Sockets: a worker PUSHes (`WorkerEvent`) and asks (`WorkerRequest`) the controller; whoever wants a move
sends a `Command` to the worker's own socket.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import msgspec

VERSION_KEY = "lmcache.tag.model_version"  # of request_configs, as PSRL writes it
SALT_KEY = "psrl.cache_salt"
EXTRA_KEY = "psrl.extra_key"
TIMEOUT_KEY = "psrl.timeout_s"
SESSION_KEY = "psrl.session"
MAX_MESSAGE_BYTES = 64 << 20

Tokens = Annotated[list[int], msgspec.Meta(max_length=1 << 22)]


class Message(msgspec.Struct, tag_field="type", tag=True, frozen=True, omit_defaults=True):
    pass


# ---- worker to controller, answered ----


class RegisterMsg(Message, frozen=True):
    """``psrl`` is `WorkerStatus` of a worker of ours; a second registration replaces the first."""

    instance_id: str
    worker_id: int
    ip: str
    port: int
    peer_init_url: str | None
    psrl: WorkerStatus | None = None


class RegisterRetMsg(Message, frozen=True, omit_defaults=False):
    extra_config: dict[str, str] = {}


class HeartbeatMsg(Message, frozen=True):
    instance_id: str
    worker_id: int
    ip: str
    port: int
    peer_init_url: str | None
    psrl: WorkerStatus | None = None


class FullSyncCommand(msgspec.Struct, tag_field="command_type", tag="full_sync", frozen=True):
    """Tell everything you hold, for example because the controller was restarted."""

    reason: str | None = None
    args: dict[str, Any] | None = None


class HeartbeatRetMsg(Message, frozen=True, omit_defaults=False):
    commands: list[FullSyncCommand] = []


class BatchedP2PLookupMsg(Message, frozen=True):
    hashes: list[int]
    instance_id: str
    worker_id: int


class BatchedP2PLookupRetMsg(Message, frozen=True):
    """(instance, location, chunks, peer_init_url) of who holds the longest prefix."""

    layout_info: list[tuple[str, str, int, str]]


class FullSyncStartMsg(Message, frozen=True):
    instance_id: str
    worker_id: int
    location: str
    sync_id: str
    total_keys: int
    batch_count: int


class FullSyncStartRetMsg(Message, frozen=True, omit_defaults=False):
    sync_id: str
    accepted: bool
    error_msg: str | None = None


class FullSyncStatusMsg(Message, frozen=True):
    instance_id: str
    worker_id: int
    sync_id: str


class FullSyncStatusRetMsg(Message, frozen=True, omit_defaults=False):
    sync_id: str
    is_complete: bool
    global_progress: float
    can_exit_freeze: bool
    missing_batches: list[int] = []


# ---- worker to controller, not answered ----


class DeRegisterMsg(Message, frozen=True):
    instance_id: str
    worker_id: int
    ip: str
    port: int


class OpType(Enum):
    ADMIT = "admit"
    EVICT = "evict"


class KVOpEvent(msgspec.Struct, frozen=True):
    op_type: OpType
    key: int
    seq_num: int


class BatchedKVOperationMsg(Message, frozen=True):
    """Chunks that came or went. ``key``: the first 8 bytes, signed and big-endian, of the hash of a chunk's last
    page (`pagehash`), which covers the tag. ``tag``: of all these chunks."""

    instance_id: str
    worker_id: int
    location: str
    operations: list[KVOpEvent]
    tag: str = ""


class FullSyncBatchMsg(Message, frozen=True):
    instance_id: str
    worker_id: int
    location: str
    sync_id: str
    batch_id: int
    keys: list[int]
    tag: str = ""


class FullSyncEndMsg(Message, frozen=True):
    instance_id: str
    worker_id: int
    location: str
    sync_id: str
    actual_total_keys: int


class MoveRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished move as its source saw it. ``seconds`` is from the request to the last answer."""

    source: str
    destination: str
    tag: str
    num_tokens: int
    present_tokens: int
    size_bytes: int
    seconds: float
    transport: str = ""
    reason: str = ""
    session: str = ""
    time_s: float = 0.0


class MovedMsg(Message, frozen=True):
    """Ours alone: finished moves, for whoever watches."""

    instance_id: str
    worker_id: int
    moves: list[MoveRecord]


class SessionHeld(msgspec.Struct, frozen=True):
    """A session whose KV an engine has: ``tokens`` of it under ``tag``."""

    session: str
    tokens: int
    tag: str


class SessionsMsg(Message, frozen=True):
    """Ours alone: sessions this worker's engine served since the last message."""

    instance_id: str
    worker_id: int
    sessions: list[SessionHeld]


# ---- commands to a worker, and its answers ----


class MoveWorkerMsg(Message, frozen=True):
    """Send the KV of ``tokens`` to the worker at ``new_position[0]``. ``request_configs`` must name the version
    (`VERSION_KEY`); it may name ``cache_salt``, ``extra_key``, a time limit and a session. With ``copy`` false the
    source gives its copy up afterwards."""

    worker_event_id: str
    old_position: str
    new_position: tuple[str, str]
    tokens: Tokens | None
    copy: bool | None
    request_configs: dict[str, Any] | None = None


class MoveWorkerRetMsg(Message, frozen=True):
    """``num_tokens`` went over; of the prompt the destination now has the first ``present_tokens``. ``reason`` says
    why it is not all, or why nothing had to go; ``outcome`` is a `MoveOutcome`, or empty if the worker is not ours.
    """

    num_tokens: int
    present_tokens: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    transport: str = ""
    reason: str = ""
    outcome: str = ""


class PinWorkerMsg(Message, frozen=True):
    worker_event_id: str
    location: str
    tokens: Tokens
    request_configs: dict[str, Any] | None = None


class PinWorkerRetMsg(Message, frozen=True):
    num_tokens: int


class UnpinWorkerMsg(Message, frozen=True):
    """Ours alone: ends a pin before its lease does. ``tokens`` as they were pinned."""

    worker_event_id: str
    location: str
    tokens: Tokens
    request_configs: dict[str, Any] | None = None


class UnpinWorkerRetMsg(Message, frozen=True):
    num_tokens: int


class ClearWorkerMsg(Message, frozen=True):
    worker_event_id: str
    location: str


class ClearWorkerRetMsg(Message, frozen=True):
    num_tokens: int


class HealthWorkerMsg(Message, frozen=True):
    worker_event_id: str


class HealthWorkerRetMsg(Message, frozen=True):
    error_code: int


class CompressWorkerMsg(Message, frozen=True):
    worker_event_id: str
    method: str
    location: str
    tokens: Tokens | None = None


class DecompressWorkerMsg(Message, frozen=True):
    worker_event_id: str
    method: str
    location: str
    tokens: Tokens | None = None


class CheckFinishWorkerMsg(Message, frozen=True):
    worker_event_id: str


class LookupWorkerMsg(Message, frozen=True):
    """Ours alone: how much of a prompt this rank could serve or send, exact to the page."""

    worker_event_id: str
    tokens: Tokens
    request_configs: dict[str, Any] | None = None


class LookupWorkerRetMsg(Message, frozen=True):
    num_tokens: int


class ErrorMsg(Message, frozen=True):
    error: str


class WorkerStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker of ours says of itself with each registration and heartbeat.

    ``incarnation`` is new at every start of the engine; ``pages_by_tag`` counts pages in DRAM; ``http_url`` is the
    engine's own address, where it is known; ``tiers`` is bytes (used, budget) by tier.
    """

    incarnation: str
    version: str
    tag: str
    window: list[str]
    layout: str
    page_tokens: int
    chunk_tokens: int
    rank: int
    ranks: int
    transports: list[str] = []
    http_url: str = ""
    namespace: str = ""
    pages_by_tag: dict[str, int] = {}
    tiers: dict[str, tuple[int, int]] = {}
    moves_running: int = 0
    moves_waiting: int = 0


WorkerRequest = RegisterMsg | HeartbeatMsg | BatchedP2PLookupMsg | FullSyncStartMsg | FullSyncStatusMsg
WorkerEvent = DeRegisterMsg | BatchedKVOperationMsg | FullSyncBatchMsg | FullSyncEndMsg | MovedMsg | SessionsMsg
ControllerReply = (
    RegisterRetMsg
    | HeartbeatRetMsg
    | BatchedP2PLookupRetMsg
    | FullSyncStartRetMsg
    | FullSyncStatusRetMsg
    | ErrorMsg
)
Command = (
    MoveWorkerMsg
    | PinWorkerMsg
    | UnpinWorkerMsg
    | ClearWorkerMsg
    | HealthWorkerMsg
    | CompressWorkerMsg
    | DecompressWorkerMsg
    | CheckFinishWorkerMsg
    | LookupWorkerMsg
)
CommandReply = (
    MoveWorkerRetMsg
    | PinWorkerRetMsg
    | UnpinWorkerRetMsg
    | ClearWorkerRetMsg
    | HealthWorkerRetMsg
    | LookupWorkerRetMsg
    | ErrorMsg
)


class BadMessage(ValueError):
    """Bytes that are not a message of the kind asked for; the text says what is wrong with them."""


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes | memoryview, kind: Any) -> Any:
    """One message of the union ``kind``. Raises `BadMessage`."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES}")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from error
