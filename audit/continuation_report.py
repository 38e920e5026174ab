"""What a continuation run found as checks, controls, findings and facts of a `Report`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from audit.continuation_distance import SURFACES, Apart
from audit.continuation_facts import heldout_units
from audit.continuation_judge import Cell, Judged, Totals, cells_of, first_wrong, native_totals, total, where
from audit.continuation_plan import KINDS, uncovered
from audit.continuation_rules import FACTOR, envelope_ratio, exceeding, within_bitwise
from audit.continuation_run import Done
from audit.continuation_watch import expected_calls
from audit.report import Check, Control, Finding
from faults.continuation import reached_faults
from lumotree.backends.protocol import SURFACES as SERVED
from lumotree.backends.protocol import covered_surfaces
from lumotree.cycle_types import Stack
from lumotree.tree_named import hydra27

TITLES = {
    "gdn": "recurrent state",
    "conv": "convolution history",
    "kv_new": "new keys and values",
    "kv_history": "earlier keys and values",
    "next": "next token's logits",
    "hidden": "hidden rows",
    "drafter": "drafter's entries",
    "lengths": "positions and lengths",
}
#: Findings kept.
KEPT = 16


def checks_of(j: Judged) -> list[Check]:
    """Every check, the surfaces first."""
    return [
        *(
            _surface_check(j, f"continue.{s}", TITLES[s], s, total(j.main, s, bitwise=j.bitwise))
            for s in SURFACES
            if s != "drafter" or j.found.head
        ),
        _cycles_check(j),
        _greedy_check(j),
        _envelope_check(j),
        *_calibrated_checks(j),
        *_batch_checks(j),
        *_gates(j),
        _ends_check(j),
        _recorded_check(j),
        *_drift_checks(j),
    ]


def _surface_check(j: Judged, id_: str, title: str, surface: str, t: Totals) -> Check:
    note = ""
    if t.wrong:
        cell, apart = t.wrong[0]
        note = f"{len(t.wrong)} cycles outside, first {where(cell)}" + _layer(apart)
    status = "inconclusive" if not t.cells else "fail" if t.wrong else "pass"
    bound = "same bits" if j.bitwise else f"{FACTOR:g} R"
    return Check(id_, title, surface, j.rung, status, t.cells, t.bitwise, t.worst, bound, note or _empty(t))


def _empty(t: Totals) -> str:
    return "" if t.cells else "no cycle was compared"


def _layer(apart: Apart) -> str:
    return f" layer {apart.layer}" if apart.layer >= 0 else ""


def _cycles_check(j: Judged) -> Check:
    same = sum(c.bitwise for c in j.main)
    status = ("pass" if same == len(j.main) else "fail") if j.bitwise else "info"
    note = "" if same == len(j.main) else f"{same} of {len(j.main)} cycles are bitwise on every surface"
    return Check("continue.cycles", "cycles, every surface", "all", _bits_rung(j), status, len(j.main), same, note=note)


def _bits_rung(j: Judged) -> str:
    """Rung of a comparison of bits, which judges only a backend that claims them."""
    return "bitwise" if j.bitwise else "none"


def _greedy_check(j: Judged) -> Check:
    cells = [*j.main, *j.batch]
    held, same = sum(c.greedy for c in cells), sum(c.candidate.greedy.same for c in cells)
    note = "" if same == len(cells) else f"{same} of {len(cells)} greedy tokens are the reference's"
    status = "pass" if held == len(cells) else "fail"
    return Check("continue.argmax", "greedy token", "next", "tie rule", status, len(cells), same, note=note)


def _envelope_check(j: Judged) -> Check:
    """The published rule over all surfaces, also where bits are demanded: what it alone would have said."""
    cells = [*j.main, *j.batch]
    ratios = [max(c.ratio(s) for s in SURFACES) for c in cells]
    worst = max(ratios, default=0.0)
    status = "fail" if worst > 1 else "pass"
    return Check(
        "continue.published", "published envelope", "all", "envelope", status, len(cells), None, worst, "d <= 2 R"
    )


def _calibrated_checks(j: Judged) -> list[Check]:
    if j.found.spread is None:
        return []
    rule, units = j.found.spread.rule(), heldout_units(j)
    allowed, counts = rule.allowed(len(units)), exceeding(rule, units)
    wrong = {s: k for s, k in counts.items() if k > allowed}
    ratios = [envelope_ratio(u[s], bound / FACTOR) for u in units for s, bound in rule.bounds.items()]
    note = ", ".join(f"{s}: {k} of {len(units)} prefixes above {rule.bounds[s]:.3g}" for s, k in wrong.items())
    status = "fail" if wrong else "pass"
    if allowed >= len(units):
        status, note = "inconclusive", f"{rule.n} calibration prefixes are too few for any outcome to fail"
    return [
        Check("continue.calibrated", f"calibrated, {allowed} may exceed", "all", "calibrated", status,
              len(units) * len(rule.bounds), None, max(ratios), "native spread", note),
    ]  # fmt: skip


def _batch_checks(j: Judged) -> list[Check]:
    totals = {s: total(j.batch, s, bitwise=j.bitwise) for s in SURFACES}
    joined = Totals(
        sum(t.cells for t in totals.values()), sum(t.bitwise for t in totals.values()),
        max(t.worst for t in totals.values()), [w for t in totals.values() for w in t.wrong],
    )  # fmt: skip
    return [_surface_check(j, "continue.batch", "batch of 4, all mixed", "all", joined)]


def _gates(j: Judged) -> list[Check]:
    """Integrity: without these a comparison would mean nothing."""
    runs = [d.outcome for d in j.found.outcomes if d.outcome is not None]
    prompt = [(c, a) for c in j.prompts for a in c.candidate.apart.values()]
    odd = [f"{where(c)}: {a.surface}" for c, a in prompt if not _same(j, c, a)]
    wrong = [w for r in runs for w in r.account.wrong]
    touched = [t for r in runs for t in r.touched]
    readback = [b for r in runs for b in r.readback]
    rows, watched = sum(r.account.rows for r in runs), sum(r.watched for r in runs)
    drafts, drafted = [x for r in runs for x in r.drafts], sum(r.drafted for r in runs)
    imported = sum(d.task.kind in ("cold", "primed") for d in j.found.outcomes)
    return [
        _gate("gate.prompt", "prompt parity", len(prompt), odd),
        _gate("gate.import", "imported state read back", imported, readback, "inconclusive"),
        _gate("gate.inputs", "input rows of each forward", rows, wrong, "inconclusive"),
        _gate("gate.elsewhere", "all else untouched", watched, touched),
        *([_gate("gate.drafts", "drafts as harvested", drafted, drafts)] if j.found.head else []),
        _called_gate(j),
        _native_gate(j),
    ]


def _same(j: Judged, cell: Cell, apart: Apart) -> bool:
    return within_bitwise(apart) if j.bitwise else cell.ratio(apart.surface) <= 1


def _gate(id_: str, title: str, cells: int, odd: Sequence[str], broken: str = "fail") -> Check:
    """broken: status with anything odd. What the candidate left is a failure; what it was given, or not asked for,
    leaves the question open (contract section 6)."""
    status = "inconclusive" if not cells else broken if odd else "pass"
    note = f"{len(odd)}: {odd[0]}" if odd else "" if cells else "nothing was checked"
    return Check(id_, title, "integrity", "gate", status, cells, note=note)


def _called_gate(j: Judged) -> Check:
    """Every verify and publish method once a layer and cycle, counted between model and backend."""
    odd, calls = [], 0
    for done in j.found.outcomes:
        if done.outcome is not None:
            want = expected_calls(*j.found.layers, done.outcome.forwards)
            got = done.outcome.account.calls
            calls += sum(got.values())
            odd += [f"{done.task.kind} {done.task.name}: {m} of layer {n} {got[m, n]} times, expected {want[m, n]}"
                    for m, n in sorted({*want, *got}) if got[m, n] != want[m, n]]  # fmt: skip
    return _gate("gate.called", "calls of the backend", calls, odd, "inconclusive")


def _native_gate(j: Judged) -> Check:
    """Arms B, V and P against A. Where bits are claimed they must agree in every one; else their spread is reported."""
    totals = native_totals([*j.main, *j.batch])
    cells, same = sum(t.cells for t in totals.values()), sum(t.bitwise for t in totals.values())
    apart = [f"{s}: {t.worst:.3g}" for s, t in totals.items() if t.bitwise != t.cells]
    other = j.found.pids.get("B") != j.found.pids.get("A")
    if not other:
        return Check("gate.native", "native arms agree", "integrity", "gate", "inconclusive", cells,
                     note="arm B ran in the process of arm A")  # fmt: skip
    wrong = apart if j.bitwise else []
    status = "inconclusive" if wrong or not cells else "pass"
    note = f"native decoding differs from itself: {', '.join(apart)}" if apart else "" if cells else "no arm ran"
    return Check("gate.native", "native arms agree", "integrity", "gate", status, cells, same, note=note)


def _ends_check(j: Judged) -> Check:
    """Every active row of the tree ends an accepted path in every kind of schedule."""
    rows, missing = len(hydra27().active_rows), uncovered(j.found.scripts)
    note = "; ".join(f"{kind}: no path ends at {', '.join(map(str, gap))}" for kind, gap in missing.items())
    return Check("plan.ends", "accepted ends", "plan", "plan", "inconclusive" if missing else "pass",
                 rows * len(KINDS), note=note)  # fmt: skip


def _recorded_check(j: Judged) -> Check:
    """The recording of one schedule, judged offline, gets the verdict that its cycles get here."""
    recorded = j.found.recorded
    if recorded is None:
        return Check("continue.recorded", "recorded, judged offline", "all", "offline", "inconclusive", 0,
                     note="nothing was recorded")  # fmt: skip
    name = next((d.task.name for d in j.found.outcomes if d.task.record), "")
    live = "FAIL" if any(c.script.name == name and not _all(j, c) for c in [*j.main, *j.prompts]) else "PASS"
    offline = recorded.verdict
    cells = sum(c.cells for c in recorded.checks)
    note = "" if live == offline else f"{name}: live {live}, offline {offline}: {'; '.join(recorded.reasons)[:200]}"
    status = "fail" if "FAIL" in (live, offline) else "pass" if live == offline else "inconclusive"
    if status == "fail" and not note:
        note = f"{name}: {recorded.reasons[0]}"
    return Check("continue.recorded", "recorded, judged offline", "all", "offline", status, cells, note=note)


def _all(j: Judged, cell: Cell) -> bool:
    return all(_same(j, cell, a) for a in cell.candidate.apart.values())


def _drift_checks(j: Judged) -> list[Check]:
    drift = j.found.drift
    if j.found.drift_stopped:
        title = "long decoding by trees = plain"
        return [Check("drift.tokens", title, "all", _bits_rung(j), "fail", 1, 0, note=j.found.drift_stopped)]
    if drift is None:
        return []
    count = len(drift.native.tokens)
    odd = list(drift.differences)
    equal = drift.same == count and not odd
    status = ("pass" if equal else "fail") if j.bitwise else "info"
    note = "" if equal else f"{drift.same} of {count} tokens equal; {len(odd)} surfaces differ at the end"
    same = drift.same + drift.cells - len(odd)
    return [
        Check(
            "drift.tokens", f"{count:,} tokens by trees = plain", "all", _bits_rung(j), status, count + drift.cells,
            same, note=note,
        ),
    ]  # fmt: skip


def controls_of(j: Judged) -> list[Control]:
    """One line a fault: detected only if every prefix saw it; ratio: the least over the prefixes of the largest
    multiple of what the published envelope allows."""
    controls = []
    for fault in reached_faults(j.found.head):
        seen = [_seen(j, done, trace) for done, trace in j.found.controls if done.task.name == fault.id]
        hits = [(by, ratio) for by, ratio in seen if by]
        detected = bool(seen) and len(hits) == len(seen)
        ratio = min((r for _, r in hits), default=None)
        name = f"{fault.id}.{fault.surfaces[0]}"
        controls.append(
            Control(
                name, "detected", detected, hits[0][0] if detected else None, ratio if detected else None, len(seen)
            )
        )
    return controls


def _seen(j: Judged, done: Done, trace: Any) -> tuple[str, float]:
    """Which check sees a control ("" for none), and the largest multiple of the envelope."""
    if done.refused:
        return f"refused: {done.refused}", float("inf")
    cells = list(cells_of(done.task.scripts, trace, j.found.compared))
    wrong = first_wrong(cells, bitwise=j.bitwise)
    ratio = max([c.ratio(s) for c in cells for s in SURFACES], default=0.0)
    if wrong:
        return f"continue.{wrong[0][1].surface}", ratio
    assert done.outcome is not None
    if done.outcome.account.wrong:
        return "gate.inputs", float("inf")
    return ("gate.elsewhere", float("inf")) if done.outcome.touched else ("", ratio)


def findings_of(j: Judged, reproduce: str) -> list[Finding]:
    """The first wrong cycle of each script, and what the recording says of the cause."""
    wrong = first_wrong([*j.prompts, *j.main, *j.batch], bitwise=j.bitwise)
    found = [
        Finding(
            f"continue.{a.surface}", where(c), reproduce, layer=a.layer if a.layer >= 0 else None,
            row=c.script.cycles[c.cycle].end if c.cycle >= 0 else None,
            got=f"{a.part}: {a.elements} of {a.of} elements, distance {a.distance:.3g}",
            allowed="same bits" if j.bitwise else FACTOR * c.r(a.surface),
        )
        for c, a in wrong[:KEPT]
    ]  # fmt: skip
    name = next((d.task.name for d in j.found.outcomes if d.task.record), "")
    found += [
        Finding(f.check, f"{name} {f.case}", reproduce, f.request, f.layer, f.row, f.head, f.got, f.allowed)
        for f in (j.found.recorded.findings[:2] if j.found.recorded else ())
    ]
    return found


def coverage_of(stack: Stack) -> dict[str, str]:
    """Surfaces of the backend, and the drafter's if the model has a head."""
    covered = covered_surfaces(stack.backend)
    found = {s: "covered" if all(covered[s]) else "not covered" for s in SERVED}
    return {**found, "drafter": "covered" if stack.head is not None else "not covered"}


def doubts_of(j: Judged) -> list[str]:
    """Why a PASS would mean nothing."""
    doubts = []
    if len({c.script.tokens for c in j.main}) < 2:
        doubts.append("all schedules decode the same tokens")
    moved = [c for c in j.main if c.cycle >= 0 and len(c.script.cycles[c.cycle].path) > 1]
    if not moved:
        doubts.append("no cycle accepts more than its root")
    return doubts


def warnings_of(controls: Sequence[Control]) -> list[str]:
    """What a reader should know of the rules."""
    weak = [c.fault for c in controls if c.detected and c.ratio is not None and c.ratio <= 1]
    if weak:
        return [f"the published envelope alone would let through: {', '.join(weak)}"]
    return []
