"""One fault on one case under the checks of the component audit: caught by which, missed, or not reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from audit.cases import Case, CaseSpec
from audit.component import audit_case
from audit.scene import scene_of
from audit.tally import judged
from faults import Fault
from lumotree.errors import InputError

STATES = ("Caught", "Missed", "NotReached", "Crashed", "Equivalent")


@dataclass(frozen=True)
class FaultRun:
    """What became of a fault on a case.

    state: of STATES. checks: ids of the checks with a cell outside, in the order in which they ran. changed: what the
    wrapper made different, name -> how often; empty for NotReached. cells: what the failing checks counted. note: the
    message of a crash.
    """

    fault: str
    case: str
    state: str
    checks: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    note: str = ""


def run_fault(backend: Any, fault: Fault, spec: CaseSpec, size: float | None = None) -> FaultRun:
    """Put the fault (at a size of its knob, or its largest) in front of the backend and audit the case."""
    faulty = (fault.wrap if size is None or fault.knob is None else fault.knob.wrap(size))(backend)
    try:
        result = audit_case(faulty, spec)
    except InputError as refusal:
        return FaultRun(fault.id, spec.id, "Crashed", (), tuple(faulty.changed), str(refusal))
    contract = backend.contract
    failed = tuple(t.check for t in result.tallies.values() if t.failed and judged(t.check, contract))
    changed = tuple(faulty.changed)
    state = "Caught" if failed else "NotReached" if not changed else "Missed"
    if state == "Missed" and fault.expect == "harmless":
        state = "Equivalent"
    return FaultRun(fault.id, spec.id, state, failed, changed)


def reached_by(fault: Fault, spec: CaseSpec, contract: Any) -> bool:
    """Whether a case has what the fault needs."""
    return fault.reaches(scene_of(Case(spec, contract)))
