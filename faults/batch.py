"""Faults of metadata and padding: what belongs to another cycle, or to rows that do not count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from faults.catalogue import Fault, Faulty, deeper_than_root, has_inactive
from lumotree.backends.batch import replan
from lumotree.backends.protocol import SHARED_OPERANDS, SURFACES, Batch


def cycle_before(batch: Batch) -> Batch:
    """Metadata as the cycle before would have left it: a star of the same size, every position one earlier."""
    parent = torch.where(batch.parent < 0, batch.parent, torch.zeros_like(batch.parent))
    old = replan(batch, parent)
    return replace(old, position=torch.clamp(old.position - 1, min=0))


def _stale_metadata(surface: str) -> Fault:
    verify = SURFACES[surface][0]

    def wrap(inner: Any) -> Faulty:
        def method(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            getattr(inner, verify)(ops, pool, cycle_before(batch), ws, out, layer)

        return Faulty(inner, **{verify: method})

    def reaches(trees: Any) -> bool:
        return any(t.max_depth > 1 for t in trees) if surface != "attention" else deeper_than_root(trees)

    return Fault(
        f"stale_metadata.{surface}",
        "verification runs with parents and positions of the cycle before",
        surface,
        "verify",
        "defect-classes C1, C7; design-failures 12, 20",
        reaches,
        wrap,
    )


def _poisoned_inactive(surface: str) -> Fault:
    verify = SURFACES[surface][0]

    def wrap(inner: Any) -> Faulty:
        def method(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            getattr(inner, verify)(with_nan_rows(ops, batch), pool, batch, ws, out, layer)

        return Faulty(inner, **{verify: method})

    return Fault(
        f"poisoned_inactive.{surface}",
        "operands of inactive rows are NaN, which must not matter",
        surface,
        "verify",
        "contract section 1; defect-classes E4; design-failures 16",
        has_inactive,
        wrap,
        expect="harmless",
    )


def with_nan_rows(ops: Any, batch: Batch) -> Any:
    """The operands with every per-row value of an inactive row set to NaN."""

    def poisoned(x: Tensor) -> Tensor:
        keep = batch.active.view(-1, *[1] * (x.dim() - 1))
        return torch.where(keep, x, torch.full_like(x, float("nan")))

    return replace(ops, **{k: v if k in SHARED_OPERANDS else poisoned(v) for k, v in vars(ops).items()})


FAULTS = [*(_stale_metadata(s) for s in SURFACES), *(_poisoned_inactive(s) for s in SURFACES)]
