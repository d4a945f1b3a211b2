"""What a disk path holds, whether it is sound, and what of it may go. Behind ``psrl-sglang store``.

Works beside running engines: their directories are only read, and those of others are locked while anything is
deleted in them, so that an engine that starts waits for the end of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from psrl_sglang.keys import KEY_BYTES
from psrl_sglang.store.chunk import BadChunk, ChunkHeader, check_pages, padded
from psrl_sglang.store.directory import (
    ROOT,
    SUFFIX,
    IdleDirectory,
    allocated_bytes,
    chunk_files,
    guarded,
    lock_of,
    read_header,
    remove_empty_folders,
    tag_folder,
)

GIB = 2**30


class SurveyError(Exception):
    """The path cannot be looked at; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class EngineDirectory:
    """What one engine has written, now or in the past."""

    path: Path
    layout: str | None  # what the digest stands for, None if nobody wrote it down
    in_use: bool

    @property
    def digest(self) -> str:
        return self.path.parent.name

    @property
    def name(self) -> str:
        """The digest shortened, as ``--layout`` takes it, and the number."""
        return f"{self.digest[:12]}/{self.path.name}"


@dataclass(frozen=True, slots=True)
class StoredChunk:
    path: Path
    header: ChunkHeader
    size_bytes: int  # on disk
    used_s: float
    identity: tuple[int, int]  # of the file, which an engine may replace


@dataclass(frozen=True, slots=True)
class BadFile:
    path: Path
    reason: str
    is_readable: bool = True


@dataclass(slots=True)
class TagUse:
    """All chunks of one tag in one directory."""

    tag: str
    chunks: int = 0
    pages: int = 0
    size_bytes: int = 0
    oldest_s: float = float("inf")
    newest_s: float = 0.0


def directories(disk_path: Path, layout: str | None = None) -> list[EngineDirectory]:
    """Every engine directory below ``disk_path``, or of the one layout whose digest begins so. Raises
    ``SurveyError``."""
    root = disk_path / ROOT
    try:
        bases = sorted(path for path in root.iterdir() if path.is_dir())
        if layout is not None:
            bases = [_only(bases, layout, root)]
        with guarded(root):
            return [
                EngineDirectory(path, _layout_text(base), _is_in_use(path))
                for base in bases
                for path in sorted(base.iterdir(), key=lambda path: (len(path.name), path.name))
                if path.name.isdecimal() and path.is_dir()
            ]
    except FileNotFoundError:
        hint = "its parent" if disk_path.name == ROOT else "the directory that psrl.lmcache.disk_path names"
        raise SurveyError(f"{disk_path}: no {ROOT} in it; give {hint}") from None
    except NotADirectoryError:
        raise SurveyError(f"{disk_path}: not a directory") from None
    except OSError as error:
        raise SurveyError(
            f"{error.filename or root}: {error.strerror}; run this as the user of the engines, "
            "who may lock and delete there"
        ) from error


def survey(directory: EngineDirectory) -> tuple[list[StoredChunk], list[BadFile]]:
    """The chunks by their headers, and the files that are none. Pages are not read."""
    chunks: list[StoredChunk] = []
    bad: list[BadFile] = []
    for path in chunk_files(directory.path):
        try:
            header = _checked_header(path, directory)
            stat = path.stat()
            chunks.append(StoredChunk(path, header, stat.st_blocks * 512, stat.st_mtime, _identity(stat)))
        except FileNotFoundError:
            continue  # evicted meanwhile
        except BadChunk as error:
            if not directory.in_use or path.name.endswith(SUFFIX):  # else it may be in the middle of a write
                bad.append(BadFile(path, str(error)))
        except OSError as error:
            bad.append(_unreadable(path, error))
    return chunks, bad


def by_tag(chunks: Iterable[StoredChunk]) -> list[TagUse]:
    """The tag that was used last comes first."""
    tags: dict[str, TagUse] = {}
    for chunk in chunks:
        use = tags.setdefault(chunk.header.tag, TagUse(chunk.header.tag))
        use.chunks += 1
        use.pages += chunk.header.pages
        use.size_bytes += chunk.size_bytes
        use.oldest_s = min(use.oldest_s, chunk.used_s)
        use.newest_s = max(use.newest_s, chunk.used_s)
    return sorted(tags.values(), key=lambda use: -use.newest_s)


