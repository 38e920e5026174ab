"""Each fault changes exactly what its statement says: a spy behind it sees the arguments that reach the backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from audit.cases import Case, CaseSpec
from audit.families import DIMS_MICRO
from audit.guard import tensors_of
from audit.stage import Stage
from faults import CONTROLS, Fault, Faulty, Scene
from faults.batch import cycle_before
from faults.paths import changed, paths_of, to_sibling
from faults.topology import predecessor_parents
from lumotree.backends.batch import accepted_paths
from lumotree.backends.protocol import SHARED_OPERANDS, SURFACES
from lumotree.backends.torch_backend import TorchBackend
from lumotree.tree_named import chain, comb, star

INNER = TorchBackend()
METHODS = [m for pair in SURFACES.values() for m in pair]


class Spy:
    """The torch backend, which copies every argument of every call before it runs."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.contract = INNER.contract
        for name in (*METHODS, "native_step", "allocate", "export"):
            setattr(self, name, self._recording(name))

    def _recording(self, name: str) -> Any:
        def method(*args: Any) -> Any:
            if name in METHODS:
                self.calls.append((name, tuple(copied(a) for a in args)))
            return getattr(INNER, name)(*args)

        return method


def copied(x: Any) -> dict[str, Any]:
    if isinstance(x, int | list | range):
        return {"": x if isinstance(x, int) else list(x)}
    return {name: t.clone() for name, t in tensors_of(x).items()}


def make_case() -> Case:
    trees = ("random:9", "comb:3")
    return Case(CaseSpec("case", DIMS_MICRO, trees, (5, 3), (7, 202, 1), inactive_fraction=0.3), INNER.contract)


