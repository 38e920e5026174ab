"""Positive controls on one step: every reachable fault must be seen, harmless variants must not be.

A fault is put around the built-in multi-round rule and looked for with the means that judge the audited sampler, the
cheapest first:

1. a likelihood-ratio e-process against the fault's own law, watched chunk by chunk (`audit.evidence`);
2. for a sampler with coins, sign tests beside the clean rule on the same coins (`audit.sampler_paired`);
3. the battery of tests (`audit.montecarlo.run_step`), which also sees dependence between walks.

Each gives up after the walks that its own power asks for, at most `MAX_WALKS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, log
from typing import Any

from torch import Tensor

from audit.evidence import Alternative, EProcess
from audit.fault_laws import FaultLaw, fault_law
from audit.montecarlo import run_step, stream_seed
from audit.power import likelihood_ratio_draws
from audit.rule_law import RuleLaw
from audit.sampler_guard import PreparedRule
from audit.sampler_paired import paired
from faults.sampler import SAMPLER_FAULTS
from faults.sampler_fault import SamplerFault
from faults.sampler_types import Reading, StepSource
from lumotree.errors import InputError
from lumotree.select import MULTI_ROUND
from lumotree.select_types import ClosedSampler, Step

LEAST_TV = 0.002
"""Exact TV from which a fault must be seen in a step (issue 3; about the least of real defects, field/methods.md)."""

FIRST_CHUNK = 1_024
MAX_WALKS = 400_000
"""Most walks for one fault in one step: an e-process decides a TV of 0.005 within them, a paired test 0.0001."""
BATTERY_WALKS = 20_000


@dataclass(frozen=True)
class ControlResult:
    """What became of one fault in one step.

    tv: exact TV of (last row, bonus) of a walk; reachable: it changes the walks at all; due: it must be seen here, or
    (harmless) was run and must not be. detected, by: the test, or ""; walks: that it took; ratio: evidence over what
    was needed, 1 = just. note: as in `FaultLaw`.
    """

    fault: str
    step: str
    expect: str
    tv: float
    reachable: bool
    due: bool
    detected: bool = False
    by: str = ""
    walks: int = 0
    ratio: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Seen:
    """A detection: by which test, after how many walks, with how much evidence (1 = just)."""

    by: str
    walks: int
    ratio: float


class CachedSource:
    """A `StepSource` that keeps the last reading: the law of a fault and its sampler ask for the same one."""

    def __init__(self, source: StepSource) -> None:
        self._source = source
        self._last: tuple[Reading, Tensor] | None = None

    @property
    def temperature(self) -> float:
        """As the source's."""
        return self._source.temperature

    def target(self, reading: Reading) -> Tensor:
        """As the source's; do not write to it."""
        if self._last is None or self._last[0] != reading:
            self._last = (reading, self._source.target(reading))
        return self._last[1]


@dataclass(frozen=True, eq=False)
class ControlPlan:
    """What the controls of one step need. source: None for a step without logits, whose faults of reading are left out;
    level: false-alarm probability of each detection; harmless: whether harmless variants are run."""

    name: str
    step: Step
    source: StepSource | None
    clean: RuleLaw
    level: float
    seed: int
    harmless: bool
    max_walks: int = MAX_WALKS
    battery_walks: int = BATTERY_WALKS
    min_visits: int = 2_000


def run_controls(
    plan: ControlPlan, faults: Mapping[str, SamplerFault] = SAMPLER_FAULTS
) -> Iterator[tuple[ControlResult, Alternative | None]]:
    """Yield the outcome of each fault and, for those that matter in this step, the test against its law.

    Laws are made one at a time and dropped: each holds 8 bytes a row and token.
    """
    for fault in faults.values():
        if fault.needs == "greedy":
            continue
        try:
            law = fault_law(fault, plan.step, plan.source, plan.clean)
        except InputError as refusal:
            if plan.source is not None:
                raise
            yield ControlResult(fault.id, plan.name, fault.expect, 0.0, False, False, note=str(refusal)), None
            continue
        yield run_control(plan, fault, law), law.alternative if law.tv >= LEAST_TV else None


