"""The detection matrix for eyes: tables for a terminal, a heat map as SVG."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.table import Table

from audit.fault_matrix import WANTED, Row
from audit.fault_trial import STATES
from faults import BLIND

COLOURS = {
    "Caught": "#1b7f4b", "Missed": "#f2f2f2", "NotReached": "#ffffff", "Crashed": "#c0392b", "Equivalent": "#8fb8de",
}  # fmt: skip


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    return table


def print_matrix(rows: Sequence[Row], console: Console | None = None) -> None:
    """Counts by surface (those written blind apart), what each check catches, sizes, and whatever was not caught."""
    out = console or Console()
    out.print(_states(rows))
    out.print()
    out.print(_checks(rows))
    if any(r.rates and r.rates[0].size is not None for r in rows if r.surface != "sampler"):
        out.print()
        out.print(_sizes(rows))
    left = [r for r in rows if r.state not in ("Caught", "Equivalent") or r.note]
    if left:
        out.print()
        out.print(_faults(left))


def matrix_text(rows: Sequence[Row]) -> str:
    """The tables of `print_matrix` as plain text."""
    text = io.StringIO()
    print_matrix(rows, Console(file=text, width=100, no_color=True))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _states(rows: Sequence[Row]) -> Table:
    table = _table("surface", "faults", *STATES)
    groups: dict[str, list[Row]] = {}
    for blind in (False, True):
        for row in (r for r in rows if (r.fault in BLIND) == blind):
            groups.setdefault(f"{row.surface}, blind" if blind else row.surface, []).append(row)
    for name, own in groups.items():
        counts = Counter(r.state for r in own)
        table.add_row(name, str(len(own)), *(str(counts[s]) for s in STATES))
    return table


def _checks(rows: Sequence[Row]) -> Table:
    """Each check's catch over its surfaces: all, those it was first to catch, those that nothing else caught."""
    table = _table("check", "catches", "first", "alone", "passes")
    caught: Counter[str] = Counter()
    first: Counter[str] = Counter()
    only: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for row in rows:
        hits = [c.split(".", 1)[1] for c, state in row.checks.items() if state == "Caught"]
        caught.update(hits)
        only.update(hits if len(hits) == 1 else ())
        first.update([row.first.split(".", 1)[1]] if row.first else ())
        passed.update(c.split(".", 1)[1] for c, state in row.checks.items() if state == "Missed")
    for name in sorted({*caught, *passed}, key=lambda n: (-caught[n], n)):
        table.add_row(name, str(caught[name]), str(first[name]), str(only[name]), str(passed[name]))
    return table


def _sizes(rows: Sequence[Row]) -> Table:
    table = _table("fault with a size", f"seen {WANTED:.0%} from", "probability", "95% interval", "next size")
    for row in rows:
        if row.surface == "sampler" or not row.rates or row.rates[0].size is None:
            continue
        least = row.smallest
        after = next((r for r in row.rates if r.probability < WANTED), None)
        low, high = least.interval if least else (0.0, 0.0)
        table.add_row(
            row.fault,
            f"{least.size:g}" if least and least.size is not None else "-",
            f"{least.caught}/{least.reached}" if least else "-",
            f"{low:.3f}-{high:.3f}" if least else "-",
            f"{after.size:g}: {after.probability:.2f}" if after and after.size is not None else "-",
        )
    return table


def _faults(rows: Sequence[Row]) -> Table:
    table = _table("fault", "state", "first check, or why")
    table.columns[2].justify = "left"
    for row in rows:
        table.add_row(row.fault, row.state, row.first or row.note)
    return table


def matrix_svg(rows: Sequence[Row]) -> str:
    """A heat map: one line a fault, one column a check, coloured by state; readable without a script."""
    columns = list(dict.fromkeys(c.split(".", 1)[1] for r in rows for c in r.checks))
    cell, left, top = 11, 300, 130
    width, height = left + cell * len(columns) + 20, top + cell * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="9"><rect width="100%" height="100%" fill="#ffffff"/>'
    ]
    for i, name in enumerate(columns):
        x = left + cell * i + 8
        parts.append(f'<text x="{x}" y="{top - 6}" transform="rotate(-60 {x} {top - 6})">{escape(name)}</text>')
    for n, row in enumerate(rows):
        y = top + cell * n
        parts.append(f'<text x="{left - 6}" y="{y + 9}" text-anchor="end">{escape(row.fault)}</text>')
        states = {c.split(".", 1)[1]: state for c, state in row.checks.items()}
        for i, name in enumerate(columns):
            if name in states:
                title = escape(f"{row.fault}, {name}: {states[name]}")
                parts.append(
                    f'<rect x="{left + cell * i}" y="{y}" width="{cell - 1}" height="{cell - 1}" stroke="#d0d0d0" '
                    f'stroke-width="0.5" fill="{COLOURS[states[name]]}"><title>{title}</title></rect>'
                )
    for i, (state, colour) in enumerate(COLOURS.items()):
        x, y = left + 95 * i, height - 22
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" stroke="#909090" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}">{state}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