def calls_under(wrap: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Calls that reach the backend in one verification and one publication of a path that ends among siblings."""
    torch.manual_seed(0)
    spy, case = Spy(), make_case()
    stage = Stage(wrap(spy), case)
    stage.verify()
    stage.publish([case.trees[0].path(case.trees[0].active_rows[-1]), (0, 2, 4)])
    return spy.calls


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(
            a.nan_to_num(7.5) if a.is_floating_point() else a, b.nan_to_num(7.5) if b.is_floating_point() else b
        )
    return a == b


def changed_arguments(one: tuple[Any, ...], two: tuple[Any, ...]) -> set[str]:
    return {
        f"{position}.{name}"
        for position, (a, b) in enumerate(zip(one, two, strict=True))
        for name in a
        if not same(a[name], b[name])
    }


ROWS = {"gdn": ("q", "k", "v", "a", "b"), "conv": ("x",), "attention": ("q", "k", "v")}
#: fault kind -> (method index, what differs among its arguments; a prefix). verify: ops pool batch ws out layer.
DIFFERS: dict[str, set[str]] = {
    "wrong_parent": {"2.parent", "2.plan"},
    "stale_metadata": {"2.parent", "2.plan", "2.position"},
    "poisoned_inactive": {"0."},
    "sibling_published": {"2.rows"},
    "kv_remap_off_by_one": {"1.prefix_len"},
}
NOTHING = ("state_not_published", "history_not_published", "kv_not_published")


@pytest.mark.parametrize("fault", CONTROLS.values(), ids=lambda f: f.id)
def test_a_control_changes_what_it_says_in_its_own_method_and_nothing_else(fault: Fault) -> None:
    clean, faulty = calls_under(lambda inner: inner), calls_under(fault.wrap)
    verify, publish = SURFACES[fault.surface]
    own = verify if fault.stage == "verify" else publish
    if fault.kind in NOTHING:
        assert [name for name, _ in faulty] == [name for name, _ in clean if name != publish]
        return
    if fault.kind == "swapped_rings":
        _check_rings(verify, clean, faulty)
        return
    assert [name for name, _ in faulty] == [name for name, _ in clean]
    for (name, before), (_, after) in zip(clean, faulty, strict=True):
        changed = changed_arguments(before, after)
        if name != own:
            continue  # state downstream of the fault may differ; arguments of other calls are checked below
        changed = {c for c in changed if not c.startswith(("3.", "4."))}  # workspace and output are results
        wanted = DIFFERS[fault.kind]
        assert changed and all(any(c.startswith(w) for w in wanted) for c in changed), changed
        assert all(any(c.startswith(w) for c in changed) for w in wanted), changed
    others = [(a, b) for a, b in zip(clean, faulty, strict=True) if a[0] != own]
    for (_, before), (_, after) in others:  # operands, metadata and accepted paths of all other calls are untouched
        metadata = (0, 2) if len(before) == 6 else (1, 2)
        assert not {c for c in changed_arguments(before, after) if int(c[0]) in metadata}


def _check_rings(verify: str, clean: list[Any], faulty: list[Any]) -> None:
    """Verified once with the right operands (so outputs are right) and once more with rolled ones, output discarded."""
    before = [args for name, args in clean if name == verify]
    after = [args for name, args in faulty if name == verify]
    assert len(before) == 1 and len(after) == 2
    assert not changed_arguments(before[0], after[0])
    for name, value in after[1][0].items():
        expected = before[0][0][name] if name in SHARED_OPERANDS else before[0][0][name].roll(1, 0)
        assert torch.equal(value, expected), name
    assert [n for n, _ in faulty if n != verify] == [n for n, _ in clean if n != verify]


@pytest.mark.parametrize("fault", [f for f in CONTROLS.values() if f.kind == "poisoned_inactive"], ids=lambda f: f.id)
def test_poison_fills_every_inactive_row_of_every_per_row_operand_and_no_other(fault: Fault) -> None:
    verify = SURFACES[fault.surface][0]
    active = make_case().active
    clean = next(args[0] for name, args in calls_under(lambda inner: inner) if name == verify)
    ops = next(args[0] for name, args in calls_under(fault.wrap) if name == verify)
    for name, value in ops.items():
        if name in SHARED_OPERANDS:
            assert torch.equal(value, clean[name])
        else:
            assert value[~active].isnan().all() and torch.equal(value[active], clean[name][active])
    assert set(ops) - SHARED_OPERANDS == set(ROWS[fault.surface])


@pytest.mark.parametrize("fault", CONTROLS.values(), ids=lambda f: f.id)
def test_a_control_leaves_its_arguments_alone(fault: Fault) -> None:
    case = make_case()
    stage = Stage(fault.wrap(INNER), case)
    stage.verify()
    assert stage.inputs.changed() == []
    paths = [t.path(t.leaves[0]) for t in case.trees]
    stage.publish(paths)
    assert stage.inputs.changed() == []


def test_predecessor_parents_are_the_active_row_before() -> None:
    batch = make_case().batch
    parents = predecessor_parents(batch)
    lo, hi = batch.cu_rows.tolist()[:2]
    active = [r for r in range(lo, hi) if batch.active[r]]
    assert [int(parents[r]) for r in active] == [-1, *active[:-1]]
    inactive = ~batch.active
    assert torch.equal(parents[inactive], batch.parent[inactive])


def test_sibling_paths_end_in_an_active_sibling_and_keep_the_rest() -> None:
    batch = make_case().batch
    tree = make_case().trees[1]  # the comb: row 5 has no sibling with its parent 4, rows 3 and 4 are siblings
    wrong, _ = changed(to_sibling)(accepted_paths([(0,), (0, 2, 4)]), batch)
    assert paths_of(wrong) == [[0], [0, 2, 3]]
    assert tree.parents[3] == tree.parents[4] == 2
    alone, same = changed(to_sibling)(accepted_paths([(), (0, 2, 4, 5)]), batch)
    assert paths_of(alone) == [[], [0, 2, 4, 5]] and same is batch


def test_the_cycle_before_was_a_star_one_position_earlier() -> None:
    case = make_case()
    old = cycle_before(case.batch)
    assert set(old.parent.tolist()) == {-1, 0}
    depth = (case.batch.parent >= 0).int()
    prefix = case.batch.prefix_len[case.batch.row_request.long()]
    assert torch.equal(old.position, prefix + depth - 1)
    start = cycle_before(replace(case.batch, prefix_len=torch.zeros_like(case.batch.prefix_len)))
    assert int(start.position.min()) == 0


@pytest.mark.parametrize(
    ("tree", "kinds"),
    [
        (chain(1), set()),
        (chain(4), {"swapped_rings", "stale_metadata"}),
        (star(4), {"swapped_rings", "wrong_parent", "sibling_published", "stale_metadata.attention"}),
        (comb(3), {"swapped_rings", "wrong_parent", "sibling_published", "stale_metadata"}),
    ],
    ids=["root alone", "chain", "star", "comb"],
)
def test_a_fault_knows_which_trees_it_changes_anything_on(tree: Any, kinds: set[str]) -> None:
    always = {*NOTHING, "kv_remap_off_by_one"}
    for fault in CONTROLS.values():
        expected = fault.kind in kinds | always or fault.id in kinds
        assert fault.reaches(Scene([tree], DIMS_MICRO)) == expected, fault.id


def test_a_wrapper_passes_everything_else_through() -> None:
    wrapped = Faulty(INNER, gdn_verify=len)
    assert wrapped.gdn_verify is len and wrapped.name == "torch" and wrapped.contract is INNER.contract
    with pytest.raises(AttributeError):
        _ = wrapped.no_such_method
