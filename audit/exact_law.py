"""The law that a rule emits on a bounded configuration, in integers over a common denominator.

The emitted tokens, continued by plain target draws where a walk stops early, are a sequence of depth + 1 tokens. Its
law is built from the bottom: what a rule does at one row with one prefix (`Local`, integrated over that row's drafts
and coins by `law_rows`) is cached, and sequences under a row are the children's sequences weighted by it. Rows have
coins of their own, so nothing else couples them. A law is lossless if it equals the target's law as integers.

`law_step.joint_law` computes the same from whole drafts in `Fraction`; the tests demand that both agree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from audit.law_domain import Configuration, Row
from audit.law_rows import Rule, point, row_law
from audit.law_step import Tokens, fractions_of, sibling_draws

Nodes = list[list[list[int]]]
"""nodes[l][code]: law of the sequences that continue a prefix of l tokens, numerators over den^(depth + 1 - l)."""


@dataclass(frozen=True)
class Local:
    """What a rule does at a row, over one denominator: take[i][x] child i accepted with token x; stop[y] bonus y."""

    den: int
    take: tuple[Row, ...]
    stop: Row


@dataclass(frozen=True)
class Emitted:
    """Law of what is emitted below a prefix.

    mass: numerators by sequence code over den. length: numerator of the mean number of rows accepted below. refused:
    numerator of the probability that nothing is accepted, which a bottom-up rule hands back to the parent (else 0).
    """

    mass: list[int]
    den: int
    length: int
    refused: int = 0

    @property
    def mean_length(self) -> Fraction:
        """Mean number of rows accepted."""
        return Fraction(self.length, self.den)


def target_law(config: Configuration, rule: Rule) -> Nodes:
    """Return the law that the rule should follow: the target's sequence law, from every prefix."""
    nodes: Nodes = [[[1]] * config.vocab ** (config.depth + 1)]
    for level in range(config.depth, -1, -1):
        below, vocab = nodes[-1], config.vocab
        rows = [_truth(rule, row, config.den) for row in config.target[level]]
        nodes.append(
            [[p * mass for x, p in enumerate(row) for mass in below[code * vocab + x]] for code, row in enumerate(rows)]
        )
    nodes.reverse()
    return nodes


_TRUTH: dict[tuple[object, Row, int], Row] = {}


def _truth(rule: Rule, row: Row, den: int) -> Row:
    key = (rule.truth, row, den)
    if key not in _TRUTH:
        _TRUTH[key] = tuple(int(value * den) for value in rule.truth(fractions_of(row, den)))
    return _TRUTH[key]


