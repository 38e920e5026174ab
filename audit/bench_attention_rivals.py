"""What the attention bench compares: our kernels, and PyTorch's with a dense mask and with a mask program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from audit.bench_attention_work import Workload
from lumotree.backends.protocol import Limits
from lumotree.backends.splitk_backend import SplitKAttentionBackend
from lumotree.backends.triton_backend import TritonBackend
from lumotree.contract import Contract
from lumotree.errors import InputError
from lumotree.verifier.kernels import splitk_launch
from lumotree.verifier.kernels.splitk_launch import SplitShape

GROUPS = ("ours", "per_row", "sdpa", "flex")


@dataclass(frozen=True)
class Rival:
    """A way to compute the outputs. probs: the contract's word for how its weights are rounded, which picks the bound.

    run: one layer; out: bf16 `[T, Hq, dh]` of the last run; backend: for kernels that also decode, None else.
    """

    name: str
    probs: str
    run: Callable[[int], object]
    out: Callable[[], Tensor]
    backend: Any = None


def parse_shape(text: str) -> SplitShape:
    """`split=2048,rows=128,warps=8` as a SplitShape; what is not named is as in the default. Raises InputError."""
    known = {f.name for f in fields(SplitShape)}
    values = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in known or not (value.isascii() and value.isdigit()):
            raise InputError(f"--try: expected NAME=INTEGER with NAME among {', '.join(sorted(known))}, got {part!r}")
        values[name] = int(value)
    return replace(splitk_launch.DEFAULT, **values)


def _ours(w: Workload, backend: Any, name: str) -> Rival:
    d = w.plan.dims
    limits = Limits(w.plan.batch, w.batch.rows, int(w.trees[0].max_depth) + 1, w.plan.batch, 1)
    ws = backend.allocate(replace(d, layers=1), limits, torch.device(w.plan.device))
    out = torch.zeros((w.batch.rows, d.q_heads, d.head_dim), dtype=torch.bfloat16, device=w.plan.device)
    return Rival(
        name,
        backend.contract.probs,
        lambda layer: backend.attention_verify(w.ops, w.cache, w.batch, ws, out, layer),
        lambda: out,
        backend,
    )


def split_k(w: Workload, probs: str, shape: SplitShape) -> Rival:
    """Our split-K kernel."""
    contract = Contract(graph_safe=True, probs=probs)
    backend = SplitKAttentionBackend(contract, shape, max_keys=int(w.batch.page_table.shape[1]) * w.batch.page_size)
    text = f"{shape.split}/{shape.keys}/{shape.rows} w{shape.warps} s{shape.stages} p{shape.programs}"
    return _ours(w, backend, f"split-K {probs} {text}")


def _torch(w: Workload, name: str, layer: Callable[[int], Tensor]) -> Rival:
    """A kernel whose output is `[B, Hq, rows, dh]` in memory of its own."""
    last: list[Tensor] = []

    def run(number: int) -> None:
        last[:] = [layer(number)]

    return Rival(name, "bf16", run, lambda: last[0].transpose(1, 2).flatten(0, 1))


def _sdpa(w: Workload) -> Rival:
    c = w.contiguous
    attend = torch.nn.functional.scaled_dot_product_attention
    return _torch(
        w, "sdpa, dense mask, enable_gqa", lambda i: attend(c.q, c.k[i], c.v[i], attn_mask=c.mask, enable_gqa=True)
    )


def _sdpa_repeated(w: Workload) -> Rival:
    """Keys and values of each query head written out beforehand, for kernels that know no groups."""
    c, group = w.contiguous, w.plan.dims.q_heads // w.plan.dims.kv_heads
    k, v = ([x.repeat_interleave(group, 1) for x in xs] for xs in (c.k, c.v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return _torch(w, "sdpa, dense mask, heads repeated", lambda i: attend(c.q, k[i], v[i], attn_mask=c.mask))


def _flex(w: Workload) -> Rival:
    """FlexAttention with a row's ancestors as one word, compiled on a GPU. Raises InputError for larger trees."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if w.rows > 63:
        raise InputError(f"flex: expected at most 63 rows, got {w.rows}")
    c, prefix = w.contiguous, w.plan.prefix

    def visible(_: Tensor, __: Tensor, row: Tensor, key: Tensor) -> Tensor:
        bit = (c.ancestors[row] >> (key - prefix).clamp(min=0)) & 1
        return (key < prefix) | (bit == 1)

    block = create_block_mask(visible, None, None, w.rows, prefix + w.rows, device=w.plan.device)
    gpu = w.plan.device.startswith("cuda")
    attend: Any = torch.compile(flex_attention, dynamic=False) if gpu else flex_attention
    name = "FlexAttention" if gpu else "FlexAttention, not compiled"
    return _torch(w, name, lambda i: attend(c.q, c.k[i], c.v[i], block_mask=block, enable_gqa=True))


def rivals(w: Workload, groups: tuple[str, ...], tries: tuple[SplitShape, ...], probs: tuple[str, ...],
           ) -> Iterator[tuple[str, Callable[[], Rival]]]:  # fmt: skip
    """Label and maker of each, in the order of the table; memory is taken when one is made."""
    if "ours" in groups:
        for form in probs:
            for shape in tries:
                yield f"split-K {form} {shape}", partial(split_k, w, form, shape)
    if "per_row" in groups:
        yield "per row and head", partial(_ours, w, TritonBackend(), "per row and head")
    if "sdpa" in groups:
        yield "sdpa, dense mask, enable_gqa", partial(_sdpa, w)
        yield "sdpa, dense mask, heads repeated", partial(_sdpa_repeated, w)
    if "flex" in groups:
        yield "FlexAttention", partial(_flex, w)
