"""What the decoding cycle is made of and what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lumotree.backends.protocol import Batch
from lumotree.decide import Turn
from lumotree.model_types import DraftHead, Forward, LanguageModel
from lumotree.requests import Finish, Request
from lumotree.surfaces import Surfaces


@dataclass(frozen=True)
class Stack:
    """What decodes: a model, any backend of the protocol, the model's draft head or None.

    identity names the weights; a state saved under another identity is refused.
    """

    model: LanguageModel
    backend: Any
    head: DraftHead | None = None
    identity: str = ""


@dataclass(frozen=True)
class Verified:
    """A verification: turns, their batch (rows in the order of the turns), and what the forward left."""

    turns: tuple[Turn, ...]
    batch: Batch
    forward: Forward


@dataclass(frozen=True)
class Record:
    """What one cycle did to one request.

    cycle: address of its coins. rows: active rows verified. fed: prompt tokens fed. path: accepted rows. emitted: new
    tokens, the pending one last; empty for a prompt chunk with more to come. committed: m behind it.
    """

    number: int
    cycle: int
    rows: int
    fed: int
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    committed: int
    finished: Finish | None


@dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds of the phases of one cycle, the device drained at each end."""

    propose: float
    verify: float
    select: float
    publish: float


@dataclass(frozen=True)
class Cycle:
    """One cycle: its records, how long it took, and how many rows the forward had."""

    records: tuple[Record, ...]
    seconds: Seconds
    rows: int


@dataclass(frozen=True)
class SavedRequest:
    """A request as it stood between two cycles, to go on with later, also in another decoder of the same weights.

    tokens: prompt and output. cycle: address of its next coins. paths: see `lumotree.requests.Running`.
    """

    identity: str
    request: Request
    tokens: tuple[int, ...]
    cycle: int
    finished: Finish | None
    paths: tuple[int, ...]
    surfaces: Surfaces
