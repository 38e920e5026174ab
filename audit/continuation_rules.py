"""When an arm is too far from the reference: the bitwise rule, the published envelope, and its calibrated form.

Published (contract section 6): R_s(c) = max(F_s, d(B,A), d(V,A), d(P,A)) with F = 0.02 for states (largest relative L2
over layers) and 0.15 nats for the next token's law; a candidate passes where d <= 2 R_s(c). Its greedy token may differ
only where the reference's two largest logits are within max(0.25, twice the largest native logit difference).

Calibrated: the floor is not set by hand. On calibration prefixes the spread of correct native arms among each other is
measured, one number a prefix and surface (the largest over its cycles), and F_s is the largest of them. On held-out
prefixes the candidate's number of a prefix exceeds F_s with a chance that counting alone gives, as long as it is
exchangeable with the native ones (`audit.exceedance`); how many may, follows from the false-alarm probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from audit.continuation_distance import SURFACES, Apart, Greedy
from audit.exceedance import allowed_exceedances, exceedance_tail

FACTOR = 2.0
FLOOR_STATE, FLOOR_NATS = 0.02, 0.15
#: F_s by surface. Lengths are right or wrong.
FLOORS: dict[str, float] = {
    **dict.fromkeys(("gdn", "conv", "kv_new", "kv_history", "hidden", "drafter"), FLOOR_STATE),
    "next": FLOOR_NATS,
    "lengths": 0.0,
}
TIE_LOGITS = 0.25
#: False-alarm probability of one calibrated run, over all surfaces together.
ALPHA = 0.01


def envelope(surface: str, native: Sequence[float]) -> float:
    """R_s(c): native, distances of the native arms from the reference in this cycle."""
    return max([FLOORS[surface], *native])


def within_envelope(distance: float, r: float) -> bool:
    """The published rule."""
    return distance <= FACTOR * r


def envelope_ratio(distance: float, r: float) -> float:
    """Distance as a multiple of what the published rule allows; above 1 it fails."""
    if distance == 0:
        return 0.0
    return distance / (FACTOR * r) if r else float("inf")


def greedy_holds(greedy: Greedy, native_spread: float) -> bool:
    """Whether the greedy token is the reference's, or differs where the reference itself hardly prefers its own."""
    return greedy.same or greedy.margin <= max(TIE_LOGITS, 2 * native_spread)


def within_bitwise(apart: Apart) -> bool:
    """Every cell in every bit."""
    return apart.bitwise == apart.cells


@dataclass(frozen=True)
class Calibrated:
    """A calibrated envelope: bound of each surface, calibration prefixes n, order of the bound from the top (1 = the
    largest), and the false-alarm probability that all surfaces share."""

    bounds: Mapping[str, float]
    n: int
    order: int = 1
    alpha: float = ALPHA

    def allowed(self, m: int) -> int:
        """How many of m held-out prefixes may exceed a bound; m = no outcome can fail."""
        return allowed_exceedances(self.n, m, Fraction(repr(self.alpha)) / len(self.bounds), self.order)

    def false_alarm(self, m: int) -> float:
        """Probability that a right candidate fails, at most: Bonferroni over the surfaces."""
        return min(1.0, float(len(self.bounds) * exceedance_tail(self.n, m, self.allowed(m) + 1, self.order)))


def calibrated(spread: Sequence[Mapping[str, float]], order: int = 1, alpha: float = ALPHA) -> Calibrated:
    """The envelope of native spreads, one mapping surface -> largest distance for each calibration prefix."""
    bounds = {s: sorted((u[s] for u in spread), reverse=True)[order - 1] for s in spread[0]}
    return Calibrated(bounds, len(spread), order, alpha)


def exceeding(rule: Calibrated, heldout: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Surface -> held-out prefixes whose candidate is farther from the reference than the bound."""
    return {s: sum(u[s] > bound for u in heldout) for s, bound in rule.bounds.items()}


def unit(apart: Sequence[Mapping[str, Apart]]) -> dict[str, float]:
    """One prefix: the largest distance of each surface over its cycles; lengths are no measurement."""
    return {s: max(a[s].distance for a in apart) for s in SURFACES if s != "lengths"}
