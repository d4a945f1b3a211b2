"""The servers that benchmarks/peers.py compares, and how each is started; one at a time, all of one model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmcache_peer import LMCachePeer

from psrl_sglang.lab.demo_check import stopping
from psrl_sglang.lab.demo_run import CHUNK_TOKENS, PAGE_TOKENS, Column, Scene
from psrl_sglang.lab.processes import ProcessTimeout
from psrl_sglang.lab.servers import Server, ServerError
from psrl_sglang.lab.zygote import Zygote, ZygoteError
from psrl_sglang.sizing import ModelShape, bytes_per_token

POOL_TOKENS = 3072
DRAM_TOKENS = 32768  # all that the sessions compute fits
LITTLE_DRAM_TOKENS = 4096  # in front of a disk
CONTEXT_TOKENS = 8192
# For this process and all that it starts: one thread computes, the other core is for copies, HTTP and the client.
ENV = {"OMP_NUM_THREADS": "1"}
COMMON_FLAGS = (
    *("--page-size", str(PAGE_TOKENS), "--context-length", str(CONTEXT_TOKENS)),
    *("--chunked-prefill-size", "512", "--weight-version", "1", "--enable-metrics"),
)
_POOL_FLAGS = ("--max-total-tokens", str(POOL_TOKENS))
_REFERENCE_FLAGS = ("--max-total-tokens", "16384", "--disable-radix-cache")
NO_LMCACHE = "no --lmcache folder; `sh tests/lmcache/install.sh DIR` fills one"
_FS_LINKER = "sglang-fs-linker"
_INSTALL_S = 120.0
_ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception)\b")
_REASON_CHARACTERS = 240


class NotRun(Exception):
    """This cannot be measured here; the message says why."""


class Crashed(Exception):
    """The server ended while it was measured; the message says of what."""


def hicache_flags(host_tokens: int) -> tuple[str, ...]:
    """SGLang's own host memory behind the device pool, for so many tokens."""
    ratio = f"{host_tokens / POOL_TOKENS:.4f}"
    return ("--enable-hierarchical-cache", "--hicache-ratio", ratio, "--hicache-io-backend", "direct")


