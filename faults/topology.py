"""Faults of topology: a row inherits from the wrong row, a path ends in the wrong row."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from faults.catalogue import Fault, Faulty, branches, has_siblings
from lumotree.backends.batch import replan
from lumotree.backends.protocol import SHARED_OPERANDS, SURFACES, Accepted, Batch


def predecessor_parents(batch: Batch) -> Tensor:
    """Parents as a chain in buffer order would have them: the active row before, within each request."""
    parent, active = batch.parent.cpu().clone(), batch.active.cpu()
    for lo, hi in itertools.pairwise(batch.cu_rows.tolist()):
        before = 0
        for row in range(lo + 1, hi):
            if active[row]:
                parent[row] = before
                before = row - lo
    return parent


def _wrong_parent(surface: str) -> Fault:
    verify = SURFACES[surface][0]

    def wrap(inner: Any) -> Faulty:
        def method(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            wrong = replan(batch, predecessor_parents(batch))
            # One fault at a time: positions stay those of the right tree.
            getattr(inner, verify)(ops, pool, replace(wrong, position=batch.position), ws, out, layer)

        return Faulty(inner, **{verify: method})

    return Fault(
        f"wrong_parent.{surface}",
        "verification inherits from the row before in the buffer instead of from the parent",
        surface,
        "verify",
        "defect-classes H2, H3; design-failures 8, 24",
        branches,
        wrap,
    )


def sibling_paths(accepted: Accepted, batch: Batch) -> Accepted:
    """Each accepted path that ends in a row with an active sibling ends in that sibling instead."""
    rows, length = accepted.rows.cpu().clone(), accepted.length.cpu()
    parent, active, cu = batch.parent.cpu(), batch.active.cpu(), batch.cu_rows.tolist()
    for i in range(len(length)):
        n = int(length[i])
        if n == 0:
            continue
        last, lo = int(rows[i, n - 1]), cu[i]
        for row in range(cu[i + 1] - lo):
            if row != last and active[lo + row] and parent[lo + row] == parent[lo + last]:
                rows[i, n - 1] = row
                break
    return Accepted(rows.to(accepted.rows.device), accepted.length)


def _sibling_published(surface: str) -> Fault:
    publish = SURFACES[surface][1]

    def wrap(inner: Any) -> Faulty:
        def method(pool: Any, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
            getattr(inner, publish)(pool, batch, sibling_paths(accepted, batch), ws, layers)

        return Faulty(inner, **{publish: method})

    return Fault(
        f"sibling_published.{surface}",
        "the path that is published ends in a sibling of the accepted row",
        surface,
        "publish",
        "defect-classes H2; design-failures 3, 24",
        has_siblings,
        wrap,
    )


def _swapped_rings(surface: str) -> Fault:
    verify = SURFACES[surface][0]

    def wrap(inner: Any) -> Faulty:
        def method(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            method_ = getattr(inner, verify)
            method_(ops, pool, batch, ws, out, layer)
            method_(rolled(ops), pool, batch, ws, torch.empty_like(out), layer)

        return Faulty(inner, **{verify: method})

    return Fault(
        f"swapped_rings.{surface}",
        "what verification recorded for publication belongs to other rows: two operand rings are swapped",
        surface,
        "publish",
        "design-failures 20; defect-classes D4",
        two_rows,
        wrap,
    )


def two_rows(trees: Any) -> bool:
    """A roll by one row changes something as soon as a request has two rows."""
    return any(t.n > 1 for t in trees)


def rolled(ops: Any) -> Any:
    """The same operands, those of a row rolled by one row; parameters and tables stay."""
    return replace(ops, **{k: v if k in SHARED_OPERANDS else v.roll(1, 0) for k, v in vars(ops).items()})


FAULTS = [
    *(_wrong_parent(s) for s in SURFACES),
    *(_sibling_published(s) for s in SURFACES),
    *(_swapped_rings(s) for s in SURFACES),
]
