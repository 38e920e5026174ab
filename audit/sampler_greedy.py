"""Judging a greedy sampler: it has one right answer for every draft, the path of first argmaxes.

Drafts follow the argmax most of the time, so that all depths occur; ties at the top and siblings that repeat each other
are among them. Controls are the faults that a greedy sampler can have: another row read, another of tied tokens taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch

from audit.rule_law import Ints
from audit.sampler_cases import with_tokens
from audit.sampler_control import LEAST_TV, ControlResult
from audit.sampler_guard import Guarded
from faults.sampler_fault import SamplerFault
from faults.sampler_types import StepSource
from lumotree.coins import coins_for
from lumotree.errors import InputError
from lumotree.select import GREEDY
from lumotree.select_types import CoinSampler, Step

GREEDY_WALKS = 1_024
TOGETHER = (1, 1, 1, 1, 2, 1, 1, 3, 1, 1, 1, 8, 1, 1, 1, 33)
"""Walks of one draft that a closed sampler is asked for at once, draft after draft."""


@dataclass(frozen=True)
class GreedyResult:
    """Drafts shown, wrong answers, and the first wrong one in words."""

    walks: int
    wrong: int
    first: str


def run_greedy(sampler: Guarded, step: Step, walks: int, seed: int) -> GreedyResult:
    """Compare a greedy sampler with the right answers on `walks` drafts."""
    tokens = greedy_drafts(step, walks, seed)
    if sampler.loaded.coins:
        return _compared(_selected(sampler, step, tokens, seed), step, tokens)
    answers = [_walked(sampler, with_tokens(step, row.numpy()), TOGETHER[i % len(TOGETHER)], seed + i)
               for i, row in enumerate(tokens)]  # fmt: skip
    return _compared(np.array(answers, np.int64).T, step, tokens)


def _walked(sampler: Guarded, step: Step, walks: int, seed: int) -> tuple[int, int]:
    """Last row and bonus of `walks` walks of one draft; (-1, -1), which is no answer, where they differ."""
    drawn = sampler.walk(step, walks, seed)
    found = set(zip(drawn.last.tolist(), drawn.bonus.tolist(), strict=True))
    return found.pop() if len(found) == 1 else (-1, -1)


def greedy_controls(
    name: str,
    step: Step,
    source: StepSource | None,
    faults: Mapping[str, SamplerFault],
    walks: int,
    seed: int,
) -> Iterator[ControlResult]:
    """Put each fault of rows and of ties around the greedy rule and look whether its answers show it.

    tv of a control: the part of these drafts that a sampler with the fault must answer wrongly, counted on the paths.
    """
    tokens = greedy_drafts(step, walks, seed)
    right = greedy_answers(step, best_tokens(step), tokens)
    for fault in faults.values():
        if fault.kind != "target" and fault.needs != "greedy":
            continue
        try:
            read = fault.change.rows(step, source) if fault.change.rows else step
        except InputError as refusal:  # it reads logits, which a step from a file does not have
            yield ControlResult(fault.id, name, fault.expect, 0.0, False, False, note=str(refusal))
            continue
        wrong = greedy_answers(step, best_tokens(read, last=fault.needs == "greedy"), tokens)
        tv = float((wrong != right).any(0).mean())
        if tv < LEAST_TV:
            yield ControlResult(fault.id, name, fault.expect, tv, tv > 0, False, note="" if tv else "same argmaxes")
            continue
        faulty = fault.wrap(GREEDY, source)
        found = _compared(_selected(faulty, step, tokens, seed), step, tokens)  # type: ignore[arg-type]
        seen = found.wrong > 0
        yield ControlResult(
            fault.id, name, fault.expect, tv, True, True, seen, "greedy answers" if seen else "", walks,
            inf if seen else None,
        )  # fmt: skip


def _selected(sampler: CoinSampler | Guarded, step: Step, tokens: torch.Tensor, seed: int) -> Ints:
    coins = coins_for(seed, range(len(tokens)), 0, step.tree.n, step.tree.active_rows)
    walks = sampler.select(step, tokens, coins)
    return np.stack([walks.last.cpu().numpy(), walks.bonus.cpu().numpy()])


def _compared(answers: Ints, step: Step, tokens: torch.Tensor) -> GreedyResult:
    expected = greedy_answers(step, best_tokens(step), tokens)
    wrong = (answers != expected).any(0)
    if not wrong.any():
        return GreedyResult(len(tokens), 0, "")
    w = int(np.argmax(wrong))
    mine, right = answers[:, w].tolist(), expected[:, w].tolist()
    first = f"draft {w}: ended at row {mine[0]} with token {mine[1]}; right: row {right[0]}, token {right[1]}"
    return GreedyResult(len(tokens), int(wrong.sum()), first)


def best_tokens(step: Step, last: bool = False) -> Ints:
    """Return the first (or last) most likely token of each row, [N]."""
    target = step.target.cpu().numpy()
    if last:
        return np.asarray(target.shape[1] - 1 - np.argmax(target[:, ::-1], axis=1), np.int64)
    return np.asarray(np.argmax(target, axis=1), np.int64)


def greedy_answers(step: Step, best: Ints, tokens: torch.Tensor) -> Ints:
    """Return last row and bonus [2, W] of drafts int64 `[W, N]`: the first child with the row's token is followed."""
    children, wanted = [step.tree.active_children(row) for row in range(step.tree.n)], best.tolist()
    last = [_walk(children, wanted, draft) for draft in tokens.tolist()]
    return np.stack([np.array(last, np.int64), best[last]])


def _walk(children: Sequence[tuple[int, ...]], best: list[int], draft: list[int]) -> int:
    row = 0
    while True:
        follows = [child for child in children[row] if draft[child] == best[row]]
        if not follows:
            return row
        row = follows[0]


def greedy_drafts(step: Step, walks: int, seed: int) -> torch.Tensor:
    """Return drafts int64 `[walks, N]`: a child carries its parent's argmax, another token of the largest probability,
    or a random one."""
    rng = np.random.default_rng([seed, 7])
    rows, vocab = step.target.numpy(), int(step.target.shape[1])
    tokens = np.broadcast_to(step.tree.tokens, (walks, step.tree.n)).copy()
    for row in step.tree.active_rows[1:]:
        target = rows[step.tree.parents[row]]
        best = np.flatnonzero(target == target.max())
        kind = rng.random(walks)
        drawn = np.where(kind < 0.7, best[0], rng.choice(best, walks))
        tokens[:, row] = np.where(kind < 0.85, drawn, rng.integers(0, vocab, walks))
    return torch.from_numpy(tokens)
