"""Acceptance rules that other projects publish, as detectors of the same faults on the same cases.

Each rule compares what a backend computed with a reference, as that project's tests do: outputs of one verification,
outputs of one plain chain, and the state that one publication left. The rules and their figures are those of the
projects' own tests (flash-linear-attention's error ratio, FlashAttention's forward test, flashinfer-bench's matched
ratio, KernelBench's allclose, `torch.testing`); nothing is tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from audit.cases import Case, CaseSpec
from audit.environment import environment
from audit.fault_cases import heldout_ladder
from audit.fault_matrix import Cases, exact_interval
from audit.fault_trial import alone, coins_of, component_trial, set_coins
from audit.native import NativeChain, rows_of
from audit.render.progress import Progress
from audit.report import Check, Report, decide
from audit.stage import Stage
from faults import CATALOGUE
from faults.variant import AttentionVariant, ConvVariant, GdnVariant, Variant
from faults.variant_backend import variant
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import SURFACES
from lumotree.backends.reference import ReferenceBackend
from lumotree.contract import Contract
from lumotree.errors import BackendError, InputError

#: First seed of the cases; apart from those of the matrix and of the diagnosis.
FIRST_SEED = 700_000

#: Seeds among whose held-out cases the smallest that reaches a fault is looked for.
SEEDS = 5

#: Right kernels whose runs must not be flagged.
CLEAN = ("torch", "bank", "split_k", "sqrt_norm", "kv_layout", "wy")


@dataclass(frozen=True)
class Pair:
    """A tensor of a backend, of the reference, and of a reference in low precision; state: it is a published state."""

    got: Tensor
    reference: Tensor
    low: Tensor
    state: bool


#: Whether a rule accepts what a run left.
Accepts = Callable[[Sequence[Pair]], bool]


def _close(tolerance: float) -> Accepts:
    return lambda pairs: all(
        torch.allclose(p.got.float(), p.reference.float(), rtol=tolerance, atol=tolerance) for p in pairs
    )


def _testing(pairs: Sequence[Pair]) -> bool:
    """`torch.testing.assert_close` with its defaults for the dtype."""
    for p in pairs:
        rtol = 1.6e-2 if p.got.dtype == torch.bfloat16 else 1.3e-6
        if not torch.allclose(p.got.float(), p.reference.float(), rtol=rtol, atol=1e-5):
            return False
    return True


def _ratio(p: Pair) -> tuple[float, float]:
    """Root mean square of the error in units of the reference's, and the largest error."""
    error = (p.got.float() - p.reference.float()).flatten()
    size = p.reference.float().square().mean().sqrt()
    return float(error.square().mean().sqrt() / (size + 1e-8)), float(error.abs().max())


def _fla(pairs: Sequence[Pair]) -> bool:
    return all(largest <= 1e-6 or ratio < 0.005 for ratio, largest in map(_ratio, pairs))


def _fla_ci(pairs: Sequence[Pair]) -> bool:
    """In CI mode a ratio below 0.01 or a largest error below 0.3 is a warning."""
    return all(largest <= 1e-6 or ratio < 0.01 or largest < 0.3 for ratio, largest in map(_ratio, pairs))


def _flash(pairs: Sequence[Pair]) -> bool:
    """Largest error at most twice that of the low-precision run, plus twice what adding 0.3 rounds away."""
    for p in pairs:
        reference = p.reference
        slack = 2 * float((reference + 0.3 - 0.3 - reference).abs().max())
        allowed = 2 * float((p.low.float() - reference.float()).abs().max()) + slack
        if not float((p.got.float() - reference.float()).abs().max()) <= allowed:
            return False
    return True


def _matched(pairs: Sequence[Pair]) -> bool:
    """95% of the elements within 0.01 absolutely or relatively."""
    for p in pairs:
        got, reference = p.got.float(), p.reference.float()
        error = (got - reference).abs()
        bad = ~((error <= 1e-2) | (error <= 1e-2 * reference.abs()))
        if float(bad.float().mean()) > 0.05:
            return False
    return True


def _states_only(pairs: Sequence[Pair]) -> bool:
    return _testing([p for p in pairs if p.state])


