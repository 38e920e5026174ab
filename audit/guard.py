"""Memory that tells what was done to it: guard values round every tensor, poison in what must not be read, and
snapshots that are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from audit.distance import same_bits

#: Elements in front of and behind each tensor. 64 x 2 bytes keeps 128-byte alignment for the tensor itself.
GUARD = 64

#: A quiet NaN with a payload that no arithmetic produces, so that an overwritten guard shows even if NaN is written.
_CANARY = {torch.bfloat16: 0x7FC5, torch.float16: 0x7E05, torch.float32: 0x7FC0CAFE, torch.float64: 0x7FF80000CAFE0001}

#: The integers of a floating-point dtype's size: its bits.
INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def poison_(x: Tensor) -> Tensor:
    """Fill with the canary NaN (floating point) or -1 (integers); in place."""
    if x.is_floating_point():
        x.view(INTEGERS[x.dtype]).fill_(_CANARY[x.dtype])
    else:
        x.fill_(-1 if x.dtype != torch.bool else 0)
    return x


def same_except(now: Tensor, before: Tensor, written: Tensor) -> bool:
    """Whether `[layers, slots, ..]` is bitwise unchanged outside the written slots."""
    keep = torch.ones(now.shape[1], dtype=torch.bool, device=now.device)
    keep[written] = False
    return same_bits(now[:, keep], before[:, keep])


class Arena:
    """Allocates tensors between guard values and says afterwards which guards were overwritten.

    Guards are NaN, so that a read beyond a tensor poisons what it feeds, and are checked bitwise.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._buffers: dict[str, Tensor] = {}

    def empty(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """A poisoned contiguous tensor; `name` is what a finding calls it."""
        size = tuple(shape)
        numel = 1
        for n in size:
            numel *= n
        buffer = poison_(torch.empty(numel + 2 * GUARD, dtype=dtype, device=self.device))
        self._buffers[name] = buffer
        return buffer[GUARD : GUARD + numel].view(size)

    def copy(self, name: str, source: Tensor) -> Tensor:
        """A guarded copy of `source` on the arena's device."""
        target = self.empty(name, source.shape, source.dtype)
        target.copy_(source)
        return target

    def broken(self) -> list[str]:
        """Names of the tensors round which a guard was overwritten."""
        return [name for name, buffer in self._buffers.items() if not self._intact(buffer)]

    @staticmethod
    def _intact(buffer: Tensor) -> bool:
        clean = poison_(torch.empty(GUARD, dtype=buffer.dtype, device=buffer.device))
        return same_bits(buffer[:GUARD], clean) and same_bits(buffer[-GUARD:], clean)


def items_of(nest: Any) -> list[tuple[Any, Any]] | None:
    """Named parts of a container or plain object; None for anything that has none."""
    if isinstance(nest, Mapping):
        return list(nest.items())
    if isinstance(nest, list | tuple):
        return list(enumerate(nest))
    if isinstance(nest, Tensor | type) or callable(nest):
        return None
    slots = [name for kind in type(nest).__mro__ for name in getattr(kind, "__slots__", ())]
    named = [(name, getattr(nest, name)) for name in slots if hasattr(nest, name)]
    return [*named, *vars(nest).items()] if hasattr(nest, "__dict__") else named if slots else None


def tensors_of(nest: Any, name: str = "") -> dict[str, Tensor]:
    """Every tensor in a nest of dataclasses, dicts, lists, tuples and plain objects, by dotted name.

    What is met again within itself is passed over: nodes of a tree that point at their parents make a cycle.
    """
    return _tensors_of(nest, name, ())


def _tensors_of(nest: Any, name: str, above: tuple[int, ...]) -> dict[str, Tensor]:
    if isinstance(nest, Tensor):
        return {name: nest}
    found: dict[str, Tensor] = {}
    for key, value in () if id(nest) in above else items_of(nest) or ():
        found |= _tensors_of(value, f"{name}.{key}" if name else str(key), (*above, id(nest)))
    return found


class Snapshot:
    """Copies of the tensors of a nest, for bitwise comparison, and its structure, for rewinding in place.

    Restoring puts back what lists, dicts and objects held (a workspace may consume a pending entry when it publishes)
    and writes the saved values into the same tensors: captured graphs hold their addresses.
    """

    def __init__(self, nest: Any) -> None:
        self._live = tensors_of(nest)
        self._saved = {name: t.clone() for name, t in self._live.items()}
        self._structure: list[tuple[Any, list[tuple[Any, Any]]]] = []
        self._record(nest, set())

    def _record(self, nest: Any, seen: set[int]) -> None:
        items = items_of(nest)
        if items is None or id(nest) in seen:
            return
        seen.add(id(nest))
        if not isinstance(nest, tuple):
            self._structure.append((nest, items))
        for _, value in items:
            self._record(value, seen)

    def changed(self) -> list[str]:
        """Names of tensors whose bits are no longer what they were."""
        return [name for name, t in self._live.items() if not same_bits(t, self._saved[name])]

    def restore(self) -> None:
        """Put structure and values back."""
        for nest, items in self._structure:
            _refill(nest, items)
        for name, tensor in self._live.items():
            with torch.no_grad():  # a parameter may be in a workspace
                _once(tensor).copy_(_once(self._saved[name], tensor))

    def saved(self, name: str) -> Tensor:
        """The value at the time of the snapshot."""
        return self._saved[name]


def _once(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """A view without the repetitions of `like` (of the tensor itself unless given): an expanded number is one number in
    memory and cannot be written many times at once."""
    kind = tensor if like is None else like
    if kind.layout != torch.strided or 0 not in kind.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in kind.stride())]


def _refill(nest: Any, items: list[tuple[Any, Any]]) -> None:
    if isinstance(nest, dict):
        nest.clear()
        nest.update(items)
    elif isinstance(nest, list):
        nest[:] = [value for _, value in items]
    elif not isinstance(nest, Mapping):
        for name in set(getattr(nest, "__dict__", ())) - {name for name, _ in items}:
            object.__delattr__(nest, name)
        for name, value in items:
            object.__setattr__(nest, name, value)  # frozen dataclasses too
