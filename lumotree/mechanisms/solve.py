"""Policies that verify by an ancestor-masked triangular solve: TreeWY-like and Weaver-like."""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.backends.variants import WYBackend, decay_products
from lumotree.mechanisms.deferred import DeferredFactors
from lumotree.mechanisms.factors import tf32
from lumotree.verifier.step import Operands


def solve(x: Operands, start: Tensor, parents: list[int], products: str) -> tuple[Tensor, Tensor]:
    """Outputs and factors u of a tree, see `lumotree.backends.variants.wy_outputs`.

    products: "fp32", or "tf32" for operands rounded as matrix units take them; the solve itself stays fp32.
    """
    take = tf32 if products == "tf32" else torch.Tensor.contiguous
    between, since = decay_products(x.decay, parents)
    beta, c = x.beta.unsqueeze(-1), since.unsqueeze(-1)
    k, q, r = take(x.k), take(x.q), take(start)
    lower = beta * between * (k @ k.transpose(-1, -2))
    right = beta * (x.v - c * (k @ r))
    u: Tensor = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    return c * (q @ r) + take(between * (q @ k.transpose(-1, -2))) @ take(u), u


class TreeWYBackend(DeferredFactors):
    """TreeWY-like: one fused masked solve verifies the tree; acceptance only marks the path, and the next verification
    first rebuilds the continuation state from the stash of the last one.

    From the paper's description: solve and deferral. Our reading: that the stash holds k, u and the decays of all rows,
    and that the rebuilding is one product of rank n.
    """

    name = "treewy"
    products = "fp32"

    def verify_tree(self, x: Operands, start: Tensor, parents: list[int]) -> tuple[Tensor, Tensor]:
        """Outputs and u of a tree."""
        return solve(x, start, parents, self.products)


class TreeWYTf32Backend(TreeWYBackend):
    """`treewy` with operands of its products rounded to TF32, as matrix units round them (rounded here in software, so
    that the accuracy is the same on any machine; the speed is not that of matrix units).
    """

    name = "treewy_tf32"
    products = "tf32"


class WeaverBackend(WYBackend):
    """Weaver-like: an ancestor-masked triangular solve verifies; acceptance runs the short recurrence over the path at
    once, in the contract's steps.

    From the paper's description: both halves. Our reading: that the recurrence takes the recorded operands, so that
    the published state is the native chain's bit for bit.
    """

    name = "weaver"
