"""How good the diagnosis is: known faults, on held-out cases, in front of kernels that it does not know of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from audit.cases import CaseSpec
from audit.diagnose import Known, diagnose_surface
from audit.environment import environment
from audit.fault_cases import heldout_ladder
from audit.fault_matrix import Cases, containing, exact_interval
from audit.processes import team
from audit.render.progress import Progress
from audit.report import Check, Report, decide
from audit.runner import default_workers
from faults import CATALOGUE, Fault
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import SURFACES

#: First seed of the cases of an evaluation; faults and checks were written on seeds of one digit.
FIRST_SEED = 500_000

#: Kernel under a fault, kernel that hypotheses are tried on. The first two share no bits in GDN and attention.
PAIRS = (("reference", "torch"), ("torch", "torch"))

#: Faults that a process diagnoses at a time: few, so that many processes end together.
FAULTS_OF_A_JOB = 4

#: Share of single faults whose name must be in the group that the diagnosis gives.
WANTED = 0.95


@dataclass(frozen=True)
class Verdict:
    """One fault, diagnosed. kernel: under the fault; how: see `Diagnosis`; group: names that were given, best first;
    None where no case failed, so that there was nothing to diagnose."""

    fault: str
    surface: str
    kernel: str
    size: float | None
    seed: int
    case: str | None
    how: str = ""
    group: tuple[str, ...] = ()

    @property
    def named(self) -> bool:
        """Whether the true fault is in the group."""
        return self.fault in self.group


def evaluate(surface: str, kernel: str, base: str, seed: int, only: Sequence[str] = ()) -> list[Verdict]:
    """Diagnose every fault of a surface in front of a kernel, on the held-out cases of a seed.

    only: ids of the faults, all if there are none; the hypotheses are the whole catalogue's.
    """
    torch.set_num_threads(1)
    inner, known = load_backend(kernel), _known(base, kernel, surface)
    cases = Cases(heldout_ladder(seed), inner.contract)
    verdicts = []
    for at, fault in enumerate(f for f in CATALOGUE.values() if f.surface == surface and f.expect == "detected"):
        if not fault.fits(inner) or (only and fault.id not in only):
            continue
        reached = list(cases.reaching(fault))
        rest = [s for s in cases.specs if s not in reached]
        verdicts.append(_one(inner, fault, kernel, [*reached, *rest], known, seed, at))
    return verdicts


@lru_cache(maxsize=1)
def _known(base: str, kernel: str, surface: str) -> Known:
    """What is known of the last jobs' kernels is kept for the next job of the same: most of an evaluation is that."""
    return Known(base, load_backend(kernel).contract, surface)


def _one(inner: Any, fault: Fault, kernel: str, specs: Sequence[CaseSpec], known: Known, seed: int, at: int) -> Verdict:
    size = fault.knob.sizes[(seed + at) % len(fault.knob.sizes)] if fault.knob else None
    wrap = fault.at(size)
    found = diagnose_surface(lambda: wrap(inner), fault.surface, specs, [known])
    if found is None:
        return Verdict(fault.id, fault.surface, kernel, size, seed, None)
    group = tuple(dict.fromkeys(h.fault for h in found.group))
    return Verdict(fault.id, fault.surface, kernel, size, seed, found.case, found.how, group)


def run_evaluation(
    seeds: int, workers: int | None = None, first: int = FIRST_SEED, only: Sequence[str] = ()
) -> list[Verdict]:
    """Every fault of the catalogue, or those whose id contains a text of `only`, for each pair of kernels and seed.

    Raises InputError for a text that no id contains.
    """
    chosen = containing("--faults", only, list(CATALOGUE))
    jobs = [
        (s, kernel, base, first + n, part)
        for n in range(seeds)
        for s in SURFACES
        for kernel, base in PAIRS
        for part in _parts([name for name in chosen if CATALOGUE[name].surface == s])
    ]
    count = default_workers("cpu") if workers is None else workers
    verdicts: list[Verdict] = []
    with Progress(len(jobs), "diagnoses") as progress, team(count, "diagnoses") as others:
        for part in others.each(evaluate, jobs):
            verdicts += part
            progress.advance(note=f"{part[0].surface} on {part[0].kernel}" if part else "")
    _known.cache_clear()
    return verdicts


def _parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[at : at + FAULTS_OF_A_JOB] for at in range(0, len(names), FAULTS_OF_A_JOB))


def to_report(verdicts: Sequence[Verdict], command: str, seconds: float, first: int = FIRST_SEED) -> Report:
    """One check a pair of kernels: the share of faults whose name is in the group. FAIL below WANTED."""
    checks = [_check(kernel, base, [v for v in verdicts if v.kernel == kernel]) for kernel, base in PAIRS]
    facts = environment()
    surfaces = {v.surface for v in verdicts}
    coverage = {s: "covered" if s in surfaces else "not covered" for s in SURFACES}
    verdict, reasons = decide(checks, [], coverage, controls_required=False)
    return Report(
        verdict=verdict,
        reasons=reasons,
        suite="diagnosis",
        backend=", ".join(kernel for kernel, _ in PAIRS),
        contract={},
        environment=facts,
        envelope=None,
        coverage=coverage,
        checks=tuple(checks),
        controls=(),
        findings=(),
        seed=first,
        command=command,
        wall_s=round(seconds, 2),
        diagnosis={
            "seeds": sorted({v.seed for v in verdicts}),
            "cases": "heldout (audit.fault_cases.MEASURE); written on audit.fault_cases.LADDER",
            **{kernel: summary([v for v in verdicts if v.kernel == kernel]) for kernel, _ in PAIRS},
        },
        created=facts["date"],
    )


def _check(kernel: str, base: str, verdicts: Sequence[Verdict]) -> Check:
    judged = [v for v in verdicts if v.case is not None]
    named = sum(v.named for v in judged)
    if not judged:
        return Check(f"diagnosis.{kernel}", f"{kernel}, tried on {base}", "all", "diagnosis", "inconclusive", 0,
                     note="no fault was diagnosed")  # fmt: skip
    share = named / len(judged)
    size = sum(len(v.group) for v in judged) / len(judged)
    title = f"{kernel} on {base}: {named} of {len(judged)} named, group of {size:.2f}"
    note = "" if share >= WANTED else f"{share:.1%} named, wanted {WANTED:.0%}"
    return Check(f"diagnosis.{kernel}", title, "all", "diagnosis", "pass" if share >= WANTED else "fail", len(judged),
                 note=note)  # fmt: skip


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Share named with its interval, mean group (an unknown one counts as 0), how it was judged, and the confusion
    matrix (true -> named)."""
    judged = [v for v in verdicts if v.case is not None]
    confusion: dict[str, Counter[str]] = {}
    for v in judged:
        confusion.setdefault(v.fault, Counter()).update(v.group or ("unknown",))
    named = sum(v.named for v in judged)
    return {
        "diagnosed": len(judged),
        "not_failing": sorted({v.fault for v in verdicts if v.case is None}),
        "named": named,
        "interval": list(exact_interval(named, len(judged))) if judged else None,
        "mean_group": sum(len(v.group) for v in judged) / max(len(judged), 1),
        "first_is_true": sum(v.group[:1] == (v.fault,) for v in judged),
        "how": dict(Counter(v.how for v in judged)),
        "unnamed": [{"fault": v.fault, "size": v.size, "case": v.case, "group": list(v.group)}
                    for v in judged if not v.named],
        "confusion": {fault: dict(row) for fault, row in confusion.items()},
    }  # fmt: skip
