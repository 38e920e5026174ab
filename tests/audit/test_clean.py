"""Random clean cases: what is drawn, that right kernels pass, and that a wrong one is an alarm with its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audit import clean, cli
from audit.clean import Clean, clean_cases, draw_contract, draw_spec, run_clean, to_report
from faults import CATALOGUE
from lumotree.backends.loader import load_backend
from lumotree.contract import Contract
from lumotree.errors import BackendError, InputError

BACKENDS = ("torch", "reference", "bank", "split_k", "sqrt_norm", "kv_layout", "wy")


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_drawn_contract_can_be_made(backend: str) -> None:
    for n in range(30):
        fields = draw_contract(np.random.default_rng(n), backend)
        assert load_backend(backend, **fields).contract.layout == fields["layout"]


def test_cases_differ_in_everything_that_may_matter() -> None:
    specs = [draw_spec(np.random.default_rng(n), n, 1) for n in range(200)]
    assert len({s.entropy for s in specs}) == 200 and {len(s.trees) for s in specs} == {1, 2, 3}
    assert {s.placement for s in specs} == {"scattered", "inplace", "shuffled"} and {s.padding for s in specs} == {
        0,
        1,
        2,
    }
    assert {s.regime for s in specs} >= {"random", "exact", "cold", "mid_gates", "near_one"}
    assert {s.dims.conv_width for s in specs} == {2, 3, 4, 5} and {s.dims.layers for s in specs} == {1, 2}
    assert min(min(s.prefixes) for s in specs) == 0
    assert draw_spec(np.random.default_rng(7), 7, 1) == specs[7]


def test_right_kernels_raise_no_alarm() -> None:
    found = run_clean(BACKENDS, 14, 5, workers=0)
    assert [c.backend for c in found] == list(BACKENDS) and sum(c.cases for c in found) == 14
    assert not any(c.alarms for c in found) and all(c.cells > 50 for c in found)
    assert sum(c.relations for c in found) > 0
    report = to_report(found, 5, "command", 1.0)
    assert report.verdict == "PASS" and report.facts["clean"]["torch"]["cases"] == 2


def test_a_wrong_kernel_and_a_refusal_are_alarms(monkeypatch: Any) -> None:
    def wrong(spec: str, **fields: Any) -> Any:
        return CATALOGUE["output_ulps.conv"].wrap(load_backend("torch", **fields))

    monkeypatch.setattr(clean, "load_backend", wrong)
    (found,) = run_clean(("torch",), 2, 1, workers=0)
    assert [number for number, _ in found.alarms] == [0, 1] and "conv.out.bitwise" in found.alarms[0][1]
    report = to_report([found], 1, "command", 1.0)
    assert report.verdict == "FAIL" and "2 false alarms in 2 cases" in report.reasons[0]
    assert report.findings[1].reproduce == "lumotree-audit clean --cases 1 --backends torch --first 1 --seed 1"

    def refusing(spec: str, **fields: Any) -> Any:
        made = load_backend("torch", **fields)
        made.gdn_verify = lambda *args: (_ for _ in ()).throw(BackendError("no"))
        return made

    monkeypatch.setattr(clean, "load_backend", refusing)
    assert clean_cases("torch", 1, [3]).alarms == [(3, "no")]


def test_a_refusal_under_a_relation_is_an_alarm(monkeypatch: Any) -> None:
    def shy(self: Any, *args: Any) -> list[Any]:
        raise InputError("not today")

    monkeypatch.setattr("audit.metamorphic.Relation.run", shy)
    ((number, note),) = clean_cases("torch", 1, [0]).alarms
    assert number == 0 and "refused under chain: not today" in note


def test_no_case_is_inconclusive_and_the_bound_is_exact() -> None:
    assert to_report([Clean("torch")], 1, "command", 1.0).verdict == "INCONCLUSIVE"
    assert Clean("torch", cases=10_000).upper == pytest.approx(2.995e-4, rel=1e-3)  # ln 20 / 10,000


def test_the_command_writes_what_was_drawn(tmp_path: Path) -> None:
    words = ["clean", "--cases", "2", "--backends", "torch", "--workers", "0", "--report", str(tmp_path)]
    assert cli.main(words) == 0
    facts = json.loads((tmp_path / "report.json").read_text())["facts"]["clean"]["torch"]
    assert facts["cases"] == 2 and facts["alarms"] == 0 and sum(facts["drawn"].values()) >= 4
    assert cli.main(["clean", "--backends", "no_such"]) == 2
    assert isinstance(load_backend("torch").contract, Contract)
