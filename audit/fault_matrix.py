"""The detection matrix: every fault of the catalogue under every check, and how small a fault may be to be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy import stats

from audit.cases import Case, CaseSpec
from audit.fault_cases import heldout_ladder, ladder
from audit.fault_effect import same_with_and_without
from audit.fault_programs import PROGRAMS
from audit.fault_trial import Trial, component_trial, own_failure, program_trial, relation_trial
from audit.metamorphic import RELATIONS
from audit.processes import one_thread, pooled
from audit.render.progress import Progress
from audit.runner import default_workers
from audit.scene import scene_of
from faults import EVERY, Fault, Scene
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import complete_surfaces
from lumotree.contract import Contract
from lumotree.errors import InputError

#: Probability with which a size must be seen to count as detected, and runs that decide it.
WANTED = 0.99
SIZE_TRIALS = 300
PLAIN_TRIALS = 30
#: Rows of the chains on which a fault that nothing catches must have no effect either.
LONG = (20, 65)

#: Confidence of the intervals.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Rate:
    """`caught` of `reached` runs; interval: exact (Clopper-Pearson), at CONFIDENCE. size: of the knob, or None."""

    caught: int
    reached: int
    size: float | None = None

    @property
    def probability(self) -> float:
        """The share that was caught."""
        return self.caught / self.reached

    @property
    def interval(self) -> tuple[float, float]:
        """Limits of the probability."""
        return exact_interval(self.caught, self.reached)


def exact_interval(hits: int, runs: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Clopper-Pearson limits of a binomial probability."""
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(stats.beta.ppf(tail, hits, runs - hits + 1))
    high = 1.0 if hits == runs else float(stats.beta.ppf(1 - tail, hits + 1, runs - hits))
    return low, high


@dataclass(frozen=True)
class Row:
    """One fault. state: of `fault_trial.STATES`; case: the smallest that reached it; checks: check -> state of that
    check there; first: the check that caught it first; rates: on held-out cases, of each size from the largest on;
    missed: smaller cases that reached it without its being seen. note: why it crashed, was not reached or has
    no effect."""

    fault: str
    surface: str
    state: str
    case: str
    checks: dict[str, str]
    first: str | None
    rates: tuple[Rate, ...] = ()
    missed: tuple[str, ...] = ()
    note: str = ""

    @property
    def smallest(self) -> Rate | None:
        """The smallest size, in an unbroken run from the largest, that is seen with probability WANTED."""
        found = None
        for rate in self.rates:
            if rate.probability < WANTED:
                break
            found = rate
        return found


def containing(option: str, texts: Sequence[str], known: Sequence[str]) -> list[str]:
    """The ids that contain one of the texts, all without any. Raises InputError for a text that is in none: a name that
    is mistyped would leave a fault out unseen."""
    for text in texts:
        if not any(text in name for name in known):
            raise InputError(f"{option}: no fault's id contains {text!r}; for example: {', '.join(known[:3])}")
    return [name for name in known if not texts or any(text in name for text in texts)]


@dataclass(frozen=True)
class Plan:
    """What to run: backend as `load_backend` takes it, seed of the cases, whether rates are measured, and how often.

    quick: a caught fault is not put under further checks: every state is as without, and who else catches it unknown.
    """

    backend: str
    seed: int = 1
    full: bool = False
    plain_trials: int = PLAIN_TRIALS
    size_trials: int = SIZE_TRIALS
    quick: bool = False


