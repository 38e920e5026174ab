"""From what the parts of the sampler suite found to checks, controls, findings and facts of a `Report`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import inf, isfinite, log
from typing import Any

from audit.exact_run import ExactResult
from audit.law_domain import describe
from audit.montecarlo import StepResult
from audit.report import Check, Control, Finding
from audit.sampler_control import LEAST_TV, ControlResult
from audit.sampler_law import TOLERANCE, SummedResult
from audit.sampler_step import StepOutcome

SURFACE = "sampler"
MAX_MESSAGES = 5
"""Findings of one step; StepResult.messages has them all."""


def exact_checks(results: Sequence[ExactResult]) -> list[Check]:
    """One check a rule: lossless, exactly, in every configuration."""
    return [
        Check(
            f"law.exact.{r.rule}",
            f"exact law of {r.rule}",
            "rule",
            "law",
            "pass" if r.lossless else "fail",
            r.configurations,
            bound="equal as integers",
            note=""
            if r.lossless
            else f"lossy in {r.lossy} configurations, largest TV {r.worst}; closed form wrong in {r.forms_wrong}",
        )
        for r in results
    ]


def summed_check(spec: str, results: Sequence[SummedResult], judged: bool) -> Check:
    """One check a sampler. judged: it is the audited one; of others a deviation is reported all the same."""
    verdicts = [r.verdict for r in results]
    status = "fail" if "fail" in verdicts else "inconclusive" if "inconclusive" in verdicts else "pass"
    wrong = [r for r in results if r.verdict != "pass"]
    note = "; ".join(_summed_words(r) for r in wrong[:2])
    return Check(
        f"law.summed.{spec}",
        f"summed law{'' if judged else f' of {spec}'}",
        SURFACE if judged else "rule",
        "law",
        status,
        max(1, sum(r.cells for r in results)),
        worst_ratio=max(r.bound for r in results) / TOLERANCE,
        bound=TOLERANCE,
        note=note,
    )


def _summed_words(result: SummedResult) -> str:
    if result.changed:
        return f"{result.step}: input written to: {', '.join(result.changed)}"
    if result.never:
        return f"{result.step}: {result.never}"
    odd = f", {result.odd}" if result.odd else ""
    return f"{result.step}: TV {result.least:.3g} to {result.bound:.3g}{odd}"


def summed_findings(results: Sequence[SummedResult], reproduce: str) -> list[Finding]:
    """One finding for each small step whose summed law is off."""
    return [
        Finding(
            f"law.summed.{r.sampler}",
            f"{r.step} {r.odd}".strip(),
            reproduce,
            got=r.never or r.bound,
            allowed="never" if r.never else TOLERANCE,
        )
        for r in results
        if r.verdict == "fail"
    ]


def step_checks(outcome: StepOutcome, closed: bool) -> list[Check]:
    """The checks of one captured-like step."""
    checks = []
    if outcome.greedy is not None:
        checks.append(_greedy_check(outcome))
    if outcome.paired is not None:
        checks.append(_paired_check(outcome))
    if outcome.result is not None:
        checks.append(_walk_check(outcome, outcome.result, closed))
    return checks


def _greedy_check(outcome: StepOutcome) -> Check:
    found = outcome.greedy
    assert found is not None
    return Check(
        f"greedy.{outcome.case.name}", f"greedy answers, {outcome.case.name}", SURFACE, "exact",
        "fail" if found.wrong else "pass", found.walks, bound="the first argmax",
        note=f"{found.wrong} of {found.walks} answers wrong; {found.first}" if found.wrong else "",
    )  # fmt: skip


def _paired_check(outcome: StepOutcome) -> Check:
    found = outcome.paired
    assert found is not None
    name = outcome.case.name
    certified = found.upper <= LEAST_TV
    # Without statistics of its own, pairs are all that has seen the step at its full size.
    open_ = "info" if outcome.result is not None else "inconclusive"
    status = "fail" if found.rejects else "pass" if certified else open_
    if found.rejects:
        note = f"{found.event}: {found.more} walks against {found.fewer} of the rule, p = {found.p_value:.3g}"
    elif certified:
        note = ""
    else:
        note = (
            f"{found.differ} of {found.walks} walks differ from the rule's on the same coins: TV <= {found.upper:.3g}"
        )
    return Check(
        f"paired.{name}", f"same coins as the rule, {name}", SURFACE, "paired", status, found.walks,
        found.walks - found.differ, found.upper / LEAST_TV, LEAST_TV, note,
    )  # fmt: skip


def _walk_check(outcome: StepOutcome, result: StepResult, closed: bool) -> Check:
    status, note = "pass", ""
    doubts = walk_doubts(result, closed, (*outcome.rare, *outcome.certain))
    if result.verdict == "FAIL":
        status, note = "fail", result.messages()[0]
    elif doubts:
        status, note = "inconclusive", "; ".join(doubts)
    return Check(
        f"walks.{outcome.case.name}", f"walks of {outcome.case.name}", SURFACE, "monte-carlo", status, result.walks,
        worst_ratio=evidence_ratio(result), bound=f"p >= {result.test_level:.3g} in each of {len(result.tests)} tests",
        note=note,
    )  # fmt: skip


def walk_doubts(result: StepResult, closed: bool, excused: Sequence[int] = ()) -> list[str]:
    """Why walks that show nothing show nothing: rows not visited enough, faults not ruled out.

    excused: rows that need no test, or that the rule itself hardly visits: reported, and no doubt of the run.
    """
    doubts = []
    missing = [row for row in result.untested_rows if row not in excused]
    if missing:
        rows = ", ".join(map(str, missing[:5]))
        more = len(missing) - 5
        doubts.append(f"too few walks visited row {rows}" + (f" and {more} more" if more > 0 else ""))
    if closed and result.open:
        doubts.append(f"not ruled out after {result.walks} walks: {', '.join(result.open)}")
    return doubts


def evidence_ratio(result: StepResult) -> float:
    """How far the strongest test or e-process went, 1 = it rejects; infinity for an impossible outcome."""
    if result.violations:
        return inf
    values = [0.0]
    values += [_ratio(t.p_value, result.test_level) for t in result.tests if t.p_value is not None]
    values += [e.log_e / log(1 / e.level) for e in result.evidence]
    return max(values)


def _ratio(p_value: float, level: float) -> float:
    return log(p_value) / log(level) if p_value > 0 else inf


def step_findings(outcome: StepOutcome, reproduce: str) -> list[Finding]:
    """The findings of one step, strongest first."""
    case, found = outcome.case.name, []
    if outcome.greedy is not None and outcome.greedy.wrong:
        found.append(Finding(f"greedy.{case}", case, reproduce, got=outcome.greedy.first, allowed="the first argmax"))
    if outcome.paired is not None and outcome.paired.rejects:
        pairs = outcome.paired
        what = f"{pairs.event}: {pairs.more} walks against {pairs.fewer}, p = {pairs.p_value:.3g}"
        found.append(Finding(f"paired.{case}", case, reproduce, got=what, allowed=f"p >= {pairs.level:.3g}"))
    if outcome.result is None:
        return found
    result = outcome.result
    check = f"walks.{case}"
    found += [
        Finding(check, case, reproduce, row=v.row if v.row >= 0 else None, got=str(v), allowed="never")
        for v in result.violations
    ]
    for test in result.rejected[: MAX_MESSAGES - len(found)]:
        what = (
            f"{test.name}: p = {test.p_value:.3g}, {test.where} seen {test.observed:.0f}, expected {test.expected:.1f}"
        )
        found.append(Finding(check, case, reproduce, row=test.row, got=what, allowed=f"p >= {result.test_level:.3g}"))
    for process in result.evidence:
        if process.accused_at is not None:
            what = f"likelihood ratio for {process.name} after {process.accused_at} walks"
            found.append(Finding(check, case, reproduce, got=what, allowed=f"below 1/{process.level:.3g}"))
    return found


def guard_checks(
    outcomes: Sequence[StepOutcome], summed: Sequence[SummedResult], coins: bool, builtin: bool
) -> list[Check]:
    """Inputs left alone; same coins, same answer."""
    changed = sorted({name for o in outcomes for name in o.changed} | {name for r in summed for name in r.changed})
    checks = [
        Check(
            "inputs", "inputs left unchanged", SURFACE, "guard", "fail" if changed else "pass",
            max(1, len(outcomes) + len(summed)), bound="unchanged",
            note=f"written to: {', '.join(changed)}" if changed else "",
        )
    ]  # fmt: skip
    if coins and not builtin and any(o.paired is not None or o.greedy is not None for o in outcomes):
        unequal = [f"{o.case.name}: {o.unequal}" for o in outcomes if o.unequal]
        checks.append(
            Check(
                "repeat", "same coins, same answer", SURFACE, "guard", "fail" if unequal else "pass", len(outcomes),
                bound="equal", note="; ".join(unequal[:2]),
            )
        )  # fmt: skip
    return checks


def controls_of(results: Iterable[ControlResult]) -> list[Control]:
    """The controls that had to show something, as the report has them."""
    return [
        Control(f"{r.fault}.{r.step}", r.expect, r.detected, r.by or None, r.ratio, 1)
        for r in results
        if r.due
    ]  # fmt: skip


def facts_of(
    outcomes: Sequence[StepOutcome],
    exact: Sequence[ExactResult],
    summed: Sequence[SummedResult],
    controls: Sequence[ControlResult],
    count: int,
) -> dict[str, Any]:
    """Everything that a reader of the report may ask for by name, as plain data."""
    facts: dict[str, Any] = {"steps": {o.case.name: step_facts(o) for o in outcomes}}
    facts["conventions"] = {
        o.case.name: {c.name: {"tv": c.tv, "row_tv": c.row_tv, "row": c.row, "applies": c.applies}
                      for c in o.conventions}
        for o in outcomes if o.conventions
    }  # fmt: skip
    if exact:
        facts["exact"] = {"domain": describe(count), "rules": {r.rule: asdict(r) for r in exact}}
    if summed:
        facts["summed"] = {f"{r.sampler} {r.step}": asdict(r) for r in summed}
    if controls:
        table: dict[str, dict[str, Any]] = {}
        for c in controls:
            table.setdefault(c.fault, {})[c.step] = {
                "tv": c.tv, "reachable": c.reachable, "due": c.due, "detected": c.detected, "by": c.by,
                "walks": c.walks, "note": c.note,
            }  # fmt: skip
        facts["faults"] = table
    return _plain(facts)  # type: ignore[no-any-return]


def step_facts(outcome: StepOutcome) -> dict[str, Any]:
    """What one step could have seen and what it certifies. TV in [0, 1]; see `audit.power`."""
    facts: dict[str, Any] = {"seconds": round(outcome.seconds, 2), "vocab": outcome.case.vocab}
    if outcome.paired is not None:
        facts["paired"] = asdict(outcome.paired)
    if outcome.greedy is not None:
        facts["greedy"] = asdict(outcome.greedy)
    result = outcome.result
    if result is None:
        return facts
    root = next((t.detectable for t in result.tests if t.name == "node" and t.row == 0), None)
    certificates = {c.row: c for c in result.certificates}
    facts |= {
        "walks": result.walks,
        "looks": result.looks,
        "level": result.level,
        "tests": len(result.tests),
        "detectable_root": root,
        "detectable_any_row": max(
            (
                1.0 if t.detectable is None else t.detectable
                for t in result.tests
                if t.name == "node" and t.row not in outcome.certain
            ),
            default=1.0,
        ),
        "detectable_known_fault": result.detectable_known,
        "certificate_root": certificates[0].bound if 0 in certificates else 1.0,
        "certificate_root_bands": certificates[0].bands if 0 in certificates else 1.0,
        "certificate_any_row_bands": max((c.bands for c in result.certificates), default=1.0),
        "least_visits": min((c.visits for c in result.certificates), default=0),
        "untested_rows": list(result.untested_rows),
        "rare_rows": list(outcome.rare),
        "least_p_adjusted": min(result.adjusted, default=1.0),
        "likelihood_ratio": {
            e.name: {"state": e.state, "log_e": e.log_e, "walks": e.excluded_at or e.accused_at or e.walks}
            for e in result.evidence
        },
        "beyond_likelihood_ratio": list(outcome.out_of_reach),
    }
    return facts


def _plain(value: Any) -> Any:
    """Return data that comes back from JSON as it went in: lists for tuples, text for what is no finite number."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def frame_records(outcomes: Sequence[StepOutcome], controls: Sequence[ControlResult]) -> list[dict[str, Any]]:
    """One line per test, certificate, e-process and control, for `audit.frame.cells_frame`."""
    records: list[dict[str, Any]] = []
    for outcome in outcomes:
        case, result = outcome.case.name, outcome.result
        if result is None:
            continue
        for test, adjusted in zip(result.tests, result.adjusted, strict=True):
            base = {"case": case, "surface": SURFACE, "row": test.row, "test": test.name, "draws": test.n}
            records.append({**base, "statistic": "p_value", "value": test.p_value})
            records.append({**base, "statistic": "p_adjusted", "value": adjusted})
            records.append({**base, "statistic": "detectable_tv", "value": test.detectable})
        for c in result.certificates:
            base = {"case": case, "surface": SURFACE, "row": c.row, "test": "certificate", "draws": c.visits}
            records += [
                {**base, "statistic": f"tv_{n}", "value": v} for n, v in (("observed", c.tv), ("bound", c.bound))
            ]
    for control in controls:
        base = {"case": control.step, "surface": SURFACE, "test": control.fault, "draws": control.walks}
        records.append({**base, "statistic": "exact_tv", "value": control.tv})
    return records
