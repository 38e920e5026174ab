"""A step made ready for selection: validated, on the grid, summed once.

Rows on the grid of 2^-52 (see `select_reference`) have exact sums, so that a CDF corrected on a sparse support equals
the dense residual's CDF bit for bit, whatever the order of summation. Weights are held in *units* of 2^-52, as whole
numbers in float64: a power of two changes no quotient, and rounding to the grid is then one operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lumotree.errors import InputError
from lumotree.select_reference import GRID
from lumotree.select_types import Coins, Step
from lumotree.tree import Tree

#: How far the sum of a row may be from 1 (softmax in float32 over a large vocabulary stays below it).
SUM_TOLERANCE = 1e-6


@dataclass(frozen=True)
class PreparedLaw:
    """Declared law of a row's first child on its support of K tokens, ascending.

    tokens int64 `[K]`; weights float64 `[K]` in units; cdf float64 `[K]` running sum; target float64 `[K]`, the row's
    target weights at the same tokens.
    """

    tokens: Tensor
    weights: Tensor
    cdf: Tensor
    target: Tensor


@dataclass(frozen=True)
class PreparedStep:
    """A validated step. weights float64 `[N, V]`: target in units; cdf float64 `[N, V]`: its running sums, 0 for
    inactive rows; best: first argmax of each active row's target; laws: by row, None for point masses, else for every
    row that has active children.
    """

    step: Step
    weights: Tensor
    cdf: Tensor
    best: dict[int, int]
    laws: dict[int, PreparedLaw] | None

    @property
    def tree(self) -> Tree:
        """The step's tree."""
        return self.step.tree

    @property
    def vocab(self) -> int:
        """V."""
        return int(self.cdf.shape[1])


def prepare(step: Step) -> PreparedStep:
    """Validate a step and sum its rows; inputs are not changed. Inactive rows are not read.

    Raises InputError naming the row, token and value: a shape or dtype that is not float64 `[N, V]`, an active row with
    NaN, an infinite or a negative value, all zero, or not summing to 1 within SUM_TOLERANCE; likewise the law of a row
    with active children, which must also give weight to at least as many tokens as the row has active children.
    """
    _check_matrix("target", step.target, step.tree.n)
    weights, cdf = torch.empty_like(step.target), torch.empty_like(step.target)
    idle = [row for row in range(step.tree.n) if not step.tree.active[row]]
    weights[idle], cdf[idle] = 0.0, 0.0
    best = {}
    for row in step.tree.active_rows:
        check_row("target", row, step.target[row])
        torch.mul(step.target[row], GRID, out=weights[row]).round_()  # `to_units`, without a copy
        torch.cumsum(weights[row], 0, out=cdf[row])
        best[row] = int(np.argmax(step.target[row].cpu().numpy()))  # NumPy promises the first of tied entries
    return PreparedStep(step, weights, cdf, best, _prepare_laws(step, weights))


def _prepare_laws(step: Step, weights: Tensor) -> dict[int, PreparedLaw] | None:
    if step.laws is None:
        return None
    _check_matrix("laws", step.laws, step.tree.n)
    if step.laws.shape != step.target.shape:
        raise InputError(f"laws: expected the target's shape {list(step.target.shape)}, got {list(step.laws.shape)}")
    laws = {}
    for row in step.tree.active_rows:
        children = len(step.tree.active_children(row))
        if children:
            check_row("laws", row, step.laws[row])
            laws[row] = law = _prepare_law(step.laws[row], weights[row])
            if len(law.tokens) < children:
                raise InputError(
                    f"laws row {row} gives weight to {len(law.tokens)} tokens, fewer than the row's {children} active "
                    "children; siblings drawn without replacement need one each"
                )
    return laws


def _prepare_law(law: Tensor, target: Tensor) -> PreparedLaw:
    weights = to_units(law)
    tokens = torch.nonzero(weights)[:, 0]
    kept = weights[tokens]
    return PreparedLaw(tokens, kept, torch.cumsum(kept, 0), target[tokens])


def to_units(values: Tensor) -> Tensor:
    """Nearest multiples of 2^-52, ties to even, in units of it: `select_reference.snap` times 2^52."""
    return torch.round(values * GRID)


