"""Arms that decode as plainly as can be: one token at a time through the backend's native step, forced tokens.

Nothing of the engine takes part: no tree, no workspace, no publication. Arms differ in what must not matter: the
process, the capacity and page size of the cache, and how requests are packed into a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.continuation_plan import Script
from lumotree.backends.protocol import Batch
from lumotree.cycle_types import Stack
from lumotree.plain import one_row_batch
from lumotree.surfaces import Surfaces, read_surfaces


@dataclass(frozen=True)
class Snapshot:
    """A request behind its prompt or behind a cycle: every surface, and of each token fed since the snapshot before
    (of the prompt the last alone) fp32 logits `[n, V]` and bf16 hidden rows `[n, H]`; `first`: position of the first.
    """

    surfaces: Surfaces
    logits: Tensor
    hidden: Tensor

    @property
    def first(self) -> int:
        """Position of the first token of `logits` and `hidden`."""
        return self.surfaces.committed - len(self.logits)


Trace = dict[str, list[Snapshot]]


@dataclass(frozen=True)
class Packing:
    """How an arm lays things out. page_size, spare: of the KV cache (pages beyond the needed). group: requests in a
    forward. order: seed of the order of requests, pages and slots, 0 = as they come."""

    page_size: int = 16
    spare: int = 0
    group: int = 32
    order: int = 0


#: Arm -> layout; B is A in another process.
ARMS = {
    "A": Packing(),
    "B": Packing(),
    "V": Packing(page_size=5, spare=40, order=3),
    "P": Packing(group=11, order=7),
}


def native_trace(stack: Stack, scripts: Sequence[Script], packing: Packing) -> Trace:
    """Feed every script's tokens; snapshots behind the prompt and each cycle, by name of the script."""
    rng = np.random.default_rng(np.random.SeedSequence([packing.order, 43]))
    order = rng.permutation(len(scripts)).tolist() if packing.order else list(range(len(scripts)))
    trace: Trace = {}
    for start in range(0, len(order), packing.group):
        group = [scripts[i] for i in order[start : start + packing.group]]
        trace |= _Group(stack, group, packing, rng).run()
    return trace


class _Group:
    """Requests that are fed together."""

    def __init__(self, stack: Stack, scripts: Sequence[Script], packing: Packing, rng: np.random.Generator) -> None:
        self.stack, self.scripts, self.size = stack, scripts, packing.page_size
        self.device, count = stack.model.device, len(scripts)
        pages = -(-max(s.bounds[-1] for s in scripts) // self.size)
        places = np.arange(count * pages + packing.spare)
        slots = np.arange(count + (1 if packing.order else 0))
        if packing.order:
            places, slots = rng.permutation(places), rng.permutation(slots)
        self.table: NDArray[np.int64] = places[: count * pages].reshape(count, pages)
        self.slots: NDArray[np.int64] = slots[:count]
        flat = len(places) * self.size
        self.pools = stack.model.empty_pools(stack.backend.contract, len(slots), flat)
        self.cache = None if stack.head is None else stack.head.empty_cache(flat)
        self.hidden: list[Tensor | None] = [None] * count
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in scripts]
        self.found: Trace = {s.name: [] for s in scripts}

    def run(self) -> Trace:
        for position in range(max(s.bounds[-1] for s in self.scripts)):
            live = [i for i, s in enumerate(self.scripts) if position < s.bounds[-1]]
            self._feed(position, live)
            for i in live:
                if position + 1 in self.scripts[i].bounds:
                    self._snapshot(i, position + 1)
        return self.found

    def _feed(self, position: int, live: Sequence[int]) -> None:
        tokens = torch.tensor([self.scripts[i].tokens[position] for i in live], device=self.device)
        before = [h for i in live if (h := self.hidden[i]) is not None]
        if position and self.stack.head is not None:
            self.stack.head.forward(tokens, torch.stack(before), self._batch(live, position - 1), self._draft_cache())
        forward = self.stack.model.step(tokens, self._batch(live, position), self.pools, self.stack.backend)
        for row, i in enumerate(live):
            self.hidden[i] = forward.hidden[row].clone()
            if position >= len(self.scripts[i].prompt) - 1:
                self.rows[i].append((forward.logits[row].cpu(), forward.hidden[row].cpu()))

    def _draft_cache(self) -> Any:
        assert self.cache is not None
        return self.cache

    def _batch(self, live: Sequence[int], position: int) -> Batch:
        chosen = np.asarray(live)
        table, prefix = self.table[chosen], np.full(len(live), position)
        page = table[:, position // self.size]
        return one_row_batch(
            self.slots[chosen], prefix, table, self.size, page * self.size + position % self.size, self.device
        )

    def _snapshot(self, i: int, committed: int) -> None:
        position = np.arange(committed)
        flat = self.table[i][position // self.size] * self.size + position % self.size
        hidden = self.hidden[i] if self.cache is not None else None
        surfaces = read_surfaces(
            self.stack.backend, self.pools, None, int(self.slots[i]), flat, self.cache, hidden
        )  # fmt: skip
        logits, rows = zip(*self.rows[i], strict=True)
        self.rows[i] = []
        self.found[self.scripts[i].name].append(Snapshot(to_host(surfaces), torch.stack(logits), torch.stack(rows)))


def to_host(surfaces: Surfaces) -> Surfaces:
    """The same surfaces on the CPU."""
    moved = {n: x.cpu() for n, x in vars(surfaces).items() if isinstance(x, Tensor)}
    return replace(surfaces, **moved)  # type: ignore[arg-type]
