"""One walk that computes only what it visits: for decoding, where each tree is walked once.

The vectorised rules prepare every row of a tree, which pays for thousands of walks. A single walk of a rule that goes
down from the root visits a handful of rows; here their laws, and nothing else, are computed, by the plain forms of the
rules, which decide as the vectorised ones do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lumotree import select_reference as plain
from lumotree.coins import coins_at
from lumotree.errors import InputError
from lumotree.sampling import SamplingParams, target_rows
from lumotree.select import Rule
from lumotree.select_prepare import check_row
from lumotree.tree import Tree

#: Rules that only visit rows of the path that they take.
DOWNWARD = ("greedy", "naive", "multi-round")
#: Larger vocabularies are faster in the vectorised form.
MAX_VOCAB = 2048

_ROOT = Tree.make([-1])


class _Rows:
    """Rows made when they are first asked for."""

    def __init__(self, make: Callable[[int], list[float]]) -> None:
        self._make, self._made = make, dict[int, list[float]]()

    def __getitem__(self, row: int) -> list[float]:
        if row not in self._made:
            self._made[row] = self._make(row)
        return self._made[row]


@dataclass(frozen=True)
class Walk:
    """A tree to be walked. logits: fp32 `[N, V]` on the CPU; laws as in `Step`. The parameters must have no penalties:
    their history is not looked at."""

    tree: Tree
    logits: Tensor
    laws: Tensor | None
    params: SamplingParams

    def suits(self, rule: Rule) -> bool:
        """Whether the lazy form is of use here."""
        return rule.name in DOWNWARD and self.logits.shape[1] <= MAX_VOCAB and not self.params.penalised

    def select(self, rule: Rule, seed: int, request: int, cycle: int) -> tuple[int, int]:
        """Last accepted row and pending token, as `rule.select` decides them with the coins of this address.

        Raises InputError naming the row for logits or laws that are none, a drafted token outside the vocabulary, or
        siblings that repeat where the rule needs them to differ.
        """
        tree = self.tree
        coins: list[Any] = [dict[int, float](), dict[int, float]()]
        for kept, values in zip(coins, coins_at(seed, request, cycle, tree.active_rows), strict=True):
            kept.update(zip(tree.active_rows, values, strict=True))
        self._check(rule)
        walk = plain.OneWalk(
            [tree.active_children(row) for row in range(tree.n)], tree.tokens.tolist(), _Rows(self._target),  # type: ignore[arg-type]
            None if self.laws is None else _Rows(self._law), *coins,  # type: ignore[arg-type]
        )  # fmt: skip
        outcome = plain.cut(walk, rule.one(walk), tree.parents.tolist(), rule.eos, rule.budget)
        return outcome.last, outcome.bonus

    def _target(self, row: int) -> list[float]:
        try:
            law = target_rows(self.logits[row : row + 1], _ROOT, self.params)[0]
        except InputError as cause:
            raise InputError(str(cause).replace("logits row 0", f"logits row {row}")) from cause
        return law.tolist()  # type: ignore[no-any-return]

    def _law(self, row: int) -> list[float]:
        assert self.laws is not None
        check_row("laws", row, self.laws[row])
        weights, children = self.laws[row], len(self.tree.active_children(row))
        support = int(torch.count_nonzero(weights))
        if support < children:
            raise InputError(
                f"laws row {row} gives weight to {support} tokens, fewer than the row's {children} active children"
            )
        return weights.tolist()  # type: ignore[no-any-return]

    def _check(self, rule: Rule) -> None:
        tree, vocab = self.tree, self.logits.shape[1]
        drafted = tree.tokens[list(tree.active_rows[1:])]
        if len(drafted) and int(drafted.max()) >= vocab:
            row = tree.active_rows[1 + int(np.argmax(drafted))]
            raise InputError(
                f"row {row}: drafted token {int(drafted.max())} is outside the vocabulary; allowed: 0..{vocab - 1}"
            )
        if rule.distinct and self.laws is not None:
            for row in tree.active_rows:
                tokens = tree.tokens[list(tree.active_children(row))].tolist()
                if len(set(tokens)) < len(tokens):
                    raise InputError(
                        f"row {row}: its children {tokens} repeat a token; this rule needs distinct siblings, drawn "
                        "without replacement"
                    )
