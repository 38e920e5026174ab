"""From the rows of the detection matrix to a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from audit.environment import environment
from audit.fault_matrix import Plan, Row
from audit.report import Check, Report, decide
from faults import EVERY
from lumotree.backends import protocol
from lumotree.backends.loader import load_backend

SURFACES = ("gdn", "conv", "attention", "sampler")


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Cells of the matrix as plain data, one a fault and check, the fault's own size and probability in each."""
    cells = []
    for row in rows:
        rate = row.smallest or (row.rates[0] if row.rates else None)
        common = {
            "fault": row.fault,
            "surface": row.surface,
            "first_check": row.first,
            "size": rate.size if rate else None,
            "probability": rate.probability if rate else None,
            "interval": list(rate.interval) if rate else None,
        }
        for check, state in {"any": row.state, **row.checks}.items():
            cells.append({**common, "check": check, "state": state})
    return cells


def missed(rows: Sequence[Row]) -> list[Row]:
    """Reachable faults that no check caught, and harmless ones that one did."""
    return [r for r in rows if r.state in ("Missed", "Crashed") or (r.state == "Caught" and _harmless(r))]


def _harmless(row: Row) -> bool:
    fault = EVERY.get(row.fault)
    return fault is not None and fault.expect == "harmless"


def to_report(rows: Sequence[Row], plan: Plan, command: str, seconds: float, peak: float | None = None) -> Report:
    """FAIL if a reachable fault is missed; INCONCLUSIVE if none was reached on a surface that the backend has."""
    backend = load_backend(plan.backend)
    lacking = protocol.SURFACES.keys() - set(protocol.complete_surfaces(backend))
    groups = {group: found for group, found in _groups(rows).items() if group[0] not in lacking}
    checks = [c for group in groups.items() if (c := _check(*group))]
    surfaces = {r.surface for r in rows} - lacking
    coverage = {s: "covered" if s in surfaces else "not covered" for s in SURFACES}
    facts = environment()
    verdict, reasons = decide(checks, [], coverage, controls_required=False)
    return Report(
        verdict=verdict,
        reasons=reasons,
        suite=", ".join(["faults", *["full"] * plan.full, *["quick"] * plan.quick]),
        backend=plan.backend,
        contract=backend.contract.as_dict(),
        environment=facts,
        envelope=None,
        coverage=coverage,
        checks=tuple(checks),
        controls=(),
        findings=(),
        seed=plan.seed,
        command=command,
        wall_s=round(seconds, 2),
        peak_mib=peak,
        facts={"catalogue": [_fact(row) for row in rows]},
        matrix=tuple(records(rows)),
        created=facts["date"],
    )


def _groups(rows: Sequence[Row]) -> dict[tuple[str, bool], list[Row]]:
    """Rows by surface, those written blind apart."""
    found: dict[tuple[str, bool], list[Row]] = {(s, blind): [] for blind in (False, True) for s in SURFACES}
    for row in rows:
        fault = EVERY.get(row.fault)
        found[row.surface, fault is not None and fault.blind].append(row)
    return found


def _check(group: tuple[str, bool], rows: Sequence[Row]) -> Check | None:
    if not rows:
        return None
    surface, blind = group
    states = Counter(r.state for r in rows)
    wrong = missed(rows)
    reached = len(rows) - states["NotReached"]
    spared = [r.fault for r in rows if r.state == "Equivalent" and not _harmless(r)]
    note = f"without effect on this kernel, with proof: {', '.join(spared)}" if spared else ""
    note = "not as expected: " + ", ".join(f"{r.fault} {r.state}" for r in wrong[:5]) if wrong else note
    status = "fail" if wrong else "pass" if reached else "inconclusive"
    if status == "inconclusive":
        note = "no fault of this surface was reached"
    name, title = ("faults.blind", "faults written blind") if blind else ("faults", "reachable faults caught")
    return Check(f"{name}.{surface}", title, surface, "faults", status, reached, note=note)


def _fact(row: Row) -> dict[str, Any]:
    fault = EVERY.get(row.fault)
    return {
        "fault": row.fault,
        "statement": fault.statement if fault else "",
        "stage": fault.stage if fault else "select",
        "classes": list(fault.classes) if fault else [],
        "state": row.state,
        "case": row.case,
        "missed_on": list(row.missed),
        "rates": [
            {"size": r.size, "caught": r.caught, "reached": r.reached, "interval": list(r.interval)} for r in row.rates
        ],
        "unit": fault.knob.unit if fault and fault.knob else None,
        "note": row.note,
    }
