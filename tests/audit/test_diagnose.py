"""The diagnosis names the fault that was put in, says what it cannot tell apart, and does not invent a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from audit import cli, diagnose_eval, suite
from audit.diagnose import EXPLAINS, LEAD, Known, diagnose, diagnose_surface
from audit.diagnose_eval import Verdict, evaluate, run_evaluation, summary, to_report
from audit.families import SHAPES, family
from audit.fault_cases import ladder
from audit.fault_trial import alone
from audit.recording import OtherBitsError, apart, record, reproduces
from audit.render.diagnosis import lines
from faults import CATALOGUE, Faulty
from faults.outputs import noise
from faults.paths import changed, short_from
from faults.variant import GdnVariant
from faults.variant_backend import variant
from faults.wrap import on_publish, on_verify
from lumotree.backends.reference import ReferenceBackend
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.errors import PathError

INNER, OTHER = TorchBackend(), ReferenceBackend()
SPECS = list(ladder(4))


@pytest.fixture(scope="module")
def known() -> dict[str, Known]:
    torch.set_num_threads(1)
    return {s: Known("torch", Contract(), s) for s in ("gdn", "conv", "attention")}


@pytest.fixture
def few_hypotheses(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what does not depend on the hypotheses: an unknown defect is held against all of them in one test alone."""
    few = ("taps_reversed.conv", "flat_tree.conv")
    monkeypatch.setattr("audit.diagnose.CATALOGUE", {name: CATALOGUE[name] for name in few})


def found(fault: str, known: dict[str, Known], inner: Any = INNER) -> Any:
    surface = CATALOGUE[fault].surface
    return diagnose_surface(lambda: CATALOGUE[fault].wrap(inner), surface, SPECS, [known[surface]])


@pytest.mark.parametrize("fault", ["taps_reversed.conv", "wrong_parent.conv", "history_one_older.conv"])
def test_the_fault_is_named_by_its_bits(fault: str, known: dict[str, Known]) -> None:
    d = found(fault, known)
    assert d.how == "bitwise" and {h.fault for h in d.group} == {fault} and d.case == SPECS[0].id
    assert d.place["request"] == 0 and d.check.startswith("conv.")


@pytest.mark.parametrize("fault", ["beta_twice.gdn", "commit_by_depth.gdn"])
def test_the_fault_is_named_in_a_kernel_that_shares_no_bits_with_ours(
    fault: str, known: dict[str, Known], monkeypatch: Any
) -> None:
    several = [f for f in CATALOGUE.values() if f.surface == "gdn" and not f.knob][
        ::4
    ]  # all of them take half a minute
    monkeypatch.setattr("audit.diagnose.CATALOGUE", {f.id: f for f in [*several, CATALOGUE[fault]]})
    d = found(fault, known, OTHER)
    assert d.how == "distance" and d.base == "torch" and {h.fault for h in d.group} == {fault}
    assert d.group[0].left < 1e-3 and all(d.group[0].left < h.left <= LEAD for h in d.near)


@pytest.mark.parametrize(
    ("wrap", "label"),
    [
        (variant("gdn", GdnVariant(eps=1e-5)), "eps_larger.gdn at 1e-05"),
        (variant("gdn", GdnVariant(linear_above=4.0)), "softplus_early.gdn at 4"),
        (on_publish("gdn", accepted=changed(short_from(3))), "short_from.gdn at 3"),
    ],
    ids=["epsilon", "softplus", "short path"],
)  # fmt: skip
def test_the_size_of_a_defect_is_named_too(wrap: Any, label: str, known: dict[str, Known], monkeypatch: Any) -> None:
    kinds = ("eps", "softplus", "short_from", "one_short", "three_rows", "gate_twice", "scale")
    own = {f.id: f for f in CATALOGUE.values() if f.surface == "gdn" and f.kind.startswith(kinds)}
    monkeypatch.setattr("audit.diagnose.CATALOGUE", own)
    some = [s for s in SPECS if s.id.endswith(("comb", "deep", "mid_gates", "tiny_keys"))]
    d = diagnose_surface(lambda: wrap(OTHER), "gdn", some, [known["gdn"]])
    assert d is not None and d.how == "distance" and [h.label for h in d.group] == [label]


