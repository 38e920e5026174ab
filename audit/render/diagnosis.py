"""A diagnosis in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from faults import CATALOGUE

if TYPE_CHECKING:
    from audit.diagnose import Diagnosis, Hypothesis


def print_diagnoses(found: Sequence[Diagnosis], backend: str, seed: int, console: Console | None = None) -> None:
    """One paragraph a failing surface; a line if nothing fails."""
    out = console or Console()
    if not found:
        out.print(Text(f"{backend}: no small case fails, there is nothing to diagnose"), highlight=False)
    for diagnosis in found:
        for line in lines(diagnosis, backend, seed):
            out.print(Text(line), highlight=False)


def lines(d: Diagnosis, backend: str, seed: int) -> Iterator[str]:
    """What is known about one failing surface."""
    where = ", ".join(f"{name} {value}" for name, value in d.place.items() if value is not None)
    yield f"{d.surface}: {d.check} fails first, in case {d.case}" + (f", {where}" if where else "")
    if d.how == "unknown":
        yield "  an unknown defect: no fault of the catalogue explains nine tenths of what was seen"
    elif d.how == "bitwise":
        yield f"  {_count(d.group)}every call, bit by bit, on {_cases(d.cases)}:"
    else:
        share = 1 - max(h.left for h in d.group)
        yield f"  {_count(d.group)}{share:.1%} or more of the deviation, on {_cases(d.cases)}:"
    yield from (f"    {h.label}: {CATALOGUE[h.fault].statement}" for h in d.group)
    for case, labels in d.told_apart.items():
        yield f"  {case} ruled out {', '.join(labels)}"
    if len({h.fault for h in d.group}) > 1:
        yield "  no case of ours tells these apart"
    if d.how != "bitwise" and d.near:
        yield "  next: " + ", ".join(f"{h.label} (leaves {h.left:.0%})" for h in d.near)
    yield f"  again: lumotree-audit diagnose --backend {backend} --seed {seed} --surface {d.surface}"


def _count(group: Sequence[Hypothesis]) -> str:
    kinds = len({h.fault for h in group})
    return "one known defect leaves " if kinds == 1 else f"{kinds} known defects leave "


def _cases(cases: Sequence[str]) -> str:
    return "1 case" if len(cases) == 1 else f"{len(cases)} cases"
