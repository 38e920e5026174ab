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
from audit.truth import Truth


def root_reach(case: Case, truth: dict[Key, Truth]) -> float:
    """How many derived bounds the deepest state of request 0 moves when the root's value changes by one unit.

    Above 1 the change shows on every rung. Request 0, layer 0.
    """
    tree, oracle = case.trees[0], truth[0, 0].gdn_oracle
    assert oracle is not None
    last = max(tree.leaves, key=lambda row: int(tree.depth[row]))
    v = oracle.ops.v.clone()
    v[0] += 1
    moved = oracle.state(last, replace(oracle.ops, v=v)) - oracle.state(last)
    known = truth[0, 0].gdn[last]
    assert known is not None
    return float((torch.linalg.vector_norm(moved, dim=-1) / known.state_bound).max())


def memory_tokens(case: Case) -> tuple[float, float]:
    """Tokens after which a head's mean decay has taken a state below 2^-24 of itself: median and largest over heads."""
    ops = case.gdn[0]
    step = ops.a.double()[case.active] + ops.dt_bias.double()
    rate = (ops.A_log.double().exp() * torch.nn.functional.softplus(step, threshold=1e3)).mean(0)
    tokens = (24 * math.log(2) / rate.clamp(min=1e-9)).sort().values
    return float(tokens[len(tokens) // 2]), float(tokens[-1])