def run_control(plan: ControlPlan, fault: SamplerFault, law: FaultLaw) -> ControlResult:
    """Look for one fault in one step, if it has to be seen there."""
    due = is_due(plan, fault, law)
    result = ControlResult(fault.id, plan.name, fault.expect, law.tv, law.reachable, due, note=law.note)
    if not due:
        return result
    seen = detect(plan, fault, law)
    walks = plan.battery_walks if seen is None else seen.walks
    return ControlResult(
        fault.id, plan.name, fault.expect, law.tv, law.reachable, True, seen is not None,
        "" if seen is None else seen.by, walks, None if seen is None else seen.ratio, law.note,
    )  # fmt: skip


def is_due(plan: ControlPlan, fault: SamplerFault, law: FaultLaw) -> bool:
    """Tell whether a fault has to be looked for: TV of LEAST_TV or more, dependence, or a harmless one to be run."""
    if fault.expect == "harmless":
        return plan.harmless
    return law.reachable and (law.dependence or law.tv >= LEAST_TV)


def detect(plan: ControlPlan, fault: SamplerFault, law: FaultLaw) -> Seen | None:
    """Look for a fault with each test that could see it, the cheapest first."""
    faulty = fault.wrap(MULTI_ROUND, plan.source)
    if fault.expect == "harmless":
        return by_battery(plan, faulty, law, plan.min_visits)
    if (
        law.dependence
    ):  # node tests see nothing of it, so most are left out: they ask for as many visits as half the walks
        return by_battery(plan, faulty, law, max(plan.min_visits, plan.battery_walks // 2 - 2))
    seen = by_likelihood(plan, faulty, law)
    if seen is None:
        seen = by_pairs(plan, faulty)
    return by_battery(plan, faulty, law, plan.min_visits) if seen is None else seen


def by_likelihood(plan: ControlPlan, faulty: ClosedSampler, law: FaultLaw) -> Seen | None:
    """Follow the e-process of the fault's own law on its own walks."""
    if law.alternative is None or not law.tv:
        return None
    process = EProcess(law.fault, plan.level)
    limit = min(plan.max_walks, 2 * likelihood_ratio_draws(law.tv, plan.level))
    size, total = FIRST_CHUNK, log(1 / plan.level)
    while process.walks < limit:
        process.update(law.alternative(faulty.walk(plan.step, size, stream_seed(plan.seed, process.walks))))
        if process.state != "open":
            break
        size = min(2 * size, 65_536)
    if process.accused_at is None:
        return None
    return Seen("likelihood ratio", process.accused_at, process.log_e / total)


def by_pairs(plan: ControlPlan, faulty: Any) -> Seen | None:
    """Compare with the clean rule on the same coins, four times as many walks each time."""
    if not hasattr(faulty, "select"):
        return None
    walks, looks = min(16_384, plan.max_walks), 3
    rule = PreparedRule(MULTI_ROUND)
    for look in range(looks):
        try:
            found = paired(faulty, rule, plan.step, walks, plan.level / looks, stream_seed(plan.seed, look))
        except InputError:  # a fault of draft coins shows only where it draws the drafts itself
            return None
        if found.rejects:
            return Seen("paired", walks, _strength(found.p_value, found.level))
        if not found.differ:
            return None
        walks = min(4 * walks, plan.max_walks)
    return None


def by_battery(plan: ControlPlan, faulty: ClosedSampler, law: FaultLaw, min_visits: int) -> Seen | None:
    """Run the tests that need no alternative; four streams, so that streams are compared in two pairs."""
    walks = plan.battery_walks
    result = run_step(
        faulty, plan.step, walks=walks, level=plan.level, law=law.clean, seed=plan.seed, looks=2,
        chunk=max(1, walks // 4), min_visits=min_visits,
    )  # fmt: skip
    if result.violations:
        return Seen("impossible outcome", result.walks, inf)
    if not result.rejected:
        return None
    strongest = result.rejected[0]
    return Seen(strongest.id, result.walks, _strength(strongest.p_value or 0.0, result.test_level))


def _strength(p_value: float, level: float) -> float:
    return log(p_value) / log(level) if p_value > 0 else inf


def checked_faults(names: tuple[str, ...]) -> dict[str, SamplerFault]:
    """Return the faults of these names, all if there are none. Raises InputError for an unknown one."""
    for name in names:
        if name not in SAMPLER_FAULTS:
            raise InputError(f"unknown sampler fault {name!r}; known: {', '.join(SAMPLER_FAULTS)}")
    return {name: fault for name, fault in SAMPLER_FAULTS.items() if not names or name in names}
