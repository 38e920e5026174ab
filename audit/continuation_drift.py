"""Drift: thousands of greedy tokens in one go, plainly and by trees, both against the whole model in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from audit.continuation_native import to_host
from audit.distance import relative_l2
from audit.drift_oracle import Float64Run, float64_run
from lumotree.checkpoint import read_checkpoint
from lumotree.cycle import Decoder
from lumotree.cycle_types import Stack
from lumotree.draft_types import DraftRequest, DraftState, Proposal
from lumotree.plain import PlainDecoder
from lumotree.requests import Request
from lumotree.slots import Capacity
from lumotree.surfaces import Surfaces
from lumotree.tree import Tree
from lumotree.tree_named import hydra27

#: Points of the curve.
MARKS = 20


@dataclass(frozen=True)
class Curve:
    """One arm. tokens: what it emitted. marks: committed tokens; apart[mark][layer]: relative L2 of its recurrent state
    from float64's on the same tokens. diverges: first emitted token, counted from 0, that float64 would not have chosen
    (None: never). margin: difference of float64's two largest logits there, or the smallest one along the way."""

    tokens: tuple[int, ...]
    marks: tuple[int, ...]
    apart: tuple[tuple[float, ...], ...]
    diverges: int | None
    margin: float


@dataclass(frozen=True)
class Drift:
    """Both arms. same: leading tokens that they share. differences: surfaces that differ at the end, in words; empty
    where both hold the same bits. cycles: of the tree arm."""

    native: Curve
    candidate: Curve
    same: int
    differences: tuple[str, ...]
    cells: int
    cycles: int


class _Foresight:
    """Drafts `hydra27` so that one row after the other is the end of the longest right path. What is drafted must not
    matter, and this way many tokens need few cycles."""

    name, needs_head = "foresight", False

    def __init__(self, future: Sequence[int], vocab: int) -> None:
        self.future, self.vocab, self.tree = future, vocab, hydra27()

    def propose(self, requests: Sequence[DraftRequest], state: DraftState) -> list[Proposal]:
        """See `lumotree.draft_types.Drafter`."""
        return [Proposal(self._one(r)) for r in requests]

    def _one(self, request: DraftRequest) -> Tree:
        rows = self.tree.active_rows
        path = self.tree.path(rows[(request.cycle * 11) % len(rows)])
        position = request.committed + self.tree.depth.astype(np.int64)
        known = np.array([self.future[min(p, len(self.future) - 1)] for p in position])
        tokens = (known + 1) % self.vocab
        tokens[list(path)] = known[list(path)]
        tokens[0] = request.tokens[-1]
        return Tree.make(self.tree.parents, tokens=tokens, active=self.tree.active)


def measure_drift(stack: Stack, folder: str, prompt: tuple[int, ...], count: int) -> Drift:
    """Decode `count` tokens greedily in both arms. folder: of the model's weights, for float64. Raises InputError."""
    native = _native(stack, prompt, count)
    candidate = _by_trees(stack, prompt, count, (*prompt, *native[0]))
    marks = {m for arm in (native, candidate) for m in arm[1]}
    config, weights = read_checkpoint(folder)
    contract = stack.backend.contract
    runs: dict[tuple[int, ...], Float64Run] = {}
    for tokens, _, _ in (native[:3], candidate[:3]):
        if tokens not in runs:
            runs[tokens] = float64_run(config, weights, (*prompt, *tokens)[:-1], marks, contract)
    same = next((i for i, (a, b) in enumerate(zip(native[0], candidate[0], strict=True)) if a != b), count)
    differences = candidate[2].differences(native[2], signed_zeros=contract.zeros == "signed")
    return Drift(
        _curve(native, runs[native[0]], len(prompt)),
        _curve(candidate, runs[candidate[0]], len(prompt)),
        same,
        tuple(str(d) for d in differences),
        native[2].cells(),
        candidate[3],
    )


#: Emitted tokens, committed tokens -> states, surfaces at the end, cycles.
_Arm = tuple[tuple[int, ...], dict[int, Tensor], Surfaces, int]


def _native(stack: Stack, prompt: tuple[int, ...], count: int) -> _Arm:
    decoder = PlainDecoder(stack, [Request(0, prompt, count)], [None])
    states: dict[int, Tensor] = {}
    due = _due(len(prompt), count)

    def watch(place: int, fed: int) -> None:
        if fed in due:
            states[fed] = to_host(decoder.surfaces(place)).recurrent

    result = decoder.run(watch)[0]
    return result.output, states, to_host(result.surfaces), count


def _by_trees(stack: Stack, prompt: tuple[int, ...], count: int, future: Sequence[int]) -> _Arm:
    drafter = _Foresight(future, stack.model.vocab)
    decoder = Decoder(stack, Capacity(slots=1, context=len(prompt) + count))
    state = decoder.admit(Request(0, prompt, count, drafter=drafter))
    states: dict[int, Tensor] = {}
    due, cycles = _due(len(prompt), count), 0
    while state.finished is None:
        decoder.cycle()
        cycles += 1
        if due and state.committed >= due[0]:
            states[state.committed] = to_host(decoder.surfaces(0)).recurrent
            due = [m for m in due if m > state.committed]
    return tuple(state.output), states, to_host(decoder.surfaces(0)), cycles


def _due(prompt: int, count: int) -> list[int]:
    """Committed tokens at which states are looked at; the last emitted token is never committed."""
    return sorted({prompt + max(count * i // MARKS - 1, 0) for i in range(1, MARKS + 1)})


def _curve(arm: _Arm, exact: Float64Run, prompt: int) -> Curve:
    tokens, states = arm[0], arm[1]
    apart = tuple(
        tuple(float(relative_l2(got.double(), want)) for got, want in zip(states[m], exact.states[m], strict=True))
        for m in states
    )
    chosen = exact.logits[prompt - 1 :].argmax(-1).tolist()
    wrong = next((i for i, (a, b) in enumerate(zip(chosen, tokens, strict=True)) if a != b), None)
    top = torch.topk(exact.logits[prompt - 1 :], 2).values
    margins = top[:, 0] - top[:, 1]
    return Curve(tokens, tuple(states), apart, wrong, float(margins.min() if wrong is None else margins[wrong]))
