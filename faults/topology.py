"""Faults of topology: a row inherits from the wrong row."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from faults.catalogue import Fault
from faults.wrap import Faulty, on_verify
from lumotree.backends.batch import replan
from lumotree.backends.protocol import SHARED_OPERANDS, SURFACES, Batch


def relinked(change: Callable[[Batch], Tensor]) -> Callable[[Batch], Batch]:
    """The batch under other parents; positions stay those of the right tree: one fault at a time."""
    return lambda batch: replace(replan(batch, change(batch)), position=batch.position)


def requests_of(batch: Batch) -> list[tuple[int, int]]:
    """First row and row behind the last of each request."""
    return list(itertools.pairwise(batch.cu_rows.tolist()))


def predecessor_parents(batch: Batch) -> Tensor:
    """Parents as a chain in buffer order would have them: the active row before, within each request."""
    parent, active = batch.parent.cpu().clone(), batch.active.cpu()
    for lo, hi in requests_of(batch):
        before = 0
        for row in range(lo + 1, hi):
            if active[row]:
                parent[row] = before
                before = row - lo
    return parent


def grandparents(batch: Batch) -> Tensor:
    """Each row's grandparent where it has one."""
    parent = batch.parent.cpu().tolist()
    found = list(parent)
    for lo, hi in requests_of(batch):
        for row in range(lo, hi):
            if parent[row] > 0:
                found[row] = parent[lo + parent[row]]
    return torch.tensor(found, dtype=torch.int32)


def roots(batch: Batch) -> Tensor:
    """Every row a child of its root."""
    return torch.where(batch.parent < 0, batch.parent, torch.zeros_like(batch.parent)).cpu()


def elder_siblings(batch: Batch) -> Tensor:
    """Each active row's nearest active sibling in front of it, its parent where it has none."""
    parent, active = batch.parent.cpu().tolist(), batch.active.tolist()
    found = list(parent)
    for lo, hi in requests_of(batch):
        last: dict[int, int] = {}
        for row in range(lo, hi):
            if active[row]:
                found[row] = last.get(parent[row], parent[row])
                last[parent[row]] = row - lo
    return torch.tensor(found, dtype=torch.int32)


def first_children(batch: Batch) -> Tensor:
    """Grandchildren of the wrong branch: a row whose parent has an elder sibling hangs off the eldest."""
    parent, active = batch.parent.cpu().tolist(), batch.active.tolist()
    found = list(parent)
    for lo, hi in requests_of(batch):
        eldest: dict[int, int] = {}
        for row in range(lo, hi):
            if active[row]:
                eldest.setdefault(parent[row], row - lo)
        for row in range(lo, hi):
            if active[row] and parent[row] > 0:
                found[row] = eldest[parent[lo + parent[row]]]
    return torch.tensor(found, dtype=torch.int32)


def other_request_parents(batch: Batch) -> Tensor:
    """Parents of the last request of the same size and activity; one's own where there is none."""
    parent, active = batch.parent.cpu().clone(), batch.active.cpu()
    spans = requests_of(batch)
    for lo, hi in spans:
        for a, b in spans:
            if b - a == hi - lo and torch.equal(active[a:b], active[lo:hi]):
                parent[lo:hi] = batch.parent.cpu()[a:b]
    return parent


#: kind -> (statement, classes, needs, parents).
_PARENTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Batch], Tensor]]] = {
    "wrong_parent": (
        "verification inherits from the row before in the buffer instead of from the parent",
        ("H2", "H3", "DF8", "DF24"), ("branch",), predecessor_parents,
    ),
    "grandparent": (
        "verification inherits from the grandparent: the parent itself is skipped",
        ("DF7", "DF13", "H6"), ("depth>=2",), grandparents,
    ),
    "flat_tree": (
        "verification takes every row for a child of the root",
        ("H14", "DF12"), ("depth>=2",), roots,
    ),
    "elder_sibling": (
        "verification inherits from the elder sibling: a rejected branch is seen",
        ("H6", "H8", "DF3", "DF16"), ("siblings",), elder_siblings,
    ),
    "first_child": (
        "a row inherits from its parent's eldest sibling: only first children continue",
        ("H2", "DF8", "DF23", "DF24"), ("siblings", "depth>=2"), first_children,
    ),
    "other_request_tree": (
        "verification uses the tree of another request with as many rows",
        ("C7", "G5", "DF20"), ("alike",), other_request_parents,
    ),
}  # fmt: skip


def _parents(kind: str, surface: str) -> Fault:
    statement, classes, needs, change = _PARENTS[kind]
    wrap = on_verify(surface, batch=relinked(change))
    return Fault(f"{kind}.{surface}", statement, surface, "verify", classes, needs, wrap)


def rolled(ops: Any) -> Any:
    """The same operands, those of a row rolled by one row; parameters and tables stay."""
    return replace(ops, **{k: v if k in SHARED_OPERANDS else v.roll(1, 0) for k, v in vars(ops).items()})


def _swapped_rings(surface: str) -> Fault:
    verify = SURFACES[surface][0]

    def wrap(inner: Any) -> Faulty:
        faulty = Faulty(inner)

        def method(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            method_, wrong = getattr(inner, verify), rolled(ops)
            method_(ops, pool, batch, ws, out, layer)
            faulty.note(f"{verify}.recorded", ops, wrong)
            method_(wrong, pool, batch, ws, torch.empty_like(out), layer)

        setattr(faulty, verify, method)
        return faulty

    return Fault(
        f"swapped_rings.{surface}",
        "what verification recorded for publication belongs to other rows: two operand rings are swapped",
        surface,
        "publish",
        ("D4", "DF20", "DF15"),
        ("rows>=2",),
        wrap,
    )


FAULTS = [*(_parents(kind, s) for kind in _PARENTS for s in SURFACES), *(_swapped_rings(s) for s in SURFACES)]
