"""Sampling parameters: each filter alone, their conventions, penalties along the ancestors, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lumotree.errors import InputError
from lumotree.sampling import GREEDY_TEMPERATURE, ORDER, Conventions, SamplingParams, target_rows
from lumotree.tree import Tree

ROOT = Tree.make([-1])


def law(probabilities: list[float], conventions: dict[str, Any] | None = None, **params: Any) -> list[float]:
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    rows = target_rows(logits, ROOT, SamplingParams(**params), Conventions(**(conventions or {})))
    assert float(rows.sum()) == pytest.approx(1, abs=1e-12)
    return rows[0].tolist()


def support(probabilities: list[float], conventions: dict[str, Any] | None = None, **params: Any) -> list[int]:
    return [token for token, p in enumerate(law(probabilities, conventions, **params)) if p > 0]


def test_defaults_leave_the_softmax() -> None:
    assert law([0.5, 0.2, 0.3]) == pytest.approx([0.5, 0.2, 0.3])


def test_temperature_sharpens_and_flattens() -> None:
    assert law([0.8, 0.2], temperature=0.5) == pytest.approx([0.64 / 0.68, 0.04 / 0.68])
    assert law([0.8, 0.2], temperature=1e-4) == [1, 0]  # no overflow


@pytest.mark.parametrize("temperature", [0.0, 1e-6, GREEDY_TEMPERATURE])
def test_temperatures_up_to_the_one_threshold_are_greedy_at_the_first_of_tied_tokens(temperature: float) -> None:
    assert law([0.1, 0.3, 0.3, 0.3], temperature=temperature, top_k=2, min_p=0.5) == [0, 1, 0, 0]


@pytest.mark.parametrize(("ties", "kept"), [("index", [0, 1]), ("all", [0, 1, 2])])
def test_top_k_ties_follow_the_convention(ties: str, kept: list[int]) -> None:
    assert support([0.4, 0.3, 0.3], {"top_k_ties": ties}, top_k=2) == kept
    assert support([0.25] * 4, {"top_k_ties": ties}, top_k=1) == ([0] if ties == "index" else [0, 1, 2, 3])
    assert support([0.3, 0.4, 0.3], {"top_k_ties": ties}, top_k=3) == [0, 1, 2]


def test_top_p_keeps_the_fewest_largest_tokens_that_reach_it() -> None:
    assert support([0.25, 0.5, 0.25], top_p=0.5) == [1]
    assert support([0.25, 0.5, 0.25], top_p=0.51) == [0, 1]
    assert support([0.25, 0.5, 0.25], top_p=1e-9) == [1]


@pytest.mark.parametrize(("how", "kept"), [("sequential", [0, 1, 2]), ("joint", [0, 1, 2, 3])])
def test_top_k_and_top_p_follow_the_convention(how: str, kept: list[int]) -> None:
    """The example of sgl-project/sglang#36173: after top-k the first three hold 0.94 of what is left, before 0.80."""
    row = [0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03]
    assert support(row, {"top_k_top_p": how}, top_k=4, top_p=0.82) == kept


def test_min_p_is_relative_to_the_largest() -> None:
    assert support([0.5, 0.25, 0.2, 0.05], min_p=0.5) == [0, 1]
    assert support([0.5, 0.25, 0.2, 0.05], min_p=1.0) == [0]


def test_order_of_the_stages_is_followed() -> None:
    row, late = [0.6, 0.25, 0.15], {"order": ("penalties", "top_k", "top_p", "min_p", "temperature")}
    assert support(row, temperature=3.0, min_p=0.5) == [0, 1, 2]
    assert support(row, late, temperature=3.0, min_p=0.5) == [0]


def test_impossible_tokens_stay_impossible() -> None:
    assert law([0.0, 0.5, 0.5], temperature=5.0, top_k=3, presence=-4.0) == pytest.approx([0, 0.5, 0.5])


