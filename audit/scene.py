"""What a case offers to the faults that could be put into it."""

from __future__ import annotations

from audit.cases import Case
from faults.reach import Scene


def scene_of(case: Case) -> Scene:
    """The facts of a case that decide which faults it reaches."""
    spec = case.spec
    return Scene(
        trees=case.trees,
        dims=case.dims,
        contract=case.contract,
        regime=spec.regime,
        page_size=spec.page_size,
        state_slots=tuple(case.state_slots),
        slots=case.slots,
        padding=spec.padding,
        overlap=spec.placement != "scattered",
    )
