"""A second cycle on the workspace of the first: nothing of the first may be remembered but what it published.

Engines verify cycle after cycle with one workspace, in the same tensors. A kernel that keeps the first cycle's
metadata, committed state, prepared operands or a pending publication passes every test that starts afresh.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from audit.cases import Case
from audit.guard import Snapshot, poison_
from audit.judge import Judge
from audit.native import rows_of
from audit.operands import REGIMES, Source
from audit.stage import Stage
from audit.tally import Tallies, fold
from audit.truth import Truth, find_truth
from lumotree.backends.protocol import SHARED_OPERANDS
from lumotree.state import KVCache, Pools
from lumotree.tree import Tree

Truths = dict[tuple[int, int], Truth]


def can_cycle(case: Case) -> bool:
    """Whether a second cycle fits: candidates away from the committed slots, and operands that are not exact-grid
    (their grid gets finer with every row)."""
    return case.spec.placement == "scattered" and case.spec.regime != "exact"


def run_next_cycle(backend: Any, judge: Judge) -> None:
    """Verify and publish the case, then, without rewinding, other trees and operands behind what was accepted."""
    stage, case = judge.stage, judge.case
    paths = [_accepted(tree) for tree in case.trees]
    stage.verify()
    stage.publish(paths)
    trees = [_next_tree(t, len(path), stage.limits.path) for t, path in zip(case.trees, paths, strict=True)]
    _draw_operands(case, trees)
    batch = _next_batch(case, trees)
    second = _with(case, trees, batch, case.pools)
    after = _with(case, trees, batch, _pools_after(case, stage, judge.truth, paths))
    if judge.tallies.failures() and not _finite(after, stage.surfaces):
        return  # the chain of the first cycle has failed, and nothing can be bounded behind a state that is no number
    truth = find_truth(backend, after, stage.surfaces)
    part = Tallies()
    again = Judge(_stage_of(stage, second), truth, part)
    _verify(again)
    ends = [tree.path(tree.leaves[-1]) for tree in trees]
    again.stage.publish(ends)
    again.published_states(ends)
    fold(part, judge.tallies, "cycle", judge.contract)


def _accepted(tree: Tree) -> tuple[int, ...]:
    """The deepest path, short enough to leave room for a child behind it."""
    deepest = tree.path(max(tree.leaves, key=lambda row: int(tree.depth[row])))
    return deepest[: max(1, tree.n - 1)]


def _next_tree(tree: Tree, accepted: int, longest: int) -> Tree:
    """Another shape of the same size behind the accepted rows: pairs below the root where they fit, else a star.

    longest: rows of a path that the workspace was allocated for.
    """
    deep = accepted + 2 <= tree.n and longest >= 3
    parents = [-1]
    for row in range(1, tree.n):
        before = row - 1 if deep and row % 2 == 0 and tree.active[row - 1] else 0
        parents.append(before)
    slots = tree.slots[::-1].copy()
    prefix = tree.prefix_len + accepted
    return Tree.make(parents, active=tree.active, slots=slots, num_slots=tree.num_slots, prefix_len=prefix)


def _draw_operands(case: Case, trees: list[Tree]) -> None:
    """New per-row operands in the same tensors; parameters and tables stay."""
    positions = case.attention[0].cos.shape[0]
    for layer in range(case.dims.layers):
        source = Source((*case.spec.entropy, 7, layer))
        drawn = REGIMES[case.spec.regime](source, case.dims, trees, case.spec.regime, positions)
        for old, new in ((case.gdn, drawn.gdn), (case.conv, drawn.conv), (case.attention, drawn.attention)):
            for name, value in vars(old[layer]).items():
                if name not in SHARED_OPERANDS:
                    value.copy_(getattr(new, name))


def _next_batch(case: Case, trees: list[Tree]) -> Any:
    """Metadata of the second cycle: new tensors where the workspace has slack, else written into the first one's.

    Engines do either; one shows a kernel that kept the first batch, the other one that cached by address.
    """
    new = _with(case, trees, case.batch, case.pools).metadata()
    if case.spec.slack:
        return new
    for name, value in vars(case.batch).items():
        if isinstance(value, torch.Tensor):
            value.copy_(getattr(new, name))
    for name, value in vars(case.batch.plan).items():
        value.copy_(getattr(new.plan, name))
    return case.batch


def _with(case: Case, trees: list[Tree], batch: Any, pools: Pools) -> Case:
    other = copy.copy(case)
    other.trees, other.batch, other.pools = trees, batch, pools
    return other


def _pools_after(case: Case, stage: Stage, truth: Truths, paths: Sequence[Sequence[int]]) -> Pools:
    """Pools as one-token decoding of the accepted paths would have left them."""
    saved = stage.before
    pools = Pools(
        saved.saved("recurrent").clone(),
        saved.saved("conv").clone(),
        KVCache(saved.saved("cache.k").clone(), saved.saved("cache.v").clone()),
    )
    exported = _exported(stage) if case.contract.claim("gdn") == "algebra" else {}
    for (request, layer), t in truth.items():
        path, slot = paths[request], case.state_slots[request]
        prefix = case.trees[request].prefix_len
        where = case.committed(request, range(prefix, prefix + len(path)))
        recurrent, conv, k, v = (rows_of(x, path) for x in (t.native.recurrent, t.native.conv, t.native.k, t.native.v))
        if recurrent:
            own = exported.get((request, layer))
            pools.recurrent[layer, slot] = recurrent[-1] if own is None else own
        if conv:
            pools.conv[layer, slot] = conv[-1]
        if k:
            pools.cache.k[layer, where], pools.cache.v[layer, where] = torch.stack(k), torch.stack(v)
    return pools


def _finite(case: Case, surfaces: Sequence[str]) -> bool:
    """Whether every committed state, window, key and value of the surfaces is a number."""
    pools, held = case.pools, []
    if "gdn" in surfaces:
        held.append(pools.recurrent[:, case.state_slots])
    if "conv" in surfaces:
        held.append(pools.conv[:, case.state_slots])
    for request, tree in enumerate(case.trees) if "attention" in surfaces else ():
        where = case.committed(request, range(tree.prefix_len))
        held += [pools.cache.k[:, where], pools.cache.v[:, where]]
    return all(bool(torch.isfinite(x).all()) for x in held)


def _exported(stage: Stage) -> dict[tuple[int, int], torch.Tensor]:
    """States that an algebra backend published (within its bounds), in pool layout; pools and workspace stay as they
    were, so that what is deferred stays deferred."""
    case, kept = stage.case, (Snapshot(stage.case.pools), Snapshot(stage.ws))
    requests, layers = range(len(case.trees)), range(case.dims.layers)
    states = {(i, layer): stage.export(i, layer).recurrent for i in requests for layer in layers}
    for snapshot in kept:
        snapshot.restore()
    return {k: s.mT if case.contract.layout == "KV" else s for k, s in states.items()}


def _stage_of(stage: Stage, case: Case) -> Stage:
    other = copy.copy(stage)
    other.case = case
    return other


def _verify(judge: Judge) -> None:
    stage, case = judge.stage, judge.case
    for layer, outs in enumerate(stage.out):
        for surface in stage.surfaces:
            stage.run_verify(surface, layer, stage.operands(surface, layer), case.batch, poison_(outs[surface]))
            for request in range(len(case.trees)):
                lo, hi = case.offsets[request : request + 2]
                judge.outputs_of(surface, outs[surface][lo:hi], request, layer)
