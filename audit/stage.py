"""One backend on one case: verify, publish, rewind, with everything poisoned before and compared after."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from audit.calls import call
from audit.cases import Case
from audit.guard import Snapshot, poison_
from lumotree.backends.batch import accepted_paths
from lumotree.backends.protocol import (
    SHARED_OPERANDS,
    SURFACES,
    Accepted,
    AttentionOps,
    Batch,
    ConvOps,
    GdnOps,
    Limits,
    covered_surfaces,
)
from lumotree.errors import BackendError
from lumotree.state import State

Ops = GdnOps | ConvOps | AttentionOps


class Stage:
    """A backend's workspace and outputs for one case. The case's pools are changed and can be rewound.

    surfaces: those whose verify method the backend has.
    """

    def __init__(self, backend: Any, case: Case, surfaces: Sequence[str] | None = None) -> None:
        self.backend, self.case = backend, case
        covered = covered_surfaces(backend)
        self.surfaces = [s for s in SURFACES if covered[s][0] and (surfaces is None or s in surfaces)]
        self.publishes = [s for s in self.surfaces if covered[s][1]]
        d, rows = case.dims, case.batch.rows
        more = case.spec.slack  # engines allocate for the largest batch, not for this one
        self.limits = Limits(
            case.batch.requests + more, rows + more, self.longest + more, case.slots + more, d.layers + more
        )
        self.ws = self.allocate(self.limits)
        self.fresh = Snapshot(self.ws)
        shapes = {
            "gdn": (rows, d.hv, d.dv),
            "conv": (rows, d.conv_channels),
            "attention": (rows, d.q_heads, d.head_dim),
        }
        self.out: list[dict[str, Tensor]] = [
            {s: case.arena.empty(f"out.{s}[{layer}]", shapes[s], torch.bfloat16) for s in self.surfaces}
            for layer in range(d.layers)
        ]
        self._inputs = {"gdn": case.gdn, "conv": case.conv, "attention": case.attention, "batch": case.batch}
        self.inputs = Snapshot(self._inputs)
        self.expired: Snapshot | None = None
        self.before = Snapshot(case.pools)

    @property
    def longest(self) -> int:
        """Longest accepted path of the case; the same for all trees of one size, so that graphs can be replayed."""
        return max(t.n if self.case.spec.pad_rows else t.max_depth + 1 for t in self.case.trees)

    def operands(self, surface: str, layer: int) -> Ops:
        """Operands of a surface and layer."""
        by_surface: dict[str, Sequence[Ops]] = {
            "gdn": self.case.gdn,
            "conv": self.case.conv,
            "attention": self.case.attention,
        }
        return by_surface[surface][layer]

    def pool(self, surface: str) -> Any:
        """What the methods of a surface read and write."""
        p = self.case.pools
        return {"gdn": p.recurrent, "conv": p.conv, "attention": p.cache}[surface]

    def verify(self) -> None:
        """Poison the outputs, then verify every layer and surface; remembers the state to rewind to."""
        for layer, outs in enumerate(self.out):
            for surface in self.surfaces:
                self.run_verify(surface, layer, self.operands(surface, layer), self.case.batch, poison_(outs[surface]))
        self.verified = Snapshot(self.case.pools)
        self.recorded = Snapshot(self.ws)

    def run_verify(self, surface: str, layer: int, ops: Ops, batch: Batch, out: Tensor) -> None:
        """One verify call."""
        self._call(SURFACES[surface][0], ops, self.pool(surface), batch, self.ws, out, layer)

    def publish(self, paths: Sequence[Sequence[int]], layers: Iterable[int] | None = None) -> None:
        """Publish one accepted path for each live request, padding requests excepted, in all layers."""
        chosen = list(range(self.case.dims.layers)) if layers is None else list(layers)
        accepted = accepted_paths(self.case.in_batch_order(paths), self.case.device, self.longest)
        for surface in self.publishes:
            self.run_publish(surface, self.case.batch, accepted, chosen)

    def run_publish(self, surface: str, batch: Batch, accepted: Accepted, layers: Sequence[int]) -> None:
        """One publish call."""
        self._call(SURFACES[surface][1], self.pool(surface), batch, accepted, self.ws, layers)

    def rewind(self) -> None:
        """Back to the moment after verify, with the operands gone: the next layer's or cycle's lie where they lay."""
        self.verified.restore()
        self.recorded.restore()
        # Behind the workspace's restore: a workspace that kept a reference must not bring the operands back.
        self._expire_operands()

    def _expire_operands(self) -> None:
        for ops in (*self.case.gdn, *self.case.conv, *self.case.attention):
            for name, value in vars(ops).items():
                if name not in SHARED_OPERANDS:
                    poison_(value)
        if self.expired is None:
            self.expired = Snapshot(self._inputs)

    def reset(self) -> None:
        """Back to the moment before the first verify: pools, workspace, and inputs in case a backend changed them."""
        self.before.restore()
        self.inputs.restore()
        self.fresh.restore()

    def export(self, request: int, layer: int) -> State:
        """Canonical state of a request's slot. Raises BackendError when it does not have the canonical form."""
        state = self._call("export", self.case.pools, self.ws, self.case.state_slots[request], layer)
        d = self.case.dims
        want = {
            "recurrent": (torch.float32, (d.hv, d.dv, d.dk)),
            "conv": (torch.bfloat16, (d.conv_channels, d.conv_width - 1)),
        }
        for name, (dtype, shape) in want.items():
            got = getattr(state, name, None)
            if not isinstance(got, Tensor) or got.dtype != dtype or got.shape != shape:
                found = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
                raise BackendError(
                    f"case {self.case.spec.id}: export returned {name} {found}, expected {dtype} {list(shape)}"
                )
        return State(state.recurrent, state.conv)

    def allocate(self, limits: Limits) -> Any:
        """A workspace of the backend for this case."""
        return self._call("allocate", self.case.dims, limits, self.case.device)

    def _call(self, method: str, *args: Any) -> Any:
        return call(self.backend, method, self.case.spec.id, *args)
