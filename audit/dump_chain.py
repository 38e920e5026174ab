"""What must be true after a recorded cycle: one-token chains from the recorded state and operands, layer by layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from audit.calls import call
from audit.guard import poison_
from lumotree.backends.batch import build_batch
from lumotree.backends.protocol import SHARED_OPERANDS, AttentionOps, Batch, ConvOps, GdnOps, StepOps, StepOut
from lumotree.errors import RecordError
from lumotree.record_file import CycleRecord
from lumotree.reference.gdn import store_state
from lumotree.state import KVCache, Pools
from lumotree.tree import Tree


@dataclass(frozen=True)
class Entry:
    """One live request of a recorded cycle. index: its place in the batch; rows of the batch `lo:hi`."""

    record: CycleRecord
    index: int
    lo: int
    hi: int

    @property
    def name(self) -> str:
        """Name of the request."""
        return self.record.requests[self.index]

    @property
    def rows(self) -> slice:
        """Its rows of the batch."""
        return slice(self.lo, self.hi)

    @property
    def prefix(self) -> int:
        """Committed tokens before the cycle."""
        return int(self.record.tensors["tree.prefix_len"][self.index])

    @property
    def accepted(self) -> list[int]:
        """Accepted rows, local; not checked against the tree."""
        length = int(self.record.tensors["path.length"][self.index])
        rows: list[int] = self.record.tensors["path.rows"][self.index].tolist()
        return rows[: max(length, 0)]

    @cached_property
    def tree(self) -> Tree:
        """The verified tree. Raises TreeError when the recorded one is none."""
        t = self.record.tensors
        return Tree.make(
            t["tree.parent"][self.rows].numpy(),
            tokens=t["tree.tokens"][self.rows].numpy(),
            active=t["tree.active"][self.rows].numpy(),
            slots=t["tree.row_slot"][self.rows].numpy(),
            prefix_len=self.prefix,
        )

    def gdn(self, layer: int) -> GdnOps:
        """Operands of its rows."""
        t = self.record.tensors
        per_row = {n: t[f"gdn.{n}"][layer, self.rows] for n in ("q", "k", "v", "a", "b")}
        return GdnOps(**per_row, A_log=t["gdn.A_log"][layer], dt_bias=t["gdn.dt_bias"][layer])

    def conv(self, layer: int) -> ConvOps:
        """Operands of its rows."""
        t = self.record.tensors
        return ConvOps(t["conv.x"][layer, self.rows], t["conv.weight"][layer])

    def attention(self, layer: int) -> AttentionOps:
        """Operands of its rows."""
        t = self.record.tensors
        per_row = {n: t[f"attention.{n}"][layer, self.rows] for n in ("q", "k", "v")}
        return AttentionOps(**per_row, cos=t["attention.cos"], sin=t["attention.sin"])


def entries(record: CycleRecord) -> Iterator[Entry]:
    """The live requests of a cycle. Raises RecordError when its row ranges are no ranges of the batch, a live slot has
    no name, a name no slot, or a name is there twice."""
    cu = record.tensors["tree.cu_rows"].tolist()
    rows = len(record.tensors["tree.parent"])
    if cu[0] != 0 or cu[-1] != rows or any(a > b for a, b in itertools.pairwise(cu)):
        raise RecordError(f"cycle {record.sequence}: tree.cu_rows {cu} are no ranges of {rows} rows")
    slots, names = record.tensors["tree.state_slot"].tolist(), [name for name in record.requests if name]
    if [slot >= 0 for slot in slots] != [bool(name) for name in record.requests] or len(set(names)) < len(names):
        raise RecordError(f"cycle {record.sequence}: expected one name for each live request and '' for padding, got "
                          f"{list(record.requests)} for state slots {slots}")  # fmt: skip
    for i, name in enumerate(record.requests):
        if name:
            if cu[i] == cu[i + 1]:
                raise RecordError(f"cycle {record.sequence}: request {name!r} has no row; expected at least its root")
            yield Entry(record, i, cu[i], cu[i + 1])


@dataclass(frozen=True)
class ChainRow:
    """After one row of the chain: state in the pool's form or None, conv history, cached key and value, outputs; None
    for a surface that was not stepped."""

    recurrent: Tensor | None = None
    conv: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    gdn_out: Tensor | None = None
    conv_out: Tensor | None = None
    attention_out: Tensor | None = None


Chain = dict[int, ChainRow]


class LayerChain:
    """Walks the active rows of one recorded request through a backend's own `native_step`, one layer at a time.

    device: where the steps run; what they leave is handed back on the CPU.
    """

    def __init__(self, backend: Any, entry: Entry, device: torch.device | str = "cpu") -> None:
        self.backend, self.entry, self.record = backend, entry, entry.record
        self.device = torch.device(device)
        deepest = entry.prefix + entry.tree.max_depth
        self.steps = [self._step_batch(p) for p in range(entry.prefix, deepest + 1)]
        self.flat = deepest + 1

    def _step_batch(self, position: int) -> Batch:
        """One token at `position`; flat KV slot = position."""
        table = torch.arange(position + 1, dtype=torch.int32)[None]
        tree = Tree.make([-1], slots=[position], prefix_len=position)
        return build_batch([tree], state_slots=[0], page_table=table, page_size=1, device=self.device)

    def recurrent(self, layer: int) -> Chain:
        """GDN and convolution of one layer."""
        t, e = self.record.tensors, self.entry
        gdn = self._moved(e.gdn(layer)) if e.record.has("gdn") else None
        conv = self._moved(e.conv(layer)) if e.record.has("conv") else None
        pools = self._pools(1, 1)
        start = torch.empty_like(pools.recurrent[0, 0])
        store_state(start, t["before.recurrent"][layer, e.index], self.record.contract)
        found: Chain = {}
        for row in e.tree.active_rows:
            before = found.get(int(e.tree.parents[row]), ChainRow(start, t["before.conv"][layer, e.index]))
            assert before.recurrent is not None and before.conv is not None
            pools.recurrent[0, 0], pools.conv[0, 0] = before.recurrent, before.conv
            ops = StepOps(gdn and _one(gdn, row), conv and _one(conv, row))
            out = self._out(ops)
            self._call(ops, pools, out, row)
            found[row] = ChainRow(
                pools.recurrent[0, 0].to("cpu", copy=True),
                pools.conv[0, 0].to("cpu", copy=True),
                gdn_out=out.gdn if out.gdn is None else out.gdn[0].cpu(),
                conv_out=out.conv if out.conv is None else out.conv[0].cpu(),
            )
        return found

    def attention(self, layer: int, k: Tensor, v: Tensor) -> Chain:
        """Attention of one layer; k, v: committed keys and values bf16 `[prefix, Hkv, dh]`."""
        e, ops = self.entry, self._moved(self.entry.attention(layer))
        pools = self._pools(1, self.flat)
        pools.cache.k[0, : e.prefix], pools.cache.v[0, : e.prefix] = k, v
        found: Chain = {}
        for row in e.tree.active_rows:
            for step, above in enumerate(e.tree.path(row)[:-1]):
                key, value = found[above].k, found[above].v
                assert key is not None and value is not None
                pools.cache.k[0, e.prefix + step], pools.cache.v[0, e.prefix + step] = key, value
            one = StepOps(attention=_one(ops, row))
            out = self._out(one)
            self._call(one, pools, out, row)
            assert out.attention is not None
            at = int(e.tree.position[row])
            found[row] = ChainRow(
                k=pools.cache.k[0, at].to("cpu", copy=True),
                v=pools.cache.v[0, at].to("cpu", copy=True),
                attention_out=out.attention[0].cpu(),
            )
        return found

    def _moved(self, ops: Any) -> Any:
        return type(ops)(**{n: x.to(self.device) for n, x in vars(ops).items()})

    def _pools(self, slots: int, flat: int) -> Pools:
        d, c = self.record.dims, self.record.contract
        kv = (1, flat, d.kv_heads, d.head_dim)
        return Pools(
            self._empty((1, slots, *d.recurrent_shape(c.layout)), c.state_dtype),
            self._empty((1, slots, d.conv_channels, d.conv_width - 1)),
            KVCache(self._empty(kv), self._empty(kv)),
        )

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return poison_(torch.empty(shape, dtype=dtype, device=self.device))

    def _out(self, ops: StepOps) -> StepOut:
        d = self.record.dims
        shapes = {"gdn": (1, d.hv, d.dv), "conv": (1, d.conv_channels), "attention": (1, d.q_heads, d.head_dim)}
        return StepOut(**{s: self._empty(shape) for s, shape in shapes.items() if getattr(ops, s) is not None})

    def _call(self, ops: StepOps, pools: Pools, out: StepOut, row: int) -> None:
        batch = self.steps[int(self.entry.tree.depth[row])]
        call(self.backend, "native_step", f"cycle {self.record.sequence}", ops, pools, batch, out, 0)


def _one(ops: Any, row: int) -> Any:
    """The operands of one row; what all rows share stays."""
    return type(ops)(**{n: x if n in SHARED_OPERANDS else x[row : row + 1] for n, x in vars(ops).items()})
