"""What a case must give: the backend's own one-token chain, and the float64 oracle with its derived bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from audit.cases import Case
from audit.errors_of import HeadErrors, state_errors
from audit.native import NativeChain, RowTrace
from lumotree.backends.protocol import GdnOps
from lumotree.contract import Contract
from lumotree.reference.oracle import gdn_oracle, published
from lumotree.reference.oracle_tokens import OracleAttention, OracleOutputs, attention_oracle, conv_oracle
from lumotree.tree_named import chain


@dataclass(frozen=True)
class GdnTruth:
    """Oracle of one row (see OracleRow): output and its bound, bound of the state as the pool must hold it.

    native: errors of the backend's own chain against the state that decoding leaves; native_out: output and bound of
    decoding. Both differ from the tree's only where the pool rounds what the tree carries in fp32.
    """

    out: Tensor
    out_bound: Tensor
    state_bound: Tensor
    native: HeadErrors
    native_out: tuple[Tensor, Tensor]


class GdnOracle:
    """The float64 recurrence of one request and layer.

    States of the real shape take 6 MiB a row, so they are dropped as soon as the chain has been held against them, and
    decoded again along one path when a published state turns out to differ from the chain.
    """

    def __init__(self, case: Case, request: int, layer: int) -> None:
        self.tree, self.contract = case.trees[request], case.contract
        lo, hi = case.offsets[request : request + 2]
        self.ops = _gdn_rows(case.gdn[layer], list(range(lo, hi)))  # copies: the case's own operands expire
        self.start = canonical(case.pools.recurrent[layer, case.state_slots[request]], case.contract).clone()

    def against(self, native: RowTrace) -> list[GdnTruth | None]:
        """Truth of every row, None for inactive ones."""
        if self.contract == self.native_contract:
            return self._walk(native, self.contract)
        tree, chain_ = self._walk(native, self.contract), self._walk(native, self.native_contract)
        return [
            t and c and replace(t, native=c.native, native_out=(c.out, c.out_bound))
            for t, c in zip(tree, chain_, strict=True)
        ]

    @property
    def native_contract(self) -> Contract:
        """What decoding does: a bf16 pool rounds the state at every token, whatever the tree carries in between."""
        return replace(self.contract, carry="bf16") if self.contract.state_dtype == torch.bfloat16 else self.contract

    def _walk(self, native: RowTrace, contract: Contract) -> list[GdnTruth | None]:
        truth: list[GdnTruth | None] = [None] * self.tree.n
        for row in gdn_oracle(self.tree, self.start, self.ops, contract, recycle=True):
            got = native.recurrent[row.row]
            assert got is not None
            state, bound = published(row, contract)
            errors = state_errors(canonical(got, contract), state, bound)
            truth[row.row] = GdnTruth(row.out, row.out_bound, bound, errors, (row.out, row.out_bound))
        return truth

    def state(self, row: int, ops: GdnOps | None = None) -> Tensor:
        """State float64 `[HV, dv, dk]` after the path to `row`, as the pool must hold it; `ops`: other operands."""
        path = list(self.tree.path(row))
        rows = _gdn_rows(ops or self.ops, path)
        *_, last = gdn_oracle(chain(len(path)), self.start, rows, self.contract)
        return published(last, self.contract)[0]


def _gdn_rows(ops: GdnOps, rows: list[int]) -> GdnOps:
    return GdnOps(ops.q[rows], ops.k[rows], ops.v[rows], ops.a[rows], ops.b[rows], ops.A_log, ops.dt_bias)


@dataclass(frozen=True)
class Truth:
    """Everything one request and layer is held against; a surface that is not covered is None.

    native: the backend's chain. gdn: by row, None for inactive rows.
    """

    native: RowTrace
    gdn: list[GdnTruth | None]
    gdn_oracle: GdnOracle | None
    conv: OracleOutputs | None
    attention: OracleAttention | None


def canonical(recurrent: Tensor, contract: Contract) -> Tensor:
    """A pool slot `[.., HV, ., .]` as fp32 `[.., HV, dv, dk]`."""
    view = recurrent.transpose(-1, -2) if contract.layout == "KV" else recurrent
    return view.to(torch.float32)


def _conv(case: Case, request: int, layer: int) -> OracleOutputs:
    tree, (lo, hi) = case.trees[request], case.offsets[request : request + 2]
    ops = case.conv[layer]
    history = case.pools.conv[layer, case.state_slots[request]]
    rows = type(ops)(ops.x[lo:hi], ops.weight)
    return conv_oracle(tree, history, rows, case.contract)


def _attention(case: Case, request: int, layer: int) -> OracleAttention:
    tree, (lo, hi) = case.trees[request], case.offsets[request : request + 2]
    ops = case.attention[layer]
    where = case.committed(request, range(tree.prefix_len))
    return attention_oracle(
        tree,
        type(ops)(ops.q[lo:hi], ops.k[lo:hi], ops.v[lo:hi], ops.cos, ops.sin),
        case.pools.cache.k[layer, where],
        case.pools.cache.v[layer, where],
        case.contract.probs,
    )


def find_truth(backend: Any, case: Case, surfaces: Sequence[str]) -> dict[tuple[int, int], Truth]:
    """Truth of every (request, layer). The case's pools must hold the committed state; they are not changed."""
    native = NativeChain(backend, case, surfaces)
    return {
        (request, layer): _truth(native.walk(request, layer), case, request, layer, surfaces)
        for request in range(len(case.trees))
        for layer in range(case.dims.layers)
    }


def _truth(native: RowTrace, case: Case, request: int, layer: int, surfaces: Sequence[str]) -> Truth:
    oracle = GdnOracle(case, request, layer) if "gdn" in surfaces else None
    return Truth(
        native,
        oracle.against(native) if oracle else [],
        oracle,
        _conv(case, request, layer) if "conv" in surfaces else None,
        _attention(case, request, layer) if "attention" in surfaces else None,
    )
