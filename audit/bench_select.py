"""The benchmark of the selection rules: 200,000 walks x 6 steps of `hydra27` at a vocabulary of 151,936 (issue 3).

python -m audit.bench_select

Processor time of one thread is printed, which bounds the time on two cores and does not see other processes. The issue
asks for at most 10 s; preparing a step, its coins and its drafts is shared by all rules and counted once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from lumotree.coins import coins_for
from lumotree.select import RULES
from lumotree.select_draft import draw_drafts
from lumotree.select_prepare import prepare
from lumotree.select_types import Step
from lumotree.tree_named import hydra27

WALKS, STEPS, VOCAB = 200_000, 6, 151_936


def drawn_step(number: int, vocab: int) -> Step:
    """Rows from flat to peaked as `number` grows; the drafted tokens are each row's likeliest."""
    logits = np.random.default_rng(number).standard_normal((32, vocab), dtype=np.float32) * (2 + number / 2)
    target = torch.softmax(torch.from_numpy(logits).double(), 1)
    best, tree = target.topk(4).indices.numpy(), hydra27()
    tokens = np.zeros(tree.n, np.int64)
    for row in tree.active_rows:
        for place, child in enumerate(tree.children(row)):
            tokens[child] = best[row, place]
    return Step(hydra27(tokens=tokens), target)


def seconds(walks: int = WALKS, steps: int = STEPS, vocab: int = VOCAB) -> dict[str, float]:
    """Processor seconds of `shared` and of each rule, over all steps."""
    spent = dict.fromkeys(["shared", *RULES], 0.0)
    for number in range(steps):
        step = drawn_step(number, vocab)
        start = time.process_time()
        ready = prepare(step)
        coins = coins_for(1, range(walks), number, step.tree.n, step.tree.active_rows)
        drafts = draw_drafts(ready, 1, range(walks), number)
        spent["shared"] += time.process_time() - start
        for name, rule in RULES.items():
            start = time.process_time()
            rule.select(ready, drafts, coins)
            spent[name] += time.process_time() - start
    return spent


def table(spent: Mapping[str, float]) -> str:
    """One line a rule: its own seconds and those with the shared part."""
    lines = [f"{name:<14}{spent[name]:8.2f}{spent[name] + spent['shared']:8.2f}" for name in spent if name != "shared"]
    return "\n".join([f"{'rule':<14}{'own s':>8}{'all s':>8}", *lines])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(seconds()))
