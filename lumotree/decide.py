"""Selection for the requests of one cycle: from logits to accepted paths and pending tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lumotree.coins import coins_for
from lumotree.draft_types import Proposal
from lumotree.errors import DecodeError, InputError
from lumotree.lazy_walk import Walk
from lumotree.requests import Request
from lumotree.sampling import SamplingParams, target_rows
from lumotree.select_types import Step
from lumotree.slots import Lease
from lumotree.tree import Tree


@dataclass(frozen=True)
class Turn:
    """One request's part of one cycle.

    tokens: int64, prompt and output before the cycle. committed: m. feed: prompt rows that this turn feeds, 0 for a
    decoding turn. cycle: address of its coins. left: tokens that may still be emitted.
    """

    request: Request
    lease: Lease
    proposal: Proposal
    tokens: NDArray[np.int64]
    committed: int
    feed: int
    cycle: int
    left: int

    @property
    def tree(self) -> Tree:
        """The candidate tree."""
        return self.proposal.tree

    @property
    def emits(self) -> bool:
        """False for a prompt chunk that is not the last one."""
        return not self.feed or self.committed + self.feed == len(self.request.prompt)


@dataclass(frozen=True)
class Decision:
    """What is done with a turn: the accepted path (row 0 first) and the new pending token, None if there is none yet
    because the prompt goes on."""

    path: tuple[int, ...]
    pending: int | None


def decide(turns: Sequence[Turn], logits: Tensor) -> list[Decision]:
    """Decide every turn by its own rule, coins and sampling parameters; logits fp32 `[T, V]`, turns' rows in order.

    What happens to a turn depends on nothing but its own rows. Raises DecodeError for rows that are no logits.
    """
    by_argmax = [_by_argmax(turn.request) for turn in turns if turn.emits]
    best = first_best(logits) if any(by_argmax) else []  # a pass over all logits, which no other turn needs
    if not all(by_argmax):
        logits = logits.cpu()
    decisions, start = [], 0
    for turn in turns:
        rows = slice(start, start + turn.tree.n)
        start += turn.tree.n
        try:
            decisions.append(_decide(turn, logits[rows], best[rows]))
        except InputError as cause:
            raise DecodeError(f"request {turn.request.number}, cycle {turn.cycle}: {cause}") from cause
    return decisions


def first_best(logits: Tensor) -> list[int]:
    """First argmax of each row, -1 for a row whose largest value is no finite number."""
    largest = logits.amax(-1, keepdim=True)
    index = torch.arange(logits.shape[-1], device=logits.device)
    first = torch.where(logits == largest, index, logits.shape[-1]).amin(-1)
    return torch.where(torch.isfinite(largest[:, 0]), first, -1).tolist()  # type: ignore[no-any-return]


def _decide(turn: Turn, logits: Tensor, best: Sequence[int]) -> Decision:
    if not turn.feed:
        return _follow(turn, best) if _by_argmax(turn.request) else _select(turn, logits)
    path = tuple(range(turn.feed))
    if not turn.emits:
        return Decision(path, None)
    return Decision(path, _first_token(turn, logits[-1:], best))


def _by_argmax(request: Request) -> bool:
    """Whether a walk along the argmax decides: at temperature 0 every rule does so, and needs no law for it."""
    return request.greedy and not request.sampling.penalised


def _follow(turn: Turn, best: Sequence[int]) -> Decision:
    """Greedy: from row 0 to the first child that carries the argmax, cut at end-of-sequence and budget."""
    tree, path = turn.tree, [0]
    while True:
        token = _finite(best[path[-1]], path[-1])
        child = next((c for c in tree.active_children(path[-1]) if tree.tokens[c] == token), None)
        if child is None or token == turn.request.eos or len(path) == turn.left:
            return Decision(tuple(path), token)
        path.append(child)


def _finite(token: int, row: int) -> int:
    if token < 0:
        raise InputError(f"logits row {row}: the largest value is not a finite number")
    return token


def _select(turn: Turn, logits: Tensor) -> Decision:
    request, tree = turn.request, turn.tree
    rule = replace(request.selection, eos=request.eos, budget=turn.left)
    walk = Walk(tree, logits, turn.proposal.laws, request.sampling)
    if walk.suits(rule):
        last, token = walk.select(rule, request.seed, request.number, turn.cycle)
        return Decision(tree.path(last), token)
    prompt, pending = len(request.prompt), turn.committed
    counts = (
        _counts(turn.tokens[:prompt], logits.shape[1]),
        _counts(turn.tokens[prompt:pending], logits.shape[1]),
    )
    target = target_rows(logits, tree, request.sampling, prompt_counts=counts[0], output_counts=counts[1])
    coins = coins_for(request.seed, [request.number], turn.cycle, tree.n, tree.active_rows)
    drafts = torch.from_numpy(tree.tokens.copy())[None]
    walks = rule.select(Step(tree, target, turn.proposal.laws), drafts, coins)
    return Decision(tree.path(int(walks.last[0])), int(walks.bonus[0]))


def _first_token(turn: Turn, logits: Tensor, best: Sequence[int]) -> int:
    """The token after the prompt; nothing was emitted yet, so only the prompt's own penalty applies."""
    if _by_argmax(turn.request):
        return _finite(best[-1], turn.feed - 1)
    params: SamplingParams = replace(turn.request.sampling, presence=0.0, frequency=0.0)
    root = Tree.make([-1], tokens=[int(turn.tokens[-1])])
    walk = Walk(root, logits, None, params)
    if walk.suits(turn.request.selection):
        return walk.select(turn.request.selection, turn.request.seed, turn.request.number, turn.cycle)[1]
    target = target_rows(logits, root, params, prompt_counts=_counts(turn.tokens, logits.shape[1]))
    coins = coins_for(turn.request.seed, [turn.request.number], turn.cycle, 1)
    walks = turn.request.selection.select(Step(root, target), torch.tensor([[int(turn.tokens[-1])]]), coins)
    return int(walks.bonus[0])


def _counts(tokens: NDArray[np.int64], vocab: int) -> Tensor:
    return torch.from_numpy(np.bincount(tokens, minlength=vocab))
