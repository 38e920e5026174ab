"""Faults of metadata and padding: what belongs to another cycle, or to rows that do not count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from faults.catalogue import Fault
from faults.wrap import on_verify
from lumotree.backends.batch import replan
from lumotree.backends.protocol import SHARED_OPERANDS, SURFACES, Batch


def cycle_before(batch: Batch) -> Batch:
    """Metadata as the cycle before would have left it: a star of the same size, every position one earlier."""
    parent = torch.where(batch.parent < 0, batch.parent, torch.zeros_like(batch.parent))
    old = replan(batch, parent)
    return replace(old, position=torch.clamp(old.position - 1, min=0))


def with_nan_rows(ops: Any, batch: Batch) -> Any:
    """The operands with every per-row value of an inactive row set to NaN."""

    def poisoned(x: Tensor) -> Tensor:
        keep = batch.active.view(-1, *[1] * (x.dim() - 1))
        return torch.where(keep, x, torch.full_like(x, float("nan")))

    return replace(ops, **{k: v if k in SHARED_OPERANDS else poisoned(v) for k, v in vars(ops).items()})


def _stale_metadata(surface: str) -> Fault:
    needs = ("depth>=1",) if surface == "attention" else ("depth>=2",)
    statement = "verification runs with parents and positions of the cycle before"
    wrap = on_verify(surface, batch=cycle_before)
    return Fault(f"stale_metadata.{surface}", statement, surface, "verify", ("C1", "C7", "I8", "DF12", "DF20"), needs,
                 wrap)  # fmt: skip


def _poisoned_inactive(surface: str) -> Fault:
    return Fault(
        f"poisoned_inactive.{surface}",
        "operands of inactive rows are NaN, which must not matter",
        surface,
        "verify",
        ("E4", "B10", "DF16"),
        ("inactive",),
        on_verify(surface, ops=with_nan_rows),
        expect="harmless",
        section="contract section 1",
        proof="inactive rows never influence an active row and their outputs are unspecified (contract section 1)",
    )


FAULTS = [*(_stale_metadata(s) for s in SURFACES), *(_poisoned_inactive(s) for s in SURFACES)]