RULES: dict[str, tuple[str, Accepts]] = {
    "allclose 1e-2": ("KernelBench, half precision", _close(1e-2)),
    "allclose 1e-4": ("KernelBench, fp32", _close(1e-4)),
    "torch.testing": ("defaults of the dtype", _testing),
    "fla ratio 0.005": ("flash-linear-attention", _fla),
    "fla ratio, CI mode": ("flash-linear-attention", _fla_ci),
    "2 x low precision": ("FlashAttention", _flash),
    "95% matched 1e-2": ("flashinfer-bench", _matched),
    "final state only": ("torch.testing on the state", _states_only),
}


def answers(backend: Any, spec: CaseSpec, surface: str) -> list[tuple[Tensor, bool]]:
    """Outputs of a verification and of the deepest chain's plain steps, and (True) the state of one publication.

    Raises InputError when the backend refuses the case.
    """
    case = Case(spec, backend.contract)
    stage = Stage(backend, case, [surface])
    found = []
    for request, tree in enumerate(case.trees):
        path = tree.path(max(tree.leaves, key=lambda row: int(tree.depth[row])))
        trace = NativeChain(backend, case, [surface]).chain(request, 0, path)
        outs = {"gdn": trace.gdn_out, "conv": trace.conv_out, "attention": trace.attention_out}[surface]
        found.append((torch.stack(rows_of(outs, path)), False))
    stage.verify()
    found += [(outs[surface][case.active], False) for outs in stage.out]
    stage.publish([t.path(max(t.leaves, key=lambda row: int(t.depth[row]))) for t in case.trees])
    return found + [(state, True) for state in _states(stage, surface)]


def _states(stage: Stage, surface: str) -> list[Tensor]:
    case, found = stage.case, []
    for request, tree in enumerate(case.trees):
        for layer in range(case.dims.layers):
            if surface == "attention":
                where = case.committed(request, range(tree.prefix_len + tree.max_depth + 1))
                found += [case.pools.cache.k[layer, where], case.pools.cache.v[layer, where]]
            else:
                state = stage.export(request, layer)
                found.append((state.recurrent if surface == "gdn" else state.conv).clone())
    return found


#: The reference with every product and state in bf16, for rules that allow what low precision costs.
_LOW: dict[str, Variant] = {
    "gdn": GdnVariant(state_bits=7, u_bf16=True, keys_bf16=True, decay="bf16", beta="bf16"),
    "conv": ConvVariant(sums="bf16"),
    "attention": AttentionVariant(probs_bf16=True),
}


def pairs_of(backend: Any, spec: CaseSpec, surface: str) -> list[Pair] | None:
    """What a rule gets to see of a run; None if the backend refused the case."""
    try:
        set_coins(coins_of(spec))
        got = answers(alone(backend, surface), spec, surface)
    except InputError:
        return None
    contract = replace(backend.contract, algebra=tuple(backend.contract.algebra))  # hashable, were it given as a list
    right, low = _expected(contract, spec, surface)
    return [Pair(g, r, low_, state) for (g, state), r, low_ in zip(got, right, low, strict=True)]


@lru_cache(maxsize=256)  # many faults are tried on the same few cases
def _expected(contract: Contract, spec: CaseSpec, surface: str) -> tuple[list[Tensor], list[Tensor]]:
    """What the reference answers, and what it answers in low precision."""
    reference = ReferenceBackend(contract)
    right = answers(alone(reference, surface), spec, surface)
    low = answers(alone(variant(surface, _LOW[surface])(reference), surface), spec, surface)
    return [x for x, _ in right], [x for x, _ in low]


def flagged(pairs: Sequence[Pair] | None) -> dict[str, bool]:
    """Which rules flag a run; a refusal is seen by everybody."""
    return {name: pairs is None or not accepts(pairs) for name, (_, accepts) in RULES.items()}


@dataclass(frozen=True)
class Comparison:
    """faults: those that were reached; caught: rule -> faults it flags; clean: right runs; alarms: rule -> right runs
    that it flags; ours: faults that the component checks flag on the same cases."""

    faults: tuple[str, ...]
    caught: dict[str, list[str]]
    clean: int
    alarms: dict[str, int]
    ours: int