class Engine:
    """Emitted laws of one rule, with the row laws cached between configurations."""

    def __init__(self, rule: Rule) -> None:
        if rule.roll:
            raise ValueError(f"rule {rule.name} reads other rows of the tree: use law_step.joint_law")
        self.rule = rule
        self._locals: dict[tuple[object, ...], Local] = {}

    def emitted(self, config: Configuration, nodes: Nodes) -> Emitted:
        """Return the emitted law from the root; nodes: `target_law` of the configuration."""
        if self.rule.kind == "traversal":
            return Climb(config, nodes).root()
        return self._emit(config, nodes, 0, 0, 0)

    def _emit(self, config: Configuration, nodes: Nodes, row: int, level: int, code: int) -> Emitted:
        kids = config.children[row]
        local = self._local(config, kids, level, code)
        first = code * config.vocab
        below = nodes[level + 1]
        if not kids:
            mass = [p * t for x, p in enumerate(local.stop) for t in below[first + x]]
            return Emitted(mass, local.den * config.den ** (config.depth - level), 0)
        parts = [
            (x, take[x], self._emit(config, nodes, kid, level + 1, first + x))
            for kid, take in zip(kids, local.take, strict=True)
            for x in range(config.vocab)
            if take[x]
        ]
        unit: int = config.den ** (config.depth - level)
        den = math.lcm(unit, *(law.den for _, _, law in parts))
        plain = den // unit
        blocks = [[p * plain * t for t in below[first + x]] for x, p in enumerate(local.stop)]
        length = 0
        for x, weight, law in parts:
            factor = weight * (den // law.den)
            blocks[x] = [a + factor * b for a, b in zip(blocks[x], law.mass, strict=True)]
            length += weight * den + factor * law.length
        return Emitted([value for block in blocks for value in block], den * local.den, length)

    def _local(self, config: Configuration, kids: Sequence[int], level: int, code: int) -> Local:
        target = config.target[level][code]
        above = target if level == 0 or self.rule.bonus_row == "own" else config.target[level - 1][code // config.vocab]
        law = config.laws[level][code] if config.laws is not None and kids else None
        drafts = len(kids) if config.tokens is None else tuple(config.tokens[kid] for kid in kids)
        key = (config.den, target, above, law, drafts)
        if key not in self._locals:
            self._locals[key] = _integrate(self.rule, config.den, target, above, law, drafts)
        return self._locals[key]


def _integrate(rule: Rule, den: int, target: Row, above: Row, law: Row | None, drafts: int | tuple[int, ...]) -> Local:
    """Integrate what happens at a row over its drafts: `drafts` sampled siblings, or the given tokens."""
    p, over = fractions_of(target, den), fractions_of(above, den)
    q = None if law is None else fractions_of(law, den)
    draws: Sequence[tuple[Fraction, Tokens]]
    if isinstance(drafts, int):
        draws = [(Fraction(1), ())] if q is None else list(sibling_draws(rule, q, drafts))
        count = drafts
    else:
        draws, count = [(Fraction(1), drafts)], len(drafts)
    take = [[Fraction(0)] * len(target) for _ in range(count)]
    stop = point(len(target), 0, p) * 0
    for chance, tokens in draws:
        done = row_law(rule, p, over, q, tokens)
        stop = stop + chance * done.bonus
        for i, token in enumerate(tokens):
            if token is not None:
                take[i][token] += chance * done.take[i]
    return _over_one_denominator(take, list(stop))


def _over_one_denominator(take: list[list[Fraction]], stop: list[Fraction]) -> Local:
    den = math.lcm(*(value.denominator for row in (*take, stop) for value in row))
    scaled = [tuple(int(value * den) for value in row) for row in (*take, stop)]
    return Local(den, tuple(scaled[:-1]), scaled[-1])


class Climb:
    """Traversal verification of one configuration, row by row from the bottom; see `law_step._climb` for the rule."""

    def __init__(self, config: Configuration, nodes: Nodes) -> None:
        self.config = config
        self.nodes = nodes
        self.children = config.children

    def root(self) -> Emitted:
        """Return the emitted law from the root."""
        return self._row(0, 0, 0, 1, 1)

    def _row(self, row: int, level: int, code: int, weight: int, unit: int) -> Emitted:
        """Verify a row that weighs weight/unit: its children in turn, each with what the earlier ones left, then it."""
        share = [weight * p for p in self.config.target[level][code]]
        divide = math.gcd(unit * self.config.den, *share)
        share, den = [value // divide for value in share], unit * self.config.den // divide
        return self._siblings(row, level, code, 0, share, den, self._draft(row, 0, level, code))

    def _draft(self, row: int, i: int, level: int, code: int) -> Row:
        """Weights from which child i is drawn before any removal; a point mass for fixed drafts."""
        kids = self.children[row]
        if i >= len(kids):
            return ()
        if self.config.tokens is not None:
            return tuple(int(x == self.config.tokens[kids[i]]) for x in range(self.config.vocab))
        assert self.config.laws is not None
        return self.config.laws[level][code]

    def _siblings(self, row: int, level: int, code: int, i: int, share: list[int], den: int, law: Row) -> Emitted:
        """Law of what happens from child i on; share/den is what is left of weight x target, law/sum(law) the draft."""
        total = sum(law)
        if not total:
            return self._itself(row, level, code, share, den)
        refusal = den * total - sum(min(s * total, q * den) for s, q in zip(share, law, strict=True))
        if refusal:
            kept = [max(s * total - q * den, 0) for s, q in zip(share, law, strict=True)]
            divide = math.gcd(refusal, *kept)
            kept, left = [value // divide for value in kept], refusal // divide
        else:
            kept, left = share, den
        parts = []
        for x, q in enumerate(law):
            if not q:
                continue
            top, bottom = min(share[x] * total, den * q), den * q
            kid = self.children[row][i]
            taken = self._row(kid, level + 1, code * self.config.vocab + x, top, bottom) if top else None
            rest = None
            if taken is None or taken.refused:
                rest = self._siblings(row, level, code, i + 1, kept, left, self._next(row, i, law, x))
            parts.append((x, q, taken, rest))
        return self._combine(level, total, parts)

    def _next(self, row: int, i: int, law: Row, drawn: int) -> Row:
        """Weights from which child i + 1 is drawn after child i drew a token."""
        if i + 1 >= len(self.children[row]):
            return ()
        if self.config.tokens is not None:
            return self._draft(row, i + 1, 0, 0)
        return tuple(0 if x == drawn else q for x, q in enumerate(law))

    def _itself(self, row: int, level: int, code: int, share: list[int], den: int) -> Emitted:
        """Accept the row with what is left of its weight and draw the bonus from that; row 0 is always accepted."""
        left = sum(share)
        below, first = self.nodes[level + 1], code * self.config.vocab
        unit = self.config.den ** (self.config.depth - level)
        mass = [s * t for x, s in enumerate(share) for t in below[first + x]]
        if row == 0:
            return Emitted(mass, left * unit, 0)
        return Emitted(mass, den * unit, 0, (den - left) * unit)

    def _combine(self, level: int, total: int, parts: list[tuple[int, int, Emitted | None, Emitted | None]]) -> Emitted:
        """Add up over the drawn token: child accepted with it, or refused and then the rest."""
        size = self.config.vocab ** (self.config.depth - level)
        den = math.lcm(
            *((1 if taken is None else taken.den) * (1 if rest is None else rest.den) for _, _, taken, rest in parts)
        )
        mass, length, refused = [0] * (size * self.config.vocab), 0, 0
        for x, q, taken, rest in parts:
            taken_den, taken_refused = (1, 1) if taken is None else (taken.den, taken.refused)
            if taken is not None:
                factor = q * (den // taken_den)
                block = slice(x * size, (x + 1) * size)
                mass[block] = [a + factor * b for a, b in zip(mass[block], taken.mass, strict=True)]
                length += factor * (taken.length + taken.den - taken.refused)
            if rest is not None:
                factor = q * taken_refused * (den // (taken_den * rest.den))
                mass = [a + factor * b for a, b in zip(mass, rest.mass, strict=True)]
                length, refused = length + factor * rest.length, refused + factor * rest.refused
        return _reduced(Emitted(mass, den * total, length, refused))


def _reduced(law: Emitted) -> Emitted:
    divide = math.gcd(law.den, law.length, law.refused, *law.mass)
    return Emitted(
        [value // divide for value in law.mass], law.den // divide, law.length // divide, law.refused // divide
    )


def is_lossless(law: Emitted, truth: Sequence[int], den: int) -> bool:
    """Tell whether the emitted law equals truth/den exactly."""
    return all(mass * den == expected * law.den for mass, expected in zip(law.mass, truth, strict=True))


def variation(law: Emitted, truth: Sequence[int], den: int) -> Fraction:
    """Return the exact total variation between the emitted law and truth/den."""
    gap = sum(abs(mass * den - expected * law.den) for mass, expected in zip(law.mass, truth, strict=True))
    return Fraction(gap, 2 * law.den * den)


def sequence_law(config: Configuration, mass: Sequence[int], den: int) -> dict[tuple[int, ...], Fraction]:
    """Return a law over sequence codes as a mapping from sequences of depth + 1 tokens."""
    law: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for code, value in enumerate(mass):
        tokens = []
        for _ in range(config.depth + 1):
            code, token = divmod(code, config.vocab)
            tokens.append(token)
        law[tuple(reversed(tokens))] += Fraction(value, den)
    return dict(law)
