"""Reported as defects, but right: the emitted law is the target's. They must pass."""

from __future__ import annotations

from dataclasses import replace

from faults.sampler_fault import SamplerFault
from faults.sampler_types import Change, StepSource
from lumotree.select import NAIVE
from lumotree.select_types import CoinSampler, Step


def as_point_masses(step: Step, source: StepSource | None = None) -> Step:
    """Every draft is taken for a point mass: q = 1 in the accept test, its p zeroed after a refusal."""
    return replace(step, laws=None)


def sample_and_match(sampler: CoinSampler) -> CoinSampler:
    """Draw the target's token, accept a child that carries it."""
    return NAIVE


FAULTS = [
    SamplerFault(
        "deterministic_q_one",
        "q is 1 in the accept test and p is zeroed at the drafted token after a refusal",
        "defect-classes X1",
        "laws",
        Change(rows=as_point_masses),
        expect="harmless",
    ),
    SamplerFault(
        "sample_and_match",
        "a child is accepted iff it carries the token that was drawn from the target",
        "defect-classes X2",
        "arithmetic",
        Change(rule=sample_and_match),
        expect="harmless",
    ),
]
