"""Names the likely defect of a failing kernel: which known fault, put into a right kernel, leaves what it left.

On a failing case every fault of the catalogue that could touch the surface is put in front of a right kernel of ours.
Those that reproduce every call of the audit bit by bit are the hypotheses; where no kernel of ours shares bits with the
one under audit, those that explain nearly all of its deviation. Further cases are then run until the hypotheses that
are left cannot be told apart by any case of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from audit.cases import Case, CaseSpec
from audit.fault_cases import ladder
from audit.fault_trial import alone, coins_of
from audit.recording import Recording, record, reproduces
from audit.scene import scene_of
from audit.tally import Place
from faults import CATALOGUE, Fault
from faults.reach import Scene
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import SURFACES, covered_surfaces
from lumotree.errors import InputError

#: Right kernels of ours that hypotheses are tried on, in the order in which they are preferred.
BASES = ("torch", "reference", "bank", "kv_layout", "sqrt_norm", "split_k", "wy")

#: A hypothesis explains a failure if what it leaves unexplained is at most this part of the deviation.
EXPLAINS = 0.1

#: How many other hypotheses a report names beside the group.
NAMED = 3


@dataclass(frozen=True)
class Hypothesis:
    """A fault, at a size of its knob or None. left: part of the deviation that it does not explain, 0 = every bit."""

    fault: str
    size: float | None = None
    left: float = 0.0

    @property
    def label(self) -> str:
        """The fault, and its size where it has one."""
        return self.fault if self.size is None else f"{self.fault} at {self.size:g}"


@dataclass(frozen=True)
class Diagnosis:
    """What is known about one failing surface.

    case: the smallest that fails; check: the first that failed there; place: of its first cell outside, in topological
    order. base: the right kernel that hypotheses were tried on; how: "bitwise", "distance" or "unknown". group: the
    hypotheses that no case of ours tells apart, best first; near: the next ones. told_apart: case -> hypotheses that it
    ruled out. cases: those that were asked.
    """

    surface: str
    case: str
    check: str
    place: dict[str, int | None]
    base: str
    how: str
    group: tuple[Hypothesis, ...]
    near: tuple[Hypothesis, ...] = ()
    told_apart: dict[str, list[str]] = field(default_factory=dict)
    cases: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report, statements included."""
        data = asdict(self)
        for part in ("group", "near"):
            data[part] = [{**h, "statement": CATALOGUE[h["fault"]].statement} for h in data[part]]
        return {**data, "cases": list(self.cases)}


def diagnose_surface(
    backend: Any, surface: str, specs: Sequence[CaseSpec], bases: Sequence[str] = BASES
) -> Diagnosis | None:
    """Diagnose one surface on the first of the cases that fails, then on the others; None if none fails."""
    masked = alone(backend, surface)
    for spec in specs:
        torch.manual_seed(coins_of(spec))
        seen = record(masked, spec)
        if seen.failed or seen.refused:
            return _Search(masked, surface, spec, seen, bases).run([s for s in specs if s is not spec])
    return None


