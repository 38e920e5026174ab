"""Errors of one arm against the oracle, in the form that the derived rung, the paired rule and the envelope read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from audit.distance import ratios


@dataclass(frozen=True)
class HeadErrors:
    """Errors of one cell by head `[heads]`, float64: RMS and largest error, RMS and largest magnitude of the oracle.

    ratio: worst error / derived bound; worst_head: where.
    """

    rms: Tensor
    largest: Tensor
    oracle_rms: Tensor
    oracle_largest: Tensor
    ratio: float
    worst_head: int

    def relative(self) -> tuple[Tensor, Tensor]:
        """RMS error / oracle RMS and largest error / oracle largest, by head; 0 where the oracle is 0 and so is the
        error, infinite where only the oracle is."""
        return _relative(self.rms, self.oracle_rms), _relative(self.largest, self.oracle_largest)


def _relative(error: Tensor, size: Tensor) -> Tensor:
    quotient = error / size
    return torch.where((size == 0) & (error == 0), torch.zeros_like(quotient), quotient)


def _worst(by_head: Tensor) -> tuple[float, int]:
    head = int(by_head.argmax())
    return float(by_head[head]), head


def _largest(x: Tensor) -> Tensor:
    """Largest magnitude by head; NaN where there is one. Seven times as fast as the infinity norm."""
    flat = x.flatten(1)
    return torch.maximum(flat.amax(1), -flat.amin(1))


def state_errors(got: Tensor, oracle: Tensor, bound: Tensor) -> HeadErrors:
    """Errors of a state fp32 `[HV, dv, dk]`; bound `[HV, dv]` is on the L2 norm of a value row."""
    error = got.to(torch.float64).sub_(oracle)
    row_l2 = torch.linalg.vector_norm(error, dim=-1)
    oracle_l2 = torch.linalg.vector_norm(oracle, dim=-1)
    count = error.shape[1] * error.shape[2]
    ratio, head = _worst(ratios(row_l2, bound).amax(-1))
    return HeadErrors(
        row_l2.square().sum(-1).div(count).sqrt(),
        _largest(error),
        oracle_l2.square().sum(-1).div(count).sqrt(),
        _largest(oracle),
        ratio,
        head,
    )


def output_errors(got: Tensor, oracle: Tensor, bound: Tensor) -> HeadErrors:
    """Errors of outputs `[heads, n]` (bf16) against the oracle's, bound of the same shape."""
    error = got.to(torch.float64) - oracle
    ratio, head = _worst(ratios(error, bound).amax(-1))
    return HeadErrors(
        error.square().mean(-1).sqrt(),
        error.abs().amax(-1),
        oracle.square().mean(-1).sqrt(),
        oracle.abs().amax(-1),
        ratio,
        head,
    )


class UnitStatistics:
    """Statistics of one envelope unit, accumulated over its cells: worst and mean relative errors of each quantity."""

    def __init__(self) -> None:
        self._rms: dict[str, list[Tensor]] = {}
        self._largest: dict[str, list[Tensor]] = {}

    def add(self, quantity: str, errors: HeadErrors) -> None:
        """Add a cell of `quantity` ("gdn.state", "gdn.out", "conv.out", "attention.out")."""
        rms, largest = errors.relative()
        self._rms.setdefault(quantity, []).append(rms)
        self._largest.setdefault(quantity, []).append(largest)

    def values(self) -> dict[str, float]:
        """Statistic -> value: `.max` is the largest element's error in the worst head and cell, `.mean` the mean RMS.

        Few statistics on purpose: each shares the envelope's false-alarm probability. The maximum sees one bad cell,
        the mean a small loss everywhere; output errors are mostly their own bf16 rounding.
        """
        found: dict[str, float] = {}
        for quantity, cells in self._rms.items():
            found[f"{quantity}.mean"] = float(torch.cat(cells).mean())
            found[f"{quantity}.max"] = float(torch.cat(self._largest[quantity]).amax())
        return found
