"""Six captured-like steps: what a verifier might hand to a sampler, made from a seed, at a vocabulary of 151,936.

Each is one `hydra27` tree with 32 rows of logits. In a row a few *head* tokens carry a set probability and a *body*
shares the rest; the shapes differ in the body and in the ties:

    peaked     Zipf body, exponent 1.5
    flat       body of one height with 30% noise: tens of thousands of tokens about as likely as each other
    tied       Zipf body in pairs, all logits on a grid of 1/4, as coarse dtypes do: ties at the top of leaves, among
               head tokens and along the body
    truncated  Zipf body in plateaus of 8 equal logits, cut by top-k inside a plateau (a boundary tie)

Head tokens sit where the children are, so that each row, also at depth 11, is reached by at least 1% of the walks;
leaves take another shape than the rows with children, so a step has rows of several. Two kinds of draft:

    fixed       each child is a point mass on a head token
    stochastic  law over at most 64 tokens near the top, off the target by 50% noise and by temperature 1.15;
                in truncated rows it also holds tokens that the target gives nothing

One step penalises tokens already on a row's path (row 0 and its own included) and draws its head tokens from a pool of
10, so that they repeat; in another a sibling repeats an elder one's token, which gives that token no second chance.
Then come, in this order, temperature, top-k (exactly k, lowest token first among ties), top-p (smallest set that
reaches p) and min-p. `logits` gives the rows before penalty and filters, for the conventions that an audit quantifies.

A target row depends on its row only, never on the token that leads there: that is how a captured step looks, and what
makes "next token given a visit" follow the target row also when drafts are redrawn (`audit.sampler_tests`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lumotree.errors import InputError
from lumotree.sampling import SamplingParams
from lumotree.select_types import Step
from lumotree.tree import Tree
from lumotree.tree_named import hydra27

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

VOCAB = 151_936
SUPPORT = 64
SHAPES = ("peaked", "flat", "tied", "truncated")

_PLATEAU = 8
_SPARE_HEADS = 3  # head tokens beyond those of the children, so that the body is not all that is left


@dataclass(frozen=True)
class Recipe:
    """How a step is made. spine, side: shape of the rows with children and of the leaves; heads: probability of the
    first child's token, then its siblings', before filters; params: of the request, its presence penalty for fixed
    drafts only; pool: number of tokens that heads are drawn from, 0 = all; repeats: row whose last child carries its
    first child's token once more (fixed drafts), None = siblings differ; seed: of tokens and noise."""

    name: str
    note: str
    spine: str
    side: str
    stochastic: bool
    heads: tuple[float, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    pool: int = 0
    repeats: int | None = None
    seed: int = 0


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        "peaked-fixed",
        "chat at temperature 0.7, presence penalty 0.2: peaked spine, flat side rows",
        "peaked",
        "flat",
        False,
        (0.74, 0.10, 0.07),
        SamplingParams(temperature=0.7, presence=0.2),
        pool=10,
        seed=1,
    ),
    Recipe(
        "flat-fixed",
        "high temperature: rows with children have a flat body of about 20% over the whole vocabulary",
        "flat",
        "peaked",
        False,
        (0.68, 0.07, 0.055),
        SamplingParams(temperature=1.3),
        seed=2,
    ),
    Recipe(
        "tied-fixed",
        "coarse logits: ties at the top and along the body, cut by top-p 0.98; a sibling that repeats another",
        "tied",
        "tied",
        False,
        (0.68, 0.09, 0.09),
        SamplingParams(top_p=0.98),
        repeats=1,
        seed=3,
    ),
    Recipe(
        "truncated-fixed",
        "top-k 20 then top-p 0.97: k falls inside a plateau of ties",
        "truncated",
        "truncated",
        False,
        (0.66, 0.10, 0.07),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.97),
        seed=4,
    ),
    Recipe(
        "mixed-stochastic",
        "drafts redrawn from a sparse law; peaked spine, flat side rows",
        "peaked",
        "flat",
        True,
        (0.40, 0.20, 0.12, 0.08),
        SamplingParams(temperature=0.8),
        seed=5,
    ),
    Recipe(
        "truncated-stochastic",
        "drafts redrawn; top-k 22 inside a plateau and min-p 0.006, the law holds tokens that the target excludes",
        "truncated",
        "tied",
        True,
        (0.42, 0.18, 0.10, 0.07),
        SamplingParams(top_k=22, min_p=0.006),
        seed=8,
    ),
)


