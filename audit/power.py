"""What a run could have seen, and what it certifies: detectable total variation (TV) and an upper bound for it.

Detectable TV of a chi-square type test with df degrees of freedom on n draws: let `lam` be the noncentrality at which
it rejects at its level with the wanted power. A shift d of the cells' law p has noncentrality
n sum d_i^2 / p_i >= 4 n TV^2 (Cauchy-Schwarz; equality for a shift that raises half of the mass and lowers the other
half in proportion). So

    TV = sqrt(lam / n) / 2                 suffices in *every* direction: the guarantee, called `detectable_tv`;
    TV = sqrt(lam p_i (1 - p_i) / n)       suffices for mass moved into or out of cell i alone: `detectable_shift`.

TV is that of the cells: what a shift moves within a pooled cell is not seen.
"""

from __future__ import annotations

from functools import lru_cache
from math import log, sqrt

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

from lumotree.errors import InputError

POWER = 0.99
"""Probability of rejection at the printed detectable TV (issue 3, item 5)."""


@lru_cache(maxsize=4096)
def noncentrality(df: int, level: float, power: float = POWER) -> float:
    """Return the noncentrality at which a chi-square test with `df` rejects with probability `power`.

    level: false-alarm probability of this one test, in (0, power). Raises InputError for anything else.
    """
    if df < 1 or not 0 < level < power < 1:
        raise InputError(f"power: expected df >= 1 and 0 < level < power < 1, got {df=}, {level=}, {power=}")
    return float(special.chndtrinc(stats.chi2.isf(level, df), df, 1 - power))


def detectable_tv(df: int, n: int, level: float, power: float = POWER) -> float:
    """Return the smallest TV of the cells' law that is rejected with `power` in every direction, at most 1."""
    return min(1.0, sqrt(noncentrality(df, level, power) / n) / 2) if n else 1.0


def detectable_shift(df: int, n: int, level: float, share: float, power: float = POWER) -> float:
    """Return the smallest mass into or out of one cell of probability `share` that is rejected with `power`."""
    return min(1.0, sqrt(noncentrality(df, level, power) * share * (1 - share) / n)) if n else 1.0


def rejection_power(law: ArrayLike, clean: ArrayLike, n: int, level: float) -> float:
    """Return the probability that a chi-square type test of n draws from law [K] against clean [K] rejects.

    1 if the law can do what the clean one forbids. Cells that neither uses do not count. The noncentral chi-square law
    is the limit for many draws.
    """
    q, p = np.asarray(law, np.float64), np.asarray(clean, np.float64)
    if (q[p == 0] > 0).any():
        return 1.0
    df = int((p > 0).sum()) - 1
    distance = float(((q - p)[p > 0] ** 2 / p[p > 0]).sum())
    return float(1 - special.chndtr(stats.chi2.isf(level, df), df, n * distance))


def draws_needed(tv: float, df: int, level: float, power: float = POWER) -> float:
    """Return how many draws make `tv` detectable in every direction."""
    return noncentrality(df, level, power) / (4 * tv**2)


def likelihood_ratio_draws(tv: float, level: float) -> float:
    """Return ln(1 / level) / (2 TV^2): draws after which a likelihood ratio against a known law crosses on average.

    An upper bound whatever the number of cells, since the mean log ratio is the divergence, at least 2 TV^2 (Pinsker);
    for the law of the fault itself, not for an unknown one.
    """
    return log(1 / level) / (2 * tv**2)


def likelihood_ratio_tv(n: int, level: float) -> float:
    """Return sqrt(ln(1 / level) / (2 n)), at most 1: the TV for which `likelihood_ratio_draws` is n."""
    return min(1.0, sqrt(log(1 / level) / (2 * n))) if n else 1.0


def empirical_tv(counts: ArrayLike, law: ArrayLike) -> float:
    """Return the TV between the frequencies of counts [K] and law [K]; 0 without a count."""
    x, p = np.asarray(counts, np.float64), np.asarray(law, np.float64)
    n = x.sum()
    seen = x > 0  # the positive part of (frequency - law) is all that is needed, and lives on what was seen
    return float(np.maximum(x[seen] / n - p[seen], 0.0).sum()) if n else 0.0


def tv_certificate(tv_hat: float, n: int, level: float) -> float:
    """Return an upper bound for TV(emitted law, clean law) that holds with probability 1 - level.

        TV <= TV_hat + sqrt(ln(1 / level) / (2 n))

    Proof. TV(., clean) is convex and the frequencies have the emitted law as their mean, so E TV_hat >= TV (Jensen).
    One draw changes TV_hat by at most 1/n, so P(TV_hat <= E TV_hat - t) <= exp(-2 n t^2) (McDiarmid, 1989). No noise
    term is needed: the published form adds sqrt(K / n) / 2, see `published_certificate`. TV_hat of a clean sampler is
    itself about sum sqrt(p_i / (2 pi n)), so over a large vocabulary the bound stays coarse.
    """
    return min(1.0, tv_hat + sqrt(log(1 / level) / (2 * n))) if n else 1.0


def published_certificate(tv_hat: float, cells: int, n: int, level: float) -> float:
    """Return TV_hat + sqrt(K / n) / 2 + sqrt(ln(1 / level) / (2 n)) for K cells (field/methods.md): never tighter."""
    return min(1.0, tv_certificate(tv_hat, n, level) + sqrt(cells / n) / 2) if n else 1.0
