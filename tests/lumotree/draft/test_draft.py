"""Drafters over a head whose law is a known function of the tokens before, and over the shipped one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lumotree.backends.protocol import Batch
from lumotree.draft import SUPPORT, BudgetDrafter, ShapeDrafter, SuffixDrafter, drafter
from lumotree.draft_head import Growth, run_head, softmax
from lumotree.draft_types import Drafter, DraftRequest, DraftState, Proposal
from lumotree.errors import InputError
from lumotree.model_types import Forward
from lumotree.sampling import SamplingParams
from lumotree.select_prepare import check_tokens, prepare
from lumotree.select_types import Step
from lumotree.state import KVCache
from lumotree.tree import Tree
from lumotree.tree_named import chain, hydra27, star
from lumotree.tree_named import named as named_tree

VOCAB = 16
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
NAMES = ["suffix", "mtp5", "hydra27", "budget", "mtp5-sampled", "hydra27-sampled", "comb:4", "budget:5", "suffix:3"]


class FakeHead:
    """Logits are a table of (hidden, token); `hidden` counts up along a path, so that a row that read another row's
    hidden, or a stale one, drafts from another law. Records the slots and positions it was given."""

    def __init__(self, spread: float = 2.0) -> None:
        rng = np.random.default_rng(4)
        self.table = torch.from_numpy(spread * rng.standard_normal((256, VOCAB, VOCAB))).float()
        self.written: set[int] = set()
        self.positions: list[list[int]] = []

    def empty_cache(self, flat_slots: int) -> KVCache:
        return KVCache(*(torch.zeros(1, flat_slots, 1, 2, dtype=torch.bfloat16) for _ in range(2)))

    def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, cache: KVCache) -> Forward:
        self.written |= set(batch.row_slot.tolist())
        self.positions.append(batch.position.tolist())
        state = hidden[:, 0].float().long()
        after = ((state * 3 + tokens + 1) % 256).to(torch.bfloat16)
        return Forward(self.table[state, tokens], after[:, None].expand(-1, 2).contiguous())

    def law(self, request: DraftRequest, path: list[int], temperature: float = 1.0) -> np.ndarray:
        """The law behind b* and a path of drafted tokens."""
        state = int(request.hidden[0])
        for before in [int(request.tokens[-1]), *path][:-1]:
            state = (state * 3 + before + 1) % 256
        last = path[-1] if path else int(request.tokens[-1])
        return softmax(self.table[state, last].double().numpy(), temperature)


def request(number: int = 0, **changes: object) -> DraftRequest:
    rng = np.random.default_rng(number)
    tokens = np.tile(rng.integers(0, VOCAB, 7), 3)[: 15 + number % 4]
    given: dict[str, object] = dict(  # noqa: C408 - the names are the dataclass's
        tokens=tokens, hidden=torch.full((2,), float(number % 100), dtype=torch.bfloat16),
        pages=torch.arange(3 * number, 3 * number + 3, dtype=torch.int32) % 3000,
        scratch=10_000 + 40 * (number % 50) + np.arange(40), depth=30, rows=32, params=GREEDY, seed=9, number=number,
        cycle=5,
    )  # fmt: skip
    return DraftRequest(**{**given, **changes})  # type: ignore[arg-type]


def state_of(head: FakeHead) -> DraftState:
    return DraftState(head, head.empty_cache(12_100), 16)


def same(a: Proposal, b: Proposal) -> bool:
    return a.tree == b.tree and (a.laws is None) == (b.laws is None) and (a.laws is None or torch.equal(a.laws, b.laws))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_request_drafts_the_same_in_any_batch(name: str, params: SamplingParams) -> None:
    made, head = drafter(name), FakeHead()
    requests = [request(n, params=params, depth=30 - 9 * n, rows=32 - 8 * n) for n in range(4)]
    together = made.propose(requests, state_of(head))
    alone = [made.propose([one], state_of(head))[0] for one in requests]
    backwards = made.propose(requests[::-1], state_of(head))[::-1]
    assert all(same(a, b) and same(a, c) for a, b, c in zip(together, alone, backwards, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize(("depth", "rows"), [(0, 32), (1, 32), (3, 32), (30, 1), (30, 6), (30, 32)])
def test_proposals_can_be_selected_from(name: str, params: SamplingParams, depth: int, rows: int) -> None:
    """Root, rows, siblings and laws are what selection takes; nothing useless is active; only scratch is written."""
    head, one = FakeHead(), request(3, params=params, depth=depth, rows=rows)
    (proposal,) = drafter(name).propose([one], state_of(head))
    tree = proposal.tree
    assert int(tree.tokens[0]) == int(one.tokens[-1])
    assert tree.n <= rows and tree.max_depth <= depth
    for row in tree.active_rows:
        children = tree.tokens[list(tree.active_children(row))].tolist()
        assert len(set(children)) == len(children)
    target = torch.full((tree.n, VOCAB), 1 / VOCAB, dtype=torch.float64)
    prepared = prepare(Step(tree, target, proposal.laws))
    check_tokens(prepared, torch.from_numpy(tree.tokens.copy())[None], 1, distinct=True)
    assert head.written <= set(one.scratch.tolist())


def test_the_head_runs_at_the_positions_of_the_committed_row_and_below() -> None:
    head, one = FakeHead(), request(2)
    drafter("mtp5").propose([one], state_of(head))
    assert head.positions == [[one.committed - 1 + d for d in range(level + 1)] for level in range(5)]


def test_mtp5_is_the_heads_greedy_chain() -> None:
    head, one = FakeHead(), request(6)
    (proposal,) = drafter("mtp5").propose([one], state_of(head))
    assert proposal.tree.parents.tolist() == [-1, 0, 1, 2, 3, 4] and proposal.laws is None
    path: list[int] = []
    for token in proposal.tree.tokens[1:].tolist():
        assert token == int(head.law(one, path).argmax())
        path.append(token)


def test_hydra27_is_spine_runner_ups_and_suffix() -> None:
    head, one = FakeHead(), request(1, tokens=np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]))
    (proposal,) = drafter("hydra27").propose([one], state_of(head))
    tree, shape = proposal.tree, hydra27()
    assert tree.parents.tolist() == shape.parents.tolist() and not (tree.active & ~shape.active).any()
    matched = {(): 4, (4,): 5, (4, 5): 6}  # what followed "1 2 3" the last time
    for row in (0, 1, 4, 9, 14):
        path = [int(tree.tokens[r]) for r in tree.path(row)[1:]]
        children = tree.tokens[list(tree.active_children(row))].tolist()
        best = np.argsort(-head.law(one, path), kind="stable").tolist()
        other = matched.get(tuple(path))
        assert children[0] == best[0]
        assert set(children) == set(best[:3]) or (other in children and set(best[:2]) <= set(children))
    root = tree.tokens[list(tree.active_children(0))].tolist()
    assert 4 in root


def test_rows_below_the_head_are_suffix_matches_or_inactive() -> None:
    repeating = np.tile([1, 2, 3, 4, 5, 6, 7], 3)

    class Repeater(FakeHead):
        """Always sure of the next of 1..7."""

        def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, cache: KVCache) -> Forward:
            logits = torch.zeros(len(tokens), VOCAB)
            logits[torch.arange(len(tokens)), tokens % 7 + 1] = 5.0
            return Forward(logits, hidden)

    (full,) = drafter("hydra27").propose([request(0, tokens=repeating)], state_of(Repeater()))
    spine = full.tree.path(31)
    assert full.tree.active[31]
    assert full.tree.tokens[list(spine)].tolist() == [7, *[1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]]
    alone = request(0, tokens=np.array([9, 7]))
    (bare,) = drafter("hydra27").propose([alone], state_of(Repeater()))
    assert not bare.tree.active[24] and bare.tree.active[19]


def test_suffix_drafter_is_a_chain_of_what_followed() -> None:
    one = request(0, tokens=np.array([1, 2, 3, 4, 5, 1, 2, 3]), depth=4)
    (proposal,) = drafter("suffix").propose([one], DraftState(None, None, 16))
    assert proposal.tree.tokens.tolist() == [3, 4, 5, 1, 2] and proposal.tree.parents.tolist() == [-1, 0, 1, 2, 3]


def test_budget_drafter_spends_over_the_heads_law() -> None:
    head, one = FakeHead(), request(8)
    (proposal,) = BudgetDrafter(12).propose([one], state_of(head))
    tree = proposal.tree
    assert tree.n == 13

    def value(row: int) -> float:
        path = [int(tree.tokens[r]) for r in tree.path(row)[1:]]
        return float(np.prod([head.law(one, path[:i])[path[i]] for i in range(len(path))]))

    values = [value(row) for row in range(tree.n)]
    assert values == sorted(values, reverse=True)
    # No node outside the tree, one step below a node inside, is worth more than the least inside.
    for row in range(tree.n):
        path = [int(tree.tokens[r]) for r in tree.path(row)[1:]]
        taken = set(tree.tokens[list(tree.active_children(row))].tolist())
        best_left = max(p for token, p in enumerate(head.law(one, path)) if token not in taken)
        assert values[row] * best_left <= values[-1] + 1e-12


# Stochastic drafts


def declared_and_drawn(temperature: float, count: int) -> tuple[FakeHead, list[DraftRequest], list[Proposal]]:
    head = FakeHead()
    params = SamplingParams(temperature=temperature)
    base = request(0, params=params)
    requests = [replace(base, number=n) for n in range(count)]
    shape = Tree.make([-1, 0, 0, 1])
    # One call each: the fake requests share scratch slots.
    made = ShapeDrafter(shape, sampled=True)
    return head, requests, [made.propose([one], state_of(head))[0] for one in requests]


def test_declared_laws_are_the_heads_at_the_requests_temperature() -> None:
    head, requests, proposals = declared_and_drawn(0.7, 3)
    for one, proposal in zip(requests, proposals, strict=True):
        assert proposal.laws is not None
        first = int(proposal.tree.tokens[1])
        assert len(head.law(one, [])) <= SUPPORT
        np.testing.assert_array_equal(proposal.laws[0].numpy(), head.law(one, [], 0.7))
        np.testing.assert_array_equal(proposal.laws[1].numpy(), head.law(one, [first], 0.7))


def p_value(counts: Counter[tuple[int, int]], law: np.ndarray, total: int) -> float:
    """G-test of ordered pairs of siblings against drawing from `law` without replacement."""
    pairs = [(x, y) for x in range(VOCAB) for y in range(VOCAB) if x != y]
    expected = np.array([law[x] * law[y] / (1 - law[x]) for x, y in pairs]) * total
    observed = np.array([counts[pair] for pair in pairs], float)
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.power_divergence(observed, expected, lambda_="log-likelihood").pvalue)


def test_siblings_follow_the_declared_law_and_no_other() -> None:
    head, requests, proposals = declared_and_drawn(1.0, 700)
    counts = Counter((int(p.tree.tokens[1]), int(p.tree.tokens[2])) for p in proposals)
    law = head.law(requests[0], [])
    assert p_value(counts, law, 700) > 1e-3
    assert p_value(counts, head.law(requests[0], [], 1.7), 700) < 1e-6
    assert p_value(Counter({(y, x): n for (x, y), n in counts.items()}), law, 700) < 1e-6


def test_draft_coins_are_no_selection_coins_and_depend_on_request_and_cycle() -> None:
    head, one = FakeHead(spread=0.2), request(0, params=WARM)
    made = drafter("star:9-sampled")
    tokens = [
        made.propose([replace(one, **change)], state_of(head))[0].tree.tokens.tolist()
        for change in ({}, {"cycle": 6}, {"number": 1}, {"seed": 10}, {})
    ]
    assert tokens[0] == tokens[4] and len({tuple(t) for t in tokens}) == 4


def test_a_law_with_fewer_tokens_than_children_leaves_rows_inactive() -> None:
    class Sure(FakeHead):
        def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, cache: KVCache) -> Forward:
            logits = torch.full((len(tokens), VOCAB), -1e4)
            logits[:, 3] = 0.0
            return Forward(logits, hidden)

    (proposal,) = drafter("star:4-sampled").propose([request(0, params=WARM)], state_of(Sure()))
    assert proposal.tree.active.tolist() == [True, True, False, False] and int(proposal.tree.tokens[1]) == 3
    (fixed,) = drafter("star:4").propose([request(0, params=WARM)], state_of(Sure()))
    assert fixed.tree.active.tolist() == [True, True, False, False]


# Names and refusals


def test_names() -> None:
    assert drafter("suffix:3") == SuffixDrafter(3, name="suffix:3")
    assert drafter("budget:5") == BudgetDrafter(5, name="budget:5")
    assert drafter("mtp5") == ShapeDrafter(chain(6), name="mtp5")
    assert drafter("hydra27") == ShapeDrafter(hydra27(), suffix=True, name="hydra27")
    assert drafter("star:4-sampled") == ShapeDrafter(star(4), sampled=True, name="star:4-sampled")
    assert [drafter(n).needs_head for n in ("suffix", "mtp5", "budget")] == [False, True, True]


@pytest.mark.parametrize("spec", ["", "mtp6", "budget:0", "budget:-1", "suffix:x", "suffix-sampled", "star", "budget:"])
def test_an_unknown_name_is_refused_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(InputError, match=r"unknown drafter .*allowed: suffix, .*budget:1\.\.4095, or a tree"):
        drafter(spec)


def test_no_head_and_too_little_scratch_are_refused() -> None:
    with pytest.raises(InputError, match="needs a draft head; the model has none"):
        drafter("mtp5").propose([request(0)], DraftState(None, None, 16))
    head, one = FakeHead(), request(0, scratch=np.arange(2))
    growth = Growth(one)
    run_head([growth], [[0]], state_of(head))
    growth.add(0, 1), growth.add(0, 2)
    with pytest.raises(InputError, match="request 0: 3 drafted rows but 2 scratch slots"):
        run_head([growth], [[0, 1, 2]], state_of(head))


def test_softmax_counts_a_greedy_temperature_as_one() -> None:
    logits = np.array([0.0, 1.0, -1e4])
    np.testing.assert_array_equal(softmax(logits, 0.0), softmax(logits, 1.0))
    assert softmax(logits, 0.5)[1] > softmax(logits, 1.0)[1]
    assert softmax(logits, 1.0)[2] == 0 and softmax(logits, 1.0).sum() == pytest.approx(1)


def test_all_registered_shapes_are_drafters() -> None:
    made: list[Drafter] = [drafter(name) for name in ("mtp5", "comb:3", "binary:2", "chain:3", "star:3")]
    assert [d.shape == named_tree(d.name) for d in made] == [True] * 5  # type: ignore[attr-defined]
