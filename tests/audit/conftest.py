"""Fixtures of the engine's tests: small cases, and one way to ask which checks fail on a backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from audit.cases import CaseSpec
from audit.component import CaseResult, audit_case
from audit.families import DIMS_MICRO


def make_spec(**fields: object) -> CaseSpec:
    """A case of a six-row tree at micro shape with scattered slots; `fields` replace."""
    defaults = {"id": "case", "dims": DIMS_MICRO, "trees": ("comb:3",), "prefixes": (5,), "entropy": (7, 202, 1)}
    return CaseSpec(**(defaults | fields))


def failing(result: CaseResult) -> set[str]:
    """Ids of the checks with a cell outside, the reported-only ones left out."""
    return {t.check for t in result.tallies.failures() if not t.check.endswith(".paired")}


@pytest.fixture
def engine() -> SimpleNamespace:
    """spec(**fields) -> CaseSpec; run(backend, **fields) -> (failing checks, result); failing(result)."""

    def run(backend, **fields):
        result = audit_case(backend, make_spec(**fields))
        return failing(result), result

    return SimpleNamespace(spec=make_spec, run=run, failing=failing)
