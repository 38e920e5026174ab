"""Closed forms of block efficiency (mean number of accepted rows + 1), where a rule has one.

They are derived apart from the engine, from marginal probabilities only:

* fixed drafts, any tree, every rule: a row that repeats an elder sibling's token is never accepted, and any other row
  is passed with the probability that the target's own sequence passes it, so the mean is the sum over rows of the
  path's product of p.
* chain, sampled drafts: the walk passes level l with probability sum over prefixes s of length l of w(s), where
  w(sx) = w(s) min(p, q) for multi-round rejection, w(s) p q for naive and greedy (p the law that the rule follows), and
  min(Q(sx), w(s) p) for traversal, with Q the draft's own sequence law: only a whole path's ratio is capped at 1.
* star, sampled drafts: naive and greedy accept the target mass of the drafted set; rejection and traversal (which agree
  there: the root weighs 1) accept 1 - P(all refused), where the first child is refused with token x with probability
  max(q - p, 0)(x), and then the same holds for the residual and the draft law without x.

No ordering between rules follows from them, and none is asserted.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache, lru_cache

from audit.law_domain import Configuration, Row
from audit.law_rows import Rule
from audit.law_step import fractions_of


def block_efficiency(config: Configuration, rule: Rule) -> Fraction | None:
    """Return the mean number of accepted rows + 1 of a lossless rule in closed form, None where there is none here."""
    if config.tokens is not None:
        return 1 + _fixed(config, rule)
    widths = [len(kids) for kids in config.children]
    if max(widths) <= 1:
        return 1 + _chain(config, rule)
    if config.depth == 1:
        assert config.laws is not None
        target = followed(rule, config.target[0][0], config.den)
        star = _naive_star if rule.kind == "naive" else _rejection_star
        return 1 + star(target, config.laws[0][0], config.den, widths[0])
    return None


@cache
def followed(rule: Rule, row: Row, den: int) -> Row:
    """Return the law that the rule follows, as numerators over den."""
    return tuple(int(value * den) for value in rule.truth(fractions_of(row, den)))


def _fixed(config: Configuration, rule: Rule) -> Fraction:
    assert config.tokens is not None
    reach, places, seen = {0: Fraction(1)}, {0: (0, 0)}, set()
    for row in range(1, len(config.parents)):
        parent, token = config.parents[row], config.tokens[row]
        level, code = places[parent]
        p = followed(rule, config.target[level][code], config.den)[token]
        reach[row] = Fraction(0) if (parent, token) in seen else reach[parent] * Fraction(p, config.den)
        places[row] = (level + 1, code * config.vocab + token)
        seen.add((parent, token))
    return sum(reach.values(), Fraction(-1))


def _chain(config: Configuration, rule: Rule) -> Fraction:
    assert config.laws is not None
    den, mean = config.den, Fraction(0)
    taken, drafted = [1], [1]
    for level, laws in enumerate(config.laws):
        unit = den if rule.kind != "naive" else den * den
        rows = [followed(rule, row, den) for row in config.target[level]]
        each = [
            (code, p, q)
            for code, (row, law) in enumerate(zip(rows, laws, strict=True))
            for p, q in zip(row, law, strict=True)
        ]
        next_drafted = [drafted[code] * q for code, _, q in each]
        if rule.kind == "naive":
            taken = [taken[code] * p * q for code, p, q in each]
        elif rule.kind == "rejection":
            taken = [taken[code] * min(p, q) for code, p, q in each]
        else:
            taken = [min(drawn, taken[code] * p) for drawn, (code, p, _) in zip(next_drafted, each, strict=True)]
        drafted = next_drafted
        mean += Fraction(sum(taken), unit ** (level + 1))
    return mean


@cache
def _naive_star(target: Row, law: Row, den: int, count: int) -> Fraction:
    total = sum(law)
    if not total or not count:
        return Fraction(0)
    return sum(
        (
            Fraction(q, total) * (Fraction(target[x], den) + _naive_star(target, _without(law, x), den, count - 1))
            for x, q in enumerate(law)
            if q
        ),
        Fraction(0),
    )


def _rejection_star(target: Row, law: Row, den: int, count: int) -> Fraction:
    return 1 - _all_refused(tuple(Fraction(p, den) for p in target), law, count)


@lru_cache(maxsize=1 << 16)
def _all_refused(residual: tuple[Fraction, ...], law: Row, count: int) -> Fraction:
    """P(all refused) = (1 - overlap) x the mean over the refused token of P(the others refused).

    The token refused first has the law max(q - r, 0) / (1 - overlap); it is not q that later laws are averaged over.
    """
    total = sum(law)
    if not total or not count:
        return Fraction(1)
    q = [Fraction(value, total) for value in law]
    refused = 1 - sum(map(min, residual, q))
    if not refused:
        return Fraction(0)
    left = tuple(max(r - s, Fraction(0)) / refused for r, s in zip(residual, q, strict=True))
    lost = [max(s - r, Fraction(0)) for r, s in zip(residual, q, strict=True)]
    chances = (part * _all_refused(left, _without(law, x), count - 1) for x, part in enumerate(lost) if part)
    return sum(chances, Fraction(0))


def _without(law: Row, token: int) -> Row:
    return tuple(0 if x == token else value for x, value in enumerate(law))
