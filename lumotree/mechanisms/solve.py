"""Policies that verify by an ancestor-masked triangular solve: TreeWY-like and Weaver-like."""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.backends.variants import WYBackend, wy_solve
from lumotree.mechanisms.deferred import DeferredFactors
from lumotree.mechanisms.factors import tf32
from lumotree.verifier.step import Operands


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
        return wy_solve(x, start, parents, tf32 if self.products == "tf32" else torch.Tensor.contiguous)


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
