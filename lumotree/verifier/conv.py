"""Causal convolution over tree paths: every row reads its own ancestors' inputs, reaching back into the history.

Only elementwise products and additions in a spelled-out order, and an exp of fixed shape per row: no row's bits
depend on the others (see `lumotree.verifier.step`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lumotree.backends.protocol import Batch
from lumotree.verifier.lanes import Lane, ancestor_rows
from lumotree.verifier.step import ONE, rowwise


def silu(x: Tensor) -> Tensor:
    """fp32 `x / (1 + exp(-x))` of `x [T, D]`."""
    return x / rowwise(torch.exp, -x).add_(ONE)


def windows(x: Tensor, history: Tensor, batch: Batch, width: int) -> tuple[list[int], Tensor]:
    """Active rows, and their windows bf16 `[rows, width, D]`: `width - 1` earlier inputs and their own, oldest first.

    x: bf16 `[T, D]`; history: one layer's pool `[S, D, width - 1]`.
    """
    slots, request = batch.state_slot.tolist(), batch.row_request.tolist()
    paths = ancestor_rows(batch)
    live = sorted({request[row] for row in paths})
    base = {r: x.shape[0] + i * (width - 1) for i, r in enumerate(live)}
    if len(live) == len(paths) == x.shape[0] == 1:  # one token of one request
        return list(paths), torch.cat([history[slots[live[0]]].t(), x]).unsqueeze(0)
    past = history[torch.tensor([slots[r] for r in live], dtype=torch.int64, device=x.device)]
    source = torch.cat([x, past.transpose(1, 2).reshape(-1, x.shape[1])])
    index = []
    for row, path in paths.items():
        committed = [base[request[row]] + j for j in range(width - 1)]
        index.append([*committed, *path][-width:])
    taken = torch.tensor(index, dtype=torch.int64, device=x.device).reshape(-1, width)
    return list(paths), source[taken]


def convolve(window: Tensor, weight: Tensor, form: str) -> Tensor:
    """bf16 `[rows, D]`: taps of `window [rows, W, D]` summed oldest first in fp32, then SiLU.

    weight: bf16 `[D, W]`. form: "fp32", or "bf16_product" to round each product to bf16 before the sum.
    """
    products = window.float() * weight.float().t().contiguous()
    if form == "bf16_product":
        products = products.bfloat16().float()
    total, *others = products.unbind(1)
    for product in others:
        total = total + product
    return silu(total).bfloat16()


def verify(x: Tensor, weight: Tensor, history: Tensor, batch: Batch, out: Tensor, form: str) -> None:
    """Outputs of all active rows into `out` bf16 `[T, D]`; `history [S, D, W-1]` is only read."""
    rows, window = windows(x, history, batch, weight.shape[1])
    if len(rows) == x.shape[0]:
        out[: len(rows)].copy_(convolve(window, weight, form))
    elif rows:
        out[torch.tensor(rows, device=x.device)] = convolve(window, weight, form)


def publish(x: Tensor, history: Tensor, lanes: Sequence[Lane], slots: Sequence[int]) -> None:
    """Shift each accepted path's inputs `x [T, D]` into its own slot of `history [S, D, W-1]`, in place."""
    if not lanes:
        return
    if len(lanes) == len(lanes[0].rows) == 1:  # one token of one request
        own, row = history[slots[lanes[0].request]], lanes[0].rows[0]
        own.copy_(torch.cat([own, x[row].unsqueeze(1)], 1)[:, 1:])
        return
    kept = history.shape[2]
    place = torch.tensor([slots[lane.request] for lane in lanes], device=x.device)
    rows = [row for lane in lanes for row in lane.rows[-kept:]]
    index, end = [], len(lanes) * kept
    for i, lane in enumerate(lanes):
        fresh = min(kept, len(lane.rows))
        index.append([*range(i * kept + fresh, (i + 1) * kept), *range(end, end + fresh)])
        end += fresh
    past = history[place].transpose(1, 2).reshape(-1, x.shape[1])
    source = torch.cat([past, x[torch.tensor(rows, device=x.device)]])
    history[place] = source[torch.tensor(index, device=x.device)].transpose(1, 2)