def test_where_the_first_case_names_nothing_the_one_with_the_largest_deviation_is_asked(
    known: dict[str, Known], monkeypatch: Any
) -> None:
    def faint(inner: Any) -> Any:
        """Right but for one element where the other case's fault is not."""
        return on_verify("conv", after=lambda done: done.out[-1, -1].add_(0.01))(inner)

    wraps = iter([faint, *[CATALOGUE["flat_tree.conv"].wrap] * 8])
    monkeypatch.setattr("audit.diagnose.CATALOGUE", {k: CATALOGUE[k] for k in ("taps_reversed.conv", "flat_tree.conv")})
    d = diagnose_surface(lambda: next(wraps)(INNER), "conv", SPECS[:2], [known["conv"]])
    assert d is not None and d.how == "bitwise" and d.case == SPECS[1].id
    assert [h.label for h in d.group] == ["flat_tree.conv"]


def test_hypotheses_that_agree_on_the_failing_case_are_told_apart_by_another(known: dict[str, Known]) -> None:
    d = found("reads_slot_zero.conv", known)
    assert {h.fault for h in d.group} == {"reads_slot_zero.conv"}
    ruled_out = [label for labels in d.told_apart.values() for label in labels]
    assert "reads_batch_index.conv" in ruled_out and set(d.told_apart) <= set(d.cases)


def test_the_place_is_the_first_row_that_is_wrong_parents_before_children(
    known: dict[str, Known], few_hypotheses: None
) -> None:
    def wrap() -> Any:
        def verify(ops: Any, pool: Any, batch: Any, ws: Any, out: torch.Tensor, layer: int) -> None:
            INNER.conv_verify(ops, pool, batch, ws, out, layer)
            out[3:6] += 1

        return Faulty(INNER, conv_verify=verify)

    d = diagnose_surface(wrap, "conv", SPECS[:1], [known["conv"]])
    assert d is not None and d.place["row"] == 3 and d.check == "conv.out.bitwise"


def test_an_unknown_defect_is_said_to_be_unknown(known: dict[str, Known]) -> None:
    def wrap() -> Any:
        def verify(ops: Any, pool: Any, batch: Any, ws: Any, out: torch.Tensor, layer: int) -> None:
            INNER.conv_verify(ops, pool, batch, ws, out, layer)
            out[batch.active] = out[batch.active].flip(1) * 3

        return Faulty(INNER, conv_verify=verify)

    d = diagnose_surface(wrap, "conv", SPECS[:3], [known["conv"]])
    assert d is not None and d.how == "unknown" and not d.group and not d.near
    text = "\n".join(lines(d.as_dict(), "x", 1))
    assert "  unknown defect: " in text and "next:" not in text and "leaves" not in text


def test_a_fault_that_explains_half_of_an_unknown_defect_is_named_as_a_lead(
    known: dict[str, Known], monkeypatch: Any
) -> None:
    monkeypatch.setattr("audit.diagnose.CATALOGUE", {"output_scaled.conv": CATALOGUE["output_scaled.conv"]})
    d = diagnose_surface(lambda: on_verify("conv", after=noise(0.022))(INNER), "conv", SPECS[:1], [known["conv"]])
    assert d is not None and d.how == "unknown" and not d.group
    assert [h.label for h in d.near] == ["output_scaled.conv at 0.03"] and EXPLAINS < d.near[0].left <= LEAD
    text = "\n".join(lines(d.as_dict(), "x", 1))
    assert "unknown defect" in text and "next: output_scaled.conv at 0.03 (leaves" in text


def test_a_right_backend_has_nothing_to_diagnose() -> None:
    assert diagnose(lambda: INNER, 4, ["conv"], SPECS[:4]) == []


