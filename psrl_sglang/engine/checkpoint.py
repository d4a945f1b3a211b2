"""Which weights a server starts with: a digest of the checkpoint's files and of how they are read.

It is taken before the weights are read and again afterwards, and counts only if both are equal: a trainer may write
to the directory, or turn a link to the next one, while a server loads it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

# What becomes of the same files depends on these arguments of SGLang.
_READ_BY = (
    "load_format",
    "model_loader_extra_config",
    "quantization",
    "quantization_param_path",
    "json_model_override_args",
    "modelopt_quant",
    "rl_quant_profile",
    "custom_weight_loader",
)
# Loaders that take their weights from these files and nowhere else.
_FROM_FILES = frozenset(
    {
        "auto",
        "safetensors",
        "fastsafetensors",
        "pt",
        "npcache",
        "mistral",
        "gguf",
        "bitsandbytes",
        "layered",
        "sharded_state",
    }
)
_SAMPLES = 16  # of each file: other weights may have its size and time (images, reproducible builds)
_SAMPLE_BYTES = 4096


def checkpoint_fingerprint(arguments: Any) -> str:
    """A short digest; empty where nobody can say what the weights are (dummy or remote loaders, a model that is not
    on this disk yet). ``arguments`` are resolved."""
    load_format = str(arguments.load_format or "auto").rpartition(".")[2].lower()
    if load_format not in _FROM_FILES:
        return ""
    directory = _directory(str(arguments.model_path), arguments.revision)
    if directory is None:
        return ""
    digest = hashlib.sha256(os.path.realpath(directory).encode())
    for name in _READ_BY:
        digest.update(f"\0{name}={getattr(arguments, name, None)}".encode())
    try:
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            if entry.is_file():
                stat = entry.stat()
                digest.update(f"\0{entry.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
                _sample(Path(entry.path), stat.st_size, digest)
    except OSError:
        return ""  # it is being changed
    return digest.hexdigest()[:12]


def _directory(model_path: str, revision: str | None) -> str | None:
    """Where the files are: the path itself, or the snapshot of a hub's model."""
    if os.path.isdir(model_path):
        return model_path
    if os.path.exists(model_path):
        return None  # a single file, which says nothing of what goes with it
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(model_path, revision=revision, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _sample(path: Path, size_bytes: int, digest: Any) -> None:
    with path.open("rb", buffering=0) as file:
        for number in range(_SAMPLES):
            file.seek(max(0, size_bytes - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
