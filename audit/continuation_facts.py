"""What a continuation run knows beyond its checks, as plain data: spreads, sizes let through, drift, every distance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from audit.continuation_distance import SURFACES
from audit.continuation_drift import Drift
from audit.continuation_judge import Judged, native_totals, where
from audit.continuation_plan import KINDS
from audit.continuation_rules import FACTOR, FLOORS, exceeding, unit


def heldout_units(j: Judged) -> list[dict[str, float]]:
    """One unit a held-out prefix: the cold schedule, as long as a calibration's."""
    names = dict.fromkeys(c.script.name for c in j.main if c.script.kind == "cold")
    return [unit([c.candidate.apart for c in j.main if c.script.name == name]) for name in names]


def facts_of(j: Judged) -> dict[str, Any]:
    """Everything that a reader of the report may ask for by name, as plain data."""
    greedy = [c for c in j.main if c.candidate.greedy.same]
    native = native_totals([*j.main, *j.batch])
    facts: dict[str, Any] = {
        "cycles": len(j.main),
        "cycles_bitwise": sum(c.bitwise for c in j.main),
        "greedy_same": len(greedy),
        "batch_cycles": len(j.batch),
        "ends": {kind: sorted({c.end for s in j.found.scripts if s.kind == kind for c in s.cycles}) for kind in KINDS},
        "live_ends": sum(c.end == c.live for s in j.found.scripts for c in s.cycles),
        "native_spread": {s: t.worst for s, t in native.items()},
        "lets_through": lets_through(j),
        "pids": dict(j.found.pids),
        "recorded": j.found.recorded.verdict if j.found.recorded else None,
    }
    if j.found.spread is not None:
        rule, units = j.found.spread.rule(), heldout_units(j)
        m = len(units)
        facts["calibrated"] = {
            "n": rule.n, "m": m, "allowed": rule.allowed(m), "alpha": rule.alpha, "false_alarm": rule.false_alarm(m),
            "bounds": dict(rule.bounds), "exceeding": exceeding(rule, units),
        }  # fmt: skip
    if j.found.drift is not None:
        facts["drift"] = drift_facts(j.found.drift)
    return {"continuation": facts}


def lets_through(j: Judged) -> dict[str, dict[str, float]]:
    """Rule -> surface -> largest distance that passes in every cycle: the size of fault that the rule does not see."""
    cells = [*j.main, *j.batch]
    published = {s: FACTOR * max([FLOORS[s], *(c.r(s) for c in cells)]) for s in SURFACES}
    rules = {"bitwise": dict.fromkeys(SURFACES, 0.0), "published": published}
    return rules | ({} if j.found.spread is None else {"calibrated": dict(j.found.spread.rule().bounds)})


def drift_facts(drift: Drift) -> dict[str, Any]:
    """The curves of both arms, layer by layer."""
    facts: dict[str, Any] = {"same_tokens": drift.same, "cycles": drift.cycles, "differences": list(drift.differences)}
    for name, curve in (("native", drift.native), ("candidate", drift.candidate)):
        facts[name] = {
            "marks": list(curve.marks),
            "apart": [list(layers) for layers in curve.apart],
            "tokens": len(curve.tokens),
            "diverges": curve.diverges,
            "margin": curve.margin,
        }
    return facts


def frame_records(j: Judged) -> Iterator[dict[str, Any]]:
    """One line for each schedule, cycle and surface: distances of the candidate and of the native arms."""
    for kind, cells in (("main", j.main), ("prompt", j.prompts), ("batch", j.batch)):
        for cell in cells:
            for surface, apart in cell.candidate.apart.items():
                base = {"case": f"{kind} {where(cell)}", "surface": surface, "layer": apart.layer}
                yield {**base, "statistic": "distance", "value": apart.distance}
                yield {**base, "statistic": "x envelope", "value": cell.ratio(surface)}
