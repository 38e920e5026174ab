"""A diagnosis in words, from the plain data that a report carries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text


def print_diagnoses(
    found: Sequence[Mapping[str, Any]], backend: str, seed: int, console: Console | None = None
) -> None:
    """One paragraph a failing surface (`audit.diagnose.Diagnosis.as_dict`); a line if nothing fails."""
    out = console or Console()
    if not found:
        out.print(Text(f"{backend}: no small case fails, there is nothing to diagnose"), highlight=False)
    for diagnosis in found:
        for line in lines(diagnosis, backend, seed):
            out.print(Text(line), soft_wrap=line.startswith("    lumotree-audit"), highlight=False)


def lines(d: Mapping[str, Any], backend: str, seed: int) -> Iterator[str]:
    """What is known about one failing surface."""
    where = ", ".join(f"{name} {value}" for name, value in d["place"].items() if value is not None)
    yield f"{d['surface']}: {d['check']} fails first, in case {d['case']}" + (f", {where}" if where else "")
    kinds = len({h["fault"] for h in d["group"]})
    who = "one known defect leaves" if kinds == 1 else f"{kinds} known defects leave"
    asked = "1 case" if len(d["cases"]) == 1 else f"{len(d['cases'])} cases"
    if d["how"] == "unknown":
        yield "  unknown defect: no fault of the catalogue explains nine tenths of what was seen"
    elif d["how"] == "bitwise":
        yield f"  {who} the same bits in every call, on {asked}:"
    else:
        yield f"  {who} {1 - max(h['left'] for h in d['group']):.1%} of the deviation explained, on {asked}:"
    yield from (f"    {label(h)}: {h['statement']}" for h in d["group"])
    for case, labels in d["told_apart"].items():
        yield f"  {case} ruled out {', '.join(labels)}"
    if kinds > 1:
        yield "  no case of ours tells these apart"
    if d["near"]:
        yield "  next: " + ", ".join(f"{label(h)} (leaves {h['left']:.0%})" for h in d["near"])
    yield "  again:"
    yield f"    lumotree-audit diagnose --backend {backend} --seed {seed} --surface {d['surface']}"


def label(hypothesis: Mapping[str, Any]) -> str:
    """The fault, and its size where it has one."""
    size = hypothesis["size"]
    return str(hypothesis["fault"]) if size is None else f"{hypothesis['fault']} at {size:g}"
