"""`python -m audit.record_steps FOLDER`: decode the shipped model and write the six captured steps anew.

Of the first cycles of a request the *least certain* is kept, by the entropy of the target summed over rows, each
weighted with the chance that a walk gets there: a step in which everything is certain can convict nobody.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from audit.captured_steps import CAPTURES, Capture, CapturedStep
from audit.rule_law import multi_round_law
from lumotree.byte_tokens import encode
from lumotree.cycle import Decoder
from lumotree.cycle_types import Stack, Verified
from lumotree.draft import drafter
from lumotree.mtp import default_backend
from lumotree.prompts import prompt_set
from lumotree.requests import Request
from lumotree.sampling import target_rows
from lumotree.select_types import Step
from lumotree.shipped import shipped_model
from lumotree.slots import Capacity
from lumotree.tree import Tree

CYCLES = 24
"""Decoding cycles of a request among which one is chosen."""

_TOKENS = 12 * CYCLES
_SEED = 1


def record(stack: Stack, capture: Capture, cycles: int = CYCLES) -> CapturedStep:
    """Decode the capture's prompt for so many cycles and return the least certain of them."""
    prompt = tuple(encode(prompt_set(capture.prompts)[capture.prompt].text))
    decoder = Decoder(stack, Capacity(1, len(prompt) + _TOKENS))
    chosen = drafter(capture.drafter)
    # No end-of-sequence: a request that ends early would leave fewer cycles to choose from.
    state = decoder.admit(Request(0, prompt, _TOKENS, capture.params, chosen, seed=_SEED))
    best, most = None, -1.0
    while state.finished is None and len(state.paths) < cycles:
        verified = decoder.verify(decoder.propose())
        if not verified.turns[0].feed:
            step = _captured(capture, verified)
            if (found := uncertainty(step.step)) > most:
                best, most = step, found
        decoder.publish(verified, decoder.select(verified))
    assert best is not None, "at least one decoding cycle has run"
    return best


def uncertainty(step: Step) -> float:
    """Nats: entropy of each active row's target times the chance that a multi-round walk visits it, summed."""
    rows = np.array(step.tree.active_rows)
    target = step.target.numpy()[rows]
    entropy = -(target * np.log(np.where(target > 0, target, 1.0))).sum(1)
    return float((multi_round_law(step).reach[rows] * entropy).sum())


def _captured(capture: Capture, verified: Verified) -> CapturedStep:
    (turn,) = verified.turns
    # Rows of padding hold whatever the kernel left there.
    logits = verified.forward.logits.cpu().masked_fill(~torch.from_numpy(turn.tree.active.copy())[:, None], 0.0)
    tree = Tree.make(turn.tree.parents, tokens=turn.tree.tokens, active=turn.tree.active, vocab=logits.shape[1])
    step = Step(tree, target_rows(logits, tree, capture.params), turn.proposal.laws)
    return CapturedStep(capture, step, logits, turn.tokens[: turn.committed])


def write(step: CapturedStep, folder: Path) -> None:
    """Write both files of a step."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = step.step.tree
    arrays = {"parents": tree.parents, "tokens": tree.tokens, "active": tree.active, "target": step.step.target.numpy()}
    if step.step.laws is not None:
        arrays["laws"] = step.step.laws.numpy()
    np.savez_compressed(folder / f"{step.capture.name}.npz", **arrays)  # type: ignore[arg-type]
    np.savez_compressed(
        folder / f"{step.capture.name}.context.npz", logits=step.logits.numpy(), history=step.history.astype(np.int16)
    )


def main(folder: Path) -> None:
    """Write all six."""
    torch.set_num_threads(1)
    model = shipped_model()
    backend = default_backend(model.device)
    stack = Stack(model, backend, model.draft_head(backend))
    for capture in CAPTURES:
        step = record(stack, capture)
        write(step, folder)
        print(f"{capture.name}: {len(step.history)} tokens before it, {uncertainty(step.step):.2f} nats", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
