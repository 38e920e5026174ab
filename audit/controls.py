"""Positive controls: known faults injected into the run's own cases, judged by the run's own code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from audit.judge import Judge, Key
from audit.report import Control
from audit.scene import scene_of
from audit.stage import Stage
from audit.tally import Tallies, to_check
from audit.truth import Truth
from faults import CONTROLS, Fault
from lumotree.errors import InputError
from lumotree.tree import Tree


@dataclass(frozen=True)
class Outcome:
    """One fault on one case: what saw it (None: nothing did) and how far over the derived bound it was (infinity:
    within every bound, only a bitwise check sees it)."""

    fault: str
    case: str
    by: str | None
    ratio: float | None


def control_paths(trees: Sequence[Tree]) -> list[list[tuple[int, ...]]]:
    """Rounds of accepted paths on which controls publish: the deepest path, one that ends among siblings, the root."""
    rounds = [[t.path(max(t.leaves, key=lambda row: int(t.depth[row]))) for t in trees]]
    rounds.append([t.path(_with_sibling(t)) for t in trees])
    rounds.append([(0,) for _ in trees])
    return [r for i, r in enumerate(rounds) if r not in rounds[:i]]


def _with_sibling(tree: Tree) -> int:
    for row in reversed(tree.active_rows):
        if row and len(tree.active_children(int(tree.parents[row]))) > 1:
            return row
    return 0


def run_controls(backend: Any, stage: Stage, truth: dict[Key, Truth]) -> list[Outcome]:
    """Every control that this case reaches, on the stage's case. Pools are left as they were."""
    scene = scene_of(stage.case)
    reached = [f for f in CONTROLS.values() if f.surface in stage.publishes and f.reaches(scene)]
    outcomes = []
    for fault in reached:
        stage.reset()
        outcomes.append(_inject(backend, fault, stage, truth))
    stage.reset()
    return outcomes


def _inject(backend: Any, fault: Fault, clean: Stage, truth: dict[Key, Truth]) -> Outcome:
    case, contract = clean.case, backend.contract
    tallies = Tallies()
    try:
        stage = Stage(fault.wrap(backend), case, [fault.surface])
        judge = Judge(stage, truth, tallies)
        stage.verify()
        judge.outputs()
        for paths in control_paths(case.trees):
            stage.rewind()
            stage.publish(paths)
            judge.published(paths)
    except InputError as refusal:
        return Outcome(fault.id, case.spec.id, f"refused: {refusal}", None)
    seen = [t for t in tallies.failures(fault.surface) if to_check(t, contract).status == "fail"]
    worst = [t.worst for t in tallies.values() if t.check.endswith(".derived") and t.worst is not None]
    if not seen:
        return Outcome(fault.id, case.spec.id, None, None)
    ratio = max(worst, default=0.0)
    return Outcome(fault.id, case.spec.id, seen[0].check, ratio if ratio > 1 else float("inf"))


def summarise(outcomes: Iterable[Outcome], surfaces: Sequence[str]) -> list[Control]:
    """One line per fault of the covered surfaces; detected means that every case which reaches the fault saw it."""
    by_fault: dict[str, list[Outcome]] = {f.id: [] for f in CONTROLS.values() if f.surface in surfaces}
    for outcome in outcomes:
        by_fault[outcome.fault].append(outcome)
    controls = []
    for fault, seen in by_fault.items():
        expect = CONTROLS[fault].expect
        hits = [o for o in seen if o.by is not None]
        detected = bool(hits) and (len(hits) == len(seen) or expect == "harmless")
        ratios = [o.ratio for o in hits if o.ratio is not None]
        ratio = min(ratios) if ratios and detected else None
        controls.append(Control(fault, expect, detected, hits[0].by if detected else None, ratio, len(seen)))
    return controls
