"""One block of memory for everything a backend may touch, so that "nothing else changed" is a single comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audit.guard import poison_

#: Bytes between two tensors, and alignment of each: kernels may rely on 128 bytes.
GAP = 128


@dataclass(frozen=True)
class Part:
    """Where a tensor lies: byte offset, bytes, shape, dtype."""

    name: str
    start: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, block: Tensor) -> Tensor:
        """The tensor in a block of bytes, contiguous."""
        return block[self.start : self.start + self.size].view(self.dtype).view(self.shape)


class Slab:
    """Named contiguous tensors in one block of bytes, guards between them, everything poisoned at first.

    `seen` is a copy of the block. What a call may write is taken over from the block by `accept`; whatever else
    differs from the copy is found by `changed`, guards included.
    """

    def __init__(self, parts: Iterable[tuple[str, tuple[int, ...], torch.dtype]], device: torch.device | str) -> None:
        self.parts, poisoned = _layout(tuple(parts))
        self.block = poisoned.to(device, copy=True)
        self.seen = self.block.clone()
        self._poison = poisoned.to(device)
        # Parts are aligned and the block is whole words long: comparing words is the fastest way to compare bytes.
        self._words = self.block.view(torch.int64), self.seen.view(torch.int64)
        self._live: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._runs: dict[tuple[str, ...], list[tuple[Tensor, Tensor]]] = {}

    def __getitem__(self, name: str) -> Tensor:
        """The live tensor."""
        if name not in self._live:
            self._live[name] = self.parts[name].of(self.block)
        return self._live[name]

    def last(self, name: str) -> Tensor:
        """The tensor as it was last accepted."""
        if name not in self._last:
            self._last[name] = self.parts[name].of(self.seen)
        return self._last[name]

    def poison(self, names: tuple[str, ...]) -> None:
        """Poison some tensors as they were at first: neighbours in one call, with the guards between them."""
        if names not in self._runs:
            bounds = self._side_by_side(names)
            self._runs[names] = [(self.block[lo:hi], self._poison[lo:hi]) for lo, hi in bounds]
        for block, poison in self._runs[names]:
            block.copy_(poison)

    def _side_by_side(self, names: tuple[str, ...]) -> list[tuple[int, int]]:
        """First and last byte, exclusive, of each run of parts without another one between them."""
        runs: list[tuple[int, int]] = []
        before = False
        for name, part in self.parts.items():
            if name in names:
                start = runs.pop()[0] if before else part.start
                runs.append((start, part.start + part.size))
            before = name in names
        return runs

    def accept_all(self) -> None:
        """Take over everything: the caller itself has written."""
        self.seen.copy_(self.block)

    def accept(self, name: str, index: Any = ()) -> None:
        """Take over a tensor, or one part of it, that a call was allowed to write."""
        target, source = self.last(name), self[name]
        target[index] = source[index]

    def changed(self) -> list[str]:
        """Names of what differs from the copy, "guard behind X" for a byte that belongs to no tensor."""
        if torch.equal(*self._words):
            return []
        now, seen = self.block.cpu().numpy(), self.seen.cpu().numpy()
        at = np.flatnonzero(now != seen)
        found: list[str] = []
        owner = "the start"
        for part in self.parts.values():
            inside = (at >= part.start) & (at < part.start + part.size)
            if (at < part.start).any():
                found.append(f"guard behind {owner}")
            if inside.any():
                found.append(part.name)
            at = at[at >= part.start + part.size]
            owner = part.name
        return found + ([f"guard behind {owner}"] if len(at) else [])


@lru_cache(maxsize=256)
def _layout(parts: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]) -> tuple[dict[str, Part], Tensor]:
    """Where each tensor lies, and a block with everything poisoned."""
    placed: dict[str, Part] = {}
    end = GAP
    for name, shape, dtype in parts:
        size = int(np.prod(shape)) * dtype.itemsize
        placed[name] = Part(name, end, size, shape, dtype)
        end += -(-size // GAP) * GAP + GAP
    block = torch.full((end,), 0xC5, dtype=torch.uint8)
    for part in placed.values():
        poison_(part.of(block))
    return placed, block
