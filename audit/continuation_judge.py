"""From traces to cells: every cycle of every schedule in the candidate, held against arm A, beside the native arms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from audit.continuation_distance import SURFACES, Apart, Compared
from audit.continuation_plan import Script
from audit.continuation_rules import envelope, envelope_ratio, greedy_holds, within_bitwise
from audit.continuation_run import Found

NATIVE = ("B", "V", "P")
#: Script -> behind its prompt and each cycle, one arm against A.
ComparedTrace = Mapping[str, Sequence[Compared]]


@dataclass(frozen=True)
class Cell:
    """One cycle of one script (-1: behind the prompt) in the candidate and in the native arms, each against A."""

    script: Script
    cycle: int
    candidate: Compared
    native: Mapping[str, Compared]

    def r(self, surface: str) -> float:
        """R_s(c) of the published rule."""
        return envelope(surface, [n.apart[surface].distance for n in self.native.values()])

    def ratio(self, surface: str) -> float:
        """The candidate's distance as a multiple of what the published rule allows."""
        return envelope_ratio(self.candidate.apart[surface].distance, self.r(surface))

    @property
    def greedy(self) -> bool:
        """The published rule for greedy tokens."""
        return greedy_holds(self.candidate.greedy, max([0.0, *(n.greedy.spread for n in self.native.values())]))

    @property
    def bitwise(self) -> bool:
        """Every surface in every bit."""
        return all(within_bitwise(a) for a in self.candidate.apart.values())


@dataclass
class Totals:
    """One surface over cells: compared tensors, those equal in every bit, worst multiple of the envelope, cells that
    the rule in force refuses, in order."""

    cells: int = 0
    bitwise: int = 0
    worst: float = 0.0
    wrong: list[tuple[Cell, Apart]] = field(default_factory=list)


def cells_of(
    scripts: Sequence[Script], candidate: ComparedTrace, compared: Mapping[str, ComparedTrace], *, prompts: bool = False
) -> Iterator[Cell]:
    """The cells of the scripts that the candidate played. compared: native arm -> its own distances from A.

    prompts: the snapshots behind the prompts instead of those behind the cycles.
    """
    for script in scripts:
        for i, got in enumerate(candidate.get(script.name, ())):
            if (i == 0) == prompts:
                native = {arm: compared[arm][script.name][i] for arm in NATIVE if arm in compared}
                yield Cell(script, i - 1, got, native)


def total(cells: Sequence[Cell], surface: str, *, bitwise: bool) -> Totals:
    """One surface over cells. bitwise: the rule in force; else the published envelope."""
    totals = Totals()
    for cell in cells:
        apart, ratio = cell.candidate.apart[surface], cell.ratio(surface)
        totals.cells += apart.cells
        totals.bitwise += apart.bitwise
        totals.worst = max(totals.worst, ratio)
        if not (within_bitwise(apart) if bitwise else ratio <= 1):
            totals.wrong.append((cell, apart))
    return totals


def native_totals(cells: Sequence[Cell]) -> dict[str, Totals]:
    """The native arms against A, by surface: how stable the reference is."""
    found = {s: Totals() for s in SURFACES}
    for cell in cells:
        for compared in cell.native.values():
            for surface, apart in compared.apart.items():
                t = found[surface]
                t.cells, t.bitwise = t.cells + apart.cells, t.bitwise + apart.bitwise
                t.worst = max(t.worst, apart.distance)
    return found


def first_wrong(cells: Sequence[Cell], *, bitwise: bool) -> list[tuple[Cell, Apart]]:
    """Of each script the first cycle in which the rule in force refuses something, and what it refuses there.

    Later cycles of the same script only carry it on.
    """
    found, seen = [], set()
    for cell in cells:
        wrong = [
            apart
            for surface, apart in cell.candidate.apart.items()
            if not (within_bitwise(apart) if bitwise else cell.ratio(surface) <= 1)
        ]
        if wrong and cell.script.name not in seen:
            seen.add(cell.script.name)
            found += [(cell, apart) for apart in sorted(wrong, key=lambda a: SURFACES.index(a.surface))]
    return found


def where(cell: Cell) -> str:
    """Schedule and cycle in words."""
    return f"{cell.script.name} cycle {cell.cycle}" if cell.cycle >= 0 else f"{cell.script.name} prompt"


@dataclass(frozen=True)
class Judged:
    """A run in cells. bitwise: the rule in force. main: cycles of the three schedules; prompts: behind their prompts;
    batch: of the batch of four."""

    found: Found
    bitwise: bool
    main: list[Cell]
    prompts: list[Cell]
    batch: list[Cell]

    @property
    def rung(self) -> str:
        """Name of the rule in force."""
        return "bitwise" if self.bitwise else "envelope"
