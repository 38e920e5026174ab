"""Lanes, and every accepted path that publication must refuse."""

import pytest
import torch

from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.protocol import Accepted, Batch, Limits
from lumotree.errors import PathError
from lumotree.tree import Tree
from lumotree.tree_named import comb, complete_binary, hydra27
from lumotree.verifier.lanes import Lane, accepted_lanes, alike, ancestor_rows, packed, plan_levels, root_lanes, steps

LIMITS = Limits(4, 64, 12, 8, 1)


def make_batch(*trees: Tree | None) -> Batch:
    placed = [None if t is None else Tree.make(t.parents, active=t.active, slots=range(i * 64, i * 64 + t.n))
              for i, t in enumerate(trees)]  # fmt: skip
    table = torch.arange(4 * len(trees)).reshape(len(trees), 4)
    slots = [-1 if t is None else i for i, t in enumerate(trees)]
    return build_batch(placed, state_slots=slots, page_table=table, page_size=8)


def test_plan_levels_are_the_published_decomposition_of_hydra27() -> None:
    levels = plan_levels(make_batch(hydra27()))
    assert [lane.rows for lane in levels[0]] == [(0, 1, 4, 9, 14)]
    assert len(levels) == 2 and len(levels[1]) == 11
    assert [len(lane.rows) for lane in levels[1]] == [7, 5, 3, *[1] * 8]


def test_levels_join_requests_and_leave_out_padding() -> None:
    batch = make_batch(comb(4), None, complete_binary(2))
    rows = sorted(row for level in plan_levels(batch) for lane in level for row in lane.rows)
    assert rows == list(range(batch.rows))
    assert {lane.request for level in plan_levels(batch) for lane in level} == {0, 2}
    dead = make_batch(comb(4))
    dead.state_slot[0] = -1
    assert plan_levels(dead) == [] and ancestor_rows(dead) == {} and root_lanes(dead) == []


def test_steps_shrink_to_a_prefix() -> None:
    lanes = [Lane((3, 4, 5), -1, 0), Lane((7, 8), -1, 1), Lane((9,), -1, 2)]
    assert steps(lanes) == [[3, 7, 9], [4, 8], [5]]
    assert [len(run) for run in alike(lanes)] == [2, 1]
    assert packed(lanes) == ([3, 4, 5, 7, 8, 9], [Lane((0, 1, 2), -1, 0), Lane((3, 4), -1, 1), Lane((5,), -1, 2)])
    assert steps([]) == []


def test_ancestor_rows_are_global_and_active_only() -> None:
    paths = ancestor_rows(make_batch(comb(3), hydra27()))
    offset = comb(3).n
    assert paths[offset + 31] == [offset + r for r in hydra27().path(31)]
    assert offset + 18 not in paths


def test_accepted_lanes_are_global_and_longest_first() -> None:
    batch = make_batch(comb(4), None, hydra27())
    lanes = accepted_lanes(batch, accepted_paths([(0,), (), (0, 1, 4)]), LIMITS, empty_path=True)
    offset = comb(4).n
    assert [lane.rows for lane in lanes] == [(offset, offset + 1, offset + 4), (0,)]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ((1,), "request 1, step 0: row=1, expected the root, row 0"),
        ((0, 4), "request 1, step 1: row=4 has parent 1, expected the row before it, 0"),
        ((0, 32), r"request 1, step 1: row=32 is out of range; allowed: 0..31"),
        ((0, -5), "request 1, step 1: row=-5 is out of range"),
        ((0, 1, 4, 9, 14, 18), "request 1, step 5: row=18 is inactive"),
        (tuple(range(13)), r"request 1 has length=13; allowed: 0..12"),
    ],
)
def test_paths_that_cannot_have_been_accepted_are_refused(path: tuple[int, ...], words: str) -> None:
    with pytest.raises(PathError, match=words):
        accepted_lanes(make_batch(comb(4), hydra27()), accepted_paths([(0,), path]), LIMITS, empty_path=True)


def test_lengths_and_requests_are_checked() -> None:
    batch = make_batch(comb(4))
    with pytest.raises(PathError, match="length=0, and this contract does not declare empty_path"):
        accepted_lanes(batch, accepted_paths([()]), LIMITS, empty_path=False)
    with pytest.raises(PathError, match="length=-1"):
        accepted_lanes(batch, Accepted(torch.tensor([[0]]), torch.tensor([-1])), LIMITS, empty_path=True)
    with pytest.raises(PathError, match=r"length=2; allowed: 0\.\.1"):
        accepted_lanes(batch, Accepted(torch.tensor([[0]]), torch.tensor([2])), LIMITS, empty_path=True)
    with pytest.raises(PathError, match="expected 1 requests, got 2 lengths"):
        accepted_lanes(batch, accepted_paths([(0,), (0,)]), LIMITS, empty_path=True)
    padding = make_batch(None, comb(4))
    nonsense = Accepted(torch.tensor([[7], [0]]), torch.tensor([9, 1]))
    assert len(accepted_lanes(padding, nonsense, LIMITS, empty_path=True)) == 1
