"""When does replay pay? Publication by replay against a bank of states, in bytes and measured steps.

A bank writes every row's state while it verifies and reads every row's parent's; its publication copies one state.
Replay keeps no states: its publication reads the state, runs the accepted rows and writes it. Deferred factors publish
nothing and pay one pass over the state, and the factors, at the next verification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """state: bytes of the states of all layers and requests; factor: bytes of one accepted row's k, u and decay in all
    layers and requests; bytes_s: measured; replay: measured publish ms by accepted rows, at least two of them.
    """

    state: int
    factor: int
    bytes_s: float
    replay: Mapping[int, float]

    def _ms(self, size: float) -> float:
        return 1e3 * size / self.bytes_s

    def replay_ms(self, rows: float) -> float:
        """Measured publication of `rows` accepted rows, linear between and beyond the measured lengths."""
        known = sorted(self.replay)
        at = next((i for i, n in enumerate(known[1:], 1) if rows <= n), len(known) - 1)
        low, high = known[at - 1], known[at]
        slope = (self.replay[high] - self.replay[low]) / (high - low)
        return self.replay[low] + slope * (rows - low)

    def copy_ms(self) -> float:
        """Copy of one state from the bank to the pool."""
        return self._ms(2 * self.state)

    def bank_ms(self, tree: int) -> float:
        """What the bank adds to the verification of a tree of so many rows: each writes a state, all but the root read
        one from the bank instead of from the chip.
        """
        return self._ms((2 * tree - 1) * self.state)

    def deferred_ms(self, rows: int) -> float:
        """What deferred factors add to the next verification."""
        return self._ms(self.state + 2 * rows * self.factor)

    def break_even(self, rows: int) -> int:
        """Rows of the smallest tree for which replay of `rows` accepted rows costs no more than the bank."""
        excess = self.replay_ms(rows) - self.copy_ms()
        return max(1, math.ceil((excess / self._ms(self.state) + 1) / 2))


def table(model: Model, lengths: Sequence[int], trees: Sequence[int]) -> list[str]:
    """Markdown: publication by policy, the bank's extra by tree, and the break-even tree, by accepted rows."""
    head = ["accepted rows", "replay", "bank copy", "deferred, later", *(f"bank, verify +, {t} rows" for t in trees)]
    lines = ["| " + " | ".join([*head, "replay pays from"]) + " |", "|" + " --- |" * (len(head) + 1)]
    for n in lengths:
        cells = [model.replay_ms(n), model.copy_ms(), model.deferred_ms(n), *(model.bank_ms(t) for t in trees)]
        pays = max(model.break_even(n), n)
        lines.append("| " + " | ".join([str(n), *(f"{c:.4g}" for c in cells), f"{pays} rows"]) + " |")
    return lines
