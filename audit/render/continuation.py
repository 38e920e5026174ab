"""What the continuation suite adds to a report: what each rule lets through, and the drift in words and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10
from typing import Any

from audit.render.text import count, number
from audit.report import Report

Row = tuple[str, ...]
Table = tuple[Row, list[Row]]

PICTURE = "drift.svg"
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 320, 64, 40


def tables(report: Report) -> list[tuple[str, Table]]:
    """Title, header and rows of every table of a continuation report; none for other suites."""
    rules: Mapping[str, Mapping[str, float]] = _facts(report).get("lets_through", {})
    if not rules:
        return []
    header: Row = ("a fault passes up to (relative L2; next: nats)", *rules)
    surfaces = [s for s in next(iter(rules.values())) if s != "lengths"]
    rows: list[Row] = [(s, *(number(rule[s]) if s in rule else "-" for rule in rules.values())) for s in surfaces]
    return [("What each rule lets through", (header, rows))]


def notes(report: Report) -> list[str]:
    """Lines under the tables."""
    facts = _facts(report)
    if not facts:
        return []
    lines = [
        f"{facts['cycles_bitwise']} of {facts['cycles']} cycles bitwise on every surface, greedy "
        f"{facts['greedy_same']} of {facts['cycles']}; native arms apart by at most "
        f"{number(max(facts['native_spread'].values()))}; x bound: multiple of the published envelope"
    ]
    if calibrated := facts.get("calibrated"):
        lines.append(
            f"calibrated on {calibrated['n']} prefixes, judged on {calibrated['m']}: up to {calibrated['allowed']} of "
            f"them may exceed a bound, false alarm {calibrated['false_alarm']:.2g}"
        )
    return lines + _drift_words(facts.get("drift"))


def _facts(report: Report) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = report.facts.get("continuation", {})
    return facts


def _drift_words(drift: Mapping[str, Any] | None) -> list[str]:
    if drift is None:
        return []
    native, candidate = drift["native"], drift["candidate"]
    worst = [max(max(layers) for layers in arm["apart"]) for arm in (native, candidate)]
    at = native["diverges"]
    told = (
        f"never, least margin {number(native['margin'])}"
        if at is None
        else f"at token {count(at)}, margin {number(native['margin'])}"
    )
    return [
        f"drift over {count(native['tokens'])} tokens ({count(drift['cycles'])} cycles): worst layer "
        f"{number(worst[1])} from float64, native {number(worst[0])}; float64 would choose another token {told}"
    ]


def drift_picture(report: Report) -> str | None:
    """SVG of the distance from float64 over committed tokens, one colour a layer; None without a drift.

    Lines are the native arm, dots the candidate: where both hold the same bits the dots lie on the lines.
    """
    drift = _facts(report).get("drift")
    if drift is None:
        return None
    native, candidate = drift["native"], drift["candidate"]
    values = [v for arm in (native, candidate) for layers in arm["apart"] for v in layers if v > 0]
    if not values:
        return None
    low, high = floor(log10(min(values))), floor(log10(max(values))) + 1
    last = max(*native["marks"], *candidate["marks"])
    parts = [*_frame(low, high, last, native["tokens"])]
    for layer in range(len(native["apart"][0])):
        colour = _COLOURS[layer % len(_COLOURS)]
        points = _points(native, layer, low, high, last)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
            for x, y in _points(candidate, layer, low, high, last)
        ]
        parts.append(
            f'<text x="{_WIDTH - 8}" y="{20 + 14 * layer}" text-anchor="end" fill="{colour}">GDN layer {layer}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _points(arm: Mapping[str, Any], layer: int, low: int, high: int, last: int) -> list[tuple[float, float]]:
    return [
        (_x(mark, last), _y(layers[layer], low, high)) for mark, layers in zip(arm["marks"], arm["apart"], strict=True)
    ]


def _x(mark: int, last: int) -> float:
    return _LEFT + mark / last * (_WIDTH - _LEFT - 16)


def _y(value: float, low: int, high: int) -> float:
    share = (log10(max(value, 10.0**low)) - low) / (high - low)
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - 16)


def _frame(low: int, high: int, last: int, tokens: int) -> Sequence[str]:
    title = f"relative L2 of the recurrent state from float64, {count(tokens)} tokens (line: native, dot: candidate)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="12">{title}</text>',
    ]
    for power in range(low, high + 1):
        y = _y(10.0**power, low, high)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for i in range(5):
        mark = round(last * i / 4)
        parts.append(f'<text x="{_x(mark, last):.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{count(mark)}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">committed tokens</text>')
    return parts
