"""The detection matrix: states, first checks, rates with their intervals, exit codes, tables and picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

import faults
from audit import cli, fault_matrix
from audit.fault_cases import heldout_ladder, ladder
from audit.fault_matrix import Cases, Plan, Rate, Row, audit_fault, exact_interval, run_matrix
from audit.fault_programs import PROGRAMS, run_program
from audit.fault_report import missed, records, to_report
from audit.fault_sampler import VOCAB, sampler_rows
from audit.fault_trial import component_trial, own_failure, program_trial, relation_trial, set_coins
from audit.render.matrix import matrix_svg, print_matrix
from audit.report import from_json
from audit.sampler_cases import CAPTURED_VOCAB, captured_cases
from faults import BLIND, CATALOGUE, Fault, Faulty
from faults.sampler import SAMPLER_FAULTS
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import SURFACES
from lumotree.backends.sampler_loader import load_sampler
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.errors import PathError

INNER = TorchBackend()
PLAN = Plan("torch")


@pytest.fixture(scope="module")
def cases() -> Cases:
    return Cases(ladder(1), INNER.contract)


def unseen(fault: Fault) -> Fault:
    """A fault whose wrapper says that it changed something although nothing that is judged is wrong."""
    method = SURFACES[fault.surface][0]

    def wrap(inner: Any) -> Any:
        faulty = Faulty(inner)

        def verify(*args: Any) -> None:
            faulty.note("nothing of weight", 0, 1)
            getattr(inner, method)(*args)

        setattr(faulty, method, verify)
        return faulty

    return replace(fault, wrap=wrap)


def test_a_fault_is_caught_on_its_smallest_case_by_a_first_check(cases: Cases) -> None:
    row = audit_fault(INNER, CATALOGUE["wrong_parent.gdn"], cases, PLAN)
    assert row.state == "Caught" and row.case == "faults/heldout/comb" and row.first == "gdn.out.bitwise"
    assert row.checks["gdn.repeat"] == "Missed" and row.checks["gdn.sibling_added"] in ("Caught", "Missed")
    assert all(check.startswith("gdn.") for check in row.checks) and not row.missed and not row.rates


def test_a_reached_fault_that_no_check_sees_is_missed_and_the_run_fails(cases: Cases) -> None:
    row = audit_fault(INNER, unseen(CATALOGUE["wrong_parent.conv"]), cases, PLAN)
    assert row.state == "Missed" and row.first is None and set(row.checks.values()) == {"Missed"}
    assert len(row.missed) == len(list(cases.reaching(CATALOGUE["wrong_parent.conv"])))
    report = to_report([row], PLAN, "lumotree-audit faults", 1.0)
    assert report.verdict == "FAIL" and report.exit_code == 1
    assert "wrong_parent.conv Missed" in report.reasons[0]


def test_a_fault_that_changes_nothing_is_not_reached_and_nothing_is_claimed_for_it(cases: Cases) -> None:
    row = audit_fault(INNER, replace(CATALOGUE["wrong_parent.conv"], wrap=Faulty), cases, PLAN)
    assert row.state == "NotReached" and set(row.checks.values()) == {"NotReached"}
    assert to_report([row], PLAN, "command", 1.0).verdict == "INCONCLUSIVE"


def test_a_fault_that_the_kernel_refuses_is_a_crash_with_its_message(cases: Cases) -> None:
    def wrap(inner: Any) -> Any:
        def publish(*args: Any) -> None:
            raise PathError("row=3 has parent 0")

        return Faulty(inner, conv_publish=publish)

    row = audit_fault(INNER, replace(CATALOGUE["one_short.conv"], wrap=wrap), cases, PLAN)
    assert row.state == "Crashed" and "row=3 has parent 0" in row.note and missed([row]) == [row]


@pytest.mark.parametrize("own", ["wrong_parent.gdn", "state_not_published.gdn"])
def test_a_backend_that_is_wrong_by_itself_catches_nothing_and_the_run_fails(own: str) -> None:
    """Or any fault put on top of its own would be called caught."""
    wrong = CATALOGUE[own].wrap(INNER)
    cases = Cases(ladder(1), INNER.contract)
    row = audit_fault(wrong, replace(CATALOGUE["sibling_published.gdn"], wrap=Faulty), cases, PLAN)
    assert row.state == "Crashed" and "wrong by itself" in row.note
    assert to_report([row], PLAN, "command", 1.0).exit_code == 1
    other = audit_fault(wrong, CATALOGUE["sibling_published.conv"], cases, PLAN)
    assert other.state == "Caught"  # another surface, which is right


def test_a_harmless_change_is_equivalent_and_a_flagged_one_fails(cases: Cases) -> None:
    quiet = CATALOGUE["poisoned_inactive.conv"]
    assert audit_fault(INNER, quiet, cases, PLAN).state == "Equivalent"
    loud = replace(quiet, wrap=CATALOGUE["wrong_parent.conv"].wrap)
    row = audit_fault(INNER, loud, cases, PLAN)
    assert row.state == "Caught" and missed([row]) == [row]


def test_a_kernel_whose_formulas_are_out_of_reach_is_not_reached_by_arithmetic_faults(cases: Cases) -> None:
    row = audit_fault(object(), CATALOGUE["gate_twice.gdn"], cases, PLAN)
    assert row.state == "NotReached" and "cannot be changed from outside" in row.note


def test_a_relation_is_asked_only_about_its_surfaces() -> None:
    assert relation_trial(INNER, CATALOGUE["taps_reversed.conv"], "ungated", 1) is None
    trial = relation_trial(INNER, CATALOGUE["reads_neighbour.gdn"], "alone", 1)
    assert trial is not None and trial.state == "Caught" and trial.ran == ("gdn.alone",)


def test_rates_are_measured_on_held_out_cases_and_stop_when_a_size_is_hopeless(monkeypatch: Any, cases: Cases) -> None:
    seeds: list[int] = []
    inner = fault_matrix._heldout_case
    monkeypatch.setattr(fault_matrix, "_heldout_case", lambda f, c, seed: seeds.append(seed) or inner(f, c, seed))
    fault = CATALOGUE["output_scaled.conv"]
    row = audit_fault(INNER, fault, cases, replace(PLAN, full=True, size_trials=4))
    sizes = [r.size for r in row.rates]
    assert sizes == list(fault.knob.sizes)[: len(sizes)] and row.rates[0].probability == 1.0
    assert min(seeds) >= 10_000 and row.smallest is not None and row.smallest.probability >= 0.99
    plain = audit_fault(INNER, CATALOGUE["taps_reversed.conv"], cases, replace(PLAN, full=True, plain_trials=3))
    assert [(r.caught, r.reached, r.size) for r in plain.rates] == [(3, 3, None)]


def test_the_two_families_of_cases_share_no_seed_tree_or_size() -> None:
    one, two = list(ladder(1)), list(heldout_ladder(1))
    assert [s.id.rsplit("/", 1)[1] for s in one] == [s.id.rsplit("/", 1)[1] for s in two]
    assert not {s.entropy for s in one} & {s.entropy for s in two}
    assert not {s.dims for s in one} & {s.dims for s in two}
    assert not {(s.trees, s.prefixes) for s in one} & {(s.trees, s.prefixes) for s in two}


@pytest.mark.parametrize(
    ("hits", "runs", "low", "high"),
    [(0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (5, 10, 0.1871, 0.8129), (299, 300, 0.9816, 0.9999)],
)
def test_intervals_are_exact_binomial_ones(hits: int, runs: int, low: float, high: float) -> None:
    found = exact_interval(hits, runs)  # Clopper and Pearson (1934), values of their table
    assert found == pytest.approx((low, high), abs=1e-4)


def test_the_smallest_size_ends_an_unbroken_run() -> None:
    rates = (Rate(300, 300, 1.0), Rate(299, 300, 0.1), Rate(200, 300, 0.01), Rate(300, 300, 0.001))
    row = Row("f.gdn", "gdn", "Caught", "case", {}, None, rates)
    assert row.smallest == rates[1]
    assert replace(row, rates=rates[2:]).smallest is None


def test_random_faults_draw_other_coins_in_another_case() -> None:
    fault = CATALOGUE["sometimes_one_ulp.conv"]
    assert fault.knob is not None
    states = [component_trial(INNER, fault, next(iter(heldout_ladder(seed))), 0.03).state for seed in range(12)]
    again = [component_trial(INNER, fault, next(iter(heldout_ladder(seed))), 0.03).state for seed in range(12)]
    assert states == again and len(set(states)) > 1


def test_coins_are_those_of_torch_without_its_stacks(monkeypatch: Any) -> None:
    torch.manual_seed(7)
    drawn, stacks = torch.rand(5), []
    monkeypatch.setattr("traceback.format_stack", lambda *args: stacks.append(args) or [])
    set_coins(7)
    assert torch.equal(torch.rand(5), drawn) and torch.initial_seed() == 7
    assert torch.cuda.is_available() or not stacks


def test_the_command_writes_matrix_and_picture_and_says_who_was_missed(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    words = ["faults", "--workers", "0", "--only", "wrong_parent.", "--report", str(tmp_path)]
    assert cli.main(words) == 0
    data = json.loads((tmp_path / "report.json").read_text())
    keys = {"fault", "surface", "check", "state", "first_check", "size", "probability", "interval"}
    assert all(set(cell) == keys for cell in data["matrix"])
    assert {c["fault"] for c in data["matrix"]} == {f"wrong_parent.{s}" for s in ("gdn", "conv", "attention")}
    assert from_json(data).matrix == tuple(data["matrix"])
    picture = ElementTree.parse(tmp_path / "matrix.svg").getroot()
    assert sum(e.tag.endswith("rect") for e in picture.iter()) > 20
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    tables = (tmp_path / "matrix.txt").read_text()
    assert "out.bitwise" in tables and max(map(len, tables.splitlines())) <= 100
    monkeypatch.setitem(faults.CATALOGUE, "wrong_parent.conv", unseen(CATALOGUE["wrong_parent.conv"]))
    assert cli.main(["faults", "--workers", "0", "--only", "wrong_parent.conv"]) == 1
    assert "wrong_parent.conv Missed" in capsys.readouterr().out.replace("\n", " ")


def test_faults_written_blind_are_chosen_and_reported_apart(capsys: Any, cases: Cases) -> None:
    rows = [
        audit_fault(INNER, fault, cases, PLAN) for fault in (CATALOGUE["taps_reversed.conv"], BLIND["head_kept.conv"])
    ]
    report = to_report(rows, PLAN, "command", 1.0)
    assert [(c.id, c.status, c.cells) for c in report.checks] == [
        ("faults.conv", "pass", 1),
        ("faults.blind.conv", "pass", 1),
    ]
    lost = replace(rows[1], state="Missed")
    wrong = to_report([rows[0], lost], PLAN, "command", 1.0)
    assert [c.status for c in wrong.checks] == ["pass", "fail"] and "head_kept.conv Missed" in wrong.reasons[0]
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_matrix(rows, console)
    assert "conv, blind" in console.export_text()
    assert cli.main(["faults", "--workers", "0", "--blind", "--only", "head_kept"]) == 0
    assert "conv, blind" in capsys.readouterr().out
    assert cli.main(["faults", "--workers", "0", "--blind", "--only", "taps_reversed"]) == 2
    assert "no fault's id contains 'taps_reversed'" in capsys.readouterr().err


def test_an_unknown_fault_is_refused(capsys: Any) -> None:
    assert cli.main(["faults", "--only", "taps_reversed", "--only", "no_such"]) == 2
    assert "no fault's id contains 'no_such'" in capsys.readouterr().err
    assert cli.main(["faults", "--backend", "no_such"]) == 2


def test_worker_processes_give_the_same_rows() -> None:
    only = {"wrong_parent.conv", "taps_reversed.conv"}
    inline, pooled = (run_matrix(PLAN, lambda f: f.id in only, workers) for workers in (0, 1))
    assert inline == pooled and [r.state for r in inline] == ["Caught", "Caught"]


def test_a_backend_meets_all_trials_of_a_fault_in_one_mode(cases: Cases) -> None:
    modes = set()

    class Watched(TorchBackend):
        def native_step(self, *args: Any) -> None:
            modes.add(torch.is_inference_mode_enabled())
            super().native_step(*args)

    row = audit_fault(Watched(), CATALOGUE["wrong_parent.gdn"], cases, PLAN)
    assert row.state == "Caught" and len(row.checks) > len(PROGRAMS)
    assert modes == {True}


@pytest.mark.parametrize(
    "name", ["torch", "reference", "bank", "split_k", "sqrt_norm", "kv_layout", "wy", "weaver", "specla", "treewy"]
)
def test_what_a_kernel_keeps_from_inference_mode_does_not_break_it_outside(name: str, cases: Cases) -> None:
    backend = load_backend(name)
    run_program("five_and_idle", backend, backend, 1)  # in inference mode, with the largest buffers
    for spec in cases.specs[:2]:
        assert own_failure(backend, "gdn", spec) == ""


def test_sampler_faults_have_rows_with_the_least_total_variation_seen() -> None:
    rows = {row.fault: row for row in sampler_rows(1, 128, ("peaked-fixed", "tied-fixed"))}
    assert set(rows) == {f for f, x in SAMPLER_FAULTS.items() if x.needs != "greedy"}
    assert rows["bf16_draw"].state == "NotReached"  # only steps with redrawn drafts can show it
    assert rows["accept_all"].state == "Caught" and rows["accept_all"].rates[0].size > 0.002
    assert rows["deterministic_q_one"].state == "Equivalent"
    assert rows["floor_24_bits"].state == "NotReached" and "total variation" in rows["floor_24_bits"].note
    assert not missed(list(rows.values()))


def test_sampler_faults_are_tried_in_captured_steps_too() -> None:
    rows = {row.fault: row for row in sampler_rows(1, CAPTURED_VOCAB, ("code-fixed",))}
    assert rows["accept_all"].state == "Caught" and rows["accept_all"].case == "code-fixed"


def test_every_default_step_has_what_the_matrix_needs() -> None:
    for case in captured_cases(load_sampler("multi-round").claims, (), VOCAB):
        assert case.source(case.make()) is not None


def test_tables_fit_80_columns_and_name_what_was_not_caught() -> None:
    rates = (Rate(300, 300, 1.0), Rate(299, 300, 0.1), Rate(20, 300, 0.01))
    rows = [
        Row("a.gdn", "gdn", "Caught", "case", {"gdn.x": "Caught", "gdn.y": "Missed"}, "gdn.x", rates),
        Row("b.gdn", "gdn", "Missed", "case", {"gdn.x": "Missed"}, None),
    ]
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_matrix(rows, console)
    text = console.export_text()
    assert "299/300" in text and "0.982-1.000" in text and "0.01: 0.07" in text and "b.gdn" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "a.gdn, x: Caught" in matrix_svg(rows)
    assert {(c["fault"], c["check"], c["state"]) for c in records(rows)} >= {("a.gdn", "any", "Caught")}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", ["torch", "bank", "wy", "treewy", "specla"])
def test_a_right_backend_passes_every_fixed_program(program: str, name: str) -> None:
    assert run_program(program, load_backend(name), load_backend(name), 3) is None


def test_a_backend_without_empty_paths_is_asked_for_none() -> None:
    strict = Contract(empty_path=False)
    assert run_program("five_and_idle", TorchBackend(strict), TorchBackend(strict), 3) is None
    trial = program_trial(TorchBackend(strict), BLIND["idle_sticks.conv"], "five_and_idle", 1)
    assert trial.state == "NotReached"


@pytest.mark.parametrize("name", ["treewy", "specla"])
def test_a_deferred_publication_of_every_layer_is_caught_where_no_pool_shows_it(name: str) -> None:
    backend, fault = load_backend(name), CATALOGUE["every_layer.gdn"]
    spec = next(Cases(ladder(1), backend.contract).reaching(fault))
    caught = component_trial(backend, fault, spec).caught
    assert caught == component_trial(backend, replace(fault, wrap=Faulty), spec).caught
    wrong = run_program("layer_by_layer", fault.wrap(backend), backend, 1)
    assert wrong is not None and "publication of layers [1] moved layer 0" in str(wrong)


def test_a_fault_that_needs_a_plain_step_between_cycles_is_caught_by_a_program() -> None:
    trial = program_trial(INNER, CATALOGUE["length_before_plain_step.attention"], "plain_between", 1)
    assert trial.state == "Caught" and trial.caught == ("attention.plain_between",)
