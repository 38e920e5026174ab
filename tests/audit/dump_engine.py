"""A small engine without a model: random operands, real backends, real publication; what the recorder is tested on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.protocol import AttentionOps, ConvOps, GdnOps, Limits
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Dims
from lumotree.recorder import Drafted, Recorder
from lumotree.state import KVCache, empty_pools
from lumotree.tree import Tree

DIMS = Dims(1, 2, 4, 6, 20, 2, 1, 8, 4, layers=2)
HIDDEN = 8
PAGE = 4
TREE = (-1, 0, 0, 1, 1, 3)
PATHS = ((0, 1, 3), (0, 2), (0, 1, 4), (0,))
PREFIX = 5


class Engine:
    """Two requests of `TREE`, cycle after cycle, recorded as they go. `backend`: what verifies and publishes."""

    def __init__(self, folder: Path, backend: Any = None, *, untouched: bool = True, spec: str = "torch") -> None:
        self.backend = backend or TorchBackend()
        self.generator = torch.Generator().manual_seed(7)
        self.pools = empty_pools(DIMS, self.backend.contract, 4, 40 * PAGE, "cpu")
        for pool in self.pools.tensors().values():
            pool.copy_(self.draw(*pool.shape).to(pool.dtype))
        self.draft = KVCache(*(self.draw(1, *self.pools.cache.k.shape[1:]) for _ in range(2)))
        self.recorder = Recorder(folder, self.backend.contract, DIMS, spec, untouched=untouched)
        self.ws = self.backend.allocate(DIMS, Limits(2, 12, 6, 4, 2), torch.device("cpu"))
        self.table = torch.tensor([[3, 7, 1, 9, 11, 13, 15, 17], [2, 8, 4, 6, 10, 12, 14, 16]], dtype=torch.int32)
        self.slots, self.length = [2, 0], [PREFIX, PREFIX + 2]
        self.pending = [1, 2]
        self.hidden = self.draw(2, HIDDEN)
        positions = 40
        angle = torch.arange(positions)[:, None] * torch.tensor([1.0, 0.1])
        self.cos, self.sin = angle.cos(), angle.sin()
        self.fixed = [(self.draw(20, 4), self.draw(2).float(), self.draw(2).float()) for _ in range(2)]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(torch.bfloat16)

    def trees(self) -> list[Tree]:
        scratch = range(20 * PAGE, 20 * PAGE + 12)
        tokens = torch.randint(0, 50, (2, 6), generator=self.generator)
        tokens[:, 0] = torch.tensor(self.pending)
        return [
            Tree.make(TREE, tokens=tokens[i].numpy(), slots=scratch[6 * i : 6 * i + 6], prefix_len=self.length[i])
            for i in range(2)
        ]

    def verify(self, backend: Any, batch: Any) -> None:
        rows = batch.rows
        for layer in range(DIMS.layers):
            weight, A_log, dt_bias = self.fixed[layer]
            out = [torch.zeros(s, dtype=torch.bfloat16) for s in ((rows, 2, 6), (rows, 20), (rows, 2, 8))]
            gdn = GdnOps(self.draw(rows, 1, 4), self.draw(rows, 1, 4), self.draw(rows, 2, 6), self.draw(rows, 2),
                         self.draw(rows, 2), A_log, dt_bias)  # fmt: skip
            attention = AttentionOps(self.draw(rows, 2, 8), self.draw(rows, 1, 8), self.draw(rows, 1, 8), self.cos,
                                     self.sin)  # fmt: skip
            backend.gdn_verify(gdn, self.pools.recurrent, batch, self.ws, out[0], layer)
            backend.conv_verify(ConvOps(self.draw(rows, 20), weight), self.pools.conv, batch, self.ws, out[1], layer)
            backend.attention_verify(attention, self.pools.cache, batch, self.ws, out[2], layer)

    def cycle(self, paths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        trees = self.trees()
        batch = build_batch(trees, state_slots=self.slots, page_table=self.table, page_size=PAGE)
        tokens = torch.cat([torch.as_tensor(t.tokens.copy()) for t in trees])
        names = ["a", "b"]
        drafted = Drafted(self.draft, self.hidden)
        cycle = self.recorder.begin(batch, tokens, self.pools, self.ws, self.backend, names, drafted)
        self.verify(cycle.watch(self.backend), batch)
        hidden = self.draw(12, HIDDEN)
        cycle.verified(hidden=hidden, logits=torch.zeros(12, 50))
        accepted = accepted_paths(paths)
        layers = list(range(DIMS.layers))
        self.backend.gdn_publish(self.pools.recurrent, batch, accepted, self.ws, layers)
        self.backend.conv_publish(self.pools.conv, batch, accepted, self.ws, layers)
        self.backend.kv_publish(self.pools.cache, batch, accepted, self.ws, layers)
        self.length = [n + len(p) for n, p in zip(self.length, paths, strict=True)]
        self.pending = torch.randint(0, 50, (2,), generator=self.generator).tolist()
        ends = [hidden[6 * i + p[-1]] if p else self.hidden[i] for i, p in enumerate(paths)]
        self.hidden = torch.stack(ends)
        cycle.end(accepted, torch.tensor(self.pending), torch.tensor(self.length), hidden=self.hidden)

    def run(self, cycles: int = 3) -> None:
        for i in range(cycles):
            self.cycle((PATHS[i % 4], PATHS[(i + 1) % 4]))
