"""The whole suite on a random model of two layers: what makes it pass, fail and stay open."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from audit import continuation, continuation_stack
from audit.cli import main
from audit.continuation import Options, finished
from audit.continuation_distance import Apart, Greedy
from audit.continuation_run import Found
from audit.continuation_stack import StackSpec, make_stack
from audit.render import write_report
from audit.report import Report
from faults.continuation import ENGINE_FAULTS
from lumotree.checkpoint import write_checkpoint
from lumotree.model_config import FULL, LINEAR, ModelConfig
from lumotree.random_weights import random_weights

CONFIG = ModelConfig(
    vocab=40, hidden=32, intermediate=32, layer_kinds=(LINEAR, FULL), hk=1, hv=2, dk=8, dv=8, q_heads=2, kv_heads=1,
    head_dim=8, rotary_dim=4, mtp_layers=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_checkpoint(made, CONFIG, random_weights(CONFIG, 3))
    return made


@pytest.fixture(scope="module")
def options(folder: Path) -> Options:
    return Options(StackSpec(str(folder)), drift=24, workers=1)


@pytest.fixture(scope="module")
def run(options: Options) -> continuation.Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuation_stack, "PROMPT", 36)  # a first chunk of 32 shares one page of 16
        return continuation.check(options)


def test_our_own_stack_passes_with_every_control_seen(run: continuation.Run) -> None:
    report = run.report
    assert report.verdict == "PASS" and not report.findings and not report.warnings
    assert {c.status for c in report.checks} == {"pass"}
    assert [(c.cells, c.bitwise_cells) for c in report.checks if c.id == "continue.cycles"] == [(126, 126)]
    facts = report.facts["continuation"]
    assert (facts["cycles"], facts["cycles_bitwise"], facts["greedy_same"]) == (126, 126, 126)
    assert all(len(ends) == 28 for ends in facts["ends"].values())
    assert len(report.controls) == len(ENGINE_FAULTS) == 9
    assert all(c.detected and c.cases == 2 and (c.ratio or 0) > 1 for c in report.controls)
    assert facts["pids"]["A"] != facts["pids"]["B"]
    assert facts["drift"]["same_tokens"] == 24 and not facts["drift"]["differences"]


def test_the_report_has_a_picture_and_says_it_in_words(run: continuation.Run, tmp_path: Path) -> None:
    paths = {p.name for p in write_report(run.report, tmp_path, run.frame)}
    assert {"report.json", "junit.xml", "summary.md", "drift.svg"} <= paths
    drawn = ElementTree.parse(tmp_path / "drift.svg").getroot()
    assert len([e for e in drawn.iter() if e.tag.endswith("polyline")]) == 1  # one recurrent layer
    assert "126 of 126 cycles bitwise" in (tmp_path / "summary.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "PASS"


def test_check_runs_the_suite_and_keeps_its_report_apart(
    run: continuation.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Options] = []
    monkeypatch.setattr(continuation, "check", lambda options: asked.append(options) or run)
    assert main(["check", "--suite", "continuation", "--seed", "4", "--report", str(tmp_path)]) == 0
    assert (asked[0].seed, asked[0].drift, asked[0].spec.backend) == (4, 500, "torch")
    assert (tmp_path / "drift.svg").exists()
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS  torch  continuation")


def changed(run: continuation.Run, options: Options, change: Callable[[Found], None]) -> Report:
    """The report that the run would have given, had it found something else."""
    assert run.found is not None
    found = copy.deepcopy(run.found)
    change(found)
    return finished(options, make_stack(options.spec), found, 0.0).report


def differ(found: Found, arm: str, name: str, cycle: int, surface: str, layer: int, distance: float) -> None:
    compared = found.compared[arm][name][cycle + 1]
    apart = compared.apart[surface]
    wrong = Apart(surface, distance, apart.cells, apart.bitwise - 1, layer, "recurrent", 3, 64)
    compared.apart[surface] = wrong


def test_one_cell_that_is_not_bitwise_fails_and_is_named(run: continuation.Run, options: Options) -> None:
    report = changed(run, options, lambda f: differ(f, "candidate", "repeat/p3", 4, "gdn", 0, 1e-9))
    failed = [c.id for c in report.checks if c.status == "fail"]
    assert report.verdict == "FAIL" and failed == ["continue.gdn", "continue.cycles"]
    first = report.findings[0]
    assert (first.check, first.case, first.layer) == ("continue.gdn", "repeat/p3 cycle 4", 0)
    assert first.reproduce.startswith("lumotree-audit continue --backend torch --seed 1 --checkpoint")


def test_the_published_envelope_alone_fails_only_from_its_bound_on(run: continuation.Run, options: Options) -> None:
    def status(distance: float) -> str:
        report = changed(run, options, lambda f: differ(f, "candidate", "cold/p1", 2, "conv", 0, distance))
        return next(c.status for c in report.checks if c.id == "continue.published")

    assert (status(0.039), status(0.041)) == ("pass", "fail")


def test_a_wrong_greedy_token_away_from_a_tie_fails(run: continuation.Run, options: Options) -> None:
    def wrong(margin: float) -> Callable[[Found], None]:
        def change(found: Found) -> None:
            row = found.compared["candidate"]["cold/p0"]
            row[2] = replace(row[2], greedy=Greedy(False, margin, 0.1))

        return change

    report = changed(run, options, wrong(0.3))
    assert [c.id for c in report.checks if c.status == "fail"] == ["continue.argmax"]
    assert changed(run, options, wrong(0.2)).verdict == "PASS"


def test_a_batch_that_differs_fails(run: continuation.Run, options: Options) -> None:
    report = changed(run, options, lambda f: differ(f, "batch", "mixed/p1", 3, "kv_new", 0, 1e-9))
    assert [c.id for c in report.checks if c.status == "fail"] == ["continue.batch"]
    assert report.findings[0].case == "mixed/p1 cycle 3"


def lose_control(found: Found) -> None:
    done, compared = found.controls[0]
    found.controls[0] = done, {n: [found.compared["candidate"]["cold/p0"][1]] * 3 for n in compared}


def same_process(found: Found) -> None:
    found.pids["B"] = found.pids["A"]


def unstable(found: Found) -> None:
    differ(found, "V", "cold/p0", 1, "gdn", 0, 0.3)


def no_ends(found: Found) -> None:
    found.scripts = [s for s in found.scripts if s.name != "cold/p2"]


def nothing_recorded(found: Found) -> None:
    found.recorded = None


OPEN: dict[str, tuple[Callable[[Found], None], str]] = {
    "a control goes unseen": (lose_control, "was not detected"),
    "one process for A and B": (same_process, "arm B ran in the process of arm A"),
    "native decoding differs from itself": (unstable, "native decoding differs from itself: gdn: 0.3"),
    "an end is not covered": (no_ends, "cold: no path ends at"),
    "nothing was recorded": (nothing_recorded, "nothing was recorded"),
}


@pytest.mark.parametrize("name", OPEN)
def test_a_run_without_power_is_inconclusive(name: str, run: continuation.Run, options: Options) -> None:
    change, reason = OPEN[name]
    report = changed(run, options, change)
    assert report.verdict == "INCONCLUSIVE" and any(reason in r for r in report.reasons)


def test_a_control_that_only_bits_see_is_told_as_one_that_the_envelope_lets_through(
    run: continuation.Run, options: Options
) -> None:
    def weaken(found: Found) -> None:
        for done, compared in found.controls:
            if done.task.name == "drafter state not rolled back":
                for cycle in (c for cycles in compared.values() for c in cycles):
                    for surface, apart in cycle.apart.items():
                        cycle.apart[surface] = replace(apart, distance=min(apart.distance, 0.001))

    report = changed(run, options, weaken)
    control = next(c for c in report.controls if c.fault.startswith("drafter state"))
    assert report.verdict == "PASS" and control.detected and (control.ratio or 0) < 1
    assert report.warnings == ("the published envelope alone would let through: drafter state not rolled back.drafter",)


def test_a_control_that_the_backend_refuses_is_seen(run: continuation.Run, options: Options) -> None:
    def refuse(found: Found) -> None:
        for done, _ in found.controls:
            if done.task.name == "kv remap off by one":
                done.refused = "kv_publish: no such page"

    control = next(c for c in changed(run, options, refuse).controls if c.fault.startswith("kv remap"))
    assert control.detected and control.by == "refused: kv_publish: no such page"


def outcome(found: Found) -> Any:
    return next(d.outcome for d in found.outcomes if d.task.kind == "cold")


GATES: dict[str, tuple[Callable[[Found], None], str]] = {
    "gate.inputs": (lambda f: outcome(f).account.wrong.append("tokens of row 3"), "INCONCLUSIVE"),
    "gate.import": (lambda f: outcome(f).readback.append("cold/p0: R"), "INCONCLUSIVE"),
    "gate.called": (lambda f: outcome(f).account.calls.update({("gdn_verify", 0): 1}), "INCONCLUSIVE"),
    "gate.elsewhere": (lambda f: outcome(f).touched.append("conv in cycle 2"), "FAIL"),
    "gate.drafts": (lambda f: outcome(f).drafts.append("cold/p0 cycle 2 row 3"), "FAIL"),
    "gate.prompt": (lambda f: differ(f, "candidate", "repeat/p0", -1, "gdn", 0, 1e-9), "FAIL"),
}


@pytest.mark.parametrize("gate", GATES)
def test_without_integrity_there_is_no_pass(gate: str, run: continuation.Run, options: Options) -> None:
    change, verdict = GATES[gate]
    report = changed(run, options, change)
    assert report.verdict == verdict
    assert [c.id for c in report.checks if c.status in ("fail", "inconclusive")] == [gate]


def test_a_model_without_a_head_is_judged_on_what_it_has(run: continuation.Run, options: Options) -> None:
    def headless(found: Found) -> None:
        found.head = False
        for compared in found.compared["candidate"].values():
            for cycle in compared:
                cycle.apart["drafter"] = Apart("drafter", 0.0, 0, 0)

    report = changed(run, options, headless)
    assert report.verdict == "PASS" and len(report.controls) == 7
    assert not {"continue.drafter", "gate.drafts"} & {c.id for c in report.checks}


def test_a_recording_with_another_verdict_than_live_is_a_finding(run: continuation.Run, options: Options) -> None:
    def fail(found: Found) -> None:
        assert found.recorded is not None
        first, *rest = found.recorded.checks
        wrong = replace(first, status="fail", bitwise_cells=0, note="1 of 1")
        found.recorded = replace(found.recorded, verdict="FAIL", reasons=("check failed",), checks=(wrong, *rest))

    report = changed(run, options, fail)
    check = next(c for c in report.checks if c.id == "continue.recorded")
    assert check.status == "fail" and "live PASS, offline FAIL" in check.note


def test_tokens_that_differ_in_the_long_run_fail(run: continuation.Run, options: Options) -> None:
    def differs(found: Found) -> None:
        found.drift = replace(found.drift, same=15)  # type: ignore[type-var]

    report = changed(run, options, differs)
    assert [c.id for c in report.checks if c.status == "fail"] == ["drift.tokens"]
    assert "15 of 24 tokens equal" in report.reasons[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--surface", "conv"], "expected NAME=BACKEND"),
        (["--surface", "rope=torch"], "expected one of gdn, conv, attention, got 'rope'"),
        (["--surface", "conv=nothing"], "backend 'nothing' is unknown"),
        (["--checkpoint", "/nowhere"], "/nowhere"),
        (["--backend", "nothing"], "backend 'nothing' is unknown"),
        (["--device", "abacus"], "expected a torch device"),
        (["--dump", "/nowhere", "--surface", "conv=torch"], "--surface belongs to live runs"),
        (["--dump", "/nowhere"], "expected a folder of recorded cycles"),
    ],
)
def test_bad_input_is_refused_with_the_reason(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["continue", *words]) == 2
    assert message in capsys.readouterr().err