class Cases:
    """The cases of a family for a contract, with what they offer; each is made once."""

    def __init__(self, specs: Iterable[CaseSpec], contract: Contract) -> None:
        self.specs = list(specs)
        self._contract = contract
        self._scenes: dict[CaseSpec, Scene] = {}
        self._own: dict[tuple[str, CaseSpec], str] = {}

    def reaching(self, fault: Fault) -> Iterator[CaseSpec]:
        """Cases that have what the fault needs, from the smallest on."""
        return (spec for spec in self.specs if fault.reaches(self._scene(spec)))

    def _scene(self, spec: CaseSpec) -> Scene:
        if spec not in self._scenes:
            self._scenes[spec] = scene_of(Case(spec, self._contract))
        return self._scenes[spec]

    def own_failure(self, backend: Any, surface: str, spec: CaseSpec) -> str:
        """The check that the backend fails on a case without any fault, or ""; asked once."""
        key = surface, spec  # ids of cases are the same for every seed
        if key not in self._own:
            self._own[key] = own_failure(backend, surface, spec)
        return self._own[key]


@torch.inference_mode()  # programs run in it, and what a backend keeps between calls may not pass from mode to mode
def audit_fault(backend: Any, fault: Fault, cases: Cases, plan: Plan) -> Row:
    """One row of the matrix."""
    if not fault.fits(backend):
        note = "the formulas of this kernel cannot be changed from outside"
        return Row(fault.id, fault.surface, "NotReached", "", {}, None, note=note)
    if fault.surface not in complete_surfaces(backend):
        note = f"the backend does not both verify and publish {fault.surface}"
        return Row(fault.id, fault.surface, "NotReached", "", {}, None, note=note)
    trials = []
    for spec in cases.reaching(fault):
        if own := cases.own_failure(backend, fault.surface, spec):
            note = f"without the fault too: {own}; the backend is wrong by itself, so that nothing can be caught"
            return Row(fault.id, fault.surface, "Crashed", spec.id, {}, None, note=note)
        trials.append(component_trial(backend, fault, spec))
        if trials[-1].state in ("Caught", "Equivalent"):
            break
    found = trials[-1:]
    for trial in _beyond_cases(backend, fault, plan.seed, done=plan.quick and any(t.caught for t in trials)):
        found.append(trial)
        if plan.quick and trial.caught:
            break
    row = _row(fault, trials, found)
    if row.state == "Missed" and fault.unread:
        specs = list(cases.reaching(fault))
        specs += [_along(specs[-1], min(rows, backend.contract.max_rows)) for rows in LONG if specs]
        calls = same_with_and_without(backend, fault, specs, plan.seed)
        row = _without_effect(row, fault, calls) if calls else row
    measured = plan.full and fault.expect == "detected" and row.state != "Equivalent"
    return replace(row, rates=tuple(_rates(backend, fault, plan))) if measured else row


def _beyond_cases(backend: Any, fault: Fault, seed: int, done: bool) -> Iterator[Trial]:
    """The fault under every relation that applies and every program, none if it is done."""
    for relation in () if done else RELATIONS:
        if (trial := relation_trial(backend, fault, relation, seed)) is not None:
            yield trial
    for program in () if done else PROGRAMS:
        yield program_trial(backend, fault, program, seed)


def _along(spec: CaseSpec, rows: int) -> CaseSpec:
    """The case with one long chain in it: a kernel may do otherwise for a path longer than any that the checks take."""
    return replace(spec, id=f"{spec.id}/chain:{rows}", trees=(f"chain:{rows}",), prefixes=(2,))


def _without_effect(row: Row, fault: Fault, calls: int) -> Row:
    note = f"{fault.unread}; with it and without, this kernel left the same bits behind each of {calls} calls"
    checks = {name: "Equivalent" if state == "Missed" else state for name, state in row.checks.items()}
    return replace(row, state="Equivalent", checks=checks, missed=(), note=note)


