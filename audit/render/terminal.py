"""The report that a person reads in ten seconds. It must say the same without colour, in a log, at 80 columns."""

from __future__ import annotations

import shlex
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from audit.render.continuation import notes as continuation_notes
from audit.render.continuation import tables as continuation_tables
from audit.render.decode import notes as decode_notes
from audit.render.decode import tables as decode_tables
from audit.render.diagnosis import print_diagnoses
from audit.render.progress import Progress
from audit.render.sampler import STEPS_LEGEND
from audit.render.sampler import tables as sampler_tables
from audit.render.text import (
    advice,
    against,
    controls_seen,
    count,
    first_of,
    headline,
    last_lines,
    number,
    outcome,
    place,
)
from audit.report import Check, Control, Finding, Report

__all__ = ["MAX_FINDINGS", "Progress", "print_report"]

#: Findings of more checks than this stay in report.json only.
MAX_FINDINGS = 5

#: Part of a check's id -> the line that it is merged into when it passed.
_MERGED = (
    (".small.", "small trees, odd sizes"),
    (".envelope.", "frozen envelope"),
    (".cycle.", "run again, all else same"),
    (".repeat.", "run again, all else same"),
    (".rotation.", "run again, all else same"),
    (".untouched.", "run again, all else same"),
    (".derived.", "against float64"),
    (".law.exact.", "exact law, all rules"),
    (".law.summed.", "summed law, small trees"),
    (".paired.", "same coins as the rule"),
    (".walks.", "walks, all steps"),
    (".greedy.", "greedy answers, all steps"),
    (".relation.", "metamorphic relations"),
)

_STYLES = {"pass": "green", "fail": "bold red", "inconclusive": "bold yellow", "info": "dim"}
_VERDICTS = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
_SHORT_STATUS = {"inconclusive": "open"}


def print_report(report: Report, console: Console | None = None, max_findings: int = MAX_FINDINGS) -> None:
    """Print headline, checks, controls, findings and warnings; the very last line is the verdict.

    Column `x bound` is the largest value as a multiple of its bound.
    """
    out = console or Console()
    _say(out, headline(report), "dim")
    out.print(_check_table(report.checks))
    _print_notes(out, report.checks)
    _print_coverage(out, report)
    _print_extra(out, report)
    if "steps" in report.facts:
        _print_sampler(out, report)
    elif report.controls:
        _print_controls(out, report)
    _print_findings(out, report, max_findings)
    if report.diagnosis.get("surfaces"):
        out.print()
        print_diagnoses(report.diagnosis["surfaces"], report.backend, report.seed, out)
    for warning in report.warnings:
        _say(out, f"warning: {warning}", "yellow")
    if report.verdict != "PASS":
        for reason in report.reasons:
            _say(out, f"- {reason}", _VERDICTS[report.verdict])
    for line in advice(report):
        _say(out, f"what to do: {line}")
    _say(out, _fitting(report, out.width), _VERDICTS[report.verdict])


def _say(out: Console, text: str, style: str = "") -> None:
    # Text, not str: file names and shapes contain brackets, which rich would read as markup.
    out.print(Text(text, style=style), highlight=False)


def _plain_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False)


