"""Laws of whole walks whose rows are not independent, and the total variation between two laws of a walk."""

from __future__ import annotations

import numpy as np

from audit.evidence import Alternative, log_ratio
from audit.fault_nodes import Drafts
from audit.rule_law import Floats, RuleLaw
from lumotree.select_types import Walks
from lumotree.tree import Tree

LATTICE = 2**14
"""Cells of the coin that all rows share, where drafts are redrawn."""


def joint_tv(fault: RuleLaw, clean: RuleLaw) -> float:
    """Return the TV of (last row, bonus). Row by row, so that no [N, V] array is made."""
    reach, other = fault.reach, clean.reach
    rows = clean.tree.active_rows
    gaps = [np.abs(reach[row] * fault.bonus[row] - other[row] * clean.bonus[row]).sum() for row in rows]
    return float(sum(gaps) / 2)


def joint_of(law: RuleLaw) -> Floats:
    """Return P(last row, bonus) [N, V]."""
    return np.asarray(law.reach[:, None] * law.bonus)


def table_ratio(fault: Floats, clean: Floats) -> Alternative:
    """Return the log ratio of two laws of (last row, bonus) [N, V]; held in 4 bytes a number each."""
    tables = fault.astype(np.float32), clean.astype(np.float32)

    def ratio(walks: Walks) -> Floats:
        where = walks.last.numpy(), walks.bonus.numpy()
        return log_ratio(*(table[where].astype(np.float64) for table in tables))

    return ratio


class LastRatio:
    """The `Alternative` of a fault of which the law of the last row, stop [N], is known; clean [N]: the right one."""

    def __init__(self, stop: Floats, clean: Floats) -> None:
        self.stop = stop
        self._ratio = table_ratio(stop[:, None], clean[:, None])

    def __call__(self, walks: Walks) -> Floats:
        """Return the log ratio of each walk [W]."""
        return self._ratio(Walks(walks.last, walks.last * 0, walks.refused, walks.tokens))


def cartesian(law: RuleLaw) -> Floats:
    """P(last, bonus) [N, V] of a walk of a batch of two whose second walk has the first's bonus if they end apart.

    First walk: clean. Second: its own bonus if both end in its row, the first's otherwise; together the bonus does not
    depend on the row. Averaged over the two.
    """
    clean = joint_of(law)
    return np.asarray((clean + clean.sum(1, keepdims=True) * clean.sum(0)) / 2)


def shared_coin_last(tree: Tree, rows: dict[int, tuple[Floats, Drafts]]) -> Floats:
    """P(last row) [N] of multi-round rejection whose rows all read one accept coin. rows: target and drafts by row.

    Given the coin, rows are independent (their drafts are). It is summed over the pieces between its thresholds for
    fixed drafts, which is exact, and over `LATTICE` midpoints otherwise.
    """
    parts = {row: _intervals(target, drafts) for row, (target, drafts) in rows.items()}
    edges = np.linspace(0, 1, LATTICE + 1)
    if all(drafts.declared is None for _, drafts in rows.values()):
        ends = [part[1:3].ravel() for children in parts.values() for part in children]
        edges = np.unique(np.clip(np.concatenate([*ends, [0.0, 1.0]]), 0, 1))
    coin, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    reach = np.zeros((tree.n, len(coin)))
    reach[0] = 1.0
    stop = np.zeros(tree.n)
    for row in tree.active_rows:
        left = np.ones(len(coin))
        for child, part in zip(tree.active_children(row), parts.get(row, []), strict=True):
            chance = _height(part, coin)
            reach[child] = reach[row] * chance
            left = left - chance
        stop[row] = float((reach[row] * left) @ width)
    return stop


def _intervals(target: Floats, drafts: Drafts) -> list[Floats]:
    """For each child: weight, low and high [3, n] of the coins that accept it, over all drafts.

    p, q [P, S], mass and low [P] belong to the ordered prefixes of refused siblings, whose places are drawn [P, index].
    """
    size, k = len(drafts.tokens), drafts.children
    off = max(0.0, float(target.sum() - target[drafts.tokens].sum()))
    drawn, low = np.zeros((1, 0), np.int64), np.zeros(1)
    p = target[drafts.tokens][None]
    q = np.ones_like(p) if drafts.declared is None else drafts.declared[None]
    mass = np.full(1, off + p.sum())
    found = []
    for index in range(k):
        weight = drafts.joint.sum(tuple(range(index + 1, k)))[tuple(drawn.T)].reshape(len(drawn), size)
        law = np.ones_like(p) if drafts.declared is None else q / np.maximum(q.sum(1, keepdims=True), 1e-300)
        ratio = np.minimum(1.0, p / mass[:, None] / np.maximum(law, 1e-300))
        high = np.maximum(low[:, None], ratio)
        which, place = np.nonzero(weight > 0)
        found.append(np.stack([weight[which, place], low[which], high[which, place]]))
        if index + 1 == k:
            break
        rows = np.arange(len(which))
        refused = np.eye(size)[place] if drafts.declared is None else law[which]
        drawn = np.concatenate([drawn[which], place[:, None]], 1)
        p, q, mass, low = p[which], q[which], mass[which], high[which, place]
        left = np.maximum(p - mass[:, None] * refused, 0.0)
        total = mass - p.sum(1) + left.sum(1)
        none = total <= 1e-13
        p, mass = np.where(none[:, None], p, left), np.where(none, mass, total)
        if drafts.declared is not None:
            q[rows, place] = 0.0
    return found


def _height(part: Floats, coin: Floats) -> Floats:
    """Sum of the weights of the intervals that hold each coin, coins ascending."""
    weight, low, high = part
    size = len(coin) + 1
    steps = np.bincount(np.searchsorted(coin, low), weight, size) - np.bincount(
        np.searchsorted(coin, high), weight, size
    )
    return np.asarray(np.cumsum(steps)[:-1])
