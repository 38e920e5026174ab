"""The component audit of one case: everything that is asked of it, in the order in which it can be asked."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from audit.capture import Captured
from audit.cases import Case, CaseSpec
from audit.controls import Outcome, run_controls
from audit.horizon import memory_tokens, root_reach
from audit.judge import Judge, Key
from audit.native import NativeChain
from audit.next_cycle import can_cycle, run_next_cycle
from audit.rotation import rotate_requests
from audit.stage import Stage
from audit.tally import Tallies
from audit.truth import Truth, find_truth

#: One unit in so many is run twice and has its deepest chain decoded in place; every small case is.
REPEAT_EVERY = 8


@dataclass
class CaseResult:
    """What one case showed; plain data, so that worker processes can send it.

    statistics: of an envelope unit. reach: how many derived bounds a change at the root moves the deepest state (None
    if not measured). memory: tokens, see `memory_tokens`. distinct: whether the outputs take more than one value.
    graphs: captures and replays so far, under captured graphs.
    """

    spec: CaseSpec
    tallies: Tallies
    statistics: dict[str, float] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    reach: float | None = None
    memory: tuple[float, float] | None = None
    distinct: dict[str, bool] = field(default_factory=dict)
    inactive_cells: int = 0
    graphs: tuple[int, int] | None = None
    seconds: float = 0.0


def audit_case(backend: Any, spec: CaseSpec, device: torch.device | str = "cpu", *, arm: str = "verify") -> CaseResult:
    """Run every check of the component audit on one case.

    arm: whose errors are the envelope's statistics, the backend's one-token chain ("native") or its tree ("verify").
    Raises InputError when the backend refuses the case.
    """
    started = time.perf_counter()
    case = Case(spec, backend.contract, device)
    stage = Stage(backend, case)
    result = CaseResult(spec, Tallies())
    truth = find_truth(backend, case, stage.surfaces)
    judge = Judge(stage, truth, result.tallies, arm=arm)
    judge.native()
    stage.verify()
    judge.outputs()
    result.distinct = {s: _takes_two_values(stage.out[0][s][case.active]) for s in stage.surfaces}
    _publish_every_path(judge)
    sampled = spec.control or not spec.unit or spec.instance % REPEAT_EVERY == 0
    if sampled:
        judge.repeat(lambda i: case.trees[i].path(case.trees[i].leaves[-1]))
    judge.inputs_at_end()
    stage.reset()
    if sampled:
        _chain_in_place(backend, judge, truth)
    if sampled and can_cycle(case):
        run_next_cycle(backend, judge)
        stage.reset()
    if len(case.trees) > 1:
        rotate_requests(judge)
        stage.reset()
    if "gdn" in stage.surfaces and (spec.regime == "near_one" or spec.control):
        result.reach = root_reach(case, truth)
    if spec.unit:
        result.statistics = judge.statistics.values()
        result.memory = memory_tokens(case)
        result.inactive_cells = sum(int((~t.active).sum()) for t in case.trees)
    if spec.control:
        result.outcomes = run_controls(backend, stage, truth)
    if isinstance(backend, Captured):
        result.graphs = (backend.captures, backend.replays)
    result.seconds = time.perf_counter() - started
    return result


def _takes_two_values(x: torch.Tensor) -> bool:
    return bool((x != x.flatten()[0]).any())


def _publish_every_path(judge: Judge) -> None:
    """Each active row of each request is an accepted end once; the empty path, where declared; each layer alone."""
    trees = judge.case.trees
    for round_ in range(max(len(t.active_rows) for t in trees)):
        _publish(judge, [t.path(t.active_rows[round_ % len(t.active_rows)]) for t in trees])
    if judge.contract.empty_path:
        _publish(judge, [() if i == 0 else t.path(t.leaves[0]) for i, t in enumerate(trees)])
    for layer in range(judge.case.dims.layers) if judge.case.dims.layers > 1 else ():
        judge.stage.rewind()
        judge.stage.publish([t.path(t.leaves[-1]) for t in trees], [layer])
        judge.other_layers([layer])


def _publish(judge: Judge, paths: list[tuple[int, ...]]) -> None:
    judge.stage.rewind()
    judge.stage.publish(paths)
    judge.published(paths)


def _chain_in_place(backend: Any, judge: Judge, truth: dict[Key, Truth]) -> None:
    """The deepest path decoded in one go, nothing reloaded in between, gives what the walk gave row by row."""
    case = judge.case
    chain = NativeChain(backend, case, judge.stage.surfaces)
    for request, layer in truth:
        tree = case.trees[request]
        path = tree.path(max(tree.leaves, key=lambda row: int(tree.depth[row])))
        judge.same_chain(chain.chain(request, layer, path), path, request, layer)
