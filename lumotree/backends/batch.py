"""Batches from trees: the one place where topology becomes device tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lumotree.backends.protocol import Accepted, Batch, Plan
from lumotree.errors import ContractError, TreeError
from lumotree.tree import Tree
from lumotree.tree_plan import PathPlan, PlanLevels


def _int32(values: Sequence[int] | np.ndarray, device: torch.device | str) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int32)).to(device)


def _device_plan(
    trees: Sequence[Tree | None], offsets: Sequence[int], total: int, levels: PlanLevels, device: str
) -> Plan:
    """Merge the plans of all requests level by level (shapes depend on `total` alone)."""
    plans = [(i, t.plan(levels)) for i, t in enumerate(trees) if t is not None]
    bound = PathPlan.max_levels_bound(max([t.n for t in trees if t is not None], default=1))
    rows: list[int] = []
    ptr, source, request, level_ptr = [0], [], [], [0]
    for level in range(bound):
        for i, plan in plans:
            for path in plan.levels[level] if level < len(plan.levels) else ():
                rows += [offsets[i] + r for r in path.rows]
                ptr.append(len(rows))
                source.append(offsets[i] + path.source if path.source >= 0 else -1)
                request.append(i)
        level_ptr.append(len(source))
    cut_index = np.full(total, -1)
    cuts = [offsets[i] + r for i, plan in plans for r in plan.cuts]
    cut_index[cuts] = np.arange(len(cuts))
    width = max(total, len(rows))
    pad = [-1] * (width - len(source))
    return Plan(
        _int32(rows + [-1] * (width - len(rows)), device),
        _int32(ptr + [len(rows)] * (width + 1 - len(ptr)), device),
        _int32(source + pad, device),
        _int32(request + pad, device),
        _int32(level_ptr, device),
        _int32(cut_index, device),
    )


def build_batch(
    trees: Sequence[Tree | None],
    *,
    state_slots: Sequence[int],
    page_table: Tensor,
    page_size: int,
    device: torch.device | str = "cpu",
    levels: PlanLevels = "many",
) -> Batch:
    """One verification of `len(trees)` requests.

    A request's committed length is its tree's `prefix_len`, the candidates' flat KV slots are its tree's `slots`.
    None is a padding request: state slot -1 and no rows. page_table: int32 `[B, max_pages]`, unused entries -1.

    Raises ContractError for duplicate live state slots, a page table too short for prefix and tree, or two requests
    that share a candidate slot.
    """
    dev = str(device)
    if len(state_slots) != len(trees) or page_table.shape[0] != len(trees):
        raise ContractError(
            f"batch: expected one state slot and one page-table row a request, got {len(trees)} trees, "
            f"{len(state_slots)} slots, page_table rows={page_table.shape[0]}"
        )
    _check_slots(trees, state_slots)
    sizes = [0 if t is None else t.n for t in trees]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    live = [t for t in trees if t is not None]
    _check_pages(trees, page_table, page_size)

    def concat(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([getattr(t, name) for t in live]).astype(dtype) if live else np.zeros(0, dtype)

    return Batch(
        cu_rows=_int32(offsets, dev),
        parent=_int32(concat("parents", np.int32), dev),
        active=torch.as_tensor(concat("active", np.bool_)).to(dev),
        position=_int32(concat("position", np.int32), dev),
        row_request=_int32(np.repeat(np.arange(len(trees)), sizes), dev),
        state_slot=_int32([s if t is not None else -1 for s, t in zip(state_slots, trees, strict=True)], dev),
        prefix_len=_int32([0 if t is None else t.prefix_len for t in trees], dev),
        page_table=page_table.to(torch.int32).to(dev),
        page_size=page_size,
        row_slot=_int32(concat("slots", np.int32), dev),
        plan=_device_plan(trees, [int(o) for o in offsets], int(offsets[-1]), levels, dev),
    )


def _check_slots(trees: Sequence[Tree | None], state_slots: Sequence[int]) -> None:
    seen: dict[int, int] = {}
    kv: dict[int, int] = {}
    for i, (tree, slot) in enumerate(zip(trees, state_slots, strict=True)):
        if tree is None:
            continue
        if slot < 0:
            raise ContractError(f"batch: request {i} has a tree but state_slot={slot}; allowed: >= 0")
        if slot in seen:
            raise ContractError(f"batch: requests {seen[slot]} and {i} share state_slot={slot}; each needs its own")
        seen[slot] = i
        for flat in tree.slots.tolist():
            if kv.setdefault(flat, i) != i:
                raise ContractError(f"batch: requests {kv[flat]} and {i} share candidate KV slot {flat}")


def _check_pages(trees: Sequence[Tree | None], page_table: Tensor, page_size: int) -> None:
    table = page_table.cpu()
    for i, tree in enumerate(trees):
        if tree is None:
            continue
        need = -(-(tree.prefix_len + tree.max_depth + 1) // page_size)
        have = int((table[i] >= 0).sum())
        if have < need:
            raise ContractError(
                f"batch: request {i} needs {need} pages of {page_size} for prefix_len={tree.prefix_len} and "
                f"depth {tree.max_depth}, got {have} in its page_table row"
            )


def replan(batch: Batch, parent: Tensor) -> Batch:
    """The same batch under another parent array: path plan and positions follow it.

    For faults that lie about topology. Raises TreeError when the new parents are no valid trees.
    """
    cu = batch.cu_rows.tolist()
    parents, active = parent.cpu().numpy(), batch.active.cpu().numpy()
    prefix = batch.prefix_len.tolist()
    trees: list[Tree | None] = [
        Tree.make(parents[lo:hi], active=active[lo:hi], prefix_len=prefix[i]) if hi > lo else None
        for i, (lo, hi) in enumerate(itertools.pairwise(cu))
    ]
    if len(parents) != batch.rows:
        raise TreeError(f"replan: expected {batch.rows} parents, got {len(parents)}")
    device = str(batch.parent.device)
    position = np.concatenate([t.position for t in trees if t is not None]) if batch.rows else np.zeros(0)
    return replace(
        batch,
        parent=_int32(parents, device),
        position=_int32(position, device),
        plan=_device_plan(trees, cu[:-1], batch.rows, "many", device),
    )


def accepted_paths(
    paths: Sequence[Sequence[int]], device: torch.device | str = "cpu", longest: int | None = None
) -> Accepted:
    """Accepted rows of each request (local row numbers), padded with -1 to `longest`."""
    width = max([len(p) for p in paths] + [1]) if longest is None else longest
    for i, path in enumerate(paths):
        if len(path) > width:
            raise ContractError(f"accepted: request {i} accepts {len(path)} rows, allowed: at most {width}")
    rows = np.full((len(paths), width), -1)
    for i, path in enumerate(paths):
        rows[i, : len(path)] = path
    return Accepted(_int32(rows, str(device)), _int32([len(p) for p in paths], str(device)))


def flat_slots(page_table: Tensor, page_size: int, request: int, positions: Sequence[int] | Tensor) -> Tensor:
    """Flat KV slots, int64, of committed positions of one request."""
    pos = torch.as_tensor(positions, dtype=torch.int64, device=page_table.device)
    page = page_table[request, torch.div(pos, page_size, rounding_mode="floor")].to(torch.int64)
    return page * page_size + pos % page_size
