"""Any backend for any surface: one backend put together from several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.protocol import SURFACES, Accepted, Batch, Limits, StepOps, StepOut, covered_surfaces
from lumotree.contract import Contract, Dims
from lumotree.errors import BackendError
from lumotree.state import Pools, State


@dataclass
class Parts:
    """Workspaces of the parts, by surface."""

    by_surface: dict[str, Any]


class Composite:
    """Serves each surface with its own backend, verification, publication and one-token step alike.

    parts: surface -> backend, all surfaces of `SURFACES`. Raises BackendError for a part that lacks the surface.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        for surface, backend in parts.items():
            if not all(covered_surfaces(backend)[surface]) or not callable(getattr(backend, "native_step", None)):
                raise BackendError(
                    f"backend {getattr(backend, 'name', backend)!r} cannot serve {surface}: expected "
                    f"{', '.join(SURFACES[surface])} and native_step"
                )
            verify, publish = SURFACES[surface]
            setattr(self, verify, self._verify(surface, verify))
            setattr(self, publish, self._publish(surface, publish))
        self.name = "+".join(dict.fromkeys(str(getattr(b, "name", "?")) for b in parts.values()))
        self.contract = _contract(parts)

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> Parts:
        """Each part's own workspace."""
        return Parts({s: b.allocate(dims, limits, device) for s, b in self.parts.items()})

    def _verify(self, surface: str, method: str) -> Any:
        def call(ops: Any, pool: Any, batch: Batch, ws: Parts, out: Tensor, layer: int) -> None:
            getattr(self.parts[surface], method)(ops, pool, batch, ws.by_surface[surface], out, layer)

        return call

    def _publish(self, surface: str, method: str) -> Any:
        def call(pool: Any, batch: Batch, accepted: Accepted, ws: Parts, layers: Sequence[int]) -> None:
            getattr(self.parts[surface], method)(pool, batch, accepted, ws.by_surface[surface], layers)

        return call

    def native_step(self, ops: StepOps, pools: Pools, batch: Batch, out: StepOut, layer: int) -> None:
        """Each surface by its own backend's step."""
        for surface in SURFACES:
            own = getattr(ops, surface)
            if own is not None:
                part = StepOut(**{surface: getattr(out, surface)})
                self.parts[surface].native_step(StepOps(**{surface: own}), pools, batch, part, layer)

    def export(self, pools: Pools, ws: Parts | None, slot: int, layer: int) -> State:
        """The recurrent state as its backend exports it, the convolution history as that of the convolution does."""
        mine = {s: None if ws is None else ws.by_surface[s] for s in ("gdn", "conv")}
        recurrent = self.parts["gdn"].export(pools, mine["gdn"], slot, layer).recurrent
        return State(recurrent, self.parts["conv"].export(pools, mine["conv"], slot, layer).conv)


def _contract(parts: Mapping[str, Any]) -> Contract:
    """The recurrence's contract, with what the others declare of their own surface."""
    base: Contract = parts["gdn"].contract
    return replace(
        base,
        claims="bitwise",
        algebra=tuple(s for s, b in parts.items() if b.contract.claim(s) == "algebra"),
        conv=parts["conv"].contract.conv,
        probs=parts["attention"].contract.probs,
        max_rows=min(b.contract.max_rows for b in parts.values()),
        trees=all(b.contract.trees for b in parts.values()),
        empty_path=all(b.contract.empty_path for b in parts.values()),
        graph_safe=False,
    )
