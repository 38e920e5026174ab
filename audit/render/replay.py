"""When replay pays: measured points beside the model as tables, a sentence, JSON and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from audit.bench_replay import Measured, Point
from audit.files import write_atomically

_COLOURS = {"replay": ("#06c", "#5aa0e6"), "bank": ("#a40",), "deferred": ("#2a8a3e",)}
#: Trees by their depth: a chain, a root with leaves, anything between.
_SHAPES = {"chain": "#a40", "wide": "#f0a868", "tree": "#7a2a8a"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _PANEL = 1000, 420, 60, 40, 400


@dataclass(frozen=True)
class Extra:
    """What the bank adds to one verification: its walk less the verification of what replays, ms."""

    tree: str
    rows: int
    depth: int
    batch: int
    bank: float
    replay: float
    modelled: float

    @property
    def measured(self) -> float:
        """Measured extra; negative where the walk is the faster one."""
        return self.bank - self.replay

    @property
    def shape(self) -> str:
        """ "chain", "wide" or "tree"."""
        return "chain" if self.depth == self.rows else "wide" if self.depth <= 2 else "tree"


def best_replay(measured: Measured) -> str:
    """The replaying backend that takes least in all that every one of them was timed at; empty when none was timed."""
    spent: dict[str, dict[tuple[str, str, int, int], float]] = {}
    for p in measured.points:
        if p.policy == "replay":
            spent.setdefault(p.backend, {})[p.what, p.tree, p.batch, p.accepted] = p.clock.median
    common = set.intersection(*(set(times) for times in spent.values())) if spent else set()
    return min(spent, key=lambda name: sum(spent[name][at] for at in common)) if spent else ""


def extras(measured: Measured) -> list[Extra]:
    """Of every tree and batch that both the bank and the best replaying backend verified, small trees first."""
    best = best_replay(measured)
    verified = {(p.backend, p.tree, p.batch): p for p in measured.points if p.what == "verify"}
    found = []
    for p in verified.values():
        other = verified.get((best, p.tree, p.batch))
        if p.policy == "bank" and other is not None:
            modelled = measured.models[best].bank_ms(p.rows, p.batch)
            found.append(Extra(p.tree, p.rows, p.depth, p.batch, p.clock.median, other.clock.median, modelled))
    return sorted(found, key=lambda e: (e.batch, e.rows, e.tree))


def publications(measured: Measured, policy: str, what: str = "publish") -> dict[tuple[int, int], Point]:
    """Points by (batch, accepted rows), of the best backend where a policy has several."""
    names = {best_replay(measured)} if policy == "replay" else {p.backend for p in measured.points}
    return {
        (p.batch, p.accepted): p for p in measured.points if (p.policy, p.what) == (policy, what) and p.backend in names
    }


def pays_from(measured: Measured, excess: float) -> tuple[int | None, int]:
    """Rows from which, for one request, every measured tree costs the bank at least `excess` ms more to verify; None
    when not even the largest does. And the smallest measured tree.
    """
    one = [e for e in extras(measured) if e.batch == 1]
    smallest = min((e.rows for e in one), default=0)
    short = [e.rows for e in one if e.measured < excess]
    above = [e.rows for e in one if e.rows > max(short, default=0)]
    return (min(above) if above else None), smallest


def sentence(measured: Measured) -> str:
    """Where the break-even lies, for one request."""
    replay, copy = publications(measured, "replay"), publications(measured, "bank")
    both = sorted(n for batch, n in replay if batch == 1 and (1, n) in copy)
    if not both or not extras(measured):
        return "no break-even: a bank and a replaying backend were not both timed"
    best, longest = best_replay(measured), both[-1]
    excess = replay[1, longest].clock.median - copy[1, longest].clock.median
    modelled = measured.models[best].break_even(replay[1, longest].clock.median)
    more = f"{abs(excess):.3g} ms {'more' if excess > 0 else 'less'}"
    line = f"replay of {longest} rows ({best}) takes {more} than the bank's copy"
    rows, smallest = pays_from(measured, excess)
    if rows is None:
        return f"{line}, and no measured tree costs the bank that much at verification: replay does not pay here"
    where = "for every measured tree" if rows == smallest else f"from {rows} rows"
    return f"{line}: it pays {where} (smallest measured {smallest}); modelled from {max(modelled, longest)} rows"


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.0f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return [lines[0], "|" + " --- |" * len(header), *lines[1:]]


def publication_table(measured: Measured) -> list[str]:
    """Every publication and deferred update."""
    rows = [
        [p.policy, p.backend, p.what, str(p.batch), str(p.accepted), _number(p.clock.median),
         f"{p.clock.low:.4g}-{p.clock.high:.4g}", _number(p.modelled), _pct(p.error)]
        for p in measured.points if p.what != "verify"
    ]  # fmt: skip
    header = ("policy", "backend", "what", "batch", "accepted", "ms", "p10-p90", "modelled", "model's error")
    return _table(header, rows)


def verification_table(measured: Measured) -> list[str]:
    """The bank's walk by tree, and what it adds to the verification of what replays."""
    walks = {(p.tree, p.batch): p for p in measured.points if (p.policy, p.what) == ("bank", "verify")}
    rows = []
    for e in extras(measured):
        walk = walks[e.tree, e.batch]
        rows.append(
            [e.tree, str(e.rows), str(e.depth), str(e.batch), _number(e.bank), _number(walk.modelled),
             _pct(walk.error), _number(e.replay), _number(e.measured), _number(e.modelled),
             _pct(e.modelled / e.measured - 1 if e.measured > 0 else None)]
        )  # fmt: skip
    header = ("tree", "rows", "depth", "batch", "bank walk ms", "modelled", "error", f"{best_replay(measured)} ms",
              "bank adds", "modelled, bytes", "error")  # fmt: skip
    return _table(header, rows)


