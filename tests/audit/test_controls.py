"""Positive controls: each fault is seen by its own surface on a right backend, and a blind run does not pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import faults
from audit import assemble, controls
from audit.cases import Case
from audit.component import CaseResult, audit_case
from audit.controls import Outcome, control_paths, summarise
from audit.report import decide
from audit.stage import Stage
from audit.truth import find_truth
from faults import CONTROLS, Faulty
from lumotree.backends.protocol import SURFACES
from lumotree.backends.torch_backend import TorchBackend
from lumotree.errors import PathError
from lumotree.tree_named import hydra27, star

INNER = TorchBackend()
#: Every fault of the catalogue is reached: branches, siblings, inactive rows, two requests.
FIELDS: dict[str, Any] = {
    "trees": ("random:9", "comb:3"), "prefixes": (5, 3), "inactive_fraction": 0.3, "control": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def clean() -> CaseResult:
    from audit.cases import CaseSpec
    from audit.families import DIMS_MICRO

    torch.set_num_threads(1)
    return audit_case(INNER, CaseSpec(id="case", dims=DIMS_MICRO, entropy=(7, 202, 1), **FIELDS))


@pytest.mark.parametrize("fault", CONTROLS.values(), ids=lambda f: f.id)
def test_each_fault_is_seen_by_a_check_of_its_own_surface_unless_it_is_harmless(fault: Any, clean: CaseResult) -> None:
    (outcome,) = [o for o in clean.outcomes if o.fault == fault.id]
    if fault.expect == "harmless":
        assert outcome.by is None and outcome.ratio is None
    else:
        assert outcome.by is not None and outcome.by.startswith(f"{fault.surface}.") and outcome.by in clean.tallies
        assert outcome.ratio is not None and outcome.ratio > 1


def test_a_verification_fault_is_seen_in_outputs_and_a_publication_fault_in_what_is_left(clean: CaseResult) -> None:
    for outcome in clean.outcomes:
        fault = CONTROLS[outcome.fault]
        if fault.expect == "detected":
            assert (".out." in str(outcome.by)) == (fault.stage == "verify"), outcome


def test_the_whole_catalogue_leads_to_as_many_controls_all_as_expected(clean: CaseResult) -> None:
    found = summarise(clean.outcomes, list(SURFACES))
    assert [c.fault for c in found] == list(CONTROLS)
    assert all(c.as_expected and c.cases == 1 for c in found)


@pytest.mark.parametrize("fault", CONTROLS, ids=str)
def test_a_fault_without_effect_goes_unseen_and_the_run_is_inconclusive(
    fault: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge is as good as blind to this fault: what should be wrong is right (or what is harmless is wrong)."""
    original = CONTROLS[fault]

    def harm(inner: Any) -> Any:
        def verify(ops: Any, pool: Any, batch: Any, ws: Any, out: Any, layer: int) -> None:
            getattr(inner, SURFACES[original.surface][0])(ops, pool, batch, ws, out, layer)
            out[0] = 0

        return Faulty(inner, **{SURFACES[original.surface][0]: verify})

    blind = replace(original, wrap=harm if original.expect == "harmless" else Faulty)
    monkeypatch.setattr(controls, "CONTROLS", {fault: blind})
    _, result = engine.run(INNER, **FIELDS)
    (outcome,) = result.outcomes
    assert (outcome.by is None) == (original.expect == "detected")
    (control,) = summarise(result.outcomes, list(SURFACES))
    assert not control.as_expected and control.detected == (original.expect == "harmless")
    checks = assemble.main_checks(result.tallies, INNER.contract)
    verdict, reasons = decide(checks, [control], {"gdn": "covered"}, controls_required=False)
    assert verdict == "INCONCLUSIVE" and any(fault in r for r in reasons)