def make_step(recipe: Recipe, vocab: int = VOCAB) -> Step:
    """Return the step of a recipe: 8 * 32 * vocab bytes for the target, as many again for the laws.

    Raises InputError for a vocabulary of less than 16 tokens.
    """
    heads, shape = _head_tokens(recipe, vocab), hydra27()
    target = np.zeros((shape.n, vocab))
    laws = np.zeros((shape.n, vocab)) if recipe.stochastic else None
    tokens = _head_children(recipe, shape, heads)
    for row in range(shape.n):
        values = _row_logits(recipe, shape, row, heads[row], vocab)
        if laws is not None:
            laws[row] = _draft_law(recipe, row, values / recipe.params.temperature)
        target[row] = filtered(penalised(values, tokens[list(shape.path(row))], recipe.params.presence), recipe.params)
    if laws is None:
        return Step(hydra27(vocab=vocab, tokens=tokens), torch.from_numpy(target))
    drawn = _drawn_children(recipe, shape, laws)
    return Step(hydra27(vocab=vocab, tokens=drawn), torch.from_numpy(target), torch.from_numpy(laws))


def logits(recipe: Recipe, vocab: int = VOCAB) -> Floats:
    """Return the rows [32, vocab] before penalty, temperature and filters, float64. Raises as `make_step` does."""
    heads, tree = _head_tokens(recipe, vocab), hydra27()
    return np.stack([_row_logits(recipe, tree, row, heads[row], vocab) for row in range(tree.n)])


def small_steps(vocab: int = 32) -> list[tuple[Recipe, Step]]:
    """Return the six steps at a small vocabulary (16 to 64 tokens are meant), for tests."""
    return [(recipe, make_step(recipe, vocab)) for recipe in RECIPES]


def penalised(values: Floats, seen: Ints, presence: float) -> Floats:
    """Return logits [V] with `presence` taken off once for each token that is in `seen`."""
    changed = values.copy()
    changed[np.unique(seen)] -= presence
    return changed


def filtered(values: Floats, params: SamplingParams) -> Floats:
    """Return the law [V] of one row of logits [V] after temperature and filters; it sums to 1."""
    law = scaled(values, params.temperature)
    if params.top_k:
        law = keep(law, largest(law, params.top_k))
    if params.top_p < 1:
        law = keep(law, nucleus(law, params.top_p))
    if params.min_p:
        law = keep(law, np.flatnonzero(law >= params.min_p * law.max()))
    return law


def scaled(values: Floats, temperature: float) -> Floats:
    """Return the law [V] of logits [V] at a temperature."""
    law = values / temperature
    law = np.exp(law - law.max())
    return np.asarray(law / law.sum())


def keep(law: Floats, tokens: Ints) -> Floats:
    """Return the law on `tokens`, renormalised."""
    kept = np.zeros_like(law)
    kept[tokens] = law[tokens]
    return np.asarray(kept / kept.sum())


def largest(law: Floats, k: int, ties: Literal["index", "all"] = "index") -> Ints:
    """Return the k most likely tokens, ascending: lowest first among ties, or ("all") every token tied with the k-th;
    tokens without probability are left out."""
    possible = np.flatnonzero(law)
    if k >= len(possible):
        return possible
    kth = np.partition(law[possible], len(possible) - k)[len(possible) - k]
    above, tied = np.flatnonzero(law > kth), np.flatnonzero(law == kth)
    return np.sort(np.concatenate([above, tied if ties == "all" else tied[: k - len(above)]]))


def nucleus(law: Floats, p: float) -> Ints:
    """Return the smallest set of most likely tokens that reaches p, likeliest first."""
    possible = np.flatnonzero(law)
    order = possible[np.argsort(-law[possible], kind="stable")]
    return np.asarray(order[: int(np.searchsorted(np.cumsum(law[order]), p)) + 1])


