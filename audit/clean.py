"""Random clean cases: right backends under every check, where each alarm is a false one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from audit.cases import CaseSpec
from audit.component import audit_case
from audit.environment import environment
from audit.families import DIMS_MICRO_EXACT
from audit.fault_matrix import exact_interval
from audit.metamorphic import RELATIONS, Relation
from audit.processes import one_thread, pooled
from audit.render.progress import Progress
from audit.report import Check, Finding, Report, decide
from audit.runner import default_workers
from audit.tally import judged
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import SURFACES
from lumotree.contract import Dims
from lumotree.errors import InputError

#: First word of a clean case's seed entropy, apart from every other family's.
STREAM = 404

_REGIMES = ("random", "random", "near_one", "near_zero", "zero_keys", "tiny_keys", "large_gates", "mid_gates", "cold")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "layout": ("VK", "KV"), "beta": ("fp32", "bf16"), "norm": ("rsqrt", "sqrt", "bf16"),
    "conv": ("fp32", "bf16_product"),
    "softplus": ("log1p", "log_exp"), "head_map": ("grouped", "tiled"), "carry": ("fp32", "fp32", "bf16"),
}  # fmt: skip

#: What a backend's contract may not be drawn as.
_FIXED: dict[str, dict[str, Any]] = {
    "split_k": {"claims": "algebra"},
    "sqrt_norm": {"norm": "sqrt"},
    "kv_layout": {"layout": "KV"},
    "wy": {"claims": "algebra", "carry": "fp32"},
}


@dataclass
class Clean:
    """What clean cases of one backend showed.

    alarms: (case number, checks that failed, or the refusal). cells: judged ones. relations: runs of a metamorphic one.
    drawn: how often each regime, placement and field of a contract came up.
    """

    backend: str
    cases: int = 0
    cells: int = 0
    relations: int = 0
    alarms: list[tuple[int, str]] = field(default_factory=list)
    drawn: Counter[str] = field(default_factory=Counter)

    @property
    def upper(self) -> float:
        """Upper 95% limit of the false-alarm rate of a case."""
        return exact_interval(len(self.alarms), self.cases, 0.9)[1]

    def merge(self, other: Clean) -> None:
        """Add what another worker saw."""
        self.cases += other.cases
        self.cells += other.cells
        self.relations += other.relations
        self.alarms += other.alarms
        self.drawn.update(other.drawn)


def draw_contract(rng: np.random.Generator, backend: str) -> dict[str, Any]:
    """Fields of a contract that the backend can be made with."""
    fields: dict[str, Any] = {name: _pick(rng, values) for name, values in _CHOICES.items()}
    fields |= _FIXED.get(backend, {})
    if fields["carry"] == "bf16":
        fields["state_dtype"] = torch.bfloat16
    return fields


def draw_spec(rng: np.random.Generator, number: int, seed: int) -> CaseSpec:
    """A random case: dims, trees of 1 to 7 rows, 1 to 3 requests, prefixes, pages, placement, padding, regime."""
    requests = int(rng.choice((1, 1, 1, 1, 1, 2, 2, 3)))
    exact = bool(rng.random() < 0.1)
    rotary_free = 4
    kv, group, half = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    hk, spread = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    dims = DIMS_MICRO_EXACT if exact else Dims(
        hk, hk * spread, int(rng.integers(4, 17)), int(rng.integers(4, 17)), int(rng.integers(4, 25)), kv * group, kv,
        2 * half + rotary_free, 2 * half, conv_width=int(rng.integers(2, 6)),
        layers=int(rng.choice((1, 1, 1, 1, 1, 2))),
    )  # fmt: skip
    longest = 20 if exact else 30
    return CaseSpec(
        id=f"clean/{seed}/{number}",
        dims=dims,
        trees=tuple(_tree(rng) for _ in range(requests)),
        prefixes=tuple(int(rng.integers(0, longest)) for _ in range(requests)),
        entropy=(seed, STREAM, number),
        regime="exact" if exact else str(_pick(rng, _REGIMES)),
        page_size=int(rng.choice((1, 2, 3, 4, 8, 16))),
        placement=str(rng.choice(("scattered", "scattered", "inplace", "shuffled"))),
        padding=int(rng.choice((0, 0, 1, 2))),
        padding_at=str(rng.choice(("end", "start", "middle"))),
        spare_slots=int(rng.integers(1, 12)),
        slack=int(rng.choice((0, 3))),
        inactive_fraction=float(rng.choice((0.0, 0.2, 0.5))),
        control=False,
    )


def _pick(rng: np.random.Generator, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def _tree(rng: np.random.Generator) -> str:
    kind = str(rng.choice(("random", "random", "random", "chain", "star", "comb", "binary", "mtp5")))
    sizes = {"random": (1, 8), "chain": (1, 6), "star": (1, 6), "comb": (1, 4), "binary": (0, 3)}
    return kind if kind == "mtp5" else f"{kind}:{int(rng.integers(*sizes[kind]))}"


def clean_cases(backend: str, seed: int, numbers: Sequence[int]) -> Clean:
    """Audit clean cases by number; every tenth also runs the metamorphic relations."""
    found = Clean(backend)
    for number in numbers:
        rng = np.random.default_rng(np.random.SeedSequence([seed, STREAM, number]))
        contract = draw_contract(rng, backend)
        spec = draw_spec(rng, number, seed)
        made = load_backend(backend, **contract)
        _one(found, made, spec, number, relations=number % 10 == 0)
        found.drawn.update([spec.regime, spec.placement, *(f"{k}={v}" for k, v in contract.items())])
    return found


def _one(found: Clean, backend: Any, spec: CaseSpec, number: int, relations: bool) -> None:
    try:
        result = audit_case(backend, spec)
    except InputError as refusal:  # a refusal of a right case is a false alarm too
        found.cases += 1
        found.alarms.append((number, str(refusal)))
        return
    found.cases += 1
    judged_ = [t for t in result.tallies.values() if judged(t.check, backend.contract)]
    found.cells += sum(t.cells for t in judged_)
    failed = [t.check for t in judged_ if t.failed]
    if relations:
        for relation in RELATIONS.values():
            if not relation.why_not(backend):
                found.relations += 1
                failed += _broken(relation, backend, number)
    if failed:
        found.alarms.append((number, ", ".join(failed)))


def _broken(relation: Relation, backend: Any, number: int) -> list[str]:
    try:
        return [f.check for f in relation.run(backend, number)]
    except InputError as refusal:
        return [f"refused under {relation.name}: {refusal}"]


def run_clean(
    backends: Sequence[str], count: int, seed: int, workers: int | None = None, first: int = 0
) -> list[Clean]:
    """`count` clean cases over the backends in turn; every case is another one.

    Raises InputError when a backend is unknown.
    """
    for backend in backends:
        load_backend(backend)
    found = {backend: Clean(backend) for backend in backends}
    processes = default_workers("cpu") if workers is None else workers
    with Progress(count, "clean cases") as progress:
        for part in _parts(backends, range(first, first + count), seed, processes):
            found[part.backend].merge(part)
            progress.advance(part.cases, note=part.backend)
    return list(found.values())


def _parts(backends: Sequence[str], numbers: range, seed: int, workers: int, size: int = 25) -> Iterator[Clean]:
    jobs = []
    for at, backend in enumerate(backends):
        own = numbers[at :: len(backends)]
        jobs += [(backend, seed, own[i : i + size]) for i in range(0, len(own), size)]
    if workers == 0:
        with one_thread():
            yield from (clean_cases(*job) for job in jobs)
        return
    yield from pooled(clean_cases, jobs, workers, f"clean cases of {', '.join(backends)}", in_order=True)


def to_report(found: Sequence[Clean], seed: int, command: str, seconds: float) -> Report:
    """FAIL with a false alarm, INCONCLUSIVE without a case; one check a backend."""
    checks = [_check(c) for c in found]
    coverage = dict.fromkeys(SURFACES, "covered")
    facts = environment()
    verdict, reasons = decide(checks, [], coverage, controls_required=False)
    return Report(
        verdict=verdict,
        reasons=reasons,
        suite="clean cases",
        backend=", ".join(c.backend for c in found),
        contract={},
        environment=facts,
        envelope=None,
        coverage=coverage,
        checks=tuple(checks),
        controls=(),
        findings=tuple(_finding(c.backend, seed, *alarm) for c in found for alarm in c.alarms),
        seed=seed,
        command=command,
        wall_s=round(seconds, 2),
        facts={
            "clean": {
                c.backend: {
                    "cases": c.cases,
                    "relations": c.relations,
                    "alarms": len(c.alarms),
                    "upper_95": c.upper if c.cases else None,
                    "drawn": dict(sorted(c.drawn.items())),
                }
                for c in found
            }
        },
        created=facts["date"],
    )


def _check(clean: Clean) -> Check:
    status = "fail" if clean.alarms else "pass" if clean.cells else "inconclusive"
    note = f"{len(clean.alarms)} false alarms in {clean.cases} cases" if clean.alarms else ""
    title = f"{clean.backend}: {clean.cases:,} clean cases"
    return Check(f"clean.{clean.backend}", title, "all", "clean", status, clean.cells,
                 note=note if clean.cells else "no case was run")  # fmt: skip


def _finding(backend: str, seed: int, number: int, what: str) -> Finding:
    command = f"lumotree-audit clean --cases 1 --backends {backend} --first {number} --seed {seed}"
    return Finding(what.split(",")[0][:60], f"clean/{seed}/{number}", command, got=what)
