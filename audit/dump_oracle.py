"""Errors of a recorded cycle against float64, as multiples of the derived bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from audit.dump_chain import Entry
from audit.errors_of import output_errors, state_errors
from lumotree.backends.protocol import SHARED_OPERANDS
from lumotree.reference.oracle import gdn_oracle, published
from lumotree.reference.oracle_tokens import attention_oracle, conv_oracle

#: Row, worst error / derived bound, head where it is.
Found = list[tuple[int, float, int]]


class DumpOracle:
    """The float64 oracles of one request of a recorded cycle; the state before it is taken as recorded.

    What was recorded with a NaN or infinity in it has no bound: every row is then outside by infinity.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry, self.tensors = entry, entry.record.tensors

    def gdn(self, layer: int, path: Sequence[int]) -> Found:
        """Outputs of the active rows, and the published state at the end of the path."""
        e, contract = self.entry, self.entry.record.contract
        start, out = self.tensors["before.recurrent"][layer, e.index], self.tensors["gdn.out"][layer, e.rows]
        if not self._finite([start], e.gdn(layer)):
            return self._outside()
        found: Found = []
        for row in gdn_oracle(e.tree, start, e.gdn(layer), contract, recycle=True):
            errors = output_errors(out[row.row], row.out, row.out_bound)
            found.append((row.row, errors.ratio, errors.worst_head))
            if path and row.row == path[-1]:
                after = self.tensors["after.recurrent"][layer, e.index]
                errors = state_errors(after, *published(row, contract))
                found.append((row.row, errors.ratio, errors.worst_head))
        return found

    def conv(self, layer: int) -> Found:
        """Outputs of the active rows."""
        e = self.entry
        history = self.tensors["before.conv"][layer, e.index]
        if not self._finite([history], e.conv(layer)):
            return self._outside()
        truth = conv_oracle(e.tree, history, e.conv(layer), e.record.contract)
        return self._outputs(self.tensors["conv.out"][layer, e.rows], truth.rows, truth.out, truth.bound)

    def attention(self, layer: int, k: Tensor, v: Tensor) -> Found:
        """Outputs and candidate keys of the active rows behind the committed keys and values `[prefix, ..]`."""
        e = self.entry
        if not self._finite([k, v], e.attention(layer)):
            return self._outside()
        truth = attention_oracle(e.tree, e.attention(layer), k, v, e.record.contract.probs)
        found = self._outputs(self.tensors["attention.out"][layer, e.rows], truth.rows, truth.out, truth.bound)
        keys = self.tensors["candidate.k"][layer, e.rows]
        return found + self._outputs(keys, truth.rows, truth.keys, truth.keys_bound)

    def _finite(self, states: Sequence[Tensor], ops: Any) -> bool:
        """Whether states and the operands of active rows are numbers."""
        active = list(self.entry.tree.active_rows)
        read = [x if n in SHARED_OPERANDS else x[active] for n, x in vars(ops).items()]
        return all(bool(x.isfinite().all()) for x in (*states, *read))

    def _outside(self) -> Found:
        return [(row, float("inf"), 0) for row in self.entry.tree.active_rows]

    @staticmethod
    def _outputs(got: Tensor, rows: Sequence[int], want: Tensor, bound: Tensor) -> Found:
        found: Found = []
        for at, row in enumerate(rows):
            shape = want[at].shape if want[at].dim() > 1 else (1, -1)
            errors = output_errors(got[row].view(shape), want[at].view(shape), bound[at].view(shape))
            found.append((row, errors.ratio, errors.worst_head))
        return found