def test_a_backend_that_refuses_a_case_is_diagnosed_from_what_it_did_before(
    known: dict[str, Known], few_hypotheses: None
) -> None:
    def wrap() -> Any:
        def publish(*args: Any) -> None:
            raise PathError("no")

        return Faulty(INNER, conv_publish=publish)

    d = diagnose_surface(wrap, "conv", SPECS[:1], [known["conv"]])
    assert d is not None and d.check == "refused" and d.place == {}


def test_a_recording_stops_at_the_first_call_that_leaves_other_bits() -> None:
    clean = record(alone(INNER, "conv"), SPECS[0])
    wrong = alone(CATALOGUE["flat_tree.conv"].wrap(INNER), "conv")
    with pytest.raises(OtherBitsError, match="conv_verify, left other bits"):
        record(wrong, SPECS[0], clean)
    assert not reproduces(wrong, SPECS[0], clean) and reproduces(alone(INNER, "conv"), SPECS[0], clean)
    assert clean.agreement(clean) == 1.0 and apart(clean.vector(clean), clean.vector(clean)) == 0.0
    assert record(wrong, SPECS[0]).agreement(clean) < 1.0


def test_the_lines_name_defect_case_and_command(known: dict[str, Known]) -> None:
    text = "\n".join(lines(found("reads_slot_zero.conv", known).as_dict(), "my:Kernel", 9))
    for part in ("reads_slot_zero.conv: verification starts from slot 0", "ruled out", "--backend my:Kernel --seed 9"):
        assert part in text


def test_an_evaluation_counts_what_was_named_and_what_was_not(monkeypatch: Any) -> None:
    only = {k: f for k, f in CATALOGUE.items() if k in ("taps_reversed.conv", "flat_tree.conv", "first_child.conv")}
    monkeypatch.setattr(diagnose_eval, "CATALOGUE", only)
    # Under all hypotheses: `test_an_evaluation_may_be_of_some_faults_under_all_hypotheses`, by the command.
    several = [f for f in CATALOGUE.values() if f.surface == "conv"][::4]
    monkeypatch.setattr("audit.diagnose.CATALOGUE", {f.id: f for f in [*several, *only.values()]})
    verdicts = evaluate("conv", "torch", "torch", 500_001)
    assert [v.fault for v in verdicts] == list(only) and all(v.named for v in verdicts if v.case)
    monkeypatch.setattr(diagnose_eval, "PAIRS", (("torch", "torch"),))
    monkeypatch.setattr(diagnose_eval, "FAULTS_OF_A_JOB", 2)
    assert run_evaluation(1, 0, 500_001) == verdicts  # the same in parts
    monkeypatch.undo()
    wrong = Verdict("a.conv", "conv", "torch", None, 1, "case", "distance", ("b.conv",))
    counted = summary([*verdicts, wrong, replace(wrong, case=None)])
    assert counted["diagnosed"] == len([v for v in verdicts if v.case]) + 1 and counted["not_failing"] == ["a.conv"]
    assert counted["unnamed"][0]["fault"] == "a.conv" and counted["confusion"]["a.conv"] == {"b.conv": 1}
    report = to_report([*verdicts, wrong], "command", 1.0)
    assert report.verdict == "FAIL" and "wanted 95%" in report.checks[1].note  # one of four is wrong
    assert report.checks[0].status == "inconclusive"