def compare(backend: str, clean_seeds: int = 3, only: Sequence[str] = ()) -> Comparison:
    """Every fault in front of a backend on its smallest held-out case, and right kernels on all of them.

    Raises BackendError for a backend that is wrong there without a fault: every rule would seem to catch every fault.
    """
    inner = load_backend(backend)
    chosen = [f for f in CATALOGUE.values() if f.expect == "detected" and f.fits(inner) and (not only or f.id in only)]
    caught: dict[str, list[str]] = {name: [] for name in RULES}
    cases = Cases((s for n in range(SEEDS) for s in heldout_ladder(FIRST_SEED + n)), inner.contract)
    reached, ours = [], 0
    with Progress(len(chosen), "faults under other rules") as progress:
        for fault in chosen:
            spec = next(cases.reaching(fault), None)
            progress.advance(note=fault.id)
            if spec is None:
                continue
            if own := cases.own_failure(inner, fault.surface, spec):
                raise BackendError(
                    f"others: expected a backend that passes; {backend!r} fails {fault.surface} in {spec.id} "
                    f"without a fault: {own}; see `lumotree-audit check`"
                )
            trial = component_trial(inner, fault, spec)
            if trial.state == "NotReached":
                continue
            reached.append(fault.id)
            ours += trial.state == "Caught"
            for name, seen in flagged(pairs_of(fault.wrap(inner), spec, fault.surface)).items():
                if seen:
                    caught[name].append(fault.id)
    clean, alarms = _false_alarms(clean_seeds)
    return Comparison(tuple(reached), caught, clean, alarms, ours)


def _false_alarms(seeds: int) -> tuple[int, dict[str, int]]:
    runs, alarms = 0, dict.fromkeys(RULES, 0)
    with Progress(len(CLEAN) * seeds, "clean runs under other rules") as progress:
        for name in CLEAN:
            backend = load_backend(name)
            for seed in range(FIRST_SEED + 100, FIRST_SEED + 100 + seeds):
                for spec in heldout_ladder(seed):
                    for surface in SURFACES:
                        runs += 1
                        for rule, seen in flagged(pairs_of(backend, spec, surface)).items():
                            alarms[rule] += seen
                progress.advance(note=name)
    return runs, alarms


def to_report(c: Comparison, backend: str, command: str, seconds: float) -> Report:
    """A table, not a verdict on the backend: other rules are reported, our own must have caught what it reached."""
    total = len(c.faults)
    checks = [
        Check(f"others.{name}", f"{name} ({origin})", "all", "others", "info", total,
              note=f"{len(c.caught[name])} of {total} faults, {c.alarms[name]} of {c.clean} right runs flagged")
        for name, (origin, _) in RULES.items()
    ]  # fmt: skip
    checks.append(Check("others.ours", "this audit", "all", "others", "pass" if c.ours == total and total else "fail",
                        max(total, 1), note=f"{c.ours} of {total} faults"))  # fmt: skip
    facts = environment()
    verdict, reasons = decide(checks, [], dict.fromkeys(SURFACES, "covered"), controls_required=False)
    return Report(
        verdict=verdict,
        reasons=reasons,
        suite="others' rules",
        backend=backend,
        contract=load_backend(backend).contract.as_dict(),
        environment=facts,
        envelope=None,
        coverage=dict.fromkeys(SURFACES, "covered"),
        checks=tuple(checks),
        controls=(),
        findings=(),
        seed=FIRST_SEED,
        command=command,
        wall_s=round(seconds, 2),
        facts={
            "others": {
                name: {
                    "origin": origin,
                    "caught": len(c.caught[name]),
                    "of": total,
                    "interval": list(exact_interval(len(c.caught[name]), max(total, 1))),
                    "missed": sorted(set(c.faults) - set(c.caught[name])),
                    "false_alarms": c.alarms[name],
                    "clean_runs": c.clean,
                }
                for name, (origin, _) in RULES.items()
            }
        },
        created=facts["date"],
    )
