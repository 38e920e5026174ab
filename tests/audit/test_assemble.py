"""From case results to a report: nothing is lost, nothing that was not judged looks judged, doubts are raised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from audit import assemble
from audit.component import CaseResult, audit_case
from audit.envelope import EnvelopeResult
from audit.report import decide
from audit.tally import CHECKS, Place, Tallies
from faults import Faulty
from lumotree.backends.protocol import SURFACES
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.tree_named import named

INNER = TorchBackend()


def result_of(engine: Any, tallies: Tallies | None = None, **fields: Any) -> CaseResult:
    own = {k: fields.pop(k) for k in ("reach", "distinct", "statistics", "memory", "inactive_cells") if k in fields}
    return CaseResult(engine.spec(**fields), Tallies() if tallies is None else tallies, **own)


def full(failing: str | None = None) -> Tallies:
    """Three cells of every check, one of them outside for `failing`."""
    tallies = Tallies()
    for check in CHECKS:
        tallies[check].add(3, 3 - (check == failing), 2.0 if check == failing else 0.5)
        if check == failing:
            tallies[check].fail(Place(check, "case", 0, 1, 2, 3, 4.0, 5.0))
    return tallies


@pytest.mark.parametrize("check", CHECKS)
def test_a_failure_of_any_check_reaches_the_main_checks_the_small_group_the_findings_and_the_verdict(
    check: str, engine: Any
) -> None:
    tallies, contract = full(check), Contract()
    _, surface, rung = CHECKS[check]
    main = {c.id: c for c in assemble.main_checks(tallies, contract)}
    small = {c.id: c for c in assemble.small_checks(tallies, contract)}
    assert set(main) == set(CHECKS)
    if rung == "paired":
        assert main[check].status == "info" and f"small.{surface}.{rung}" not in small
        assert assemble.findings_of(tallies, contract, "run {case}") == []
        return
    assert [i for i, c in main.items() if c.status == "fail"] == [check]
    group = small[f"small.{surface}.{rung}"]
    assert group.status == "fail" and check in group.note
    assert [i for i, c in small.items() if c.status == "fail"] == [group.id]
    (finding,) = assemble.findings_of(tallies, contract, "run {case}")
    assert (finding.check, finding.request, finding.layer, finding.row, finding.head) == (check, 0, 1, 2, 3)
    assert (finding.got, finding.allowed, finding.reproduce) == (4.0, 5.0, "run case")
    for checks in (list(main.values()), list(small.values())):
        verdict, reasons = decide(checks, [], {surface: "covered"})
        assert verdict == "FAIL" and len(reasons) == 2 and "no positive control ran" in reasons


def test_groups_of_small_cases_count_every_cell() -> None:
    small = assemble.small_checks(full(), Contract())
    judged = [c for c, (_, _, rung) in CHECKS.items() if rung != "paired"]
    assert sum(c.cells for c in small) == 3 * len(judged) and all(c.status == "pass" for c in small)
    assert {c.bitwise_cells for c in small if c.rung == "derived"} == {None}


def test_an_algebra_backend_is_not_judged_on_what_it_does_not_claim() -> None:
    tallies, algebra = full("gdn.out.bitwise"), Contract(claims="algebra")
    assert {c.id: c.status for c in assemble.main_checks(tallies, algebra)}["gdn.out.bitwise"] == "info"
    assert all(c.status == "pass" for c in assemble.small_checks(tallies, algebra))
    assert assemble.findings_of(tallies, algebra, "{case}") == []


def test_results_of_several_cases_are_added(engine: Any) -> None:
    total = assemble.merged([result_of(engine, full()), result_of(engine, full("gdn.exact"))])
    assert total["gdn.exact"].cells == 6 and total["gdn.exact"].failed == 1 and total["conv.exact"].bitwise == 6
    assert assemble.merged([]) == {}


def test_no_result_at_all_is_inconclusive() -> None:
    checks = assemble.main_checks(assemble.merged([]), Contract())
    assert checks == [] and assemble.small_checks(Tallies(), Contract()) == []
    verdict, reasons = decide(checks, [], {"gdn": "covered"})
    assert verdict == "INCONCLUSIVE" and "zero cells judged" in reasons


def test_a_check_that_compared_no_cell_is_inconclusive() -> None:
    tallies = Tallies()
    assert tallies["gdn.exact"].cells == 0
    (main,), (small,) = assemble.main_checks(tallies, Contract()), assemble.small_checks(tallies, Contract())
    assert main.status == small.status == "inconclusive" and main.note == small.note == "no cell was compared"


def test_a_backend_that_covers_nothing_is_inconclusive() -> None:
    verdict, reasons = decide([], [], dict.fromkeys(SURFACES, "not covered"))
    assert verdict == "INCONCLUSIVE" and "the backend covers no surface" in reasons


def test_inactive_rows_are_reported_apart_and_judge_nothing(engine: Any) -> None:
    (line,) = assemble.inactive_check([result_of(engine, inactive_cells=4)] * 2, "gdn")
    assert (line.status, line.cells) == ("info", 8)
    assert assemble.inactive_check([result_of(engine)], "gdn") == []


def test_constant_outputs_are_a_doubt_even_if_everything_agrees(engine: Any) -> None:
    seen = {"gdn": True, "conv": False}
    doubts = assemble.doubts_of([result_of(engine, distinct=seen), result_of(engine, distinct=seen)], ["gdn", "conv"])
    assert doubts == ["outputs of conv are constant in every case"]
    assert (
        assemble.doubts_of([result_of(engine, distinct={"conv": True}), result_of(engine, distinct=seen)], ["conv"])
        == []
    )


def test_a_backend_of_zeros_is_found_constant(engine: Any) -> None:
    def conv_verify(ops: Any, pool: Any, batch: Any, ws: Any, out: Any, layer: int) -> None:
        out.zero_()

    _, result = engine.run(Faulty(INNER, conv_verify=conv_verify))
    assert result.distinct == {"gdn": True, "conv": False, "attention": True}


@pytest.mark.parametrize("reach", [0.0, 1.0, float("nan")])
def test_a_memory_horizon_too_short_is_a_doubt_of_its_shape(reach: float, engine: Any) -> None:
    far = result_of(engine, reach=50.0, dims=replace(engine.spec().dims, name="far"))
    doubts = assemble.doubts_of([far, result_of(engine, reach=reach), result_of(engine, reach=None)], [])
    assert assemble.doubts_of([result_of(engine, reach=reach)], [], horizon=False) == []
    assert len(doubts) == 1 and "memory horizon too short" in doubts[0] and "shape micro" in doubts[0]
    assert assemble.doubts_of([result_of(engine, reach=1.5)], []) == []


def test_inputs_that_forget_everything_are_found_by_measuring(engine: Any) -> None:
    short, long = (
        audit_case(INNER, engine.spec(regime=r, trees=("chain:6",), control=True)) for r in ("near_zero", "near_one")
    )
    assert short.tallies.failures() == []
    assert len(assemble.doubts_of([short], list(SURFACES))) == 1
    assert assemble.doubts_of([short, long], list(SURFACES)) == []
    horizon = assemble.horizon_of([short, long, result_of(engine, memory=(10.0, 30.0))])
    assert horizon["root_reach_micro"] == long.reach
    assert horizon["tokens_median_head"] == 10.0 and horizon["tokens_longest_head"] == 30.0


def test_envelope_results_become_checks() -> None:
    failed = EnvelopeResult("gdn.state.max", 48, 20, 11, 1.4, 0.25, "fail", (1, 2), "20 of 48 units above the bound")
    (check,) = assemble.envelope_checks([failed])
    assert (check.id, check.surface, check.rung, check.status) == ("envelope.gdn.state.max", "gdn", "envelope", "fail")
    assert check.bound == 0.25 and check.worst_ratio == 1.4 and "20 of 48" in check.note
    assert decide([check], [], {"gdn": "covered"})[0] == "FAIL"


def test_statistics_keep_the_order_of_units(engine: Any) -> None:
    units = [result_of(engine, unit=True, statistics={"gdn.out.max": v}) for v in (3.0, 1.0, 2.0)]
    assert assemble.unit_statistics([*units, result_of(engine)]) == {"gdn.out.max": [3.0, 1.0, 2.0]}
    records = assemble.cell_records(units)
    assert [r["value"] for r in records] == [3.0, 1.0, 2.0] and records[0]["surface"] == "gdn"


def test_missing_controls_show_in_a_full_run_and_not_in_a_partial_one(engine: Any) -> None:
    results = [result_of(engine)]
    everything = assemble.controls_of(results, list(SURFACES), partial=False)
    assert everything and all(c.cases == 0 and not c.as_expected for c in everything)
    assert assemble.controls_of(results, list(SURFACES), partial=True) == []
    for controls in (everything, []):
        assert decide(assemble.main_checks(full(), Contract()), controls, {"gdn": "covered"})[0] == "INCONCLUSIVE"


def test_the_hydra_unit_has_28_active_rows() -> None:
    tree = named("hydra27")
    assert (tree.n, len(tree.active_rows)) == (32, 28) and torch.as_tensor(tree.active.copy()).sum() == 28
