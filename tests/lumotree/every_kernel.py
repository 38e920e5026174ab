"""Every kernel of a backend once - verify, publish, native step of all surfaces - on pools of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.protocol import AttentionOps, Batch, ConvOps, GdnOps, Limits, StepOps, StepOut
from lumotree.contract import Dims
from lumotree.state import KVCache, Pools
from lumotree.tree import Tree

PAGE = 16
#: What every element of a pool holds that is nobody's.
FILLED = 7.0


@dataclass(frozen=True)
class Place:
    """Where requests live. state_slots: one a request; first_page: of the pages used; slots, conv_slots, pages: sizes
    of the pools, the states' and the histories' each with its own."""

    state_slots: tuple[int, ...]
    slots: int
    conv_slots: int
    first_page: int
    pages: int


class EveryKernel:
    """One scene: `run` calls each kernel, `touched` is what may have changed, `rest_is_filled` whether nothing else
    did. The same seed draws the same operands and states wherever they lie."""

    def __init__(
        self, backend: Any, dims: Dims, trees: Sequence[Tree], prefix: int, place: Place, device: str, seed: int = 3
    ) -> None:
        self.backend, self.dims, self.place, self.device = backend, dims, place, torch.device(device)
        self.draws = torch.Generator().manual_seed(seed)
        self.table, self.trees, last = self._laid_out(trees, prefix)
        self.flat = slice(place.first_page * PAGE, last * PAGE)
        self.batch = self._batch(self.trees)
        self.ops = [self._operands(prefix + max(t.n for t in trees) + 4) for _ in range(dims.layers)]
        self.pools = self._filled()
        self.paths = [t.path(max(t.leaves, key=lambda r: int(t.depth[r]))) for t in self.trees]
        self.longest = max(int(t.max_depth) + 1 for t in self.trees)
        limits = Limits(len(trees), self.batch.rows, self.longest, max(place.slots, place.conv_slots), dims.layers)
        self.ws = backend.allocate(dims, limits, self.device)

    def _laid_out(self, trees: Sequence[Tree], prefix: int) -> tuple[Tensor, list[Tree], int]:
        need = [-(-(prefix + t.n + 1) // PAGE) for t in trees]
        table = torch.full((len(trees), max(need)), -1, dtype=torch.int32)
        page, laid = self.place.first_page, []
        for request, (tree, pages) in enumerate(zip(trees, need, strict=True)):
            table[request, :pages] = torch.arange(page, page + pages, dtype=torch.int32)
            first = (page + pages) * PAGE
            page += pages - (-tree.n // PAGE)
            slots = range(first, first + tree.n)
            total = self.place.pages * PAGE
            laid.append(Tree.make(tree.parents, active=tree.active, slots=slots, num_slots=total, prefix_len=prefix))
        assert page <= self.place.pages
        return table, laid, page

    def _batch(self, trees: Sequence[Tree]) -> Batch:
        slots = list(self.place.state_slots)
        return build_batch(trees, state_slots=slots, page_table=self.table, page_size=PAGE, device=self.device)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draws).to(self.device)

    def _bf16(self, *shape: int) -> Tensor:
        return self._randn(*shape).to(torch.bfloat16)

    def _operands(self, positions: int) -> StepOps:
        d, rows = self.dims, self.batch.rows
        gates = self._bf16(rows, d.hv), self._bf16(rows, d.hv), self._randn(d.hv), self._randn(d.hv)
        keys = self._bf16(rows, d.hk, d.dk), self._bf16(rows, d.hk, d.dk), self._bf16(rows, d.hv, d.dv)
        heads = [self._bf16(rows, n, d.head_dim) for n in (d.q_heads, d.kv_heads, d.kv_heads)]
        angle = torch.arange(positions)[:, None] * torch.rand(d.rotary_dim // 2, generator=self.draws)[None]
        turned = angle.cos().to(self.device), angle.sin().to(self.device)
        conv = ConvOps(self._bf16(rows, d.conv_channels), self._bf16(d.conv_channels, d.conv_width))
        return StepOps(GdnOps(*keys, *gates), conv, AttentionOps(*heads, *turned))

    def _filled(self) -> Pools:
        d, place = self.dims, self.place

        def full(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((d.layers, *shape), FILLED, dtype=dtype, device=self.device)

        kv = [full(torch.bfloat16, place.pages * PAGE, d.kv_heads, d.head_dim) for _ in range(2)]
        states = full(torch.float32, place.slots, d.hv, d.dv, d.dk)
        histories = full(torch.bfloat16, place.conv_slots, d.conv_channels, d.conv_width - 1)
        for layer in range(d.layers):
            for slot in place.state_slots:
                states[layer, slot] = self._randn(d.hv, d.dv, d.dk)
                histories[layer, slot] = self._bf16(d.conv_channels, d.conv_width - 1)
            for x in kv:
                x[layer, self.flat] = self._bf16(self.flat.stop - self.flat.start, d.kv_heads, d.head_dim)
        return Pools(states, histories, KVCache(kv[0], kv[1]))

    def run(self) -> list[Tensor]:
        """Outputs of verification, and of a native step behind the published path; pools change."""
        b, pools, layers = self.backend, self.pools, range(self.dims.layers)
        outs = [self._outputs(self.batch.rows) for _ in layers]
        for layer, (ops, out) in enumerate(zip(self.ops, outs, strict=True)):
            b.gdn_verify(ops.gdn, pools.recurrent, self.batch, self.ws, out.gdn, layer)
            b.conv_verify(ops.conv, pools.conv, self.batch, self.ws, out.conv, layer)
            b.attention_verify(ops.attention, pools.cache, self.batch, self.ws, out.attention, layer)
        accepted = accepted_paths(self.paths, self.device, self.longest)
        b.gdn_publish(pools.recurrent, self.batch, accepted, self.ws, layers)
        b.conv_publish(pools.conv, self.batch, accepted, self.ws, layers)
        b.kv_publish(pools.cache, self.batch, accepted, self.ws, layers)
        outs += self._native()
        return [x for out in outs for x in vars(out).values()]

    def _native(self) -> list[StepOut]:
        ones = []
        for tree, path, pages in zip(self.trees, self.paths, self.table.tolist(), strict=True):
            at = int(tree.prefix_len) + len(path)
            slot = pages[at // PAGE] * PAGE + at % PAGE
            ones.append(Tree.make([-1], slots=[slot], num_slots=self.place.pages * PAGE, prefix_len=at))
        batch, outs = self._batch(ones), []
        for layer, ops in enumerate(self.ops):
            outs.append(self._outputs(len(ones)))
            self.backend.native_step(self._roots(ops), self.pools, batch, outs[-1], layer)
        return outs

    def _outputs(self, rows: int) -> StepOut:
        d = self.dims
        shapes = (d.hv, d.dv), (d.conv_channels,), (d.q_heads, d.head_dim)
        return StepOut(*(torch.zeros(rows, *s, dtype=torch.bfloat16, device=self.device) for s in shapes))

    def _roots(self, ops: StepOps) -> StepOps:
        """Operands of each request's first row."""
        first = self.batch.cu_rows[:-1].long()

        def cut(part: Any, names: str) -> Any:
            return replace(part, **{name: getattr(part, name)[first].contiguous() for name in names})

        return StepOps(cut(ops.gdn, "qkvab"), cut(ops.conv, "x"), cut(ops.attention, "qkv"))

    def touched(self) -> list[Tensor]:
        """States, histories and pages of the requests."""
        p, slots = self.pools, list(self.place.state_slots)
        return [p.recurrent[:, slots], p.conv[:, slots], p.cache.k[:, self.flat], p.cache.v[:, self.flat]]

    def rest_is_filled(self) -> bool:
        """Whether every other element still holds what it was filled with."""
        p, slots = self.pools, set(self.place.state_slots)
        pages = set(range(self.flat.start, self.flat.stop))
        named = ((p.recurrent, slots), (p.conv, slots), (p.cache.k, pages), (p.cache.v, pages))
        return all(_changed(layer) <= allowed for pool, allowed in named for layer in pool)


def _changed(layer: Tensor) -> set[int]:
    return set((layer.flatten(1) != FILLED).any(1).nonzero().flatten().tolist())


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether all tensors agree in every bit."""
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(one, other, strict=True))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)
