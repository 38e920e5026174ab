"""Lanes: which rows are computed in turn from which state, read off a batch's path plan or an accepted path.

This is the host side of the torch verifier; it copies the small index tensors of a batch to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lumotree.backends.protocol import Accepted, Batch, Limits
from lumotree.errors import ContractError, PathError


@dataclass(frozen=True)
class Lane:
    """`rows` (global numbers), each the parent of the next; `source` = parent of the first, -1 = committed state."""

    rows: tuple[int, ...]
    source: int
    request: int


def plan_levels(batch: Batch) -> list[list[Lane]]:
    """Lanes of each level of the batch's plan, longest first; padding requests and empty levels left out."""
    slots = batch.state_slot.tolist()
    rows, ptr = batch.plan.path_rows.tolist(), batch.plan.path_ptr.tolist()
    source, request = batch.plan.path_source.tolist(), batch.plan.path_request.tolist()
    level_ptr = batch.plan.level_ptr.tolist()
    levels = (
        [Lane(tuple(rows[ptr[p] : ptr[p + 1]]), source[p], request[p]) for p in range(lo, hi) if slots[request[p]] >= 0]
        for lo, hi in pairwise(level_ptr)
    )
    return [longest_first(level) for level in levels if level]


def longest_first(lanes: Sequence[Lane]) -> list[Lane]:
    """Stable order in which the lanes still running are always a prefix of the list."""
    return sorted(lanes, key=lambda lane: -len(lane.rows))


def steps(lanes: Sequence[Lane]) -> list[list[int]]:
    """Rows of each step of lanes sorted longest first; step j lists the rows of the lanes that reach it."""
    longest = len(lanes[0].rows) if lanes else 0
    return [[lane.rows[j] for lane in lanes if len(lane.rows) > j] for j in range(longest)]


def alike(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Split lanes sorted longest first into runs in which none is shorter than half the longest.

    A run's tile then stays well filled until its last step.
    """
    runs: list[list[Lane]] = []
    for lane in lanes:
        if runs and 2 * len(lane.rows) >= len(runs[-1][0].rows):
            runs[-1].append(lane)
        else:
            runs.append([lane])
    return runs


def packed(lanes: Sequence[Lane]) -> tuple[list[int], list[Lane]]:
    """All rows of some lanes, lane by lane, and the same lanes with rows counted in that list."""
    rows = [row for lane in lanes for row in lane.rows]
    count = iter(range(len(rows)))
    return rows, [Lane(tuple(next(count) for _ in lane.rows), lane.source, lane.request) for lane in lanes]


def root_lanes(batch: Batch) -> list[Lane]:
    """One lane per live request holding its row 0: a one-token step."""
    cu, slots = batch.cu_rows.tolist(), batch.state_slot.tolist()
    return [Lane((cu[i],), -1, i) for i, slot in enumerate(slots) if slot >= 0 and cu[i + 1] > cu[i]]


def ancestor_rows(batch: Batch) -> dict[int, list[int]]:
    """Path of each active row of a live request, from its root to itself, in global row numbers."""
    slots = batch.state_slot.tolist()
    cu, parent, active = batch.cu_rows.tolist(), batch.parent.tolist(), batch.active.tolist()
    paths: dict[int, list[int]] = {}
    for i, slot in enumerate(slots):
        lo = cu[i]
        for row in range(lo, cu[i + 1]):
            if active[row] and slot >= 0:
                paths[row] = [*(paths[lo + parent[row]] if parent[row] >= 0 else ()), row]
    return paths


def accepted_lanes(batch: Batch, accepted: Accepted, limits: Limits, *, empty_path: bool) -> list[Lane]:
    """Accepted path of each live request that accepts anything; padding requests are skipped unread.

    Raises PathError, naming request, step and value, for a path that is too long, empty where that is not declared,
    does not start at row 0, is not parent-linked, or has a row that is out of range or inactive.
    """
    if len(accepted.length) != batch.requests or len(accepted.rows) != batch.requests:
        raise PathError(
            f"accepted: expected {batch.requests} requests, got {len(accepted.length)} lengths and "
            f"{len(accepted.rows)} rows of paths"
        )
    rows, length, slots = accepted.rows.tolist(), accepted.length.tolist(), batch.state_slot.tolist()
    cu, parent, active = batch.cu_rows.tolist(), batch.parent.tolist(), batch.active.tolist()
    width = min(accepted.rows.shape[1], limits.path)
    lanes = []
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        if not 0 <= length[i] <= width:
            raise PathError(f"accepted: request {i} has length={length[i]}; allowed: 0..{width}")
        if length[i] == 0 and not empty_path:
            raise PathError(f"accepted: request {i} has length=0, and this contract does not declare empty_path")
        lo, hi = cu[i], cu[i + 1]
        _check_path(i, rows[i][: length[i]], parent[lo:hi], active[lo:hi])
        if length[i]:
            lanes.append(Lane(tuple(lo + r for r in rows[i][: length[i]]), -1, i))
    return longest_first(lanes)


def _check_path(request: int, path: Sequence[int], parent: Sequence[int], active: Sequence[bool]) -> None:
    for step, row in enumerate(path):
        where = f"accepted: request {request}, step {step}: row={row}"
        if not 0 <= row < len(parent):
            raise PathError(f"{where} is out of range; allowed: 0..{len(parent) - 1}")
        if not active[row]:
            raise PathError(f"{where} is inactive; only active rows can be accepted")
        if step == 0 and row != 0:
            raise PathError(f"{where}, expected the root, row 0")
        if step and parent[row] != path[step - 1]:
            raise PathError(f"{where} has parent {parent[row]}, expected the row before it, {path[step - 1]}")


def check_room(batch: Batch, limits: Limits, layer: int) -> None:
    """Raise ContractError when a batch or a layer is beyond what the workspace was allocated for."""
    if batch.rows > limits.rows or batch.requests > limits.requests:
        raise ContractError(
            f"batch: {batch.rows} rows and {batch.requests} requests; the workspace holds rows={limits.rows}, "
            f"requests={limits.requests}"
        )
    if not 0 <= layer < limits.layers:
        raise ContractError(f"layer: expected 0..{limits.layers - 1}, got layer={layer}")
