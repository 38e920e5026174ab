"""The protocol that a kernel implements to be audited: a few methods, any subset of the surfaces.

A backend subclasses `BackendBase` (or merely looks like it) and writes the methods of the surfaces that its kernel
has. `lumotree.backends.loader` finds it by name, by `module:object` or by entry point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lumotree.contract import Contract, Dims
from lumotree.state import KVCache, Pools, State, canonical_state


@dataclass(frozen=True)
class GdnOps:
    """GDN inputs of a step. bf16 `q, k [T, HK, dk]`, `v [T, HV, dv]`, `a, b [T, HV]`; fp32 `A_log, dt_bias [HV]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True)
class ConvOps:
    """Convolution inputs of a step. bf16 `x [T, D]` before activation, `weight [D, W]`, oldest tap first."""

    x: Tensor
    weight: Tensor


@dataclass(frozen=True)
class AttentionOps:
    """Attention inputs of a step, before RoPE. bf16 `q [T, Hq, dh]`, `k, v [T, Hkv, dh]`.

    `cos, sin`: fp32 `[positions, rotary_dim / 2]`. The first `rotary_dim` channels rotate in half-split pairs
    (`x1 cos - x2 sin`, `x2 cos + x1 sin`) in fp32 and are rounded to bf16; the rest pass unchanged.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class StepOps:
    """Operands of one token for each request; a surface that the backend does not have is None."""

    gdn: GdnOps | None = None
    conv: ConvOps | None = None
    attention: AttentionOps | None = None


@dataclass(frozen=True)
class StepOut:
    """Outputs of one step, bf16, written in place: `gdn [T, HV, dv]`, `conv [T, D]`, `attention [T, Hq, dh]`."""

    gdn: Tensor | None = None
    conv: Tensor | None = None
    attention: Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """Device form of the trees' path plans (`Tree.plan`), shapes fixed by T so that a captured graph can be replayed.

    Row numbers are global (request offset included); all int32.
    path_rows `[T]`: rows of path 0, then of path 1, ...; -1 behind the last.
    path_ptr `[T + 1]`: path p owns `path_rows[path_ptr[p]:path_ptr[p + 1]]`; constant behind the last path.
    path_source `[T]`: row whose state the path starts from, -1 = the request's committed state.
    path_request `[T]`: request of the path.
    level_ptr `[max_levels + 1]`: level l owns paths `level_ptr[l]:level_ptr[l + 1]`; a level reads only cuts of earlier
    levels. cut_index `[T]`: position of a cut row's state in a buffer of cut states, -1 for other rows.
    """

    path_rows: Tensor
    path_ptr: Tensor
    path_source: Tensor
    path_request: Tensor
    level_ptr: Tensor
    cut_index: Tensor


@dataclass(frozen=True)
class Batch:
    """Metadata of one verification of B requests with T physical rows in all; not changed during a step.

    int32 unless said otherwise. cu_rows `[B + 1]` ragged; parent `[T]` local to the request, -1 = committed state
    (the root); active `[T]` bool; position `[T]` = prefix_len + depth; row_request `[T]`; state_slot `[B]`, padding
    -1; prefix_len `[B]` committed tokens; page_table `[B, max_pages]`, unused -1; row_slot `[T]` flat KV slot of each
    candidate. Position is never derived from a slot. Built by `lumotree.backends.batch`.
    """

    cu_rows: Tensor
    parent: Tensor
    active: Tensor
    position: Tensor
    row_request: Tensor
    state_slot: Tensor
    prefix_len: Tensor
    page_table: Tensor
    page_size: int
    row_slot: Tensor
    plan: Plan

    @property
    def requests(self) -> int:
        """B."""
        return int(self.state_slot.shape[0])

    @property
    def rows(self) -> int:
        """T."""
        return int(self.parent.shape[0])


@dataclass(frozen=True)
class Accepted:
    """Accepted path of each request: rows int32 `[B, Lmax]` local to the request, padding -1; length int32 `[B]`."""

    rows: Tensor
    length: Tensor


@dataclass(frozen=True)
class Limits:
    """What a workspace must be able to hold: requests, rows in all, rows of one path, pool slots, layers."""

    requests: int
    rows: int
    path: int
    slots: int
    layers: int


#: A backend's own scratch: any nest of dataclasses, dicts, lists and tensors, which the audit copies and restores.
Workspace = Any


@runtime_checkable
class Backend(Protocol):
    """The least a backend has; the methods of the surfaces (see BackendBase) are optional."""

    contract: Contract

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> Workspace:
        """Scratch that verify fills and publish reads."""
        ...

    def export(self, pools: Pools, ws: Workspace, slot: int, layer: int) -> State:
        """The slot's state in canonical form, anything deferred applied first."""
        ...


class BackendBase:
    """Defaults for an adapter. Write the methods of the surfaces that the kernel has; signatures:

    gdn_verify(ops: GdnOps, pool [L,S,..], batch, ws, out [T,HV,dv], layer)    pool is read-only
    gdn_publish(pool, batch, accepted, ws, layers)                             in place, live slots only
    conv_verify(ops: ConvOps, pool [L,S,D,W-1], batch, ws, out [T,D], layer)   pool is read-only
    conv_publish(pool, batch, accepted, ws, layers)
    attention_verify(ops: AttentionOps, cache, batch, ws, out [T,Hq,dh], layer) writes only the candidates' slots
    kv_publish(cache, batch, accepted, ws, layers)
    native_step(ops: StepOps, pools, batch, out: StepOut, layer)   one row a request, state and KV advanced in place

    Per-row operands and metadata are only there during the call: engines reuse their buffers. The audit overwrites the
    operands before it publishes and writes the next cycle's metadata where the last one's was, so a verify method
    records what its publish method needs, and a deferred publication records its batch. All tensors are contiguous.
    In native_step the row's KV goes to `batch.row_slot`, which is the committed slot of its position. Rows of
    inactive or padded requests (`state_slot == -1`, `length == 0`) touch nothing. `interpreted` says that the kernel
    runs under an interpreter here, so that the audit picks shapes that finish.
    """

    name: str = ""
    interpreted: bool = False
    contract: Contract = Contract()
    gdn_verify: Any = None
    gdn_publish: Any = None
    conv_verify: Any = None
    conv_publish: Any = None
    attention_verify: Any = None
    kv_publish: Any = None
    native_step: Any = None

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> Workspace:
        """An empty dict, enough for kernels that keep what they need there."""
        return {}

    def export(self, pools: Pools, ws: Workspace, slot: int, layer: int) -> State:
        """The pool's slot as it stands: right for every backend that defers nothing."""
        return canonical_state(pools, self.contract, slot, layer)


#: Surface -> (verify method, publish method).
SURFACES: dict[str, tuple[str, str]] = {
    "gdn": ("gdn_verify", "gdn_publish"),
    "conv": ("conv_verify", "conv_publish"),
    "attention": ("attention_verify", "kv_publish"),
}


#: Fields of the operand classes that are shared by all rows.
SHARED_OPERANDS = frozenset({"A_log", "dt_bias", "weight", "cos", "sin"})


def covered_surfaces(backend: Any) -> dict[str, tuple[bool, bool]]:
    """Surface -> (has verify, has publish)."""
    return {
        s: (callable(getattr(backend, v, None)), callable(getattr(backend, p, None))) for s, (v, p) in SURFACES.items()
    }


def complete_surfaces(backend: Any) -> list[str]:
    """Surfaces that a backend both verifies and publishes, in the order of SURFACES."""
    return [s for s, has in covered_surfaces(backend).items() if all(has)]


__all__ = [
    "SHARED_OPERANDS",
    "SURFACES",
    "Accepted",
    "AttentionOps",
    "Backend",
    "BackendBase",
    "Batch",
    "ConvOps",
    "GdnOps",
    "KVCache",
    "Limits",
    "Plan",
    "Pools",
    "Sequence",
    "State",
    "StepOps",
    "StepOut",
    "Workspace",
    "complete_surfaces",
    "covered_surfaces",
]
