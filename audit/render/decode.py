"""What the decode suite adds to a report: how far and how fast each mode went, and accepted lengths as a picture."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from audit.files import write_atomically
from audit.report import Report
from lumotree.errors import ReportError

Row = tuple[str, ...]
Table = tuple[Row, list[Row]]

PICTURE = "accepted-length.svg"
LEGEND = (
    "tok/cycle: tokens that a request gets in a decoding cycle, pooled, and least-most over requests and over runs; "
    "tok/s: all requests together, prompts left out"
)


def tables(report: Report) -> list[tuple[str, Table]]:
    """Title, header and rows of every table of a decode report; none for other suites."""
    modes = report.facts.get("decode", {}).get("modes", [])
    if not modes:
        return []
    header: Row = ("mode", "tok/cycle", "requests", "runs", "forwards", "seconds", "tok/s")
    rows: list[Row] = [
        (
            f"{m['mode']} {m['law']}",
            f"{m['per_cycle']:.2f}",
            _range(m["per_request"], 2),
            _range(m["per_run"], 2),
            _range(m["forwards"], 0),
            _range(m["seconds"], 1),
            _range(m["tokens_per_s"], 1),
        )
        for m in modes
    ]
    return [("Modes", (header, rows))]


def notes(report: Report) -> list[str]:
    """Lines under the tables."""
    facts = report.facts.get("decode", {})
    lines = [LEGEND] if facts.get("modes") else []
    cost = facts.get("cycle_cost")
    if cost:
        wide, chain = (1e3 * s for s in cost["forward_s"])
        lines.append(
            f"one {cost['wide']} cycle costs {cost['forward_ratio']:.2f}x one {cost['chain']} cycle in forward time "
            f"({wide:.1f} and {chain:.1f} ms, one request), {cost['cycle_ratio']:.2f}x with everything"
        )
    return lines


def _range(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    least, most = (f"{v:,.{digits}f}" for v in (min(values), max(values)))
    return least if least == most else f"{least}-{most}"


def histogram(report: Report) -> str:
    """An SVG, one panel a mode: share of decoding cycles that accept so many rows, root included."""
    panels = [m for m in report.facts.get("decode", {}).get("modes", []) if m["lengths"] and m["mode"] != "plain"]
    width, height, columns = 300, 150, 2
    rows = -(-len(panels) // columns) or 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * width}" height="{rows * height + 24}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="8" y="16">Accepted rows of a decoding cycle, root included: share of cycles in %</text>',
    ]
    longest = max((int(k) for m in panels for k in m["lengths"]), default=1)
    for at, mode in enumerate(panels):
        parts += _panel(mode, (at % columns) * width, (at // columns) * height + 24, width, height, longest)
    return "\n".join([*parts, "</svg>\n"])


def _panel(mode: Mapping[str, Any], x: int, y: int, width: int, height: int, longest: int) -> list[str]:
    total = sum(mode["lengths"].values())
    title = f"{mode['mode']} {mode['law']}: mean {mode['per_cycle']:.2f} over {total:,} cycles"
    step, base = (width - 20) / longest, y + height - 22
    parts = [f'<text x="{x + 10}" y="{y + 14}">{html.escape(title)}</text>']
    for length in range(1, longest + 1):
        share = mode["lengths"].get(str(length), 0) / total
        bar, left = share * (height - 58), x + 10 + (length - 1) * step
        middle = left + (step - 2) / 2
        parts.append(
            f'<rect x="{left:.1f}" y="{base - bar:.1f}" width="{step - 2:.1f}" height="{bar:.1f}" fill="#3b6ea5"/>'
            f'<text x="{middle:.1f}" y="{base + 13}" text-anchor="middle">{length}</text>'
        )
        if share >= 0.005:
            parts.append(
                f'<text x="{middle:.1f}" y="{base - bar - 3:.1f}" text-anchor="middle" font-size="9">'
                f"{100 * share:.0f}</text>"
            )
    return parts


def write_picture(folder: str | Path, svg: str) -> Path:
    """Write the histogram beside a report. Raises ReportError."""
    path = Path(folder) / PICTURE
    try:
        write_atomically({path: svg.encode()})
    except OSError as cause:
        raise ReportError(f"report folder {folder}: cannot write {PICTURE}: {cause}") from cause
    return path