def check_row(name: str, row: int, values: Tensor) -> None:
    """Refuse a float64 `[V]` row that is no probability law. Raises InputError naming row, token and value."""
    total = float(values.sum())
    # Two passes tell that all is well: NaN and infinities survive the sum.
    if not (math.isfinite(total) and float(values.min()) >= 0):
        wrong = ~((values >= 0) & torch.isfinite(values))
        if bool(wrong.any()):
            token = int(torch.nonzero(wrong)[0, 0])
            raise InputError(
                f"{name} row {row} has {float(values[token])} at token {token}; "
                "expected finite and non-negative numbers"
            )
    if total == 0:
        raise InputError(f"{name} row {row} is all zero; expected a sum of 1")
    if abs(total - 1) > SUM_TOLERANCE:
        raise InputError(f"{name} row {row} sums to {total:.9g}; expected 1 within {SUM_TOLERANCE:g}")


def check_tokens(prepared: PreparedStep, tokens: Tensor, walks: int, distinct: bool) -> None:
    """Refuse drafted tokens that are not int64 `[W, N]` or `[1, N]`, leave the vocabulary, or repeat among siblings.

    Only active rows above row 0 are drafts. Siblings may repeat under point masses and where `distinct` is False.
    Raises InputError naming walk, row and token.
    """
    tree = prepared.tree
    if (
        tokens.dtype != torch.int64
        or tokens.ndim != 2
        or tokens.shape[0] not in (1, walks)
        or tokens.shape[1] != tree.n
    ):
        raise InputError(
            f"tokens: expected int64 [{walks}, {tree.n}] or [1, {tree.n}], got {tokens.dtype} {list(tokens.shape)}"
        )
    for row in tree.active_rows[1:]:
        _refuse_any(tokens, row, (tokens[:, row] < 0) | (tokens[:, row] >= prepared.vocab),
                    f"is outside the vocabulary; allowed: 0..{prepared.vocab - 1}")  # fmt: skip
    if distinct and prepared.laws is not None:
        for parent in tree.active_rows:
            _check_siblings(tokens, parent, tree.active_children(parent))


def _check_siblings(tokens: Tensor, parent: int, siblings: tuple[int, ...]) -> None:
    for later, row in enumerate(siblings):
        for earlier in siblings[:later]:
            _refuse_any(tokens, row, tokens[:, row] == tokens[:, earlier],
                        f"repeats its sibling row {earlier} under row {parent}; this rule needs distinct siblings, "
                        "drawn without replacement")  # fmt: skip


def _refuse_any(tokens: Tensor, row: int, wrong: Tensor, why: str) -> None:
    if bool(wrong.any()):
        walk = int(torch.nonzero(wrong)[0, 0])
        raise InputError(f"walk {walk}, row {row}: drafted token {int(tokens[walk, row])} {why}")


def check_coins(coins: Coins, n: int) -> int:
    """Return W of coins float64 `[W, N]` in [0, 1). Raises InputError naming walk, row and value."""
    for name, values in (("accept", coins.accept), ("residual", coins.residual)):
        if values.dtype != torch.float64 or values.ndim != 2 or values.shape[1] != n:
            raise InputError(f"{name} coins: expected float64 [W, {n}], got {values.dtype} {list(values.shape)}")
        inside = (values >= 0) & (values < 1)
        if not bool(inside.all()):
            walk, row = (int(index) for index in torch.nonzero(~inside)[0])
            raise InputError(f"{name} coin of walk {walk}, row {row} is {float(values[walk, row])}; allowed: [0, 1)")
    if coins.accept.shape != coins.residual.shape:
        raise InputError(
            f"coins: {coins.accept.shape[0]} walks of accept coins but {coins.residual.shape[0]} of residual coins"
        )
    return int(coins.accept.shape[0])


def _check_matrix(name: str, values: Tensor, n: int) -> None:
    if values.dtype != torch.float64 or values.ndim != 2 or values.shape[0] != n or values.shape[1] < 1:
        raise InputError(f"{name}: expected float64 [{n}, V], got {values.dtype} {list(values.shape)}")
