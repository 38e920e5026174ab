"""Counting what was compared: one tally per check, merged over cases and worker processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from audit.report import Check
from lumotree.contract import Contract

#: Findings kept per check; the count of failures is complete, the places are examples.
KEPT = 8

#: Check id -> (title, surface, rung).
CHECKS: dict[str, tuple[str, str, str]] = {
    "gdn.exact": ("exact-grid", "gdn", "exact-grid"),
    "conv.exact": ("exact-grid", "conv", "exact-grid"),
    "attention.exact": ("exact-grid", "attention", "exact-grid"),
    "gdn.out.bitwise": ("tree outputs = chain", "gdn", "bitwise"),
    "conv.out.bitwise": ("tree outputs = chain", "conv", "bitwise"),
    "attention.out.bitwise": ("tree outputs = chain", "attention", "bitwise"),
    "gdn.state.bitwise": ("published states = chain", "gdn", "bitwise"),
    "conv.state.bitwise": ("published history = chain", "conv", "bitwise"),
    "attention.state.bitwise": ("published keys = chain", "attention", "bitwise"),
    "attention.values.bitwise": ("published values = chain", "attention", "bitwise"),
    "gdn.repeat": ("second run agrees", "gdn", "bitwise"),
    "conv.repeat": ("second run agrees", "conv", "bitwise"),
    "attention.repeat": ("second run agrees", "attention", "bitwise"),
    "gdn.rotation": ("requests in another order", "gdn", "bitwise"),
    "conv.rotation": ("requests in another order", "conv", "bitwise"),
    "attention.rotation": ("requests in another order", "attention", "bitwise"),
    "gdn.cycle": ("next cycle, same workspace", "gdn", "bitwise"),
    "conv.cycle": ("next cycle, same workspace", "conv", "bitwise"),
    "attention.cycle": ("next cycle, same workspace", "attention", "bitwise"),
    "gdn.untouched": ("all else unchanged", "gdn", "bitwise"),
    "conv.untouched": ("all else unchanged", "conv", "bitwise"),
    "attention.untouched": ("all else unchanged", "attention", "bitwise"),
    "gdn.native.derived": ("chain against float64", "gdn", "derived"),
    "conv.native.derived": ("chain against float64", "conv", "derived"),
    "attention.native.derived": ("chain against float64", "attention", "derived"),
    "gdn.out.derived": ("outputs against float64", "gdn", "derived"),
    "conv.out.derived": ("outputs against float64", "conv", "derived"),
    "attention.out.derived": ("outputs against float64", "attention", "derived"),
    "gdn.state.derived": ("states against float64", "gdn", "derived"),
    "attention.state.derived": ("keys against float64", "attention", "derived"),
    "gdn.paired": ("published 1.10 rule", "gdn", "paired"),
}

#: Rungs on which one cell outside is a failure.
STRICT = ("exact-grid", "bitwise", "derived")

#: Bitwise checks that an "algebra" backend does not claim; they are reported, not judged.
CLAIMED = (
    *(i for i in CHECKS if i.endswith(".out.bitwise")),
    "gdn.state.bitwise",
    "attention.state.bitwise",
)


@dataclass(frozen=True)
class Place:
    """Where a cell failed, and by how much."""

    check: str
    case: str
    request: int | None = None
    layer: int | None = None
    row: int | None = None
    head: int | None = None
    got: str | float | None = None
    allowed: str | float | None = None


@dataclass
class Tally:
    """What one check has seen: cells, those that agree in every bit, those outside, the worst value / bound."""

    check: str
    cells: int = 0
    bitwise: int = 0
    failed: int = 0
    worst: float | None = None
    places: list[Place] = field(default_factory=list)

    def add(self, cells: int, bitwise: int | None = None, ratio: float | None = None) -> None:
        """Count cells; `bitwise` of them agree in every bit; `ratio` is the worst value / bound among them."""
        self.cells += cells
        self.bitwise += bitwise or 0
        if ratio is not None:
            self.worst = ratio if self.worst is None else max(self.worst, ratio)

    def fail(self, place: Place, cells: int = 1) -> None:
        """Record cells that are outside."""
        self.failed += cells
        if len(self.places) < KEPT:
            self.places.append(place)

    def merge(self, other: Tally) -> None:
        """Add another tally of the same check."""
        self.add(other.cells, other.bitwise, other.worst)
        self.failed += other.failed
        self.places = (self.places + other.places)[:KEPT]


class Tallies(dict[str, Tally]):
    """Tallies by check id, made when first used."""

    def __missing__(self, check: str) -> Tally:
        self[check] = Tally(check)
        return self[check]

    def merge(self, other: Tallies) -> None:
        """Add the tallies of another case."""
        for check, tally in other.items():
            self[check].merge(tally)

    def failures(self, surface: str | None = None) -> list[Tally]:
        """Tallies with a cell outside, of one surface or of all, in the order of CHECKS."""
        return [self[c] for c, (_, s, _) in CHECKS.items() if c in self and self[c].failed and surface in (None, s)]


def judged(check: str, contract: Contract) -> bool:
    """Whether a check can fail a backend that declares this contract; otherwise it is only reported."""
    _, surface, rung = CHECKS[check]
    return rung in STRICT and not (contract.claim(surface) == "algebra" and check in CLAIMED)


def fold(part: Tallies, into: Tallies, kind: str, contract: Contract) -> None:
    """Add what a repetition of the whole case showed to one check a surface, `{surface}.{kind}`.

    Only what the backend can fail under its contract counts, so that an "algebra" backend is held to its bounds.
    """
    for check, tally in part.items():
        if judged(check, contract):
            target = into[f"{CHECKS[check][1]}.{kind}"]
            target.add(tally.cells, tally.cells - tally.failed)
            target.failed += tally.failed
            places = [replace(p, check=target.check, got=f"{p.got} ({check})") for p in tally.places]
            target.places = (target.places + places)[:KEPT]


def to_check(tally: Tally, contract: Contract) -> Check:
    """The report's line of a tally under what the backend claims."""
    title, surface, rung = CHECKS[tally.check]
    counts = judged(tally.check, contract)
    status = "info" if not counts else "fail" if tally.failed else "pass"
    bits = tally.bitwise if rung in ("exact-grid", "bitwise") else None
    bound = {"derived": "derived", "paired": "1.10 E + 2^-24 M"}.get(rung)
    note = f"{tally.failed} of {tally.cells} cells outside" if tally.failed else ""
    if counts and tally.cells == 0:
        status, note = "inconclusive", "no cell was compared"
    return Check(tally.check, title, surface, rung, status, tally.cells, bits, tally.worst, bound, note)
