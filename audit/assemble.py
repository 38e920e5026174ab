"""From case results to a report: main shape and small cases apart, envelope, controls, doubts, findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from audit.component import CaseResult
from audit.controls import summarise
from audit.envelope import EnvelopeResult
from audit.report import Check, Control, Finding
from audit.tally import CHECKS, Tallies, Tally, judged, to_check
from lumotree.contract import Contract

#: A change at the root must move the deepest state by at least this many derived bounds in some case of each shape.
LEAST_REACH = 1.0


def merged(results: Iterable[CaseResult]) -> Tallies:
    """Tallies over cases."""
    total = Tallies()
    for result in results:
        total.merge(result.tallies)
    return total


def main_checks(tallies: Tallies, contract: Contract) -> list[Check]:
    """One check per tally, in the order of CHECKS."""
    return [to_check(tallies[c], contract) for c in CHECKS if c in tallies]


def small_checks(tallies: Tallies, contract: Contract) -> list[Check]:
    """The small cases, one check per surface and rung; what an algebra backend does not claim is left out."""
    groups: dict[tuple[str, str], list[Tally]] = {}
    for check, (_, surface, rung) in CHECKS.items():
        if check in tallies and judged(check, contract):
            groups.setdefault((surface, rung), []).append(tallies[check])
    return [_group(surface, rung, tallies) for (surface, rung), tallies in groups.items()]


def _group(surface: str, rung: str, tallies: Sequence[Tally]) -> Check:
    cells, failed = sum(t.cells for t in tallies), sum(t.failed for t in tallies)
    worst = [t.worst for t in tallies if t.worst is not None]
    bits = None if rung == "derived" else sum(t.bitwise for t in tallies)
    names = ", ".join(t.check for t in tallies if t.failed)
    return Check(
        f"small.{surface}.{rung}",
        "small trees, odd sizes",
        surface,
        rung,
        "inconclusive" if cells == 0 else "fail" if failed else "pass",
        cells,
        bits,
        max(worst, default=None),
        "derived" if rung == "derived" else None,
        f"{failed} of {cells} cells outside: {names}" if failed else "" if cells else "no cell was compared",
    )


def inactive_check(results: Sequence[CaseResult], surface: str) -> list[Check]:
    """Inactive rows of the units, reported apart: their outputs are unspecified and not compared."""
    cells = sum(r.inactive_cells for r in results)
    if not cells:
        return []
    return [Check(f"{surface}.out.inactive", "inactive rows, not judged", surface, "none", "info", cells)]


def envelope_checks(results: Sequence[EnvelopeResult]) -> list[Check]:
    """One check per statistic of the envelope."""
    return [
        Check(
            f"envelope.{r.statistic}",
            f"{r.statistic}: {r.exceedances} above ({r.allowed})",
            r.statistic.partition(".")[0],
            "envelope",
            r.status,
            r.cells,
            None,
            r.worst_ratio,
            r.bound,
            r.reason,
        )
        for r in results
    ]


def controls_of(results: Sequence[CaseResult], surfaces: Sequence[str], partial: bool) -> list[Control]:
    """Controls of the covered surfaces; in a run of chosen cases only those that these cases reach."""
    controls = summarise([o for r in results for o in r.outcomes], surfaces)
    return [c for c in controls if c.cases or not partial]


def doubts_of(results: Sequence[CaseResult], surfaces: Sequence[str], *, horizon: bool = True) -> list[str]:
    """Reasons for which a PASS would mean nothing: constant outputs and, with `horizon`, inputs that forget the root.

    A run of chosen cases has no horizon to ask for: some cases forget on purpose.
    """
    doubts = [
        f"outputs of {s} are constant in every case"
        for s in surfaces
        if not any(r.distinct.get(s, False) for r in results)
    ]
    by_shape: dict[str, list[float]] = {}
    for r in results:
        if horizon and r.reach is not None:
            by_shape.setdefault(r.spec.dims.name, []).append(r.reach)
    for shape, reach in by_shape.items():
        if not max(reach) > LEAST_REACH:  # a NaN proves nothing either
            doubts.append(
                f"memory horizon too short: a change at the root moves the deepest state of shape {shape} by "
                f"{max(reach):.2g} of the derived bound, needed: more than {LEAST_REACH:g}"
            )
    return doubts


def graphs_of(results: Sequence[CaseResult]) -> dict[str, int]:
    """How many CUDA graphs were captured and how often they were replayed; empty for an eager run."""
    counts = [r.graphs for r in results if r.graphs is not None]
    return {"captures": max(c for c, _ in counts), "replays": max(r for _, r in counts)} if counts else {}


def horizon_of(results: Sequence[CaseResult]) -> dict[str, float]:
    """Memory horizon of the units' inputs, and how far the root reaches in each shape."""
    horizon: dict[str, float] = {}
    memory = [r.memory for r in results if r.memory is not None]
    if memory:
        horizon["tokens_median_head"] = sum(m[0] for m in memory) / len(memory)
        horizon["tokens_longest_head"] = max(m[1] for m in memory)
    for r in results:
        if r.reach is not None:
            key = f"root_reach_{r.spec.dims.name}"
            horizon[key] = max(r.reach, horizon.get(key, 0.0))
    return horizon


def findings_of(tallies: Tallies, contract: Contract, reproduce: str) -> list[Finding]:
    """Places of every failed check. reproduce: a command with `{case}` in it."""
    return [
        Finding(p.check, p.case, reproduce.format(case=p.case), p.request, p.layer, p.row, p.head, p.got, p.allowed)
        for t in tallies.failures()
        if to_check(t, contract).status == "fail"
        for p in t.places
    ]


def unit_statistics(results: Sequence[CaseResult]) -> Mapping[str, list[float]]:
    """Statistic -> one value per unit."""
    units = [r.statistics for r in results if r.spec.unit]
    names = sorted({name for u in units for name in u})
    return {name: [u[name] for u in units] for name in names}


def cell_records(results: Sequence[CaseResult]) -> list[dict[str, object]]:
    """Rows for the frame that is saved beside a report."""
    return [
        {
            "case": r.spec.id,
            "set": r.spec.set_index if r.spec.unit else None,
            "instance": r.spec.instance if r.spec.unit else None,
            "surface": name.partition(".")[0],
            "statistic": name,
            "value": value,
        }
        for r in results
        for name, value in r.statistics.items()
    ]