def test_one_case_that_reaches_a_fault_and_does_not_see_it_spoils_the_control() -> None:
    seen, unseen = (
        Outcome("wrong_parent.gdn", "a", "gdn.out.bitwise", 4.0),
        Outcome("wrong_parent.gdn", "b", None, None),
    )
    by_fault = {c.fault: c for c in summarise([seen, unseen], ["gdn"])}
    assert not by_fault["wrong_parent.gdn"].detected and by_fault["wrong_parent.gdn"].cases == 2
    assert by_fault["state_not_published.gdn"].cases == 0 and not by_fault["state_not_published.gdn"].as_expected
    assert set(by_fault) == {f for f in CONTROLS if f.endswith(".gdn")}


def test_one_flagged_case_spoils_a_harmless_control() -> None:
    quiet, loud = (Outcome("poisoned_inactive.conv", c, by, None) for c, by in (("a", None), ("b", "conv.out.bitwise")))
    (one,) = [c for c in summarise([quiet, loud], ["conv"]) if c.fault == "poisoned_inactive.conv"]
    assert one.detected and one.by == "conv.out.bitwise" and not one.as_expected


def test_the_least_ratio_is_reported() -> None:
    outcomes = [Outcome("wrong_parent.conv", c, "conv.out.bitwise", r) for c, r in (("a", 50.0), ("b", 3.0))]
    (one,) = [c for c in summarise(outcomes, ["conv"]) if c.cases]
    assert one.detected and one.ratio == 3.0


def test_a_backend_that_refuses_a_fault_has_seen_it(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(inner: Any) -> Any:
        def gdn_publish(*args: Any) -> None:
            raise PathError("row=3 has parent 0")

        return Faulty(inner, gdn_publish=gdn_publish)

    fault = replace(CONTROLS["sibling_published.gdn"], wrap=refusing)
    monkeypatch.setattr(controls, "CONTROLS", {fault.id: fault})
    _, result = engine.run(INNER, **FIELDS)
    assert result.outcomes[0].by == "refused: row=3 has parent 0"


def test_a_fault_that_the_trees_do_not_reach_is_not_counted(engine: Any) -> None:
    _, result = engine.run(INNER, trees=("chain:1",), control=True)
    reached = {o.fault.partition(".")[0] for o in result.outcomes}
    expected = {"state_not_published", "history_not_published", "kv_not_published", "kv_remap_off_by_one"}
    assert reached == expected
    assert all(o.by for o in result.outcomes)


def test_controls_leave_the_case_as_it_was(engine: Any) -> None:
    case = Case(engine.spec(**FIELDS), INNER.contract)
    stage = Stage(INNER, case)
    truth = find_truth(INNER, case, stage.surfaces)
    stage.verify()
    stage.reset()
    controls.run_controls(INNER, stage, truth)
    assert stage.before.changed() == [] and stage.inputs.changed() == []


def test_a_partial_backend_gets_the_controls_of_its_surfaces(engine: Any) -> None:
    missing = {m: None for s in ("conv", "attention") for m in SURFACES[s]}
    _, result = engine.run(Faulty(INNER, **missing), **FIELDS)
    assert {o.fault for o in result.outcomes} == {f for f in CONTROLS if f.endswith(".gdn")}
    assert all((o.by is None) == (CONTROLS[o.fault].expect == "harmless") for o in result.outcomes)


def test_rounds_of_control_paths_end_deep_among_siblings_and_at_the_root() -> None:
    (deep,), (sibling,), (root,) = control_paths([hydra27()])
    assert len(deep) == 12 and root == (0,)
    assert len(hydra27().active_children(sibling[-2])) > 1
    assert control_paths([star(3)]) == [[(0, 1)], [(0, 2)], [(0,)]]


def test_the_catalogue_is_complete() -> None:
    kinds = {
        "wrong_parent", "sibling_published", "state_not_published", "history_not_published", "kv_not_published",
        "kv_remap_off_by_one", "stale_metadata", "swapped_rings", "poisoned_inactive",
    }  # fmt: skip
    assert {f.kind for f in faults.CONTROLS.values()} >= kinds
