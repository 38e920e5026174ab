"""Selection: which drafted path is accepted and which token is pending next.

A rule is a pure function of target rows, draft law, tree, drafted tokens and coins. `RULES` names them; each has a
vectorised form (`Rule.select`) and a plain one for a single walk (`Rule.reference`) that decide alike.

Emitted by one selection are the tokens of the accepted candidates and then the bonus, which is the new pending token
b* and is not materialised: at a leaf it is drawn from the leaf's target, after refusals from what they left (the
correction). End-of-sequence and budget cut what is emitted, see `Rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree import select_reference as plain
from lumotree import select_rules as fast
from lumotree.errors import InputError
from lumotree.select_prepare import PreparedStep, check_coins, check_tokens, prepare
from lumotree.select_types import Coins, Step, Walks
from lumotree.tree import Tree


@dataclass(frozen=True)
class Rule:
    """A selection rule: a `CoinSampler`.

    lossless: when what is emitted follows the target's law. distinct: siblings drawn from a declared law must differ.
    eos: end-of-sequence token, or None. budget: most tokens that may be emitted (accepted candidates + bonus), or None.

    What is emitted ends with the first `eos` and holds at most `budget` tokens. Where that stops at an accepted
    candidate, the candidate's token becomes b* and its row is not accepted: the path ends at its parent, so that
    tokens, KV and state agree with plain decoding, which never feeds its last token. Such a cut is a function of the
    emitted tokens alone, so it keeps a rule lossless. `refused` then says whether an earlier sibling of that row was
    passed over.
    """

    name: str
    lossless: str
    distinct: bool
    one: Callable[[plain.OneWalk], plain.Outcome]
    many: Callable[[PreparedStep, Tensor, Coins], fast.Decision]
    eos: int | None = None
    budget: int | None = None

    def select(self, step: Step | PreparedStep, tokens: Tensor, coins: Coins) -> Walks:
        """Select on W walks. A `prepare`d step saves its validation and sums when walks come in portions.

        tokens: int64 `[W, N]` or `[1, N]`, of which active rows above row 0 are read. coins: float64 `[W, N]`. Raises
        InputError naming row and value: see `prepare`, `check_tokens`, `check_coins`; eos outside the vocabulary;
        budget below 1.
        """
        prepared = step if isinstance(step, PreparedStep) else prepare(step)
        self._check_limits(prepared.vocab)
        check_tokens(prepared, tokens, check_coins(coins, prepared.tree.n), self.distinct)
        last, bonus = self.many(prepared, tokens, coins)
        return cut_walks(prepared.tree, last, bonus, tokens, self.eos, self.budget)

    def reference(
        self,
        tree: Tree,
        target: Sequence[Sequence[plain.Number]],
        laws: Sequence[Sequence[plain.Number]] | None,
        tokens: Sequence[int],
        accept: Sequence[plain.Number],
        residual: Sequence[plain.Number],
    ) -> plain.Outcome:
        """Select on one walk in plain Python; numbers may be Fractions. Arguments as in `OneWalk`; not validated."""
        children = [tree.active_children(row) for row in range(tree.n)]
        walk = plain.OneWalk(children, tokens, target, laws, accept, residual)
        return plain.cut(walk, self.one(walk), tree.parents.tolist(), self.eos, self.budget)

    def _check_limits(self, vocab: int) -> None:
        if self.eos is not None and not 0 <= self.eos < vocab:
            raise InputError(f"eos {self.eos} is outside the vocabulary; allowed: 0..{vocab - 1}")
        if self.budget is not None and self.budget < 1:
            raise InputError(f"budget {self.budget}: at least the bonus token is emitted; allowed: >= 1")


GREEDY = Rule(
    name="greedy",
    lossless="only if the target's rows are one-hot (temperature 0): it emits the greedy continuation, for any draft",
    distinct=False,
    one=plain.greedy,
    many=fast.greedy,
)
NAIVE = Rule(
    name="naive",
    lossless="for any draft chosen without sight of the residual coins, whatever its law; siblings may repeat",
    distinct=False,
    one=plain.naive,
    many=fast.naive,
)
MULTI_ROUND = Rule(
    name="multi-round",
    lossless="on average over drafts, if each child is drawn from the declared law without its earlier siblings, "
    "renormalised (SpecInfer, EAGLE); for every draft, if the children are point masses, which may repeat",
    distinct=True,
    one=plain.multi_round,
    many=fast.multi_round,
)
TRAVERSAL = Rule(
    name="traversal",
    lossless="under the conditions of multi-round (Traversal Verification, arXiv 2505.12398)",
    distinct=True,
    one=plain.traversal,
    many=fast.traversal,
)

RULES: dict[str, Rule] = {rule.name: rule for rule in (GREEDY, NAIVE, MULTI_ROUND, TRAVERSAL)}


def cut_walks(tree: Tree, last: Tensor, bonus: Tensor, tokens: Tensor, eos: int | None, budget: int | None) -> Walks:
    """Apply eos and budget to decided walks (last, bonus int64 `[W]`) and tell what was refused at their last rows."""
    parents = torch.from_numpy(tree.parents.astype("int64")).to(last.device)
    kids = [tree.active_children(row) for row in range(tree.n)]
    eldest = torch.tensor([group[0] if group else -1 for group in kids], device=last.device)
    refused = eldest[last] >= 0
    if eos is None and budget is None:
        return Walks(last, bonus, refused, tokens)
    stop = _stops(tree, tokens, eos, budget).expand(len(last), -1).gather(1, last[:, None])[:, 0]
    cut = stop >= 0
    row = stop.clamp(min=0)
    parent = parents[row].clamp(min=0)
    pending = tokens.expand(len(last), -1).gather(1, row[:, None])[:, 0]
    return Walks(
        torch.where(cut, parent, last),
        torch.where(cut, pending, bonus),
        torch.where(cut, eldest[parent] != row, refused),
        tokens,
    )


def _stops(tree: Tree, tokens: Tensor, eos: int | None, budget: int | None) -> Tensor:
    """int64 `[W or 1, N]`: the first row on the path to row r at which emission ends, -1 if it goes on."""
    stop = torch.full_like(tokens, -1)
    for row in tree.active_rows[1:]:
        above = stop[:, tree.parents[row]]
        ends = torch.full_like(above, int(tree.depth[row]) == budget, dtype=torch.bool)
        if eos is not None:
            ends |= tokens[:, row] == eos
        stop[:, row] = torch.where(above >= 0, above, torch.where(ends, row, -1))
    return stop
