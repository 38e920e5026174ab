"""The surfaces of one request in a form that two decoders can be compared in: R, C, K and D of a prefix, nothing else.

Slots, pages and layouts are gone: recurrent matrices are `[HV, dv, dk]`, keys and values lie in position order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lumotree.backends.protocol import Workspace
from lumotree.contract import Contract
from lumotree.state import KVCache, Pools

_INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same bit by bit: surface R, C, K or D, part, layer within its kind, elements."""

    surface: str
    part: str
    layer: int
    elements: int
    of: int

    def __str__(self) -> str:
        return f"{self.surface} {self.part}, layer {self.layer}: {self.elements} of {self.of} elements differ"


@dataclass(frozen=True)
class Surfaces:
    """S(m) and D(m) of one request with m committed tokens; copies.

    recurrent: fp32 `[Lg, HV, dv, dk]`. conv: bf16 `[Lg, D, W-1]`. k, v: bf16 `[La, m, Hkv, dh]`, k rotated. draft_k,
    draft_v: bf16 `[m - 1, Hkv, dh]` (none for m = 0); hidden: bf16 `[H]`. The last three are None without a draft head,
    and hidden before the first token.
    """

    committed: int
    recurrent: Tensor
    conv: Tensor
    k: Tensor
    v: Tensor
    draft_k: Tensor | None = None
    draft_v: Tensor | None = None
    hidden: Tensor | None = None

    def parts(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """(surface, part, layer, tensor) of everything."""
        layered = (("R", "recurrent"), ("C", "conv"), ("K", "k"), ("K", "v"))
        for surface, part in layered:
            for layer, tensor in enumerate(getattr(self, part)):
                yield surface, part, layer, tensor
        for part in ("draft_k", "draft_v", "hidden"):
            tensor = getattr(self, part)
            if tensor is not None:
                yield "D", part, 0, tensor

    def differences(self, other: Surfaces, *, signed_zeros: bool = True) -> list[Difference]:
        """What is not bitwise equal; a part that only one of the two has, or of another shape, differs in full."""
        mine = {(s, p, n): tensor for s, p, n, tensor in self.parts()}
        theirs = {(s, p, n): tensor for s, p, n, tensor in other.parts()}
        found = []
        for key in sorted(mine.keys() | theirs.keys(), key=_order):
            a, b = mine.get(key), theirs.get(key)
            size = max(t.numel() for t in (a, b) if t is not None)
            count = size if a is None or b is None else _unequal(a, b, signed_zeros)
            if count:
                found.append(Difference(*key, elements=count, of=size))
        return found

    def cells(self) -> int:
        """How many tensors `differences` compares."""
        return sum(1 for _ in self.parts())


def _order(key: tuple[str, str, int]) -> tuple[int, str, int]:
    return "RCKD".index(key[0]), key[1], key[2]


def bits(x: Tensor) -> Tensor:
    """The bit patterns of a bf16 or fp32 tensor, as integers."""
    return x.contiguous().view(_INTEGERS[x.dtype])


def _unequal(a: Tensor, b: Tensor, signed_zeros: bool) -> int:
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel())
    if not signed_zeros:
        a, b = a + 0.0, b + 0.0  # -0 + 0 is +0; every other value keeps its bits
    return int((bits(a) != bits(b.to(a.device))).sum())


def read_surfaces(
    backend: Any,
    pools: Pools,
    ws: Workspace,
    slot: int,
    flat: NDArray[np.int64],
    draft: KVCache | None = None,
    hidden: Tensor | None = None,
    start: int = 0,
) -> Surfaces:
    """The surfaces of the request in `slot`; flat: flat KV slots of its committed positions start..m - 1, in order.

    With start > 0, keys, values and draft entries are those from `start` on only.
    """
    states = [backend.export(pools, ws, slot, layer) for layer in range(pools.recurrent.shape[0])]
    place = torch.from_numpy(flat).to(pools.cache.k.device)
    early = place[: max(len(flat) - 1, 0)]
    return Surfaces(
        committed=start + len(flat),
        recurrent=torch.stack([s.recurrent for s in states]),
        conv=torch.stack([s.conv for s in states]),
        k=pools.cache.k[:, place],  # indexing by a tensor copies
        v=pools.cache.v[:, place],
        draft_k=None if draft is None else draft.k[0, early],
        draft_v=None if draft is None else draft.v[0, early],
        hidden=None if hidden is None else hidden.clone(),
    )


def write_surfaces(
    contract: Contract, pools: Pools, slot: int, flat: NDArray[np.int64], saved: Surfaces, draft: KVCache | None
) -> None:
    """Put surfaces into a slot and the flat slots of m positions, in place; `hidden` is the caller's."""
    recurrent = saved.recurrent.transpose(-1, -2) if contract.layout == "KV" else saved.recurrent
    pools.recurrent[:, slot] = recurrent.to(pools.recurrent)
    pools.conv[:, slot] = saved.conv.to(pools.conv)
    place = torch.from_numpy(flat).to(pools.cache.k.device)
    pools.cache.k[:, place] = saved.k.to(pools.cache.k)
    pools.cache.v[:, place] = saved.v.to(pools.cache.v)
    if draft is not None and saved.draft_k is not None and saved.draft_v is not None:
        early = place[: max(len(flat) - 1, 0)]
        draft.k[0, early] = saved.draft_k.to(draft.k)
        draft.v[0, early] = saved.draft_v.to(draft.v)