def _check_table(checks: tuple[Check, ...]) -> Table:
    table = _plain_table()
    table.add_column("check", overflow="fold")
    table.add_column("surface", overflow="fold")
    table.add_column("rung", overflow="fold")
    for name in ("cells", "bitwise", "x bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for c in condensed(checks):
        cells, bits, ratio = count(c.cells), count(c.bitwise_cells), number(c.worst_ratio)
        status = Text(_SHORT_STATUS.get(c.status, c.status), style=_STYLES[c.status])
        table.add_row(Text(c.title), Text(c.surface), Text(c.rung), cells, bits, ratio, status)
    return table


def condensed(checks: tuple[Check, ...]) -> list[Check]:
    """Checks with those that passed and belong together merged into one line each; every other one as it is.

    Merged lines add up cells and keep the worst ratio; report.json has them apart.
    """
    lines: list[Check] = []
    at: dict[tuple[str, str], int] = {}
    for check in checks:
        title = next((t for part, t in _MERGED if part in f".{check.id}."), None)
        if title is None or check.status != "pass":
            lines.append(check)
            continue
        key = (title, check.surface)
        if key in at:
            lines[at[key]] = _merge(lines[at[key]], check)
        else:
            at[key] = len(lines)
            lines.append(replace(check, title=title))
    return lines


def _merge(a: Check, b: Check) -> Check:
    worst = [c.worst_ratio for c in (a, b) if c.worst_ratio is not None]
    bits = [c.bitwise_cells for c in (a, b) if c.bitwise_cells is not None]
    return replace(
        a,
        rung=a.rung if a.rung == b.rung else "all",
        cells=a.cells + b.cells,
        bitwise_cells=sum(bits) if bits else None,
        worst_ratio=max(worst, default=None),
    )


def _print_notes(out: Console, checks: tuple[Check, ...]) -> None:
    """Print what would puzzle a reader of the table; notes of other checks than passed ones return as reasons."""
    for check in checks:
        over = check.status == "pass" and (check.worst_ratio or 0) > 1
        if check.note and (over or check.status == "info"):
            _say(out, f"note: {check.title}: {check.note}", "dim")


def _print_coverage(out: Console, report: Report) -> None:
    partly = [f"{surface} {state}" for surface, state in report.coverage.items() if state != "covered"]
    if partly:
        _say(out, f"coverage: {', '.join(partly)}", "yellow")


def _print_extra(out: Console, report: Report) -> None:
    """Tables and notes that a suite of whole decoders adds."""
    for _, (header, rows) in (*decode_tables(report), *continuation_tables(report)):
        out.print()
        table = _plain_table()
        for at, name in enumerate(header):
            table.add_column(name, justify="right" if at else "left", no_wrap=bool(at), overflow="fold")
        for row in rows:
            table.add_row(*row)
        out.print(table)
    for line in (*decode_notes(report), *continuation_notes(report)):
        _say(out, line, "dim")


def _print_sampler(out: Console, report: Report) -> None:
    seen, total = controls_seen(report)
    for title, (header, rows) in sampler_tables(report):
        out.print()
        table = _plain_table()
        for name in header:
            table.add_column(name, overflow="fold")
        for row in rows:
            style = _STYLES["inconclusive"] if any("MISSED" in cell or "WRONG" in cell for cell in row) else ""
            table.add_row(*(Text(cell, style=style) for cell in row))
        out.print(table)
        if title == "Steps":
            _say(out, STEPS_LEGEND, "dim")
        if title == "Controls":
            _say(
                out, f"{seen}/{total} controls detected, each in every step where its exact TV is 0.002 or more", "dim"
            )


def _print_controls(out: Console, report: Report) -> None:
    """One line per kind of fault with the surfaces that saw it; a control that went wrong gets its own words."""
    seen, total = controls_seen(report)
    out.print()
    table = _plain_table()
    table.add_column(f"control ({seen}/{total} detected)", overflow="fold")
    table.add_column("result", overflow="fold")
    table.add_column("least x bound", justify="right", no_wrap=True)
    kinds: dict[str, list[Control]] = {}
    for control in report.controls:
        kinds.setdefault(control.fault.rpartition(".")[0] or control.fault, []).append(control)
    for kind, controls in kinds.items():
        ratios = [c.ratio for c in controls if c.ratio is not None]
        fault = kind.replace("_", " ") if controls[0].expect == "detected" else f"{kind.replace('_', ' ')} (harmless)"
        table.add_row(Text(fault), _outcomes(controls), number(min(ratios, default=None)))
    out.print(table)


def _outcomes(controls: list[Control]) -> Text:
    wrong = [c for c in controls if not c.as_expected]
    if wrong:
        lines = [(c.fault.rpartition(".")[0] and c.fault.rpartition(".")[2] + ": ") + outcome(c) for c in wrong]
        return Text("\n".join(lines), style=_control_style(wrong[0]))
    word = "seen by" if controls[0].expect == "detected" else "not flagged by"
    surfaces = ", ".join(c.fault.rpartition(".")[2] for c in controls)
    return Text(f"{word} {surfaces}", style=_control_style(controls[0]))


def _control_style(control: Control) -> str:
    return _STYLES["pass" if control.as_expected else "inconclusive"]


def _print_findings(out: Console, report: Report, limit: int) -> None:
    """One paragraph a check: how much is outside, the first place and the command that shows it."""
    groups: dict[str, list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault(finding.check, []).append(finding)
    for check, found in list(groups.items())[:limit]:
        out.print()
        first = first_of(found)
        where = ", ".join(part for part in (first.case, place(first)) if part)
        _say(out, f"{check}: {_extent(report, check, found)}", "red")
        _say(out, f"  first in {where}: {against(report, first)}")
        _print_command(out, first)
    more = len(groups) - limit
    if more > 0:
        _say(out, f"findings of {more} more checks in report.json (--report DIR)")
    if report.findings:
        out.print()


def _extent(report: Report, check: str, found: list[Finding]) -> str:
    """How many cells are outside, as far as a check says so, else how many findings there are; and the worst."""
    line = next((c for c in report.checks if c.id == check), None)
    counted = line.note if line and line.note.endswith("cells outside") else ""
    worst = f", worst {number(line.worst_ratio)} x bound" if line and line.worst_ratio is not None else ""
    return (counted or ("1 finding" if len(found) == 1 else f"{len(found)} findings")) + worst


def _print_command(out: Console, finding: Finding) -> None:
    for line in _command_lines(finding.reproduce, out.width):
        # Never folded by rich: a command must survive copy and paste, even a word longer than the terminal.
        out.print(Text(line), soft_wrap=True, highlight=False)


def _command_lines(command: str, width: int) -> list[str]:
    """Break a shell command between words, each line but the last ending in a backslash."""
    try:
        words = [shlex.quote(word) for word in shlex.split(command)]
    except ValueError:
        return [f"  {command}"]
    # Pipes, variables and double quotes would change their meaning when quoted again: leave such a command alone.
    if " ".join(words) != " ".join(command.split()):
        return [f"  {command}"]
    lines, line = [], " "
    for word in words:
        if len(line) + 1 + len(word) + 2 > width and line.strip():
            lines.append(f"{line} \\")
            line = "   "
        line = f"{line} {word}"
    return [*lines, line]


def _fitting(report: Report, width: int) -> str:
    """Return the longest closing line that fits; the verdict always stays, and a long reason is cut visibly."""
    options = last_lines(report)
    for line in options:
        if len(line) <= width:
            return line
    return options[-1][: max(width - 3, 0)] + "..."
