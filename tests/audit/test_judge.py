"""What the judge does at its edges: ratios, places, what it leaves out, what it must not forgive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from audit.cases import Case
from audit.errors_of import state_errors
from audit.judge import Judge
from audit.stage import Stage
from audit.tally import CHECKS, CLAIMED, KEPT, STRICT, Place, Tallies, Tally, to_check
from audit.truth import find_truth
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract

BACKEND = TorchBackend()


@pytest.fixture
def verified(engine: Any) -> tuple[Stage, Judge]:
    case = Case(engine.spec(trees=("random:9",), inactive_fraction=0.3), BACKEND.contract)
    stage = Stage(BACKEND, case)
    judge = Judge(stage, find_truth(BACKEND, case, stage.surfaces), Tallies())
    judge.native()
    stage.verify()
    return stage, judge


def failed(judge: Judge) -> set[str]:
    return {t.check for t in judge.tallies.failures()} - {"gdn.paired"}


def test_outputs_of_inactive_rows_are_not_compared(verified: tuple[Stage, Judge]) -> None:
    stage, judge = verified
    for x in stage.out[0].values():
        x[~stage.case.active] = float("nan")
    judge.outputs()
    assert failed(judge) == set()
    assert judge.tallies["gdn.out.bitwise"].cells == int(stage.case.active.sum()) == 7


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_single_wild_element_fails_bitwise_and_derived_at_its_row_and_head(
    value: float, verified: tuple[Stage, Judge]
) -> None:
    stage, judge = verified
    row = stage.case.trees[0].active_rows[-1]
    stage.out[0]["gdn"][row, 2, 4] = value
    judge.outputs()
    assert failed(judge) == {"gdn.out.bitwise", "gdn.out.derived"}
    for check in failed(judge):
        (place,) = judge.tallies[check].places
        assert (place.request, place.layer, place.row, place.head) == (0, 0, row, 2)
    assert judge.tallies["gdn.out.derived"].worst > 1e6


def test_the_sign_of_a_zero_is_a_bit(verified: tuple[Stage, Judge]) -> None:
    stage, judge = verified
    stage.verify()
    stage.out[0]["conv"][0, 0] = -0.0
    judge.truth[0, 0].native.conv_out[0][0] = 0.0
    judge.outputs()
    assert "conv.out.bitwise" in failed(judge)


def test_published_states_are_taken_from_export_and_kv_from_the_cache(verified: tuple[Stage, Judge]) -> None:
    stage, judge = verified
    tree = stage.case.trees[0]
    path = tree.path(tree.leaves[-1])
    stage.publish([path])
    judge.published([path])
    assert failed(judge) == set()
    judge.published([path[:-1]])  # the state is that of the whole path, not of its parent
    assert failed(judge) == {
        "gdn.state.bitwise", "gdn.state.derived", "conv.state.bitwise", "attention.untouched",
    }  # fmt: skip


@pytest.mark.parametrize("bits", [1, 2**10])
def test_the_state_is_held_against_the_oracle_even_where_the_chain_agrees(
    bits: int, verified: tuple[Stage, Judge]
) -> None:
    """The chain is moved together with the state: bitwise is blind, and the derived rung sees what is large enough."""
    stage, judge = verified
    row = 0
    stage.publish([(row,)])
    slot = stage.case.state_slots[0]
    where = stage.case.pools.recurrent[0, slot].abs().flatten().argmax()
    for state in (stage.case.pools.recurrent[0, slot], judge.truth[0, 0].native.recurrent[row]):
        state.view(torch.int32).view(-1)[where] += bits
    truth = judge.truth[0, 0]
    errors = state_errors(truth.native.recurrent[row], truth.gdn_oracle.state(row), truth.gdn[row].state_bound)
    truth.gdn[row] = replace(truth.gdn[row], native=errors)
    judge.published([(row,)])
    assert failed(judge) == (set() if bits == 1 else {"gdn.state.derived"})


def test_rewinding_brings_back_pools_and_workspace(verified: tuple[Stage, Judge]) -> None:
    stage, judge = verified
    path = stage.case.trees[0].path(stage.case.trees[0].leaves[-1])
    for _ in range(2):  # published twice on top of each other it would be wrong
        stage.rewind()
        stage.publish([path])
        judge.published([path])
    assert failed(judge) == set()
    stage.ws.k.zero_()
    stage.rewind()
    assert stage.recorded.changed() == []


def test_a_check_line_follows_its_tally() -> None:
    good, bad, none = Tally("gdn.out.bitwise", 5, 5), Tally("gdn.out.derived", 5, 0, 1, 3.0), Tally("gdn.exact")
    assert [to_check(t, Contract()).status for t in (good, bad, none)] == ["pass", "fail", "inconclusive"]
    assert to_check(bad, Contract()).note == "1 of 5 cells outside" and to_check(none, Contract()).note
    assert to_check(bad, Contract()).bitwise_cells is None and to_check(good, Contract()).bitwise_cells == 5


@pytest.mark.parametrize("check", CHECKS)
def test_an_algebra_backend_is_judged_by_all_but_what_it_does_not_claim(check: str) -> None:
    tally = Tally(check, 4, 3, 1, 2.0)
    strict = CHECKS[check][2] in STRICT
    assert to_check(tally, Contract()).status == ("fail" if strict else "info")
    assert to_check(tally, Contract(claims="algebra")).status == ("fail" if strict and check not in CLAIMED else "info")


def test_one_surface_may_claim_less_than_the_others() -> None:
    mixed = Contract(algebra=("gdn",))
    lines = [to_check(Tally(f"{s}.out.bitwise", 4, 3, 1), mixed).status for s in ("gdn", "conv", "attention")]
    assert lines == ["info", "fail", "fail"]


def test_failures_are_all_counted_but_only_some_places_kept_also_over_merges() -> None:
    one, two = Tallies(), Tallies()
    for tallies in (one, two):
        for row in range(KEPT + 3):
            tallies["gdn.exact"].add(1, 0, float(row))
            tallies["gdn.exact"].fail(Place("gdn.exact", "case", row=row))
    two["conv.exact"].add(1, 1)
    one.merge(two)
    assert one["gdn.exact"].failed == one["gdn.exact"].cells == 2 * (KEPT + 3)
    assert len(one["gdn.exact"].places) == KEPT and one["gdn.exact"].worst == KEPT + 2
    assert one["conv.exact"].bitwise == 1 and [t.check for t in one.failures()] == ["gdn.exact"]
    assert one.failures("conv") == []


@pytest.mark.parametrize("name", ["split_k", "sqrt_norm", "kv_layout", "wy"])
def test_right_kernels_that_are_not_bitwise_pass_on_what_applies(name: str, engine: Any) -> None:
    from lumotree.backends.loader import load_backend

    backend = load_backend(name)
    for fields in ({"dims": replace(engine.spec().dims, dk=16)}, {"regime": "large_gates"}):
        found, result = engine.run(backend, **fields)
        judged = {c for c in found if to_check(result.tallies[c], backend.contract).status == "fail"}
        assert judged == set()


def test_an_undeclared_variant_is_a_finding() -> None:
    """A kernel that rounds beta to bf16 but declares fp32 leaves the bound of the contract it declares."""
    from audit.cases import CaseSpec
    from audit.component import audit_case
    from audit.families import DIMS_MICRO

    kernel = TorchBackend(Contract(beta="bf16"))
    spec = CaseSpec("case", DIMS_MICRO, ("comb:3",), (5,), (7, 202, 1))
    honest = {t.check for t in audit_case(kernel, spec).tallies.failures()}
    lying = type("Lying", (), {"contract": Contract(), "__getattr__": lambda self, name: getattr(kernel, name)})()
    found = {t.check for t in audit_case(lying, spec).tallies.failures()}
    assert "gdn.native.derived" in found - honest
