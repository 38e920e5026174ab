"""Names the likely defect of a failing kernel: which known fault, put into a right kernel, leaves what it left.

On a failing case every fault of the catalogue that could touch the surface is put in front of a right kernel of ours.
Those that reproduce every call of the audit bit by bit are the hypotheses; where no kernel of ours shares bits with the
one under audit, those that explain nearly all of its deviation. Further cases are then run until the hypotheses that
are left cannot be told apart by any case of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from audit.cases import Case, CaseSpec
from audit.fault_cases import ladder
from audit.fault_trial import alone, coins_of, set_coins
from audit.recording import Recording, apart, record, reproduces
from audit.scene import scene_of
from audit.tally import Place
from faults import CATALOGUE
from faults.reach import Scene
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import SURFACES, complete_surfaces
from lumotree.contract import Contract
from lumotree.errors import InputError

#: Right kernels of ours that hypotheses are tried on, in the order in which they are preferred.
BASES = ("torch", "reference", "bank", "kv_layout", "sqrt_norm", "split_k", "wy")

#: A hypothesis explains a failure if what it leaves unexplained is at most this part of the deviation.
EXPLAINS = 0.1

#: Hypotheses within this factor of the best one, or that leave no more than rounding, are not told apart.
CLOSE = 1.5
ROUNDING = 1e-3

#: How many other hypotheses a report names beside the group, and what they may leave: one that leaves more is no lead.
NAMED = 3
LEAD = 0.5


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
    hypotheses that no case of ours tells apart, best first; near: the next ones that explain half of it or
    more. told_apart: case -> hypotheses that it ruled out. cases: those that were asked.
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


class Known:
    """What the faults of the catalogue leave on a right kernel of ours; recordings are kept."""

    def __init__(self, name: str, contract: Contract, surface: str) -> None:
        self.name, self.surface, self._inner = name, surface, _made(name, contract)
        self._kept: dict[tuple[str, float | None, str], Recording] = {}
        self._vectors: dict[tuple[str, float | None, str], Tensor] = {}

    def clean(self, spec: CaseSpec) -> Recording:
        """What the right kernel leaves."""
        return self._recorded(("", None, spec.id), alone(self._inner, self.surface), spec)

    def made(self, h: Hypothesis, spec: CaseSpec) -> Recording:
        """What a fault leaves."""
        return self._recorded((h.fault, h.size, spec.id), self._faulty(h, spec), spec)

    def _recorded(self, key: tuple[str, float | None, str], backend: Any, spec: CaseSpec) -> Recording:
        if key not in self._kept:
            set_coins(coins_of(spec))
            self._kept[key] = record(backend, spec)
        return self._kept[key]

    def same(self, h: Hypothesis, spec: CaseSpec, seen: Recording) -> bool:
        """Whether a fault leaves these very bits; a recording that is not kept stops at the first that are others."""
        key = (h.fault, h.size, spec.id)
        return self._kept[key].same(seen) if key in self._kept else reproduces(self._faulty(h, spec), spec, seen)

    def _faulty(self, h: Hypothesis, spec: CaseSpec) -> Any:
        fault = CATALOGUE[h.fault]
        set_coins(coins_of(spec))
        return alone(fault.at(h.size)(self._inner), self.surface)

    def hypotheses(self, scene: Scene) -> Iterator[Hypothesis]:
        """Faults of the surface that a case reaches, at every size of their knobs."""
        for fault in CATALOGUE.values():
            possible = fault.surface == self.surface and fault.expect == "detected" and fault.fits(self._inner)
            if possible and fault.reaches(scene):
                for size in fault.knob.sizes if fault.knob else (None,):
                    yield Hypothesis(fault.id, size)

    def unexplained(self, group: Sequence[Hypothesis], spec: CaseSpec, seen: Recording) -> list[float]:
        """Part of the deviation from the right kernel that each hypothesis leaves, infinite without a deviation."""
        clean, deviation = self.clean(spec), self.deviation(spec, seen)
        if deviation == 0.0:
            return [math.inf] * len(group)
        there = seen.vector(clean)
        return [apart(self._vector(h, spec, clean), there) / deviation for h in group]

    def deviation(self, spec: CaseSpec, seen: Recording) -> float:
        """Distance of a recording from the right kernel's."""
        clean = self.clean(spec)
        return apart(seen.vector(clean), clean.vector(clean))

    def _vector(self, h: Hypothesis, spec: CaseSpec, clean: Recording) -> Tensor:
        key = (h.fault, h.size, spec.id)
        if key not in self._vectors:
            self._vectors[key] = self.made(h, spec).vector(clean)
        return self._vectors[key]


def diagnose_surface(
    make: Callable[[], Any], surface: str, specs: Sequence[CaseSpec], known: Sequence[Known] = ()
) -> Diagnosis | None:
    """Diagnose one surface on the first of the cases that fails, then on the others; None if none fails.

    Where that case names nothing, the one with the largest deviation is asked: a defect that hardly shows in ordinary
    numbers may be plain where numbers are as it needs them. make: the backend, new for every case, so that nothing it
    remembers tells cases apart. known: kernels on which hypotheses are tried, by default all of ours that have the
    contract.
    """
    failing = ((s, seen) for s in specs if (seen := _seen(make, surface, s)).failed or seen.refused)
    first = next(failing, None)
    if first is None:
        return None
    base = _closest(known or _all_known(make().contract, surface), *first)
    found = _Search(make, base, *first).run([s for s in specs if s is not first[0]])
    if found.how != "unknown":
        return found
    largest = max(failing, key=lambda case: base.deviation(*case), default=first)
    if base.deviation(*largest) <= base.deviation(*first):
        return found
    again = _Search(make, base, *largest).run([s for s in specs if s is not largest[0]])
    return found if again.how == "unknown" else again


