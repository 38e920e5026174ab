"""The text: sources of the Python standard library, split by a hash of their path.

Tests, third-party packages and generated tables are left out: not every machine has the first, and the others are no
prose of programmers. A file keeps its split from one Python version to the next, since only its path decides.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lumotree.byte_tokens import END
from lumotree.errors import InputError

Split = Literal["train", "validation", "held-out"]

_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "pydoc_data", "__pycache__"}
)
_SMALLEST = 256
_HEAD = 400


@dataclass(frozen=True)
class Source:
    """One file. path: relative to the library's folder, with slashes; data: its bytes, valid UTF-8."""

    path: str
    data: bytes


def stdlib_sources(root: Path | None = None) -> list[Source]:
    """The sources under `root` (the running Python's own library by default), ordered by path, duplicates left out.

    Raises InputError if there are none.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    found: dict[bytes, Source] = {}
    for path in sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.split("/")):
            data = (folder / path).read_bytes()
            if is_prose(data):
                found.setdefault(hashlib.sha256(data).digest(), Source(path, data))
    if not found:
        raise InputError(f"training text: no Python sources under {folder}; give the folder of a standard library")
    return list(found.values())


def is_prose(data: bytes) -> bool:
    """Whether a file was written by people: long enough, valid UTF-8, and its head does not say "generated"."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return len(data) >= _SMALLEST and b"generated" not in data[:_HEAD].lower()


def path_number(path: str, purpose: str) -> int:
    """A number that only path and purpose decide, 0..2^64-1."""
    return int.from_bytes(hashlib.sha256(f"lumotree {purpose}\0{path}".encode()).digest()[:8], "big")


def split_of(path: str) -> Split:
    """Which split a file belongs to: 10% held out, 5% validation (by files)."""
    share = path_number(path, "split") % 20
    return "held-out" if share < 2 else "validation" if share == 2 else "train"


def of_split(sources: Iterable[Source], split: Split) -> list[Source]:
    """The sources of one split, in their order."""
    return [source for source in sources if split_of(source.path) == split]


def corpus_hash(sources: Iterable[Source]) -> str:
    """sha256 over paths, lengths and bytes, in order."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.path}\0{len(source.data)}\0".encode())
        digest.update(source.data)
    return digest.hexdigest()


def token_stream(sources: Sequence[Source]) -> NDArray[np.int16]:
    """All documents one after the other, int16 `[total]`: END, bytes, END, bytes, ..., END."""
    parts: list[NDArray[np.int16]] = []
    for source in sources:
        parts += [np.array([END], np.int16), np.frombuffer(source.data, np.uint8).astype(np.int16)]
    return np.concatenate([*parts, np.array([END], np.int16)])
