"""Faults of the accepted path: publication is told, or reads, another path than the one that was accepted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from faults.catalogue import Fault, Knob, Wrap
from faults.topology import requests_of
from faults.wrap import on_publish
from lumotree.backends.batch import replan
from lumotree.backends.protocol import SURFACES, Accepted, Batch

Paths = list[list[int]]


def paths_of(accepted: Accepted) -> Paths:
    """The accepted rows of each request, local numbers."""
    return [row[:n] for row, n in zip(accepted.rows.tolist(), accepted.length.tolist(), strict=True)]


def accepted_as(paths: Sequence[Sequence[int]], like: Accepted) -> Accepted:
    """Paths in tensors of the shape and device of `like`, each cut to the room there is."""
    width = like.rows.shape[1]
    rows = torch.full_like(like.rows, -1)
    for i, path in enumerate(paths):
        cut = list(path)[:width]
        rows[i, : len(cut)] = torch.tensor(cut, dtype=rows.dtype, device=rows.device)
    lengths = [min(len(p), width) for p in paths]
    return Accepted(rows, torch.tensor(lengths, dtype=like.length.dtype, device=like.length.device))


def linked(batch: Batch, paths: Sequence[Sequence[int]]) -> Batch:
    """The batch with parents under which each path, ascending and from row 0, is a path of the tree.

    A backend that checks paths would refuse a wrong one; real kernels do not look.
    """
    parent = batch.parent.cpu().clone()
    for (lo, _), path in zip(requests_of(batch), paths, strict=True):
        for before, row in itertools.pairwise(path):
            parent[lo + row] = before
    if torch.equal(parent, batch.parent.cpu()):
        return batch
    return replace(replan(batch, parent), position=batch.position)


def ancestors(batch: Batch, request: int, row: int) -> list[int]:
    """Path from the root to a row of a request, local numbers."""
    lo = int(batch.cu_rows[request])
    path = [row]
    while int(batch.parent[lo + path[0]]) >= 0:
        path.insert(0, int(batch.parent[lo + path[0]]))
    return path


def active_rows(batch: Batch, request: int) -> list[int]:
    """Active rows of a request, local numbers."""
    lo, hi = batch.cu_rows.tolist()[request : request + 2]
    return [row for row in range(hi - lo) if batch.active[lo + row]]


def children(batch: Batch, request: int, row: int) -> list[int]:
    """Active children of a row of a request, local numbers."""
    lo = int(batch.cu_rows[request])
    return [r for r in active_rows(batch, request) if int(batch.parent[lo + r]) == row]


#: request, its accepted path (not empty), batch, all paths -> the wrong path.
Change = Callable[[int, list[int], Batch, Paths], list[int]]


def changed(change: Change) -> Callable[[Accepted, Batch], tuple[Accepted, Batch]]:
    """The change of every live request's path that is not empty."""

    def apply(accepted: Accepted, batch: Batch) -> tuple[Accepted, Batch]:
        paths = paths_of(accepted)
        wrong = [change(i, p, batch, paths) if p and int(batch.state_slot[i]) >= 0 else p for i, p in enumerate(paths)]
        new = accepted_as(wrong, accepted)
        return new, linked(batch, paths_of(new))

    return apply