def break_even_table(measured: Measured) -> list[str]:
    """By batch and accepted rows: what each policy's publication costs, and from which tree on replay pays."""
    replay, copy = publications(measured, "replay"), publications(measured, "bank")
    marks, updates = publications(measured, "deferred"), publications(measured, "deferred", "update")
    rows = []
    for batch, n in sorted(replay.keys() & copy.keys()):
        here, there = replay[batch, n].clock.median, copy[batch, n].clock.median
        model = measured.models[best_replay(measured)]
        pays, _ = pays_from(measured, (here - there) / batch)
        later = [x[batch, n].clock.median if (batch, n) in x else None for x in (marks, updates)]
        rows.append(
            [str(batch), str(n), _number(here), _number(there), f"{here - there:+.4g}", _number(later[0]),
             _number(later[1]), _number(model.deferred_ms(n, batch)),
             "none measured" if pays is None else f"{pays} rows",
             f"{max(model.break_even(here, batch), n)} rows"]
        )  # fmt: skip
    header = ("batch", "accepted", "replay ms", "bank copy", "replay - copy", "deferred: mark (eager)",
              "deferred: update as written", "deferred: update fused, modelled", "pays from, measured",
              "pays from, modelled")  # fmt: skip
    return _table(header, rows)


def print_points(measured: Measured, facts: Mapping[str, Any]) -> None:
    """The break-even, states and refusals in 80 columns."""
    out = Console(width=80, highlight=False, markup=False, emoji=False)
    gpu = str(facts["device"]).startswith("cuda")
    out.print(f"replay {facts['setup']['dims']['name']}, {facts['gpu'] if gpu else facts['processor']}")
    if not gpu:
        out.print("no GPU was asked for: CPU backends, eager calls, a small shape; the times say nothing of a card")
    out.print(f"{'policy':10}{'backend':12}{'what':9}{'batch':>6}{'rows':>6}{'ms':>11}{'modelled':>11}{'error':>8}")
    for p in measured.points:
        at = p.rows if p.what == "verify" else p.accepted
        label = p.tree if p.what == "verify" else p.what
        cells = f"{p.policy:10}{p.backend[:11]:12}{label[:9]:9}{p.batch:6}{at:6}"
        out.print(f"{cells}{p.clock.median:11.4g}{_number(p.modelled):>11}{_pct(p.error):>8}")
    for name, match in measured.matches.items():
        bits = "its own chain's bits" if match.bitwise else f"{match.distance:.2g} from its own chain (relative L2)"
        out.print(f"published state of {name}: {bits}")
    for name, why in measured.refused.items():
        out.print(f"no time for {name}: {why}")
    out.print(sentence(measured))