def _row(fault: Fault, trials: Sequence[Trial], found: Sequence[Trial]) -> Row:
    checks: dict[str, str] = {}
    for trial in found:
        for check in trial.ran:
            unseen = "NotReached" if not trial.changed else "Equivalent" if fault.expect == "harmless" else "Missed"
            checks[check] = "Caught" if check in trial.caught else unseen
    states = [t.state for t in (*trials, *found)]
    order = ("Caught", "Missed", "Crashed", "Equivalent", "NotReached")
    state = next((s for s in order if s in states), "NotReached")
    caught = [check for trial in found for check in trial.caught]
    missed = tuple(t.case for t in trials if t.state == "Missed")
    crashed = next((t.note for t in found if t.state == "Crashed"), "")
    note = crashed or ("no case, relation or program made it change anything" if state == "NotReached" else "")
    return Row(fault.id, fault.surface, state, trials[-1].case if trials else "", checks, caught[0] if caught else None,
               missed=missed, note=note)  # fmt: skip


def _rates(backend: Any, fault: Fault, plan: Plan) -> Iterator[Rate]:
    """Detection probabilities on held-out cases, from the largest size on; sizes after a hopeless one are left out."""
    if fault.knob is None:
        rate = _rate(backend, fault, None, plan.plain_trials, plan.seed)
        if rate is not None:
            yield rate
        return
    for size in fault.knob.sizes:
        rate = _rate(backend, fault, size, plan.size_trials, plan.seed)
        if rate is None:
            return
        yield rate
        if rate.probability < 0.1:
            return


def _rate(backend: Any, fault: Fault, size: float | None, trials: int, seed: int) -> Rate | None:
    """Runs on one held-out case a seed, until `trials` of them reached the fault or it is clear that they miss it."""
    caught = reached = 0
    for number in range(2 * trials):
        spec = _heldout_case(fault, backend.contract, 10_000 * seed + number)
        trial = component_trial(backend, fault, spec, size) if spec else None
        if trial is None or trial.state in ("NotReached", "Crashed"):
            continue
        reached += 1
        caught += trial.state == "Caught"
        if reached == trials or (size is not None and reached - caught > max(3, trials // 50)):
            break
    return Rate(caught, reached, size) if reached else None


def _heldout_case(fault: Fault, contract: Contract, seed: int) -> CaseSpec | None:
    """The smallest held-out case of a seed that reaches the fault."""
    return next(Cases(heldout_ladder(seed), contract).reaching(fault), None)


_worker: tuple[Any, Cases, Plan] | None = None


def _start(plan: Plan) -> None:
    global _worker
    torch.set_num_threads(1)
    with torch.inference_mode():
        backend = load_backend(plan.backend)
    _worker = backend, Cases(ladder(plan.seed), backend.contract), plan


def _work(fault: str) -> Row:
    assert _worker is not None
    backend, cases, plan = _worker
    return audit_fault(backend, EVERY[fault], cases, plan)


def run_matrix(plan: Plan, only: Callable[[Fault], bool] = lambda fault: True, workers: int | None = None) -> list[Row]:
    """Every chosen fault of the catalogue, in its order, those written blind last. workers: processes, 0 = this one.

    Raises InputError when the backend cannot be loaded.
    """
    load_backend(plan.backend)
    chosen = [fault.id for fault in EVERY.values() if only(fault)]
    count = default_workers("cpu") if workers is None else workers
    rows: dict[str, Row] = {}
    with Progress(len(chosen), "faults") as progress:
        for row in _inline(plan, chosen) if count == 0 or len(chosen) == 1 else _pooled(plan, chosen, count):
            rows[row.fault] = row
            progress.advance(note=row.fault)
    return [rows[fault] for fault in chosen]


def _inline(plan: Plan, chosen: Sequence[str]) -> Iterator[Row]:
    global _worker
    before = _worker
    with one_thread():
        _start(plan)
        try:
            yield from map(_work, chosen)
        finally:
            _worker = before


def _pooled(plan: Plan, chosen: Sequence[str], workers: int) -> Iterator[Row]:
    # Faults with a knob take longest; one at the end would leave the other workers idle.
    first = sorted(chosen, key=lambda fault: EVERY[fault].knob is None)
    return pooled(
        _work, [(fault,) for fault in first], workers, f"backend {plan.backend!r}", start=_start, args=(plan,)
    )
