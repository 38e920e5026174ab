"""Clean runs reject as often as stated: exactly where the level can be summed, test by test where it cannot."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from scipy import stats

from audit import clean_runs as module
from audit.clean_runs import (
    Count,
    InTurn,
    battery_runs,
    counted,
    exact_levels,
    failures,
    main,
    run_exact_part,
    two_rows,
)
from audit.montecarlo import run_step
from lumotree.select_types import Walks

RUNS, WALKS = 200, 20


class Leaning:
    """Every fifth walk ends at row 0 with token 1: a sampler that is off by a few percent."""

    def __init__(self) -> None:
        self._clean, self._count = InTurn(5), 0

    def walk(self, step, walks, seed):
        drawn = self._clean.walk(step, walks, seed)
        self._count += 1
        if self._count % 5:
            return drawn
        return Walks(drawn.last * 0, drawn.bonus * 0 + 1, torch.ones_like(drawn.refused), drawn.tokens)


def test_clean_runs_agree_with_the_exact_level_of_the_family():
    counts, outcomes = run_exact_part(RUNS, WALKS, seed=3)
    assert outcomes > 1_500
    for count, stated in zip(counts, module.LEVELS, strict=True):
        assert 0 < count.level <= stated
        assert count.p_value > 1e-3 / len(counts)
    assert counts[1].rejections > 5
    # Power of that comparison: a battery that rejects at three times its level is seen in so many runs.
    level = counts[1].level
    seen = [k for k in range(RUNS + 1) if stats.binomtest(k, RUNS, level).pvalue <= 1e-3 / 2]
    assert stats.binom.pmf(seen, RUNS, 3 * level).sum() > 0.99
    wrong = failures(Leaning(), two_rows(), RUNS, WALKS, seed=3)[1]
    assert Count.of("leaning", wrong, RUNS, level).p_value < 1e-4


def test_the_exact_level_is_that_of_run_step(monkeypatch):
    """The sum calls the battery itself, as a run does: one run's counts give the run's own p-values."""
    found = {}
    real = module._tests

    def keep(step, law, ends, counts):
        tests = real(step, law, ends, counts)
        found[tuple(counts)] = [t.p_value for t in tests]
        return tests

    monkeypatch.setattr(module, "_tests", keep)
    step = two_rows()
    exact_levels(step, 12)
    sampler = InTurn(9)
    options = {"walks": 12, "chunk": 1, "min_visits": 7, "looks": 1, "level": 0.1, "law": module.multi_round_law(step)}
    for _ in range(5):
        drawn = sampler._held
        start = sampler._next % module._BLOCK
        result = run_step(sampler, step, **options)
        drawn = sampler._held
        ends = list(zip(drawn.last[start : start + 12].tolist(), drawn.bonus[start : start + 12].tolist(), strict=True))
        counts = tuple(ends.count(end) for end in ((0, 1), (0, 2), (1, 0), (1, 1)))
        assert [t.p_value for t in result.tests] == found[counts]


@pytest.fixture(scope="module")
def found():
    return battery_runs(250, seed=4)


def test_every_test_of_the_whole_battery_by_itself(found):
    whole, tests = counted(found)
    assert whole.p_value > 1e-3 and whole.runs == 250
    assert len(tests) > 20
    assert min(t.p_value for t in tests) * len(tests) > 1e-3


def test_one_blind_test_is_found(found):
    """Power: among 250 runs a test that never rejects, and one that rejects almost three times as often, are off."""
    assert Count.of("blind", 0, 250, module.EACH).p_value * 40 < 1e-3
    assert Count.of("eager", 35, 250, module.EACH).p_value * 40 < 1e-3
    blinded = [(fails, [replace(t, p_value=1.0) if t.id == "node@0" else t for t in tests]) for fails, tests in found]
    _, tests = counted(blinded)
    worst = min(tests, key=lambda t: t.p_value)
    assert (worst.name, worst.rejections) == ("node@0", 0)
    assert worst.p_value * len(tests) < 1e-3


def test_the_report_says_what_was_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "WALKS", 12)
    monkeypatch.setattr(module.clean_runs, "__defaults__", (1, 12))
    assert main(["--runs", "40", "--out", str(tmp_path / "clean")]) == 0
    data = json.loads((tmp_path / "clean.json").read_text())
    assert data["agrees"] is True and data["exact"][0]["runs"] == 40
    assert "two rows" in (tmp_path / "clean.md").read_text() == capsys.readouterr().out.rstrip("\n") + "\n"


@pytest.mark.parametrize("rejections", [0, 60])
def test_counts_that_are_off_do_not_agree(rejections):
    right = tuple(Count.of(f"stated {level}", 30, 1_000, 0.03) for level in module.LEVELS)
    whole, test = Count.of("battery", 70, 1_000, 0.1, sides=1), Count.of("node@0", 50, 1_000, 0.05)
    found = module.CleanRuns(10, right, whole, (test,))
    assert found.agrees
    off = Count.of("stated 0.1", rejections, 1_000, 0.03)
    assert not replace(found, exact=(off, right[1])).agrees
    assert not replace(found, exact=(replace(right[0], level=0.11), right[1])).agrees
    assert not replace(found, battery=Count.of("battery", 150, 1_000, 0.1, sides=1)).agrees
