"""Launches of `gdn.cu`: verification of a layer, publication of many, the native step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.protocol import Accepted, Batch, GdnOps, Limits
from lumotree.contract import Dims
from lumotree.errors import BackendError
from lumotree.verifier.cuda.build import Spec, Tile, kernel
from lumotree.verifier.kernels import launch
from lumotree.verifier.kernels.gdn import check_ops
from lumotree.verifier.kernels.workspace import GdnWorkspace

MAX_ROWS = 1024
_GRID_LIMIT = 65535
_POINTERS = (
    "q", "k", "v", "a", "b", "a_log", "dt_bias", "pool", "spill", "out", "rec_k", "rec_v", "rec_a", "rec_b",
    "rec_a_log", "rec_dt_bias", "state_slot", "cu_rows", "parent", "active", "accepted_rows", "accepted_length",
)  # fmt: skip
_INTEGERS = ("layer", "slots", "rec_rows", "accepted_width", "capacity", "requests", "parts")


class Arguments(ctypes.Structure):
    """`Args` of gdn.cu."""

    _fields_ = [*((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int) for name in _INTEGERS)]


@cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block may have."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the attribute
        return int(properties.shared_memory_per_block_optin)
    return 227 << 10


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


#: Work of a block by use, measured on an H200 at 27B. "verify" is for grids that leave multiprocessors idle, where a
#: warp's own parallelism counts; "verify_many" for larger ones, where blocks share a multiprocessor.
_TILES = {
    "verify": Tile(3, 4, 3, 32, 1),
    "verify_many": Tile(3, 8, 1, 32, 2, planner=False, lean=True),
    "publish": Tile(4, 4, 1, 16, 3, part=6),
    "native": Tile(3, 4, 0, 8, 1),
}


@cache
def spec(use: str, hk: int, hv: int, dk: int, dv: int, vector: bool, device: torch.device) -> Spec:
    """The compilation for a use and shape: fewer slabs where the registers hold no more, fewer pending states in shared
    memory where it holds no more.

    Raises BackendError when a block does not fit even without pending states.
    """
    limit, tile = shared_limit(device), _TILES[use]
    if dk > 128:
        tile = replace(tile, slabs=1, resident=1)
    for stack in range(tile.stack, -1, -1):
        found = Spec(use.removesuffix("_many"), hk, hv, dk, dv, replace(tile, stack=stack), vector)
        if found.shared_bytes(MAX_ROWS) <= limit:
            return found
    raise BackendError(
        f"cuda gdn: a block for hk={hk}, hv={hv}, dk={dk}, dv={dv} needs {found.shared_bytes(MAX_ROWS)} bytes of "
        f"shared memory; this card allows {limit}; use --backend triton"
    )


def spill_states(found: Spec, rows: int) -> int:
    """States that the trees of a batch of so many rows can have pending beyond shared memory (SPILL_ROWS)."""
    return rows // (3 * (2 << found.tile.stack) - 1)


def allocate_spill(dims: Dims, limits: Limits, device: torch.device) -> Tensor:
    """fp32 `[states, elements]`; compiles the kernels that batches of this size use, so that a later call need not."""
    shape = (dims.hk, dims.hv, dims.dk, dims.dv, _vectorisable(dims.dk, dims.dv), device)
    few, many = spec("verify", *shape), spec("verify_many", *shape)
    crowded = few.blocks * limits.requests > multiprocessors(device)
    for found in (many if crowded else few, spec("publish", *shape), spec("native", *shape)):
        kernel(found, device)
    walks = (few, many) if crowded else (few,)  # a crowded workspace serves small batches, too
    states = max(spill_states(found, limits.rows) for found in walks)
    elements = max(found.blocks * found.state_bytes // 4 for found in walks)
    launch.check_memory("spill", 4 * states * elements, device)
    return torch.zeros((states, elements), dtype=torch.float32, device=device)


def _vectorisable(dk: int, dv: int) -> bool:
    return dk % 8 == 0 and dv % 4 == 0


def _run(
    mode: str, pool: Tensor, batch: Batch, operands: Sequence[Tensor], hk: int, *, layer: int, layers: int,
    spill: Tensor | None = None, out: Tensor | None = None, record: Sequence[Tensor] = (),
    accepted: Accepted | None = None,
) -> None:  # fmt: skip
    slots, hv, dv, dk = pool.shape[1:]
    if not (batch.requests and layers):
        return
    wide = [x for x in (*operands[:3], *record[:2]) if x.numel()]
    vector = _vectorisable(dk, dv) and all(x.data_ptr() % 16 == 0 for x in wide)
    found = spec(mode, hk, hv, dk, dv, vector, pool.device)
    small = found.blocks * batch.requests <= multiprocessors(pool.device)
    if mode == "verify" and not small:
        found = spec("verify_many", hk, hv, dk, dv, vector, pool.device)
    capacity = min(batch.rows, MAX_ROWS) if mode == "verify" else 0
    launch.check_limit("gdn", "requests", batch.requests, _GRID_LIMIT)
    launch.check_limit("gdn", "layers", layers, _GRID_LIMIT)
    tensors = dict(zip(_POINTERS[:7], operands, strict=True))
    tensors |= dict(zip(_POINTERS[10:16], record, strict=False))
    tensors |= {"pool": pool, "state_slot": batch.state_slot, "cu_rows": batch.cu_rows}
    tensors |= {"parent": batch.parent, "active": batch.active}
    if accepted is not None:
        tensors |= {"accepted_rows": accepted.rows, "accepted_length": accepted.length}
    for name, x in (("spill", spill), ("out", out)):
        if x is not None:
            tensors[name] = x
    arguments = Arguments(**{name: x.data_ptr() for name, x in tensors.items()})
    arguments.layer, arguments.slots, arguments.capacity = layer, slots, capacity
    arguments.rec_rows = record[0].shape[1] if record else operands[1].shape[-3]
    arguments.accepted_width = accepted.rows.shape[1] if accepted is not None else 0
    arguments.requests, arguments.parts = batch.requests, found.parts * batch.requests * layers
    grid = (found.blocks, batch.requests, layers)
    if mode == "publish":
        grid = (min(arguments.parts, found.tile.resident * multiprocessors(pool.device)), 1, 1)
    shared = found.shared_bytes(capacity)
    if mode == "verify" and small:
        # A second block on a multiprocessor would leave another one idle.
        shared = max(shared, shared_limit(pool.device) // 2 + 1)
    kernel(found, pool.device).launch(grid, shared, arguments)


def _operands(ops: GdnOps) -> list[Tensor]:
    return [ops.q, ops.k, ops.v, ops.a, ops.b, ops.A_log, ops.dt_bias]


def _record(ws: GdnWorkspace) -> list[Tensor]:
    return [ws.k, ws.v, ws.a, ws.b, ws.a_log, ws.dt_bias]


def verify(ops: GdnOps, pool: Tensor, batch: Batch, ws: GdnWorkspace, out: Tensor, layer: int) -> None:
    """Outputs of all tree rows from the committed states, operands recorded; `pool` is only read. One launch."""
    check_ops(ops, pool, batch, out, layer)
    launch.check_layers("gdn workspace", [layer], ws.k.shape[0])
    launch.check_limit("gdn workspace", "rows", batch.rows, ws.k.shape[1])
    _run(
        "verify", pool, batch, _operands(ops), ops.k.shape[1], layer=layer, layers=1, spill=ws.cut, out=out,
        record=_record(ws),
    )  # fmt: skip


def publish(pool: Tensor, batch: Batch, accepted: Accepted, ws: GdnWorkspace, layers: Sequence[int]) -> None:
    """Replay the accepted rows from the recorded operands, in place in the pool. One launch a run of layers."""
    launch.check_device(pool)
    launch.check_tensors("gdn", torch.float32, [("pool", pool)])
    launch.check_aligned("gdn", "pool", pool)
    launch.check_layers("gdn", layers, min(pool.shape[0], ws.k.shape[0]))
    operands = [ws.k, *_record(ws)]
    for first, count in launch.runs(layers):
        _run("publish", pool, batch, operands, ws.k.shape[2], layer=first, layers=count, accepted=accepted)


def native(ops: GdnOps, pool: Tensor, batch: Batch, out: Tensor, layer: int) -> None:
    """One token of each request, state advanced in place."""
    check_ops(ops, pool, batch, out, layer)
    _run("native", pool, batch, _operands(ops), ops.k.shape[1], layer=layer, layers=1, out=out)