def _head_tokens(recipe: Recipe, vocab: int) -> Ints:
    """Return the head tokens [32, heads + spare], all different within a row."""
    count = len(recipe.heads) + _SPARE_HEADS
    if vocab < 16:
        raise InputError(f"captured-like step: expected a vocabulary of at least 16 tokens, got vocab={vocab}")
    rng = np.random.default_rng([recipe.seed, 0])
    pool = rng.choice(vocab, recipe.pool, replace=False) if recipe.pool else vocab
    return np.stack([rng.choice(pool, count, replace=False) for _ in range(32)])


def _row_logits(recipe: Recipe, tree: Tree, row: int, heads: Ints, vocab: int) -> Floats:
    """Return log probabilities times the temperature: after it, the heads have the probabilities of the recipe."""
    shape = recipe.spine if tree.active_children(row) else recipe.side
    rng = np.random.default_rng([recipe.seed, 1, row])
    mass = np.array(_head_masses(recipe, tree, row))
    body = _BODIES[shape](rng, vocab)
    body[heads[: len(mass)]] = 0.0
    body *= (1 - mass.sum()) / body.sum()
    body[heads[: len(mass)]] = mass
    values = np.log(body)
    if shape == "tied":
        values = np.round(values * 4) / 4
    return np.asarray(values * recipe.params.temperature)


def _head_masses(recipe: Recipe, tree: Tree, row: int) -> tuple[float, ...]:
    """A row with one child gives it all the siblings' share too; a leaf is as uncertain as a recipe's second head."""
    children = len(tree.active_children(row))
    if children == 1 and not recipe.stochastic:
        return (sum(recipe.heads[:2]),)
    return recipe.heads if children else recipe.heads[1:]


def _zipf(rng: np.random.Generator, vocab: int) -> Floats:
    return np.asarray((1.0 + rng.permutation(vocab)) ** -1.5)


def _flat(rng: np.random.Generator, vocab: int) -> Floats:
    return np.asarray(np.exp(0.3 * rng.standard_normal(vocab)))


def _pairs(rng: np.random.Generator, vocab: int) -> Floats:
    return np.asarray((1.0 + rng.permutation(vocab) // 2) ** -1.5)


def _plateaus(rng: np.random.Generator, vocab: int) -> Floats:
    return np.asarray((1.0 + rng.permutation(vocab) // _PLATEAU) ** -1.5)


_BODIES: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "peaked": _zipf,
    "flat": _flat,
    "tied": _pairs,
    "truncated": _plateaus,
}


def _draft_law(recipe: Recipe, row: int, scaled: Floats) -> Floats:
    """Return the law [V] from which the children of `row` are drafted."""
    rng = np.random.default_rng([recipe.seed, 2, row])
    size = min(SUPPORT, len(scaled) // 2)
    tokens = np.argpartition(-scaled, size - 1)[:size]
    tokens.sort()
    law = np.zeros_like(scaled)
    law[tokens] = np.exp(scaled[tokens] / 1.15 + 0.5 * rng.standard_normal(size))
    return np.asarray(law / law.sum())


def _head_children(recipe: Recipe, tree: Tree, heads: Ints) -> Ints:
    """Return tokens [32]: the k-th child of a row carries its k-th head token, save where it repeats the first."""
    tokens = np.zeros(tree.n, np.int64)
    for row in range(tree.n):
        for rank, child in enumerate(tree.children(row)):
            tokens[child] = heads[row, rank]
    if recipe.repeats is not None:
        children = tree.children(recipe.repeats)
        tokens[children[-1]] = tokens[children[0]]
    return tokens


def _drawn_children(recipe: Recipe, tree: Tree, laws: Floats) -> Ints:
    """Return tokens [32]: one seeded draw of the siblings of each row from its law."""
    rng = np.random.default_rng([recipe.seed, 3])
    tokens = np.zeros(tree.n, np.int64)
    for row in range(tree.n):
        children = tree.children(row)
        if children:
            tokens[list(children)] = rng.choice(laws.shape[1], len(children), replace=False, p=laws[row])
    return tokens
