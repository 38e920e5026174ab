"""The captured steps: what is stored is what the shipped model says, and what selection may be given."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from audit.captured_steps import CAPTURES, FOLDER, captured
from audit.record_steps import record, uncertainty, write
from audit.rule_law import multi_round_law
from audit.sampler_cases import captured_cases
from audit.sampler_file import load_step
from audit.sampler_step import StepTask, audit_step, rare_rows
from audit.sampler_steps import RECIPES
from faults.sampler_types import Reading
from lumotree.backends.sampler_loader import Claims
from lumotree.backends.torch_backend import TorchBackend
from lumotree.byte_tokens import VOCAB
from lumotree.cycle import Decoder
from lumotree.cycle_types import Stack
from lumotree.draft import SUPPORT
from lumotree.draft_types import DraftRequest, DraftState, Proposal
from lumotree.errors import InputError
from lumotree.requests import Request
from lumotree.sampling import target_rows
from lumotree.select_prepare import check_tokens, prepare
from lumotree.select_types import Step
from lumotree.shipped import shipped_model
from lumotree.slots import Capacity
from lumotree.tree import Tree
from lumotree.tree_named import hydra27

NAMES = [capture.name for capture in CAPTURES]


@pytest.fixture(scope="module")
def stack() -> Stack:
    torch.set_num_threads(1)
    model, backend = shipped_model(), TorchBackend()
    return Stack(model, backend, model.draft_head(backend))


def test_there_are_six_with_both_kinds_of_draft_and_every_filter() -> None:
    assert len(set(NAMES)) == 6 and {capture.stochastic for capture in CAPTURES} == {True, False}
    assert any(c.params.top_k for c in CAPTURES) and any(c.params.top_p < 1 for c in CAPTURES)
    assert any(c.params.min_p for c in CAPTURES) and len({c.params.temperature for c in CAPTURES}) > 2
    assert len({(c.prompts, c.prompt) for c in CAPTURES}) == 6


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_step_is_what_selection_takes(name: str) -> None:
    one = captured(name)
    tree = one.step.tree
    assert tree.parents.tolist() == hydra27().parents.tolist()
    assert not (tree.active & ~hydra27().active).any() and len(tree.active_rows) > 12
    assert one.step.target.shape == (32, VOCAB) and (one.step.laws is not None) == one.capture.stochastic
    check_tokens(prepare(one.step), torch.from_numpy(tree.tokens.copy())[None], 1, distinct=True)
    if one.step.laws is not None:
        assert int((one.step.laws > 0).sum(1).max()) <= SUPPORT


@pytest.mark.parametrize("name", NAMES)
def test_the_target_is_the_law_of_the_stored_logits(name: str) -> None:
    one = captured(name)
    again = target_rows(one.logits, one.step.tree, one.capture.params)
    rows = list(one.step.tree.active_rows)
    torch.testing.assert_close(one.step.target[rows], again[rows], rtol=1e-9, atol=1e-15)


class Stored:
    """Proposes the stored tree."""

    name, needs_head = "stored", False

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def propose(self, requests: list[DraftRequest], state: DraftState) -> list[Proposal]:
        return [Proposal(self.tree) for _ in requests]


@pytest.mark.parametrize("name", ["code-fixed", "code-top-sampled"])
def test_the_logits_are_the_shipped_models(stack: Stack, name: str) -> None:
    """Equal bits on the machine that wrote them; other vector units round otherwise, bf16 layers multiply that."""
    one = captured(name)
    tree = one.step.tree
    text = (*one.history.tolist(), int(tree.tokens[0]))
    decoder = Decoder(stack, Capacity(1, len(text) + 40))
    state = decoder.admit(Request(0, text[:-1], 20, drafter=Stored(tree)))
    while state.prefilling:
        decoder.cycle()
    state.tokens[-1] = text[-1]  # the pending token of the capture, whatever this model would have chosen
    logits = decoder.verify(decoder.propose()).forward.logits
    rows = list(tree.active_rows)
    off = (logits[rows] - one.logits[rows]).abs().max()
    assert off <= 0.5, f"largest difference of a logit: {off}"
    other = captured(next(n for n in NAMES if n != name)).logits
    assert (logits[rows] - other[rows]).abs().max() > 2


def test_recording_keeps_the_least_certain_cycle_and_writes_it(stack: Stack, tmp_path: Path) -> None:
    capture = CAPTURES[0]
    one, most = record(stack, capture, 1), record(stack, capture, 3)
    assert uncertainty(most.step) >= uncertainty(one.step)
    write(most, tmp_path)
    back = captured(capture.name, tmp_path)
    assert back.step.tree.tokens.tolist() == most.step.tree.tokens.tolist()
    assert torch.equal(back.step.target, most.step.target) and torch.equal(back.logits, most.logits)
    assert np.array_equal(back.history, most.history)


def test_uncertainty_weighs_entropy_with_reach() -> None:
    step = captured("code-fixed").step
    reach = multi_round_law(step).reach
    by_hand = sum(
        float(reach[row]) * float(-(p * p.log()).sum())
        for row in step.tree.active_rows
        for p in [step.target[row][step.target[row] > 0]]
    )
    assert uncertainty(step) == pytest.approx(by_hand)


def test_unknown_and_damaged_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown name 'nothing'; allowed: code-fixed, "):
        captured("nothing")
    name = NAMES[0]
    for end in (".npz", ".context.npz"):
        (tmp_path / f"{name}{end}").write_bytes((FOLDER / f"{name}{end}").read_bytes())
    with np.load(FOLDER / f"{name}.context.npz") as archive:
        np.savez(tmp_path / f"{name}.context.npz", logits=archive["logits"][:5], history=archive["history"])
    with pytest.raises(InputError, match=r"expected logits \[32, 272\], got \[5, 272\]"):
        captured(name, tmp_path)
    (tmp_path / f"{name}.context.npz").write_bytes(b"PK nothing")
    with pytest.raises(InputError, match=r"context\.npz: expected logits and history, found: .*reinstall"):
        captured(name, tmp_path)


@pytest.mark.parametrize("load", [lambda p: captured(NAMES[0], p.parent), load_step], ids=["captured", "--step"])
def test_no_message_advises_to_load_a_pickle(tmp_path: Path, load: Callable[[Path], object]) -> None:
    for end in (".npz", ".context.npz"):
        (tmp_path / f"{NAMES[0]}{end}").write_bytes(pickle.dumps({"target": [1.0]}))
    with pytest.raises(InputError, match="pickled or foreign data, which is never loaded") as refusal:
        load(tmp_path / f"{NAMES[0]}.npz")
    assert "allow_pickle" not in str(refusal.value) and "trust" not in str(refusal.value)


# In the sampler suite


def test_captured_steps_are_among_the_defaults_where_their_vocabulary_fits() -> None:
    made = [recipe.name for recipe in RECIPES]
    assert [case.name for case in captured_cases(Claims())] == [*made, *NAMES]
    assert [case.name for case in captured_cases(Claims(), vocab=64)] == made
    fixed = [case.name for case in captured_cases(Claims(rule="greedy")) if case.captured]
    assert fixed == [capture.name for capture in CAPTURES if not capture.stochastic]
    assert [case.name for case in captured_cases(Claims(), ("code-sampled",))] == ["code-sampled"]


def test_a_case_knows_step_logits_and_kind_of_draft() -> None:
    for name in ("code-top-fixed", "code-top-sampled"):
        (case,) = captured_cases(Claims(), (name,))
        step = case.make()
        assert case.recipe is None and case.redrawn == captured(name).capture.stochastic
        source = case.source(step)
        assert source is not None and source.temperature == captured(name).capture.params.temperature
        assert source.target(Reading()) is step.target
        # What was not changed is the step's own, bit for bit, although it was computed in another order.
        again = source.target(Reading(heat=1 + 1e-15))
        assert torch.equal(again, step.target)
        twice = source.target(Reading(twice=True))
        hot = replace(captured(name).capture.params, temperature=source.temperature**2)
        expected = target_rows(captured(name).logits, step.tree, hot)
        rows = list(step.tree.active_rows)
        torch.testing.assert_close(twice[rows], expected[rows], rtol=1e-9, atol=1e-12)


def test_a_chain_is_cut_out_of_a_captured_step() -> None:
    (case,) = captured_cases(Claims(trees=False), ("code-fixed",))
    chain, whole = case.make(), case.whole()
    assert chain.tree.n == whole.tree.max_depth + 1 and chain.tree.tokens[1] == whole.tree.tokens[1]


@pytest.mark.parametrize("name", ["code-top-fixed", "code-top-sampled"])
def test_faults_of_reading_are_seen_in_a_captured_step(name: str) -> None:
    (case,) = captured_cases(Claims(), (name,))
    outcome = audit_step(
        StepTask(
            "multi-round", case, walks=8_000, chunk=4_000, min_visits=80, faults=("temperature_twice", "accept_zero")
        )
    )
    assert outcome.result is not None and not outcome.result.rejected and not outcome.result.violations
    assert {c.fault: c.detected for c in outcome.controls} == {"temperature_twice": True, "accept_zero": True}
    assert set(outcome.result.untested_rows) <= {*outcome.rare, *outcome.certain}


def test_rows_at_the_edge_of_being_rare_are_called_rare() -> None:
    """A row that expects 2,050 of 200,000 visits has less than 2,000 in every seventh run."""
    half = torch.full((3, 2), 0.5, dtype=torch.float64)
    for reach, rare in ((0.0105, (1, 2)), (0.0115, (2,))):
        target = half.clone()
        target[0] = torch.tensor([reach, 1 - reach])
        step = Step(Tree.make([-1, 0, 1], tokens=[0, 0, 0], vocab=2), target)
        case = captured_cases(Claims(), ("code-fixed",))[0]
        assert rare_rows("multi-round", step, multi_round_law(step), StepTask("multi-round", case)) == rare
