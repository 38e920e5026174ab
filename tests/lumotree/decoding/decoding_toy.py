"""A hybrid model small enough for tests of logic: random, bitwise by construction, with a draft head.

Every product is an elementwise one summed by `halve`, so a row's bits depend on the row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.protocol import Accepted, AttentionOps, Batch, ConvOps, GdnOps, Limits, StepOps, StepOut
from lumotree.contract import Contract, Dims
from lumotree.cycle_types import Stack
from lumotree.model_types import Forward
from lumotree.state import KVCache, Pools
from lumotree.verifier import attention
from lumotree.verifier.step import halve

HK, HV, DK, DV, HQ, HKV, DH = 1, 2, 8, 4, 2, 1, 8
DIMS = Dims(HK, HV, DK, DV, 2 * HK * DK + HV * DV, HQ, HKV, DH, 4, layers=2, name="toy")
VOCAB, HIDDEN = 24, 16
KINDS = ("gdn", "attention", "gdn")
POSITIONS = 4096


def project(x: Tensor, weight: Tensor) -> Tensor:
    """bf16 `[T, out]` of bf16 `[T, in]` and fp32 `[out, in]`."""
    return halve(x.to(torch.float32)[:, None, :] * weight, -1).to(torch.bfloat16)


def _rope() -> tuple[Tensor, Tensor]:
    angle = torch.arange(POSITIONS)[:, None] / torch.tensor([1.0, 30.0])
    return torch.cos(angle).contiguous(), torch.sin(angle).contiguous()


class Toy:
    """A `LanguageModel`; forwards counts verifications and steps."""

    vocab, hidden_size, dims, device = VOCAB, HIDDEN, DIMS, torch.device("cpu")

    def __init__(self, seed: int = 0, kinds: Sequence[str] = KINDS) -> None:
        g = torch.Generator().manual_seed(seed)
        self.kinds = tuple(kinds)
        self.counts = self.kinds.count("gdn"), self.kinds.count("attention")

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        self.embedding = normal(VOCAB, HIDDEN).to(torch.bfloat16)
        self.unembedding = normal(VOCAB, HIDDEN) * 3
        sizes = {"gdn": DIMS.conv_channels + 2 * HV, "attention": (HQ + 2 * HKV) * DH}
        outs = {"gdn": HV * DV, "attention": HQ * DH}
        self.inputs = [normal(sizes[k], HIDDEN) * HIDDEN**-0.5 for k in kinds]
        self.outputs = [normal(HIDDEN, outs[k]) * 6 * outs[k] ** -0.5 for k in kinds]
        self.taps = [(normal(DIMS.conv_channels, 4) * 0.5).to(torch.bfloat16) for _ in kinds]
        self.A_log, self.dt_bias = normal(HV) - 1, normal(HV) - 2
        self.cos, self.sin = _rope()
        self.forwards = 0

    def empty_pools(self, contract: Contract, slots: int, flat_slots: int) -> Pools:
        gdn, attention = self.counts
        shape = (gdn, slots, *DIMS.recurrent_shape(contract.layout))
        cache = torch.zeros(attention, flat_slots, HKV, DH, dtype=torch.bfloat16)
        return Pools(
            torch.zeros(shape, dtype=contract.state_dtype),
            torch.zeros(gdn, slots, DIMS.conv_channels, 3, dtype=torch.bfloat16),
            KVCache(cache, cache.clone()),
        )

    def allocate(self, backend: Any, limits: Limits) -> Any:
        return backend.allocate(DIMS, limits, self.device)

    def verify(self, tokens: Tensor, batch: Batch, pools: Pools, ws: Any, backend: Any) -> Forward:
        def surface(name: str, ops: Any, out: Tensor, layer: int) -> None:
            if name == "gdn":
                backend.gdn_verify(ops, pools.recurrent, batch, ws, out, layer)
            elif name == "conv":
                backend.conv_verify(ops, pools.conv, batch, ws, out, layer)
            else:
                backend.attention_verify(ops, pools.cache, batch, ws, out, layer)

        return self._forward(tokens, surface)

    def publish(self, batch: Batch, accepted: Accepted, pools: Pools, ws: Any, backend: Any) -> None:
        backend.gdn_publish(pools.recurrent, batch, accepted, ws, range(self.counts[0]))
        backend.conv_publish(pools.conv, batch, accepted, ws, range(self.counts[0]))
        backend.kv_publish(pools.cache, batch, accepted, ws, range(self.counts[1]))

    def step(self, tokens: Tensor, batch: Batch, pools: Pools, backend: Any) -> Forward:
        def surface(name: str, ops: Any, out: Tensor, layer: int) -> None:
            backend.native_step(StepOps(**{name: ops}), pools, batch, StepOut(**{name: out}), layer)

        return self._forward(tokens, surface)

    def _forward(self, tokens: Tensor, surface: Any) -> Forward:
        self.forwards += 1
        x, seen = self.embedding[tokens], {"gdn": 0, "attention": 0}
        for index, kind in enumerate(self.kinds):
            z = project(x, self.inputs[index])
            layer = seen[kind]
            seen[kind] += 1
            mixed = self._gdn(z, index, layer, surface) if kind == "gdn" else self._attention(z, layer, surface)
            x = x + project(mixed, self.outputs[index])
        return Forward(halve(x.to(torch.float32)[:, None, :] * self.unembedding, -1), x)

    def _gdn(self, z: Tensor, index: int, layer: int, surface: Any) -> Tensor:
        rows, D = len(z), DIMS.conv_channels
        mixed = torch.zeros(rows, D, dtype=torch.bfloat16)
        surface("conv", ConvOps(z[:, :D].contiguous(), self.taps[index]), mixed, layer)
        q, k, v = mixed.split([HK * DK, HK * DK, HV * DV], -1)
        ops = GdnOps(
            q.reshape(rows, HK, DK).contiguous(), k.reshape(rows, HK, DK).contiguous(),
            v.reshape(rows, HV, DV).contiguous(), z[:, D : D + HV].contiguous(), z[:, D + HV :].contiguous(),
            self.A_log, self.dt_bias,
        )  # fmt: skip
        out = torch.zeros(rows, HV, DV, dtype=torch.bfloat16)
        surface("gdn", ops, out, layer)
        return out.reshape(rows, -1)

    def _attention(self, z: Tensor, layer: int, surface: Any) -> Tensor:
        rows = len(z)
        out = torch.zeros(rows, HQ, DH, dtype=torch.bfloat16)
        surface("attention", _qkv(z, self.cos, self.sin), out, layer)
        return out.reshape(rows, -1)


def _qkv(z: Tensor, cos: Tensor, sin: Tensor) -> AttentionOps:
    q, k, v = z.split([HQ * DH, HKV * DH, HKV * DH], -1)
    heads = [x.reshape(len(z), -1, DH).contiguous() for x in (q, k, v)]
    return AttentionOps(heads[0], heads[1], heads[2], cos, sin)


class ToyHead:
    """A `DraftHead` of the toy: one attention layer over embedding + hidden."""

    def __init__(self, model: Toy, seed: int = 100) -> None:
        g = torch.Generator().manual_seed(seed)
        self.model = model
        self.join = torch.randn(HIDDEN, 2 * HIDDEN, generator=g) * (2 * HIDDEN) ** -0.5
        self.into = torch.randn((HQ + 2 * HKV) * DH, HIDDEN, generator=g) * HIDDEN**-0.5
        self.out = torch.randn(HIDDEN, HQ * DH, generator=g) * (HQ * DH) ** -0.5

    def empty_cache(self, flat_slots: int) -> KVCache:
        cache = torch.zeros(1, flat_slots, HKV, DH, dtype=torch.bfloat16)
        return KVCache(cache, cache.clone())

    def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, cache: KVCache) -> Forward:
        x = project(torch.cat([self.model.embedding[tokens], hidden], -1), self.join)
        out = torch.zeros(len(tokens), HQ, DH, dtype=torch.bfloat16)
        attention.verify(_qkv(project(x, self.into), self.model.cos, self.model.sin), cache, batch, out, 0)
        x = x + project(out.reshape(len(tokens), -1), self.out)
        return Forward(halve(x.to(torch.float32)[:, None, :] * self.model.unembedding, -1), x)


def stack(backend: Any, seed: int = 0, head: bool = True, kinds: Sequence[str] = KINDS) -> Stack:
    """The toy on a backend."""
    model = Toy(seed, kinds)
    return Stack(model, backend, ToyHead(model) if head else None, identity=f"toy {seed}")


def prompts(count: int, length: int, seed: int = 5) -> list[tuple[int, ...]]:
    """Random prompts of lengths length, length + 3, ..."""
    g = torch.Generator().manual_seed(seed)
    sizes: Sequence[int] = [length + 3 * i for i in range(count)]
    return [tuple(torch.randint(VOCAB, (n,), generator=g).tolist()) for n in sizes]
