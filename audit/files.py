"""Files that are either there in full or not there at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def write_atomically(contents: Mapping[Path, bytes]) -> None:
    """Write every file to a temporary name in its own folder, sync, and only then rename them all.

    Raises OSError; in that case no temporary file stays behind, and no file is replaced unless a rename itself failed.
    """
    staged: list[tuple[Path, Path]] = []
    try:
        for path, data in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            staged.append((temporary, path))
            _write_synced(temporary, data)
        for temporary, path in staged:
            os.replace(temporary, path)
    finally:
        for temporary, _ in staged:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    for folder in {path.parent for path in contents}:
        _sync_folder(folder)


def probe_writable(folder: Path) -> None:
    """Prove that `folder` (made if need be) can take a file, and leave no trace of it. Raises OSError."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    probe = folder / f".probe.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
        for made in missing:  # innermost first
            with suppress(OSError):
                made.rmdir()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def archive_fault(cause: Exception) -> str:
    """Why `numpy.load` refused a file, without its advice to load what it does not know as a pickle."""
    return "no archive but pickled or foreign data, which is never loaded" if "pickle" in str(cause) else str(cause)
