"""D, the drafter's surface: committed entries of the draft head's cache, and the hidden row that it reads next.

Publication writes the entries of the accepted tokens from the target's own hidden rows, one chain a request. Nothing
that was drafted is kept, so D(m) depends on the m tokens alone: plain decoding with the same head leaves the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lumotree.backends.batch import build_batch
from lumotree.model_types import DraftHead
from lumotree.placed_tree import placed
from lumotree.slots import Lease
from lumotree.state import KVCache


@dataclass(frozen=True)
class Advance:
    """Accepted tokens of one request.

    start: position of the first. tokens: n token ids. hidden: bf16 `[n, H]`, the target's rows of these positions.
    before: bf16 `[H]`, the target's row at start - 1, None for start 0.
    """

    lease: Lease
    start: int
    tokens: Sequence[int]
    hidden: Tensor
    before: Tensor | None


def page_table(leases: Sequence[Lease], width: int) -> Tensor:
    """int32 `[B, width]`, unused entries -1."""
    table = np.full((len(leases), width), -1, np.int32)
    for row, lease in zip(table, leases, strict=True):
        row[: len(lease.pages)] = lease.pages
    return torch.from_numpy(table)


class DrafterState:
    """The draft head and its cache, which lies in the same pages as the target's.

    width: pages of the longest request. Faults of this surface subclass it.
    """

    def __init__(self, head: DraftHead, flat_slots: int, width: int, device: torch.device) -> None:
        self.head, self.width, self.device = head, width, device
        self.flat_slots = flat_slots
        self.cache: KVCache = head.empty_cache(flat_slots)

    def publish(self, advances: Sequence[Advance]) -> list[Tensor]:
        """Commit the entries that the accepted tokens complete; returns each request's next hidden row, bf16 `[H]`.

        The entry at position i comes from the hidden row at i and the token at i + 1: n accepted tokens from `start`
        complete the entries start - 1 .. start + n - 2.
        """
        work = [advance for advance in advances if self._rows(advance)]
        if work:
            self._forward(work)
        return [advance.hidden[-1] for advance in advances]

    @staticmethod
    def _rows(advance: Advance) -> int:
        return len(advance.tokens) - (advance.before is None)

    def _forward(self, work: Sequence[Advance]) -> None:
        trees, hidden = [], []
        tokens: list[int] = []
        for advance in work:
            rows = self._rows(advance)
            skip = len(advance.tokens) - rows
            first = advance.start - 1 + skip
            slots = advance.lease.flat(first, first + rows)
            trees.append(placed(np.arange(rows) - 1, np.zeros(rows), slots, self.flat_slots, first))
            tokens += advance.tokens[skip:]
            known = advance.hidden[:-1]
            hidden.append(known if advance.before is None else torch.cat([advance.before[None], known]))
        batch = build_batch(
            trees,
            state_slots=[advance.lease.slot for advance in work],
            page_table=page_table([advance.lease for advance in work], self.width),
            page_size=work[0].lease.page_size,
            device=self.device,
        )
        self.head.forward(torch.tensor(tokens, device=self.device), torch.cat(hidden), batch, self.cache)
