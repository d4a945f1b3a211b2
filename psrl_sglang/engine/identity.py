"""Whose weights a version's name names: what keeps the KV of one run from being found by another."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Two runs from the same checkpoint both have a version "1", with different weights. With
    ``psrl.sglang.namespace`` set, a run says which run it is, and its names are trusted in every store. Without,
    only the weights it started with are known by name to others (``fingerprint``); a version that was installed
    by an update is its own (``instance``), and no other run, restart or engine finds its KV.
    """

    namespace: str
    start_tag: str
    fingerprint: str
    instance: str

    def of(self, tag: str) -> str:
        if self.namespace:
            return tag  # which begins with the namespace
        return f"{tag}\0{self.fingerprint if tag == self.start_tag else self.instance}"


def checkpoint_fingerprint(model_path: str, revision: str | None) -> str:
    """A short digest of which checkpoint a path holds: names, sizes and times of its files. A path that is no
    directory (a hub id) is digested by its name and revision."""
    digest = hashlib.sha256(f"{os.path.realpath(model_path)}\0{revision or ''}".encode())
    if os.path.isdir(model_path):
        for entry in sorted(os.scandir(model_path), key=lambda entry: entry.name):
            if entry.is_file():
                stat = entry.stat()
                digest.update(f"{entry.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:12]
