"""The captured steps: what is stored is what the shipped model says, and what selection may be given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from audit.captured_steps import CAPTURES, FOLDER, captured
from audit.record_steps import record, uncertainty, write
from audit.rule_law import multi_round_law
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
