"""One block of memory for everything a backend may touch, so that "nothing else changed" is a single comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
        self.parts: dict[str, Part] = {}
        end = GAP
        for name, shape, dtype in parts:
            size = int(np.prod(shape)) * dtype.itemsize
            self.parts[name] = Part(name, end, size, shape, dtype)
            end += -(-size // GAP) * GAP + GAP
        self.block = torch.full((end,), 0xC5, dtype=torch.uint8, device=device)
        self.seen = self.block.clone()
        self._live = {name: part.of(self.block) for name, part in self.parts.items()}
        self._last = {name: part.of(self.seen) for name, part in self.parts.items()}
        for tensor in self._live.values():
            poison_(tensor)
        self.accept_all()

    def __getitem__(self, name: str) -> Tensor:
        """The live tensor."""
        return self._live[name]

    def last(self, name: str) -> Tensor:
        """The tensor as it was last accepted."""
        return self._last[name]

    def accept_all(self) -> None:
        """Take over everything: the caller itself has written."""
        self.seen.copy_(self.block)

    def accept(self, name: str, index: Any = ()) -> None:
        """Take over a tensor, or one part of it, that a call was allowed to write."""
        target, source = self.last(name), self[name]
        target[index] = source[index]

    def changed(self) -> list[str]:
        """Names of what differs from the copy, "guard behind X" for a byte that belongs to no tensor."""
        now, seen = self.block.cpu().numpy(), self.seen.cpu().numpy()
        if np.array_equal(now, seen):
            return []
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
