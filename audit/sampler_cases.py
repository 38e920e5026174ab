"""The steps that a sampler is shown: made ones at a full vocabulary, ones captured from the shipped model, chains cut
out of either, and small ones that can be summed.

A name makes a case, so that a worker process can build it. Small steps are meant for `audit.summed_law`: few rows, a
vocabulary of 3, rows with ties, zeros and a point mass among them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from audit.captured_steps import CAPTURES, capture_of, captured
from audit.fault_source import LogitsSource, RecipeSource
from audit.law_rows import Rule as ExactRule
from audit.law_rules import DETERMINISTIC, GREEDY, MULTIROUND, NAIVE, TRAVERSAL
from audit.sampler_file import load_step
from audit.sampler_steps import RECIPES, VOCAB, Recipe, make_step
from lumotree.backends.sampler_loader import Claims
from lumotree.byte_tokens import VOCAB as CAPTURED_VOCAB
from lumotree.errors import InputError
from lumotree.select_types import Step
from lumotree.tree import Tree

SMALL_TREES: dict[str, tuple[int, ...]] = {
    "chain-2": (-1, 0),
    "fork-3": (-1, 0, 0),
    "chain-3": (-1, 0, 1),
    "mixed-4": (-1, 0, 0, 1),
    "twins-3": (-1, 0, 0),
}
SMALL_VOCAB = 3
TWINS = "twins-3"
"""The small tree whose siblings carry one token; fixed drafts only, as sampled siblings differ."""


@dataclass(frozen=True)
class CapturedCase:
    """A step by name: of a recipe or, `captured`, of the shipped model. vocab: of its rows; chain: only its path of
    first children; path: file of a step that somebody captured, otherwise ""; distinct: no sibling repeats another."""

    name: str
    vocab: int = VOCAB
    chain: bool = False
    path: str = ""
    distinct: bool = False
    captured: bool = False

    @property
    def recipe(self) -> Recipe | None:
        """How the step is made; None if it was captured."""
        if self.path or self.captured:
            return None
        recipe = next(recipe for recipe in RECIPES if recipe.name == self.name)
        return replace(recipe, repeats=None) if self.distinct else recipe

    @property
    def redrawn(self) -> bool:
        """Whether drafts are drawn anew in each walk; what a file holds is not looked at and counts as fixed."""
        recipe = self.recipe
        return capture_of(self.name).stochastic if self.captured else recipe is not None and recipe.stochastic

    def whole(self) -> Step:
        """Build the step with its whole tree."""
        if self.captured:
            return captured(self.name).step
        recipe = self.recipe
        return load_step(self.path).step if recipe is None else make_step(recipe, self.vocab)

    def source(self, whole: Step) -> LogitsSource | None:
        """What the rows of the step `whole` were computed from; None for a step in a file, which has laws alone."""
        if self.captured:
            stored = captured(self.name)
            return LogitsSource(stored.capture.params, stored.logits.double().numpy(), whole)
        recipe = self.recipe
        return None if recipe is None else RecipeSource(recipe, whole)

    def make(self) -> Step:
        """Build the step as it is shown to the sampler."""
        return chain_of(self.whole()) if self.chain else self.whole()


def captured_cases(claims: Claims, only: tuple[str, ...] = (), vocab: int = VOCAB) -> list[CapturedCase]:
    """Return the steps that a sampler can take, or those of them that are named: made ones of at most `vocab` tokens
    and, where that is room enough, the captured ones.

    Raises InputError for an unknown name, or one that the sampler cannot take.
    """
    size = min(vocab, claims.vocab or vocab)
    # A greedy rule reads no draft law, so steps that differ in having one say nothing more about it.
    kinds = ("fixed",) if claims.rule == "greedy" else claims.drafts
    cases = [
        CapturedCase(r.name, size, not claims.trees, distinct=not claims.duplicates)
        for r in RECIPES
        if draft_kind(r.stochastic) in kinds
    ]
    if size >= CAPTURED_VOCAB:
        cases += [
            CapturedCase(c.name, CAPTURED_VOCAB, not claims.trees, captured=True)
            for c in CAPTURES
            if draft_kind(c.stochastic) in kinds
        ]
    names = [case.name for case in cases]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise InputError(f"--only: unknown step {unknown[0]!r}, or not one for this sampler; allowed: "
                         f"{', '.join(names)}")  # fmt: skip
    return [case for case in cases if not only or case.name in only]


def file_cases(claims: Claims, paths: tuple[str, ...]) -> list[CapturedCase]:
    """Return the steps in files. Raises InputError for what no sampler may be given, and for what this one claims not
    to take."""
    cases = []
    for path in paths:
        step = load_step(path).step
        kind = draft_kind(step.laws is not None)
        if kind not in claims.drafts:
            raise InputError(f"step {path}: its drafts are {kind}; the sampler takes {', '.join(claims.drafts)}")
        if not claims.trees and any(len(step.tree.active_children(row)) > 1 for row in step.tree.active_rows):
            raise InputError(f"step {path}: it has siblings; the sampler takes chains only")
        if not claims.duplicates and has_duplicates(step):
            raise InputError(f"step {path}: a sibling repeats another; the sampler takes distinct siblings only")
        cases.append(CapturedCase(Path(path).stem, int(step.target.shape[1]), path=str(path)))
    twice = [case.name for case in cases if [c.name for c in cases].count(case.name) > 1]
    if twice:
        raise InputError(f"--step: two files are called {twice[0]!r}; rename one")
    return cases


def has_duplicates(step: Step) -> bool:
    """Whether two siblings carry one token; redrawn ones never do."""
    return bool(repeated_rows(step))


def repeated_rows(step: Step) -> tuple[int, ...]:
    """Rows with fixed drafts whose token an elder sibling carries: the elder is followed, so no walk visits them."""
    found: list[int] = []
    for parent in step.tree.active_rows if step.laws is None else ():
        seen: set[int] = set()
        for child in step.tree.active_children(parent):
            token = int(step.tree.tokens[child])
            found += [child] if token in seen else []
            seen.add(token)
    return tuple(found)


def draft_kind(stochastic: bool) -> str:
    """Return "sampled" or "fixed"."""
    return "sampled" if stochastic else "fixed"


def chain_of(step: Step) -> Step:
    """Return the path of first children from row 0 as a step of its own."""
    path = [0]
    while step.tree.active_children(path[-1]):
        path.append(step.tree.active_children(path[-1])[0])
    tree = Tree.make(
        [-1, *range(len(path) - 1)], tokens=step.tree.tokens[path].tolist(), vocab=int(step.target.shape[1])
    )
    laws = None if step.laws is None else step.laws[path].contiguous()
    return Step(tree, step.target[path].contiguous(), laws)


def small_step(tree: str, sampled: bool) -> Step:
    """Return a small step by the name of its tree, with fixed or redrawn drafts.

    Row 0 holds a tie where drafts are fixed, row 1 a zero in front, the last one a zero behind. Siblings differ, save
    in TWINS.
    """
    parents = SMALL_TREES[tree]
    rng = np.random.default_rng([len(tree), len(parents), int(sampled)])
    rows = rng.dirichlet(np.ones(SMALL_VOCAB), len(parents))
    if not sampled:
        rows[0] = (0.375, 0.375, 0.25)
    if len(rows) > 2:
        rows[1, 0] = 0.0  # a coin of 0 must not draw it
        rows[1] /= rows[1].sum()
    rows[-1] = (0.5, 0.5, 0.0)
    laws = rng.dirichlet(np.ones(SMALL_VOCAB), len(parents)) if sampled else None
    tokens = [0, 1, 1] if tree == TWINS else _small_tokens(parents)
    made = Tree.make(list(parents), tokens=tokens, vocab=SMALL_VOCAB)
    return Step(made, torch.from_numpy(rows), None if laws is None else torch.from_numpy(laws))


def _small_tokens(parents: tuple[int, ...]) -> list[int]:
    tokens, used = [0] * len(parents), [0] * len(parents)
    for row, parent in enumerate(parents[1:], 1):
        tokens[row] = (parent + used[parent]) % SMALL_VOCAB
        used[parent] += 1
    return tokens


def small_cases(claims: Claims) -> list[tuple[str, bool]]:
    """Return (tree, sampled) of the small steps that a sampler can take."""
    return [
        (tree, kind == "sampled")
        for kind in claims.drafts
        for tree, parents in SMALL_TREES.items()
        if (claims.trees or len(set(parents)) == len(parents))
        and (tree != TWINS or (claims.duplicates and kind == "fixed"))
    ]


def exact_rule(name: str, step: Step) -> ExactRule:
    """Return the rational rule of a `lumotree.select` rule on a step."""
    if name == "multi-round":
        return DETERMINISTIC if step.laws is None else MULTIROUND
    return {"greedy": GREEDY, "naive": NAIVE, "traversal": TRAVERSAL}[name]


def with_tokens(step: Step, tokens: NDArray[np.int64]) -> Step:
    """Return a step with other fixed drafts; tokens int64 `[N]`."""
    fields = step.tree.fields()
    fields["tokens"] = tokens
    return replace(step, tree=Tree.make(step.tree.parents, **fields))
