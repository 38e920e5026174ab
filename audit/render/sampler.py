"""What the sampler suite adds to a report: what each step could have seen, how faults fared, how far conventions are.

One set of rows serves the terminal and Markdown. TV in these tables is a number in [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from audit.render.text import count, number
from audit.report import Report

Row = tuple[str, ...]
Table = tuple[Row, list[Row]]

STEPS_LEGEND = (
    "detectable: smallest TV seen with 99% power, in any direction, at row 0 / at any row; known: at which a known "
    "fault is expected to be decided; TV <=: one-sided certificate at row 0, bands of probability"
)


def step_table(report: Report) -> Table:
    """Return header and rows: one step each; empty without walks."""
    header = ("step", "walks", "detectable", "known", "TV <=", "least p")
    rows: list[Row] = []
    for name, facts in report.facts.get("steps", {}).items():
        if "walks" not in facts:
            continue
        detectable = f"{_tv(facts['detectable_root'])} / {_tv(facts['detectable_any_row'])}"
        known, bands = _tv(facts["detectable_known_fault"]), _tv(facts["certificate_root_bands"])
        rows.append((name, count(facts["walks"]), detectable, known, bands, number(facts["least_p_adjusted"])))
    return header, rows


def fault_table(report: Report) -> Table:
    """Return header and rows: one fault each, over the steps in which it had to be seen."""
    header = ("control", "seen in", "exact TV", "walks", "by")
    rows = []
    for fault, steps in report.facts.get("faults", {}).items():
        due = {step: facts for step, facts in steps.items() if facts["due"]}
        harmless = _harmless(report, fault)
        if due and not fault.startswith(("exact law ", "summed law ")):
            rows.append(_fault_row(fault, due, harmless))
    return header, [*rows, *_law_rows(report)]


def _harmless(report: Report, fault: str) -> bool:
    return any(c.expect == "harmless" and c.fault.rpartition(".")[0] == fault for c in report.controls)


def _fault_row(fault: str, due: Mapping[str, Mapping[str, Any]], harmless: bool) -> tuple[str, ...]:
    seen = [facts for facts in due.values() if facts["detected"]]
    missed = [step for step, facts in due.items() if not facts["detected"]]
    name = f"{fault.replace('_', ' ')}"
    steps = f"{len(seen)}/{len(due)}"
    if harmless:
        steps = f"FLAGGED in {len(seen)}/{len(due)}" if seen else "not flagged"
    elif missed:
        steps += f" MISSED {', '.join(missed)}"
    tvs, walks = [f["tv"] for f in due.values()], [f["walks"] for f in due.values()]
    by = sorted({_short(facts["by"]) for facts in seen})
    return name, steps, _span(min(tvs), max(tvs)), count(max(walks)), ", ".join(by)


def _short(by: str) -> str:
    return by.partition("@")[0].replace("likelihood ratio", "ratio")


def _law_rows(report: Report) -> list[tuple[str, ...]]:
    """The controls of the exact and the summed law, added up."""
    rows: list[Row] = []
    for start, by in (("exact law ", "law.exact"), ("summed law ", "law.summed")):
        mine = [c for c in report.controls if c.fault.startswith(start)]
        wrong = [c.fault.removeprefix(start) for c in mine if not c.as_expected]
        if mine:
            positive = [c for c in mine if c.expect == "detected"]
            steps = f"{sum(c.detected for c in positive)}/{len(positive)}"
            rows.append((f"{start}of faults", steps + (f" WRONG {', '.join(wrong)}" if wrong else ""), "", "", by))
    return rows


def convention_table(report: Report) -> Table:
    """Return header and rows: one pair of conventions each, TV of a walk by step."""
    names: dict[str, dict[str, str]] = {}
    for step, pairs in report.facts.get("conventions", {}).items():
        for name, facts in pairs.items():
            if facts["applies"]:
                names.setdefault(name, {})[step] = _tv(facts["tv"])
    rows: list[Row] = [(name, ", ".join(f"{step} {tv}" for step, tv in steps.items())) for name, steps in names.items()]
    return ("convention", "exact TV of a walk"), rows


def _span(least: float, most: float) -> str:
    return _tv(least) if least == most else f"{_tv(least)} - {_tv(most)}"


def _tv(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "-"
    return f"{value:.2g}" if value else "0"


def tables(report: Report) -> Sequence[tuple[str, Table]]:
    """Return the titled tables that have rows."""
    parts = (
        ("Steps", step_table(report)),
        ("Controls", fault_table(report)),
        ("Conventions", convention_table(report)),
    )
    return [(title, table) for title, table in parts if table[1]]
