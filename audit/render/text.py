"""Short forms of numbers that all renderers share."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, isnan
from pathlib import PurePath

from audit.report import Check, Control, Finding, Report, judged_cells

#: Width of a shortened hash in text.
SHORT_HASH = 6


def count(value: int | None) -> str:
    """Return a count with thousands separators, `-` for none."""
    return "-" if value is None else f"{value:,}"


def number(value: str | float | None) -> str:
    """Return four significant digits, `inf`, a rule's name as it is, or `-`."""
    if value is None or isinstance(value, str):
        return value or "-"
    if isnan(value):
        return "nan"
    if not isfinite(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.4g}"


def place(finding: Finding) -> str:
    """Return where a finding is, naming only the indices that apply: `request 0, layer 3, row 12`."""
    parts = [(name, getattr(finding, name)) for name in ("request", "layer", "row", "head")]
    return ", ".join(f"{name} {value}" for name, value in parts if value is not None)


#: How the derived rung says which part of an error its bound is.
_SHARE = " of it"

#: First words of suites whose findings hold a value against the value that it should be.
_VALUES = ("component", "calibration", "fuzz")


def against(report: Report, finding: Finding) -> str:
    """What a finding has and what it should have: "expected" where it must be just that, "allowed" where at most.

    A number is what the bits should have been in the suites that compare values, a limit in the others.
    """
    got, allowed = number(finding.got), finding.allowed
    if allowed is None:
        return got
    if isinstance(allowed, str) and allowed.endswith(_SHARE):
        share = f"{float(allowed.removesuffix(_SHARE)):.1%}" if got != "nan" else "nothing"
        return f"error {got}, of which {share} is allowed"
    values = isinstance(allowed, str) or report.suite.startswith(_VALUES)
    return f"{got}, {'expected' if values else 'allowed'} {number(allowed)}"


def first_of(findings: Sequence[Finding]) -> Finding:
    """The finding of the case that came first whose row comes first: parents stand before children."""
    case = findings[0].case
    own = [f for f in findings if f.case == case]
    return min(own, key=lambda f: tuple(-1 if x is None else x for x in (f.request, f.row, f.layer, f.head)))


def outcome(control: Control) -> str:
    """Return what became of a control, in a word or two."""
    if control.cases == 0:
        return "no case"
    if control.expect == "harmless":
        return f"FLAGGED by {control.by}" if control.detected else "not flagged"
    return str(control.by) if control.detected else "MISSED"


def headline(report: Report) -> str:
    """Return one line that says what ran, on what, for how long."""
    facts = report.environment
    device = facts.get("gpu") or facts.get("processor") or "unknown device"
    parts = [f"{report.suite} on {report.backend}", str(device), f"torch {facts.get('torch', '?')}"]
    parts += [f"seed {report.seed}", f"{report.wall_s:.1f} s"]
    if report.peak_mib is not None:
        parts.append(f"{report.peak_mib:,.0f} MiB")
    return ", ".join(parts)


def last_lines(report: Report) -> list[str]:
    """Return the closing line in several lengths, longest first; a renderer takes the first that fits."""
    start = f"{report.verdict}  {report.backend}  {report.suite}"
    if report.verdict == "FAIL":
        failed = [c.id for c in report.checks if c.status == "fail"]
        short = f"{start}  {len(failed)} of {len(report.checks)} checks failed"
        return [f"{short}: {', '.join(failed)}", f"{short}, first {failed[0]}", short]
    if report.verdict == "INCONCLUSIVE":
        first, more = report.reasons[0], len(report.reasons) - 1
        rest = f" (+{more} more)" if more else ""
        return [f"{start}  {first}{rest}", f"{report.verdict}  {first}{rest}", f"{report.verdict}  {first}"]
    cells = _cells(report.checks)
    seen, total = controls_seen(report)
    middle = f"{start}  {cells}, {seen}/{total} controls"
    shorter = [middle, f"{start}  {seen}/{total} controls", f"{report.verdict}  {report.backend}  {cells}, "
               f"{seen}/{total} controls", start]  # fmt: skip
    if report.envelope is None:
        return [f"{middle} detected", *shorter]
    name, digest = PurePath(report.envelope.path).name, report.envelope.sha256[:SHORT_HASH]
    return [
        f"{middle} detected, envelope {name} ({digest}..)",
        f"{middle}, {name} ({digest}..)",
        f"{middle}, envelope {digest}..",
        *shorter,
    ]


#: Part of a reason -> what a user can do about it. The first that fits counts.
_ADVICE = (
    ("was not detected", "more or other cases may reach it (--instances, --sets, --seed; a larger shape); a control "
     "that stays unseen means that the kernel does not read what the control changes"),
    ("ran on no case", "leave out what restricts the cases (--only, --instances), or use a shape with larger trees"),
    ("flagged by", "the kernel reads rows that are inactive: mask them, as their operands may be anything"),
    ("outputs of", "look at whether the kernel writes to `out` at all, and at the rows it was given"),
    ("memory horizon", "use a shape or checkpoint whose decay is nearer to one, or longer trees"),
    ("no surface", "write verify, publish and native_step of at least one surface (lumotree/backends/protocol.py)"),
    ("zero cells", "leave out what restricts the cases, or write the methods of at least one surface"),
    ("no positive control", "run the controls too: without them equal bits show nothing"),
    ("emitted token is the same", "use a checkpoint whose output depends on its input"),
    ("accepted ends", "accept longer paths: other drafts, prompts or another seed"),
    ("same tokens", "use a checkpoint whose output depends on its input"),
    ("more than its root", "accept longer paths: other drafts, prompts or another seed"),
    ("recording", "record operands, publications and at least two cycles of a request (lumotree/recorder.py)"),
    ("of every request are the same", "record cycles that accept something"),
    ("recorded", "record operands, publications and at least two cycles of a request (lumotree/recorder.py)"),
)  # fmt: skip


def advice(report: Report) -> list[str]:
    """What to do about an inconclusive run, one line for each kind of reason; empty for other verdicts."""
    if report.verdict != "INCONCLUSIVE":
        return []
    found = (next((words for part, words in _ADVICE if part in reason), "") for reason in report.reasons)
    return [words for words in dict.fromkeys(found) if words]


def controls_seen(report: Report) -> tuple[int, int]:
    """Return how many of the controls that must be detected were, and how many there are."""
    positive = [c for c in report.controls if c.expect == "detected"]
    return sum(c.as_expected for c in positive), len(positive)


def _cells(checks: tuple[Check, ...]) -> str:
    """Say how many cells are bitwise if any rung asked for that, else how many were judged."""
    bitwise = [c for c in checks if c.rung == "bitwise" and c.bitwise_cells is not None]
    if not bitwise:
        return f"{judged_cells(checks):,} cells judged"
    same, cells = sum(c.bitwise_cells or 0 for c in bitwise), sum(c.cells for c in bitwise)
    return f"{same:,} cells bitwise" if same == cells else f"{same:,} of {cells:,} cells bitwise"
