"""The bench's outcomes as a table, JSON, Markdown and a picture of time against accuracy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console

from audit.bench_replay import Model, table
from audit.bench_time import Clock, Work
from audit.files import write_atomically

MIB = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """One backend. refused: why there is no speed, empty when there is. note: what was timed if less than asked for.

    cells: outputs and states held against float64; outside: those beyond the derived bound; outside_checks: all judged
    checks with a cell outside; worst: largest error over bound; bitwise: share of outputs and states equal to the
    backend's own chain. Times in ms of all layers and requests; buffers: bytes of each tensor of the workspace; work,
    floors: of verify and publish; publish_by_length: ms by accepted rows; state_bytes, factor_bytes: of all layers and
    requests, a state and one row's k, u and decay in fp32. layers, repeat: timed.
    """

    backend: str
    refused: str = ""
    note: str = ""
    claims: str = ""
    tree: str = ""
    cells: int = 0
    outside: int = 0
    outside_checks: tuple[str, ...] = ()
    worst: float = 0.0
    worst_state: float = 0.0
    bitwise: float = 0.0
    mode: str = ""
    batch: int = 0
    layers: int = 0
    repeat: int = 0
    path: int = 0
    verify: Clock | None = None
    publish: Clock | None = None
    publish_by_length: Mapping[int, float] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)
    work: tuple[Work, Work] | None = None
    floors: tuple[float, float] | None = None
    state_bytes: int = 0
    factor_bytes: int = 0

    @property
    def total_ms(self) -> float | None:
        """Verify and publish; None without a speed."""
        return self.verify.median + self.publish.median if self.verify and self.publish else None

    @property
    def floor_ratio(self) -> float | None:
        """Total over the sum of both floors."""
        return self.total_ms / sum(self.floors) if self.total_ms and self.floors else None


def columns(o: Outcome) -> list[str]:
    """Cells of the Markdown table."""
    if o.total_ms is None or o.verify is None or o.publish is None or o.work is None:
        return [o.backend, o.tree or "-", *["-"] * 7, *_accuracy(o)]
    seconds = o.total_ms / 1e3
    return [
        o.backend,
        o.tree,
        f"{o.mode}, {o.layers}",
        f"{o.verify.median:.4g} ({o.verify.low:.4g}-{o.verify.high:.4g})",
        f"{o.publish.median:.4g} ({o.publish.low:.4g}-{o.publish.high:.4g})",
        f"{o.total_ms:.4g}",
        f"{sum(o.buffers.values()) / MIB:,.1f}",
        f"{sum(w.bytes for w in o.work) / seconds / 1e9:,.1f} / {sum(w.flops for w in o.work) / seconds / 1e9:,.1f}",
        f"{sum(o.floors or ()):.3g} (x{o.floor_ratio:.3g})",
        *_accuracy(o),
    ]


def _accuracy(o: Outcome) -> list[str]:
    if not o.cells:
        return ["-", "-", "-"]
    return [f"{o.outside:,} of {o.cells:,}", f"{o.worst:.4g}", f"{100 * o.bitwise:.1f}%"]


HEADER = (
    "backend", "tree", "mode, layers", "verify ms (p10-p90)", "publish ms (p10-p90)", "total ms", "buffers MiB",
    "GB/s / GFLOP/s", "floor ms (ratio)", "outside", "worst/bound", "bitwise",
)  # fmt: skip


def print_table(outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> None:
    """A table of 80 columns, what got no speed and why, and the one line that matters."""
    out = Console(width=80, highlight=False, markup=False, emoji=False)
    where = facts["gpu"] if str(facts["options"]["device"]).startswith("cuda") else None
    out.print(f"GDN {facts['options']['shape']}, {where or facts['processor']}, torch {facts['torch']}")
    if where is None:
        out.print("no GPU was asked for: CPU backends, one thread, eager calls")
    out.print(f"copy {facts['bytes_s'] / 1e9:,.1f} GB/s, fp32 product {facts['flops_s'] / 1e9:,.1f} GFLOP/s")
    out.print(
        f"{'backend':15}{'verify ms':>10}{'publish':>9}{'MiB':>9}{'x floor':>9}{'outside':>9}{'worst':>8}{'bits':>7}"
    )
    for o in outcomes:
        if o.total_ms is not None and o.verify and o.publish:
            speed = f"{o.verify.median:10.4g}{o.publish.median:9.4g}{sum(o.buffers.values()) / MIB:9.1f}"
            speed += f"{o.floor_ratio or 0:9.3g}"
        else:
            speed = f"{'-':>10}{'-':>9}{'-':>9}{'-':>9}"
        accuracy = f"{o.outside:9,}{o.worst:8.3g}{100 * o.bitwise:6.1f}%" if o.cells else f"{'-':>9}{'-':>8}{'-':>7}"
        out.print(f"{o.backend[:14]:15}{speed}{accuracy}")
    for line in _remarks(outcomes):
        out.print(line)
    out.print(verdict(outcomes))


def _remarks(outcomes: Sequence[Outcome]) -> list[str]:
    """What got no speed and why, and what was timed on less than was asked for."""
    refused = [f"no speed for {o.backend}: {o.refused}" for o in outcomes if o.refused]
    return refused + [f"{o.backend}: {o.note}" for o in outcomes if o.note]


def _most_layers(timed: Sequence[Outcome]) -> list[Outcome]:
    """Those timed on as many layers as any: times of fewer are not times of all."""
    most = max((o.layers for o in timed), default=0)
    return [o for o in timed if o.layers == most]


def verdict(outcomes: Sequence[Outcome]) -> str:
    """The fastest backend among those that left no bound and are bitwise, and the fastest of all."""
    timed = [o for o in outcomes if o.total_ms is not None]
    # Policies that verify another tree are not compared.
    tree = timed[0].tree if timed else ""
    same = _most_layers([o for o in timed if o.tree == tree])
    exact = [o for o in same if not o.outside_checks and o.claims == "bitwise"]
    if not exact:
        return "no bitwise backend was timed"
    best, fastest = (min(group, key=lambda o: o.total_ms or math.inf) for group in (exact, same))
    line = f"fastest bitwise on {tree}: {best.backend}, {best.total_ms:.4g} ms"
    if fastest is not best:
        line += f"; fastest: {fastest.backend}, {fastest.total_ms:.4g} ms, {fastest.outside:,} cells outside"
    return line


def markdown(outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> str:
    """The table, publication by accepted length, buffers and facts."""
    left = ", ".join(facts.get("not_run", ()))
    head = f"# {verdict(outcomes)}" if not left else f"# Not finished: {left} not run; so far, {verdict(outcomes)}"
    lines = [head, "", "| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    lines += ["| " + " | ".join(columns(o)) + " |" for o in outcomes]
    lines += ["", *(f"* {line}" for line in _remarks(outcomes))]
    lengths = sorted({n for o in outcomes for n in o.publish_by_length})
    lines += ["", "## Publication by accepted rows, ms", "", "| backend | " + " | ".join(map(str, lengths)) + " |"]
    lines += ["|" + " --- |" * (len(lengths) + 1)]
    for o in outcomes:
        if o.publish_by_length:
            row = [f"{o.publish_by_length[n]:.4g}" if n in o.publish_by_length else "-" for n in lengths]
            lines.append(f"| {o.backend} | " + " | ".join(row) + " |")
    lines += replay_section(outcomes, float(facts.get("bytes_s", 0.0)))
    lines += ["", "## Largest named buffers, MiB", ""]
    for o in outcomes:
        named = ", ".join(f"{name} {size / MIB:,.1f}" for name, size in list(o.buffers.items())[:4])
        if named:
            lines.append(f"* {o.backend}: {named}")
    lines += ["", "## Run", "", *(f"* {name}: {value}" for name, value in facts.items())]
    return "\n".join(lines) + "\n"


def replay_section(outcomes: Sequence[Outcome], bytes_s: float) -> list[str]:
    """When replay pays, for the fastest bitwise backend that replays; empty when none was timed at two lengths."""
    able = [o for o in outcomes if o.claims == "bitwise" and len(o.publish_by_length) > 1 and o.work and bytes_s]
    # A bank's publication does not grow with the path: only what replays is asked.
    able = [o for o in able if not any("bank" in name or "recurrent" in name for name in o.buffers)]
    if not able:
        return []
    best = min(_most_layers(able), key=lambda o: o.total_ms or math.inf)
    model = Model(best.state_bytes, 0, best.factor_bytes, bytes_s)
    intro = f"Replay measured on {best.backend}, the rest modelled from bytes at the measured copy rate; ms."
    return ["", "## When does replay pay?", "", intro, "", *table(model, best.publish_by_length, (8, 32, 128))]


def picture(outcomes: Sequence[Outcome]) -> str:
    """An SVG: total ms against worst error over bound, both logarithmic; the bound is a line."""
    points = [(o, o.total_ms, o.worst) for o in outcomes if o.total_ms and o.worst > 0]
    if not points:
        return '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="60"><text y="30">nothing timed</text></svg>'
    xs, ys = [math.log10(x) for _, x, _ in points], [math.log10(y) for _, _, y in points] + [0.0]
    left, right, low, high = min(xs) - 0.2, max(xs) + 0.6, min(ys) - 0.2, max(ys) + 0.2

    def at(x: float, y: float) -> tuple[float, float]:
        return 60 + 560 * (x - left) / (right - left), 340 - 300 * (y - low) / (high - low)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="400" font-family="sans-serif" font-size="11">'
    ]
    bound = at(left, 0.0)[1]
    parts.append(f'<line x1="60" y1="{bound:.1f}" x2="620" y2="{bound:.1f}" stroke="#a00" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="62" y="{bound - 4:.1f}" fill="#a00">bound</text>')
    parts.append('<path d="M60 40V340H620" fill="none" stroke="#444"/>')
    for exponent in range(math.ceil(left), math.floor(right) + 1):
        parts.append(f'<text x="{at(exponent, low)[0]:.1f}" y="356" text-anchor="middle">{10.0**exponent:g}</text>')
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        parts.append(f'<text x="54" y="{at(left, exponent)[1] + 4:.1f}" text-anchor="end">{10.0**exponent:g}</text>')
    placed: list[tuple[float, float]] = []
    full = _most_layers([o for o, _, _ in points])
    for (o, _, _), x, y in sorted(zip(points, xs, ys[:-1], strict=True), key=lambda p: p[1:]):
        px, py = at(x, y)
        fill = "#fff" if o.outside_checks else "#06c"
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{fill}" stroke="#06c"/>')
        name = o.backend if o in full else f"{o.backend} ({o.layers} layers)"
        beside = [ly for lx, ly in placed if abs(lx - px) < 8 * len(name) + 40]
        label = py + 4
        while any(abs(label - other) < 12 for other in beside):
            label += 12
        placed.append((px, label))
        parts.append(f'<text x="{px + 7:.1f}" y="{label:.1f}">{escape(name)}</text>')
    parts.append('<text x="340" y="380" text-anchor="middle">verify + publish, ms (hollow: cells outside)</text>')
    parts.append('<text x="16" y="190" transform="rotate(-90 16 190)" text-anchor="middle">worst error / bound</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_files(folder: Path, outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> None:
    """bench.json, bench.md and bench.svg."""
    data = {"facts": dict(facts), "outcomes": [asdict(o) for o in outcomes]}
    write_atomically(
        {
            folder / "bench.json": (json.dumps(data, indent=1, default=str) + "\n").encode(),
            folder / "bench.md": markdown(outcomes, facts).encode(),
            folder / "bench.svg": picture(outcomes).encode(),
        }
    )
