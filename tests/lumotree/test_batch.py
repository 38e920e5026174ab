"""Batches from trees: metadata of several requests, padding, refusals, plans that follow the topology."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lumotree.backends.batch import accepted_paths, build_batch, flat_slots, replan
from lumotree.errors import ContractError, TreeError
from lumotree.tree import Tree
from lumotree.tree_named import chain, comb, hydra27, star
from lumotree.verifier.lanes import plan_levels

TABLE = torch.tensor([[4, 7, 2], [9, 5, -1]], dtype=torch.int32)


def make(trees: list[Tree | None] | None = None, **changes: Any) -> Any:
    own = [comb(2, slots=[3, 1, 0, 2], prefix_len=5), star(3, slots=[70, 71, 75], prefix_len=2)]
    arguments: dict[str, Any] = {"state_slots": [6, 2], "page_table": TABLE, "page_size": 4}
    return build_batch(own if trees is None else trees, **(arguments | changes))


def test_rows_of_all_requests_lie_one_behind_the_other() -> None:
    batch = make()
    assert batch.requests == 2 and batch.rows == 7
    assert batch.cu_rows.tolist() == [0, 4, 7]
    assert batch.parent.tolist() == [-1, 0, 0, 2, -1, 0, 0]  # local to the request
    assert batch.position.tolist() == [5, 6, 6, 7, 2, 3, 3]
    assert batch.row_request.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.row_slot.tolist() == [3, 1, 0, 2, 70, 71, 75]
    assert batch.state_slot.tolist() == [6, 2] and batch.prefix_len.tolist() == [5, 2]
    assert batch.active.dtype == torch.bool and batch.parent.dtype == batch.row_slot.dtype == torch.int32


def test_position_is_prefix_plus_depth_whatever_the_slots() -> None:
    slots = list(range(31, -1, -1))
    tree = hydra27(slots=slots, prefix_len=9)
    batch = build_batch([tree], state_slots=[0], page_table=torch.arange(30)[None].int(), page_size=1)
    assert torch.equal(batch.position, torch.tensor(tree.depth) + 9) and batch.row_slot.tolist() == slots


def test_padding_has_no_rows_and_no_slot() -> None:
    table = torch.cat([TABLE, torch.full((1, 3), -1, dtype=torch.int32)])
    batch = make([*make_trees(), None], state_slots=[6, 2, 0], page_table=table)
    assert batch.state_slot.tolist() == [6, 2, -1] and batch.cu_rows.tolist() == [0, 4, 7, 7]
    assert batch.prefix_len.tolist() == [5, 2, 0]
    empty = build_batch([None], state_slots=[-1], page_table=table[:1], page_size=4)
    assert empty.rows == 0 and empty.requests == 1 and plan_levels(empty) == []


def make_trees() -> list[Tree]:
    return [comb(2, slots=[3, 1, 0, 2], prefix_len=5), star(3, slots=[70, 71, 75], prefix_len=2)]


def test_every_active_row_is_planned_once_behind_its_parent() -> None:
    inactive = Tree.make([-1, 0, 0, 2], active=[True, True, True, False], slots=[0, 1, 2, 3])
    batch = build_batch([inactive, hydra27(slots=range(10, 42))], state_slots=[0, 1], page_size=64,
                        page_table=torch.zeros((2, 1), dtype=torch.int32))  # fmt: skip
    done: dict[int, int] = {}
    for level in plan_levels(batch):
        for lane in level:
            before, lo = lane.source, int(batch.cu_rows[lane.request])
            for row in lane.rows:
                parent = int(batch.parent[row])
                assert (before == -1) if parent < 0 else (before == lo + parent)
                assert parent < 0 or before in done or before in lane.rows
                before = row
        done |= {row: 1 for lane in level for row in lane.rows}
    assert sorted(done) == torch.nonzero(batch.active).flatten().tolist()


def test_plan_shapes_depend_on_the_number_of_rows_alone() -> None:
    shapes = []
    for tree in (chain(9), star(9), Tree.make([-1, 0, 0, 1, 1, 2, 2, 0, 0], active=[True] * 7 + [False] * 2)):
        slots = Tree.make(tree.parents, active=tree.active, slots=range(9))
        batch = build_batch([slots], state_slots=[0], page_table=torch.zeros((1, 1), dtype=torch.int32), page_size=16)
        shapes.append({k: tuple(v.shape) for k, v in vars(batch.plan).items()})
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_slots": [6]}, "got 2 trees, 1 slots"),
        ({"page_table": TABLE[:1]}, "page_table rows=1"),
        ({"state_slots": [6, 6]}, "requests 0 and 1 share state_slot=6"),
        ({"state_slots": [6, -1]}, "request 1 has a tree but state_slot=-1"),
        ({"page_table": torch.tensor([[4, -1, -1], [9, 5, -1]])}, "request 0 needs 2 pages of 4 .* got 1"),
        ({"trees": [star(3, slots=[0, 1, 2]), star(3, slots=[2, 3, 4])]}, "requests 0 and 1 share candidate KV slot 2"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        make(**changes)


def test_flat_slots_follow_the_page_table() -> None:
    assert flat_slots(TABLE, 4, 0, [0, 3, 4, 11]).tolist() == [16, 19, 28, 11]
    assert flat_slots(TABLE, 4, 1, range(4, 6)).tolist() == [20, 21]
    assert flat_slots(TABLE, 1, 0, torch.tensor([2, 0])).tolist() == [2, 4]
    assert flat_slots(TABLE, 4, 0, []).tolist() == []


def test_accepted_paths_are_padded_and_bounded() -> None:
    accepted = accepted_paths([(0, 2), (), (0,)])
    assert accepted.rows.tolist() == [[0, 2], [-1, -1], [0, -1]] and accepted.length.tolist() == [2, 0, 1]
    assert accepted_paths([()]).rows.shape == (1, 1)
    assert accepted_paths([(0,)], longest=4).rows.shape == (1, 4)
    with pytest.raises(ContractError, match="request 1 accepts 3 rows, allowed: at most 2"):
        accepted_paths([(0,), (0, 1, 2)], longest=2)


def test_replan_changes_topology_and_nothing_else() -> None:
    batch = make()
    other = replan(batch, torch.tensor([-1, 0, 1, 2, -1, 0, 1], dtype=torch.int32))
    assert other.position.tolist() == [5, 6, 7, 8, 2, 3, 4]
    assert len(plan_levels(other)) == 1 and [lane.rows for lane in plan_levels(other)[0]] == [(0, 1, 2, 3), (4, 5, 6)]
    kept = ("cu_rows", "active", "row_request", "state_slot", "prefix_len", "page_table", "row_slot")
    assert all(getattr(other, k) is getattr(batch, k) for k in kept)
    assert batch.parent.tolist() == [-1, 0, 0, 2, -1, 0, 0]


@pytest.mark.parametrize(
    ("parents", "message"),
    [([-1, 0, 3, 2, -1, 0, 0], "rows 2 -> 3 -> 2"), ([-1, 0, 0, 2, -1, 0, 0, 0], "expected 7 parents, got 8")],
)
def test_replan_refuses_what_is_no_tree(parents: list[int], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        replan(make(), torch.tensor(parents, dtype=torch.int32))
