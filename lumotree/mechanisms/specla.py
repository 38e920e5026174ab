"""SpecLA-like: the recurrence along parallel paths, factors buffered, one fused update later."""

from __future__ import annotations

from torch import Tensor

from lumotree.mechanisms.deferred import DeferredFactors
from lumotree.mechanisms.factors import recurrence
from lumotree.verifier.step import Operands


class SpecLABackend(DeferredFactors):
    """Verification runs the contract's steps on tiles that stay resident along each path and buffers each row's factors
    (k, u and the decay); the accepted path's factors update the state in one fused product, later.

    From the paper's description: resident tiles, parallel chains, buffered factors, the fused update. Our reading: that
    it happens at the next verification, and that u is taken from the recurrence and not solved for again.
    """

    name = "specla"

    def verify_tree(self, x: Operands, start: Tensor, parents: list[int]) -> tuple[Tensor, Tensor]:
        """Outputs and u of a tree, row by row."""
        return recurrence(x, start, parents)
