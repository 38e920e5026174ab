"""What a case must give: the backend's own one-token chain, and the float64 oracle with its derived bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audit.cases import Case
from audit.native import NativeChain, RowTrace
from lumotree.contract import Contract
from lumotree.reference.oracle import OracleRow, gdn_oracle, published
from lumotree.reference.oracle_tokens import OracleAttention, OracleOutputs, attention_oracle, conv_oracle


@dataclass(frozen=True)
class GdnTruth:
    """Oracle of one row: output and state with their bounds (see OracleRow); state as the pool must hold it."""

    out: Tensor
    out_bound: Tensor
    state: Tensor
    state_bound: Tensor


@dataclass(frozen=True)
class Truth:
    """Everything one request and layer is held against; a surface that is not covered is None.

    native: the backend's chain. gdn: by row, None for inactive rows.
    """

    native: RowTrace
    gdn: list[GdnTruth | None]
    conv: OracleOutputs | None
    attention: OracleAttention | None


def canonical(recurrent: Tensor, contract: Contract) -> Tensor:
    """A pool slot `[.., HV, ., .]` as fp32 `[.., HV, dv, dk]`."""
    view = recurrent.transpose(-1, -2) if contract.layout == "KV" else recurrent
    return view.to(torch.float32)


def _gdn(case: Case, request: int, layer: int) -> list[GdnTruth | None]:
    tree, (lo, hi) = case.trees[request], case.offsets[request : request + 2]
    ops = case.gdn[layer]
    rows = type(ops)(ops.q[lo:hi], ops.k[lo:hi], ops.v[lo:hi], ops.a[lo:hi], ops.b[lo:hi], ops.A_log, ops.dt_bias)
    start = canonical(case.pools.recurrent[layer, case.state_slots[request]], case.contract)
    truth: list[GdnTruth | None] = [None] * tree.n
    for row in gdn_oracle(tree, start, rows, case.contract):
        truth[row.row] = _gdn_row(row, case.contract)
    return truth


def _gdn_row(row: OracleRow, contract: Contract) -> GdnTruth:
    return GdnTruth(row.out, row.out_bound, *published(row, contract))


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
    )


def find_truth(backend: Any, case: Case, surfaces: Sequence[str]) -> dict[tuple[int, int], Truth]:
    """Truth of every (request, layer). The case's pools must hold the committed state; they are not changed."""
    chain = NativeChain(backend, case, surfaces)
    return {
        (request, layer): Truth(
            chain.walk(request, layer),
            _gdn(case, request, layer) if "gdn" in surfaces else [],
            _conv(case, request, layer) if "conv" in surfaces else None,
            _attention(case, request, layer) if "attention" in surfaces else None,
        )
        for request in range(len(case.trees))
        for layer in range(case.dims.layers)
    }
