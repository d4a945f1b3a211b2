"""Start the children of a forked server from a pristine interpreter, as `spawn` does, but by forking.

SGLang starts its schedulers with multiprocessing's `spawn`, so nothing of the server's own Python state
reaches them and every child loads its plugins anew. A plain fork would hide mistakes that `spawn` shows.
Therefore a server forked from the zygote first forks a *nursery*, before it loads any plugin, and its
children are forked from the nursery: modules imported, no state, then multiprocessing's start-up data over a
pipe.

Each child is handed to the server as its real parent (through a subreaper), so that exit codes, signals to
the parent and death with the parent work as they do after `spawn`.
"""

import ctypes
import io
import multiprocessing.context as context
import multiprocessing.reduction as reduction
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import popen_spawn_posix, process, resource_tracker, spawn, util
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_FDS = 64
_PID_BYTES = 8

# In a child: the descriptors that came with it, in the order in which its start-up data counts them.
_inherited_fds: list[int] = []


def install() -> None:
    """Fork the nursery of this process and route multiprocessing's `spawn` through it.

    For the main thread of a process that runs no other thread and has loaded no plugin.
    """
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        run_and_exit(lambda: _serve(theirs))
    theirs.close()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _Popen.nursery = ours
    context.SpawnProcess._Popen = staticmethod(_Popen)  # pyright: ignore[reportAttributeAccessIssue]


def run_and_exit(body: Callable[[], object]) -> NoReturn:
    """Run `body` as the whole rest of a forked process; nothing of the code that forked it runs again."""
    code = 1
    try:
        result = body()
        code = result if isinstance(result, int) else 0
    except SystemExit as stop:
        if isinstance(stop.code, int) or stop.code is None:
            code = stop.code or 0
        else:
            sys.stderr.write(f"{stop.code}\n")
    except BaseException:  # noqa: BLE001 - the last frame of a process reports whatever ended it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def apply_environment(environment: dict[str, str]) -> None:
    """Make `environment` the whole environment, also where a library read it when it was imported."""
    os.environ.clear()
    os.environ.update(environment)
    for path in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    if (threads := environment.get("OMP_NUM_THREADS", "")).isdigit() and (torch := sys.modules.get("torch")):
        torch.set_num_threads(int(threads))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


class _InheritedFd:
    """A descriptor on its way to a child, known by its place among those sent along."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        return _inherited_fds[self.index]


class _Popen(popen_spawn_posix.Popen):
    """`spawn`'s Popen with the nursery's fork in place of fork and exec."""

    DupFd = _InheritedFd  # pyright: ignore[reportAssignmentType]
    nursery: socket.socket
    _lock = threading.Lock()

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process_obj: Any) -> None:
        tracker = resource_tracker.getfd()
        assert tracker is not None
        self._fds: list[int] = [tracker]
        data = io.BytesIO()
        pickle.dump(dict(os.environ), data)
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj._name), data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        sentinel, child_alive = os.pipe()
        child_data, our_data = os.pipe()
        fds = [child_data, child_alive, *self._fds]
        with self._lock:
            socket.send_fds(self.nursery, [b"f"], fds)
            answer = self.nursery.recv(_PID_BYTES)
        os.close(child_data)
        os.close(child_alive)
        if len(answer) != _PID_BYTES:
            raise RuntimeError("the nursery of this server has ended")
        self.pid = int.from_bytes(answer, "little")
        self.sentinel = sentinel
        with open(our_data, "wb", closefd=False) as pipe:
            pipe.write(data.getbuffer())
        # Open for as long as we live: the child watches its end to learn that we ended.
        self.finalizer = util.Finalize(self, _close_all, ((sentinel, our_data),))


def _serve(server: socket.socket) -> None:
    """Fork one child per request until the server ends."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        _, fds, _, _ = socket.recv_fds(server, 1, _MAX_FDS)
        if not fds:
            return
        read_pid, write_pid = os.pipe()
        middle = os.fork()
        if middle == 0:
            os.close(read_pid)
            _fork_orphan(write_pid, server, fds)
        os.close(write_pid)
        os.waitpid(middle, 0)
        # Only now, with its maker gone, is the child the server's own.
        server.sendall(os.read(read_pid, _PID_BYTES))
        for fd in (read_pid, *fds):
            os.close(fd)


def _fork_orphan(write_pid: int, server: socket.socket, fds: list[int]) -> NoReturn:
    pid = os.fork()
    if pid == 0:
        os.close(write_pid)
        server.close()
        run_and_exit(lambda: _become(fds))
    os.write(write_pid, pid.to_bytes(_PID_BYTES, "little"))
    os._exit(0)


def _become(fds: list[int]) -> int:
    """What `spawn_main` does in a new interpreter, with the environment brought along."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The second descriptor is only held: it closes with this process and so tells the server that we ended.
    data, _, tracker, *_ = fds
    _inherited_fds[:] = fds[2:]
    setattr(resource_tracker._resource_tracker, "_fd", tracker)  # noqa: B010
    alive = os.dup(data)
    with open(data, "rb") as pipe:
        apply_environment(pickle.load(pipe))
        # What multiprocessing sets so that a module that starts processes on import is told so.
        this = process.current_process()
        setattr(this, "_inheriting", True)  # noqa: B010
        try:
            spawn.prepare(pickle.load(pipe))
            ours = pickle.load(pipe)
        finally:
            delattr(this, "_inheriting")
    return ours._bootstrap(alive)


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
