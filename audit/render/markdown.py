"""`summary.md`: what a pull request or a job summary shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from audit.render.continuation import notes as continuation_notes
from audit.render.continuation import tables as continuation_tables
from audit.render.decode import notes as decode_notes
from audit.render.decode import tables as decode_tables
from audit.render.diagnosis import lines
from audit.render.sampler import tables as sampler_tables
from audit.render.text import against, count, headline, last_lines, number, outcome, place
from audit.report import Report

#: More findings than this stay in report.json only.
MAX_FINDINGS = 20


def render_markdown(report: Report) -> str:
    """Return GitHub-flavoured Markdown."""
    blocks = [f"# {_inline(last_lines(report)[0])}", _inline(headline(report))]
    if report.reasons:
        blocks.append("\n".join(f"* {_inline(reason)}" for reason in report.reasons))
    blocks += ["## Checks", _checks(report)]
    for title, (header, rows) in sampler_tables(report):
        blocks += [f"## {title}", _table(header, rows)]
    for title, (header, rows) in decode_tables(report):
        blocks += [f"## {title}", _table(header, rows), *(_inline(line) for line in decode_notes(report))]
    for title, (header, rows) in continuation_tables(report):
        blocks += [f"## {title}", _table(header, rows), *(_inline(line) for line in continuation_notes(report))]
    if report.controls and "steps" not in report.facts:
        blocks += ["## Controls", _controls(report)]
    if report.findings:
        blocks += ["## Findings", *_findings(report)]
    for surface in report.diagnosis.get("surfaces", ()):
        blocks += [f"## Diagnosis of {surface['surface']}", _diagnosis(report, surface)]
    if report.warnings:
        blocks += ["## Warnings", "\n".join(f"* {_inline(w)}" for w in report.warnings)]
    blocks += ["## Run", _run(report)]
    return "\n\n".join(blocks) + "\n"


def _checks(report: Report) -> str:
    header = ("check", "surface", "rung", "cells", "bitwise", "worst/bound", "bound", "status", "note")
    rows = (
        (
            f"{c.id}: {c.title}",
            c.surface,
            c.rung,
            count(c.cells),
            count(c.bitwise_cells),
            number(c.worst_ratio),
            number(c.bound),
            c.status if c.status in ("pass", "info") else c.status.upper(),
            c.note,
        )
        for c in report.checks
    )
    return _table(header, rows)


def _diagnosis(report: Report, surface: Mapping[str, Any]) -> str:
    return "\n".join(f"* {_inline(line.strip())}" for line in lines(surface, report.backend, report.seed))


def _controls(report: Report) -> str:
    header = ("fault", "expected", "outcome", "ratio", "cases", "as expected")
    rows = (
        (c.fault, c.expect, outcome(c), number(c.ratio), count(c.cases), "yes" if c.as_expected else "NO")
        for c in report.controls
    )
    return _table(header, rows)


def _findings(report: Report) -> list[str]:
    blocks = []
    for f in report.findings[:MAX_FINDINGS]:
        where = ", ".join(part for part in (f.case, place(f)) if part)
        blocks.append(f"**{_inline(f.check)}** {_inline(where)}: {against(report, f)}")
        blocks.append(f"```sh\n{f.reproduce}\n```")
    more = len(report.findings) - MAX_FINDINGS
    if more > 0:
        blocks.append(f"{more} more in report.json.")
    return blocks


def _run(report: Report) -> str:
    facts: dict[str, object] = {"command": report.command, "created": report.created or None}
    if report.envelope is not None:
        facts |= {"envelope": f"{report.envelope.path} ({report.envelope.sha256})"}
        facts |= {"guarantee": report.envelope.guarantee}
    facts |= {f"coverage: {surface}": state for surface, state in report.coverage.items()}
    facts |= {f"horizon: {name}": number(value) for name, value in report.horizon.items()}
    facts |= {f"contract: {name}": value for name, value in report.contract.items()}
    facts |= report.environment
    return _table(("fact", "value"), ((name, str(value)) for name, value in facts.items() if value is not None))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_inline(cell) for cell in line) + " |" for line in lines)


def _inline(text: str) -> str:
    """Keep free text from ending a cell or starting markup of its own."""
    return re.sub(r"([\\|`<*_\[\]])", r"\\\1", " ".join(text.split()))
