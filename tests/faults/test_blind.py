"""The faults written blind that only other trees or cycles than those of the common drive reach, and their trees."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.cases import Case
from audit.fault_cases import ladder
from audit.fault_trial import program_trial
from audit.stage import Stage
from faults import BLIND, Faulty
from faults.blind_trees import Bend, bends, bent, cut_ring, hidden_by, mask_word, path_heads, row_ring, third_level
from faults.blind_trees import tile_edge as edge
from faults.variant import GdnVariant
from faults.variant_backend import TORCH
from faults.variant_math import averaged, cut, unit
from lumotree.backends.batch import build_batch
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.tree import Tree
from lumotree.tree_named import chain, comb, complete_binary, hydra27, star

INNER = TorchBackend()

#: A spine of four rows first, then branches off its rows 0, 1, 2, 3 and 0.
SPINE = [-1, 0, 1, 2, 0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("bend", "parents", "wrong"),
    [
        (row_ring(4), SPINE, [-1, 0, 1, 2, 0, 1, 2, 3, 4]),
        (row_ring(2), SPINE, [-1, 0, 1, 2, 2, 3, 4, 5, 6]),
        (edge(2), [-1, 0, 1, 2, 3], [-1, 0, 0, 2, 2]),
        (edge(4), SPINE, [-1, 0, 1, 2, 0, 1, 2, 2, 0]),
        (cut_ring(2), SPINE, [-1, 0, 1, 2, 2, 1, 2, 3, 2]),
        (cut_ring(3), [*SPINE, 3], [-1, 0, 1, 2, 3, 1, 2, 3, 3, 3]),
        (mask_word(2), SPINE, [-1, 0, 1, 1, 0, 1, 1, 1, 0]),
        (third_level, [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], None),
    ],
)  # fmt: skip
def test_a_tree_is_bent_where_the_limit_is_passed_and_nowhere_else(bend: Bend, parents: list[int], wrong: Any) -> None:
    tree = Tree.make(parents)
    found = bend(tree)
    if wrong is not None:
        assert found == wrong and bends(bend)([chain(1), tree])
    assert not bends(bend)([chain(1), star(2)])
    batch = build_batch([tree], state_slots=[0], page_table=torch.zeros(1, 4, dtype=torch.int32), page_size=9)
    told = bent(bend)(batch)
    assert told.parent.tolist() == found and torch.equal(told.position, batch.position)


def test_only_what_hangs_off_the_third_level_starts_from_the_root() -> None:
    tree = complete_binary(3)  # levels: 0 1 3; then 2, 4, 8 and 7 with what follows them; then 6, 10 and so on
    plan = tree.plan("many")
    heads = {path.rows[0] for level in plan.levels[2:] for path in level}
    found = third_level(tree)
    assert heads and all(found[row] == (0 if row in heads else int(tree.parents[row])) for row in range(tree.n))
    assert not bends(third_level)([comb(4), hydra27()])


def test_a_mask_hides_by_number_and_a_path_has_one_head() -> None:
    before = Tree.make([-1, 0, 0, 1], active=[True, True, False, True])
    assert hidden_by(before, star(5)) == [2] and hidden_by(before, chain(2)) == []
    assert hidden_by(star(5), before) == []
    assert path_heads(comb(2)) == [0, 1, 2, 2]


class Spy:
    """The calls of one method: copies of their tensors, and the buffer that outputs went to."""

    def __init__(self, name: str) -> None:
        self.calls: list[tuple[Any, int]] = []
        self.backend = Faulty(INNER, **{name: self.method})
        self._inner = getattr(INNER, name)

    def method(self, ops: Any, pool: Tensor, batch: Any, ws: Any, out: Tensor, layer: int) -> None:
        self.calls.append(({"ops": _copy(ops), "pool": pool.clone(), "batch": _copy(batch)}, out.data_ptr()))
        self._inner(ops, pool, batch, ws, out, layer)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return {f.name: _copy(getattr(value, f.name)) for f in fields(value)} if is_dataclass(value) else value


def cycles(kind: str, names: list[str]) -> tuple[list[Any], list[Case]]:
    """Calls of the inner verification when cases are verified one after another on one workspace."""
    spy = Spy("gdn_verify")
    specs = {spec.id.rsplit("/", 1)[1]: spec for spec in ladder(3)}
    made = [Case(specs[name], INNER.contract) for name in names]
    stages = [Stage(BLIND[f"{kind}.gdn"].wrap(spy.backend), case) for case in made]
    for stage, case in zip(stages, made, strict=True):
        stage.ws = stages[0].ws
        stage.run_verify("gdn", 0, stage.operands("gdn", 0), case.batch, stage.out[0]["gdn"])
    return spy.calls, made


def test_fewer_rows_records_the_operands_of_the_larger_cycle_and_keeps_the_outputs() -> None:
    calls, (large, small, again) = cycles("fewer_rows", ["shuffled", "comb", "near_one"])
    assert [int(call["batch"]["parent"].shape[0]) for call, _ in calls] == [8, 6, 6, 6]
    right, stale = calls[1][0]["ops"], calls[2][0]["ops"]
    for name in ("q", "k", "v", "a", "b"):
        assert torch.equal(right[name], getattr(small.gdn[0], name))
        assert torch.equal(stale[name], getattr(large.gdn[0], name)[:6])
    assert torch.equal(stale["A_log"], small.gdn[0].A_log) and calls[2][1] != calls[1][1]
    assert torch.equal(calls[3][0]["ops"]["k"], again.gdn[0].k)


def test_the_third_cycle_reads_the_state_of_the_second() -> None:
    calls, made = cycles("double_buffer", ["comb", "near_one", "near_zero", "large_gates"])
    pools = [case.pools.recurrent for case in made]
    for at, source in enumerate([0, 1, 1, 3]):
        assert torch.equal(calls[at][0]["pool"].nan_to_num(7), pools[source].nan_to_num(7)), at


@pytest.mark.parametrize("name", ["row_ring.gdn", "cut_ring.gdn", "idle_sticks.conv", "ragged_batch.gdn"])
def test_a_program_of_five_requests_catches_what_passed_before_it_was_there(name: str) -> None:
    trial = program_trial(INNER, BLIND[name], "five_and_idle", 1)
    assert trial.state == "Caught" and trial.changed


@pytest.mark.parametrize("program", ["plain_between", "rolled_back"])
def test_the_same_faults_change_nothing_in_a_program_without_long_branches(program: str) -> None:
    for name in ("row_ring.gdn", "cut_ring.gdn", "idle_sticks.conv"):
        assert program_trial(INNER, BLIND[name], program, 1).state == "NotReached"


def test_formulas_of_the_new_variants() -> None:
    x = torch.tensor([1.0 + 2.0**-8 + 2.0**-9, -1.0 - 2.0**-8 - 2.0**-9])
    assert cut(x).tolist() == [1.0, -1.0]
    parts = averaged(torch.tensor([[1.0, 3.0, 5.0]]), 2)
    assert torch.allclose(parts, torch.tensor([[0.125, 0.375, 0.5]]))
    tile = GdnVariant(norm_tile=8)
    row = torch.ones(1, 1, 12)
    assert torch.allclose(unit(row, Contract(), tile, TORCH), row * 8**-0.5)
    assert torch.equal(unit(row[..., :5], Contract(), tile, TORCH), unit(row[..., :5], Contract(), GdnVariant(), TORCH))
