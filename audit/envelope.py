"""A frozen envelope: bounds measured on calibration cases, with a guarantee that follows from counting alone.

The unit is one (operand set, layer instance). A statistic has one value per unit, for example the worst error over the
rows and heads of that unit. The bound is an order statistic of the calibration units; how many held-out units may lie
above it follows from exchangeability (`audit.exceedance`) at a family-wise false-alarm probability that is written
into the file and shared equally among the statistics (Bonferroni).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from audit.distance import ratios
from audit.envelope_file import ALPHA_FAMILY, REMEDY, Envelope, Statistic, check_target, load, save
from audit.exceedance import allowed_exceedances, bonferroni, detectable_rate, detection_power, exceedance_tail
from lumotree.contract import Contract, Dims
from lumotree.errors import EnvelopeError

__all__ = [
    "ALPHA_FAMILY",
    "Envelope",
    "EnvelopeResult",
    "Statistic",
    "allowed_exceedances",
    "check_applies",
    "check_target",
    "detection_power",
    "exceedance_tail",
    "freeze",
    "judge",
    "load",
    "save",
]

#: Facts that can move the last bits of a correct kernel: another value is a warning, never a silent match.
_WARN_IF_OTHER = ("processor", "gpu", "torch", "triton", "triton_interpret")


@dataclass(frozen=True)
class EnvelopeResult:
    """Verdict on one statistic.

    cells: held-out units m; exceedances: how many lie strictly above the bound (a NaN counts); allowed: how many may;
    worst_ratio: largest value / bound; status: "pass", "fail" or "inconclusive"; units: indices of the exceeding
    units, worst first; reason: why it is not a pass, empty otherwise.
    """

    statistic: str
    cells: int
    exceedances: int
    allowed: int
    worst_ratio: float | None
    bound: float
    status: str
    units: tuple[int, ...]
    reason: str = ""


def freeze(
    values: Mapping[str, ArrayLike],
    *,
    backend: str,
    contract: Contract,
    dims: Dims,
    shape: str,
    arm: str,
    trees: Sequence[str],
    planned: int,
    case_sha256: str,
    code_sha256: str,
    backend_sha256: str | None,
    seed: int,
    environment: Mapping[str, Any],
    order: int = 1,
    alpha_family: float = ALPHA_FAMILY,
    created: str | None = None,
) -> Envelope:
    """Turn calibration values (statistic -> one value per unit) into an envelope for `planned` held-out units.

    Raises EnvelopeError for no statistic, or for values that are not finite, negative or not one-dimensional: a
    calibration that contains a NaN has found a defect, not a bound.
    """
    alpha = bonferroni(alpha_family, len(values))
    statistics = {}
    for name, raw in values.items():
        units = _units(name, raw)
        if units.size == 0 or not np.isfinite(units).all():
            raise EnvelopeError(f"envelope: expected finite calibration values for {name}, got {_describe(units)}")
        allowed = allowed_exceedances(units.size, planned, alpha, order)
        bound = float(np.sort(units)[-order])
        digest = hashlib.sha256(units.astype("<f8").tobytes()).hexdigest()
        statistics[name] = Statistic(bound, order, units.size, digest, allowed)
    return Envelope(
        backend=backend,
        contract=contract.as_dict(),
        dims=asdict(dims),
        shape=shape,
        arm=arm,
        trees=tuple(trees),
        statistics=statistics,
        planned=planned,
        alpha_family=alpha_family,
        guarantee=_guarantee(statistics, planned, alpha_family),
        case_sha256=case_sha256,
        code_sha256=code_sha256,
        backend_sha256=backend_sha256,
        seed=seed,
        environment=dict(environment),
        created=created or datetime.now(UTC).date().isoformat(),
    )


def judge(envelope: Envelope, values: Mapping[str, ArrayLike]) -> list[EnvelopeResult]:
    """Judge held-out values, one per unit, against every statistic of the envelope.

    The allowed count is taken for the m that came, at the envelope's own false-alarm probability. A NaN fails
    outright. Raises EnvelopeError for a statistic that the envelope does not bound.
    """
    unknown = sorted(set(values) - set(envelope.statistics))
    if unknown:
        known = ", ".join(sorted(envelope.statistics))
        raise EnvelopeError(f"envelope: expected statistics {known}, found {', '.join(unknown)}; {REMEDY}")
    alpha = bonferroni(envelope.alpha_family, len(envelope.statistics))
    results = []
    for name, stat in envelope.statistics.items():
        units = _units(name, values.get(name, ()))
        allowed = allowed_exceedances(stat.n, units.size, alpha, stat.order)
        results.append(_judge_one(name, stat, units, allowed))
    return results


def check_applies(
    envelope: Envelope,
    *,
    contract: Contract,
    dims: Dims,
    shape: str,
    backend: str,
    arm: str,
    code_sha256: str,
    trees: Sequence[str] | None = None,
    case_sha256: str | None = None,
    backend_sha256: str | None = None,
    environment: Mapping[str, Any] | None = None,
    where: str = "",
) -> list[str]:
    """Refuse an envelope that was made for something else; return warnings about what may move the last bits.

    case_sha256: hash of the calibration cases that this run's own code and seed would draw. `where`: the path, for
    messages. Whatever is left None is not compared. Raises EnvelopeError for the first mismatch.
    """
    label = f"envelope {where}".strip()
    _same(label, "backend", envelope.backend, backend)
    _same(label, "arm", envelope.arm, arm)
    _same(label, "shape", envelope.shape, shape)
    _same_fields(label, "contract", envelope.contract, contract.as_dict())
    wanted = asdict(dims)
    _same_fields(label, "dims", {**envelope.dims, "name": ""}, {**wanted, "name": ""})
    _same(label, "code_sha256 (the judging code)", envelope.code_sha256, code_sha256)
    if trees is not None:
        _same(label, "trees", list(envelope.trees), list(trees))
    if case_sha256 is not None:
        _same(label, "case_sha256 (the calibration cases)", envelope.case_sha256, case_sha256)
    warnings = []
    if backend_sha256 is not None and backend_sha256 != envelope.backend_sha256:
        warnings.append(f"{label}: the source of backend {backend} changed since calibration")
    here = environment or {}
    for key in _WARN_IF_OTHER:
        if key in here and here[key] != envelope.environment.get(key):
            warnings.append(f"{label}: calibrated with {key} {envelope.environment.get(key)!r}, this is {here[key]!r}")
    return warnings


def _judge_one(name: str, stat: Statistic, units: NDArray[np.float64], allowed: int) -> EnvelopeResult:
    above = np.isnan(units) | (units > stat.bound)  # equal is not above: conservative, see audit.exceedance
    indices = np.flatnonzero(above)
    ratio = ratios(torch.from_numpy(units), stat.bound).numpy()
    worst_first = indices[np.argsort(-ratio[indices], kind="stable")]
    status, reason = _status(stat, units, len(indices), allowed)
    worst = float(ratio.max()) if units.size else None
    found = tuple(int(i) for i in worst_first)
    return EnvelopeResult(name, units.size, len(indices), allowed, worst, stat.bound, status, found, reason)


def _status(stat: Statistic, units: NDArray[np.float64], exceedances: int, allowed: int) -> tuple[str, str]:
    if units.size == 0:
        return "inconclusive", "no held-out value"
    nans = int(np.isnan(units).sum())
    if nans:
        return "fail", f"{nans} of {units.size} held-out values are NaN"
    if allowed >= units.size:
        return "inconclusive", f"no power: n={stat.n} and m={units.size} cannot reject at this false-alarm probability"
    if exceedances > allowed:
        return "fail", f"{exceedances} of {units.size} units above the bound, {allowed} allowed"
    return "pass", ""


def _guarantee(statistics: Mapping[str, Statistic], planned: int, alpha_family: float) -> str:
    """Say in one sentence what the file promises, and to whom."""
    n = min(s.n for s in statistics.values())
    allowed = max(s.allowed for s in statistics.values())
    rate = detectable_rate(planned, allowed)
    power = (
        "it has no power"
        if rate is None
        else f"a backend whose units exceed a bound with chance {rate:.0%} or more is caught with probability 0.99"
    )
    return (
        f"If held-out units are exchangeable with the {n} calibration units, any of the {len(statistics)} statistics "
        f"raises a false alarm with probability at most {alpha_family:g} (at most {allowed} of {planned} units may lie "
        f"above a bound), and {power}."
    )


def _units(name: str, raw: ArrayLike) -> NDArray[np.float64]:
    units = np.asarray(raw, dtype=np.float64)
    if units.ndim != 1:
        raise EnvelopeError(f"envelope: expected one value per unit [m] for {name}, got shape {list(units.shape)}")
    if (units < 0).any():
        raise EnvelopeError(f"envelope: expected distances >= 0 for {name}, got {units.min()}")
    return np.ascontiguousarray(units)


def _describe(units: NDArray[np.float64]) -> str:
    bad = np.flatnonzero(~np.isfinite(units))
    return f"{units[bad[0]]} in unit {bad[0]} of {units.size}" if bad.size else "no value"


def _same_fields(label: str, what: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in sorted(set(found) | set(wanted)):
        _same(label, f"{what} {key}", found.get(key), wanted.get(key))


def _same(label: str, what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise EnvelopeError(f"{label}: expected {what} {wanted!r}, found {found!r}; {REMEDY}")