def test_penalties_count_the_committed_output_and_the_rows_own_path() -> None:
    tree = Tree.make([-1, 0, 0, 1], tokens=[1, 2, 0, 2], active=[True] * 4)
    logits = torch.tensor([[1.0, 1.0, 1.0, -1.0]]).repeat(4, 1)
    output = torch.tensor([0, 1, 0, 0])
    rows = target_rows(logits, tree, SamplingParams(frequency=0.5, presence=0.25), output_counts=output)
    counts = torch.tensor([[0, 2, 0, 0], [0, 2, 1, 0], [1, 2, 0, 0], [0, 2, 2, 0]])
    want = torch.softmax(logits.double() - 0.5 * counts - 0.25 * (counts > 0), 1)
    assert torch.allclose(rows, want, atol=1e-15, rtol=0) and torch.equal(output, torch.tensor([0, 1, 0, 0]))


def test_repetition_penalty_divides_positive_logits_multiplies_others_and_sees_the_prompt() -> None:
    tree = Tree.make([-1], tokens=[0])
    logits = torch.tensor([[2.0, -2.0, 1.0]], dtype=torch.float64)
    rows = target_rows(logits, tree, SamplingParams(repetition=2.0), prompt_counts=torch.tensor([0, 3, 0]))
    assert torch.allclose(rows, torch.softmax(torch.tensor([[1.0, -4.0, 1.0]], dtype=torch.float64), 1))
    presence = target_rows(logits, tree, SamplingParams(presence=1.0), prompt_counts=torch.tensor([0, 3, 0]))
    assert torch.allclose(presence, torch.softmax(torch.tensor([[1.0, -2.0, 1.0]], dtype=torch.float64), 1))


def test_greedy_sees_penalties() -> None:
    rows = target_rows(torch.tensor([[1.0, 0.9]]), ROOT, SamplingParams(temperature=0, presence=0.5))
    assert rows.tolist() == [[0, 1]]


def test_rows_may_have_parameters_of_their_own_and_inactive_rows_are_zero() -> None:
    tree = Tree.make([-1, 0, 0], active=[True, True, False])
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [math.nan, 0.0]])
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams()]
    rows = target_rows(logits, tree, params)
    assert rows[0].tolist() == [0, 1] and 0 < rows[1, 0] < 1 and rows[2].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -1.0, "finite and >= 0"),
        ("temperature", math.nan, "finite and >= 0"),
        ("top_k", -1, r"an integer >= 0 \(0 = off\)"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("min_p", 1.5, r"in \[0, 1\]"),
        ("repetition", 0.0, "finite and > 0"),
        ("presence", math.inf, "finite"),
        ("frequency", math.nan, "finite"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name_and_value(name: str, value: float, allowed: str) -> None:
    with pytest.raises(InputError, match=f"{name} {value}: expected {allowed}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("argument", "value"), [("order", ORDER[:-1]), ("top_k_ties", "some"), ("top_k_top_p", "both")]
)
def test_unknown_conventions_are_refused_by_name(argument: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{argument} .*: expected"):
        Conventions(**{argument: value})


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([[0.0, math.nan]], "logits row 0 is nan at token 1; expected finite numbers or -inf"),
        ([[math.inf, 0.0]], "logits row 0 is inf at token 0"),
        ([[-math.inf] * 2], "logits row 0 is -inf at every token; at least one must be possible"),
        ([[0.0], [0.0]], r"logits: expected float \[1, V\], got torch.float32 \[2, 1\]"),
    ],
)
def test_bad_logits_are_refused_by_row_and_value(logits: list[list[float]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        target_rows(torch.tensor(logits), ROOT, SamplingParams())


def test_other_bad_arguments_are_refused() -> None:
    logits = torch.zeros(1, 2)
    with pytest.raises(InputError, match="params: expected one or 1, got 2"):
        target_rows(logits, ROOT, [SamplingParams()] * 2)
    with pytest.raises(InputError, match=r"output_counts: expected non-negative integers \[2\], got torch.int64 \[3\]"):
        target_rows(logits, ROOT, SamplingParams(), output_counts=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match=r"row 0: path token 5 is outside the vocabulary; allowed: 0\.\.1"):
        target_rows(logits, Tree.make([-1], tokens=[5]), SamplingParams(presence=1.0))
