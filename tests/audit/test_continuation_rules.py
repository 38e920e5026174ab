"""Rules as published, and what the calibrated form promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from audit.continuation_distance import SURFACES, Apart, Greedy, compare
from audit.continuation_native import Snapshot
from audit.continuation_plan import CYCLES, KINDS, LIVE, PREFIXES, Forced, Script, planned_ends, uncovered
from audit.continuation_rules import (
    ALPHA,
    calibrated,
    envelope,
    envelope_ratio,
    exceeding,
    greedy_holds,
    within_bitwise,
    within_envelope,
)
from lumotree.surfaces import Surfaces
from lumotree.tree_named import chain, hydra27


@pytest.mark.parametrize(
    ("surface", "native", "r"),
    [("gdn", [0.0, 0.0, 0.0], 0.02), ("gdn", [0.0, 0.43, 0.1], 0.43), ("next", [0.1], 0.15), ("lengths", [], 0.0)],
)
def test_the_envelope_is_the_floor_or_the_largest_native_distance(surface: str, native: list[float], r: float) -> None:
    assert envelope(surface, native) == r


def test_the_published_rule_passes_up_to_twice_r() -> None:
    assert within_envelope(0.04, 0.02) and not within_envelope(0.0400001, 0.02)
    assert envelope_ratio(0.04, 0.02) == 1 and envelope_ratio(0.1, 0.02) == pytest.approx(2.5)
    assert envelope_ratio(0.0, 0.0) == 0 and envelope_ratio(1e-9, 0.0) == float("inf")


@pytest.mark.parametrize(
    ("same", "margin", "spread", "holds"),
    [
        (True, 5.0, 0.0, True),
        (False, 0.25, 0.0, True),
        (False, 0.26, 0.0, False),
        (False, 0.6, 0.3, True),
        (False, 0.61, 0.3, False),
    ],
)
def test_the_greedy_token_may_differ_only_at_a_tie(same: bool, margin: float, spread: float, holds: bool) -> None:
    assert greedy_holds(Greedy(same, margin, 9.9), spread) == holds


def test_one_cell_that_is_not_bitwise_breaks_the_bitwise_rule() -> None:
    assert within_bitwise(Apart("gdn", 0.0, 6, 6)) and not within_bitwise(Apart("gdn", 0.0, 6, 5))


def test_the_calibrated_bound_is_the_largest_spread_and_counts_what_exceeds_it() -> None:
    spread = [{"gdn": x, "next": 2 * x} for x in (0.1, 0.3, 0.2)]
    rule = calibrated(spread)
    assert rule.bounds == {"gdn": 0.3, "next": 0.6} and rule.n == 3
    assert calibrated(spread, order=2).bounds["gdn"] == 0.2
    heldout = [{"gdn": 0.3, "next": 0.7}, {"gdn": 0.31, "next": 0.1}]
    assert exceeding(rule, heldout) == {"gdn": 1, "next": 1}  # equal to the bound is not above it


def test_a_calibrated_run_alarms_falsely_no_more_often_than_it_says() -> None:
    rng, n, m, runs = np.random.default_rng(3), 12, 6, 4_000
    values = rng.lognormal(size=(runs, n + m))
    rule = calibrated([{"gdn": 0.0, "conv": 0.0}] * n)
    allowed, promised = rule.allowed(m), rule.false_alarm(m)
    above = (values[:, n:] > values[:, :n].max(1, keepdims=True)).sum(1)
    rate = float((above > allowed).mean())
    assert promised <= ALPHA and rate <= promised / 2 + 3 * (promised / runs) ** 0.5  # one of two surfaces
    assert (above > 0).mean() > ALPHA  # a single one may exceed by chance: without counting the rule would be wrong


def test_every_accepted_end_is_planned_in_every_kind_of_schedule() -> None:
    rows = [r for r in hydra27().active_rows if r]
    for kind in KINDS:
        plan = planned_ends(kind, 1)
        ends = [e for course in plan for e in course]
        assert [len(c) for c in plan] == [CYCLES] * PREFIXES and all(c[-1] == 0 for c in plan)
        assert sorted(e for e in ends if e > 0) == rows and ends.count(LIVE) == PREFIXES * (CYCLES - 1) - len(rows)
    assert planned_ends("cold", 1) != planned_ends("repeat", 1) and planned_ends("cold", 1) != planned_ends("cold", 2)


def test_a_tree_with_more_rows_than_cycles_cannot_be_planned() -> None:
    with pytest.raises(ValueError, match="at most 36 rows below the root, got 39"):
        planned_ends("cold", 1, chain(40))


def test_an_end_that_no_path_has_is_uncovered() -> None:
    tree = hydra27()
    scripts = [
        Script(f"{kind}/{row}", row, kind, (1,), 4, (Forced(tree, tree.path(row), 0),), 0)
        for kind in KINDS
        for row in tree.active_rows
        if (kind, row) != ("repeat", 17)
    ]
    assert uncovered(scripts) == {"repeat": [17]}


def snapshot(**parts: torch.Tensor) -> Snapshot:
    """Two recurrent layers, one attention layer, five committed tokens of which two are new."""
    g = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    made = {
        "recurrent": draw(2, 2, 3, 4), "conv": draw(2, 6, 3).bfloat16(), "k": draw(1, 5, 1, 4).bfloat16(),
        "v": draw(1, 5, 1, 4).bfloat16(), "draft_k": draw(4, 1, 4).bfloat16(), "draft_v": draw(4, 1, 4).bfloat16(),
        "hidden": draw(8).bfloat16(), "logits": draw(2, 9), "rows": draw(2, 8).bfloat16(),
    } | parts  # fmt: skip
    logits, rows = made.pop("logits"), made.pop("rows")
    return Snapshot(Surfaces(committed=5, **made), logits, rows)


CHANGES = {
    "gdn": ("recurrent", (1, 0, 2, 3), 1),
    "conv": ("conv", (0, 5, 2), 0),
    "kv_new": ("v", (0, 3, 0, 1), 0),
    "kv_history": ("k", (0, 2, 0, 1), 0),
    "next": ("logits", (1, 4), -1),
    "hidden": ("rows", (0, 7), -1),
    "drafter": ("draft_v", (3, 0, 2), -1),
}


@pytest.mark.parametrize("surface", CHANGES)
def test_a_change_of_one_element_shows_in_its_surface_alone(surface: str) -> None:
    name, at, layer = CHANGES[surface]
    clean = snapshot()
    value = {"logits": clean.logits, "rows": clean.hidden}.get(name, getattr(clean.surfaces, name, None)).clone()
    value[at] += 1
    found = compare(snapshot(**{name: value}), clean, 3).apart
    assert {s for s, a in found.items() if not within_bitwise(a)} == {surface}
    assert found[surface].layer == layer and found[surface].elements == 1 and found[surface].distance > 0


def test_equal_snapshots_are_at_distance_zero_and_every_surface_has_cells() -> None:
    found = compare(snapshot(), snapshot(), 3)
    assert set(found.apart) == set(SURFACES) and found.greedy.same and found.greedy.spread == 0
    assert all(a.distance == 0 and a.cells == a.bitwise > 0 for a in found.apart.values())


def test_the_sign_of_a_zero_of_the_state_counts_as_the_contract_says() -> None:
    zero = torch.zeros(2, 2, 3, 4)
    for signed, same in ((True, False), (False, True)):
        found = compare(snapshot(recurrent=-zero), snapshot(recurrent=zero), 3, signed_zeros=signed).apart
        assert within_bitwise(found["gdn"]) is same
    keys = torch.zeros(1, 5, 1, 4).bfloat16()
    found = compare(snapshot(k=-keys), snapshot(k=keys), 3, signed_zeros=False).apart
    assert not within_bitwise(found["kv_new"])  # keys and values are moved, not computed


def test_a_nan_is_infinitely_far() -> None:
    state = snapshot().surfaces.recurrent.clone()
    state[0, 0, 0, 0] = float("nan")
    assert compare(snapshot(recurrent=state), snapshot(), 3).apart["gdn"].distance == float("inf")
    logits = snapshot().logits.clone()
    logits[1, 2] = float("nan")
    found = compare(snapshot(logits=logits), snapshot(), 3)
    assert found.apart["next"].distance == float("inf") and found.greedy.spread == float("inf")


def test_the_law_behind_the_last_row_is_compared_in_nats() -> None:
    logits = snapshot().logits.clone()
    logits[1] += 3.0  # the same law
    assert compare(snapshot(logits=logits), snapshot(), 3).apart["next"].distance == pytest.approx(0, abs=1e-9)
    two = torch.log(torch.tensor([[0.5, 0.5], [0.25, 0.75]])), torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
    nats = compare(snapshot(logits=two[0]), snapshot(logits=two[1]), 3).apart["next"].distance
    assert nats == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), abs=1e-6)


def test_requests_of_other_length_differ_in_everything() -> None:
    shorter = snapshot()
    short = Snapshot(Surfaces(**{**vars(shorter.surfaces), "committed": 4}), shorter.logits, shorter.hidden)
    found = compare(short, snapshot(), 3)
    assert all(a.distance == float("inf") and not within_bitwise(a) for a in found.apart.values())
