"""Cases: what is drawn, from which seed, laid out how. Calibration and held-out cases share nothing but named trees."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from audit.guard import Arena
from audit.operands import REGIMES, Drawn, Source
from lumotree.backends.batch import build_batch, flat_slots
from lumotree.backends.protocol import AttentionOps, Batch, ConvOps, GdnOps
from lumotree.contract import Contract, Dims
from lumotree.errors import ContractError
from lumotree.state import KVCache, Pools
from lumotree.tree import Tree
from lumotree.tree_named import named, random_tree

#: First word of a case's seed entropy: the two sets can not share a stream whatever the user's seed.
SPLITS = {"calibration": 101, "heldout": 202, "fixed": 303}


@dataclass(frozen=True)
class CaseSpec:
    """Everything that determines a case, as plain data.

    trees: names as `lumotree.tree_named.named` reads them, or "random:N"; one request each. prefixes: committed length
    of each request. placement: candidates' KV slots "scattered" over free pages, or "inplace" at the slots of the
    positions behind the prefix, where source and destination of the KV move overlap, or "shuffled", the same slots in
    random order, where no order of moving one row at a time is right. padding: padding requests of the batch, where
    `padding_at` says: "end", "start" or "middle" (behind half of the live requests). spare_slots: free state slots
    beyond the live ones. slack: by how much each limit of a workspace is larger than the batch needs. unit: whether
    the case is a unit of the envelope. control: whether positive controls run on it.
    """

    id: str
    dims: Dims
    trees: tuple[str, ...]
    prefixes: tuple[int, ...]
    entropy: tuple[int, ...]
    regime: str = "random"
    page_size: int = 1
    placement: str = "scattered"
    padding: int = 0
    padding_at: str = "end"
    spare_slots: int = 2
    slack: int = 0
    pad_rows: int = 0
    inactive_fraction: float = 0.0
    unit: bool = False
    control: bool = False
    set_index: int = 0
    instance: int = 0

    def digest_fields(self) -> dict[str, object]:
        """What enters the hash of a case family."""
        return asdict(self)


def family_sha256(specs: Iterable[CaseSpec]) -> str:
    """SHA-256 over the specs of a family of cases, in order."""
    text = json.dumps([s.digest_fields() for s in specs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _pad(tree: Tree, rows: int) -> Tree:
    """The tree with inactive rows appended up to `rows` physical rows (fixed shapes for captured graphs)."""
    extra = max(rows - tree.n, 0)
    return Tree.make([*tree.parents.tolist(), *[0] * extra], active=[*tree.active.tolist(), *[False] * extra])


class Case:
    """A spec made real on a device for one contract: guarded pools, operands, metadata; poison where nothing lives."""

    def __init__(self, spec: CaseSpec, contract: Contract, device: torch.device | str = "cpu") -> None:
        self.spec, self.contract, self.dims = spec, contract, spec.dims
        self.device = torch.device(device)
        self.arena = Arena(self.device)
        rng = np.random.default_rng(np.random.SeedSequence([*spec.entropy, 1]))
        shapes = [self._shape(name, rng) for name in spec.trees]
        self.page_table, slots, self.flat_slots = self._pages(shapes, rng)
        self.trees = [
            Tree.make(t.parents, active=t.active, slots=s, num_slots=self.flat_slots, prefix_len=p)
            for t, s, p in zip(shapes, slots, spec.prefixes, strict=True)
        ]
        self.slots = len(self.trees) + spec.spare_slots
        self.state_slots = self._state_slots(rng)
        self._fill([self._draw(layer) for layer in range(self.dims.layers)])
        self.batch = self._guarded(self.metadata())

    @cached_property
    def order(self) -> list[int | None]:
        """Live request at each place of the batch; None is a padding request."""
        count, padding = len(self.spec.trees), [None] * self.spec.padding
        places = {"end": count, "start": 0, "middle": count // 2}
        if self.spec.padding_at not in places:
            raise ContractError(
                f"case {self.spec.id}: unknown padding_at {self.spec.padding_at!r}; known: {', '.join(places)}"
            )
        at = places[self.spec.padding_at]
        return [*range(at), *padding, *range(at, count)]

    def batch_index(self, request: int) -> int:
        """Place in the batch of a live request."""
        return self.order.index(request)

    def in_batch_order(self, paths: Sequence[Sequence[int]], fill: Sequence[int] = ()) -> list[Sequence[int]]:
        """One entry for each request of the batch: that of the live request, `fill` for padding."""
        return [fill if i is None else paths[i] for i in self.order]

    def metadata(self) -> Batch:
        """A new batch of the case's trees, slots and pages, padding requests in their places."""
        padding = torch.full((1, self.page_table.shape[1]), -1, dtype=torch.int32)
        return build_batch(
            [None if i is None else self.trees[i] for i in self.order],
            state_slots=[-1 if i is None else self.state_slots[i] for i in self.order],
            page_table=torch.cat([padding if i is None else self.page_table[i : i + 1] for i in self.order]),
            page_size=self.spec.page_size,
            device=self.device,
        )

    def _shape(self, name: str, rng: np.random.Generator) -> Tree:
        kind, _, size = name.partition(":")
        tree = random_tree(rng, int(size), self.spec.inactive_fraction) if kind == "random" else named(name)
        if tree.n > self.contract.max_rows:
            raise ContractError(
                f"case {self.spec.id}: tree {name} has {tree.n} rows, allowed: {self.contract.max_rows}"
            )
        return _pad(tree, self.spec.pad_rows)

    def _pages(self, trees: list[Tree], rng: np.random.Generator) -> tuple[Tensor, list[list[int]], int]:
        """Shuffled page table, candidates' flat slots, and number of flat slots."""
        size = self.spec.page_size
        need = [-(-(p + t.n + 1) // size) for p, t in zip(self.spec.prefixes, trees, strict=True)]
        spare = [-(-t.n // size) for t in trees]
        pages = rng.permutation(sum(need) + sum(spare) + 2).tolist()
        table = torch.full((len(trees), max(need)), -1, dtype=torch.int32)
        slots = []
        for i, tree in enumerate(trees):
            table[i, : need[i]] = torch.tensor([pages.pop() for _ in range(need[i])], dtype=torch.int32)
            own = [pages.pop() for _ in range(spare[i])]
            free = rng.permutation([p * size + o for p in own for o in range(size)])[: tree.n]
            follow = flat_slots(table, size, i, range(self.spec.prefixes[i], self.spec.prefixes[i] + tree.n))
            placed = {"scattered": free, "inplace": follow.numpy(), "shuffled": rng.permutation(follow.numpy())}
            slots.append(placed[self.spec.placement].tolist())
        return table, slots, (sum(need) + sum(spare) + 2) * size

    def _state_slots(self, rng: np.random.Generator) -> list[int]:
        """Live slots: never the identity, slot 0 among them when padding might be clamped to it."""
        count, padding = len(self.trees), bool(self.spec.padding)
        while True:
            order: list[int] = rng.permutation(self.slots)[:count].tolist()
            identity = order == list(range(count)) and not (padding and count == 1)  # one request: slot 0 it must be
            if not identity and (not padding or 0 in order):
                return order

    def _draw(self, layer: int) -> Drawn:
        positions = max(t.prefix_len + t.n for t in self.trees) + 2
        source = Source((*self.spec.entropy, 2, layer))
        if self.spec.regime not in REGIMES:
            raise ContractError(
                f"case {self.spec.id}: unknown regime {self.spec.regime!r}; known: {', '.join(REGIMES)}"
            )
        return REGIMES[self.spec.regime](source, self.dims, self.trees, self.spec.regime, positions)

    def _fill(self, drawn: list[Drawn]) -> None:
        d, c, layers = self.dims, self.contract, self.dims.layers
        kv = (layers, self.flat_slots, d.kv_heads, d.head_dim)
        bf16 = torch.bfloat16
        recurrent_shape = (layers, self.slots, *d.recurrent_shape(c.layout))
        self.pools = Pools(
            self.arena.empty("pool.recurrent", recurrent_shape, c.state_dtype),
            self.arena.empty("pool.conv", (layers, self.slots, d.conv_channels, d.conv_width - 1), bf16),
            KVCache(self.arena.empty("cache.k", kv, bf16), self.arena.empty("cache.v", kv, bf16)),
        )
        for layer, x in enumerate(drawn):
            for i, slot in enumerate(self.state_slots):
                state = x.recurrent[i] if c.layout == "VK" else x.recurrent[i].transpose(-1, -2)
                self.pools.recurrent[layer, slot] = state.to(c.state_dtype).to(self.device)
                self.pools.conv[layer, slot] = x.conv_history[i].to(self.device)
                where = self.committed(i, range(self.trees[i].prefix_len))
                self.pools.cache.k[layer, where] = x.prefix_k[i].to(self.device)
                self.pools.cache.v[layer, where] = x.prefix_v[i].to(self.device)
        self.gdn = [GdnOps(**self._copies(f"gdn[{n}]", x.gdn)) for n, x in enumerate(drawn)]
        self.conv = [ConvOps(**self._copies(f"conv[{n}]", x.conv)) for n, x in enumerate(drawn)]
        self.attention = [AttentionOps(**self._copies(f"attention[{n}]", x.attention)) for n, x in enumerate(drawn)]

    def _copies(self, prefix: str, ops: GdnOps | ConvOps | AttentionOps) -> dict[str, Tensor]:
        for name, value in vars(ops).items():
            if not torch.isfinite(value).all():
                raise ContractError(f"case {self.spec.id}: expected finite operands, got a non-finite {prefix}.{name}")
        return {name: self.arena.copy(f"{prefix}.{name}", value) for name, value in vars(ops).items()}

    def _guarded(self, batch: Batch) -> Batch:
        """The same metadata between guards, so that a kernel which writes to it is seen."""
        copies = {k: self.arena.copy(f"batch.{k}", v) for k, v in vars(batch).items() if isinstance(v, Tensor)}
        return Batch(**{**vars(batch), **copies})

    def committed(self, request: int, positions: Iterable[int]) -> Tensor:
        """Flat KV slots of committed positions of a request."""
        return flat_slots(self.page_table, self.spec.page_size, request, list(positions)).to(self.device)

    @cached_property
    def offsets(self) -> list[int]:
        """First global row of each request."""
        return [0, *np.cumsum([t.n for t in self.trees]).tolist()]

    @cached_property
    def active(self) -> Tensor:
        """Active rows of the batch, bool `[T]`, on the device."""
        return torch.cat([torch.as_tensor(t.active.copy()) for t in self.trees]).to(self.device)
