"""One fault on one case: which checks catch it, and whether it was reached at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from audit.cases import CaseSpec
from audit.component import audit_case
from audit.fault_programs import run_program
from audit.metamorphic import RELATIONS
from audit.tally import judged
from faults import CATALOGUE, Fault, Faulty
from lumotree.backends.protocol import SURFACES
from lumotree.errors import InputError

STATES = ("Caught", "Missed", "NotReached", "Crashed", "Equivalent")


@dataclass(frozen=True)
class Trial:
    """What became of a fault on a case.

    state: of STATES. caught: checks with a cell outside, in the order in which they ran; ran: all that judged a cell
    while the fault was there. changed: what the wrapper made different, by name; empty for NotReached. note: the
    message of a crash.
    """

    fault: str
    case: str
    state: str
    caught: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    note: str = ""


def coins_of(spec: CaseSpec) -> int:
    """Seed of the coins of a random fault on a case."""
    return int(sum(word * 1_000_003**i for i, word in enumerate(spec.entropy)) % 2**31)


def set_coins(seed: int) -> None:
    """Seed the coins of random faults, as `torch.manual_seed` does. That also notes the whole stack of its caller for
    every kind of device that is not in use, which takes longer than a small call of a kernel."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def alone(backend: Any, surface: str) -> Faulty:
    """The backend with one surface only, so that a trial costs no more than it has to."""
    others: dict[str, Any] = {method: None for s, methods in SURFACES.items() if s != surface for method in methods}
    return Faulty(backend, **others)


def wrapped(backend: Any, fault: Fault, size: float | None = None) -> Faulty:
    """The wrong backend, with the fault's surface only; size: of its knob, None = the largest."""
    faulty = fault.at(size)(backend)
    masked = alone(faulty, fault.surface)
    masked.changed = faulty.changed
    return masked


def component_trial(backend: Any, fault: Fault, spec: CaseSpec, size: float | None = None) -> Trial:
    """Every check of the component audit on one case under the fault. Coins of random faults come from the case."""
    set_coins(coins_of(spec))
    faulty = wrapped(backend, fault, size)
    try:
        result = audit_case(faulty, spec)
    except InputError as refusal:
        return Trial(fault.id, spec.id, "Crashed", changed=tuple(faulty.changed), note=str(refusal))
    tallies = [t for t in result.tallies.values() if t.cells and judged(t.check, backend.contract)]
    return _trial(fault, spec.id, faulty, tuple(t.check for t in tallies if t.failed), tuple(t.check for t in tallies))


def own_failure(backend: Any, surface: str, spec: CaseSpec) -> str:
    """The check that a backend fails on a case without any fault, or why it refuses the case; "" if neither."""
    bare = component_trial(backend, replace(_NO_FAULT, surface=surface), spec)
    return bare.note or "".join(bare.caught[:1])


#: Put around a backend, it leaves it as it is.
_NO_FAULT = replace(next(iter(CATALOGUE.values())), id="none", wrap=Faulty, knob=None)


def relation_trial(backend: Any, fault: Fault, relation: str, seed: int, size: float | None = None) -> Trial | None:
    """A metamorphic relation under the fault; None where it does not apply."""
    check = f"{fault.surface}.{relation}"
    if fault.surface not in RELATIONS[relation].surfaces:
        return None
    set_coins(seed)
    faulty = wrapped(backend, fault, size)
    if RELATIONS[relation].why_not(faulty):
        return None
    try:
        found = RELATIONS[relation].run(faulty, seed)
    except InputError as refusal:
        return Trial(fault.id, f"relation/{seed}", "Crashed", changed=tuple(faulty.changed), note=str(refusal))
    return _trial(fault, f"relation/{seed}", faulty, (check,) if found else (), (check,))


def program_trial(backend: Any, fault: Fault, program: str, seed: int, size: float | None = None) -> Trial:
    """A fixed program of several cycles under the fault, against sequential decoding."""
    set_coins(seed)
    faulty, reference = wrapped(backend, fault, size), wrapped(backend, fault, size)
    check = f"{fault.surface}.{program}"
    try:
        wrong = run_program(program, faulty, reference, seed)
    except InputError as refusal:
        return Trial(fault.id, f"program/{seed}", "Crashed", changed=tuple(faulty.changed), note=str(refusal))
    if wrong is not None and wrong.surface == "refused":
        return Trial(fault.id, f"program/{seed}", "Crashed", changed=tuple(faulty.changed), note=str(wrong))
    return _trial(fault, f"program/{seed}", faulty, (check,) if wrong else (), (check,))


def _trial(fault: Fault, case: str, faulty: Any, caught: tuple[str, ...], ran: tuple[str, ...]) -> Trial:
    changed = tuple(faulty.changed)
    state = "Caught" if caught else "NotReached" if not changed else "Missed"
    if state == "Missed" and fault.expect == "harmless":
        state = "Equivalent"
    return Trial(fault.id, case, state, caught, ran, changed)
