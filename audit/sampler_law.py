"""The exact parts of the sampler suite: rules proved on the bounded domain, float samplers summed on small steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from audit.exact_run import ExactResult, run_exact
from audit.fault_laws import fault_law
from audit.law_rules import LOSSLESS_FAULTS, controls
from audit.law_rules import RULES as EXACT_RULES
from audit.sampler_cases import exact_rule, small_cases, small_step
from audit.sampler_control import LEAST_TV, ControlResult
from audit.sampler_guard import Guarded
from audit.summed_law import summed_law
from faults.sampler import SAMPLER_FAULTS
from faults.sampler_fault import SamplerFault
from lumotree.backends.sampler_loader import Claims, load_sampler
from lumotree.errors import InputError
from lumotree.select import MULTI_ROUND

TOLERANCE = 1e-6
"""Largest TV that a summed law may be off: rounding of float32 sums over a few tokens stays below it."""

BUDGET = 1 << 12
CONTROL_BUDGETS = (1 << 10, 1 << 14)
"""Cells of coins for a faulty sampler; the second only where the first left too much volume unresolved."""

_BATCH = ("cartesian_write",)
"""Faults by which walks of a batch change each other: the coins of one walk do not tell its outcome."""

CONTROL_STEPS = (("fork-3", False), ("fork-3", True), ("chain-3", False), ("twins-3", False))


@dataclass(frozen=True)
class ExactTask:
    """Part `part` of `parts` of `count` configurations; of the rules, or (faulty) of the rules' faults."""

    count: int
    part: int
    parts: int
    faulty: bool = False


def run_exact_task(task: ExactTask) -> list[ExactResult]:
    """Run one part."""
    rules = controls() if task.faulty else EXACT_RULES.values()
    return run_exact(task.count, rules, part=task.part, parts=task.parts)


def merged(parts: list[list[ExactResult]]) -> list[ExactResult]:
    """Add up the parts, rule by rule."""
    total = parts[0]
    for more in parts[1:]:
        total = [first.merged(second) for first, second in zip(total, more, strict=True)]
    return total


def exact_controls(found: list[ExactResult]) -> list[ControlResult]:
    """Return what became of each faulty rule on the domain: lossy somewhere, or lossless and to be so."""
    return [
        ControlResult(
            fault=f"exact law {r.rule.partition('/')[2]}",
            step=r.rule.partition("/")[0],
            expect="harmless" if r.rule in LOSSLESS_FAULTS else "detected",
            tv=float(_fraction(r.worst)),
            reachable=r.lossy > 0,
            due=True,
            detected=r.lossy > 0,
            by="law.exact" if r.lossy else "",
            walks=r.configurations,
            ratio=float("inf") if r.lossy else None,
        )
        for r in found
    ]


def _fraction(text: str) -> float:
    top, _, bottom = text.partition("/")
    return int(top) / int(bottom or 1)


@dataclass(frozen=True)
class SummedResult:
    """Summed law of one sampler on one small step. least: TV that is certain, bound: TV that cannot be exceeded (see
    `audit.summed_law`); resolution: widest side of a cell of coins; odd: an unexpected breakpoint in words; never: an
    answer that no right sampler gives, in words."""

    sampler: str
    step: str
    least: float
    bound: float
    unresolved: float
    resolution: float
    cells: int
    walks: int
    odd: str
    changed: tuple[str, ...] = ()
    never: str = ""

    @property
    def verdict(self) -> str:
        """ "fail" if the law is off for certain, "pass" if it cannot be, else "inconclusive"."""
        if self.least > TOLERANCE or self.changed or self.never:
            return "fail"
        return "pass" if self.bound <= TOLERANCE else "inconclusive"


@dataclass(frozen=True)
class SummedTask:
    """Sum a sampler's law on its small steps. budget: cells of coins a step."""

    spec: str
    budget: int = BUDGET


def run_summed_task(task: SummedTask) -> list[SummedResult]:
    """Sum the law of a sampler that takes coins on every small step that it can take."""
    loaded = load_sampler(task.spec)
    # A budget of what a slow sampler can do: about ten walks a cell.
    budget = task.budget if loaded.claims.walks is None else max(256, loaded.claims.walks // 10)
    return [_summed(task.spec, Guarded(loaded), loaded.claims, case, budget) for case in small_cases(loaded.claims)]


def _summed(spec: str, sampler: Guarded, claims: Claims, case: tuple[str, bool], budget: int) -> SummedResult:
    step = small_step(*case)
    name = f"{case[0]}-{'sampled' if case[1] else 'fixed'}"
    try:
        found = summed_law(sampler, step, exact_rule(claims.rule, step), budget)
    except InputError as refusal:
        if "budget" not in str(refusal):
            raise
        return SummedResult(spec, name, 0.0, 1.0, 1.0, 1.0, 0, 0, str(refusal))
    least = max(0.0, found.tv - found.unresolved - found.edges)
    return SummedResult(
        spec, name, least, found.bound, found.unresolved, found.resolution, found.cells, found.walks, found.odd,
        tuple(sampler.changed), found.never,
    )  # fmt: skip


def summed_controls() -> list[ControlResult]:
    """Sum the law of every faulty multi-round sampler that shows when drafts and coins are given."""
    return [_summed_control(fault, name, sampled) for fault in _visible() for name, sampled in CONTROL_STEPS]


def _visible() -> list[SamplerFault]:
    """Faults of what is done with coins and rows; drafts and seeds are not the sampler's to choose here."""
    return [
        fault
        for fault in SAMPLER_FAULTS.values()
        if not fault.dependence and fault.id not in _BATCH and fault.change.drawn is None and fault.change.seed is None
        and fault.needs != "greedy" and fault.expect == "detected"
    ]  # fmt: skip


def _summed_control(fault: SamplerFault, tree: str, sampled: bool) -> ControlResult:
    step = small_step(tree, sampled)
    name = f"{tree}-{'sampled' if sampled else 'fixed'}"
    try:
        tv = fault_law(fault, step).tv
        if tv < LEAST_TV:
            return ControlResult(f"summed law {fault.id}", name, fault.expect, tv, tv > 0, False)
        faulty: Any = fault.wrap(MULTI_ROUND)
        for budget in CONTROL_BUDGETS:
            found = summed_law(faulty, step, exact_rule("multi-round", step), budget)
            if found.tv - found.unresolved - found.edges > TOLERANCE:
                break
    except InputError as refusal:  # it reads logits or draft coins, which are not there
        return ControlResult(f"summed law {fault.id}", name, fault.expect, 0.0, False, False, note=str(refusal))
    # Seen is a law that is off for certain: volume that the budget left unresolved accuses nobody.
    least = found.tv - found.unresolved - found.edges
    seen = least > TOLERANCE
    return ControlResult(
        f"summed law {fault.id}", name, fault.expect, tv, True, True, seen, "law.summed" if seen else "", found.walks,
        max(least, 0.0) / TOLERANCE,
    )  # fmt: skip