# Its default prefetches nothing shorter than 256 tokens, and these sessions grow by less from turn to turn.
_HICACHE_FILES = (
    *("--hicache-mem-layout", "page_first_direct", "--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": CHUNK_TOKENS})),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One server of the comparison.

    ``flush`` is whether its trainer flushes around an update, as SGLang asks for. ``has_tiers`` is whether anything
    lies behind the device pool. ``same_without_updates`` names the peer that this one is when no update comes.
    """

    key: str
    title: str
    flags: tuple[str, ...] = ()
    flush: bool = True
    has_tiers: bool = True
    is_psrl: bool = False
    dram_tokens: int = 0
    has_disk: bool = False
    needs: Literal["", "hicache files", "lmcache", "fs-linker"] = ""
    same_without_updates: str = ""

    def column(self, scene: Scene) -> Column:
        """This peer as a column of the demo, whose client drives it."""
        lag = 0 if self.is_psrl else None
        return Column(
            self.key,
            self.title,
            scene,
            max_version_lag=lag,
            flush=self.flush,
            dram_tokens=self.dram_tokens,
            has_disk=self.has_disk,
        )


PEERS = (
    Peer(key="flush", title="stock, flush", has_tiers=False),
    Peer(key="keep", title="stock, keep", flush=False, has_tiers=False, same_without_updates="stock, flush"),
    Peer(
        key="hicache",
        title="HiCache, host",
        flags=(*hicache_flags(DRAM_TOKENS), "--hicache-mem-layout", "layer_first"),
    ),
    Peer(
        key="hicache-file",
        title="HiCache, host + files",
        flags=(*hicache_flags(LITTLE_DRAM_TOKENS), *_HICACHE_FILES),
        needs="hicache files",
    ),
    Peer(key="lmcache", title="LMCache backend", needs="lmcache"),
    Peer(key="fs-linker", title=_FS_LINKER, needs="fs-linker"),
    Peer(key="dram", title="psrl strict, DRAM", flush=False, is_psrl=True, dram_tokens=DRAM_TOKENS),
    Peer(
        key="disk",
        title="psrl strict, DRAM + disk",
        flush=False,
        is_psrl=True,
        dram_tokens=LITTLE_DRAM_TOKENS,
        has_disk=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Stand:
    """Where the servers come from. ``models`` are two sets of weights of one model; servers start with the first.
    ``lmcache`` is the folder that tests/lmcache/install.sh filled, if there is one."""

    directory: Path
    models: Sequence[Path]
    zygote: Zygote
    lmcache: Path | None

    @contextmanager
    def serving(self, peer: Peer, name: str) -> Iterator[Server]:
        """A fresh server with empty tiers until the end of the block; ``NotRun`` if it does not start, and
        ``Crashed`` instead of what the block raises when that is because its scheduler has ended."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-{peer.key}-", dir=self.directory))
        with ExitStack() as stack:
            try:
                server = self._start(peer, folder, stack)
            except (ServerError, ZygoteError, ProcessTimeout, SystemExit) as error:
                raise NotRun(self.reason(str(error))) from error
            stack.enter_context(stopping(server))
            try:
                yield server
            except Exception as error:
                if why := _crash(server.log_path):
                    raise Crashed(why) from error
                raise

    def reference(self, number: int) -> Server:
        """A server without a prefix cache, with the weights of version ``number`` + 1; the caller's."""
        return Server(
            self.models[number],
            args=(*COMMON_FLAGS, *_REFERENCE_FLAGS),
            zygote=self.zygote,
            log_path=self.directory / f"reference-{number + 1}.log",
        )

    def reason(self, text: str) -> str:
        """The line of an error that says most, without paths of this machine."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = next(filter(_ERROR.match, reversed(lines)), lines[-1] if lines else "it said nothing")
        return said.replace(str(self.directory), "…")[:_REASON_CHARACTERS]

    def _start(self, peer: Peer, folder: Path, stack: ExitStack) -> Server:
        args = (*COMMON_FLAGS, *_POOL_FLAGS, *peer.flags)
        settings = self._settings(peer, folder)
        env: dict[str, str] = {}
        if peer.needs == "lmcache":
            if self.lmcache is None:
                raise NotRun(NO_LMCACHE)
            return stack.enter_context(LMCachePeer(folder, self.lmcache, CHUNK_TOKENS)).engine(
                self.models[0], args
            )
        if peer.needs == "hicache files":
            env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / "files")
        if peer.needs == "fs-linker":
            packages = self._install_fs_linker()
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
            args = (*args, *_fs_linker_flags(folder / "files"))
        try:
            return Server(
                self.models[0],
                args=args,
                psrl_config=settings,
                env=env,
                zygote=self.zygote,
                log_path=folder / "server.log",
            )
        except ServerError as error:
            if peer.needs == "fs-linker":
                version = _version(packages)
                why = _crash(folder / "server.log") or self.reason(str(error))
                raise NotRun(f"{_FS_LINKER} {version} does not load: {why}") from error
            raise

    def _settings(self, peer: Peer, folder: Path) -> Mapping[str, Any] | None:
        scene = Scene("", 1, 1, POOL_TOKENS, 1.0)
        token_bytes = bytes_per_token(ModelShape.from_config_json(self.models[0]), 1)
        return peer.column(scene).psrl_config(bytes_per_token=token_bytes, disk_path=folder / "disk")

    def _install_fs_linker(self) -> Path:
        """A folder with it, without its dependencies, which SGLang has."""
        folder = self.directory / _FS_LINKER
        if folder.is_dir():
            return folder
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        try:
            done = subprocess.run(
                [*command, "--target", str(folder), _FS_LINKER],
                capture_output=True,
                text=True,
                timeout=_INSTALL_S,
            )
        except subprocess.TimeoutExpired:
            raise NotRun(f"pip did not install {_FS_LINKER} within {_INSTALL_S:.0f} s") from None
        if done.returncode:
            raise NotRun(f"pip did not install {_FS_LINKER}: {self.reason(done.stderr)}")
        return folder


def _crash(log_path: Path) -> str:
    """What ended a scheduler, by its server's log; empty if none has ended."""
    _, ended, after = log_path.read_text(errors="replace").partition("Scheduler hit an exception")
    lines = (line.strip() for line in after.splitlines())
    said = next(filter(_ERROR.match, lines), "it said nothing") if ended else ""
    return said[:_REASON_CHARACTERS]


def _fs_linker_flags(files: Path) -> tuple[str, ...]:
    """As its description says, and ``dynamic``, which SGLang 0.5.23 wants as well."""
    config = {
        "linker": "FileSystemLinker",
        "linker_module_path": "sglang_fs_linker.linker",
        "linker_extra_config": {"directory": str(files), "namespace": "peers"},
    }
    return (
        *("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic"),
        *("--unified-cache-external-linker-config", json.dumps(config)),
    )


def _version(packages: Path) -> str:
    names = [path.name for path in packages.glob("*.dist-info")]
    return names[0].removesuffix(".dist-info").rpartition("-")[2] if names else "of unknown version"
