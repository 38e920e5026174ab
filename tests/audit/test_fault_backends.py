"""The quick matrix has the states of the default one, and its table of kernels keeps what other runs wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from audit import cli, fault_backends
from audit.fault_backends import add_row, main, table_row
from audit.fault_cases import ladder
from audit.fault_matrix import Cases, Plan, Row, audit_fault
from audit.fault_report import to_report
from audit.fault_trial import alone
from faults import BLIND, CATALOGUE, EVERY, Faulty
from faults.sampler import SAMPLER_FAULTS
from lumotree.backends.torch_backend import TorchBackend

INNER = TorchBackend()
QUICK = Plan("torch", quick=True)


def row(fault: str, state: str = "Caught") -> Row:
    return Row(fault, fault.rpartition(".")[2], state, "case", {}, None)


def test_a_quick_run_stops_at_the_first_check_that_catches_a_fault() -> None:
    cases = Cases([next(ladder(1))], INNER.contract)
    found = audit_fault(INNER, CATALOGUE["wrong_parent.gdn"], cases, QUICK)
    assert found.state == "Caught" and found.first == "gdn.out.bitwise" and "gdn.chain" not in found.checks


def test_what_only_a_program_catches_is_caught_in_a_quick_run() -> None:
    found = audit_fault(INNER, BLIND["cut_ring.gdn"], Cases([], INNER.contract), QUICK)
    assert found.state == "Caught" and found.first == "gdn.five_and_idle" and len(found.checks) > 10


def test_a_quick_run_asks_everything_before_it_says_missed_or_not_reached() -> None:
    def noted(inner: Any) -> Faulty:
        faulty = Faulty(inner)

        def publish(*args: Any) -> None:
            faulty.note("nothing of weight", 0, 1)
            inner.conv_publish(*args)

        faulty.conv_publish = publish  # type: ignore[attr-defined]
        return faulty

    fault, cases = CATALOGUE["one_short.conv"], Cases([next(ladder(1))], INNER.contract)
    for wrap, state in ((noted, "Missed"), (Faulty, "NotReached")):
        found = audit_fault(INNER, replace(fault, wrap=wrap), cases, QUICK)
        assert found.state == state and {"conv.chain", "conv.five_and_idle", "conv.out.bitwise"} <= set(found.checks)


def test_a_fault_of_a_surface_that_the_kernel_does_not_have_is_not_reached() -> None:
    gdn = alone(INNER, "gdn")
    found = audit_fault(gdn, CATALOGUE["wrong_parent.conv"], Cases(ladder(1), INNER.contract), QUICK)
    assert found.state == "NotReached" and "does not both verify and publish conv" in found.note
    assert audit_fault(gdn, CATALOGUE["wrong_parent.gdn"], Cases([next(ladder(1))], INNER.contract), QUICK).first


def test_a_surface_that_the_kernel_does_not_have_is_not_covered_and_leaves_the_verdict_to_the_others() -> None:
    rows = [row("wrong_parent.gdn"), row("wrong_parent.conv", "NotReached")]
    gdn_alone, whole = (to_report(rows, Plan(name, quick=True), "", 0.0) for name in ("treewy", "torch"))
    assert (gdn_alone.verdict, gdn_alone.coverage["conv"], len(gdn_alone.checks)) == ("PASS", "not covered", 1)
    assert (whole.verdict, whole.coverage["conv"]) == ("INCONCLUSIVE", "covered")
    assert to_report(rows[1:], Plan("treewy", quick=True), "", 0.0).verdict == "INCONCLUSIVE"
    assert to_report([row("wrong_parent.gdn", "Missed")], Plan("treewy"), "", 0.0).verdict == "FAIL"


def test_a_list_names_faults_and_sizes_and_runs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("audit.fault_matrix.run_matrix", None)
    assert cli.main(["faults", "--list", "--only", "short_from.gdn", "--only", "wrong_parent"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "short_from.gdn: the last row of a path of so many rows or more is not published (rows: 3, 4, 5, 6)" in lines
    assert sum(line.startswith("wrong_parent.") for line in lines) == 3 == len(lines) - 1
    assert cli.main(["faults", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(EVERY) + len(SAMPLER_FAULTS)


def test_a_line_counts_states_in_order_and_names_verdict_and_versions() -> None:
    rows = [row("wrong_parent.gdn"), row("wrong_parent.conv"), row("gate_twice.gdn", "NotReached")]
    assert table_row("bank", rows, 3, 12.4).startswith("| bank | 2 | 0 | 1 | 0 | 0 | PASS | 12 | 3 | 20")
    assert "| FAIL |" in table_row("bank", [row("wrong_parent.gdn", "Missed")], 1, 1.0)


def test_a_later_run_replaces_its_own_line_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    for line in ("| wy | 1 |", "| bank | 2 |", "| wy | 3 |"):
        add_row(path, line)
    lines = path.read_text().splitlines()
    assert lines[-2:] == ["| bank | 2 |", "| wy | 3 |"] and sum("| kernel |" in line for line in lines) == 1


@pytest.mark.parametrize(("state", "code"), [("Caught", 0), ("Missed", 1), ("NotReached", 1)])
def test_the_command_fails_unless_every_verdict_is_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, state: str, code: int
) -> None:
    monkeypatch.setattr(fault_backends, "run_matrix", lambda plan, workers: [row("one_short.gdn", state)])
    assert main(["torch", "bank", "--out", str(tmp_path / "t.md")]) == code
    assert ("one_short.gdn Missed" in capsys.readouterr().out) == (state == "Missed")
    assert (tmp_path / "t.md").read_text().splitlines()[-1].startswith("| torch | ")
