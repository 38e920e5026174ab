"""Something to time: one verification of equal trees at full size, drawn on the device, each layer with its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lumotree.backends.batch import accepted_paths, build_batch, flat_slots
from lumotree.backends.protocol import Accepted, Batch, ConvOps, GdnOps, Limits
from lumotree.contract import Contract, Dims
from lumotree.errors import InputError
from lumotree.state import KVCache
from lumotree.tree import Tree
from lumotree.tree_named import named

_PREFIX, _PAGE = 40, 16


@dataclass(frozen=True)
class Scene:
    """`requests` requests, each with the named tree behind 40 committed tokens; operands and states are random.

    Nothing is poisoned or guarded: what runs here was audited elsewhere, or is compared by the caller.
    """

    dims: Dims
    tree: str
    requests: int
    device: torch.device
    seed: int = 1

    @cached_property
    def shape(self) -> Tree:
        """The tree, without slots."""
        return named(self.tree)

    @cached_property
    def longest(self) -> tuple[int, ...]:
        """Rows of the path to the deepest active row."""
        tree = self.shape
        return tree.path(max(tree.active_rows, key=lambda r: int(tree.depth[r])))

    @property
    def slots(self) -> int:
        """State slots, two of them free."""
        return self.requests + 2

    @property
    def limits(self) -> Limits:
        """What a workspace must hold."""
        rows = self.requests * self.shape.n
        return Limits(self.requests, rows, len(self.longest), self.slots, self.dims.layers)

    @cached_property
    def batch(self) -> Batch:
        """Metadata; candidates lie in pages of their own, states in slots of descending number."""
        need, spare = -(-(_PREFIX + self.shape.n + 1) // _PAGE), -(-self.shape.n // _PAGE)
        pages = torch.randperm(self.requests * (need + spare), generator=self._generator("cpu", 0)).to(torch.int32)
        table = pages.view(self.requests, need + spare)
        own = [flat_slots(table[:, need:], _PAGE, i, range(self.shape.n)).numpy() for i in range(self.requests)]
        trees = [Tree.make(self.shape.parents, active=self.shape.active, slots=s, prefix_len=_PREFIX) for s in own]
        return build_batch(
            trees, state_slots=list(range(self.slots - 1, 1, -1)), page_table=table[:, :need].contiguous(),
            page_size=_PAGE, device=self.device,
        )  # fmt: skip

    def accepted(self, rows: int) -> Accepted:
        """The first `rows` rows of every request's deepest path. Raises InputError when it has fewer."""
        if rows > len(self.longest):
            raise InputError(
                f"accepted rows: expected at most {len(self.longest)}, the deepest path of {self.tree}, got {rows}; "
                "take fewer or a deeper tree"
            )
        return accepted_paths([self.longest[:rows]] * self.requests, self.device, len(self.longest))

    @cached_property
    def gdn(self) -> list[GdnOps]:
        """Operands by layer, gates as a model is initialised."""
        d, rows, generator = self.dims, self.requests * self.shape.n, self._generator(self.device, 1)

        def bf16(*shape: int) -> Tensor:
            return self._normal(generator, rows, *shape).to(torch.bfloat16)

        def layer() -> GdnOps:
            rate = torch.rand(d.hv, generator=generator, device=self.device) * 15 + 1
            dt = 1e-3 * torch.exp(torch.rand(d.hv, generator=generator, device=self.device) * math.log(100))
            bias = dt + torch.log(-torch.expm1(-dt))
            heads = (bf16(d.hk, d.dk), bf16(d.hk, d.dk), bf16(d.hv, d.dv), bf16(d.hv), bf16(d.hv))
            return GdnOps(*heads, rate.log(), bias)

        return [layer() for _ in range(d.layers)]

    @cached_property
    def conv(self) -> list[ConvOps]:
        """Operands by layer."""
        d, rows, generator = self.dims, self.requests * self.shape.n, self._generator(self.device, 2)
        shapes = ((rows, d.conv_channels), (d.conv_channels, d.conv_width))
        return [ConvOps(*(self._normal(generator, *s).to(torch.bfloat16) for s in shapes)) for _ in range(d.layers)]

    def recurrent(self, contract: Contract) -> Tensor:
        """A new pool `[L, S, ..]` in the contract's layout and dtype, the same numbers every time."""
        shape = (self.dims.layers, self.slots, *self.dims.recurrent_shape("VK"))
        pool = self._normal(self._generator(self.device, 3), *shape).mul_(0.1)
        pool = pool if contract.layout == "VK" else pool.transpose(-1, -2).contiguous()
        return pool.to(contract.state_dtype)

    def histories(self) -> Tensor:
        """A new pool bf16 `[L, S, D, W - 1]`, the same numbers every time."""
        shape = (self.dims.layers, self.slots, self.dims.conv_channels, self.dims.conv_width - 1)
        return self._normal(self._generator(self.device, 4), *shape).to(torch.bfloat16)

    def cache(self, layers: int) -> KVCache:
        """A new cache of so many layers, the same numbers every time."""
        flat = int(max(self.batch.page_table.max(), self.batch.row_slot.max() // _PAGE) + 1) * _PAGE
        shape, generator = (layers, flat, self.dims.kv_heads, self.dims.head_dim), self._generator(self.device, 5)
        return KVCache(*(self._normal(generator, *shape).to(torch.bfloat16) for _ in range(2)))

    def _generator(self, device: torch.device | str, stream: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(1000 * self.seed + stream)

    def _normal(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.device)
