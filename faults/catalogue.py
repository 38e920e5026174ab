"""What a fault is: data about a defect, and one small function that makes a correct backend wrong in that way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faults.reach import NEEDS, Scene

Wrap = Callable[[Any], Any]
STAGES = ("propose", "verify", "select", "publish", "between")
EXPECTATIONS = ("detected", "harmless")


@dataclass(frozen=True)
class Knob:
    """How large a fault is. sizes: from gross to tiny; unit: what a size counts; wrap: size -> the fault's wrapper."""

    sizes: tuple[float, ...]
    unit: str
    wrap: Callable[[float], Wrap]


@dataclass(frozen=True)
class Fault:
    """A named way to make a correct backend wrong in exactly one way.

    id: "kind.surface". statement: one sentence. surface: gdn, conv or attention, the one whose checks must see it.
    stage: of the cycle, one of STAGES ("between": it needs what an earlier call left behind). classes: ids of
    `faults.classes.CLASSES`, the public defects it is drawn from; none for one derived from the contract, whose section
    is then in `section`. needs: names of `faults.reach.NEEDS`, what a case must have for the fault to change anything.
    wrap: correct backend -> wrong backend; for a fault with a knob, at its largest size. expect: "detected", or
    "harmless" for a change that a correct backend must not notice. proof: why a harmless one is. unread: why kernels of
    one kind do not read what it changes; believed of a kernel that is measured to do the same with the fault and
    without. arithmetic: it changes a kernel's own formulas, so `fits` only backends whose formulas are in reach.
    programs: only a program of several cycles (plain steps, slots used again, roll back) can show it. blind: written
    after the checks by somebody who had not read them; reported apart.
    """

    id: str
    statement: str
    surface: str
    stage: str
    classes: tuple[str, ...]
    needs: tuple[str, ...]
    wrap: Wrap
    expect: str = "detected"
    section: str = ""
    proof: str = ""
    unread: str = ""
    knob: Knob | None = None
    arithmetic: bool = False
    programs: bool = False
    blind: bool = False
    fits: Callable[[Any], bool] = lambda backend: True

    @property
    def kind(self) -> str:
        """The part of the id in front of the surface."""
        return self.id.rpartition(".")[0]

    @property
    def provenance(self) -> str:
        """Where it is known from, in words."""
        parts = [f"defect classes {', '.join(self.classes)}" if self.classes else "", self.section]
        return "; ".join(p for p in parts if p)

    def at(self, size: float | None) -> Wrap:
        """The wrapper at a size of the knob; None = the largest, as for a fault without a knob."""
        return self.wrap if size is None or self.knob is None else self.knob.wrap(size)

    def reaches(self, scene: Scene) -> bool:
        """Whether a case has what the fault needs to change anything."""
        return all(NEEDS[name].holds(scene) for name in self.needs)


def by_id(*families: list[Fault]) -> dict[str, Fault]:
    """Faults by id. Raises ValueError for an id that is used twice."""
    found: dict[str, Fault] = {}
    for fault in (f for family in families for f in family):
        if fault.id in found:
            raise ValueError(f"faults: expected ids to be unique, got id={fault.id!r} twice")
        found[fault.id] = fault
    return found
