"""Others' rules as detectors: each accepts what it accepts and flags what it flags, on tensors made for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from audit import cli, others
from audit.fault_cases import heldout_ladder
from audit.others import RULES, Pair, compare, flagged, pairs_of, to_report
from faults import CATALOGUE
from lumotree.backends.loader import load_backend
from lumotree.errors import BackendError

TAPS, HALF = "taps_reversed.conv", "stored_bf16.gdn"


def pair(error: torch.Tensor, low: float = 0.0, state: bool = False) -> Pair:
    reference = torch.ones(100)
    return Pair(reference + error, reference, reference + low, state)


def one(size: float, *, low: float = 0.0, state: bool = False, every: bool = False) -> list[Pair]:
    error = torch.zeros(100)
    error[slice(None) if every else slice(0, 1)] = size
    return [pair(error, low, state)]


@pytest.mark.parametrize(
    ("rule", "accepted", "rejected"),
    [
        ("allclose 1e-2", one(0.019), one(0.021)),
        ("allclose 1e-4", one(0.00019), one(0.00021)),
        ("torch.testing", one(1e-5), one(1.3e-5)),
        ("fla ratio 0.005", one(0.04), one(0.06)),  # a root mean square of a tenth of the one element
        ("fla ratio, CI mode", one(0.29, every=True), one(0.31, every=True)),
        ("2 x low precision", one(0.19, low=0.1), one(0.21, low=0.1)),
        ("95% matched 1e-2", one(5.0), one(0.02, every=True)),
        ("final state only", one(1.0), one(1.0, state=True)),
    ],
)
def test_a_rule_draws_its_line_where_its_project_does(rule: str, accepted: list[Pair], rejected: list[Pair]) -> None:
    assert not flagged(accepted)[rule] and flagged(rejected)[rule]


def test_nan_is_flagged_by_every_rule_and_a_refusal_too() -> None:
    bad = one(float("nan"), state=True, every=True)
    assert all(flagged(bad).values()) and all(flagged(None).values())
    assert not any(flagged(one(0.0, state=True)).values())


def test_pairs_hold_outputs_and_states_of_a_run_and_of_the_reference() -> None:
    spec = next(iter(heldout_ladder(3)))
    for surface in ("gdn", "conv", "attention"):
        pairs = pairs_of(load_backend("torch"), spec, surface)
        assert pairs is not None and {p.state for p in pairs} == {True, False}
        assert not any(flagged(pairs).values())
    low = pairs_of(load_backend("torch"), spec, "gdn")
    assert low is not None and any(not torch.equal(p.low, p.reference) for p in low)


def test_a_comparison_counts_faults_and_right_runs(monkeypatch: Any) -> None:
    monkeypatch.setattr(others, "CLEAN", ("bank",))
    monkeypatch.setattr(others, "heldout_ladder", lambda seed: list(heldout_ladder(seed))[:2])
    found = compare("torch", 1, (TAPS, HALF))
    assert set(found.faults) == {TAPS, HALF} and found.ours == 2 and found.clean == 6
    assert all(TAPS in found.caught[rule] for rule in ("allclose 1e-2", "torch.testing", "fla ratio 0.005"))
    assert HALF in found.caught["final state only"] and HALF not in found.caught["allclose 1e-2"]
    assert set(found.alarms.values()) == {0}
    report = to_report(found, "torch", "command", 1.0)
    assert report.verdict == "PASS" and report.facts["others"]["allclose 1e-2"]["missed"] == [HALF]


@pytest.mark.parametrize("own", [TAPS, HALF])
def test_a_backend_that_fails_without_a_fault_is_refused(own: str, monkeypatch: Any) -> None:
    """Or every rule would be credited with every fault."""
    wrong = CATALOGUE[own].wrap(load_backend("torch"))
    monkeypatch.setattr(others, "load_backend", lambda name: wrong)
    with pytest.raises(BackendError, match=f"fails {own.rpartition('.')[2]} in .* without a fault"):
        compare("torch", 1, (own,))


def test_the_command_prints_a_line_a_rule(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(others, "CLEAN", ())
    monkeypatch.setattr(others, "CATALOGUE", {TAPS: CATALOGUE[TAPS]})
    assert cli.main(["others", "--clean-seeds", "0"]) == 0
    out = capsys.readouterr().out
    assert all(rule in out for rule in RULES) and max(map(len, out.splitlines())) <= 80