class _Search:
    """The search for hypotheses of one failure."""

    def __init__(self, backend: Any, surface: str, spec: CaseSpec, seen: Recording, bases: Sequence[str]) -> None:
        self.backend, self.surface, self.spec, self.seen = backend, surface, spec, seen
        self.base_name, self.base, self.clean = self._closest(bases)

    def _closest(self, names: Sequence[str]) -> tuple[str, Any, Recording]:
        """The right kernel whose bits agree with most calls; the first of several."""
        best: tuple[float, str, Any, Recording] | None = None
        for name in names:
            try:
                base = alone(_made(name, self.backend.contract), self.surface)
            except InputError:
                continue
            clean = record(base, self.spec)
            agreement = clean.agreement(self.seen)
            if best is None or agreement > best[0]:
                best = agreement, name, base, clean
        if best is None:
            raise InputError(f"diagnose: no kernel of ours can be made for contract {self.backend.contract}")
        return best[1:]

    def run(self, others: Sequence[CaseSpec]) -> Diagnosis:
        """Hypotheses on the failing case, then fewer by every further case that tells them apart."""
        candidates = list(self._candidates(scene_of(Case(self.spec, self.backend.contract))))
        group = [h for h in candidates if self._same(h, self.spec, self.seen)]
        how, near = "bitwise", tuple[Hypothesis, ...]()
        if not group:
            ranked = sorted(self._ranked(candidates), key=lambda h: h.left)
            group = [h for h in ranked if h.left <= EXPLAINS]
            near = tuple(h for h in ranked if h not in group)[:NAMED]
            how = "distance" if group else "unknown"
        apart: dict[str, list[str]] = {}
        asked = [self.spec.id]
        for spec in others if len(group) > 1 else ():
            kept = self._refined(group, spec, how)
            if kept is None:
                continue
            asked.append(spec.id)
            ruled_out = [h.label for h in group if h not in kept]
            if ruled_out and kept:
                apart[spec.id], group = ruled_out, kept
            if len({h.fault for h in group}) == 1:
                break
        place = self._place()
        return Diagnosis(self.surface, self.spec.id, self.seen.failed[0] if self.seen.failed else "refused",
                         place, self.base_name, how, tuple(group), near, apart, tuple(asked))  # fmt: skip

    def _candidates(self, scene: Scene) -> Iterator[Hypothesis]:
        for fault in CATALOGUE.values():
            if fault.surface == self.surface and fault.expect == "detected" and self._possible(fault, scene):
                for size in fault.knob.sizes if fault.knob else (None,):
                    yield Hypothesis(fault.id, size)

    def _possible(self, fault: Fault, scene: Scene) -> bool:
        inner = self.base.inner
        return fault.reaches(scene) and fault.fits(inner)

    def _faulty(self, h: Hypothesis, spec: CaseSpec) -> Any:
        fault = CATALOGUE[h.fault]
        torch.manual_seed(coins_of(spec))
        wrap = fault.wrap if h.size is None or fault.knob is None else fault.knob.wrap(h.size)
        return alone(wrap(self.base.inner), self.surface)

    def _same(self, h: Hypothesis, spec: CaseSpec, seen: Recording) -> bool:
        return reproduces(self._faulty(h, spec), spec, seen)

    def _left(self, h: Hypothesis, spec: CaseSpec, seen: Recording, clean: Recording) -> float:
        """Part of the deviation from the clean kernel that a hypothesis leaves unexplained."""
        made = record(self._faulty(h, spec), spec)
        return made.distance(seen) / max(clean.distance(seen), 1e-300)

    def _ranked(self, candidates: Sequence[Hypothesis]) -> list[Hypothesis]:
        return [Hypothesis(h.fault, h.size, self._left(h, self.spec, self.seen, self.clean)) for h in candidates]

    def _refined(self, group: Sequence[Hypothesis], spec: CaseSpec, how: str) -> list[Hypothesis] | None:
        """Hypotheses that also hold on another case; None if the case does not tell them apart."""
        made = [record(self._faulty(h, spec), spec) for h in group]
        if all(m.same(made[0]) for m in made[1:]):
            return None
        torch.manual_seed(coins_of(spec))
        seen = record(self.backend, spec)
        if how == "bitwise":
            return [h for h, m in zip(group, made, strict=True) if m.same(seen)]
        clean = record(self.base, spec)
        deviation = clean.distance(seen)
        left = [m.distance(seen) / max(deviation, 1e-300) for m in made]
        best = min(left)
        if deviation == 0.0 or best > EXPLAINS:
            return None
        return [Hypothesis(h.fault, h.size, max(h.left, x)) for h, x in zip(group, left, strict=True)
                if x <= max(EXPLAINS / 10, 2 * best)]  # fmt: skip

    def _place(self) -> dict[str, int | None]:
        """The first cell outside of the check that failed first, parents before children."""
        if self.seen.result is None or not self.seen.failed:
            return {}
        places = self.seen.result.tallies[self.seen.failed[0]].places
        first = min(places, key=_topological, default=None)
        return {} if first is None else {k: getattr(first, k) for k in ("request", "layer", "row", "head")}


def _topological(place: Place) -> tuple[int, int, int]:
    return place.request or 0, place.row or 0, place.layer or 0


def _made(name: str, contract: Any) -> Any:
    """A right kernel of ours under another kernel's contract."""
    return load_backend(name, **{f.name: getattr(contract, f.name) for f in fields(contract)})


def diagnose(
    backend: Any, seed: int, surfaces: Sequence[str] | None = None, specs: Sequence[CaseSpec] | None = None
) -> list[Diagnosis]:
    """Every failing surface of a backend on small cases (or on `specs`), none for a right backend.

    Raises InputError when no kernel of ours has the backend's contract.
    """
    cases = list(ladder(seed)) if specs is None else list(specs)
    covered = [s for s, has in covered_surfaces(backend).items() if all(has)]
    found = (diagnose_surface(backend, s, cases) for s in SURFACES if s in covered and s in (surfaces or covered))
    return [d for d in found if d is not None]
