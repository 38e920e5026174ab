"""One backend out of three: any backend can serve any surface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.protocol import SURFACES, Accepted, BackendBase, Batch, Limits, StepOps, StepOut
from lumotree.contract import Dims
from lumotree.errors import BackendError
from lumotree.state import KVCache, Pools, State

Workspaces = dict[str, Any]


class MixedBackend(BackendBase):
    """GDN, convolution and attention each served by a backend of its own.

    The contract is the GDN backend's, with the convolution's and the attention's rounding variants taken from theirs.
    Raises BackendError for a backend that lacks the surface it is named for, or a one-token step.
    """

    def __init__(self, gdn: Any, conv: Any, attention: Any) -> None:
        self.parts = {"gdn": gdn, "conv": conv, "attention": attention}
        for surface, part in self.parts.items():
            for method in (*SURFACES[surface], "native_step"):
                if not callable(getattr(part, method, None)):
                    raise BackendError(f"mixed: expected {method} in the {surface} backend {_name(part)}, found none")
        self.name = "+".join(_name(part) for part in self.parts.values())
        self.interpreted = any(getattr(part, "interpreted", False) for part in self.parts.values())
        self.contract = replace(
            gdn.contract,
            conv=conv.contract.conv,
            probs=attention.contract.probs,
            algebra=tuple(s for s, part in self.parts.items() if part.contract.claim(s) == "algebra"),
            claims="bitwise",
            max_rows=min(part.contract.max_rows for part in self.parts.values()),
            trees=all(part.contract.trees for part in self.parts.values()),
            empty_path=all(part.contract.empty_path for part in self.parts.values()),
            graph_safe=all(part.contract.graph_safe for part in self.parts.values()),
        )

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> Workspaces:
        """One workspace a surface."""
        return {surface: part.allocate(dims, limits, device) for surface, part in self.parts.items()}

    def export(self, pools: Pools, ws: Workspaces | None, slot: int, layer: int) -> State:
        """The recurrent state as the GDN backend exports it, the history as the convolution's does."""
        gdn, conv = (self.parts[s].export(pools, None if ws is None else ws[s], slot, layer) for s in ("gdn", "conv"))
        return State(gdn.recurrent, conv.conv)

    def gdn_verify(self, ops: Any, pool: Tensor, batch: Batch, ws: Workspaces, out: Tensor, layer: int) -> None:
        """The GDN backend's."""
        self.parts["gdn"].gdn_verify(ops, pool, batch, ws["gdn"], out, layer)

    def gdn_publish(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Workspaces, layers: Sequence[int]
    ) -> None:
        """The GDN backend's."""
        self.parts["gdn"].gdn_publish(pool, batch, accepted, ws["gdn"], layers)

    def conv_verify(self, ops: Any, pool: Tensor, batch: Batch, ws: Workspaces, out: Tensor, layer: int) -> None:
        """The convolution backend's."""
        self.parts["conv"].conv_verify(ops, pool, batch, ws["conv"], out, layer)

    def conv_publish(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Workspaces, layers: Sequence[int]
    ) -> None:
        """The convolution backend's."""
        self.parts["conv"].conv_publish(pool, batch, accepted, ws["conv"], layers)

    def attention_verify(self, ops: Any, cache: KVCache, batch: Batch, ws: Workspaces, out: Tensor, layer: int) -> None:
        """The attention backend's."""
        self.parts["attention"].attention_verify(ops, cache, batch, ws["attention"], out, layer)

    def kv_publish(
        self, cache: KVCache, batch: Batch, accepted: Accepted, ws: Workspaces, layers: Sequence[int]
    ) -> None:
        """The attention backend's."""
        self.parts["attention"].kv_publish(cache, batch, accepted, ws["attention"], layers)

    def native_step(self, ops: StepOps, pools: Pools, batch: Batch, out: StepOut, layer: int) -> None:
        """Each surface by its own backend's one-token step."""
        for surface, part in self.parts.items():
            mine = getattr(ops, surface)
            if mine is not None:
                given = StepOps(**{surface: mine}), StepOut(**{surface: getattr(out, surface)})
                part.native_step(given[0], pools, batch, given[1], layer)


def _name(part: Any) -> str:
    return str(getattr(part, "name", "") or type(part).__name__)
