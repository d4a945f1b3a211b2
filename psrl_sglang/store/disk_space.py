"""What one engine's directory takes on the disk, folders and files of other makes included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from psrl_sglang.store.directory import Directory, IdleDirectory, allocated_bytes, disk_bytes


class DiskSpace:
    """The books of a `DiskTier`, whose lock is held for every call; ``on_error`` hears of failed deletions."""

    def __init__(self, directory: Directory, on_error: Callable[[str, OSError], None]) -> None:
        self.files_bytes = 0  # of chunks that are in the index
        self.landing_bytes = 0  # what the files that are being written will take
        self.other_bytes = directory.outside_bytes + allocated_bytes(directory.path)
        self.idle: list[IdleDirectory] = []  # of no engine; deleted first
        self.undeleted: dict[Path, int] = {}  # not in the index any more, tried again when room is needed
        self._folders: dict[Path, int] = {}
        self._directory = directory
        self._on_error = on_error

    @property
    def own_bytes(self) -> int:
        """What there is now because of this engine."""
        chunks = self.files_bytes + sum(self.undeleted.values())
        return chunks + sum(self._folders.values()) + self.other_bytes

    @property
    def used_bytes(self) -> int:
        """All that counts against the budget."""
        return self.own_bytes + self.landing_bytes + sum(idle.size_bytes for idle in self.idle)

    def on_disk_bytes(self) -> int:
        """What the file system says that ``own_bytes`` is."""
        return disk_bytes(self._directory.path) + self._directory.outside_bytes

    def count_folders(self, path: Path) -> None:
        """Those of a chunk's file: they grow with what is in them."""
        for folder in (path.parent, path.parent.parent):
            self._folders[folder] = allocated_bytes(folder)

    def delete(self, path: Path, size_bytes: int) -> bool:
        """False if it cannot be deleted now: it goes on counting."""
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self._on_error("delete", error)
            self.undeleted[path] = size_bytes
            return False
        self.undeleted.pop(path, None)
        return True

    def delete_again(self) -> None:
        """What could not be deleted before."""
        for path, size_bytes in list(self.undeleted.items()):
            self.delete(path, size_bytes)

    def remove_folders(self, folder: Path) -> None:
        """A folder and the tag's, if there is nothing in them any more."""
        for empty in (folder, folder.parent):
            try:
                empty.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return
            self._folders.pop(empty, None)