def test_an_evaluation_may_be_of_some_faults_under_all_hypotheses(capsys: Any) -> None:
    assert cli.main(["diagnose", "--evaluate", "1", "--workers", "0", "--faults", "taps_reversed"]) == 0
    out = capsys.readouterr().out
    assert "diagnosis  2 cells judged" in out and "gdn not covered" in out
    assert cli.main(["diagnose", "--evaluate", "1", "--faults", "taps_reversed", "--faults", "no_such"]) == 2
    assert "no fault's id contains 'no_such'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--faults", "taps_reversed"], "--faults says how --evaluate measures, expected --evaluate N with it"),
        (["--workers", "0"], "--workers says how --evaluate measures"),
        (["--report", "out"], "--report says how --evaluate measures"),
        (["--evaluate", "1", "--backend", "no:such"], "--backend does not go with --evaluate"),
        (["--evaluate", "1", "--only", "nope"], "--only does not go with --evaluate"),
        (["--evaluate", "1", "--surface", "gdn"], "--surface does not go with --evaluate"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(words: list[str], message: str, capsys: Any) -> None:
    assert cli.main(["diagnose", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_command_prints_the_name_and_ends_with_1(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "kernel_under_fault.py").write_text(
        "from faults import CATALOGUE\nfrom lumotree.backends.torch_backend import TorchBackend\n"
        "def Kernel(): return CATALOGUE['taps_reversed.conv'].wrap(TorchBackend())\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["diagnose", "--backend", "kernel_under_fault:Kernel", "--surface", "conv"]) == 1
    out = capsys.readouterr().out
    assert "taps_reversed.conv: taps are applied newest first" in out.replace("\n", " ")
    assert cli.main(["diagnose", "--surface", "conv"]) == 0
    assert "nothing to diagnose" in capsys.readouterr().out
    assert cli.main(["diagnose", "--only", "no/such"]) == 2
    assert "unknown case 'no/such'" in capsys.readouterr().err


def test_a_surface_that_the_backend_lacks_is_refused_and_not_called_right(
    capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    (tmp_path / "kernel_without_gdn.py").write_text(
        "from faults import Faulty\nfrom lumotree.backends.torch_backend import TorchBackend\n"
        "def Kernel(): return Faulty(TorchBackend(), gdn_verify=None, gdn_publish=None)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["diagnose", "--backend", "kernel_without_gdn:Kernel", "--surface", "gdn"]) == 2
    assert "has no gdn: no case could fail" in capsys.readouterr().err


def test_check_diagnoses_a_failure_and_reports_it(monkeypatch: Any) -> None:
    made: Callable[..., Any] = suite.load_backend
    monkeypatch.setattr(suite, "load_backend", lambda spec: CATALOGUE["taps_reversed.conv"].wrap(made("torch")))
    monkeypatch.setattr("audit.runner.load_backend", suite.load_backend)
    options = suite.Options(shape="micro", only=("micro/heldout/named/comb:3",), workers=0, diagnose=True)
    report = suite.check(options).report
    (surface,) = report.diagnosis["surfaces"]
    assert report.verdict == "FAIL" and surface["surface"] == "conv"
    assert [h["fault"] for h in surface["group"]] == ["taps_reversed.conv"]
    assert suite.check(replace(options, diagnose=False)).report.diagnosis == {}


def test_check_says_how_to_ask_for_the_case_that_fails_where_no_small_one_does(monkeypatch: Any) -> None:
    made: Callable[..., Any] = suite.load_backend
    monkeypatch.setattr(suite, "load_backend", lambda spec: CATALOGUE["taps_reversed.conv"].wrap(made("torch")))
    monkeypatch.setattr("audit.runner.load_backend", suite.load_backend)
    monkeypatch.setattr(suite, "diagnose", lambda *args: [])
    case = "micro/heldout/named/comb:3"
    report = suite.check(suite.Options(shape="micro", seed=3, only=(case,), workers=0, diagnose=True)).report
    assert any(w.endswith(f"lumotree-audit diagnose --backend torch --seed 3 --only {case}") for w in report.warnings)


@pytest.mark.parametrize("split", ["calibration", "heldout"])
def test_every_case_of_check_may_be_diagnosed(split: str, capsys: Any, monkeypatch: Any) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("audit.diagnose.diagnose", lambda make, seed, surfaces, specs: asked.extend(specs) or [])
    case = family(SHAPES["tiny"], split, 3)[0].id
    assert cli.main(["diagnose", "--seed", "3", "--only", case]) == 0
    assert asked[0].id == case and len(asked) > 1