def verify(chunk: StoredChunk) -> BadFile | None:
    """Read every byte of a chunk and check it; None if it is sound, or meanwhile evicted or replaced."""
    header = chunk.header
    size_bytes = header.pages * header.page_bytes
    payload = memoryview(bytearray(size_bytes))
    try:
        with open(chunk.path, "rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            if _identity(stat) != chunk.identity:
                return None
            begin, done = stat.st_size - padded(size_bytes), 0
            while done < size_bytes:
                got = os.preadv(file.fileno(), [payload[done:]], begin + done)
                if not got:
                    raise BadChunk(f"cut short at {begin + done} bytes")
                done += got
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the page cache is for others
        step = header.page_bytes
        check_pages(header, 0, [payload[at : at + step] for at in range(0, size_bytes, step)])
    except FileNotFoundError:
        return None
    except BadChunk as error:
        return BadFile(chunk.path, str(error))
    except OSError as error:
        return _unreadable(chunk.path, error)
    return None


def last_uses(chunks: Sequence[StoredChunk]) -> list[float]:
    """For each chunk when it was used last, it or one that continues it: a sequence is of no use without its
    head, and reading its tail from disk does not touch a head that is in DRAM."""
    wanted = {chunk.header.parent for chunk in chunks if chunk.header.parent}
    owners: dict[bytes, int] = {}
    for number, chunk in enumerate(chunks):
        keys = chunk.header.keys
        for at in range(0, len(keys), KEY_BYTES):
            if (key := keys[at : at + KEY_BYTES]) in wanted:
                owners[key] = number
    used = [chunk.used_s for chunk in chunks]
    for number in sorted(range(len(chunks)), key=lambda number: -chunks[number].header.start):
        parent = owners.get(chunks[number].header.parent)
        if parent is not None and parent != number:
            used[parent] = max(used[parent], used[number])
    return used


@contextmanager
def held(directory: EngineDirectory) -> Iterator[bool]:
    """True inside if no engine has the directory; then none can take it before the end."""
    with guarded(directory.path.parents[1]):
        if not directory.path.is_dir():
            yield False
            return
        lock = lock_of(directory.path)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                os.close(lock)


def delete(directory: EngineDirectory, paths: Sequence[Path]) -> tuple[bool, list[BadFile]]:
    """Delete files of a directory and the folders that become empty. False if an engine has it, which then
    nothing is done to; and the files that could not be deleted."""
    failed: list[BadFile] = []
    with held(directory) as is_idle:
        if not is_idle:
            return False, []
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                failed.append(BadFile(path, f"cannot be deleted: {error.strerror}"))
        remove_empty_folders(directory.path)
        is_empty = all(path.name == "LOCK" for path in directory.path.iterdir())
    if is_empty:
        IdleDirectory(directory.path, 0, 0.0).remove()
    return True, failed


def total_bytes(disk_path: Path) -> int:
    """What all files of chunks take on disk, bad ones too."""
    return sum(map(allocated_bytes, chunk_files(disk_path / ROOT)))


def _checked_header(path: Path, directory: EngineDirectory) -> ChunkHeader:
    if not path.name.endswith(SUFFIX):
        raise BadChunk("left by a write that did not end")
    header = read_header(path)
    if header.layout.hex() != directory.digest:
        raise BadChunk(f"of another layout, {header.layout.hex()}")
    if path.relative_to(directory.path).parts[0] != tag_folder(header.tag):
        raise BadChunk(f"of tag {header.tag!r}, but not in its folder")
    return header


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_ino, stat.st_size


def _unreadable(path: Path, error: OSError) -> BadFile:
    return BadFile(path, f"cannot be read: {error.strerror}", is_readable=False)


def _only(bases: list[Path], layout: str, root: Path) -> Path:
    matching = [base for base in bases if base.name.startswith(layout)]
    if layout and len(matching) == 1:
        return matching[0]
    names = ", ".join(base.name[:12] for base in (matching if layout and matching else bases)) or "none"
    said = "several layouts begin" if len(matching) > 1 else "no layout begins"
    raise SurveyError(f"{root}: {said} with {layout!r}; there are: {names}")


def _layout_text(base: Path) -> str | None:
    try:
        return (base / "LAYOUT").read_text().strip()
    except FileNotFoundError:
        return None


def _is_in_use(path: Path) -> bool:
    lock = lock_of(path)
    if lock is None:
        return True
    os.close(lock)
    return False
