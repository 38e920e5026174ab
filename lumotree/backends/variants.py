"""Correct kernels that are not the torch backend bit for bit: controls that an audit must pass.

Each does what a peer legitimately does: other reduction orders, division by the root, another state layout, or the
recurrence solved as a triangular system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lumotree.backends.operands import check_operands, check_recurrent_pool
from lumotree.backends.protocol import Batch, GdnOps
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.errors import ContractError
from lumotree.verifier.gdn import matrix
from lumotree.verifier.lanes import ancestor_rows, check_room
from lumotree.verifier.step import Operands, halve_rows
from lumotree.verifier.workspace import Workspace

SPLITS = 4
ROW_BLOCK = 8


def split_sum(tile: Tensor) -> Tensor:
    """Sum over dk of `[.., dk, dv]` as split-K does: contiguous parts summed each, then their partial sums in order."""
    width = -(-tile.shape[-2] // SPLITS)
    partial = [halve_rows(part) for part in torch.split(tile, width, dim=-2)]
    total = partial[0].clone()
    for value in partial[1:]:
        total.add_(value)
    return total


def block_sum(tile: Tensor) -> Tensor:
    """Sum over dk of `[.., dk, dv]` as a `[K, V]` kernel does: blocks of rows added in memory order, then halved."""
    blocks = torch.split(tile, ROW_BLOCK, dim=-2)
    for block in blocks[1:]:
        tile[..., : block.shape[-2], :].add_(block)
    return halve_rows(blocks[0])


class SplitKBackend(TorchBackend):
    """Verification splits the sums over dk, one-token decoding and replay do not (as split-K kernels in serving)."""

    name = "split_k"
    contract = Contract(claims="algebra")
    reduce_verify = staticmethod(split_sum)


class SqrtNormBackend(TorchBackend):
    """L2 norm by `x / sqrt(sum + eps)`."""

    name = "sqrt_norm"
    contract = Contract(norm="sqrt")


class KVLayoutBackend(TorchBackend):
    """State pool `[K, V]`, with sums over dk in the order of that layout everywhere."""

    name = "kv_layout"
    contract = Contract(layout="KV")
    reduce_native = staticmethod(block_sum)
    reduce_verify = staticmethod(block_sum)


class WYBackend(TorchBackend):
    """Verification by an ancestor-masked unit triangular solve (WY / UT transform); publication by the recurrence.

    Raises ContractError for a carry in bf16: no state is passed from row to row that could be rounded.
    """

    name = "wy"
    contract = Contract(claims="algebra")

    def __init__(self, contract: Contract | None = None) -> None:
        super().__init__(contract)
        if self.contract.carry != "fp32" or self.contract.claims != "algebra":
            raise ContractError(
                f"wy: expected carry='fp32' and claims='algebra', got carry={self.contract.carry!r}, "
                f"claims={self.contract.claims!r}"
            )

    def gdn_verify(self, ops: GdnOps, pool: Tensor, batch: Batch, ws: Workspace, out: Tensor, layer: int) -> None:
        """Outputs of each request's active rows from one solve; records the replay operands."""
        check_operands("gdn_verify", ops, batch.rows)
        check_recurrent_pool("gdn_verify", pool, ops, self.contract)
        check_room(batch, ws.limits, layer)
        ws.record_gdn(ops, layer)
        for slot, index, local, parents in local_rows(self._prepare(ops), batch):
            start = matrix(pool[layer], slot, slice(None), self.contract.layout).to(torch.float32)
            out[index] = wy_solve(local, start, parents)[0].transpose(0, 1).to(out.dtype)


def local_rows(ops: Operands, batch: Batch) -> Iterator[tuple[int, Tensor, Operands, list[int]]]:
    """For each request with active rows: its state slot, these rows (parents first), their operands `[HV, n, ..]` and
    their parents, counted among them (-1 = committed state).
    """
    paths = ancestor_rows(batch)
    slots, request = batch.state_slot.tolist(), batch.row_request.tolist()
    for i in sorted({request[row] for row in paths}):
        rows = [row for row in paths if request[row] == i]
        at = {row: n for n, row in enumerate(rows)}
        parents = [at[paths[row][-2]] if len(paths[row]) > 1 else -1 for row in rows]
        index = torch.tensor(rows, device=ops.q.device)
        local = Operands(*(x[index].transpose(0, 1) for x in (ops.q, ops.k, ops.v, ops.decay, ops.beta)))
        yield slots[i], index, local, parents


def decay_products(decay: Tensor, parents: list[int]) -> tuple[Tensor, Tensor]:
    """Products of `decay [H, n]` along tree paths, exact where a decay is 0.

    Returns `between [H, n, n]`, for an ancestor s of t the product over the rows after s up to t (1 for s = t, 0 for
    rows that are no ancestors), and `since [H, n]`, the product from the root to t.
    """
    heads, n = decay.shape
    between = torch.zeros((heads, n, n), dtype=decay.dtype, device=decay.device)
    since = torch.ones((heads, n), dtype=decay.dtype, device=decay.device)
    for t, parent in enumerate(parents):
        if parent >= 0:
            between[:, t] = between[:, parent] * decay[:, t, None]
        since[:, t] = decay[:, t] * (since[:, parent] if parent >= 0 else 1.0)
        between[:, t, t] = 1.0
    return between, since


def _as_is(x: Tensor) -> Tensor:
    return x


def wy_solve(
    x: Operands, start: Tensor, parents: list[int], take: Callable[[Tensor], Tensor] = _as_is
) -> tuple[Tensor, Tensor]:
    """fp32 outputs and factors u, both `[H, n, dv]`, of a tree, parents first.

    x: operands `[H, n, ..]`; start: committed state `[H, dk, dv]`; take: what becomes of the operands of products (the
    solve itself stays fp32). With D = `between` and c = `since`, unrolling the
    recurrence gives `u_t = beta_t (v_t - c_t R0 k_t - sum_{s<t} D_ts (k_s . k_t) u_s)`, a unit lower triangular system
    in u, and `o_t = c_t R0 q_t + sum_{s<=t} D_ts (k_s . q_t) u_s` (Gated DeltaNet, arXiv 2412.06464, section 3.3, with
    the causal mask replaced by ancestry).
    """
    between, since = decay_products(x.decay, parents)
    beta, c = x.beta.unsqueeze(-1), since.unsqueeze(-1)
    k, q, r = take(x.k), take(x.q), take(start)
    keys = k.transpose(-1, -2)
    lower = beta * between * (k @ keys)
    right = beta * (x.v - c * (k @ r))
    u: Tensor = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    return c * (q @ r) + take(between * (q @ keys)) @ take(u), u