def _seen(make: Callable[[], Any], surface: str, spec: CaseSpec) -> Recording:
    set_coins(coins_of(spec))
    return record(alone(make(), surface), spec)


def _all_known(contract: Contract, surface: str) -> list[Known]:
    found = []
    for name in BASES:
        try:
            found.append(Known(name, contract, surface))
        except InputError:
            continue
    if not found:
        raise InputError(f"diagnose: no kernel of ours can be made with the contract {contract}")
    return found


def _closest(known: Sequence[Known], spec: CaseSpec, seen: Recording) -> Known:
    """The kernel whose bits agree with most calls; the first of several."""
    return max(known, key=lambda k: k.clean(spec).agreement(seen))


class _Search:
    """The search for hypotheses of one failure."""

    def __init__(self, make: Callable[[], Any], known: Known, spec: CaseSpec, seen: Recording) -> None:
        self.make, self.known, self.spec, self.seen = make, known, spec, seen

    def run(self, others: Sequence[CaseSpec]) -> Diagnosis:
        """Hypotheses on the failing case, then fewer by every further case that tells them apart."""
        how, group, near = self._first()
        ruled_out: dict[str, list[str]] = {}
        asked = [self.spec.id]
        for spec in others:
            if len({h.fault for h in group}) < 2:
                break
            kept = self._refined(group, spec, how)
            if kept is not None:
                asked.append(spec.id)
                gone = [h.label for h in group if h.fault not in {k.fault for k in kept}]
                group = kept
                ruled_out |= {spec.id: gone} if gone else {}
        check = self.seen.failed[0] if self.seen.failed else "refused"
        return Diagnosis(self.known.surface, self.spec.id, check, self._place(), self.known.name, how, tuple(group),
                         tuple(near), ruled_out, tuple(asked))  # fmt: skip

    def _first(self) -> tuple[str, list[Hypothesis], list[Hypothesis]]:
        """How hypotheses are judged, those that hold on the failing case, and the next best ones."""
        candidates = list(self.known.hypotheses(scene_of(Case(self.spec, self.make().contract))))
        group = [h for h in candidates if self.known.same(h, self.spec, self.seen)]
        if group:
            return "bitwise", group, []
        left = self.known.unexplained(candidates, self.spec, self.seen)
        ranked = sorted((Hypothesis(h.fault, h.size, x) for h, x in zip(candidates, left, strict=True)),
                        key=lambda h: h.left)  # fmt: skip
        group = _best(ranked)
        near = [h for h in ranked if h not in group and h.left <= LEAD][:NAMED]
        return ("distance" if group else "unknown"), group, near

    def _refined(self, group: Sequence[Hypothesis], spec: CaseSpec, how: str) -> list[Hypothesis] | None:
        """Hypotheses that also hold on another case; None if it does not tell them apart or rules out all of them."""
        made = [self.known.made(h, spec) for h in group]
        if all(m.same(made[0]) for m in made[1:]):
            return None
        seen = _seen(self.make, self.known.surface, spec)
        if how == "bitwise":
            return [h for h, m in zip(group, made, strict=True) if m.same(seen)] or None
        left = self.known.unexplained(group, spec, seen)
        kept = _best([Hypothesis(h.fault, h.size, max(h.left, x)) for h, x in zip(group, left, strict=True)], left)
        return kept or None

    def _place(self) -> dict[str, int | None]:
        """The first cell outside of the check that failed first, parents before children."""
        if self.seen.result is None or not self.seen.failed:
            return {}
        places = self.seen.result.tallies[self.seen.failed[0]].places
        first = min(places, key=_topological, default=None)
        return {} if first is None else {k: getattr(first, k) for k in ("request", "layer", "row", "head")}


def _best(hypotheses: Sequence[Hypothesis], left: Sequence[float] | None = None) -> list[Hypothesis]:
    """Hypotheses that explain a deviation about as well as the best one, if that explains it; best first."""
    values = [h.left for h in hypotheses] if left is None else list(left)
    least = min(values, default=math.inf)
    if not least <= EXPLAINS:
        return []
    limit = max(CLOSE * least, ROUNDING)
    return [h for x, h in sorted(zip(values, hypotheses, strict=True), key=lambda pair: pair[0]) if x <= limit]


def _topological(place: Place) -> tuple[int, int, int]:
    return place.request or 0, place.row or 0, place.layer or 0


def _made(name: str, contract: Any) -> Any:
    """A right kernel of ours under another kernel's contract."""
    return load_backend(name, **{f.name: getattr(contract, f.name) for f in fields(contract)})


def diagnose(
    make: Callable[[], Any], seed: int, surfaces: Sequence[str] | None = None, specs: Sequence[CaseSpec] | None = None
) -> list[Diagnosis]:
    """Every failing surface of a backend on small cases (or on `specs`), none for a right backend.

    make: the backend, as in `diagnose_surface`.

    Raises InputError when no kernel of ours has the backend's contract.
    """
    cases = list(ladder(seed)) if specs is None else list(specs)
    covered = complete_surfaces(make())
    found = (diagnose_surface(make, s, cases) for s in SURFACES if s in covered and s in (surfaces or covered))
    return [d for d in found if d is not None]
