"""Laws of whole steps: float64 against fractions, total variation of faults, the full vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from audit.exact_run import main, rule_named, run_exact, run_parallel
from audit.law_rules import FLOAT_ONLY, RULES, faults_of
from audit.law_step import law_of_step
from audit.law_tv import exact_tv, is_reachable
from lumotree.errors import InputError
from lumotree.select_types import Step
from lumotree.tree import Tree
from lumotree.tree_named import hydra27

DETERMINISTIC, MULTIROUND = RULES["deterministic"], RULES["multiround"]


def small_step(tokens: list[int], sampled: bool = False) -> Step:
    """Five rows, rows exact in binary with zeros and ties."""
    rows = torch.tensor([[4, 2, 2, 0], [0, 1, 7, 0], [2, 2, 2, 2], [8, 0, 0, 0], [1, 3, 0, 4]], dtype=torch.float64) / 8
    laws = torch.tensor([[2, 1, 4, 1], [4, 4, 0, 0], [1, 5, 1, 1], [2, 2, 2, 2], [8, 0, 0, 0]], dtype=torch.float64) / 8
    return Step(Tree.make([-1, 0, 0, 1, 1], tokens=tokens), rows, laws if sampled else None)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sampled", [False, True])
def test_float_law_equals_rational_law(name: str, sampled: bool) -> None:
    step = small_step([0, 2, 0, 1, 0], sampled)
    exact, fast = law_of_step(step, RULES[name], exact=True), law_of_step(step, RULES[name])
    assert exact.mass.sum() == 1
    assert np.abs(fast.mass - exact.mass.astype(np.float64)).max() < 1e-15
    assert fast.refused == exact.refused


@pytest.mark.parametrize("base", ["multiround", "deterministic", "naive", "greedy"])
@pytest.mark.parametrize("sampled", [False, True])
def test_float_variation_equals_rational_variation(base: str, sampled: bool) -> None:
    step = small_step([0, 2, 2, 1, 1], sampled)
    for name, fault in faults_of(RULES[base]).items():
        if name in FLOAT_ONLY:
            continue
        exact = exact_tv(step, fault, RULES[base], exact=True)
        assert exact_tv(step, fault, RULES[base]).tv == pytest.approx(float(exact.tv), abs=1e-12), name
        assert sum(exact.by_row) == exact.tv


def test_rules_for_fixed_drafts_emit_one_law() -> None:
    """With point masses multi-round, traversal and naive end at the same row with the same law, duplicates included."""
    for tokens in ([0, 2, 0, 1, 2], [0, 1, 1, 2, 2], [0, 0, 0, 0, 3]):
        for name in ("naive", "traversal", "multiround"):
            found = exact_tv(small_step(tokens), RULES[name], DETERMINISTIC, exact=True)
            assert found.tv == 0, (tokens, name)


def test_a_less_efficient_lossless_rule_differs_in_the_joint_law() -> None:
    """Point-mass treatment of sampled drafts emits the target's law (test_exact_law) but accepts less."""
    step = small_step([0, 2, 0, 1, 0], sampled=True)
    lazy = faults_of(MULTIROUND)["point-mass"]
    assert exact_tv(step, lazy, MULTIROUND, exact=True).tv > 0


def test_emitted_view_ignores_where_a_cycle_ends() -> None:
    step = small_step([0, 2, 2, 1, 0])
    parent = faults_of(DETERMINISTIC)["bonus-parent"]
    joint, emitted = (exact_tv(step, parent, DETERMINISTIC, of=view, exact=True).tv for view in ("joint", "emitted"))  # type: ignore[arg-type]
    assert 0 < emitted <= joint
    assert exact_tv(step, RULES["naive"], DETERMINISTIC, of="emitted", exact=True).tv == 0


def test_reachability() -> None:
    plain, doubled = small_step([0, 2, 0, 1, 2]), small_step([0, 2, 0, 2, 2])
    twice = faults_of(DETERMINISTIC)["duplicate-twice"]
    assert not is_reachable(plain, twice, DETERMINISTIC)
    assert is_reachable(doubled, twice, DETERMINISTIC)


def test_full_vocabulary() -> None:
    """hydra27 over 151,936 tokens with the likeliest tokens drafted: the law sums to 1, faults have a TV."""
    tree = hydra27()
    rows = np.exp(3 * np.random.default_rng(0).normal(size=(tree.n, 151_936)))
    rows /= rows.sum(axis=1, keepdims=True)
    tokens = np.zeros(tree.n, np.int64)
    for row in range(tree.n):
        for place, kid in enumerate(tree.children(row)):
            tokens[kid] = np.argsort(-rows[row])[place]
    step = Step(hydra27(tokens=tokens), torch.from_numpy(rows))
    clean = law_of_step(step, DETERMINISTIC)
    assert clean.mass.sum() == pytest.approx(1, abs=1e-12)
    assert clean.stop[list(set(range(32)) - set(tree.active_rows))].sum() == 0
    faults = faults_of(DETERMINISTIC)
    found = {name: exact_tv(step, faults[name], DETERMINISTIC).tv for name in ("temperature-1.02", "residual-from-p")}
    assert 0.002 < found["temperature-1.02"] < 0.1 and 0.002 < found["residual-from-p"] < 0.5
    assert exact_tv(step, faults["accept-is-draft"], DETERMINISTIC).tv < 1e-12


def test_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="row 2 has 9"):
        law_of_step(small_step([0, 2, 9, 1, 0]), DETERMINISTIC)


def test_parts_add_up_and_names_are_checked() -> None:
    whole = run_exact(400)
    parts = [run_exact(400, part=part, parts=2) for part in range(2)]
    assert [one.merged(two) for one, two in zip(*parts, strict=True)] == whole
    assert rule_named("multiround/q-one").name == "multiround/q-one"
    with pytest.raises(InputError, match="unknown rule"):
        rule_named("multiround/nothing")


def test_report(tmp_path: Path) -> None:
    out = tmp_path / "law"
    run = ["--count", "300", "--processes", "1", "--out", str(out)]
    assert main([*run, "--rules", "greedy", "traversal", "--controls", "300"]) == 0
    text = out.with_suffix(".md").read_text()
    assert "PASS" in text and "| traversal | 300 | 0 |" in text
    assert main([*run, "--rules", "greedy", "--controls", "2"]) == 1  # too few to see every fault
    assert "INCONCLUSIVE" in out.with_suffix(".md").read_text()
    assert main([*run, "--rules", "naive/residual-half", "--controls", "2"]) == 1
    assert "FAIL" in out.with_suffix(".md").read_text()


def test_processes_change_nothing() -> None:
    assert run_parallel(200, ["naive"], 2) == run_exact(200, [RULES["naive"]])