def to_sibling(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
    """Ends in a sibling of its last row."""
    if len(path) < 2:
        return path
    others = [r for r in children(batch, i, path[-2]) if r != path[-1]]
    return [*path[:-1], *others[:1]] if others else path


def by_depth(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
    """Ends in the row numbered like its length less one: right for a chain only."""
    row = len(path) - 1
    return ancestors(batch, i, row) if row in active_rows(batch, i) else path


def dense(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
    """As many active rows, from the first on in buffer order."""
    return active_rows(batch, i)[: len(path)]


def to_last_row(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
    """Ends in the last active row of the buffer, whatever was accepted."""
    return ancestors(batch, i, active_rows(batch, i)[-1])


def one_short(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
    """Without its last row."""
    return path[:-1] or path


def short_from(least: float) -> Change:
    """Without its last row, if it has so many rows."""
    return lambda i, path, batch, paths: path[:-1] if len(path) >= least else path


def one_long(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
    """With a child of its last row, which was rejected."""
    return [*path, *children(batch, i, path[-1])[:1]]


def root_alone(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
    """The root alone."""
    return path[:1]


def first_children_only(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
    """As long, along first children."""
    found = [0]
    while len(found) < len(path) and (below := children(batch, i, found[-1])):
        found.append(below[0])
    return found


def parent_skipped(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
    """Without the row before the last."""
    return [*path[:-2], path[-1]] if len(path) > 2 else path


def neighbours_length(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
    """Cut to the length that another request accepted."""
    other = len(paths[(i + 1) % len(paths)])
    return path[: max(other, 1)]


def capped(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
    """Cut to three rows: a loop over the convolution's width."""
    return path[:3]


#: kind -> (statement, classes, needs, change, surfaces).
_PATHS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Change]] = {
    "sibling_published": (
        "the path that is published ends in a sibling of the accepted row",
        ("H2", "DF3", "DF24"), ("siblings",), to_sibling,
    ),
    "commit_by_depth": (
        "publication takes the accepted length for the number of the accepted row",
        ("H2", "A4", "DF24"), ("branch",), by_depth,
    ),
    "dense_prefix": (
        "publication takes as many rows as were accepted from the front of the buffer",
        ("H1", "H6"), ("branch",), dense,
    ),
    "commit_last_row": (
        "publication takes the last row of the buffer, rejected ones included",
        ("A13", "G3", "C4", "F4"), ("depth>=1",), to_last_row,
    ),
    "one_short": (
        "the last accepted row is not published",
        ("C9", "DF6", "M6"), ("depth>=1",), one_short,
    ),
    "one_long": (
        "one rejected row is published behind the accepted ones",
        ("C4", "Q3", "DF9"), ("depth>=1",), one_long,
    ),
    "root_alone": (
        "only the root is published, whatever was accepted",
        ("A3", "B4", "DF26"), ("depth>=1",), root_alone,
    ),
    "spine_published": (
        "publication follows first children instead of the accepted rows",
        ("DF23", "DF24", "H8"), ("siblings",), first_children_only,
    ),
    "parent_skipped": (
        "the row before the last accepted one is left out of the path",
        ("H13", "DF24"), ("depth>=2",), parent_skipped,
    ),
    "accept_from_other_row": (
        "publication reads the accepted length of another request",
        ("C1", "C3", "A2", "A6"), ("requests>=2", "depth>=1"), neighbours_length,
    ),
    "three_rows_at_most": (
        "no more than three accepted rows are published",
        ("B1", "B4", "F6"), ("depth>=3",), capped,
    ),
}  # fmt: skip


#: Surfaces whose state behind a row may be kept as a whole -> why one kept so hides what happened to a path's middle.
_WHOLE = {
    "gdn": "a bank has the state behind every row and copies that of the last accepted one, which is the right row",
    "conv": "a bank has the history behind every row and copies that of the last accepted one, which is the right row",
}


def _path(kind: str, surface: str) -> Fault:
    statement, classes, needs, change = _PATHS[kind]
    wrap = on_publish(surface, accepted=changed(change))
    unread = _WHOLE.get(surface, "") if kind == "parent_skipped" else ""
    return Fault(f"{kind}.{surface}", statement, surface, "publish", classes, needs, wrap, unread=unread)


def _short_from(surface: str) -> Fault:
    def at(least: float) -> Wrap:
        return on_publish(surface, accepted=changed(short_from(least)))

    return Fault(f"short_from.{surface}", "the last row of a path of so many rows or more is not published", surface,
                 "publish", ("C9", "DF6", "M6"), ("depth>=2",), at(3), knob=Knob((3, 4, 5, 6), "rows", at))  # fmt: skip


FAULTS = [*(_path(kind, s) for kind in _PATHS for s in SURFACES), *(_short_from(s) for s in SURFACES)]
