"""Power of the inputs: does a change at the root still show in the deepest state?

A final-state comparison is blind when the state forgets (methods.md: a fault 64 tokens back left error 0.000), so a run
whose inputs forget too fast proves nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from audit.cases import Case
from audit.judge import Key
from audit.truth import Truth, canonical
from lumotree.reference.oracle import gdn_oracle, published
from lumotree.tree_named import chain


def root_reach(case: Case, truth: dict[Key, Truth]) -> float:
    """How many derived bounds the deepest state of request 0 moves when the root's value changes by one unit.

    Above 1 the change shows on every rung. Request 0, layer 0; pools must hold the committed state.
    """
    tree, ops = case.trees[0], case.gdn[0]
    path = list(tree.path(max(tree.leaves, key=lambda row: int(tree.depth[row]))))
    v = ops.v[path].clone()
    v[0] += 1
    rows = replace(ops, q=ops.q[path], k=ops.k[path], v=v, a=ops.a[path], b=ops.b[path])
    start = canonical(case.pools.recurrent[0, case.state_slots[0]], case.contract)
    *_, last = gdn_oracle(chain(len(path)), start, rows, case.contract)
    moved, _ = published(last, case.contract)
    known = truth[0, 0].gdn[path[-1]]
    assert known is not None
    row_l2 = torch.linalg.vector_norm(moved - known.state, dim=-1)
    return float((row_l2 / known.state_bound).max())


def memory_tokens(case: Case) -> tuple[float, float]:
    """Tokens after which a head's mean decay has taken a state below 2^-24 of itself: median and largest over heads."""
    ops = case.gdn[0]
    step = ops.a.double()[case.active] + ops.dt_bias.double()
    rate = (ops.A_log.double().exp() * torch.nn.functional.softplus(step, threshold=1e3)).mean(0)
    tokens = (24 * math.log(2) / rate.clamp(min=1e-9)).sort().values
    return float(tokens[len(tokens) // 2]), float(tokens[-1])