def markdown(measured: Measured, facts: Mapping[str, Any]) -> str:
    """Sentence, tables, states, steps and facts."""
    lines = [f"# When does replay pay? {sentence(measured)}", "", "![break-even](replay.svg)", ""]
    note = "Trees are those that were verified for one request; a tree has at least as many rows as were accepted."
    lines += ["## Break-even", "", note, "", *break_even_table(measured)]
    lines += ["", "## Verification", "", *verification_table(measured)]
    lines += ["", "## Publication", "", *publication_table(measured), "", "## Steps and states", ""]
    for name, model in measured.models.items():
        lines.append(f"* {name or 'no replay'}: step {model.step:.4g} ms, walk step {model.walk_step:.4g} ms, {model}")
    lines += [f"* {name}: {'bitwise' if m.bitwise else f'relative L2 {m.distance:.3g}'} against its own chain"
              for name, m in measured.matches.items()]  # fmt: skip
    lines += [f"* no time for {name}: {why}" for name, why in measured.refused.items()]
    lines += ["", "## Run", "", *(f"* {name}: {value}" for name, value in facts.items())]
    return "\n".join(lines) + "\n"


class _Panel:
    """A frame with logarithmic y and given x places."""

    def __init__(self, left: float, title: str, xs: Mapping[float, str], values: Sequence[float]) -> None:
        positive = [v for v in values if v > 0] or [1.0]
        self.left, self.low = left, math.floor(math.log10(min(positive)))
        self.high = max(math.ceil(math.log10(max(positive))), self.low + 1)
        self.first, self.last = min(xs), max(max(xs), min(xs) + 1e-9)
        self.labels: list[float] = []
        self.parts = [
            f'<text x="{left}" y="{_TOP - 16}" font-size="13">{escape(title)}</text>',
            f'<path d="M{left} {_TOP}V{_HEIGHT - 40}h{_PANEL}" fill="none" stroke="#444"/>',
        ]
        for x, name in xs.items():
            at = self.x(x)
            self.parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{escape(name)}</text>')
        for exponent in range(self.low, self.high + 1):
            y = self.y(10.0**exponent)
            self.parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**exponent:g}</text>')

    def x(self, value: float) -> float:
        """Place of an x."""
        return self.left + 16 + (_PANEL - 40) * (value - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        """Place of a y; what is not positive lies on the frame."""
        share = (math.log10(max(value, 10.0**self.low)) - self.low) / (self.high - self.low)
        return _HEIGHT - 40 - share * (_HEIGHT - 40 - _TOP)

    def line(self, points: Sequence[tuple[float, float]], colour: str, name: str = "", dash: str = "") -> None:
        """A modelled curve, named at its end."""
        path = " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dashed}/>')
        label = self.y(points[-1][1]) - 8
        while any(abs(label - other) < 13 for other in self.labels):
            label -= 13
        self.labels.append(label)
        self.parts.append(
            f'<text x="{self.x(points[-1][0]) - 8:.1f}" y="{label:.1f}" text-anchor="end" fill="{colour}">'
            f"{escape(name)}</text>"
        )

    def dot(self, x: float, y: float, colour: str, title: str, hollow: bool = False) -> None:
        """A measured point."""
        fill = "#fff" if hollow else colour
        self.parts.append(
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4" fill="{fill}" stroke="{colour}">'
            f"<title>{escape(title)}</title></circle>"
        )


def picture(measured: Measured) -> str:
    """SVG. Left: publication by accepted rows, a request's share; right: what the bank adds to verification by tree.

    Lines are the model, dots the measurements; hollow dots are batches of more than one request.
    """
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
    parts = [head + 'font-size="11">', f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>']
    if any(p.what != "verify" for p in measured.points):
        parts += _publication_panel(measured).parts
    if extras(measured):
        parts += _extra_panel(measured).parts
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(sentence(measured))}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _publication_panel(measured: Measured) -> _Panel:
    shown = [p for p in measured.points if p.what == "update" or (p.what == "publish" and p.policy != "deferred")]
    lengths = sorted({p.accepted for p in shown})
    values = [v / p.batch for p in shown for v in (p.clock.median, p.modelled or p.clock.median)]
    title = "publication by accepted rows, ms a request (line: model)"
    panel = _Panel(_LEFT, title, {n: str(n) for n in lengths}, values)
    colours: dict[str, str] = {}
    for p in shown:
        used = [name for name in colours if any(q.backend == name and q.policy == p.policy for q in shown)]
        colours.setdefault(p.backend, _COLOURS[p.policy][min(len(used), len(_COLOURS[p.policy]) - 1)])
    for name, colour in colours.items():
        own = [p for p in shown if p.backend == name]
        model = [(p.accepted, p.modelled) for p in own if p.batch == 1 and p.modelled is not None]
        if model:
            panel.line(model, colour, f"{name} {own[0].what}")
        for p in own:
            title = f"{name} {p.what}, {p.accepted} rows, batch {p.batch}: {p.clock.median:.4g} ms"
            panel.dot(p.accepted, p.clock.median / p.batch, colour, title, p.batch > 1)
    return panel


def _extra_panel(measured: Measured) -> _Panel:
    found = extras(measured)
    rows = sorted({e.rows for e in found})
    best = best_replay(measured)
    replay, copy = publications(measured, "replay"), publications(measured, "bank")
    excess = {n: replay[1, n].clock.median - copy[1, n].clock.median for b, n in replay if b == 1 and (1, n) in copy}
    values = [v / e.batch for e in found for v in (e.measured, e.modelled)] + list(excess.values())
    title = f"what a bank adds to verification ({best}) by tree rows, ms"
    panel = _Panel(_LEFT + _PANEL + 80, title, {math.log2(n): str(n) for n in rows}, values)
    model = measured.models[best]
    panel.line([(math.log2(n), model.bank_ms(n)) for n in rows], _COLOURS["bank"][0], "bank, bytes")
    for n in (min(excess), max(excess)) if excess else ():
        if excess[n] > 0:
            level = [(math.log2(r), excess[n]) for r in (rows[0], rows[-1])]
            panel.line(level, _COLOURS["replay"][0], f"replay of {n} rows, less the copy", "4 3")
    for e in found:
        title = f"{e.tree}, depth {e.depth}, batch {e.batch}: {e.measured:.4g} ms"
        panel.dot(math.log2(e.rows), e.measured / e.batch, _SHAPES[e.shape], title, e.batch > 1)
    for i, (name, colour) in enumerate(_SHAPES.items()):
        panel.parts.append(f'<text x="{panel.left + 12}" y="{_TOP + 12 + 14 * i}" fill="{colour}">{name}</text>')
    return panel


def write_points(folder: Path, measured: Measured, facts: Mapping[str, Any]) -> None:
    """replay.json, replay.md and replay.svg."""
    data = {"facts": dict(facts), "sentence": sentence(measured), **asdict(measured),
            "extras": [{**asdict(e), "measured": e.measured} for e in extras(measured)]}  # fmt: skip
    write_atomically(
        {
            folder / "replay.json": (json.dumps(data, indent=1, default=str) + "\n").encode(),
            folder / "replay.md": markdown(measured, facts).encode(),
            folder / "replay.svg": picture(measured).encode(),
        }
    )
