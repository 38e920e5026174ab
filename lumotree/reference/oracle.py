"""Float64 oracle of the recurrence: the contract's formulas from the same rounded inputs, with a derived bound.

Shares no arithmetic with the native reference. Follows the declared variant where the variant itself rounds (beta,
norm and carry in bf16); outputs are not rounded. Convolution and attention are in `oracle_tokens`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lumotree.backends.protocol import GdnOps
from lumotree.contract import Contract
from lumotree.reference import bounds
from lumotree.reference.bounds import RowBound
from lumotree.reference.rounding import TINY, to_bf16_rows, to_bf16_uncertain
from lumotree.tree import Tree

#: Heads worked on at a time on a CPU: 16 x 128 x 128 x 8 B = 2 MiB, fastest of 2..48 on a core with 1 MiB of L2.
CPU_TILE = 16


@dataclass(frozen=True)
class OracleRow:
    """What one active row must give, float64.

    out `[HV, dv]`; out_bound: most by which a bf16 output may differ from it, elementwise. state `[HV, dv, dk]` as a
    child reads it; state_bound `[HV, dv]`: most by which a value row may differ, in L2 norm over dk (so also any
    element). The walk still reads `state`: do not change it.
    """

    row: int
    out: Tensor
    out_bound: Tensor
    state: Tensor
    state_bound: Tensor


def _normalised(x: Tensor, contract: Contract, scale: float | None) -> tuple[Tensor, Tensor]:
    """Unit vectors `[A, HK, dk]` (times scale) and their L2 errors `[A, HK]`."""
    x, dim = x.to(torch.float64), x.shape[-1]
    unit = x / torch.sqrt(torch.einsum("ahk,ahk->ah", x, x) + 1e-6)[..., None]
    factor = 1.0 if scale is None else scale
    if contract.norm != "bf16":
        relative = bounds.norm_error(dim, scale is not None)
        value = unit * factor
        return value, relative * torch.linalg.vector_norm(value, dim=-1) + bounds.norm_floor(dim)
    error = bounds.norm_error(dim, False) * unit.abs() + TINY * bounds.NORM_GAIN
    rounded, spread = to_bf16_uncertain(unit, error)
    scaling = 0.0 if scale is None else 2 * bounds.U
    return rounded * factor, torch.linalg.vector_norm(spread + scaling * rounded.abs(), dim=-1) * factor


def _gate(ops: GdnOps, rows: Tensor, contract: Contract) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """decay, its error, beta, its error; float64 `[A, HV]`."""
    A_log = ops.A_log.to(torch.float64)
    c = ops.a[rows].to(torch.float64) + ops.dt_bias.to(torch.float64)
    softplus = torch.where(c > 20.0, c, torch.logaddexp(c, torch.zeros_like(c)))
    error = bounds.softplus_error(c, softplus, contract.softplus)
    decay, decay_err = torch.exp(-torch.exp(A_log) * softplus), bounds.decay_error(A_log, softplus, error)
    b = ops.b[rows].to(torch.float64)
    beta = torch.sigmoid(b)
    beta_err = bounds.sigmoid_error(b, beta)
    if contract.beta == "bf16":
        beta, beta_err = to_bf16_uncertain(beta, beta_err)
    return decay, decay_err, beta, beta_err


@dataclass(frozen=True)
class _Factors:
    """Everything about the active rows that does not need a state; first dim A."""

    decay: Tensor
    beta: Tensor
    v: Tensor
    keys: Tensor  # [A, HV, dk, 2]: k and q as columns, so that one product reads the state once
    key_dot_query: Tensor
    bound: RowBound

    def row_bound(self, i: int) -> RowBound:
        b = self.bound
        return RowBound(
            b.decay[i],
            b.decay_err[i],
            b.beta[i],
            b.beta_err[i],
            b.key[i],
            b.key_err[i],
            b.query[i],
            b.query_err[i],
            b.dk,
        )


def _factors(ops: GdnOps, rows: Tensor, contract: Contract) -> _Factors:
    dk, hk, hv = ops.k.shape[-1], ops.k.shape[1], ops.v.shape[1]
    heads = torch.arange(hv, device=ops.k.device)
    source = heads % hk if contract.head_map == "tiled" else heads[:hk].repeat_interleave(hv // hk)
    k, k_err = _normalised(ops.k[rows], contract, None)
    q, q_err = _normalised(ops.q[rows], contract, dk**-0.5)
    k, k_err, q, q_err = k[:, source], k_err[:, source], q[:, source], q_err[:, source]
    decay, decay_err, beta, beta_err = _gate(ops, rows, contract)
    norm = torch.linalg.vector_norm
    bound = RowBound(decay, decay_err, beta, beta_err, norm(k, dim=-1), k_err, norm(q, dim=-1), q_err, dk)
    dots = torch.einsum("ahk,ahk->ah", k, q)
    return _Factors(decay, beta, ops.v[rows].to(torch.float64), torch.stack([k, q], -1), dots, bound)


@dataclass(frozen=True)
class _Node:
    """A state, the L2 norms of its value rows and their errors."""

    state: Tensor
    norm: Tensor
    error: Tensor


def _advance(
    parent: _Node, f: _Factors, i: int, contract: Contract, tile: int, buffer: Tensor
) -> tuple[_Node, Tensor, Tensor]:
    """Child node as its own children read it (in buffer, if the contract does not round it), output, output bound.

    R k and R q come from one product with the parent: R' k = d R k and R_new q = d R q + u (k . q).
    """
    state, norm = buffer, torch.empty_like(parent.norm)
    out, surprise = torch.empty_like(norm), torch.empty_like(norm)
    for lo in range(0, state.shape[0], tile):
        part = slice(lo, lo + tile)
        decay, R = f.decay[i, part, None], parent.state[part]
        products = torch.bmm(R, f.keys[i, part])
        surprise[part] = f.v[i, part] - decay * products[..., 0]
        u = f.beta[i, part, None] * surprise[part]
        out[part] = decay * products[..., 1] + u * f.key_dot_query[i, part, None]
        new = torch.mul(R, decay[..., None], out=state[part])
        new.addcmul_(u[..., None], f.keys[i, part, None, :, 0])
        torch.linalg.vector_norm(new, dim=-1, out=norm[part])
    bound = f.row_bound(i)
    error = bound.step(parent.norm, parent.error, norm, surprise.abs())
    out_bound = bound.output(norm, error, out)
    if contract.carry == "bf16":
        state, error = to_bf16_rows(state, error)
        norm = torch.linalg.vector_norm(state, dim=-1)
    return _Node(state, norm, error), out, out_bound


def _depth_first(tree: Tree) -> list[int]:
    """Active rows, each right behind its parent or a finished sibling: few states are alive at a time."""
    parents = tree.parents.tolist()
    children: dict[int, list[int]] = {}
    for row in np.flatnonzero(tree.active).tolist():
        children.setdefault(parents[row], []).append(row)
    order, stack = [], [-1]
    while stack:
        row = stack.pop()
        order.append(row)
        stack += reversed(children.get(row, []))
    return order[1:]


def gdn_oracle(
    tree: Tree,
    R0: Tensor,
    ops: GdnOps,
    contract: Contract,
    *,
    R0_bound: Tensor | None = None,
    recycle: bool = False,
    tile: int | None = None,
) -> Iterator[OracleRow]:
    """Walk one tree and yield its active rows depth first, each with output, state and bounds.

    Of `tree` only parents and active rows are read. R0: committed state `[HV, dv, dk]`, exact
    unless `R0_bound [HV, dv]` says how far a backend's may be. ops: operands of the N rows; those of inactive rows are
    not read. A state is dropped when its last active child is done. Runs where R0 is; `tile` heads at a time, by
    default CPU_TILE on a CPU and all on a GPU.

    recycle: faster (fresh memory costs more than the arithmetic), but a yielded `state` is overwritten when further
    rows are drawn: compare or copy it at once.
    """
    parents, live = tree.parents.tolist(), _depth_first(tree)
    waiting = Counter(parents[row] for row in live)
    f = _factors(ops, torch.tensor(live, device=R0.device), contract)
    state = R0.to(torch.float64, copy=True).contiguous()
    norm = torch.linalg.vector_norm(state, dim=-1)
    nodes = {-1: _Node(state, norm, torch.zeros_like(norm) if R0_bound is None else R0_bound.to(norm))}
    tile = tile or (CPU_TILE if R0.device.type == "cpu" else R0.shape[0])
    free: list[Tensor] = []
    for i, row in enumerate(live):
        parent = parents[row]
        buffer = free.pop() if free else torch.empty_like(state)
        node, out, out_bound = _advance(nodes[parent], f, i, contract, tile, buffer)
        waiting[parent] -= 1
        done = [] if waiting[parent] else [nodes.pop(parent)]
        if waiting[row]:
            nodes[row] = node
        yield OracleRow(row, out, out_bound, node.state, node.error)
        if recycle:
            done += [] if row in nodes else [node]
            free += [n.state for n in done]


def published(row: OracleRow, contract: Contract) -> tuple[Tensor, Tensor]:
    """What the pool holds when `row` is the last accepted one: state `[HV, dv, dk]`, L2 bound of its value rows."""
    if contract.state_dtype == torch.bfloat16 and contract.carry == "fp32":
        return to_bf16_rows(row.state, row.state_bound)
    return row.state, row.state_bound
